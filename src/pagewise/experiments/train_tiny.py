"""Train the tiny model that ships with the package on the text of this repository.

    python -m pagewise.experiments.train_tiny --repo . --out build/tiny       about 15 minutes on two cores

The text consists of README.md, the Markdown of the lessons and all docstrings. One paragraph in ten is held out. A hash
chooses these paragraphs, so that a new paragraph does not move the others.

An earlier version of this file made the checkpoint in models/tiny, from a smaller text. The earlier version drew
GPT-2's initial weights, used dropout and did not decay the gains of the norms. It lowered the learning rate to 2 %
instead of 0. It averaged the weights over the steps and evaluated the held-out text during training. It stopped when
that loss no longer fell, and it kept the best average (`best_step` in models/tiny/training.json).
"""

import argparse
import ast
import hashlib
import json
import math
import re
import time
from dataclasses import asdict
from datetime import date
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.optim.lr_scheduler import OneCycleLR

from pagewise.models.llama import Llama, LlamaConfig
from pagewise.models.load import ByteTokenizer
from pagewise.tools.checks import check_count
from pagewise.tools.progress import progress

CONFIG = LlamaConfig(
    vocab_size=ByteTokenizer.vocab_size,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=512,
    tie_word_embeddings=True,
)
BATCH_TOKENS = 1024
LEARNING_RATE = 3e-3
WARM_UP = 0.03  # of all steps
WEIGHT_DECAY = 0.3

# ------------------------------------------------------------------------------------------------ the text


def documents(root: Path) -> list[list[str]]:
    """Return the paragraphs of each text of the repository. A paragraph that occurs twice is returned once.

    Raises ValueError if `root` does not hold the repository. A wheel does not contain the lessons.
    """
    files = [root / "README.md", *sorted((root / "lessons").glob("*.md")), *sorted((root / "lessons").glob("*.ipynb"))]
    files += [path for folder in ("src", "kernels", "tests") for path in sorted((root / folder).rglob("*.py"))]
    if not files[0].is_file() or not (root / "lessons").is_dir():
        raise ValueError(f"{root} has no README.md and lessons: pass the root of a clone with --repo")
    seen: set[str] = set()
    texts = []
    for path in files:
        paragraphs = [p.strip("\n").rstrip() for p in re.split(r"\n\s*\n", prose(path)) if normal(p)]
        new = {normal(p): p for p in paragraphs if normal(p) not in seen}
        seen |= new.keys()
        if new:
            texts.append(list(new.values()))
    return texts


