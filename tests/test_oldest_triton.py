"""The oldest Triton that pyproject.toml allows takes every kernel. Older compilers understand less of Python.

All other tests use the installed version. This one installs the oldest into build/, once, which downloads 190 MB. Where
pip cannot do it, the test is skipped.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import torch
import triton
from covering import in_turns
from flash_compiled import KINDS, LENGTH, inputs_of

from conftest import ROOT, triton_kernels
from cudascope import triton_compiled
from cudascope.triton import launches
from cudascope.triton.compiler import specialised
from pagewise.experiments.compiled_kernels import CALLS, Variant
from pagewise.flash_attention import in_triton

OLDEST = re.search(r'"triton>=([\d.]+)', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))[1]
# The stages after "ttir" see no Python, and take twenty times as long.
READ_EACH = """
import functools, gc, json, sys, triton
from cudascope.triton import worker

gc.disable()  # it would take a fifth of the time
worker.compiled = functools.partial(worker.compiled, last="ttir")
for name, request in json.load(sys.stdin):
    try:
        worker.compile_kernel(request)
    except Exception as error:
        while error:
            print(f"{name}: {error}")
            error = error.__cause__
print(triton.__version__)
"""


@pytest.fixture
def oldest():
    """The folder of the oldest Triton, or None if it is installed."""
    if f"{triton.__version__}.".startswith(f"{OLDEST}."):
        return None
    folder = ROOT / "build" / f"triton-{OLDEST}-{sys.implementation.cache_tag}"
    if not folder.exists():
        begun = folder.with_name(f"{folder.name}-{os.getpid()}")
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", begun, f"triton=={OLDEST}.*"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            shutil.rmtree(begun, ignore_errors=True)
            pytest.skip(f"pip cannot install Triton {OLDEST}: {done.stderr.strip()[-200:]}")
        begun.rename(folder)
    return folder


def launched():
    """(kernel, request to compile it) of each call on a GPU that has it all, and of each option of FlashAttention.

    The types of FlashAttention take turns, because a compiler that is too old fails at what is written for an option.
    """
    requests = {}

    def keep(target, kernel, *args, grid, warmup, **options):
        launch = specialised(kernel, target.sm, args, options)
        requests[launch.request] = launch.name

    with mock.patch.object(launches, "_run", keep), triton_compiled("sm_90"):
        for call in CALLS:
            for dtype, options in ((torch.float16, False), (torch.float32, True)):
                try:
                    Variant(call, dtype, 32, options).case().run()
                except AssertionError:  # unified max looks at its results, which no kernel has written
                    assert call == "unified max"
        for kind, (dtype, saved) in in_turns(KINDS, (("fp16", torch.zeros(0)), ("fp32", torch.zeros(2, 1, 2, LENGTH)))):
            inputs, lse = inputs_of(64, dtype, kind), torch.zeros(1, 2, LENGTH)
            in_triton.forward(inputs, torch.empty_like(inputs.q), lse, saved)
            in_triton.backward(inputs, inputs.q, lse, inputs.q, lse, saved)
    return [(name, json.loads(request)) for request, name in requests.items()]


@pytest.mark.slow
def test_the_oldest_triton_takes_every_kernel(oldest):
    requests = launched()
    assert {name for name, _ in requests} == triton_kernels()
    path = os.pathsep.join(map(str, filter(None, (oldest, *sys.path))))
    environment = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": path}
    command = [sys.executable, "-P", "-c", READ_EACH]
    done = subprocess.run(command, input=json.dumps(requests), env=environment, capture_output=True, text=True)
    assert done.stdout.startswith(OLDEST), done.stdout + done.stderr
