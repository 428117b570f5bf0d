"""The page of times beside other projects: `python src/repository/measured.py FOLDER` writes FOLDER/measured.md.

Its times are the records of FOLDER/measurements/peers.json. The page shows the shapes of DECODE, MIXED and so on; each
range of ratios in its text is over all records of that kind. A record's `what` is "method, mode".
"""

import re
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pagewise.tools.records import Record, recorded

OURS = "pagewise"
PLAN = "pagewise, the engine's plan"
# Figures of the same evening, GPU and commit that are not among the records.
READ_RATE = 4.397e12  # bytes/s of torch.sum
EMPTY_KERNEL = 16.8e-6  # seconds of the host for a launch of an empty Triton kernel
CHOSEN_TILE, BEST_TILE = 741.0, 609.2  # µs of 128 × 128 and of 64 × 64: forward, 4,096 causal tokens, D = 128

Where = Callable[[dict[str, int]], bool]


class Times:
    """The records by method, mode and shape."""

    def __init__(self, folder: Path) -> None:
        self.records = recorded(folder / "measurements" / "peers.json")
        self.by_key = {(*r.what.rsplit(", ", 1), r.dtype, *r.shape.items()): r for r in self.records}

    def one(self, method: str, mode: str, shape: dict[str, int], dtype: str) -> Record:
        """Return the record of a method on a shape."""
        return self.by_key[method, mode, dtype, *shape.items()]

    def ratio(self, record: Record, ours: str = OURS) -> float:
        """Return how many times as long as ours a record takes: a ratio of two medians."""
        mode = record.what.rsplit(", ", 1)[1]
        return record.seconds / self.one(ours, mode, record.shape, record.dtype).seconds

    def all(self, method: str, mode: str, where: Where) -> Iterator[Record]:
        """Yield the timed records of a method on all shapes of a kind."""
        for r in self.records:
            if r.what == f"{method}, {mode}" and r.seconds is not None and where(r.shape):
                yield r

    def ratios(self, method: str, where: Where, mode: str = "gpu", ours: str = OURS) -> list[float]:
        """Return a method's ratios to ours, the smallest first."""
        return sorted(self.ratio(r, ours) for r in self.all(method, mode, where))

    def span(self, method: str, where: Where, mode: str = "gpu", ours: str = OURS) -> str:
        """Return a method's smallest and largest ratio to ours: "1.09 to 3.73"."""
        return span(self.ratios(method, where, mode, ours))

    def host(self, method: str) -> float:
        """Return the µs that the host adds to the GPU's time of an eager decode step: the median of all shapes."""
        steps = self.all(method, "eager", decode)
        return statistics.median(1e6 * (r.seconds - self.one(method, "gpu", r.shape, r.dtype).seconds) for r in steps)


def span(numbers: Sequence[float], form: str = ".2f") -> str:
    """Return the least and the greatest of some numbers as text."""
    return f"{min(numbers):{form}} to {max(numbers):{form}}"


def decode(shape: dict[str, int]) -> bool:
    """Whether a shape is a step of decoding over paged keys."""
    return shape.get("paged") == 1


def dense(shape: dict[str, int]) -> bool:
    """Whether a shape is a step of decoding over keys in one tensor."""
    return shape.get("paged") == 0


def mixed(shape: dict[str, int]) -> bool:
    """Whether a shape is a step with new tokens of a prompt."""
    return "chunk" in shape


def flat(shape: dict[str, int]) -> bool:
    """Whether a shape is a product of few rows."""
    return "M" in shape


def whole(backward: int, head_size: int | None = None) -> Where:
    """Return whether a shape is attention of whole sequences, in one direction."""
    return lambda shape: shape.get("backward") == backward and head_size in (None, shape["head_size"])


def decode_shape(num_seqs: int, keys: int, paged: int = 1) -> dict[str, int]:
    """Return a shape of decoding with 32 query heads and 8 KV heads."""
    sizes = {"num_seqs": num_seqs, "shortest": keys, "longest": keys, "one_long": 0, "paged": paged}
    return sizes | {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16}


def mixed_shape(chunk: int, context: int, rows: int, row_context: int) -> dict[str, int]:
    """Return a shape of a mixed step with 32 query heads and 8 KV heads."""
    sizes = {"chunk": chunk, "context": context, "rows": rows, "row_context": row_context}
    return sizes | {"num_heads": 32, "num_kv_heads": 8, "head_size": 128, "block_size": 16}


