"""Exercises of lesson 5: CUDA kernels from a copy to v2's merge, and the same decode in Triton."""

import torch

from pagewise.exercises.code import edited, solution_text
from pagewise.exercises.cuda import checked, counted, cuda_exercise
from pagewise.exercises.exercise import Case, Mistake
from pagewise.exercises.triton import launching, triton_exercise

INF = float("inf")


def _variants(name: str, **mistakes: tuple) -> dict[str, Mistake]:
    """Mistakes as edits of the solution: title = (hint, (old, new), …)."""
    source = solution_text(name)
    return {
        title.replace("_", " "): Mistake(edited(source, *edits), hint) for title, (hint, *edits) in mistakes.items()
    }


def _range(*shape: int) -> torch.Tensor:
    """Small whole numbers, none like its neighbour."""
    count = torch.Size(shape).numel()
    return (torch.arange(count) * 7 % 11 - 5.0).reshape(shape)


# ------------------------------------------------------------------------------------------------ coalesced_copy

_COPY = "for (int i = thread; i < n; i += threads) out[i] = in[i];"


def _copy(n: int, grid: int, block: int, make=checked) -> Case:
    return make(f"n = {n}, [{grid}, {block}]", grid, block, _range(n), torch.Size([n]), n)


COALESCED_COPY = cuda_exercise(
    "coalesced_copy",
    [_copy(3, 1, 32), _copy(64, 2, 32), _copy(150, 2, 32), _copy(256, 2, 32, make=counted)],
    _variants(
        "coalesced_copy.cu",
        a_chunk_each=(
            "Every float arrives, in too many sectors: each thread copies a chunk of its own, so at any moment the 32 "
            "lanes of a warp read far apart. Let neighbours read neighbours: start at `thread`, step by `threads`.",
            (
                _COPY,
                "const int chunk = (n + threads - 1) / threads, end = min(n, (thread + 1) * chunk);\n"
                "    for (int i = thread * chunk; i < end; ++i) out[i] = in[i];",
            ),
        ),
        one_element_each=(
            "The elements from the number of threads on were never written: a thread copies more than one when n is "
            "larger.",
            (_COPY, "if (thread < n) out[thread] = in[thread];"),
        ),
        no_bound=(
            "There are more threads than elements: those from n on have nothing to copy.",
            (_COPY, "for (int i = thread; i < n + threads; i += threads) out[i] = in[i];"),
        ),
        every_thread_block_all=(
            "Thread blocks copy the same elements: count threads through all of them, "
            "blockIdx.x · blockDim.x + threadIdx.x.",
            (_COPY, "for (int i = threadIdx.x; i < n; i += blockDim.x) out[i] = in[i];"),
        ),
        only_the_first_thread_block=(
            "The second thread block's elements were never written: threadIdx.x counts within a thread block.",
            (_COPY, "if (blockIdx.x == 0 && threadIdx.x < n) out[threadIdx.x] = in[threadIdx.x];"),
        ),
    ),
    "neighbouring lanes copy neighbouring floats: 4 sectors a request.",
)

# ------------------------------------------------------------------------------------------------ warp_sum

_STEP = "sum += __shfl_down_sync(ALL_LANES, sum, distance);"
_WRITE = "if (threadIdx.x == 0) sums[blockIdx.x] = sum;"


