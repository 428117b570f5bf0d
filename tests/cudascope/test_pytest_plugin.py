"""The pytest plugin: a marker that checks the launches of a test, and a fixture that observes them."""

import re
import tomllib

import pytest

from conftest import ROOT
from cudascope.toolchain.cache import cache_dir

pytest_plugins = ["pytester"]

# The installed package may have registered the plugin as "cudascope" already.
# hypothesispytest's summary imports hypothesis, and pytest rewrites all assertions of hypothesis each time. Where the
# package is installed, pytest says so once in a process that it cannot rewrite assertions of cudascope.
PLUGIN = "-p no:cudascope -p cudascope.pytest -p no:nbval -p no:cacheprovider -p no:hypothesispytest --strict-markers "
PLUGIN += "-W ignore::pytest.PytestAssertRewriteWarning"
KERNELS = '''
import numpy as np
import pytest
import cudascope

REVERSE = """
__global__ void reverse(const float* in, float* out, bool wait) {
    __shared__ float row[64];
    row[threadIdx.x] = in[threadIdx.x];
    if (wait) __syncthreads();
    out[threadIdx.x] = row[63 - threadIdx.x];
}
"""

def run(wait=True):
    x, out = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    cudascope.CudaKernel(REVERSE, "reverse")[1, 64](x, out, wait)
    return x, out
'''


@pytest.fixture
def cache():
    return cache_dir()


@pytest.fixture
def run_tests(cache, pytester, monkeypatch):
    monkeypatch.setenv("CUDASCOPE_CACHE", str(cache))  # pytester has moved the home folder

    def run(text, *options):
        pytester.makepyfile(KERNELS + text)
        return pytester.runpytest_inprocess(*PLUGIN.split(), *options)

    return run


def test_a_marked_test_runs_once_per_schedule(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=3)
def test_it():
    x, out = run()
    assert out.tolist() == x[::-1].tolist()
""", "-v")  # fmt: skip
    done.assert_outcomes(passed=3)
    done.stdout.fnmatch_lines([f"*test_it[[]{name}]*" for name in ("in_order", "seed0", "seed1")])


def test_schedules_multiply_other_parameters_and_reach_the_launch(run_tests):
    done = run_tests("""
from cudascope.watch.contexts import current_run
seen = []

@pytest.mark.cudascope(schedules=2)
@pytest.mark.parametrize("n", [1, 2])
def test_it(n):
    seen.append((n, current_run.get().seed, current_run.get().mode.name))
    run()

def test_seen():
    assert sorted(seen, key=str) == [(n, seed, "CHECK") for n in (1, 2) for seed in (0, None)]
    assert current_run.get().mode.name == "PLAIN"
""")  # fmt: skip
    done.assert_outcomes(passed=5)


def test_a_finding_fails_the_test_and_is_shown(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=2)
def test_it():
    run(wait=False)
""")  # fmt: skip
    done.assert_outcomes(failed=2)
    done.stdout.fnmatch_lines(["cudascope found:", "race, * ×: reverse, line * with no barrier between*"])


def test_a_finding_is_noted_when_the_test_fails_by_itself(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=1)
def test_it():
    run(wait=False)
    assert False, "the result is wrong"
""")  # fmt: skip
    done.assert_outcomes(failed=1)
    done.stdout.fnmatch_lines(["*the result is wrong*", "*cudascope found in this test:*", "*race, * ×: reverse*"])


def test_a_finding_is_not_lost_when_the_test_expects_an_error(run_tests):
    done = run_tests("""
@pytest.mark.cudascope
def test_it():
    try:
        run(wait=False)
    except RuntimeError:
        pass
""")  # fmt: skip
    done.assert_outcomes(failed=3)


def test_rules_can_be_switched(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=1, ignore=("race",))
def test_ignored():
    run(wait=False)

@pytest.mark.cudascope(schedules=1, also=("left before barrier",))
def test_also():
    source = "__global__ void k(int* x) { if (threadIdx.x) return; __syncthreads(); x[0] = 1; }"
    cudascope.CudaKernel(source, "k")[1, 64](np.zeros(1, np.int32))
""")  # fmt: skip
    done.assert_outcomes(passed=1, failed=1)
    done.stdout.fnmatch_lines(["left before barrier, * ×: k*"])


@pytest.mark.parametrize(
    ("marker", "sentence"),
    [
        ("schedules=0", "schedules must be an integer of at least 1, got 0"),
        ("schedules=True", "schedules must be an integer of at least 1, got True"),
        ("seeds=3", "its options are schedules, ignore, also, outputs, got 'seeds'"),
        ('outputs="out"', "outputs must be a tuple of names of parameters, as in *"),
    ],
)
def test_a_marker_that_cannot_be_read_fails_its_test_alone(run_tests, marker, sentence):
    done = run_tests(f"@pytest.mark.cudascope({marker})\ndef test_it():\n    run()\n\ndef test_other():\n    run()\n")
    done.assert_outcomes(failed=1, passed=1)
    done.stdout.fnmatch_lines([f"marker cudascope: {sentence}"])


