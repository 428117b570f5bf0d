"""Watch an engine while it serves: the work of each step, and the owners of the blocks (lesson 9)."""

from collections import Counter
from collections.abc import Sequence

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from pagewise.engine import LLM, Output, SamplingParams
from pagewise.engine.batch import Batch
from pagewise.engine.profile import Profile
from pagewise.engine.request import Chunk, Request
from pagewise.figures import Moment
from pagewise.paged_blocks import BlockPool


class Watch:
    """Record the decisions of an engine's scheduler, step by step, in `moments`. Requests have the numbers 0, 1, …"""

    def __init__(self, llm: LLM) -> None:
        self.moments: list[Moment] = []
        self.batches: list[Batch] = []  # each step of a paged engine as one value
        self._llm, self._schedule = llm, llm.scheduler.schedule
        self._numbers: dict[int, int] = {}
        self._computed: dict[object, int] = {}  # sequence → the most tokens that were ever computed

    def __enter__(self) -> "Watch":
        self._llm.scheduler.schedule = self._note
        return self

    def __exit__(self, *_: object) -> None:
        del self._llm.scheduler.schedule  # the method is visible again

    def _note(self) -> list[Chunk]:
        scheduler = self._llm.scheduler
        before = list(scheduler.running)
        chunks = self._schedule()
        manager = memory if isinstance(memory := self._llm.memory, BlockPool) else None
        if manager is not None and chunks:
            self.batches.append(Batch.of(chunks, self._llm.memory.device, manager.block_size))
        computed: dict[int, tuple[str, int]] = {}
        for chunk in chunks:
            number = self._number(chunk.request)
            kind, tokens = computed.get(number, (self._kind(chunk), 0))
            computed[number] = kind, tokens + chunk.stop - chunk.start
            self._computed[chunk.sequence] = max(chunk.stop, self._computed.get(chunk.sequence, 0))
        running, waiting, preempted = (
            [self._number(request) for request in requests]
            for requests in (scheduler.running, scheduler.waiting, [r for r in before if r in scheduler.waiting])
        )
        self.moments.append(Moment(computed, running, waiting, preempted, self._blocks(manager)))
        return chunks

    def _number(self, request: Request) -> int:
        return self._numbers.setdefault(request.id, len(self._numbers))

    def _kind(self, chunk: Chunk) -> str:
        if chunk.start < self._computed.get(chunk.sequence, 0):
            return "again"
        return "decode" if chunk.start >= len(chunk.request.prompt) else "prompt"

    def _blocks(self, manager: BlockPool | None) -> dict[int, int]:
        """Return {request: number of its blocks in only one table, -1: number of blocks in several tables}."""
        if manager is None:
            return {}
        found: dict[int, int] = {}
        shared: set[int] = set()
        for request in self._llm.scheduler.running:
            for sequence in request.live if request.forked else request.live[:1]:
                table = sequence.block_table
                own = [block for block in table if manager.ref_count(block) == 1]
                shared |= set(table) - set(own)
                number = self._number(request)
                found[number] = found.get(number, 0) + len(own)
        return found | ({-1: len(shared)} if shared else {})


def watch(
    llm: LLM, prompts: Sequence[list[int]], sampling: Sequence[SamplingParams]
) -> tuple[list[Moment], list[Output]]:
    """Serve requests that all arrive at once. Return every step, and the outputs in the order of the prompts."""
    with Watch(llm) as seen:
        outputs = llm.generate(list(prompts), list(sampling), progress=False)
    return seen.moments, outputs


class Operations(TorchDispatchMode):
    """Count every operation of torch inside a `with` statement, and the bytes of its results, by (inner span, name)."""

    def __init__(self, profile: Profile) -> None:
        super().__init__()
        self.times: Counter[tuple[str, str]] = Counter()
        self.nbytes: Counter[tuple[str, str]] = Counter()
        self._profile = profile

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inside = next((span.name for span in reversed(self._profile.spans) if not span.seconds), "")
        self.times[inside, func.overloadpacket.__name__] += 1
        self.nbytes[inside, func.overloadpacket.__name__] += out.nbytes if isinstance(out, Tensor) else 0
        return out


def operations(llm: LLM) -> Operations:
    """Return the operations of torch in one step. Use a CPU: a GPU replays decode steps as graphs."""
    with llm.profile() as profile, Operations(profile) as seen:
        llm.step()
    return seen