def whole_shape(seq_len: int, head_size: int, causal: int, backward: int) -> dict[str, int]:
    """Return a shape of whole sequences: 16,384 tokens of 2,048 numbers in all."""
    sizes = {"seq_len": seq_len, "head_size": head_size, "causal": causal, "backward": backward}
    return sizes | {"batch": 16_384 // seq_len, "num_heads": 2048 // head_size}


DECODE = [(1, 1024), (8, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 8192), (1, 65_536), (8, 65_536), (64, 65_536)]
DENSE = [(1, 1024), (64, 1024), (1, 8192), (8, 8192), (64, 8192), (1, 65_536)]
MIXED = [(512, 512, 0, 0), (2048, 2048, 0, 0), (256, 512, 15, 1024), (512, 512, 32, 1024)]
MIXED += [(256, 2048, 15, 4096), (512, 2048, 32, 4096), (256, 8192, 15, 8192)]
WHOLE = [(length, head_size) for head_size in (64, 128) for length in (1024, 4096, 16_384)]
ROWS = (1, 2, 4, 8, 16, 32, 64)


def table(
    times: Times, labels: str, rows: list[tuple[str, dict]], peers: dict[str, str], dtype: str = "bfloat16"
) -> str:
    """Return a table with a row per shape: our time, its share of the limit, and the ratio of each peer to ours."""
    lines = [line((labels, "ours, µs", "of the limit", *peers)), line(("---", *("---:",) * (2 + len(peers))))]
    for label, shape in rows:
        ours = times.one(OURS, "gpu", shape, dtype)
        cells = [bold_below_one(times.ratio(times.one(peer, "gpu", shape, dtype))) for peer in peers.values()]
        lines.append(line((label, microseconds(ours), f"{percent(ours.fraction)} {ours.limit}", *cells)))
    return "\n".join(lines)


def line(cells: Sequence[str]) -> str:
    """Return a line of a table in Markdown."""
    return f"| {' | '.join(cells)} |"


def percent(fraction: float, digits: int = 0) -> str:
    """Return a fraction as text: "77 %", with a space that does not break."""
    return f"{100 * fraction:.{digits}f}\u00a0%"


def bold_below_one(ratio: float) -> str:
    """Return a ratio as text, in bold type where the other method is faster."""
    return f"**{ratio:.2f}**" if round(ratio, 2) < 1 else f"{ratio:.2f}"


def microseconds(record: Record) -> str:
    """Return the time of a record, in µs."""
    return f"{1e6 * record.seconds:,.1f}"


def decode_table(times: Times) -> str:
    """Return the table of paged decode steps."""
    rows = [(f"{n} × {keys:,}", decode_shape(n, keys)) for n, keys in DECODE]
    peers = {"our plan": PLAN, "vLLM": "vLLM unified", "sglang": "sglang decode", "FlashInfer": "FlashInfer"}
    return table(times, "sequences × keys", rows, peers)


def dense_table(times: Times) -> str:
    """Return the table of decode steps without pages."""
    rows = [(f"{n} × {keys:,}", decode_shape(n, keys, paged=0)) for n, keys in DENSE]
    return table(times, "sequences × keys", rows, {"SDPA flash": "SDPA flash", "SDPA cuDNN": "SDPA cudnn"})


def mixed_table(times: Times) -> str:
    """Return the table of mixed steps."""
    rows = [
        (f"{new:,} of {context:,} tokens, " + (f"{n} × {keys:,}" if n else "alone"), mixed_shape(new, context, n, keys))
        for new, context, n, keys in MIXED
    ]
    peers = {"our plan": PLAN, "vLLM": "vLLM unified", "sglang": "sglang extend", "FlashInfer": "FlashInfer"}
    return table(times, "a prompt's new tokens, and rows that decode × keys", rows, peers)


def whole_table(times: Times, backward: int) -> str:
    """Return the table of whole causal sequences, in one direction."""
    rows = [(f"{length:,}, D = {D}", whole_shape(length, D, 1, backward)) for length, D in WHOLE]
    peers = {"SDPA flash": "SDPA flash", "SDPA cuDNN": "SDPA cudnn", "tutorial 06": "tutorial 06"}
    return table(times, "tokens", rows, peers)


def flat_table(times: Times, N: int) -> str:
    """Return the table of flat products of one width."""
    rows = [(f"{M}", {"M": M, "N": N, "K": 4096}) for M in ROWS]
    peers = {"our gemv": "pagewise gemv", "our flat_gemm": "pagewise flat_gemm", "cuBLAS": "cuBLAS (torch linear)"}
    return table(times, f"rows M, N = {N:,}", rows, peers, dtype="float16")


def eager_table(times: Times) -> str:
    """Return the table of eager calls beside the GPU's own time, in µs."""
    decode_peers = "vLLM unified", "sglang decode", "FlashInfer"
    cases = [(f"decode, {n} × {keys:,}", decode_shape(n, keys), decode_peers) for n, keys in DECODE[:1] + DECODE[4:6]]
    mixed_peers = "vLLM unified", "sglang extend", "FlashInfer"
    cases.append(("mixed, 512 new tokens, 32 × 1,024", mixed_shape(*MIXED[3]), mixed_peers))
    cases.append(
        ("causal, 16 × 1,024 tokens", whole_shape(1024, 128, 1, 0), ("SDPA flash", "SDPA cudnn", "tutorial 06"))
    )
    lines = [line(("step", "ours, GPU only", "ours", "others")), line(("---", "---:", "---:", "---"))]
    for label, shape, peers in cases:
        alone, ours, *others = (
            times.one(method, mode, shape, "bfloat16")
            for method, mode in [(OURS, "gpu"), (OURS, "eager"), *((peer, "eager") for peer in peers)]
        )
        shown = ", ".join(f"{name} {1e6 * r.seconds:,.0f}" for name, r in zip(peers, others, strict=True))
        lines.append(line((label, f"{1e6 * alone.seconds:,.0f}", f"{1e6 * ours.seconds:,.0f}", shown)))
    return "\n".join(lines)


def page(folder: Path) -> str:
    """Return the page of a folder of lessons."""
    times = Times(folder)
    parts = introduction, method, of_decode, of_mixed, of_whole, of_flat, of_dense, of_eager, unknown
    return "\n\n".join(wrapped(part(times)) for part in parts) + "\n"


def wrapped(text: str) -> str:
    """Return a text in Markdown whose paragraphs and items have lines of at most 120 characters."""
    blocks = []
    for block in text.split("\n\n"):
        if not block.startswith(("#", "|")):
            items = (re.sub(r"[ \n]+", " ", item) for item in re.split(r"\n(?=- )", block))
            fill = textwrap.TextWrapper(120, break_long_words=False, break_on_hyphens=False)
            lines = []
            for item in items:
                fill.subsequent_indent = "  " if item.startswith("- ") else ""
                lines += fill.wrap(item)
            block = "\n".join(lines)
        blocks.append(block)
    return "\n\n".join(blocks)


def introduction(times: Times) -> str:
    """Return the title and the summary."""
    flashinfer = times.ratios("FlashInfer", decode)
    first = times.one(OURS, "gpu", decode_shape(8, 8192), "bfloat16")
    return f"""# Measured beside others

A decode kernel of these lessons reads memory at {percent(first.fraction)} of a copy's speed. Is that good? The
share alone cannot tell, because it does not say what a kernel can reach. Other people's kernels can. So ours ran
beside theirs, in one process on one {first.device}, on {first.date[:10]}.

- **Decode: we beat the Triton kernels of vLLM and sglang, and lose narrowly to FlashInfer.** On all
{len(flashinfer)} shapes, vLLM's kernel takes {times.span("vLLM unified", decode)} times as long as ours, and
sglang's {times.span("sglang decode", decode)} times. FlashInfer takes {span(flashinfer)} of our time. It is faster
on {sum(ratio < 0.98 for ratio in flashinfer)} shapes, slower on {sum(ratio > 1.02 for ratio in flashinfer)}, and
within 2 % on the others.
- **Mixed steps: we win most shapes.** vLLM's kernel takes {times.span("vLLM unified", mixed)} times as long as
ours, and FlashInfer {times.span("FlashInfer", mixed)}.
- **Whole sequences: we lose.** cuDNN needs {times.span("SDPA cudnn", whole(0))} of our time forward and
{times.span("SDPA cudnn", whole(1))} backward. Even Triton's own tutorial is faster in each forward.
- **Flat products: we win up to two rows and lose from 16 rows on**, against cuBLAS.
- **Eager calls: we lose.** In a decode step our function keeps the host busy for {times.host(OURS):.0f} µs longer
than the GPU, vLLM's for {times.host("vLLM unified"):.0f} and FlashInfer's for {times.host("FlashInfer"):.0f}.
Inside a CUDA graph this cost disappears.

All {len(times.records):,} records are in `lessons/measurements/peers.json`, and `src/repository/measured.py` writes
this page from them. The tables show the shapes that matter most. A range in the text is over all shapes."""


def method(times: Times) -> str:
    """Return the section that says how it was measured."""
    r = times.one(OURS, "gpu", decode_shape(8, 8192), "bfloat16")
    rates = {x.dtype: x.limit_rate / 1e12 for x in times.records if x.limit == "matmul"}
    spreads = sorted(x.spread / x.seconds for x in times.records if x.seconds and x.what.endswith(", gpu"))
    versions = r.versions
    return f"""## How it was measured

Two kernels compare fairly only if they get the same inputs, on the same GPU, under the same conditions. So one
process holds all methods of a shape. First it compares each result with float64; none was wrong. Then it times the
methods in turns: seven rounds, three calls per round. A table shows the median of the rounds, and a ratio is a
ratio of two medians. The quartiles of the rounds are {percent(spreads[len(spreads) // 2], 1)} of the median apart
in the typical record, and {percent(spreads[-1])} in the worst.

- **Time** is the GPU's own time of one call, from a cold L2 cache, with the launch hidden. Only the table of eager
calls includes the host.
- **The limit** is measured too: a copy moves {r.limit_rate / 1e12:.2f} TB/s, and a large matrix product reaches
{rates["bfloat16"]:.0f} TFLOP/s in bfloat16 and {rates["float16"]:.0f} in float16. A kernel that only reads can beat
a copy, which also writes: a sum read {READ_RATE / 1e12:.2f} TB/s. That is why a share can pass 100 %.
- **A ratio above 1** means that the other method takes longer than ours. **Bold** means that it is faster than
ours.

| project | version | what ran |
| --- | --- | --- |
| pagewise | commit {r.commit[:8]} | the Triton kernels that the package chooses, and the engine's plan |
| FlashInfer | {versions["flashinfer-python"]} | paged decode and prefill with tensor cores, backend fa2 |
| vLLM | {versions["vllm"].split()[0]} | its unified Triton attention, with the sizes that vLLM passes |
| sglang | {versions["sglang"].split()[0]} | its Triton decode and extend kernels, with at most 8 splits, its default |
| PyTorch | {versions["torch"]} | SDPA with flash (FlashAttention-2) and with cuDNN, and cuBLAS |
| Triton | tutorial 06 at {versions["tutorial06"]} | fused attention, forward and backward |

Driver {r.driver}, CUDA {versions["cuda"]}, Triton {versions["triton"]}, Python {versions["python"]}. Attention is
in bfloat16 with heads of 128 and 8 KV heads, unless a table says otherwise. FlashInfer's plan, sglang's splits and
the engine's plan are made before the call, because an engine makes them once for all layers. Our public functions
do everything inside the call."""


def of_decode(times: Times) -> str:
    """Return the section of paged decode."""
    long, late = decode_shape(1, 65_536), decode_shape(8, 8192)
    ours, theirs = (times.one(name, "gpu", late, "bfloat16") for name in (OURS, "FlashInfer"))
    vllm, sglang, plan = (
        times.ratio(times.one(name, "gpu", long, "bfloat16")) for name in ("vLLM unified", "sglang decode", PLAN)
    )
    crowd = {
        name: times.ratios(name, lambda shape: decode(shape) and shape["num_seqs"] == 64)[-1]
        for name in ("vLLM unified", "sglang decode")
    }
    cuda = [times.span(f"pagewise CUDA {name}", decode) for name in ("v1", "v2", "grouped")]
    return f"""## Paged decode

A decode step reads all keys and values once, so the memory sets its least time. The table has 32 query heads. With
64 query heads our times are nearly the same, because the bytes are.

{decode_table(times)}

**We win by most where the other Triton kernels use few programs.** One sequence of 65,536 tokens shows it. vLLM
cuts it into 16 segments and takes {vllm:.1f} times as long as ours. sglang cuts it into at most 8 pieces. With 8 KV
heads these are 64 programs for 132 SMs, and sglang takes {sglang:.1f} times as long. Half of the SMs cannot explain
a factor of {sglang:.0f}; the rest was not examined. With 64 sequences every kernel fills the GPU, and the largest
ratio is {crowd["vLLM unified"]:.2f} for vLLM and {crowd["sglang decode"]:.2f} for sglang.

**We lose to FlashInfer where few sequences are long.** At 8 × 8,192 FlashInfer reaches {percent(theirs.fraction)}
of a copy, and we reach {percent(ours.fraction)}. With 64 sequences we are as fast or faster. The choice of splits
may be a part of the reason: for one sequence of 65,536 tokens the engine's plan needs {plan:.2f} of our public
function's time. Otherwise the reason is not known.

**The plan costs time when all lengths are equal.** The engine plans its splits for unequal lengths. All lengths are
equal here, and the plan takes {times.span(PLAN, decode)} of the public function's time, although nothing of making
the plan is counted. Unequal lengths are its purpose ([lesson 7](07_flash_decoding.ipynb)), and no other project was
measured on those.

Our CUDA kernels are written to be read next to vLLM's first kernels, and they are slow. Version 1 takes {cuda[0]}
times as long as our Triton kernel, version 2 {cuda[1]}, and the grouped kernel {cuda[2]}. None of them uses tensor
cores."""


def of_mixed(times: Times) -> str:
    """Return the section of mixed steps."""
    flashinfer = times.ratios("FlashInfer", mixed, ours=PLAN)
    sglang = times.ratios("sglang extend", mixed, ours=PLAN)
    prompt = times.ratio(times.one("sglang extend", "gpu", mixed_shape(*MIXED[0]), "bfloat16"), PLAN)
    return f"""## Mixed steps

A server computes new tokens of a prompt and decodes other sequences in one step ([lesson 9](09_engine.ipynb)). The
table again has 32 query heads.

{mixed_table(times)}

**We win by most where a prompt meets long decoding rows.** vLLM's kernel takes {times.span("vLLM unified", mixed)}
times as long as ours. Our work plan gives a prompt large tiles and cuts a decoding row into splits. sglang's extend
kernel is made for prompts: a decoding row is a prompt of one token to it, and it takes up to {sglang[-1]:.0f} times
as long as the engine's plan. sglang itself has another kernel for such rows, so the column does not say how fast
sglang serves. For 512 tokens of a prompt alone, its kernel takes {prompt:.2f} of our plan's time.

**FlashInfer is close on the small steps.** Its plan is made before the step, like the engine's. Against the
engine's plan its ratio is {span(flashinfer)}: it is faster on {sum(x < 0.98 for x in flashinfer)} of
{len(flashinfer)} shapes and slower on {sum(x > 1.02 for x in flashinfer)}. Our public function, which makes its
plan inside the call, takes up to {percent(1 / times.ratios(PLAN, mixed)[0] - 1)} longer.

No method comes near a limit, and it was not measured which resource holds a mixed step back."""


def of_whole(times: Times) -> str:
    """Return the section of whole sequences."""
    tutorial = times.ratio(times.one("tutorial 06", "gpu", whole_shape(4096, 128, 1, 0), "bfloat16"))
    return f"""## Whole sequences

Training and prompts multiply large matrices, so the tensor cores set the least time. Each row has 16,384 causal
tokens in all, in sequences of the given length, and 16 heads of 128 or 32 heads of 64. Forward:

{whole_table(times, 0)}

**cuDNN wins on every shape, and Triton's tutorial wins on every forward.** cuDNN takes
{times.span("SDPA cudnn", whole(0))} of our time, with and without the causal mask. The tutorial is the rival that
teaches, because it is written in the same language as our kernel. It takes
{times.span("tutorial 06", whole(0, 128))} of our time with heads of 128, and
{times.span("tutorial 06", whole(0, 64))} with heads of 64.

**A bad tile explains much of that loss.** Another run on an H200, a few minutes later, timed 17 tiles of our kernel
on 4,096 causal tokens with heads of 128. The package had chosen 128 queries × 128 keys with 8 warps, which took
{CHOSEN_TILE:.0f} µs. A tile of 64 × 64 with 4 warps took {BEST_TILE:.0f} µs, which is {BEST_TILE / CHOSEN_TILE:.2f}
of the time. The tutorial's ratio on that shape is {tutorial:.2f}. So a better tile closes most of the gap to the
tutorial, but not the gap to cuDNN. The package now chooses that tile on such a GPU, and a better one in the backward
pass. All times on this page are from before that change. Why heads of 64 lose more is not known.

PyTorch's flash backend is slower than ours with heads of 128 ({times.span("SDPA flash", whole(0, 128))}), and
mostly faster with heads of 64 ({times.span("SDPA flash", whole(0, 64))}). The backward pass, on the same shapes:

{whole_table(times, 1)}

**Backward, we equal FlashAttention-2 and need up to twice cuDNN's time.** PyTorch's flash backend takes
{times.span("SDPA flash", whole(1))} of our time, and cuDNN {times.span("SDPA cudnn", whole(1))}. The tutorial's
backward is faster than ours with heads of 64 ({times.span("tutorial 06", whole(1, 64))}). With heads of 128 it
takes {times.span("tutorial 06", whole(1, 128))} times as long, for a reason that was not examined."""


def of_flat(times: Times) -> str:
    """Return the section of products of few rows."""

    def cublas(*counts: int) -> str:
        return times.span("cuBLAS (torch linear)", lambda shape: shape.get("M") in counts)

    one, most = (
        times.one("cuBLAS (torch linear)", "gpu", {"M": M, "N": 12_288, "K": 4096}, "float16") for M in (1, 64)
    )
    return f"""## Flat products

In a decode step each weight meets a few rows only, so a product should take as long as reading the weights ([lesson
8](08_flash_decoding_plus_plus.ipynb)). The tables have two of Llama-2-7B's four shapes, in float16, with K = 4,096.
*Ours* is the function `flat_gemm`, which uses the kernel of `gemv` up to two rows.

{flat_table(times, 12_288)}

{flat_table(times, 4096)}

**Up to two rows we win, and from 16 rows on we lose.** On the four shapes, cuBLAS takes {cublas(1, 2)} of our time
with one or two rows, {cublas(4, 8)} with four or eight, and {cublas(16, 32, 64)} with 16 to 64. cuBLAS needs
{microseconds(one)} µs for one row and {microseconds(most)} for 64, as a kernel that waits for the weights should.
Our kernel needs more time for each tile of rows, so something other than the weights holds it back; what, was not
measured. Because the best product changes with the rows, the package can ask a table of measured products which one
to use."""


def of_dense(times: Times) -> str:
    """Return the section of decode steps without pages."""
    return f"""## Decode without pages

With the keys in one tensor, PyTorch's own kernels can take part. The table has 32 query heads.

{dense_table(times)}

cuDNN takes {times.span("SDPA cudnn", dense)} of our time, so it is equal or a little faster. PyTorch's flash
backend takes {times.span("SDPA flash", dense)} times as long as ours."""


def of_eager(times: Times) -> str:
    """Return the section of eager calls."""
    vllm, sglang, flashinfer = map(times.host, ("vLLM unified", "sglang decode", "FlashInfer"))
    worst = max(r.spread / r.seconds for r in times.records if r.seconds and r.what.endswith(", eager"))
    return f"""## Eager calls

All tables above hide the host. Without a CUDA graph you wait for the host too: for Python, for checks, for the
launch. The next table has µs of one call on an idle GPU.

{eager_table(times)}

**Called eagerly, our functions are among the slowest.** In a decode step the host adds {times.host(OURS):.0f} µs to
our kernel in the median, and {times.host(PLAN):.0f} µs with the engine's plan. It adds {vllm:.0f} µs to vLLM's
kernel, {sglang:.0f} to sglang's and {flashinfer:.0f} to FlashInfer's. So a kernel that wins on the GPU can lose on
the clock. A launch of an empty Triton kernel cost the host {1e6 * EMPTY_KERNEL:.0f} µs in another run of that
evening, so Triton's launcher alone is not the reason. We suspect the nested tuples of tensors and strides that our
launches pass, and the checks of the public functions. Neither was profiled.

Inside a CUDA graph the host's time disappears, and the ratios are those of the tables above. That is why our engine
decodes inside CUDA graphs. Eager times are noisy: their quartiles lie up to {percent(worst)} of the median apart,
so read them as magnitudes."""


def unknown(times: Times) -> str:
    """Return the section that says what is not known."""
    refused = [r for r in times.records if r.refused]
    attention = sorted({r.what.split(",")[0] for r in refused if not flat(r.shape)})
    return f"""## What is not known

- One GPU was measured, for two minutes, with one version of Triton.
- All lengths of a decode step are equal, and the cache is in 16 bits. Heads of 64 were measured in whole sequences
only.
- vLLM, sglang and FlashInfer have other kernels for this GPU, FlashAttention-3 among them. They did not run, and
neither did FlexAttention.
- {len(refused)} cases have no time, and their records hold the reason: {" and ".join(attention)} refused some
shapes, and `flat_gemm` with 8 stages needs more shared memory than an SM has.
- No profiler looked at a rival. Where this page gives a reason, it follows from the sizes that were passed, or from
a second measurement."""


if __name__ == "__main__":
    (Path(sys.argv[1]) / "measured.md").write_text(page(Path(sys.argv[1])), encoding="utf-8")
