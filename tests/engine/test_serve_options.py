"""What clients and operators of other servers expect: echo, templates, origins, a log, limits of time.

Each option also runs beside a request that does not use it and whose text must not change.
"""

import json
import logging
import re
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

import torch
import uvicorn
from checkpoints import logits
from scripted import TEMPLATE, Scripted, byte_level
from serving import COMPLETION, head, serving, soon, tiny_llm

from pagewise.engine import LLM, SamplingParams
from pagewise.engine.serve import __main__ as command
from pagewise.engine.serve import protocol
from pagewise.engine.serve.app import make_app
from pagewise.models.load import TINY

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]
PROMPT = "Attention reads each block of keys"
INNOCENT = {"prompt": "The block table of a sequence ", "max_tokens": 16, "seed": 7, "ignore_eos": True}
THINKS = TEMPLATE.replace("assistant\n{% endif", "assistant\n{% if enable_thinking %}<think>{% endif %}{% endif")


@pytest.fixture(scope="module")
def server():
    with serving(tiny_llm(), max_queue=8, allow_origins=["http://page.example:3000"]) as server:
        yield server
        assert server.becomes_idle()


@pytest.fixture(scope="module")
def innocent(server):
    """Return the text of a request that is alone."""
    return server.post(COMPLETION, INNOCENT).json()["choices"][0]["text"]


def events(answer):
    """Return the JSON values of a stream."""
    lines = answer.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


# ------------------------------------------------------------------------------------------------ echo


def log_p(llm, prompt):
    """Return log p of each token of a prompt but the first, and the largest there, from one pass."""
    found = logits(llm.model, torch.tensor([prompt])).log_softmax(dim=-1)[0, :-1]
    chosen = found.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
    return chosen.tolist(), found.amax(dim=-1).tolist()


@pytest.mark.parametrize(("max_tokens", "stream"), [(0, False), (0, True), (1, False), (5, True)])
@pytest.mark.parametrize("prompt", [PROMPT, list(PROMPT.encode()), [PROMPT, "A"], [[65, 66], [65]]], ids=str)
def test_an_echo_begins_with_the_prompt_and_its_log_probabilities(server, prompt, max_tokens, stream):
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
    plain = None if not max_tokens else server.post(COMPLETION, body).json()
    answer = server.post(COMPLETION, body | {"echo": True, "stream": stream})
    assert answer.status_code == 200, answer.text
    choices = joined(events(answer)) if stream else answer.json()["choices"]
    prompts = prompt if isinstance(prompt[0], str | list) and not isinstance(prompt, str) else [prompt]
    assert len(choices) == len(prompts)
    for index, (choice, one) in enumerate(zip(choices, prompts, strict=True)):
        ids = list(one.encode()) if isinstance(one, str) else one
        new = plain["choices"][index] if plain else {"text": "", "logprobs": {name: [] for name in COLUMNS}}
        assert choice["text"] == bytes(ids).decode() + new["text"]
        assert choice["finish_reason"] == "length"
        found, n = choice["logprobs"], len(ids)
        chosen, largest = log_p(server.llm, ids) if n > 1 else ([], [])
        assert found["tokens"] == [*(chr(token) for token in ids), *new["logprobs"]["tokens"]]
        assert found["token_logprobs"][0] is found["top_logprobs"][0] is None
        assert found["token_logprobs"][1:n] == pytest.approx(chosen, abs=1e-4)
        assert [max(top.values()) for top in found["top_logprobs"][1:n]] == pytest.approx(largest, abs=1e-4)
        assert found["token_logprobs"][n:] == pytest.approx(new["logprobs"]["token_logprobs"], abs=1e-4)
    if not stream:
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == max_tokens * len(prompts)
        assert usage["prompt_tokens"] == sum(map(len, prompts))


COLUMNS = ("tokens", "token_logprobs", "top_logprobs")


