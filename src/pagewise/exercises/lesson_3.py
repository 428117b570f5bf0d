"""Exercises of lesson 3: the merge, the loop over tiles in torch and in Triton, taking keys out of a summary."""

import inspect
import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from pagewise.exercises.code import Gap, device_code, with_gaps
from pagewise.exercises.exercise import Case
from pagewise.exercises.python import call, python_exercise
from pagewise.exercises.triton import TritonExercise, launching
from pagewise.exercises.values import text
from pagewise.online_softmax import Partial
from pagewise.tools.launch import launch

INF = math.inf
IMPORTS = "import torch\nfrom torch import Tensor"


def merge(a: tuple[Tensor, Tensor, Tensor], b: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the (m, l, acc) of the keys of a and of b together: m and l [rows], acc [rows, D].

    m is the largest score, l = Σ exp(s − m), acc = Σ exp(s − m) · v. Without a visible key m = −inf, l = 0, acc = 0.
    """
    m = torch.maximum(a[0], b[0])
    m_safe = m.masked_fill(m == -torch.inf, 0.0)
    of_a, of_b = torch.exp(a[0] - m_safe), torch.exp(b[0] - m_safe)
    return m, of_a * a[1] + of_b * b[1], of_a[:, None] * a[2] + of_b[:, None] * b[2]


def _piece(*scores: float, value: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """Return (m, l, acc) of one row of scores. Its values are [value, 2], [value + 1, 2], …"""
    s = torch.tensor([scores])
    values = torch.tensor([[value + i, 2.0] for i in range(len(scores))]).reshape(-1, 2)
    m = s.amax(-1) if scores else torch.tensor([-INF])
    weights = torch.exp(s - m.masked_fill(m == -INF, 0.0))
    return m, weights.sum(-1), weights @ values


def _rows(*pieces: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, ...]:
    return tuple(torch.cat(parts) for parts in zip(*pieces, strict=True))


_L, _ACC = "of_a * a[1] + of_b * b[1]", "of_a[:, None] * a[2] + of_b[:, None] * b[2]"
_WRONG_AXIS = "of_a * a[2] + of_b * b[2]"
_ONLY_FIRST = ("torch.exp(b[0] - m_safe)", "torch.ones_like(m)")
_NO_GUARD = ("m_safe = m.masked_fill(m == -torch.inf, 0.0)", "m_safe = m")

MERGE = python_exercise(
    merge,
    [
        call(_piece(0.0), _piece(0.0, value=3.0)),
        call(_piece(1.0, 2.0), _piece(3.0, 4.0, value=3.0)),
        call(_piece(3.0, 4.0), _piece(1.0, 2.0, value=3.0)),
        call(_piece(1.0, 2.0), _piece()),
        call(_piece(), _piece()),
        call(_rows(_piece(0.0), _piece(5.0)), _rows(_piece(1.0, value=3.0), _piece(2.0, value=4.0))),
    ],
    [
        "nothing shrinks: The pieces were summed with different maxima. Before you add l and acc, multiply each piece "
        "by exp(its own m − the new m).",
        (_L, "a[1] + b[1]"),
        (_ACC, "a[2] + b[2]"),
        "acc does not shrink: l is right and acc is not. Both are sums of exp(s − m), so acc needs the factors of l.",
        (_ACC, "a[2] + b[2]"),
        "only the first shrinks: The result is wrong when the first piece has the larger maximum. Look at the factor "
        "of b: it is 1 only if b has the larger maximum.",
        _ONLY_FIRST,
        "the other way round: The sums grow, but they must shrink when m rises. Look at the sign in the exponent: the "
        "factor exp(old m − new m) is at most 1.",
        ("torch.exp(a[0] - m_safe), torch.exp(b[0] - m_safe)", "torch.exp(m - a[0]), torch.exp(m - b[0])"),
        "wrong axis: The result is right for one row and wrong for several rows. A factor is one number per row, so "
        "the factors of acc need a last axis of length 1: write [:, None] after them.",
        (_ACC, _WRONG_AXIS),
        "NaN where nothing was seen: The result of two empty pieces is NaN. There m is −inf, and (−inf) − (−inf) is "
        "NaN: subtract 0 in place of such an m.",
        _NO_GUARD,
        "the guard is stored: l and acc are right and m is not. The 0 is only for the exponent: return m, which stays "
        "−inf where no key is visible.",
        ("return m, ", "return m_safe, "),
        "normalised: acc is already divided by l, so the next merge would give it a wrong weight. Divide once, at the "
        "end.",
        (_ACC, f"({_ACC}) / ({_L})[:, None]"),
    ],
    "pieces merge in any order, and an empty piece changes nothing.",
    imports=IMPORTS,
    bug=[
        (_ACC, _WRONG_AXIS),
        ("    m_safe = m.masked_fill(m == -torch.inf, 0.0)\n", ""),
        ("torch.exp(a[0] - m_safe), torch.exp(b[0] - m_safe)", "torch.exp(a[0] - m), torch.exp(b[0] - m)"),
    ],
)


def attend_in_tiles(q: Tensor, k: Tensor, v: Tensor, tile_size: int) -> Tensor:
    """Return attention [T, D] of q [T, D] over k and v [S, D], without a mask.

    At no time do more than `tile_size` scores of a query exist. The last tile may be smaller.
    Partial has a.merge(b), a.output(), Partial.empty(T, head_size=D), Partial.of(scores, values).
    """
    seen = Partial.empty(q.shape[0], head_size=q.shape[1])
    for start in range(0, k.shape[0], tile_size):
        tile = slice(start, start + tile_size)
        seen = seen.merge(Partial.of(q @ k[tile].mT / q.shape[1] ** 0.5, v[tile]))
    return seen.output()


class _Largest(TorchFunctionMode):
    """Keep the largest number of elements of any tensor that a function of torch returns."""

    largest = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result


def _tiles(T: int, S: int, D: int, tile_size: int) -> Case:
    generator = torch.Generator().manual_seed(S)
    q, k = (torch.randint(-2, 3, (n, D), generator=generator).float() for n in (T, S))
    v = torch.arange(1.0, S * D + 1).reshape(S, D)

    def run(theirs: Callable) -> object:
        with _Largest() as seen:
            result = theirs(q.clone(), k.clone(), v.clone(), tile_size)
        return {"out": result, "all scores at a time": int(seen.largest >= T * S)} if S >= 64 else result

    return Case(f"{{name}}({text(q)}, {text(k)}, {text(v)}, {tile_size})", run)


_MERGED = "seen.merge(Partial.of(q @ k[tile].mT / q.shape[1] ** 0.5, v[tile]))"

ATTEND_IN_TILES = python_exercise(
    attend_in_tiles,
    [_tiles(1, 2, 1, 2), _tiles(1, 4, 1, 2), _tiles(2, 4, 4, 2), _tiles(2, 5, 2, 2), _tiles(32, 64, 4, 8)],
    [
        "nothing yet: The function returns nothing yet. Begin with an empty Partial of T queries, and a loop over the "
        "starts of the tiles.",
        ("    seen = Partial.empty", "    return None\n    seen = Partial.empty"),
        "no scale: The scores are not divided by √D.",
        (" / q.shape[1] ** 0.5", ""),
        "only the last tile: The result knows the last tile alone. Merge each tile with what was seen before.",
        (_MERGED, "Partial.of(q @ k[tile].mT / q.shape[1] ** 0.5, v[tile])"),
        "the last tile is missing: The last tile is incomplete, and your loop leaves it out. A slice past the end is "
        "short, so no special case is needed.",
        ("range(0, k.shape[0], tile_size)", "range(0, k.shape[0] - tile_size + 1, tile_size)"),
        "the first tile each time: Every step reads the first keys. The tile begins at `start`.",
        ("slice(start, start + tile_size)", "slice(0, tile_size)"),
        "not divided: The result is acc. The output is acc / l: call `output()` at the end.",
        ("seen.output()", "seen.acc"),
        "values of the first tile: Scores and values belong to different keys. Take the values of the same tile.",
        ("v[tile]", "v[:tile_size][: k[tile].shape[0]]"),
        "all scores at once: The numbers are right, but all scores exist at one time. Compute the scores of a tile "
        "inside the loop.",
        ("    seen = Partial.empty", "    scores = q @ k.mT / q.shape[1] ** 0.5\n    seen = Partial.empty"),
        ("q @ k[tile].mT / q.shape[1] ** 0.5", "scores[:, tile]"),
    ],
    "these lines are the inner loop of FlashAttention.",
    imports="import torch\nfrom torch import Tensor\n\nfrom pagewise.online_softmax import Partial",
)


def output_of_rest(both: tuple[Tensor, Tensor, Tensor], first: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return acc / l [rows, D] of the keys that are in `both` but not in `first`, or 0 where no key is left.

    `both` is the merge of `first` and of the rest, each an (m, l, acc): m and l [rows], acc [rows, D].
    """
    m_safe = both[0].masked_fill(both[0] == -torch.inf, 0.0)
    shrink = torch.exp(first[0] - m_safe)
    l = both[1] - shrink * first[1]
    acc = both[2] - shrink[:, None] * first[2]
    return acc / l.masked_fill(l == 0, 1.0)[:, None]


def _rest(first: tuple[Tensor, ...], rest: tuple[Tensor, ...]) -> Case:
    return call(merge(first, rest), first)


_L, _ACC = "l = both[1] - shrink * first[1]", "acc = both[2] - shrink[:, None] * first[2]"
_, _BODY = inspect.getsource(output_of_rest).rstrip().split('"""\n', 1)

OUTPUT_OF_REST = python_exercise(
    output_of_rest,
    [
        _rest(_piece(0.0), _piece(0.0, 0.0, value=3.0)),
        _rest(_piece(1.0, 2.0), _piece(3.0, 4.0, value=3.0)),
        _rest(_piece(3.0, 4.0), _piece(1.0, 2.0, value=3.0)),
        _rest(_piece(), _piece(1.0, 2.0)),
        _rest(_piece(1.0, 2.0), _piece()),
        _rest(_piece(), _piece()),
        _rest(_rows(_piece(0.0), _piece(5.0)), _rows(_piece(1.0, value=3.0), _piece(2.0, value=4.0))),
    ],
    [
        "nothing taken out: The result is the output of all keys. Subtract the l and acc of the first piece before you "
        "divide.",
        (_L, "l = both[1]"),
        (_ACC, "acc = both[2]"),
        "not rescaled: The two pieces have different maxima, so their l and acc are on different scales. Multiply "
        "those of `first` by exp(its m − the m of `both`).",
        (_L, "l = both[1] - first[1]"),
        (_ACC, "acc = both[2] - first[2]"),
        "acc is not rescaled: l is right and acc is not. acc of `first` needs the factor that its l has.",
        (_ACC, "acc = both[2] - first[2]"),
        "the other way round: The part that you subtract grew. Look at the sign in the exponent: the factor is "
        "exp(m of `first` − m of `both`), at most 1.",
        ("torch.exp(first[0] - m_safe)", "torch.exp(m_safe - first[0])"),
        "not divided: The result is acc. The output is acc / l.",
        ("return acc / l.masked_fill(l == 0, 1.0)[:, None]", "return acc"),
        "outputs subtracted: Outputs are averages, and averages cannot be subtracted. Subtract l and acc, then divide.",
        (
            "return acc / l.masked_fill(l == 0, 1.0)[:, None]",
            "return both[2] / both[1][:, None] - first[2] / first[1][:, None]",
        ),
        "0 / 0: No key is left, so l is 0 and the division gives NaN. Return 0 there: divide by 1 where l is 0.",
        ("l.masked_fill(l == 0, 1.0)", "l"),
        "NaN where nothing was seen: Neither piece has a key. There m is −inf, and (−inf) − (−inf) is NaN: subtract 0 "
        "in place of such an m.",
        ("m_safe = both[0].masked_fill(both[0] == -torch.inf, 0.0)", "m_safe = both[0]"),
    ],
    "l and acc are sums on the scale of m, so sums can be taken out again.",
    imports=IMPORTS,
    bug=[(_BODY, "    return both[2] / both[1][:, None]  # yours: this is the output of all keys")],
)


def _attention_rows(what: str, rows: list[list[float]], values: list[float], tile: int = 4) -> Case:
    """Other numbers follow scores and values in memory. A kernel may neither read them nor write past the outputs."""

    def run(kernel: object, device: torch.device) -> object:
        s, v = torch.tensor(rows, device=device), torch.tensor(values, device=device)
        scores = torch.cat([s.flatten(), s.new_full((16,), 3.0)])
        padded = torch.cat([v, v.new_full((16,), torch.nan)])
        written = s.new_full((len(rows) + 4,), -7.0)
        launch(kernel, (len(rows),), scores, padded, written, s.shape[1], outputs=(written,), TILE=tile)
        return {"out": written[: len(rows)], "after out": written[len(rows) :]}

    return launching(f"s = {text(rows)}, v = {text(values)}, TILE = {tile}{what}", run)


_KERNEL = device_code("one_pass_kernel.py")
_LOAD = 's = tl.load(s_ptr + start + cols, mask=inside, other=float("-inf"))'
_STORE = "acc / tl.where(l == 0.0, 1.0, l)"

ONE_PASS_KERNEL = TritonExercise(
    "one_pass_kernel",
    _KERNEL,
    with_gaps(
        _KERNEL,
        Gap(
            "inside = start",
            "m = m_new",
            "these lines read past the end of the row, and they use no maximum",
            "s = tl.load(s_ptr + start + cols)\n"
            "v = tl.load(v_ptr + start + cols)\n"
            "l += tl.sum(tl.exp(s), axis=0)\n"
            "acc += tl.sum(tl.exp(s) * v, axis=0)",
        ),
    ),
    [
        _attention_rows("", [[0.0, 0.0, 0.0, 0.0]], [1.0, 2.0, 3.0, 10.0]),
        _attention_rows("", [[1.0, 2.0, 3.0, 4.0]], [10.0, 20.0, 30.0, 40.0]),
        _attention_rows("", [[1.0, 2.0, 3.0]], [10.0, 20.0, 30.0]),
        _attention_rows("", [[5.0, 1.0, 1.0, 1.0, 2.0, 3.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        _attention_rows("", [[1.0, 1.0, 1.0, 1.0, 5.0, 6.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        _attention_rows("", [[1.0, 2.0, 3.0], [1000.0, 1001.0, 0.0]], [4.0, 5.0, 6.0]),
        _attention_rows(" (the first tile is masked)", [[-INF] * 4 + [1.0, 2.0]], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        _attention_rows("", [[-INF, -INF]], [1.0, 2.0]),
    ],
    [
        "mask before the offset: Numbers past the end of the row were counted. Look at the mask: it must compare "
        "`start + cols`, not `cols`, with num_keys.",
        ("inside = start + cols < num_keys", "inside = cols < num_keys"),
        "padding of 0: Positions past the end of the row got weight. Look at `other` of the scores: 0 is a score like "
        "any other, and −inf has weight 0.",
        (_LOAD, "s = tl.load(s_ptr + start + cols, mask=inside, other=0.0)"),
        "no mask on scores: Scores past the end of the row were counted. Load them with `mask` and `other`.",
        (_LOAD, "s = tl.load(s_ptr + start + cols)"),
        "no mask on values: The values past the end are NaN here, and weight 0 times NaN is NaN. Load the scores and "
        "the values with `mask` and `other`.",
        ("v = tl.load(v_ptr + start + cols, mask=inside, other=0.0)", "v = tl.load(v_ptr + start + cols)"),
        "no maximum: exp(1000) is infinite, and infinite / infinite is NaN. Subtract the largest score so far.",
        ("shrink = tl.exp(m - m_safe)", "shrink = 1.0"),
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = 0.0"),
        "l does not shrink: m rose with a later tile, and l kept its old scale. Multiply l by exp(m − m_new) before "
        "you add.",
        ("l = l * shrink + ", "l = l + "),
        "acc does not shrink: m rose with a later tile, and acc kept its old scale. Multiply acc by the factor of l.",
        ("acc = acc * shrink + ", "acc = acc + "),
        "nothing shrinks: m rose with a later tile, and l and acc kept their old scale. Multiply both by "
        "exp(m − m_new) before you add.",
        ("l = l * shrink + ", "l = l + "),
        ("acc = acc * shrink + ", "acc = acc + "),
        "only the last tile: The result depends on the last tile alone. Add to l and acc: do not overwrite them.",
        ("l = l * shrink + ", "l = "),
        ("acc = acc * shrink + ", "acc = "),
        "the other way round: The first factor is infinite, because m is −inf before the first tile. Look at the sign "
        "in the exponent: l and acc shrink by exp(m − m_new).",
        ("tl.exp(m - m_safe)", "tl.exp(m_safe - m)"),
        "NaN in a masked tile: No key was visible so far, so m_new is −inf and (−inf) − (−inf) is NaN. Subtract 0 in "
        "place of such a maximum.",
        ('m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)', "m_safe = m_new"),
    ],
    "one pass, three numbers, any length. FlashAttention's inner loop (lesson 6) is this loop with matrices.",
)

EXERCISES = [MERGE, ATTEND_IN_TILES, ONE_PASS_KERNEL, OUTPUT_OF_REST]
