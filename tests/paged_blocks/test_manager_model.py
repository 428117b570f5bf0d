"""Model-based test of the block manager: random calls against a dictionary of tokens, checked after every step.

4,000 steps; `PAGEWISE_MODEL_STEPS=100000 pytest tests/paged_blocks/test_manager_model.py` takes more, differently each
time.
K and V hold a number made from *all* tokens up to their own, as in a transformer. A block shared after the wrong
prefix, a lost copy and an overwritten block therefore all show up as wrong content.
"""

import itertools
import os
import random
import zlib
from array import array

import pytest
import torch
from block_cases import check_invariants, snapshot
from hypothesis import HealthCheck, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from pagewise.paged_blocks import BlockManager, OutOfBlocks, PagedKVCache

pytestmark = pytest.mark.slow

ASKED = "PAGEWISE_MODEL_STEPS" in os.environ
NUM_STEPS = int(os.environ.get("PAGEWISE_MODEL_STEPS", "4000"))

picks = st.integers(0, 99)
tokens = st.integers(0, 2)  # few, so that prompts meet


def contents(prefix: list[int], start: int = 0) -> list[float]:
    """Return K for tokens start … of a sequence: numbers exact in float32 that depend on every token before."""
    return [float(zlib.crc32(array("q", prefix[: i + 1]).tobytes()) % 2**24) for i in range(start, len(prefix))]


class Modelled:
    """The model of one sequence: its tokens, and how many of them are written and committed."""

    def __init__(self, tokens: list[int], written: int) -> None:
        self.tokens, self.written, self.committed = tokens, written, written