def prose(path: Path) -> str:
    """Return the Markdown of a file or notebook, or the docstrings of Python code."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = json.loads(text)["cells"]
        return "\n\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    if path.suffix == ".py":
        documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
        nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, documented)]
        return "\n\n".join(filter(None, map(ast.get_docstring, nodes)))
    return text


def normal(paragraph: str) -> str:
    """Return a paragraph in lower case, with single spaces."""
    return " ".join(paragraph.lower().split())


def is_held_out(paragraph: str) -> bool:
    """Return True for one paragraph in ten, chosen by its hash."""
    return hashlib.sha256(normal(paragraph).encode()).digest()[0] % 10 == 0


def split(texts: list[list[str]]) -> tuple[Int[Tensor, " train"], Int[Tensor, " held_out"]]:
    """Return the token ids to train on and those that are held out. An end token follows each text."""
    sides: list[list[int]] = [[], []]
    for paragraphs in texts:
        for held_out in (False, True):
            if chosen := [p for p in paragraphs if is_held_out(p) == held_out]:
                sides[held_out] += [*ByteTokenizer().encode("\n\n".join(chosen)), ByteTokenizer.eos_token_id]
    return torch.tensor(sides[0]), torch.tensor(sides[1])


# ------------------------------------------------------------------------------------------------ training


def train(train_ids: Int[Tensor, " train"], *, steps: int, config: LlamaConfig = CONFIG, seed: int = 0) -> Llama:
    """Return a trained model. The same arguments give the same weights on the same machine.

    Raises:
        ValueError, TypeError: steps is not a positive int, or train_ids has fewer than 2 tokens.
    """
    check_count("steps", steps)
    if len(train_ids) < 2:
        raise ValueError(f"train_ids must hold at least 2 tokens, got {len(train_ids)}")
    with torch.random.fork_rng(devices=[]):  # the caller's random numbers stay the same
        torch.manual_seed(seed)
        model = Llama(config)
        optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=WEIGHT_DECAY)
        schedule = OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps + 1, pct_start=WARM_UP, cycle_momentum=False)
        for step in progress(range(steps), "training"):
            done = step / steps
            # short rows first: a row of 128 tokens teaches as much per token, and attention over it costs less
            length = config.max_position_embeddings // (4 if done < 0.3 else 2 if done < 0.6 else 1)
            optimizer.zero_grad()
            loss_of(model, random_rows(train_ids, length)).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return model


def random_rows(ids: Int[Tensor, " n"], length: int) -> Int[Tensor, "B T_and_1"]:
    """Return BATCH_TOKENS tokens of `ids` in rows from random positions, each with the token that follows the row."""
    length = min(length, len(ids) - 1)
    starts = torch.randint(len(ids) - length, (max(1, BATCH_TOKENS // length), 1))
    return ids[starts + torch.arange(length + 1)]


def loss_of(model: Llama, ids: Int[Tensor, "B T_and_1"], reduction: str = "mean") -> Float[Tensor, ""]:
    """Return the cross-entropy in nats of each token, given the tokens before it in its row."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    logits = model(ids[:, :-1], positions, attend)
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: Llama, ids: Int[Tensor, " n"]) -> float:
    """Return the nats per byte over `ids`, in rows of the model's longest context. An end token counts as a byte."""
    length = min(model.config.max_position_embeddings, len(ids) - 1)
    batches = [*ids.unfold(0, length + 1, length).split(8)]
    if rest := (len(ids) - 1) % length:
        batches.append(ids[None, -rest - 1 :])
    return sum(loss_of(model, rows, reduction="sum").item() for rows in progress(batches, "held out")) / (len(ids) - 1)


# ------------------------------------------------------------------------------------------------ the folder


def save(model: Llama, folder: Path, record: dict[str, object]) -> None:
    """Write a folder that `load_model` and transformers load: bfloat16 weights, config.json and training.json."""
    sizes = asdict(model.config)
    del sizes["rope_scaling"]
    settings = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        **sizes,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes["rope_theta"]},
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": ByteTokenizer.eos_token_id,
        "dtype": "bfloat16",
        "tokenizer": "bytes",  # read by load_model; transformers has no such tokenizer
    }
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: weight.detach().bfloat16().contiguous() for name, weight in model.state_dict().items()}
    # save_file would write a file that only its owner can read, and this file goes into a wheel
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    for name, content in (("config.json", settings), ("training.json", record)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Read the repository, train, save the model and print its loss."""
    parser = argparse.ArgumentParser(description="Train the tiny model on the text of this repository.")
    parser.add_argument("--repo", type=Path, default=Path(), help="the root of the repository (here)")
    parser.add_argument("--out", type=Path, required=True, help="the folder to write; src/pagewise/models/tiny ships")
    parser.add_argument("--steps", type=int, default=1700, help="(%(default)d)")
    parser.add_argument("--seed", type=int, default=0, help="(%(default)d)")
    asked = parser.parse_args(arguments)
    texts = documents(asked.repo)
    corpus = "\0".join("\n\n".join(paragraphs) for paragraphs in texts).encode()
    train_ids, held_out_ids = split(texts)
    print(f"{len(texts)} texts: {len(train_ids)} bytes to train on, {len(held_out_ids)} held out", flush=True)
    start = time.monotonic()
    model = train(train_ids, steps=asked.steps, config=CONFIG, seed=asked.seed).bfloat16().float()  # as it is saved
    seconds, loss = round(time.monotonic() - start, 1), evaluate(model, held_out_ids)
    record = {
        "corpus_bytes": len(corpus),
        "corpus_sha256": hashlib.sha256(corpus).hexdigest(),
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        "steps": asked.steps,
        "seconds": seconds,
        "held_out_nats_per_byte": loss,
        "held_out_bits_per_byte": loss / math.log(2),
        "seed": asked.seed,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    save(model, asked.out, record)
    print(f"held out: {loss:.3f} nats = {loss / math.log(2):.3f} bits per byte, after {seconds:.0f} s; see {asked.out}")


if __name__ == "__main__":
    main()
