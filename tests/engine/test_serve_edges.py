"""What clients meet at the edges of the server: keys, bodies of other makers, long texts, odd tokens, and its end."""

import asyncio
import http.client
import json
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

import torch
import uvicorn
from forked_server import forked_server
from scripted import TEMPLATE, Scripted, byte_fallback, byte_level
from serving import COMPLETION, serving, soon, tiny_llm
from starlette.requests import ClientDisconnect

from pagewise.engine import LLM
from pagewise.engine.serve.__main__ import main
from pagewise.engine.serve.answer import Answer, Failure
from pagewise.engine.serve.app import make_app, unless_hung_up
from pagewise.engine.serve.bodies import ChatBody, CompletionBody, Message, chat_prompt
from pagewise.engine.serve.tokens import Tokens
from pagewise.models.vocabulary import Vocabulary

pytestmark = pytest.mark.usefixtures("shapes_unchecked")
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def server():
    with serving(tiny_llm(), max_queue=8) as server:
        yield server
        assert server.becomes_idle()


def events(answer):
    """Return the JSON values of a stream."""
    lines = answer.text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line and line != "data: [DONE]"]


def scripted(script, tokenizer, **options):
    """Return an engine that writes these tokens after a prompt of two tokens."""
    model = Scripted(script, start=2, vocab_size=len(tokenizer), **options)
    return LLM(model, tokenizer=tokenizer, num_blocks=64)


# ------------------------------------------------------------------------------------------------ conversations

TEMPLATES = {  # what each makes of the role "developer"
    "plain": (None, "system: A\nuser: B\nassistant:"),
    "qwen": (byte_level, "<|im_start|>system\nA<|im_end|>\n<|im_start|>user\nB<|im_end|>\n<|im_start|>assistant\n"),
    "knows": ("{% for m in messages %}{{ '!' if m.role == 'developer' }}{{ m.content }}{% endfor %}", "!AB"),
    "several": ({"default": "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"}, "systemAuserB"),
}


@pytest.mark.parametrize("kind", TEMPLATES)
def test_a_developers_message_is_a_systems_where_the_template_knows_no_developer(kind):
    template, expected = TEMPLATES[kind]
    tokenizer = byte_level() if template is byte_level else byte_level(chat_template=template)
    messages = [Message(role="developer", content="A"), Message(role="user", content="B")]
    assert chat_prompt(messages, tokenizer) == (expected, template is not None)


def test_a_tokenizer_whose_templates_are_all_for_other_uses_is_not_used():
    with pytest.raises(Failure, match="do not fit the model's chat template"):
        chat_prompt([Message(role="user", content="A")], byte_level(chat_template={"rag": "{{ messages[0].content }}"}))


@pytest.mark.parametrize(
    ("template", "roles", "out"),
    [
        ("{{ messages[0].content }}", ("system", "user"), "{'content': ' user says \\\\n', 'role': 'user'}"),
        ("{{ messages[-1].content }}", ("system", "user"), "{'content': ' system says \\\\n', 'role': 'system'}"),
        ("{{ messages[-1].content }}", ("developer", "user"), "{'content': ' developer says \\\\n', 'role': 'system'}"),
        ("{{ messages[-1].content }}", ("assistant", "user"), None),
        ("{% for m in messages %}{{ m.content | trim }}{% endfor %}", ("system", "user"), None),
    ],
)
def test_no_message_vanishes_in_a_template(template, roles, out):
    messages = [Message(role=role, content=f" {role} says \n") for role in roles]
    if out is None:
        chat_prompt(messages, byte_level(chat_template=template))
    else:
        with pytest.raises(Failure, match=f"leaves out {out}"):
            chat_prompt(messages, byte_level(chat_template=template))


def test_a_line_says_if_a_checkpoint_came_without_a_template(caplog):
    for tokenizer, said in (
        (byte_level(), []),
        (byte_level(chat_template=None), ["the tokenizer has no chat template"]),
    ):
        make_app(scripted([], tokenizer), name="x")
        assert [record.message.partition(":")[0] for record in caplog.records] == said
    caplog.clear()
    make_app(tiny_llm(), name="tiny")  # which has lines of this kind only
    assert not caplog.records


