"""CONTRIBUTING, "How to add …": the names exist, and a new head size or backend gets its tests and its choice."""

import importlib.util
import re
from types import ModuleType

import pytest
import torch
from covering import label

from conftest import ROOT
from pagewise.flash_attention import in_cuda as flash_cuda
from pagewise.paged_attention import in_cuda as paged_cuda
from pagewise.tools.device import choose_backend

CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
RECIPES = CONTRIBUTING[CONTRIBUTING.index("## How to add a head size") : CONTRIBUTING.index("## Glossary")]
NAMED = re.findall(r"`(\w+)`(?: and its record to `\w+`)? in\s+`([\w/.-]+\.\w+)`", RECIPES)
COMMANDS = re.findall(r"`pytest (tests/\S+\.py) -k (\d+)`", RECIPES)
HEAD_SIZES = {"paged_attention": paged_cuda, "flash_attention": flash_cuda}  # the owner, by the folder of the tests


def test_every_name_is_in_its_file():
    assert len(NAMED) > 8
    missing = [(name, file) for name, file in NAMED if not re.search(rf"\b{name}\b", (ROOT / file).read_text())]
    assert missing == []


def imported_again(file: str) -> ModuleType:
    """Return a test module, read again: it then knows what was changed in the meantime."""
    spec = importlib.util.spec_from_file_location("imported_again", ROOT / file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_there_is_a_command_for_each_kind_of_kernel():
    assert [file.split("/")[1] for file, _ in COMMANDS] == list(HEAD_SIZES)


@pytest.mark.parametrize(("file", "number"), COMMANDS, ids=list(HEAD_SIZES))
def test_the_command_for_a_new_head_size_selects_its_cases(file, number, monkeypatch):
    """Without a GPU too, and it is no head size yet, so that no other case has the number in its name."""
    owner = HEAD_SIZES[file.split("/")[1]]
    assert int(number) not in owner.HEAD_SIZES
    assert not [case for case in imported_again(file).CASES if number in label(case)]
    monkeypatch.setattr(owner, "HEAD_SIZES", (*owner.HEAD_SIZES, int(number)))
    assert [case for case in imported_again(file).CASES if number in label(case) and case["head_size"] == int(number)]


def test_a_new_backend_is_returned_as_it_is_and_named_where_an_unknown_one_is_refused():
    cpu = torch.device("cpu")
    assert choose_backend("mine", cpu, "cannot", others=("mine",)) == "mine"
    with pytest.raises(ValueError, match='backend must be "auto", "torch", "triton" or "mine", got \'yours\''):
        choose_backend("yours", cpu, others=("mine",))