def _warp_sum(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(f"{rows} row{'s' * (rows > 1)}, {what}", rows, 32, x, torch.Size([rows]))


WARP_SUM = cuda_exercise(
    "warp_sum",
    [
        _warp_sum(1, torch.ones(1, 32), "all ones"),
        _warp_sum(1, torch.arange(32.0)[None], "x = 0, 1, 2, … 31"),
        _warp_sum(2, _range(2, 32), "mixed numbers"),
    ],
    _variants(
        "warp_sum.cu",
        a_step_too_few=(
            "The last step is missing: distances 16, 8, 4, 2 and 1, so `distance > 0`.",
            ("distance > 0", "distance > 1"),
        ),
        a_step_too_many=(
            "distance 32 is no lane of this warp: each lane got its own number back, and the sum is doubled. "
            "Begin with 16.",
            ("distance = 16", "distance = 32"),
        ),
        every_lane_writes=(
            "All lanes write to one place, and only lane 0 has the whole sum: `if (threadIdx.x == 0)`.",
            (_WRITE, "sums[blockIdx.x] = sum;"),
        ),
        from_one_lane=(
            "__shfl_sync gives every lane the number of *one* lane, lane `distance`: __shfl_down_sync gives each the "
            "one `distance` above itself.",
            ("__shfl_down_sync", "__shfl_sync"),
        ),
        shuffle_in_a_branch=(
            "A shuffle needs both lanes: those above `distance` must take part to hand over, so it stands outside of "
            "the `if`.",
            (_STEP, f"if (threadIdx.x < distance) {_STEP}"),
        ),
        no_shuffle=(
            "That is lane 0's own number: nothing came from the other lanes.",
            (f"for (int distance = 16; distance > 0; distance /= 2) {_STEP}\n    ", ""),
        ),
    ),
    "32 numbers in five steps, without memory.",
)

# ------------------------------------------------------------------------------------------------ block_max

_TREE = (
    "        if (threadIdx.x < half) largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
)
_BARRIER = "        __syncthreads();\n"
_BLOCK_MAX = solution_text("block_max.cu")


def _block_max(rows: int, x: torch.Tensor, what: str) -> Case:
    return checked(what, rows, 64, x, torch.Size([rows]), x.shape[1])


BLOCK_MAX = cuda_exercise(
    "block_max",
    [
        _block_max(1, _range(1, 64), "one row of 64"),
        _block_max(1, -torch.arange(1.0, 4.0)[None], "x = -1, -2, -3"),
        _block_max(2, _range(2, 150), "two rows of 150"),
        _block_max(1, torch.arange(130.0)[None], "x = 0, 1, 2, … 129"),
    ],
    _variants(
        "block_max.cu",
        missing_barrier_in_the_loop=(
            "A step reads what the step before wrote, and other warps may not have written yet: the barrier belongs "
            "into the loop.",
            (_TREE + _BARRIER, _TREE),
        ),
        missing_first_barrier=(
            "The loop reads what all threads wrote above it: a barrier must stand between.",
            ("    __syncthreads();\n    for (int half", "    for (int half"),
        ),
        barrier_in_the_branch=(
            "Only some of the threads come to this barrier: it stands outside of the `if`, for all.",
            (
                _TREE + _BARRIER,
                "        if (threadIdx.x < half) {\n"
                "            largest[threadIdx.x] = fmaxf(largest[threadIdx.x], largest[threadIdx.x + half]);\n"
                "            __syncthreads();\n        }\n",
            ),
        ),
        begun_with_0=(
            "All numbers may be negative: begin with −INFINITY, not 0.",
            ("mine = -INFINITY", "mine = 0"),
        ),
        one_number_each=(
            "A row may be longer than the thread block: each thread takes every 64th number.",
            (
                "for (int i = threadIdx.x; i < n; i += 64) mine = fmaxf(mine, x[blockIdx.x * n + i]);",
                "if (threadIdx.x < n) mine = x[blockIdx.x * n + threadIdx.x];",
            ),
        ),
    ),
    "every step waits for the one before, and every thread comes to every barrier.",
    stub=edited(
        _BLOCK_MAX,
        (_TREE + _BARRIER, _TREE),
        (
            "n at least 1.\n",
            "n at least 1.\n// A barrier is missing: on this machine the result may be right all the same. Find its place.\n",
        ),
    ),
)

# ------------------------------------------------------------------------------------------------ qk_block


def _qk(num_tokens: int, scale: float, what: str = "", unused: float = 9.0) -> Case:
    keys = _range(16, 32)
    keys[num_tokens:] = unused
    in_vllm_layout = keys.view(16, 8, 4).transpose(0, 1).contiguous()
    args = (_range(32), in_vllm_layout, torch.Size([16]), num_tokens, scale)
    return checked(f"num_tokens = {num_tokens}, scale = {scale:g}{what}", 1, 32, *args)


QK_BLOCK = cuda_exercise(
    "qk_block",
    [_qk(16, 1.0), _qk(16, 0.5), _qk(5, 0.5), _qk(5, 0.5, ", NaN in the unused slots", torch.nan)],
    _variants(
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
    accs = torch.where(visible, _range(n, D), 0.0)
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
    _variants(
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

# ------------------------------------------------------------------------------------------------ decode_block


def _decode(block: int, num_tokens: int, unused_k: float = 9.0, what: str = "") -> Case:
    def launch(kernel: object, device: torch.device) -> object:
        k, v = _range(2, 3, 4, 4) / 4
        k[block, num_tokens:], v[block, num_tokens:] = unused_k, torch.nan
        q, k, v = (tensor.to(device) for tensor in (torch.tensor([2.0, 0.0, -1.0, 1.0]), k, v))
        out = torch.full_like(q, torch.nan)
        kernel[(1,)](q, k, v, out, block, num_tokens, 0.5, P=4, D=4)
        return out

    return launching(f"block {block} of 3, {num_tokens} of its 4 slots written{what}", launch)


_MASKED = "mask=visible[:, None], other=0.0"

DECODE_BLOCK = triton_exercise(
    "decode_block",
    [
        _decode(0, 4),
        _decode(2, 4),
        _decode(1, 3, what=", NaN in the unused values"),
        _decode(1, 3, torch.nan, ", NaN in the unused keys and values"),
    ],
    _variants(
        "decode_block.py",
        always_block_0=(
            "Right for block 0 only: token t of the block is row block · P + t of the cache.",
            ("(block * P + token)", "token"),
        ),
        blocks_of_one_token=(
            "A block begins P tokens after the one before: block · P, not block.",
            ("(block * P + token)", "(block + token)"),
        ),
        no_scale=("The scores lack the scale.", ("scale * tl.sum", "tl.sum")),
        not_divided=(
            "The weights do not sum to 1: divide by their sum.",
            (" / tl.sum(weights, axis=0)", ""),
        ),
        scores_of_0=(
            "Keys past the end got weight: loaded as 0 they have a score of 0, and exp(0 − m) is a weight. Their score "
            "must be −inf.",
            (
                'tl.where(visible, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))',
                "scale * tl.sum(q[None, :] * k, axis=1)",
            ),
        ),
        NaN_times_0=(
            "The weight of an unused slot is 0, and 0 · NaN is NaN: load its values as 0, too (`mask`, `other`).",
            (f"v = tl.load(v_ptr + offsets, {_MASKED})", "v = tl.load(v_ptr + offsets)"),
        ),
        NaN_scores=(
            "An unused slot holds NaN, and a sum with NaN is NaN: select with `tl.where`, do not add −inf.",
            (f"k = tl.load(k_ptr + offsets, {_MASKED})", "k = tl.load(k_ptr + offsets)"),
            (
                'tl.where(visible, scale * tl.sum(q[None, :] * k, axis=1), float("-inf"))',
                'scale * tl.sum(q[None, :] * k, axis=1) + tl.where(visible, 0.0, float("-inf"))',
            ),
        ),
    ),
    "what the CUDA kernel does with groups, shuffles and barriers, the compiler does.",
)

EXERCISES = [COALESCED_COPY, WARP_SUM, BLOCK_MAX, QK_BLOCK, MERGE_PARTITIONS, DECODE_BLOCK]