def test_a_templates_text_becomes_the_tokens_that_the_template_gives():
    tokenizer = with_bos()  # and no second first token
    llm = scripted([], tokenizer)
    (request,) = ChatBody(messages=HI, max_tokens=1).requests(Tokens(llm), threading.Event())
    assert request.prompt == tokenizer.apply_chat_template(HI, add_generation_prompt=True, return_dict=False)


def test_a_message_may_have_many_parts(server):
    parts = [{"type": "text", "text": text} for text in ["A", "b"] * 100]
    answer = server.post(CHAT, {"messages": [{"role": "user", "content": parts}], "max_tokens": 1})
    assert answer.json()["usage"]["prompt_tokens"] == len("user: \nassistant:") + 200


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("attention", ["paged", "dense"])
def test_a_chats_choices_fill_what_the_memory_leaves_them(n, attention):
    with serving(tiny_llm(num_blocks=8, attention=attention)) as server:
        body = {"messages": HI, "n": n, "seed": 1, "ignore_eos": True}
        usage = server.post(CHAT, body).json()["usage"]
        shared = 16 * (n > 1 and attention == "paged")  # the whole blocks of the prompt
        slots = 128 // n if attention == "dense" else (128 - shared) // 16 // n * 16 + shared
        assert usage["completion_tokens"] == n * (slots + 1 - usage["prompt_tokens"])


# ------------------------------------------------------------------------------------------------ too long

TOO_LONG = [
    (
        COMPLETION,
        {"prompt": "A" * 500, "max_tokens": 20},
        "prompt",
        "500 tokens, and you requested 20 in the completion",
    ),
    (COMPLETION, {"prompt": [65] * 600}, "prompt", "600 tokens, and you requested 16 in the completion"),
    (COMPLETION, {"prompt": ["A", "A" * 510]}, "prompt", "510 tokens, and you requested 16 in the completion"),
    (COMPLETION, {"prompt": "A" * 7_000_000}, "prompt", "more than 512 tokens"),
    (CHAT, {"messages": [HI[0] | {"content": "A" * 495}]}, "messages", "512 tokens"),
    (CHAT, {"messages": HI, "max_tokens": 500}, "messages", "19 tokens, and you requested 500 in the completion"),
    (
        CHAT,
        {"messages": HI, "max_completion_tokens": 500, "n": 2},
        "messages",
        "19 tokens, and you requested 500 in the .*",
    ),
]


@pytest.mark.parametrize(("path", "body", "field", "says"), TOO_LONG, ids=lambda value: str(value)[:40])
def test_what_exceeds_the_context_is_refused_in_the_words_that_clients_look_for(server, path, body, field, says):
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", field)
    said = f"This model's maximum context length is 512 tokens. However, your {field} resulted in {says}. "
    said += rf"Please reduce the length of the {field}. \(context_length_exceeded\)"
    assert re.fullmatch(said, error["message"])


@pytest.mark.slow
def test_the_context_is_what_the_memory_holds():
    with serving(tiny_llm(num_blocks=8)) as server:
        longest = 8 * 16 + 1  # the last token needs no slot
        assert server.http.get("/v1/models").json()["data"][0]["max_model_len"] == longest
        body = {"prompt": "A" * 100, "max_tokens": longest - 100, "ignore_eos": True}
        assert server.post(COMPLETION, body).json()["usage"]["total_tokens"] == longest
        error = server.post(COMPLETION, body | {"max_tokens": longest - 99}).json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"context length is {longest} tokens" in error["message"]
    with serving(tiny_llm()) as server:
        assert server.http.get("/v1/models/tiny").json()["max_model_len"] == 512


