"""Four ways to give requests memory for their KV cache (lesson 4).

Memory consists of `capacity` token slots. Three allocators need a contiguous piece per request. Its size is

    reserve_max     max_len, the longest request that the model allows.
    power_of_two    prompt + the next power of two of the output. This guess is at most twice too large.
    oracle          prompt + output exactly. No real system knows this size.

`Paged` takes blocks as tokens come. Kwon et al. 2023, section 6.1, call the first three Orca (Max, Pow2, Oracle). Their
buddy allocator is `Buddy`. First fit (`Contiguous`) is the fairer rival, because it rounds nothing up.
"""

from bisect import bisect
from collections.abc import Callable, Sequence
from typing import NamedTuple

from pagewise.paged_blocks import BlockManager, OutOfBlocks
from pagewise.tools.sizes import cdiv


class Request(NamedTuple):
    """Arrives before step `arrival` with `prompt` tokens and ends after `output` more."""

    arrival: int
    prompt: int
    output: int


class Contiguous:
    """One piece per request, in the lowest hole that is large enough (first fit). Neighbouring holes are joined.

    `held[i]` is the number of slots that the running request i has. `Paged` has the same methods.
    """

    def __init__(self, capacity: int, size: Callable[[Request], int]) -> None:
        self.capacity, self.size = capacity, size
        self.held: dict[int, int] = {}
        self.start: dict[int, int] = {}
        self.holes: list[tuple[int, int]] = [(0, capacity)]  # (start, size), by start

    def needs(self, request: Request, num_tokens: int) -> int:
        """Return the free slots that a request of `num_tokens` tokens needs to run. Here it gets all slots at once."""
        return self.size(request)

    def admit(self, i: int, request: Request, num_tokens: int) -> bool:
        """Give request i the slots that it needs, or return False."""
        size = self.size(request)
        for h, (start, hole) in enumerate(self.holes):
            if hole >= size:
                self.holes[h : h + 1] = [(start + size, hole - size)] if hole > size else []
                self.held[i], self.start[i] = size, start
                return True
        return False

    def grow(self, i: int) -> bool:
        """Give request i a slot for one more token, or return False."""
        return True

    def release(self, i: int) -> None:
        """Take all slots of request i back."""
        start, size = self.start.pop(i), self.held.pop(i)
        h = bisect(self.holes, (start, size))
        if h < len(self.holes) and self.holes[h][0] == start + size:
            size += self.holes.pop(h)[1]
        if h > 0 and sum(self.holes[h - 1]) == start:
            start, size = self.holes[h - 1][0], size + self.holes.pop(h - 1)[1]
            h -= 1
        self.holes.insert(h, (start, size))

    def slots(self, i: int) -> Sequence[int]:
        """Return the slots of request i, in the order in which its tokens use them."""
        return range(self.start[i], self.start[i] + self.held[i])


class Buddy(Contiguous):
    """Pieces of 2ᵏ slots that begin at multiples of 2ᵏ, as in a buddy allocator. The lowest free piece is taken."""

    def __init__(self, capacity: int, size: Callable[[Request], int]) -> None:
        super().__init__(capacity, lambda request: next_power_of_two(size(request)))

    def admit(self, i: int, request: Request, num_tokens: int) -> bool:
        size = self.size(request)
        for h, (start, hole) in enumerate(self.holes):
            aligned = cdiv(start, size) * size
            before, after = aligned - start, start + hole - aligned - size
            if after >= 0:
                rest = [(start, before), (aligned + size, after)]
                self.holes[h : h + 1] = [(begin, length) for begin, length in rest if length]
                self.held[i], self.start[i] = size, aligned
                return True
        return False


def reserve_max(capacity: int, max_len: int = 2048, pieces: type[Contiguous] = Contiguous) -> Contiguous:
    """Return contiguous memory for the longest possible request."""
    return pieces(capacity, lambda request: max_len)


def power_of_two(capacity: int, max_len: int = 2048, pieces: type[Contiguous] = Contiguous) -> Contiguous:
    """Return contiguous memory for the prompt and the next power of two of the output, at most max_len."""
    return pieces(capacity, lambda request: min(max_len, request.prompt + next_power_of_two(request.output)))


def oracle(capacity: int, pieces: type[Contiguous] = Contiguous) -> Contiguous:
    """Return contiguous memory for exactly the tokens that the request will have."""
    return pieces(capacity, lambda request: request.prompt + request.output)


def next_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


class Paged:
    """Blocks of the real BlockManager. New requests leave a few blocks for running requests to grow (vLLM: 1 %)."""

    def __init__(self, capacity: int, block_size: int = 16, watermark: float = 0.01) -> None:
        self.manager = BlockManager(capacity // block_size, block_size)
        self.capacity = self.manager.num_blocks * block_size
        self.kept_back = int(self.manager.num_blocks * watermark) * block_size
        self.held: dict[int, int] = {}

    def needs(self, request: Request, num_tokens: int) -> int:
        return self._whole_blocks(num_tokens) + (self.kept_back if self.held else 0)

    def admit(self, i: int, request: Request, num_tokens: int) -> bool:
        if self.needs(request, num_tokens) > self.manager.num_free_blocks * self.manager.block_size:
            return False
        self.manager.allocate(i, [0] * num_tokens)
        self.held[i] = self._whole_blocks(num_tokens)
        return True

    def grow(self, i: int) -> bool:
        try:
            self.manager.append(i, 0)
        except OutOfBlocks:
            return False
        self.held[i] = self._whole_blocks(self.manager.num_tokens(i))
        return True

    def release(self, i: int) -> None:
        self.manager.free(i)
        del self.held[i]

    def slots(self, i: int) -> Sequence[int]:
        P = self.manager.block_size
        return [block * P + offset for block in self.manager.block_table(i) for offset in range(P)]

    def _whole_blocks(self, num_tokens: int) -> int:
        return cdiv(num_tokens, self.manager.block_size) * self.manager.block_size


Memory = Contiguous | Paged


def of_lesson_4(capacity: int, *, max_len: int = 2048, block_size: int = 16) -> dict[str, Memory]:
    """Return the four memories that lesson 4 compares, each of `capacity` slots and empty."""
    return {
        "longest": reserve_max(capacity, max_len=max_len),
        "power of two": power_of_two(capacity),
        "known length": oracle(capacity),
        "paged": Paged(capacity, block_size),
    }
