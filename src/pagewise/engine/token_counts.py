"""How often a sequence has each token, for the penalties: counted once for each token, not in every step (lesson 9)."""

from array import array
from collections.abc import Iterable

import numpy as np

from pagewise.engine.sampling_params import SamplingParams


class TokenCounts:
    """The different tokens of a list that grows at its end, and how often each occurs behind the prompt.

    A call counts only the tokens that are new since the last call. Then it copies two arrays of C numbers.

    Args:
        tokens: the list. Others append to it.
        num_prompt: the number of its first tokens that count 0.
        with_prompt: whether tokens are listed that only the prompt has.
    """

    def __init__(self, tokens: list[int], num_prompt: int, *, with_prompt: bool) -> None:
        self._tokens, self._num_prompt, self._seen = tokens, num_prompt, 0 if with_prompt else num_prompt
        self._place: dict[int, int] = {}  # token → its place in the arrays
        self._ids, self._counts = array("q"), array("q")

    @classmethod
    def wanted(cls, sampling: SamplingParams, tokens: list[int], num_prompt: int) -> "TokenCounts | None":
        """Return the counts that the penalties need, or None if there is no penalty."""
        return cls(tokens, num_prompt, with_prompt=sampling.repetition_penalty != 1) if sampling.penalises else None

    def after(self, drafts: Iterable[int] = ()) -> tuple[np.ndarray, np.ndarray]:
        """Return (ids, counts), both int64, of the list as if `drafts` followed. The list is as it was."""
        for i in range(self._seen, len(self._tokens)):
            token = self._tokens[i]
            place = self._place.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += i >= self._num_prompt
        self._seen = len(self._tokens)
        ids, counts = np.array(self._ids), np.array(self._counts)
        for token in drafts:
            found = np.flatnonzero(ids == token)
            if len(found):
                counts[found] += 1
            else:
                ids, counts = np.append(ids, token), np.append(counts, 1)
        return ids, counts

    def copy(self, tokens: list[int]) -> "TokenCounts":
        """Return counts that go on with another list, which is equal to this one so far."""
        other = TokenCounts(tokens, self._num_prompt, with_prompt=False)
        other._seen, other._place = self._seen, self._place.copy()
        other._ids, other._counts = self._ids[:], self._counts[:]
        return other