class Counting:
    """A tokenizer of the tiny model that notes how many characters it reads."""

    def __init__(self, tokenizer, meanwhile=lambda: None):
        self.tokenizer, self.meanwhile, self.read = tokenizer, meanwhile, []

    def encode(self, text, **options):
        self.read.append(len(text))
        self.meanwhile()
        return self.tokenizer.encode(text, **options)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def counted(tokenizer, meanwhile=lambda: None):
    model = Scripted([], start=0, vocab_size=len(tokenizer), context=100)
    return Tokens(LLM(model, tokenizer=Counting(tokenizer, meanwhile), num_blocks=64))


def test_a_text_that_cannot_fit_is_not_tokenised():
    tokens = counted(byte_level())
    with pytest.raises(Failure, match="more than 100 tokens") as refusal:
        tokens.encode("A" * 1301, "prompt", threading.Event())  # no token has more than 13 characters
    assert refusal.value.code == "context_length_exceeded"
    assert tokens.tokenizer.read == []


LONG = f"<|{'long' * 9}|>"  # 40 characters


def long_level():
    return byte_level(pad_token=LONG)


@pytest.mark.parametrize(
    ("kind", "text", "read"),
    [
        (byte_level, "A" * 1300, [800]),
        (byte_level, "漢" * 1300, [800]),
        (byte_level, " the" * 100, [400]),
        (byte_level, "<|endoftext|>" * 100, [800, 1300]),
        (long_level, LONG * 100, [800, 1600, 3200, 4000]),
        (long_level, LONG * 17 + "A" * 82 + LONG, [800, 802]),  # the cut makes 38 tokens of the last one
        (byte_fallback, "</s>" * 100, [400]),
    ],
)
def test_a_long_text_is_tokenised_piece_by_piece_until_it_cannot_fit(kind, text, read):
    tokens = counted(kind())
    fits = len(tokens.tokenizer.tokenizer.encode(text, add_special_tokens=False)) <= 100
    if fits:
        assert len(tokens.encode(text, "prompt", threading.Event(), add_special_tokens=False)) == 100
    else:
        with pytest.raises(Failure, match="more than 100"):
            tokens.encode(text, "prompt", threading.Event())
    assert tokens.tokenizer.read == read


def test_tokenising_ends_when_its_client_leaves():
    left = threading.Event()
    tokens = counted(long_level(), left.set)
    with pytest.raises(Failure, match="left"):
        tokens.encode(LONG * 100, "prompt", left)
    with pytest.raises(Failure, match="left"):
        tokens.encode("A", "prompt", left)
    assert tokens.tokenizer.read == [800]


def test_a_client_that_leaves_while_its_prompts_are_tokenised_holds_up_nobody(server, monkeypatch):
    begun, go, read = threading.Event(), threading.Event(), []
    encode = server.llm.tokenizer.encode
    monkeypatch.setattr(
        server.llm.tokenizer, "encode", lambda text: (read.append(text), begun.set(), go.wait(20), encode(text))[3]
    )
    client = http.client.HTTPConnection(server.url.removeprefix("http://"))
    client.request("POST", COMPLETION, json.dumps({"prompt": ["A"] * 8}), {"Content-Type": "application/json"})
    assert begun.wait(20)
    client.close()
    assert soon(lambda: not server.engine.num_held)
    go.set()
    assert server.post(COMPLETION, {"prompt": "B", "max_tokens": 1}).status_code == 200
    assert read == ["A", "B"]


def test_work_for_a_client_that_leaves_has_ended_before_its_request_does():
    async def receive():
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def request():
        ended = []

        async def work():
            try:
                await asyncio.sleep(60)
            finally:
                ended.append(True)

        with pytest.raises(ClientDisconnect):
            await unless_hung_up(receive, work())
        return [*ended]

    assert asyncio.run(request()) == [True]


# ------------------------------------------------------------------------------------------------ odd tokens


