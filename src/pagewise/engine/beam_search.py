"""Beam search on forked blocks (lesson 9)."""

from typing import NamedTuple


class Selection(NamedTuple):
    """To be written."""


def select(request, logits, ends):
    raise NotImplementedError


def apply(request, selection, memory):
    raise NotImplementedError
