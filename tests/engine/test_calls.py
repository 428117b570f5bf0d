"""How many functions of the package a request enters, and how many calls a token takes. Both are counted exactly."""

import sys
from collections import Counter

from conftest import ROOT
from pagewise.engine import LLM, SamplingParams
from pagewise.models import tiny_model

PACKAGE = str(ROOT / "src" / "pagewise")
MODEL, TOKENIZER = tiny_model()


def counted(num_tokens: int) -> Counter:
    """Return the calls of each function of the package while a fresh engine answers a prompt."""
    found = Counter()

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            found[frame.f_code] += 1

    llm, params = LLM(MODEL, tokenizer=TOKENIZER, num_blocks=64), SamplingParams(num_tokens, temperature=0)
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        llm.generate(["A block table maps"], params, progress=False)
    finally:
        sys.setprofile(before)
    return found


def test_a_request_enters_few_functions_and_a_token_takes_few_calls(shapes_unchecked):
    counted(2)  # what is computed once
    short, long = counted(2), counted(12)
    assert len(long) <= 88  # 86 with the kernels of AVX2; other CPUs may take one or two more
    assert (long.total() - short.total()) / 10 <= 143  # 140