def test_log_probabilities_tell_tokens_apart_by_their_bytes():
    tokenizer = byte_level()
    first, second, end = (tokenizer.convert_tokens_to_ids(name) for name in ("â", "Ī", "<|im_end|>"))
    logits = torch.zeros(len(tokenizer))
    logits[[first, second]] = torch.tensor([6.0, 8.0])
    with serving(scripted([first, second, end], tokenizer, logits=logits)) as server:
        body = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
        found = server.post(COMPLETION, body | {"logprobs": 2}).json()["choices"][0]["logprobs"]
        assert found["tokens"] == ["bytes:\\xe2", "bytes:\\x88", "<|im_end|>"]
        assert [sorted(top, key=top.get) for top in found["top_logprobs"]] == [
            ["bytes:\\x88", "bytes:\\xe2"],
            ["bytes:\\xe2", "bytes:\\x88"],
            ["bytes:\\x88", "<|im_end|>"],
        ]
        assert [top[token] for top, token in zip(found["top_logprobs"], found["tokens"], strict=True)] == found[
            "token_logprobs"
        ]
        # and one that was drawn is there if it is not among the likeliest
        body |= {"logprobs": 1, "logit_bias": {}, "temperature": 1e6, "top_k": 3, "seed": 2, "max_tokens": 30}
        found = server.post(COMPLETION, body).json()["choices"][0]["logprobs"]
        tops = found["top_logprobs"]
        assert {len(top) for top in tops} == {1, 2}
        assert [top[token] for top, token in zip(tops, found["tokens"], strict=True)] == found["token_logprobs"]
        none = server.post(COMPLETION, body | {"logprobs": 0}).json()["choices"][0]["logprobs"]
        assert [[*top] for top in none["top_logprobs"]] == [[token] for token in none["tokens"]]


@pytest.mark.parametrize(
    ("chosen", "top"),
    [("a", {"a": -0.5, "b": -2.0}), ("b", {"b": -2.0, "a": -0.5}), ("<0x61>", {"a": -9.0, "b": -2.0})],
)
def test_of_tokens_with_the_same_bytes_the_chosen_or_else_the_likeliest_counts(chosen, top):
    tokenizer = byte_fallback()
    logprobs = {"a": -0.5, "b": -2.0, "<0x61>": -9.0}
    logprobs = {name: logprobs[name] for name in (chosen, *logprobs)}
    ids = {tokenizer.convert_tokens_to_ids(name): log_p for name, log_p in logprobs.items()}
    steps = Tokens(scripted([], tokenizer)).steps([ids], 3)
    assert CompletionBody(prompt="x", logprobs=3).said("", steps, first=True)["logprobs"]["top_logprobs"] == [top]


def test_each_byte_of_a_part_of_a_character_has_two_digits():
    tokenizer = byte_level(merges=("â Ċ",))
    token = Tokens(scripted([], tokenizer)).token(tokenizer.convert_tokens_to_ids("âĊ"), -1.0)
    assert (token.text, token.utf8) == ("\\xe2\\x0a", b"\xe2\n")


def test_a_chats_log_probabilities_have_the_bytes_of_half_a_character():
    tokenizer = byte_level(chat_template="{{ messages[0].content }}")
    ids = [tokenizer.convert_tokens_to_ids(name) for name in ("âĪ", "Ī", "<|im_end|>")]
    with serving(scripted(ids, tokenizer)) as server:
        body = {"messages": HI, "max_tokens": 3, "temperature": 0, "logprobs": True, "top_logprobs": 1}
        for stream in (False, True):
            answer = server.post(CHAT, body | {"stream": stream})
            if stream:
                content = [
                    one
                    for e in events(answer)
                    for c in e["choices"]
                    if c["logprobs"]
                    for one in c["logprobs"]["content"]
                ]
            else:
                content = answer.json()["choices"][0]["logprobs"]["content"]
            assert [one["token"] for one in content] == ["\\xe2\\x88", "\\x88", "<|im_end|>"]
            assert [bytes(one["bytes"]) for one in content] == [b"\xe2\x88", b"\x88", b"<|im_end|>"]
            assert [one["top_logprobs"][0]["bytes"] for one in content] == [one["bytes"] for one in content]