def joined(chunks):
    """Return the choices of a stream as those of a whole answer."""
    whole = {}
    for (new,) in (chunk["choices"] for chunk in chunks):
        choice = whole.setdefault(new["index"], new | {"text": "", "logprobs": {name: [] for name in COLUMNS}})
        choice["text"] += new["text"]
        choice["finish_reason"] = new["finish_reason"]
        for name in COLUMNS if new["logprobs"] else ():
            choice["logprobs"][name] += new["logprobs"][name]
    return [choice for _, choice in sorted(whole.items())]


def test_an_echo_without_log_probabilities_is_text(server):
    body = {"prompt": PROMPT, "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": True}
    plain, echoed = (server.post(COMPLETION, body | more).json() for more in ({}, {"echo": True}))
    assert [c["text"] for c in echoed["choices"]] == [PROMPT + c["text"] for c in plain["choices"]]
    assert [c["logprobs"] for c in echoed["choices"]] == [None, None]
    beams = server.post(COMPLETION, {"prompt": PROMPT, "beam_width": 2, "max_tokens": 2, "echo": True}).json()
    assert all(choice["text"].startswith(PROMPT) for choice in beams["choices"])
    nothing = server.post(COMPLETION, {"prompt": PROMPT, "max_tokens": 0, "echo": True}).json()
    assert [(c["text"], c["finish_reason"], c["logprobs"]) for c in nothing["choices"]] == [(PROMPT, "length", None)]


def test_an_echo_has_the_first_token_that_the_tokenizer_adds(server):
    tokenizer = byte_level()
    with serving(LLM(Scripted([], start=0, vocab_size=len(tokenizer)), tokenizer=tokenizer, num_blocks=8)) as other:
        ids = tokenizer.encode("<|im_start|> the")
        body = {"prompt": ids, "max_tokens": 0, "echo": True, "logprobs": 0}
        choice = other.post(COMPLETION, body).json()["choices"][0]
        assert choice["logprobs"]["tokens"] == ["<|im_start|>", " the"]
        assert choice["logprobs"]["top_logprobs"][1].keys() == {" the"}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("bad", [(0, 9), (0, 1)])  # in all steps, or where only the first prompt token is computed
def test_log_probabilities_that_are_not_numbers_are_an_error(bad, stream):
    tokenizer = byte_level()
    llm = LLM(Scripted([], start=0, vocab_size=len(tokenizer)), tokenizer=tokenizer, num_blocks=8)
    forward = llm.model.forward

    def spoilt(ids, positions, *arguments, logits_for):
        out = forward(ids, positions, *arguments, logits_for=logits_for)
        out[0, (positions[0, logits_for] >= bad[0]) & (positions[0, logits_for] < bad[1])] = torch.nan
        return out

    llm.model.forward = spoilt
    with serving(llm) as server:
        body = {"prompt": [5, 6, 7], "max_tokens": 0, "echo": True, "logprobs": 1, "stream": stream}
        answer = server.post(COMPLETION, body)
        error = (events(answer)[-1] if stream else answer.json())["error"]
        assert (error["type"], error["message"]) == ("server_error", "the model's logits are not finite")
        assert server.becomes_idle()