def test_outputs_of_a_marker_are_names_of_parameters(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=1, outputs=("out",))
def test_all_is_written():
    run()

@pytest.mark.cudascope(schedules=1, outputs=("out",))
def test_not_all_is_written():
    x, out = np.zeros(64, np.float32), np.zeros(65, np.float32)
    cudascope.CudaKernel(REVERSE, "reverse")[1, 64](x, out, True)

@pytest.mark.cudascope(schedules=1, outputs=("result",))
def test_no_such_parameter():
    run()
""")  # fmt: skip
    done.assert_outcomes(passed=1, failed=2)
    done.stdout.fnmatch_lines(["never written, 1 ×: reverse: no thread writes 1 of the 65 elements of out, * out*64*"])
    done.stdout.fnmatch_lines(["*ValueError: outputs: no launch inside has given an array to a parameter 'result'*"])


def test_an_unknown_rule_fails_the_test(run_tests):
    done = run_tests('@pytest.mark.cudascope(ignore=("races",))\ndef test_it():\n    run()\n')
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines(["*ValueError: ignore must name what can be switched*"])


def test_a_marked_test_without_a_launch_warns(run_tests):
    done = run_tests("@pytest.mark.cudascope\ndef test_it():\n    pass\n")
    done.assert_outcomes(passed=3, warnings=3)
    done.stdout.fnmatch_lines(["*checked nothing: the test launched no kernel on the CPU"])


def test_a_marked_method_of_unittest_is_no_silent_pass(run_tests):
    done = run_tests("""
import unittest

class TestIt(unittest.TestCase):
    @pytest.mark.cudascope
    def test_it(self):
        run()
""")  # fmt: skip
    done.assert_outcomes(failed=1)


def test_a_skipped_test_is_skipped_and_an_expected_failure_is_expected(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=1)
def test_skipped():
    pytest.skip("not today")

@pytest.mark.xfail(strict=True)
@pytest.mark.cudascope(schedules=1)
def test_known_race():
    run(wait=False)
""")  # fmt: skip
    done.assert_outcomes(skipped=1, xfailed=1)


def test_the_fixture_observes(run_tests):
    done = run_tests("""
def test_it(cudascope_observe):
    run()
    assert cudascope_observe.launches[0].barriers == 1
    run()
    assert cudascope_observe.count("read", "global").lanes == 128

def test_afterwards():
    from cudascope.watch.contexts import current_run
    assert current_run.get().mode.name == "PLAIN"
""")  # fmt: skip
    done.assert_outcomes(passed=2)


def test_marker_and_fixture_together_are_refused(run_tests):
    done = run_tests("@pytest.mark.cudascope\ndef test_it(cudascope_observe):\n    run()\n")
    done.assert_outcomes(failed=3)
    done.stdout.fnmatch_lines(["*cannot be nested*"])


def test_launches_of_a_check_inside_a_marked_test_count(run_tests):
    done = run_tests("""
@pytest.mark.cudascope(schedules=1)
def test_right():
    with cudascope.check() as report:
        run()
    assert report.num_checked == 1

@pytest.mark.cudascope(schedules=1)
def test_wrong():
    with cudascope.check(stop=False):
        run(wait=False)

@pytest.mark.cudascope(schedules=1, ignore=("race",))
def test_ignored():
    with cudascope.check(stop=False) as report:
        run(wait=False)
    assert report.findings
""", "-W", "error::pytest.PytestWarning")  # fmt: skip
    done.assert_outcomes(passed=2, failed=1)
    done.stdout.fnmatch_lines(["cudascope found:", "race, * ×: reverse, line * with no barrier between*"])


def test_other_tests_are_left_alone(run_tests):
    done = run_tests("""
def test_it(request):
    run(wait=False)
    assert "cudascope_schedule" not in request.fixturenames
    assert not hasattr(request.node, "callspec")
""")  # fmt: skip
    done.assert_outcomes(passed=1)


def test_the_example_of_the_readme_passes(run_tests):
    *_, example = re.findall(r"```python\n(.*?)```", (ROOT / "src/cudascope/README.md").read_text(), re.DOTALL)
    run_tests(example).assert_outcomes(passed=4)


def test_an_installed_package_registers_the_plugin():
    project = tomllib.loads((ROOT / "src/cudascope/pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"cudascope": "cudascope.pytest"}
