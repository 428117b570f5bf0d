"""64 clients at once, and half of them hang up half-way. All answers are right, and no memory leaks.

PAGEWISE_STORM_SECONDS=120 runs this for two minutes.
"""

import asyncio
import json
import os
import random
import statistics
from collections import Counter

import pytest

pytest.importorskip("uvicorn", reason="the server needs the extra `serve`")

import httpx
from serving import serving

from pagewise.engine import LLM, SamplingParams, model_runner
from pagewise.models import tiny_model

pytestmark = pytest.mark.slow

SECONDS = float(os.environ.get("PAGEWISE_STORM_SECONDS", 3))
NUM_CLIENTS, MAX_QUEUE = 64, 48  # so that some are told to come back later


def cases():
    """Return (path, body) of requests of many kinds, half of them streams. The prompts begin alike."""
    beginnings = ("Attention is ", "Each sequence has a block table, and its blocks ", "def softmax(x):\n    ", "The ")
    for i in range(24):
        prompt = beginnings[i % 4] + "page by page " * (i // 4)
        body = {"max_tokens": 4 + i, "seed": i, "stream": i % 2 == 0, "ignore_eos": True}
        body |= {"temperature": 0} if i % 3 == 0 else {"temperature": 0.9, "top_p": 0.95, "n": 1 + i % 2}
        if i % 5 == 0:
            yield "/v1/chat/completions", body | {"messages": [{"role": "user", "content": prompt}]}
        else:
            yield "/v1/completions", body | {"prompt": prompt}


def expected(llm, bodies):
    """Return the texts of each body's choices."""
    names = SamplingParams.__match_args__
    params = [SamplingParams(**{name: body[name] for name in names if name in body}) for body in bodies]
    prompts = [body.get("prompt") or f"user: {body['messages'][0]['content']}\nassistant:" for body in bodies]
    return [[choice.text for choice in output.choices] for output in llm.generate(prompts, params)]


def texts_of(answers):
    """Return the texts of the choices in a whole answer, or in the chunks of a stream."""
    texts = {}
    for choice in (choice for answer in answers for choice in answer["choices"]):
        said = choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        texts[choice["index"]] = texts.get(choice["index"], "") + said
    return [text for _, text in sorted(texts.items())]


async def read(client, path, body):
    """Yield the JSON values of an answer as they come."""
    async with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        if not body["stream"]:
            yield json.loads(await answer.aread())
            return
        async for line in answer.aiter_lines():
            if line == "data: [DONE]":
                yield None
            elif line:
                yield json.loads(line.removeprefix("data: "))


async def ask(client, path, body, texts):
    """Read an answer to its end, and return "right", "wrong" or "busy"."""
    try:
        answers = [answer async for answer in read(client, path, body)]
    except httpx.HTTPStatusError as error:
        return await told(error)
    ended = answers.pop() is None if body["stream"] else True
    return "right" if ended and texts_of(answers) == texts else "wrong"


async def hang_up(client, path, body, after):
    """Leave a stream after a few events, or a whole answer after a while."""
    try:
        async with asyncio.timeout(None if body["stream"] else after / 100):
            answers = read(client, path, body)
            async for _ in answers:
                after -= 1
                if after <= 0:
                    break
            await answers.aclose()
    except httpx.HTTPStatusError as error:
        return await told(error)
    except TimeoutError:
        pass
    return "hung up"


async def told(error):
    """Come back later if the queue is full."""
    await asyncio.sleep(0.1)
    return "busy" if error.response.status_code == 429 else f"error {error.response.status_code}"


def resident():
    """Return the bytes of memory that this process uses."""
    with open("/proc/self/statm") as f:
        return int(f.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def storm(url, requests):
    """Return the verdicts of all clients, and the memory over time."""
    end = asyncio.get_running_loop().time() + SECONDS
    counts, memory = Counter(), []

    async def client(number):
        draw = random.Random(number)
        while asyncio.get_running_loop().time() < end:
            path, body, texts = draw.choice(requests)
            if number % 2:
                counts[await ask(http, path, body, texts)] += 1
            else:
                counts[await hang_up(http, path, body, draw.randint(0, body["max_tokens"] // 2))] += 1

    async def watch():
        while asyncio.get_running_loop().time() < end:
            memory.append(resident())
            await asyncio.sleep(SECONDS / 100)

    async with httpx.AsyncClient(base_url=url, timeout=60, verify=False, limits=httpx.Limits()) as http:
        await asyncio.gather(watch(), *(client(number) for number in range(NUM_CLIENTS)))
    return counts, memory


@pytest.mark.usefixtures("shapes_unchecked")
def test_a_storm_of_clients_leaves_nothing_behind(monkeypatch):
    # Packed products have a kernel for each number of rows. The first kernels would be taken for a leak.
    monkeypatch.setattr(model_runner, "free_memory", lambda: 0)
    model, tokenizer = tiny_model()
    paths, bodies = zip(*cases(), strict=True)
    requests = list(zip(paths, bodies, expected(LLM(model, tokenizer=tokenizer), bodies), strict=True))
    llm = LLM(model, tokenizer=tokenizer, num_blocks=128, max_num_seqs=32)
    with serving(llm, max_queue=MAX_QUEUE) as server:
        counts, memory = asyncio.run(storm(server.url, requests))
        assert server.becomes_idle()
    quarter = len(memory) // 4
    grown = (statistics.mean(memory[-quarter:]) - statistics.mean(memory[quarter : 2 * quarter])) / 2**20
    print(f"{dict(counts)}, memory {memory[0] // 2**20} → {memory[-1] // 2**20} MB, {grown:.1f} MB in half the time")
    assert set(counts) == {"right", "hung up", "busy"}
    assert min(counts.values()) > SECONDS
    assert grown < 8