def test_log_probabilities_of_a_whole_answer_are_written_away_from_the_event_loop(server, monkeypatch):
    threads, utf8 = set(), Vocabulary.utf8
    monkeypatch.setattr(
        Vocabulary, "utf8", lambda self, token: threads.add(threading.current_thread()) or utf8(self, token)
    )
    server.post(COMPLETION, {"prompt": "A", "max_tokens": 3, "logprobs": 5})
    loop = asyncio.run_coroutine_threadsafe(current_thread(), server.engine._loop).result()
    assert threads
    assert not threads & {loop, *server.engine._jobs._threads}


async def current_thread():
    return threading.current_thread()


LINE_ENDS = "a\N{LINE SEPARATOR}b\N{PARAGRAPH SEPARATOR}c\N{NEXT LINE}d\x0be\x1cf🙂"


@pytest.mark.parametrize("path", [COMPLETION, CHAT])
def test_every_event_of_a_stream_is_a_line_for_every_client(path):
    tokenizer = byte_level(chat_template="{{ messages[0].content }}")
    script = tokenizer.encode(LINE_ENDS)
    with serving(scripted(script, tokenizer)) as server:
        body = {"prompt": [1, 2], "messages": HI, "temperature": 0, "max_tokens": len(script), "stream": True}
        body.pop("messages" if path == COMPLETION else "prompt")
        answer = server.post(path, body)
        assert answer.text.isascii()
        assert answer.text.splitlines() == answer.text.split("\n")[:-1]
        choices = [one["choices"][0] for one in events(answer)]
        assert "".join(one.get("text") or one.get("delta", {}).get("content", "") for one in choices) == LINE_ENDS
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("n", [1, 2])
def test_logits_that_are_not_finite_are_an_error(bad, n):
    tokenizer = byte_level()
    with serving(scripted([5, 6], tokenizer)) as server:
        model, forward = server.llm.model, server.llm.model.forward
        model.forward = lambda ids, positions, *a, **k: (
            forward(ids, positions, *a, **k) * (bad if positions.max() > 2 else 1)
        )
        body = {"prompt": [1, 2], "max_tokens": 5, "n": n, "seed": 1}
        answer = server.post(COMPLETION, body)
        assert (answer.status_code, answer.json()["error"]["type"]) == (500, "server_error")
        assert "logits are not finite" in answer.json()["error"]["message"]
        *whole, last = events(server.post(COMPLETION, body | {"stream": True}))
        assert "logits are not finite" in last["error"]["message"]
        assert all("choices" in one for one in whole)
        assert server.becomes_idle()


def test_a_tokenizer_that_raises_fails_its_own_answer_only(monkeypatch):
    tokenizer = byte_level()
    decode = tokenizer.decode

    def failing(ids, **options):
        return 1 / 0 if 9 in ids else decode(ids, **options)

    monkeypatch.setattr(tokenizer, "decode", failing)
    with serving(scripted([5, 6, 7], tokenizer)) as server:
        body = {"prompt": [1, 2], "max_tokens": 3, "temperature": 0}
        with ThreadPoolExecutor() as threads:
            right = threads.submit(server.post, COMPLETION, body)
            wrong = [
                server.post(COMPLETION, body | {"logit_bias": {"9": 50}, "stream": stream}) for stream in (False, True)
            ]
            assert right.result().json()["choices"][0]["text"] == decode([5, 6, 7])
        assert wrong[0].status_code == 500
        for error in (wrong[0].json(), events(wrong[1])[-1]):
            assert error["error"]["message"].startswith("the tokenizer raised ZeroDivisionError")
        assert server.becomes_idle()


# ------------------------------------------------------------------------------------------------ bodies of others

TAKEN = [
    {"max_tokens": 4.0, "top_k": 5.0, "n": 1.0, "seed": 3.0},
    {"best_of": 1},
    {"n": 2, "best_of": 2, "seed": 1},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"functions": [{"name": "f"}], "function_call": "none"},
    {"top_k": -1, "top_p": 0.9},
    {"min_tokens": 0, "skip_special_tokens": True, "logit_bias": {}},
]


