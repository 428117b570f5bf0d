"""The engine as a server that speaks OpenAI's API (lesson 9): `python -m pagewise.engine.serve`.

    client = openai.OpenAI(base_url="http://127.0.0.1:8000/v1", api_key="none")
    client.completions.create(model="tiny", prompt="Attention is", extra_body={"top_k": 20})

It needs the extra `serve`, and a model with a tokenizer. `app.make_app(llm, name=…)` is the ASGI application. Several
processes share the model under torchrun, or with `--tensor-parallel N`.
"""
