"""Speculative decoding without a second model: guess the next tokens, and check all guesses in one step (lesson 9).

A decode step reads all weights and all K and V to compute one token per sequence. Computing a few more tokens in the
same step costs little more. So the engine guesses: text often repeats what came before, in code, in quotes, in loops.

    tokens   … the block table of … the block
    drafts                                    table of      copied from after the earlier "the block"

The step computes the newest token and the drafts after it, and draws a token after each of them. Draw 0 follows known
tokens, so it is right. If it equals draft 0, then draft 0 is right, and draw 1 follows known tokens too, and so on. The
first draw that differs from its draft is still right. The drafts after it are refused, and their slots are given back.

A token is a function of the tokens before it, its seed and its position. So the tokens are those of a run without
speculation, greedy and drawn. One difference remains: a step of another size may round its products differently, so the
choice between two tokens of almost equal score may change.

Leviathan et al. 2023 (speculative decoding); Saxena 2023 (prompt lookup); Ziv & Lempel 1977 (copying that overlaps).
"""

LONGEST_MATCH = 3  # tokens: of two matches that are this long or longer the later one is taken
MOST_CANDIDATES = 64  # earlier occurrences of the last token that one draft compares at most


class Drafter:
    """Guesses how a list of tokens goes on. The list may grow between two calls, at its end only.

    `_earlier` links each position to the latest earlier one with the same token, as in LZ77's hash chains. So a call
    takes O(1) time for each token that is new since the last call, and for each candidate. It takes 8 bytes per token.
    """

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens
        self._latest: dict[int, int] = {}  # token → its latest position
        self._earlier: list[int] = []  # position → the latest earlier position of the same token, or −1

    def draft(self, most: int) -> tuple[int, ...]:
        """Return the `most` tokens that followed the latest of the longest matches, or () if there is no match.

        A match is an earlier place with the same tokens as the end of the list, LONGEST_MATCH at most. If fewer than
        `most` tokens follow the match, these tokens are repeated.
        """
        tokens, earlier = self._tokens, self._earlier
        for i in range(len(earlier), len(tokens)):
            earlier.append(self._latest.get(tokens[i], -1))
            self._latest[tokens[i]] = i
        best, longest, at = -1, 0, earlier[-1]
        for _ in range(MOST_CANDIDATES):
            if at < 0 or longest == LONGEST_MATCH:
                break
            length = 1
            while length < LONGEST_MATCH and length <= at and tokens[at - length] == tokens[-1 - length]:
                length += 1
            if length > longest:
                best, longest = at, length
            at = earlier[at]
        period = len(tokens) - 1 - best
        return tuple(tokens[best + 1 + i % period] for i in range(most)) if longest else ()