@pytest.mark.parametrize("options", TAKEN, ids=str)
def test_other_ways_to_say_the_same_are_taken(server, options):
    answer = server.post(COMPLETION, {"prompt": "A", "max_tokens": 2} | options)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"max_tokens": 4.5}, "max_tokens"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"tools": [{"type": "function"}], "tool_choice": "auto"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"functions": [{"name": "f"}], "tool_choice": "none"}, "functions"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 3}, "min_tokens"),
        ({"skip_special_tokens": False}, "skip_special_tokens"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stop_token_ids": list(range(17))}, "stop_token_ids"),
    ],
    ids=str,
)
def test_what_would_change_the_answer_is_not_taken(server, options, field):
    answer = server.post(COMPLETION, {"prompt": "A", "max_tokens": 2} | options)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_top_k_of_minus_one_and_stop_token_ids_mean_what_they_mean_to_vllm():
    tokenizer = byte_level()
    llm = scripted([5, 6, 7, 8], tokenizer)
    llm.sampling_defaults = {"top_k": 1}
    body = {"prompt": [1, 2], "max_tokens": 4, "temperature": 1e6, "seed": 1, "ignore_eos": True}
    with serving(llm) as server:
        ids = [server.post(COMPLETION, body | more).json()["choices"][0]["text"] for more in ({}, {"top_k": -1})]
        assert ids[0] == tokenizer.decode([5, 6, 7, 8]) != ids[1]
        for stop in ({"stop_token_ids": [6]}, {"stop_token_ids": [6], "stop": tokenizer.decode([8])}):
            choice = server.post(COMPLETION, body | stop).json()["choices"][0]
            assert (choice["text"], choice["finish_reason"]) == (tokenizer.decode([5]), "stop")
        choice = server.post(COMPLETION, body | {"stop_token_ids": [9], "stop": [7]}).json()["choices"][0]
        assert choice["text"] == tokenizer.decode([5, 6])


def test_min_tokens_and_a_bias_change_the_answer():
    tokenizer = byte_level()
    body = {"prompt": [1, 2], "max_tokens": 4, "temperature": 0, "stop_token_ids": [6]}
    with serving(scripted([5, 6, 6, 7], tokenizer)) as server:
        for more, expected in (
            ({}, [5]),
            ({"min_tokens": 1}, [5]),
            ({"min_tokens": 2, "logit_bias": {"9": 1}}, [5, 9]),
            ({"logit_bias": {"6": -100, "8": 1}}, [5, 8, 8, 7]),
            ({"logit_bias": {"8": 100}}, [8] * 4),
        ):
            (choice,) = server.post(COMPLETION, body | more).json()["choices"]
            assert choice["text"] == tokenizer.decode(expected), more


def test_an_empty_prompt_is_a_text_like_any_other(server):
    with serving(scripted([5], with_bos())) as other:
        body = {"max_tokens": 1, "temperature": 0}
        one, several = (other.post(COMPLETION, body | {"prompt": prompt}).json() for prompt in ("", [""]))
        assert one["choices"] == several["choices"]
        assert one["usage"]["prompt_tokens"] == 1
    for prompt in ("", [""]):  # no first token
        assert (
            server.post(COMPLETION, {"prompt": prompt})
            .json()["error"]["message"]
            .endswith("at least 1 token, got none")
        )


def with_bos():
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_level(bos_token="<|im_start|>")
    one = tokenizer.convert_tokens_to_ids("<|im_start|>")
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", one)]
    )
    return tokenizer


BODY = json.dumps({"prompt": "A", "max_tokens": 1}).encode()


