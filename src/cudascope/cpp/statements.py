"""The statements of a function: the smallest one round a token."""

from collections.abc import Mapping, Sequence

_WITH_HEAD = ("if", "for", "while", "switch", "catch")


class Statements:
    """The statements among `tokens`, of which `close` says where each bracket ends."""

    def __init__(self, tokens: Sequence[str], close: Mapping[int, int]) -> None:
        self._tokens, self._close = tokens, close

    def around(self, body: int, target: int) -> tuple[int, int]:
        """Start and end of the smallest statement round token `target`, in the function whose body opens at `body`."""
        return self._within(body, self._close[body] + 1, target) or (body + 1, self._close[body])

    def is_always_reached(self, body: int, start: int) -> bool:
        """Whether the statement that begins at `start` stands in the body itself, under no condition."""
        at = body + 1
        while at < start:
            at = self._end(at)
        return at == start

    def _within(self, start: int, end: int, target: int) -> tuple[int, int] | None:
        """The smallest statement round `target` inside of the statement start to end; None if it is that one itself."""
        token = self._tokens[start]
        if token == "{":
            at = start + 1
            while at < end - 1:
                after = self._end(at)
                if target < after:
                    return self._within(at, after, target) or (at, after)
                at = after
            return None
        at = self._after_head(start)
        while start < at < end:  # what an if, an else or a loop governs
            after = self._end(at)
            if at <= target < after:
                return self._within(at, after, target) or (at, after)
            at = after + 1 if self._tokens[after : after + 1] == ["else"] else end
        return None

    def _after_head(self, i: int) -> int:
        """Where begins what the statement at `i` governs; `i` if it governs nothing."""
        if self._tokens[i] in _WITH_HEAD:
            i += 1 + (self._tokens[i + 1] == "constexpr")
            return self._close.get(i, i) + 1
        return i + (self._tokens[i] in ("do", "else", "try"))

    def _end(self, i: int) -> int:
        token, tokens = self._tokens[i], self._tokens
        if token == "{":
            return self._close.get(i, i) + 1
        if token in ("case", "default"):
            while tokens[i] != ":":
                i += 1
            return i + 1
        governed = self._after_head(i)
        if governed > i:
            i = self._end(governed)
            if tokens[i : i + 1] == ["else"]:
                return self._end(i + 1) if token == "if" else i
            if token != "do":
                return i
        while i < len(tokens) and tokens[i] not in (";", "}"):
            i = self._close.get(i, i) + 1
        return i + (tokens[i : i + 1] == [";"])