REFUSED = [
    (COMPLETION, {"echo": "yes"}, "echo"),
    (COMPLETION, {"echo": 1}, "echo"),
    (COMPLETION, {"max_tokens": 0}, "max_tokens"),
    (COMPLETION, {"max_tokens": 0, "echo": False, "logprobs": 1}, "max_tokens"),
    (COMPLETION, {"max_tokens": -1, "echo": True, "logprobs": 1}, "max_tokens"),
    (COMPLETION, {"max_tokens": 0, "echo": True, "beam_width": 2}, "echo"),
    (COMPLETION, {"echo": True, "beam_width": 2, "logprobs": 1}, "logprobs"),
    (COMPLETION, {"chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
    (CHAT, {"echo": True}, "echo"),
    (CHAT, {"chat_template_kwargs": []}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": "enable_thinking"}, "chat_template_kwargs"),
    (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),  # there is no template
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template"),
]


@pytest.mark.parametrize(("path", "body", "field"), REFUSED, ids=str)
def test_a_value_that_does_not_fit_names_its_field(server, path, body, field):
    answer = server.post(path, ({"prompt": "A"} if path == COMPLETION else {"messages": HI}) | body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert field in answer.json()["error"]["message"] or field == "echo"


# ------------------------------------------------------------------------------------------------ chat templates


def chatting(template):
    """Return an engine whose tokenizer has this chat template."""
    tokenizer = byte_level(chat_template=template)
    return LLM(Scripted([5, 6], start=0, vocab_size=len(tokenizer)), tokenizer=tokenizer, num_blocks=64)


@pytest.fixture(scope="module")
def thinking():
    with serving(chatting(THINKS)) as server:
        yield server


@pytest.mark.parametrize(
    ("variables", "added"),
    [(None, 0), ({}, 0), ({"enable_thinking": False}, 0), ({"enable_thinking": True}, len("<think>"))],
    ids=str,
)
def test_variables_of_the_chat_template_change_the_prompt(thinking, variables, added):
    body = {"messages": HI, "max_tokens": 1}
    usual = thinking.post(CHAT, body).json()["usage"]["prompt_tokens"]
    answer = thinking.post(CHAT, body | {"chat_template_kwargs": variables})
    assert answer.json()["usage"]["prompt_tokens"] == usual + added, answer.text


@pytest.mark.parametrize(
    "name", ["enable_thinkin", "thinking", "", "messages", "add_generation_prompt", "chat_template", "tokenize", "("]
)
def test_a_variable_that_the_chat_template_does_not_have_is_refused(thinking, name):
    answer = thinking.post(CHAT, {"messages": HI, "chat_template_kwargs": {name: True}})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "chat_template_kwargs"), answer.text
    assert repr(name) in answer.json()["error"]["message"]


def test_a_request_beside_one_with_variables_has_its_own_prompt(thinking):
    body = {"messages": HI, "max_tokens": 2, "temperature": 0, "logprobs": True}
    alone = thinking.post(CHAT, body).json()
    with ThreadPoolExecutor() as threads:
        held = hold(thinking)
        answers = [
            threads.submit(thinking.post, CHAT, body | {"chat_template_kwargs": {"enable_thinking": value}})
            for value in (True, False, True)
        ]
        other = threads.submit(thinking.post, CHAT, body)
        assert soon(lambda: thinking.engine.num_held == 4)
        held.set()
        assert other.result().json()["choices"] == alone["choices"]
        lengths = [answer.result().json()["usage"]["prompt_tokens"] for answer in answers]
    usual = alone["usage"]["prompt_tokens"]
    assert lengths == [usual + len("<think>"), usual, usual + len("<think>")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return the tiny model with a tokenizer of transformers, which has a chat template."""
    folder = tmp_path_factory.mktemp("checkpoint")
    shutil.copytree(TINY, folder, dirs_exist_ok=True)
    byte_level().save_pretrained(folder)
    return folder


@pytest.fixture
def begun(monkeypatch):
    """Return what `main` gives to uvicorn, which does not begin."""
    seen = {}

    def config(app, **options):
        seen.update(options, app=app)
        raise OSError("enough")

    monkeypatch.setattr(uvicorn, "Config", config)
    return seen


def test_a_chat_template_of_a_file_replaces_the_checkpoints(folder, tmp_path, begun):
    (tmp_path / "mine.jinja").write_text(
        "{% if messages[0].role != 'user' %}{{ 1 / 0 }}{% endif %}é{{ messages[0].content }}"
    )
    arguments = ["--model", str(folder), "--port", "0", "--num-blocks", "8", "--max-model-len", "100"]
    with pytest.raises(OSError, match="enough"):
        command.main([*arguments, "--chat-template", str(tmp_path / "mine.jinja")])
    llm = begun["app"].state.engine.llm
    assert llm.tokenizer.apply_chat_template(HI, tokenize=False) == "éHi"
    assert llm.config.max_model_len == 100


BAD = [
    (["--chat-template", "{tmp}/none.jinja"], "No such file"),
    (["--chat-template", "{tmp}"], "Is a directory"),
    (["--chat-template", "{tmp}/latin.jinja"], "latin.jinja: .utf-8. codec"),
    (["--chat-template", "{tmp}/wrong.jinja"], r"wrong.jinja, line 2: Unexpected end of template"),
    (["--allow-origin", "page.example"], "allow_origin must be"),
    (["--allow-origin", "http://page.example/"], "allow_origin must be"),
    (["--allow-origin", "*", "--allow-origin", ""], "allow_origin must be"),
    (["--request-timeout", "0"], "request_timeout"),
    (["--request-timeout", "soon"], "invalid int value: 'soon'"),
    (["--max-model-len", "0"], "max_model_len"),
    (["--max-model-len", "1.5"], "invalid int value"),
]


@pytest.mark.parametrize(("arguments", "why"), BAD, ids=str)
def test_a_wrong_option_is_refused_before_the_model_is_loaded(arguments, why, tmp_path, capsys, monkeypatch):
    (tmp_path / "latin.jinja").write_bytes(b"\xe9")
    (tmp_path / "wrong.jinja").write_text("a\n{% if messages %}")
    monkeypatch.setattr(command, "LLM", lambda *_: pytest.fail("the model was loaded"))
    arguments = [argument.format(tmp=tmp_path) for argument in arguments]
    if "invalid" in why:  # argparse says so
        with pytest.raises(SystemExit, match="2"):
            command.main(arguments)
    else:
        assert command.main(arguments) == 2
    assert re.fullmatch(f"error: .*{why}.*\n", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--chat-template", "{tmp}/plain.jinja"], "chat_template needs a tokenizer of transformers"),
        (["--max-model-len", "513"], "max_model_len = 513 exceeds the model's context of 512 tokens"),
    ],
    ids=str,
)
def test_what_the_checkpoint_does_not_support_is_refused(arguments, why, tmp_path, capsys):
    (tmp_path / "plain.jinja").write_text("{{ messages[0].content }}")
    assert command.main([argument.format(tmp=tmp_path) for argument in arguments] + ["--port", "0"]) == 2
    assert re.fullmatch(f"error: {why}.*\n", capsys.readouterr().err)


def test_the_context_is_at_most_max_model_len():
    with serving(tiny_llm(max_model_len=40)) as server:
        assert server.http.get("/v1/models/tiny").json()["max_model_len"] == 40
        body = {"messages": [{"role": "user", "content": "A" * 10}], "ignore_eos": True}
        assert server.post(CHAT, body).json()["usage"]["total_tokens"] == 40
        error = server.post(COMPLETION, {"prompt": "A" * 30, "max_tokens": 11}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert "maximum context length is 40 tokens" in error["message"]
        body = {"prompt": "A" * 40, "max_tokens": 0, "echo": True, "logprobs": 0}
        assert server.post(COMPLETION, body).json()["usage"]["total_tokens"] == 40


# ------------------------------------------------------------------------------------------------ other pages


def test_pages_of_an_allowed_origin_read_answers_and_refusals(server):
    origin = {"Origin": "http://page.example:3000"}
    asks = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    answer = server.http.options(COMPLETION, headers=origin | asks)
    assert answer.status_code == 200
    allowed = answer.headers["access-control-allow-headers"].replace(" ", "").split(",")
    assert {"authorization", "content-type"} <= {*allowed}
    for status, body in (
        (200, {"prompt": "A", "max_tokens": 1}),
        (400, {"prompt": ""}),
        (404, {"model": "x", "prompt": "A"}),
    ):
        answer = server.post(COMPLETION, body, headers=origin)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, origin["Origin"])
    other = {"Origin": "http://other.example"}
    assert server.http.options(COMPLETION, headers=other | asks).status_code == 400
    answer = server.post(COMPLETION, {"prompt": "A", "max_tokens": 1}, headers=other)
    assert "access-control-allow-origin" not in answer.headers


def test_without_the_option_no_page_reads_answers_and_with_a_star_all_do():
    for origins, allowed in (((), None), (["*"], "*")):
        with serving(tiny_llm(), allow_origins=origins, api_key="key") as server:
            answer = server.http.get("/v1/models", headers={"Origin": "http://x", "Authorization": "Bearer key"})
            assert (answer.status_code, answer.headers.get("access-control-allow-origin")) == (200, allowed)
            refused = server.http.get("/v1/models", headers={"Origin": "http://x"})
            assert (refused.status_code, refused.headers.get("access-control-allow-origin")) == (401, allowed)
    with pytest.raises(ValueError, match="allow_origin"):
        make_app(tiny_llm(), name="x", allow_origins=["HTTP://page.example"])


# ------------------------------------------------------------------------------------------------ the log


@pytest.fixture
def log(server, caplog):
    """Return a function that returns the lines of the log from now on."""
    assert server.becomes_idle()
    server.http.get("/health")  # then the lines of earlier requests are written
    caplog.set_level(logging.INFO, logger="pagewise.engine.serve.requests")
    return lambda: [dict(re.findall(r"(\w+)=(\S+)", r.message)) for r in caplog.records if r.name.endswith("requests")]


def test_each_request_is_a_line_that_tells_no_text(server, log, caplog):
    secret = "a secret prompt"
    bodies = [
        (COMPLETION, {"prompt": [secret, "A"], "max_tokens": 3, "n": 2, "seed": 1, "ignore_eos": True}),
        (
            CHAT,
            {"messages": [{"role": "user", "content": secret}], "max_tokens": 4, "stream": True, "ignore_eos": True},
        ),
        (COMPLETION, {"prompt": secret, "beam_width": 2, "max_tokens": 2, "ignore_eos": True}),
        (COMPLETION, {"prompt": secret, "max_tokens": 0, "echo": True}),
        (COMPLETION, {"prompt": secret, "temperature": secret}),
        (COMPLETION, {"prompt": secret, "model": secret}),
    ]
    answers = [server.post(path, body) for path, body in bodies]
    assert soon(lambda: len(log()) == len(bodies))
    lines, texts = log(), [record.message for record in caplog.records]
    assert [(line["prompt_tokens"], line["completion_tokens"], line["end"]) for line in lines] == [
        ("16", "12", "length"), ("32", "4", "length"), ("15", "4", "length"), ("15", "0", "length"),
        ("0", "0", "400"), ("0", "0", "404"),
    ]  # fmt: skip
    ids = [answers[0].json()["id"], events(answers[1])[0]["id"], answers[2].json()["id"], answers[3].json()["id"]]
    assert [line["id"] for line in lines[:4]] == ids
    for line in lines:
        first, total = line["first"], float(line["total"])
        assert (first == "-") == (line["completion_tokens"] == "0")
        assert first == "-" or 0 <= float(first) <= total
    assert not [text for text in texts if secret in text or "secret" in text]


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_the_line_of_a_client_that_hangs_up_says_how_far_it_came(server, log, monkeypatch, stream):
    step, go = server.llm.step, threading.Event()
    monkeypatch.setattr(server.llm, "step", lambda: (go.wait(0.05), step())[1])
    body = json.dumps({"prompt": "A", "max_tokens": 400, "ignore_eos": True, "stream": stream})
    with server.connection() as client:
        client.sendall(head(body) + body.encode())
        assert soon(lambda: len(server.llm.scheduler.running) == 1)
        if stream:
            read_until(client, b"text", 3)
    go.set()
    assert soon(lambda: len(log()) == 1)
    (line,) = log()
    assert (line["end"], line["prompt_tokens"]) == ("abort", "1")
    assert int(line["completion_tokens"]) < 400
    assert server.becomes_idle()


def test_a_failure_is_in_the_line(server, log, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.llm.runner, "run", lambda chunks: 1 / 0)
        for stream in (False, True):
            server.post(COMPLETION, {"prompt": "A", "stream": stream})
    monkeypatch.setattr(server.llm.tokenizer, "encode", lambda text: 1 / 0)
    assert server.post(COMPLETION, {"prompt": "A"}).status_code == 500
    assert soon(lambda: [line["end"] for line in log()] == ["500"] * 3)


def test_the_log_is_an_option(begun, capsys):
    logger = logging.getLogger("pagewise.engine.serve.requests")
    for arguments, level in (([], logging.NOTSET), (["--log-requests"], logging.INFO)):
        with pytest.raises(OSError, match="enough"):
            command.main([*arguments, "--port", "0", "--num-blocks", "8"])
        assert logger.level == level
    logger.setLevel(logging.NOTSET)
    logger.handlers.clear()


# ------------------------------------------------------------------------------------------------ slow clients


def read_all(client):
    """Return what a server sends until it closes the connection."""
    found = b""
    while part := client.recv(4096):
        found += part
    return found


def read_until(client, mark, times=1):
    found = b""
    while found.count(mark) < times:
        part = client.recv(4096)
        assert part, found
        found += part
    return found


BODY = json.dumps({"prompt": "A", "max_tokens": 2, "ignore_eos": True})


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", None),
        (b"POST /v1/comp", b"408"),
        (head(BODY), b"408"),
        (head(BODY) + BODY[:9].encode(), b"408"),
        (head(BODY, path="/v1/nothing"), b"404"),  # refused at once, and its body does not come either
        (head(BODY, more="Content-Type: text/plain\r\n") + b"{", b"415"),
        (head(BODY) + BODY.encode() + b"POST", b"200"),  # and half a request after a whole one
    ],
    ids=str,
)
def test_a_request_that_does_not_arrive_in_time_is_ended(sent, status):
    with serving(tiny_llm(), request_timeout=0.3) as server, server.connection() as client:
        client.sendall(sent)
        if status == b"200":
            read_until(client, b"usage")
            client.sendall(b" /v1")
        found = read_all(client)  # it ends
        if status in (None, b"200"):
            assert b"HTTP/1.1 408" in found if status else found == b""
        else:
            assert found.startswith(b"HTTP/1.1 " + status)
            assert json.loads(found.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
        assert server.becomes_idle()


def test_a_slow_body_holds_up_nobody_and_one_that_comes_in_time_is_served(server, innocent):
    with server.connection() as client:
        client.sendall(head(BODY))
        for byte in BODY.encode()[:-1]:
            client.sendall(bytes([byte]))
        assert server.post(COMPLETION, INNOCENT).json()["choices"][0]["text"] == innocent
        client.sendall(BODY[-1:].encode())
        assert b"200 OK" in read_until(client, b"prompt_tokens_details")
    assert server.becomes_idle()


def test_each_request_of_a_connection_has_its_own_time():
    with serving(tiny_llm(), request_timeout=1.5) as server, server.connection() as client:
        pause = threading.Event()
        for _ in range(4):  # together they take longer than one may
            client.sendall(head(BODY) + BODY[:5].encode())
            pause.wait(0.4)
            client.sendall(BODY[5:].encode())
            assert b"200 OK" in read_until(client, b"prompt_tokens_details")


# ------------------------------------------------------------------------------------------------ half-closed


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("number", [1, 2])
def test_a_client_that_closes_its_half_gets_its_answers(server, monkeypatch, stream, number):
    monkeypatch.setattr(protocol, "EVERY", 0.01)
    held = hold(server)
    body = json.dumps(json.loads(BODY) | {"stream": stream})
    with server.connection() as client:
        client.sendall((head(body) + body.encode()) * number)
        assert soon(lambda: server.engine.num_held == 1)
        client.shutdown(socket.SHUT_WR)
        if not stream:
            read_until(client, protocol.STILL_THERE, 2)
        held.set()
        found = read_all(client)
    assert found.count(b"HTTP/1.1 200 OK") == number
    assert found.count(b"[DONE]" if stream else b'"finish_reason":"length"') == number
    assert server.becomes_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_has_gone_is_not_taken_for_one(server, monkeypatch, stream):
    """Its request waits for its first token, and ends all the same."""
    monkeypatch.setattr(protocol, "EVERY", 0.01)
    held = hold_steps(server, monkeypatch)
    body = json.dumps(json.loads(BODY) | {"stream": stream})
    with server.connection() as client:
        client.sendall(head(body) + body.encode())
        assert soon(lambda: len(server.llm.scheduler.waiting) == 1)
        if stream:
            read_until(client, b"200 OK")
    assert soon(lambda: server.engine.num_held == 0)
    held.set()
    assert server.becomes_idle()


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", head(BODY) + b"{"], ids=str)
def test_a_half_closed_connection_without_a_whole_request_is_closed(server, sent):
    with server.connection() as client:
        client.sendall(sent)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""


def test_a_client_of_http_1_0_is_sent_no_interim_answer(server):
    held = hold(server)
    with server.connection() as client:
        client.sendall(head(BODY).replace(b"HTTP/1.1", b"HTTP/1.0") + BODY.encode())
        assert soon(lambda: server.engine.num_held == 1)
        client.shutdown(socket.SHUT_WR)
        assert read_all(client) == b""
    held.set()
    assert server.becomes_idle()


def test_a_stream_without_news_has_comments_only_for_a_client_that_may_have_gone(server, monkeypatch):
    monkeypatch.setattr(protocol, "EVERY", 0.01)
    both, held = hold(server), hold_steps(server, monkeypatch)
    body = json.dumps(json.loads(BODY) | {"stream": True})
    with server.connection() as usual, server.connection() as half:
        for client in (usual, half):
            client.sendall(head(body, more="Connection: close\r\n") + body.encode())
        assert soon(lambda: server.engine.num_held == 2)
        both.set()
        half.shutdown(socket.SHUT_WR)
        assert read_until(half, b":\n\n", 3).rpartition(b"\r\n\r\n")[2].replace(b"3\r\n:\n\n\r\n", b"") == b""
        held.set()
        found, other = read_all(usual), read_all(half)
    assert b"[DONE]" in found
    assert b"[DONE]" in other
    assert b"\n:" not in found


# ------------------------------------------------------------------------------------------------ beside others


def hold_steps(server, monkeypatch):
    """Let each step wait until the event that is returned is set."""
    go, step = threading.Event(), server.llm.step
    monkeypatch.setattr(server.llm, "step", lambda: (go.wait(20), step())[1])
    return go


def hold(server):
    """Let the engine compute nothing until the event that is returned is set."""
    go = threading.Event()
    server.engine._jobs.submit(go.wait, 20)
    return go


BESIDE = {
    "echo": (COMPLETION, {"prompt": INNOCENT["prompt"], "echo": True, "logprobs": 5, "max_tokens": 10}),
    "only prompt": (
        COMPLETION,
        {"prompt": [INNOCENT["prompt"] * 3, "A"], "echo": True, "logprobs": 1, "max_tokens": 0},
    ),
    "stream": (COMPLETION, {"prompt": PROMPT, "echo": True, "logprobs": 2, "stream": True, "n": 2, "seed": 3}),
    "plain echo": (COMPLETION, {"prompt": list(PROMPT.encode()), "echo": True}),
    "refused": (CHAT, {"messages": HI, "chat_template_kwargs": {"a": 1}}),
}


@pytest.mark.parametrize("kind", BESIDE)
def test_a_request_beside_an_option_is_as_if_alone(server, innocent, log, kind):
    """The engine begins with both at once. The other one comes from another page, and both are logged."""
    path, body = BESIDE[kind]
    with ThreadPoolExecutor() as threads:
        held = hold(server)
        other = threads.submit(server.post, path, body, headers={"Origin": "http://page.example:3000"})
        assert soon(lambda: server.engine.num_held or other.done())
        asked = [threads.submit(server.post, COMPLETION, INNOCENT) for _ in range(2)]
        assert soon(lambda: server.engine.num_held >= 2)
        held.set()
        assert [answer.result().json()["choices"][0]["text"] for answer in asked] == [innocent] * 2
        assert other.result().status_code == (400 if kind == "refused" else 200)
        assert other.result().headers["access-control-allow-origin"] == "http://page.example:3000"
    assert soon(lambda: len(log()) == 3)
    assert server.becomes_idle()


def test_a_limit_of_the_context_changes_no_text_within_it(innocent):
    llm = tiny_llm(max_model_len=len(INNOCENT["prompt"]) + 16)
    (output,) = llm.generate([INNOCENT["prompt"]], SamplingParams(max_tokens=16, seed=7, ignore_eos=True))
    assert output.text == innocent