@pytest.mark.parametrize(
    ("headers", "body", "status"),
    [
        ({}, BODY, 200),
        ({}, b"\xef\xbb\xbf" + BODY, 200),
        ({"Content-Type": "application/json"}, BODY, 200),
        ({"Content-Type": "Application/JSON; charset=utf-8"}, BODY, 200),
        ({"Content-Type": "application/vnd.api+json"}, BODY, 200),
        ({"Content-Encoding": "identity"}, BODY, 200),
        ({"Content-Type": "text/plain"}, BODY, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, BODY, 415),
        ({"Content-Type": "multipart/form-data; boundary=json"}, BODY, 415),
        ({"Content-Encoding": "gzip"}, BODY, 415),
        ({"Content-Encoding": "zstd", "Content-Type": "application/json"}, BODY, 415),
    ],
    ids=str,
)
def test_a_body_is_json_as_it_stands(server, headers, body, status):
    answer = server.post(COMPLETION, body, headers=headers)
    assert answer.status_code == status
    if status == 415:
        assert all(value.partition(";")[0] in answer.json()["error"]["message"] for value in headers.values())


@pytest.mark.parametrize("half", ["\\ud83c", "\\ud83c x", "a\\ude00"])
def test_half_a_character_of_javascript_is_named(server, half):
    error = server.post(COMPLETION, f'{{"prompt": "{half}"}}'.encode()).json()["error"]
    assert error["message"].endswith("(half of a surrogate pair is not a character)")


def test_an_errors_code_is_a_string_or_nothing(server):
    wrong = {
        "model_not_found": server.post(COMPLETION, {"prompt": "A", "model": "gpt"}),
        "context_length_exceeded": server.post(COMPLETION, {"prompt": "A" * 600}),
        None: server.post(COMPLETION, {"prompt": "A", "top_p": 2}),
    }
    assert {code: answer.json()["error"]["code"] for code, answer in wrong.items()} == {code: code for code in wrong}
    with server.engine.reserved(Answer("x", "tiny"), 8):
        assert server.post(COMPLETION, {"prompt": "A"}).json()["error"]["code"] == "rate_limit_exceeded"


# ------------------------------------------------------------------------------------------------ keys, health, the end


def test_with_a_key_only_its_owners_are_served():
    with serving(tiny_llm(), api_key="sésame") as server:
        right = {"Authorization": "Bearer sésame".encode()}
        wrong = [
            {},
            *({"Authorization": value.encode()} for value in ("Bearer sesame", "sésame", "Bearer", "Basic sésame")),
        ]
        for method, path, body in (
            ("GET", "/v1/models", None),
            ("GET", "/v1/models/tiny", None),
            ("POST", COMPLETION, {"prompt": "A", "max_tokens": 1}),
            ("POST", CHAT, {"messages": HI, "max_tokens": 1}),
        ):
            assert server.http.request(method, path, json=body, headers=right).status_code == 200
            for headers in wrong:
                answer = server.http.request(method, path, json=body, headers=headers)
                assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        assert server.http.get("/health").status_code == server.http.get("/metrics").status_code == 200


def test_health_answers_at_once_and_says_how_long_the_step_takes(server, monkeypatch):
    go, step = threading.Event(), server.llm.step
    assert server.http.get("/health").json()["step_seconds"] == 0
    monkeypatch.setattr(server.llm, "step", lambda: (go.wait(20), step())[1])
    with ThreadPoolExecutor() as threads:
        answer = threads.submit(server.post, COMPLETION, {"prompt": "A", "max_tokens": 2})
        assert soon(lambda: server.http.get("/health").json()["waiting"] == 1)
        first, second = (server.http.get("/health").json() for _ in range(2))
        assert 0 < first["step_seconds"] < second["step_seconds"]
        assert not answer.done()
        go.set()
        assert answer.result().status_code == 200
    assert soon(lambda: server.http.get("/health").json()["step_seconds"] == 0)


def test_health_says_when_nothing_can_be_computed(monkeypatch):
    with serving(tiny_llm()) as server:
        server.engine.lost = True
        assert server.http.get("/health").status_code == 503
        server.engine.lost = False
        monkeypatch.setattr(server.engine, "_step", lambda: 1 / 0)
        server.hang_up({"prompt": "A"}, when=lambda: server.http.get("/health").status_code == 503)


