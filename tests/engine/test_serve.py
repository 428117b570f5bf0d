"""The server as its clients see it: the official client, a plain one, and clients that hang up."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

import httpx
from serving import COMPLETION, head, serving, soon, tiny_llm

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.serve.__main__ import main
from pagewise.engine.serve.app import make_app
from pagewise.engine.serve.bodies import ChatBody, CompletionBody
from pagewise.models import tiny_model

# errors and speed as users see them; the engine's own tests check its annotations
pytestmark = pytest.mark.usefixtures("shapes_unchecked")

PROMPT = "The block table of a sequence "
GREEDY = SamplingParams(max_tokens=12, temperature=0.0)


@pytest.fixture(scope="module")
def reference():
    """Return an LLM outside of any server."""
    return tiny_llm()


@pytest.fixture(scope="module")
def server():
    with serving(tiny_llm(), max_queue=8) as server:
        yield server
        assert server.becomes_idle()


@pytest.fixture
def slow(server, monkeypatch):
    """Make each step take at least 50 ms. Then 400 steps take longer than a test waits."""
    step = server.llm.step
    monkeypatch.setattr(server.llm, "step", lambda: time.sleep(0.05) or step())


# ------------------------------------------------------------------------------------------------ answers


@pytest.mark.slow
@pytest.mark.parametrize(
    "prompt",
    ["Attention", ["Attention", "A block"], [65, 116, 116], [[65, 116], [66]]],
    ids=["text", "texts", "ids", "lists"],
)
def test_a_completion_is_what_generate_gives(server, reference, prompt):
    answer = server.client.completions.create(model="tiny", prompt=prompt, max_tokens=12, temperature=0)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    outputs = reference.generate(prompt if several else [prompt], GREEDY)
    assert [choice.text for choice in answer.choices] == [output.text for output in outputs]
    assert [choice.finish_reason for choice in answer.choices] == [output.finish_reason for output in outputs]
    assert [choice.index for choice in answer.choices] == list(range(len(outputs)))
    assert answer.usage.prompt_tokens == sum(len(output.prompt_token_ids) for output in outputs)
    assert answer.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_is_the_whole_in_pieces(server, reference):
    prompts = [PROMPT, "Softmax"]
    (*chunks, last) = server.client.completions.create(
        model="tiny", prompt=prompts, max_tokens=12, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    outputs = reference.generate(prompts, GREEDY)
    texts, reasons = ["", ""], [None, None]
    for (choice,) in (chunk.choices for chunk in chunks):
        texts[choice.index] += choice.text
        reasons[choice.index] = reasons[choice.index] or choice.finish_reason
    assert texts == [output.text for output in outputs]
    assert reasons == [output.finish_reason for output in outputs]
    assert len(chunks) > 12  # as it comes, not at the end
    assert last.choices == []
    assert last.usage.completion_tokens == sum(len(output.token_ids) for output in outputs)


def test_a_whole_answer_is_in_the_order_of_its_prompts_and_needs_no_pieces(server, reference, monkeypatch):
    step, pieces, prompts = server.llm.step, [], ["A", "B", "C"]

    def last_one_first():
        outputs = step()[::-1]
        pieces.extend(server.engine._events)
        return outputs

    monkeypatch.setattr(server.llm, "step", last_one_first)
    answer = server.post("/v1/completions", {"prompt": prompts, "max_tokens": 12, "temperature": 0})
    outputs = reference.generate(prompts, GREEDY)
    assert [(c["index"], c["text"]) for c in answer.json()["choices"]] == [(i, o.text) for i, o in enumerate(outputs)]
    assert pieces == []


def test_a_stream_ends_with_done_and_counts_only_when_asked(server):
    body = {"prompt": "A", "max_tokens": 3, "stream": True}
    answer = server.post("/v1/completions", body)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    assert all("usage" not in json.loads(event.removeprefix("data: ")) for event in events)


def test_a_conversation_becomes_a_plain_prompt_without_a_template(server, reference):
    messages = [{"role": "system", "content": "Blocks."}, {"role": "user", "content": [{"type": "text", "text": "Hi"}]}]
    (output,) = reference.generate(["system: Blocks.\nuser: Hi\nassistant:"], GREEDY)
    chat = server.client.chat.completions
    whole = chat.create(model="tiny", messages=messages, max_completion_tokens=12, temperature=0)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content == output.text
    chunks = list(chat.create(model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True))
    assert [chunk.choices[0].delta.role for chunk in chunks] == ["assistant"] + [None] * (len(chunks) - 1)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == output.text
    assert chunks[-1].choices[0].finish_reason == output.finish_reason


def test_a_chat_goes_on_to_the_end_of_the_context_by_default(server):
    messages = [{"role": "user", "content": "A" * 490}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "ignore_eos": True})
    assert answer.json()["usage"]["total_tokens"] == server.llm.model.config.max_position_embeddings == 512


def test_samples_with_a_seed_are_those_of_generate(server, reference):
    own = {"top_k": 20, "min_p": 0.02, "repetition_penalty": 1.2}
    options = {"max_tokens": 8, "temperature": 0.8, "top_p": 0.9, "n": 2, "seed": 7}
    options |= {"presence_penalty": 0.5, "frequency_penalty": -0.5}
    outputs = reference.generate([PROMPT, "Softmax"], SamplingParams(**options, **own))
    expected = [[choice.text for choice in output.choices] for output in outputs]
    assert len({text for texts in expected for text in texts}) == 4
    ask = server.client.completions.create
    whole = ask(model="tiny", prompt=[PROMPT, "Softmax"], **options, extra_body=own)
    assert [choice.text for choice in whole.choices] == [text for texts in expected for text in texts]
    texts = [""] * 4
    for chunk in ask(model="tiny", prompt=[PROMPT, "Softmax"], **options, extra_body=own, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [text for one in expected for text in one]


def test_beams_are_choices(server, reference):
    (output,) = reference.generate([PROMPT], SamplingParams(max_tokens=8, beam_width=3))
    body = {"prompt": PROMPT, "max_tokens": 8, "beam_width": 3}
    assert [c["text"] for c in server.post("/v1/completions", body).json()["choices"]] == [
        choice.text for choice in output.choices
    ]


def test_stop_strings_end_a_text(server, reference):
    text = reference.generate([PROMPT], GREEDY)[0].text
    stop = text[5:8]
    answer = server.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=12, temperature=0, stop=[stop])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"


def test_logprobs_are_those_of_generate(server, reference):
    (output,) = reference.generate([PROMPT], SamplingParams(max_tokens=4, temperature=0.0, logprobs=3))
    expected = [next(iter(one.values())) for one in output.logprobs[0]]
    options = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "logprobs": 3}
    logprobs = server.client.completions.create(**options).choices[0].logprobs
    assert "".join(logprobs.tokens) == output.text
    assert logprobs.token_logprobs == pytest.approx(expected, abs=1e-4)
    assert [max(top, key=top.get) for top in logprobs.top_logprobs] == logprobs.tokens  # it is greedy
    assert all(len(top) == 3 for top in logprobs.top_logprobs)
    streamed = [chunk.choices[0].logprobs for chunk in server.client.completions.create(**options, stream=True)]
    assert [lp for one in streamed if one for lp in one.token_logprobs] == pytest.approx(expected, abs=1e-4)


def test_a_chats_logprobs_name_each_token_and_its_rivals(server):
    answer = server.client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "Hi"}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
    )
    content = answer.choices[0].logprobs.content
    assert len(content) == answer.usage.completion_tokens
    for one in content:
        assert [one.token, one.logprob] == [one.top_logprobs[0].token, one.top_logprobs[0].logprob]
        assert one.top_logprobs[0].logprob > one.top_logprobs[1].logprob
        assert bytes(one.bytes).decode() == one.token


def test_usage_says_what_the_prefix_cache_had(server):
    prompt = "Each sequence has a block table; block tables may share blocks."
    first, second = (server.client.completions.create(model="tiny", prompt=prompt, max_tokens=1) for _ in range(2))
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    assert second.usage.prompt_tokens_details.cached_tokens == (len(prompt) - 1) // 16 * 16


def test_models_and_health(server):
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").object == "model"
    assert server.http.get("/health").json() == {"status": "ok", "running": 0, "waiting": 0, "step_seconds": 0}


# ------------------------------------------------------------------------------------------------ refusals

CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


A_FIELD = {  # values that a completion of "A" does not take
    "max_tokens": [0, "16", 1.5, True],
    "temperature": [-1, "hot", 1e7],
    "top_p": [0, 1.5],
    "top_k": [-2],
    "min_p": [2],
    "n": [0, 65],
    "stop": [5, "", [None], ["x"] * 17, "x" * 257],
    "seed": ["x", 2**64],
    "logprobs": [True, 21],
    "stream": ["yes"],
    "stream_options": [1],
    "repetition_penalty": [0, 1e-40],
    "frequency_penalty": [2.5],
    "presence_penalty": ["high"],
    "min_tokens": [-1, 17],
    "logit_bias": [{"1": 101}, {"x": 1}, {"-1": 1}, {"257": 1}, {"1": "much"}, {str(i): 1 for i in range(1025)}],
    "best_of": [2],
    "echo": ["yes"],
    "max_tokns": [4],
}
PROMPTS = [None, "", [], [[]], ["A", 1], [1.5], [True], [257], [-1], [10**30], "A" * 600]
PROMPTS += [["A", ""], ["A"] * 9]  # the first is not computed either; more than the queue holds
MESSAGES = ["Hi", [], [{"role": "user"}], [{"role": "tool", "content": "Hi"}], HI * 4097]
MESSAGES += [[{"role": "user", "content": content}] for content in ([{"type": "image_url"}], "A" * 600)]
NOT_JSON = [b"", b"{", b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000]
REFUSED = [  # the path, the body, the field that the answer names
    *((COMPLETION, body, None) for body in (*NOT_JSON, [], "prompt")),
    *((COMPLETION, {"prompt": "A", field: value}, field) for field, values in A_FIELD.items() for value in values),
    *((COMPLETION, {"prompt": prompt}, "prompt") for prompt in PROMPTS),
    (COMPLETION, {}, "prompt"),
    (COMPLETION, b'{"prompt": "A", "temperature": NaN}', "temperature"),
    (COMPLETION, {"prompt": "A", "n": 3, "temperature": 0}, "n"),
    (COMPLETION, {"prompt": "A", "n": 2, "beam_width": 2}, "beam_width"),
    (COMPLETION, {"prompt": "A", "beam_width": 2**62}, "n"),
    (COMPLETION, {"prompt": "A", "max_tokens": 2**62}, "prompt"),
    *((CHAT, {"messages": messages}, "messages") for messages in MESSAGES),
    (CHAT, {}, "messages"),
    (CHAT, {"messages": HI, "max_completion_tokens": 0}, "max_tokens"),
    (CHAT, {"messages": HI, "top_logprobs": 2}, "top_logprobs"),
    (CHAT, {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, "response_format"),
]


@pytest.mark.parametrize(
    ("path", "body", "field"),
    REFUSED,
    ids=lambda value: None if value in (COMPLETION, CHAT) else str(value)[:40],
)
def test_a_body_that_does_not_fit_names_its_field(server, path, body, field):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field), error
    assert error["type"] == "invalid_request_error"
    if field is not None:
        assert field in error["message"] or field in ("prompt", "messages")
    assert len(error["message"]) < 500


def test_options_of_openai_that_change_nothing_are_taken(server):
    neutral = {"logit_bias": {}, "tools": [], "stop": None}
    neutral |= {"response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"}, "store": False}
    messages = [{"role": "user", "content": "Hi"}]
    answer = server.client.chat.completions.create(model="tiny", messages=messages, max_tokens=2, **neutral)
    assert answer.choices[0].message.content is not None


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/v1/nothing", 404), ("GET", COMPLETION, 405), ("GET", "/v1/models/gpt", 404)],
)
def test_a_wrong_address_is_refused_in_openais_form(server, method, path, status):
    answer = server.http.request(method, path)
    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_another_model_is_not_here(server):
    import openai  # takes half a second, and every worker collects this module

    with pytest.raises(openai.NotFoundError, match=r"'gpt'.*'tiny'") as refusal:
        server.client.completions.create(model="gpt", prompt="A")
    assert refusal.value.param == "model"


@pytest.mark.parametrize("kind", ["text", "ids", "texts", "chat"])
def test_a_large_body_does_not_hold_up_who_is_served(server, monkeypatch, kind):
    """While a body is tokenised, counted and refused, steps are computed and others are answered."""
    path, body = {
        "text": (COMPLETION, {"prompt": "A" * 510}),
        "ids": (COMPLETION, {"prompt": [65] * 1_700_000}),
        "texts": (COMPLETION, {"prompt": ["A"] * 7, "stop_token_ids": [-1]}),
        "chat": (CHAT, {"messages": [{"role": "user", "content": "A" * 500}]}),
    }[kind]
    steps, others, step = [], [], server.llm.step
    monkeypatch.setattr(server.llm, "step", lambda: steps.append(None) or time.sleep(0.01) or step())

    def watched(requests):
        def meanwhile(*arguments):
            begun = len(steps)
            others.append(soon(lambda: len(steps) > begun + 2) and server.http.get("/metrics").status_code)
            return requests(*arguments)

        return meanwhile

    served = {"prompt": "A", "max_tokens": 400, "stream": True, "ignore_eos": True}
    with server.http.stream("POST", COMPLETION, json=served):
        for endpoint in (CompletionBody, ChatBody):
            monkeypatch.setattr(endpoint, "requests", watched(endpoint.requests))
        assert server.post(path, json.dumps(body).encode()).status_code == 400
    assert others == [200]
    assert server.becomes_idle()


def test_a_body_without_end_is_cut_off(server):
    answer = server.post(COMPLETION, b" " * (2**23 + 1))
    assert answer.status_code == 413


# ------------------------------------------------------------------------------------------------ hanging up, failing


def test_a_full_queue_answers_429(server, slow):
    with server.client.completions.create(
        model="tiny", prompt=["A"] * 7, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    ):
        assert soon(lambda: server.engine.num_held == 7)
        answer = server.post(COMPLETION, {"prompt": ["A", "B"]})
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["type"] == "invalid_request_error"
        assert server.post(COMPLETION, {"prompt": "A", "max_tokens": 1}).status_code == 200  # the eighth
    assert server.becomes_idle()


def test_one_that_hangs_up_before_it_is_heard_is_not_computed(server, monkeypatch):
    added, go = [], threading.Event()
    add = server.llm.add
    monkeypatch.setattr(server.llm, "add", lambda request: added.append(request.prompt) or add(request))
    step = server.llm.step
    monkeypatch.setattr(server.llm, "step", lambda: (go.wait(10), step())[1])
    first = threading.Thread(target=server.post, args=(COMPLETION, {"prompt": "A", "max_tokens": 2}))
    first.start()
    assert soon(lambda: server.llm.has_unfinished)  # and its step waits
    server.hang_up({"prompt": "B"}, when=lambda: server.engine.num_held == 2)
    assert soon(lambda: server.engine.num_held == 1)
    go.set()
    first.join()
    assert server.becomes_idle()
    assert added == [[ord("A")]]


def test_a_step_that_fails_fails_its_requests_only(monkeypatch):
    with serving(tiny_llm(num_blocks=64, max_num_seqs=2)) as server, ThreadPoolExecutor() as threads:
        run, failures = server.llm.runner.run, iter([RuntimeError("boom")])
        monkeypatch.setattr(server.llm.runner, "run", lambda chunks: raise_next(failures) or run(chunks))
        go = threading.Event()
        server.engine._jobs.submit(go.wait)
        answers = []
        for number, prompt in enumerate("ABC"):  # two run, one waits
            answers.append(threads.submit(server.post, COMPLETION, {"prompt": prompt}))
            assert soon(lambda number=number: server.engine._jobs._work_queue.qsize() == number + 1)
        go.set()
        first, second, third = (answer.result() for answer in answers)
        assert [first.status_code, second.status_code, third.status_code] == [500, 500, 200]
        error = {"message": "RuntimeError: boom", "type": "server_error", "param": None, "code": None}
        assert first.json()["error"] == error
        assert server.becomes_idle()


def raise_next(errors):
    for error in errors:
        raise error


def test_a_step_that_cannot_begin_fails_who_waits_longest(server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.scheduler, "schedule", lambda: 1 / 0)
        assert server.post(COMPLETION, {"prompt": ["A", "B"]}).status_code == 500
    assert server.post(COMPLETION, {"prompt": "A"}).status_code == 200
    assert server.becomes_idle()


def test_a_request_that_ended_in_a_failing_step_is_told_of_in_the_next(server, monkeypatch):
    step, failures = server.llm._step, iter([RuntimeError("boom")])
    monkeypatch.setattr(server.llm, "_step", lambda: (step(), raise_next(failures)))
    assert server.post(COMPLETION, {"prompt": "A", "max_tokens": 1}).status_code == 200
    assert server.post(COMPLETION, {"prompt": "A", "max_tokens": 1}).status_code == 200
    assert server.becomes_idle()


def test_a_fault_of_the_servers_own_bookkeeping_ends_the_server(monkeypatch):
    with serving(tiny_llm()) as server:
        monkeypatch.setattr(server.engine.metrics, "end", lambda *_, **options: 1 / 0)
        server.hang_up({"prompt": "A", "max_tokens": 1}, when=lambda: server.engine.lost)


def test_a_step_that_fails_ends_a_stream_with_an_error(server, monkeypatch):
    import openai

    run, count = server.llm.runner.run, iter(range(100))
    monkeypatch.setattr(server.llm.runner, "run", lambda chunks: run(chunks) if next(count) != 3 else 1 / 0)
    stream = server.client.completions.create(model="tiny", prompt="A", stream=True, extra_body={"ignore_eos": True})
    with pytest.raises(openai.APIError, match="ZeroDivisionError"):
        list(stream)
    assert server.becomes_idle()


@pytest.mark.slow
def test_a_reader_that_does_not_read_holds_up_nobody(server):
    """Its unread events wait in its answer, its blocks are free, and its requests count until it hangs up."""
    body = {"prompt": ["A"] * 2, "n": 2, "max_tokens": 60, "stream": True, "ignore_eos": True, "logprobs": 20}
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        reader.connect(("127.0.0.1", int(server.url.rpartition(":")[2])))
        content = json.dumps(body)
        reader.sendall(head(content) + content.encode())
        assert b"200 OK" in reader.recv(100)
        assert soon(lambda: not server.llm.has_unfinished, 60)
        assert server.engine.num_held == 2
        assert server.post(COMPLETION, {"prompt": "A"}).status_code == 200
        assert soon(lambda: server.engine.num_held == 2)
    assert server.becomes_idle()


# ------------------------------------------------------------------------------------------------ the command


def test_a_model_without_a_tokenizer_is_not_served():
    model, _ = tiny_model()
    with pytest.raises(ValueError, match="tokenizer"):
        make_app(LLM(model, num_blocks=1), name="tiny")


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--model", "no such folder!"], "is not a folder"),
        (["--max-queue", "0"], "max_queue"),
        (["--speculate", "-1"], "speculate"),
    ],
)
def test_a_command_that_cannot_be_done_says_why(arguments, why, capsys):
    assert main(arguments) == 2
    assert re.fullmatch(f"error: .*{why}.*\n", capsys.readouterr().err)


@pytest.mark.slow
def test_the_command_serves_and_ends_when_what_runs_has_ended():
    command = [sys.executable, "-m", "pagewise.engine.serve", "--port", "0", "--num-blocks", "64", "--max-queue", "4"]
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    ) as process:
        url = next(found[0] for line in process.stderr if (found := re.findall(r"http://[\d.:]+", line)))
        body = {"prompt": PROMPT, "max_tokens": 60, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", url + COMPLETION, json=body, timeout=30) as answer:
            lines = answer.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert process.wait(30) in (0, -signal.SIGTERM)
        assert "Traceback" not in process.stderr.read()
