"""The engine as a server that speaks OpenAI's API (lesson 9): `python -m pagewise.engine.serve`.

It needs the extra `serve`, and a model with a tokenizer. `app.make_app(llm, name=…)` is the ASGI application.
"""
