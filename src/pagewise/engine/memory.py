"""What a scheduler and a runner need of the keys and values of running sequences (lesson 9).

`paged_memory` is the engine's memory. `pagewise.experiments` has two rivals: `dense_memory` and `block_tensors`.
"""

from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:  # the scheduler decides with numbers only, and needs no torch for that
    from pagewise.engine.batch import Batch
    from pagewise.engine.request import Chunk, Request, Sequence
    from pagewise.models import Attend


@runtime_checkable
class Memory(Protocol):
    """Keys and values of sequences, and how a step attends to them. It changes `num_computed` of the sequences.

    Attributes:
        num_tokens: the most tokens whose K and V it can hold. block_size: tokens of a block.
        prefix_cache: whether equal beginnings of prompts are computed once.
        nbytes, used_nbytes: all bytes, and those of running sequences. usage: the share in use, from 0 to 1.
    """

    num_tokens: int
    block_size: int
    prefix_cache: bool
    nbytes: int
    used_nbytes: int
    usage: float

    def check_fits(self, request: "Request") -> None:
        """Raise ValueError if the request's sequences cannot all be in memory at once, even alone."""

    def admit(self, request: "Request", computing: "list[Chunk]") -> int | None:
        """Let the first sequence of a request hold the tokens `request.common`, and return how many are cached.

        None: `computing`, the prompts in the step so far, compute cacheable tokens with which these begin, so wait for
        a step. Raises OutOfBlocks if they do not fit now, or if what the other sequences need besides does not.
        """

    def resize(self, sequence: "Sequence", num_tokens: int) -> None:
        """Let a sequence have slots for its first `num_tokens` tokens, and for no others. Raises OutOfBlocks."""

    def fork(self, parent: "Sequence", child: "Sequence") -> None:
        """Let a sequence that holds nothing begin with the K and V that another one has computed."""

    def commit(self, sequence: "Sequence", num_computed: int) -> None:
        """Note that K and V of the first `num_computed` tokens are computed, and may be found by other prompts."""

    def free(self, sequence: "Sequence") -> None:
        """Take from a sequence all that it holds. It may hold nothing."""

    def batch(self, chunks: "list[Chunk]") -> "Batch":
        """Return the inputs of the step that computes these chunks. Each step calls it once."""

    def attention(self, batch: "Batch") -> "Attend":
        """Return the function that writes K and V of a step's tokens in each layer, and attends to all before them."""
