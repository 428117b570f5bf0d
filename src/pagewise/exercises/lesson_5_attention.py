"""Exercises of lesson 5, stages of the CUDA kernel: QK for one block, and the merge of version 2."""

import torch

from pagewise.exercises.code import variants
from pagewise.exercises.cuda import checked, cuda_exercise
from pagewise.exercises.exercise import Case
from pagewise.exercises.values import small_numbers

INF = float("inf")

# ------------------------------------------------------------------------------------------------ qk_block


def _qk(num_tokens: int, scale: float, what: str = "", unused: float = 9.0) -> Case:
    keys = small_numbers(16, 32)
    keys[num_tokens:] = unused
    in_vllm_layout = keys.view(16, 8, 4).transpose(0, 1).contiguous()
    args = (small_numbers(32), in_vllm_layout, torch.Size([16]), num_tokens, scale)
    return checked(f"num_tokens = {num_tokens}, scale = {scale:g}{what}", 1, 32, *args)


QK_BLOCK = cuda_exercise(
    "qk_block",
    [_qk(16, 1.0), _qk(16, 0.5), _qk(5, 0.5), _qk(5, 0.5, ", NaN in the unused slots", torch.nan)],
    variants(
        "qk_block.cu",
        half_of_the_product=(
            "Each thread of the group has half of the product: __shfl_xor_sync(…, qk, 1) brings the other half.",
            ("    qk += __shfl_xor_sync(0xffffffff, qk, 1);\n", ""),
        ),
        both_read_all=(
            "Twice the product: both threads read all vecs. Thread `member` takes vecs member, member + 2, …",
            ("vec = member; vec < 8; vec += 2", "vec = 0; vec < 8; ++vec"),
        ),
        token_by_token=(
            "That is the layout [token][vec]: here all tokens' vec 0 come first, so vec · 16 + token.",
            ("k[vec * 16 + token]", "k[token * 8 + vec]"),
        ),
        no_scale=("The scores lack the scale.", ("scale * qk :", "qk :")),
        NaN_past_the_end=(
            "An unused slot holds NaN, and NaN + (−INFINITY) is NaN: select the score, do not add to it.",
            ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk + (token < num_tokens ? 0 : -INFINITY)"),
        ),
        not_masked=(
            "Scores from num_tokens on must be −INFINITY: nobody has written these slots.",
            ("token < num_tokens ? scale * qk : -INFINITY", "scale * qk"),
        ),
        scores_of_0=(
            "A score of 0 is a weight of exp(0 − m): a token that is not there has −INFINITY.",
            ("scale * qk : -INFINITY", "scale * qk : 0"),
        ),
    ),
    "a thread group of two, a vec each in turn, one shuffle.",
)

# ------------------------------------------------------------------------------------------------ merge_partitions


def _merge(what: str, ms: list[float], ls: list[float]) -> Case:
    n, D = len(ms), 4
    visible = torch.tensor(ls)[:, None] > 0
    accs = torch.where(visible, small_numbers(n, D), 0.0)
    return checked(f"ms = {what}", 1, D, torch.tensor(ms), torch.tensor(ls), accs, torch.Size([D]), n)


_NO_GUARD = ("    if (m == -INFINITY) m = 0;\n", "")

MERGE_PARTITIONS = cuda_exercise(
    "merge_partitions",
    [
        _merge("[0], ls = [2]", [0.0], [2.0]),
        _merge("[0, 0], ls = [1, 3]", [0.0, 0.0], [1.0, 3.0]),
        _merge("[0, 2], ls = [1, 3]", [0.0, 2.0], [1.0, 3.0]),
        _merge("[200, 199, 150], ls = [2, 1, 3]", [200.0, 199.0, 150.0], [2.0, 1.0, 3.0]),
        _merge("[1, -inf], ls = [2, 0]", [1.0, -INF], [2.0, 0.0]),
        _merge("[-inf, -inf], ls = [0, 0]", [-INF, -INF], [0.0, 0.0]),
    ],
    variants(
        "merge_partitions.cu",
        nothing_rescaled=(
            "Each partition is relative to its own maximum: l and acc shrink by exp(mᵢ − m) before they are added.",
            ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
            ("acc += expf(ms[i] - m) * accs", "acc += accs"),
        ),
        only_acc_rescaled=(
            "acc shrank, l did not: both are relative to mᵢ.",
            ("l += expf(ms[i] - m) * ls[i]", "l += ls[i]"),
        ),
        the_mean_of_the_outputs=(
            "That is the mean of the partitions' outputs: a partition counts by its weight, exp(mᵢ − m) · lᵢ.",
            ("l += expf(ms[i] - m) * ls[i]", "l += 1"),
            ("acc += expf(ms[i] - m) * accs[i * D + d]", "acc += accs[i * D + d] / ls[i]"),
        ),
        not_divided=("The sum is not divided by l yet.", ("l > 0 ? acc / l : 0", "acc")),
        no_maximum=(
            "exp(200) overflows: shrink relative to the largest mᵢ of all, not to 0.",
            ("m = fmaxf(m, ms[i])", "m = 0"),
        ),
        NaN_without_keys=(
            "No partition saw a token: m is −INFINITY, and (−inf) − (−inf) is NaN; and l is 0. The output is 0 then.",
            _NO_GUARD,
            ("l > 0 ? acc / l : 0", "acc / l"),
        ),
        one_row_for_all=(
            "Every partition read the first one's acc: row i begins at i · D.",
            ("accs[i * D + d]", "accs[d]"),
        ),
    ),
    "lesson 3's merge, for any number of partitions.",
)

EXERCISES = [QK_BLOCK, MERGE_PARTITIONS]