class BlockManagerModel(RuleBasedStateMachine):
    steps = 0
    events: dict[str, int] = {}  # noqa: RUF012  how often the interesting things happened

    @initialize(
        num_blocks=st.sampled_from([1, 3, 6, 8, 12, 16, 20]),
        block_size=st.sampled_from([1, 2, 3, 4]),
        prefix_cache=st.sampled_from([True, True, True, False]),
        layout=st.sampled_from(["nhd", "vllm"]),
    )
    def start(self, num_blocks, block_size, prefix_cache, layout):
        self.manager = BlockManager(num_blocks, block_size, prefix_cache=prefix_cache)
        self.cache = PagedKVCache(1, num_blocks, block_size, 1, 4, layout=layout)
        self.cache.k.fill_(torch.nan)
        self.cache.v.fill_(torch.nan)
        self.model: dict[int, Modelled] = {}
        self.ever_committed: dict[tuple[int, ...], None] = {}  # ordered, so that a failure replays
        self.next_id = 0
        self.allocate_as(self.new_id(), [0], compute=True)

    # -------------------------------------------------------------------------------------- rules

    @precondition(lambda self: len(self.model) < 6)
    @rule(prompt=st.lists(tokens, min_size=1, max_size=12), compute=st.booleans())
    def allocate(self, prompt, compute):
        fair_share = self.manager.num_blocks * self.manager.block_size // 3
        self.allocate_as(self.new_id(), prompt[: max(fair_share, 1)], compute)

    @precondition(lambda self: self.ever_committed and len(self.model) < 6)
    @rule(pick=picks, more=st.lists(tokens, min_size=1, max_size=3), compute=st.booleans())
    def allocate_with_a_known_beginning(self, pick, more, compute):
        known = list(self.ever_committed)
        self.allocate_as(self.new_id(), [*known[pick % len(known)], *more], compute)

    @precondition(lambda self: self.model)
    @rule(pick=picks, token=tokens)
    def append(self, pick, token):
        self.append_to(self.pick(pick), token)

    @precondition(lambda self: self.model)
    @rule(pick=picks, more=st.lists(tokens, min_size=1, max_size=6))
    def decode(self, pick, more):
        """Some steps of an engine: append, write, commit."""
        seq_id = self.pick(pick)
        for token in more:
            self.append_to(seq_id, token)
            if seq_id in self.model:
                self.compute(seq_id)

    @precondition(lambda self: 0 < len(self.model) < 6)
    @rule(pick=picks, children=st.integers(1, 3), token=tokens)
    def branch(self, pick, children, token):
        """Parallel sampling: twins part at once, in one batch."""
        parent_id = self.pick(pick)
        family = [parent_id, *(self.fork_of(parent_id) for _ in range(children))]
        for i, seq_id in enumerate(family):
            self.append_to(seq_id, (token + i) % 3)

    @precondition(lambda self: self.model)
    @rule(token=tokens)
    def append_to_all(self, token):
        """One batch: every sequence grows before anything is copied or written."""
        for seq_id in list(self.model):
            self.append_to(seq_id, token)

    @precondition(lambda self: self.model)
    @rule(pick=picks, upto=picks)
    def write_some(self, pick, upto):
        seq_id = self.pick(pick)
        self.write(seq_id, upto % (len(self.model[seq_id].tokens) + 1))

    @precondition(lambda self: self.model)
    @rule(pick=picks, upto=st.none() | picks)
    def commit(self, pick, upto):
        """All that is written, or part of it."""
        seq_id = self.pick(pick)
        seq = self.model[seq_id]
        self.commit_upto(
            seq_id, seq.written if upto is None else seq.committed + upto % (seq.written - seq.committed + 1)
        )

    @precondition(lambda self: 0 < len(self.model) < 6)
    @rule(pick=picks)
    def fork(self, pick):
        self.fork_of(self.pick(pick))

    @precondition(lambda self: len(self.model) > 1)
    @rule(pick=picks)
    def free(self, pick):
        seq_id = self.pick(pick)
        self.manager.free(seq_id)
        del self.model[seq_id]

    @precondition(lambda self: self.model)
    @rule(pick=picks, compute=st.booleans())
    def preempt_and_resume(self, pick, compute):
        seq_id = self.pick(pick)
        self.manager.free(seq_id)
        self.allocate_as(seq_id, self.model.pop(seq_id).tokens, compute)

    @rule()
    def carry_out_copies(self):
        self.cache.copy_blocks(self.manager.take_copies())

    # -------------------------------------------------------------------------------------- what rules share

    def make_room(self):
        """Preempt the two newest sequences, copies still pending or not, so that a full pool does not stay full."""
        for seq_id in list(self.model)[-2:]:
            self.manager.free(seq_id)
            del self.model[seq_id]

    def fork_of(self, parent_id):
        child_id, parent = self.new_id(), self.model[parent_id]
        self.manager.fork(parent_id, child_id)
        self.model[child_id] = Modelled(parent.tokens.copy(), parent.written)
        self.model[child_id].committed = parent.committed
        return child_id

    def append_to(self, seq_id, token):
        if seq_id not in self.model:  # preempted meanwhile
            return
        seq, manager, P = self.model[seq_id], self.manager, self.manager.block_size
        table = manager.block_table(seq_id)
        offset = len(seq.tokens) % P
        copied = offset > 0 and manager.ref_count(table[-1]) > 1
        if (offset == 0 or copied) and manager.num_free_blocks == 0:
            self.refused(OutOfBlocks, manager.append, seq_id, token)
            self.make_room()
            return
        slot = manager.append(seq_id, token)
        seq.tokens.append(token)
        after = manager.block_table(seq_id)
        assert slot == after[-1] * P + offset
        assert len(after) == len(table) + (offset == 0)
        assert (after[: len(table)] != table) is copied  # a block is left behind only where it was shared
        self.count("copies", copied)

    def compute(self, seq_id):
        self.write(seq_id, len(self.model[seq_id].tokens))
        self.commit_upto(seq_id, len(self.model[seq_id].tokens))

    def commit_upto(self, seq_id, num_computed):
        seq, P = self.model[seq_id], self.manager.block_size
        self.manager.commit(seq_id, num_computed)
        self.ever_committed.update(dict.fromkeys(tuple(seq.tokens[:stop]) for stop in range(P, num_computed + 1, P)))
        seq.committed = num_computed

    def allocate_as(self, seq_id, prompt, compute):
        manager, P = self.manager, self.manager.block_size
        before, free, evictions = snapshot(manager), manager.num_free_blocks, manager.stats().evictions
        try:
            cached = manager.allocate(seq_id, prompt)
        except OutOfBlocks:
            assert snapshot(manager) == before
            assert -(-len(prompt) // P) > free
            self.count("out of blocks")
            self.make_room()
            return
        self.model[seq_id] = Modelled(prompt, cached)
        assert cached % P == 0
        assert cached <= len(prompt) - 1
        assert cached <= self.longest(prompt, self.ever_committed)
        if not manager.prefix_cache:
            assert cached == 0
        else:
            # nothing was ever evicted: all that was committed is found. And what live sequences hold is found always.
            live = {tuple(seq.tokens[: seq.committed // P * P]) for i, seq in self.model.items() if i != seq_id}
            held = {prefix[:stop] for prefix in live for stop in range(P, len(prefix) + 1, P)}
            assert cached >= self.longest(prompt, self.ever_committed if evictions == 0 else held)
        self.count("hits", cached > 0)
        self.count("evictions", manager.stats().evictions > evictions)
        if compute:
            self.compute(seq_id)

    def longest(self, prompt, prefixes):
        """The longest prefix of the prompt, whole blocks and without its last token, all of whose blocks are known."""
        P, stop = self.manager.block_size, 0
        while stop + P <= len(prompt) - 1 and tuple(prompt[: stop + P]) in prefixes:
            stop += P
        return stop

    def write(self, seq_id, stop):
        """Compute tokens up to `stop`: pending copies first, as an engine does."""
        seq = self.model[seq_id]
        if stop <= seq.written:
            return
        self.cache.copy_blocks(self.manager.take_copies())
        k = torch.tensor(contents(seq.tokens[:stop], seq.written)).view(-1, 1, 1).expand(-1, 1, 4)
        self.cache.write(0, torch.tensor(self.manager.slots(seq_id, seq.written, stop)), k, -k)
        seq.written = stop

    def refused(self, error, call, *args):
        before = snapshot(self.manager)
        try:
            call(*args)
        except error:
            assert snapshot(self.manager) == before
        else:
            raise AssertionError(f"{call.__name__}{args} was not refused")

    def pick(self, number):
        return list(self.model)[number % len(self.model)]

    def new_id(self):
        self.next_id += 1
        return self.next_id

    def count(self, event, happened=True):
        self.events[event] = self.events.get(event, 0) + bool(happened)

    # -------------------------------------------------------------------------------------- after every step

    @invariant()
    def tables_counts_and_free_list_agree(self):
        type(self).steps += 1
        assert set(self.manager.sequences) == set(self.model)
        for seq_id, seq in self.model.items():
            assert self.manager.tokens(seq_id) == seq.tokens
            assert self.manager.num_tokens(seq_id) == len(seq.tokens)
        check_invariants(self.manager)

    @invariant()
    def every_sequence_reads_what_it_wrote(self):
        pending = dict(self.manager._copies)
        waiting = {dst: src for src, dst in self.manager.take_copies()}
        self.manager._copies.update(pending)  # only looked at: they stay pending
        for seq_id, seq in self.model.items():
            table = [waiting.get(block, block) for block in self.manager.block_table(seq_id)]
            k, v = self.cache.gather(0, table, seq.written)
            expected = torch.tensor(contents(seq.tokens[: seq.written])).view(-1, 1, 1).expand(-1, 1, 4)
            assert k.equal(expected)
            assert v.equal(-expected)

    def teardown(self):
        if not hasattr(self, "manager"):
            return
        for seq_id in self.model:
            self.manager.free(seq_id)
        assert self.manager.num_free_blocks == self.manager.num_blocks
        assert self.manager.stats().used == 0


def test_random_calls_against_a_model(shapes_unchecked):
    """Rounds of examples from fixed seeds, or random ones if a number of steps is asked for, until all are made."""
    BlockManagerModel.steps, BlockManagerModel.events = 0, {}
    first = random.randrange(2**32) if ASKED else 0
    for number in itertools.count(first):
        run_state_machine_as_test(
            seed(number)(BlockManagerModel),
            settings=settings(
                max_examples=25, stateful_step_count=100, deadline=None, database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )  # fmt: skip
        if BlockManagerModel.steps >= NUM_STEPS:
            break
    print(f"{BlockManagerModel.steps} steps from seed {first}: {BlockManagerModel.events}")
    events = ("copies", "hits", "evictions", "out of blocks")
    for event in events:  # a walk that never meets them proves little
        assert BlockManagerModel.events.get(event, 0) >= NUM_STEPS / 200