@pytest.mark.parametrize(
    ("arguments", "name", "value"),
    [
        ([], "timeout_keep_alive", 120),
        (["--keep-alive", "7"], "timeout_keep_alive", 7),
        ([], "timeout_graceful_shutdown", 30),
        (["--grace", "3"], "timeout_graceful_shutdown", 3),
    ],
)
def test_the_timeouts_are_options(arguments, name, value, monkeypatch):
    seen = {}

    def config(app, **options):
        seen.update(options)
        raise OSError("enough")

    monkeypatch.setattr(uvicorn, "Config", config)
    with pytest.raises(OSError, match="enough"):
        main([*arguments, "--port", "0", "--num-blocks", "8"])
    assert seen[name] == value


@pytest.mark.slow
@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGINT])
def test_at_the_end_of_its_grace_the_server_tells_its_clients(by, tmp_path):
    arguments = ("--num-blocks", "64", "--grace", "1")
    with forked_server(tmp_path, *arguments, step_seconds=0.05) as (server, http), ThreadPoolExecutor() as threads:
        body = {"prompt": "A", "max_tokens": 500, "ignore_eos": True}
        whole = threads.submit(http.post, COMPLETION, json=body)
        with http.stream("POST", COMPLETION, json=body | {"stream": True}) as answer:
            lines = answer.iter_lines()
            next(lines)
            assert soon(lambda: http.get("/health").json()["running"] == 2, every=0.05)
            os.kill(server.process.pid, by)
            rest = [line for line in lines if line]
        for error in (json.loads(rest[-1].removeprefix("data: ")), whole.result().json()):
            assert error["error"]["message"] == "the server ended before the answer was complete"
            assert error["error"]["type"] == "server_error"
        assert whole.result().status_code == 503
        assert server.ended_with(30) == 1
        assert "Traceback" not in server.said


# ------------------------------------------------------------------------------------------------ fields of messages

CALLS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<{{ call.name }}>{% endfor %}{% endfor %}"
)


@pytest.mark.parametrize("template", [None, TEMPLATE, CALLS], ids=["none", "qwen", "calls"])
def test_a_field_of_a_message_reaches_the_template_or_is_refused(template):
    tokenizer = byte_level(chat_template=template)
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "weather"}], "refusal": None, "audio": None}
    messages = [{"role": "user", "content": "Rain?", "name": "Ann"}, call, {"role": "user", "content": "Go on"}]
    body = ChatBody.read(json.dumps({"messages": messages}).encode())
    if template == CALLS:
        expected = tokenizer.apply_chat_template(messages, tokenize=False)
        assert "<weather>" in expected
        assert chat_prompt(body.messages, tokenizer) == (expected, True)
    else:
        with pytest.raises(Failure, match="'tool_calls' of a message is not known to the model's chat template"):
            chat_prompt(body.messages, tokenizer)
    thoughts = [messages[0], {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}, messages[2]]
    assert "Hm" not in chat_prompt(ChatBody.read(json.dumps({"messages": thoughts}).encode()).messages, tokenizer)[0]


def test_a_large_wrong_body_is_refused_in_no_time():
    parts = b'{"role":"user","content":[' + b",".join([b"{}"] * 4096) + b"]}"
    options = b",".join(b'"a%d":""' % i for i in range(200_000))
    for kind, body in (
        (ChatBody, b'{"messages":[' + b",".join([parts] * 200) + b"]}"),
        (CompletionBody, b'{"prompt":"a","logit_bias":{' + options + b"}}"),
        (CompletionBody, b'{"prompt":"a","stream_options":{' + options + b"}}"),
    ):
        start = time.process_time()
        with pytest.raises(Failure):
            kind.read(body)
        assert time.process_time() - start < 1.5  # 3 to 8 seconds where every item is looked at


def test_a_long_conversation_is_compared_with_its_prompt_in_no_time():
    tokenizer = byte_level()
    messages = [Message(role="user", content=f"b{'a' * 1900}{i}") for i in range(4096)]
    start = time.process_time()
    assert messages[-1].content in chat_prompt(messages, tokenizer)[0]
    assert time.process_time() - start < 3  # 11 seconds where each is searched for from the beginning
