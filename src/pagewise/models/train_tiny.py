"""Trains the model that ships with the package, on the text written in this repository.

    python -m pagewise.models.train_tiny                 at most 10 minutes; the schedule fits itself to the time
    python -m pagewise.models.train_tiny --steps 2000    the same weights each time, on a machine that has the time

The corpus: README.md, the prose of the lessons, and the docstrings and comments of src/, kernels/ and tests/. One
paragraph in ten is held out, chosen by its hash; the weights with the lowest loss on these are the ones kept, for the
corpus is small enough to be learnt by heart.
"""

import argparse
import hashlib
import json
import math
import time
from copy import deepcopy
from dataclasses import asdict
from datetime import date
from pathlib import Path

import safetensors.torch
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy, dropout, scaled_dot_product_attention

from pagewise.models.corpus import check_repository, documents, repository, split
from pagewise.models.llama import Llama, LlamaConfig
from pagewise.models.load import TINY, ByteTokenizer, require_package
from pagewise.tools.checks import check_count, check_number, check_tensor

CONFIG = LlamaConfig(
    vocab_size=ByteTokenizer.vocab_size, hidden_size=192, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=512, tie_word_embeddings=True,
)  # fmt: skip
BATCH_TOKENS = 1024
LEARNING_RATE = 3e-3
WARM_UP = 40  # steps
WEIGHT_DECAY = 0.3
DROPOUT = 0.2
AVERAGE = 0.99  # evaluated and kept is a moving average of the weights; so much of it stays at each step
EVALUATE_EVERY = 100
PATIENCE = 800  # steps without a new best
EPOCHS, MAX_STEPS = 25, 4000
HARD_LIMIT = 14 * 60  # seconds

# ------------------------------------------------------------------------------------------------ training


def train(
    train_ids: Int[Tensor, " train"],
    held_out_ids: Int[Tensor, " held_out"],
    *,
    steps: int,
    config: LlamaConfig = CONFIG,
    seed: int = 0,
    seconds: float = HARD_LIMIT,
    progress: bool = True,
) -> tuple[Llama, dict[str, float | int]]:
    """(the model with the lowest held-out loss on the way, what happened). Stops early when that no longer falls.

    Learning rate and length of the pieces follow the share of `steps` or of `seconds` that is gone, whichever is
    larger: a slow machine takes fewer steps and still ends at the low rate. A run that was not short of time is
    repeated exactly by the same arguments on the same machine.

    Raises:
        ValueError, TypeError: an argument does not fit. ImportError: tqdm is missing.
    """
    for name, ids in (("train_ids", train_ids), ("held_out_ids", held_out_ids)):
        check_tensor(name, ids, "n", dtypes=(torch.int64,))
        if len(ids) < 2:
            raise ValueError(f"{name} must hold at least 2 tokens, got {len(ids)}")
    check_count("steps", steps)
    check_number("seconds", seconds, low=1e-3)
    bar = require_package("tqdm", "training").tqdm(range(1, steps + 1), unit="step", disable=not progress)
    start = time.monotonic()
    with torch.random.fork_rng(devices=[]):  # leave the caller's random stream as it was
        torch.manual_seed(seed)
        model = initialised(Llama(config))
        average = deepcopy(model)  # before it gets dropout
        for block in model.model["layers"]:
            for part in (block.self_attn, block.mlp):
                part.register_forward_hook(lambda part, inputs, out: dropout(out, DROPOUT))
        optimizer = optimizer_of(model)
        best, best_weights = {"held_out_nats_per_byte": math.inf, "best_step": 0}, None
        for step in bar:
            gone = max((step - 1) / steps, (time.monotonic() - start) / seconds)
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(step / WARM_UP, learning_rate_share(gone))
            length = config.max_position_embeddings // (4 if gone < 0.3 else 2 if gone < 0.6 else 1)
            optimizer.zero_grad()
            loss = loss_of(model, pieces(train_ids, length))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            move_towards(average, model, share=max(1 - AVERAGE, 10 / (9 + step)))
            last = gone >= 1 or step == steps
            if step % EVALUATE_EVERY and not last:
                continue
            held_out = evaluate(average, held_out_ids)
            bar.set_postfix(train=f"{loss.item():.3f}", held_out=f"{held_out:.3f}")
            if held_out < best["held_out_nats_per_byte"]:
                best_weights = {name: weight.clone() for name, weight in average.state_dict().items()}
                best = {"held_out_nats_per_byte": held_out, "train_nats_per_byte": loss.item(), "best_step": step}
            if last or step - best["best_step"] >= PATIENCE:
                break
        bar.close()
        if best_weights is None:
            raise ValueError(f"the held-out loss was {held_out} from the beginning: nothing was learnt")
    average.load_state_dict(best_weights)
    return average, {"steps": step, **best, "seconds": round(time.monotonic() - start, 1)}


@torch.no_grad()
def move_towards(average: Llama, model: Llama, share: float) -> None:
    """average = (1 − share) · average + share · model, in place."""
    for kept, new in zip(average.parameters(), model.parameters(), strict=True):
        kept.lerp_(new, share)


def optimizer_of(model: Llama) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves the gains of the norms alone."""
    matrices, gains = ([p for p in model.parameters() if (p.dim() == 2) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": gains, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95))


def learning_rate_share(gone: float) -> float:
    """A cosine from 1 down to 0.02 as `gone` goes from 0 to 1."""
    return 0.02 + 0.98 * math.cos(min(gone, 1.0) * math.pi / 2) ** 2


def pieces(ids: Int[Tensor, " n"], length: int) -> Int[Tensor, "B T_and_1"]:
    """BATCH_TOKENS tokens: random pieces of `ids`, each of `length` tokens and the one after them."""
    length = min(length, len(ids) - 1)
    starts = torch.randint(len(ids) - length, (max(1, BATCH_TOKENS // length), 1))
    return ids[starts + torch.arange(length + 1)]


def loss_of(model: Llama, ids: Int[Tensor, "B T_and_1"], reduction: str = "mean") -> Float[Tensor, ""]:
    """Cross-entropy in nats of each token given those before it in its row."""

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    positions = torch.arange(ids.shape[1] - 1).expand(len(ids), -1)
    logits = model(ids[:, :-1], positions, attend)
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: Llama, ids: Int[Tensor, " n"]) -> float:
    """Nats per byte over `ids`, in rows of the longest context that the model has. An eos counts as a byte."""
    length = min(model.config.max_position_embeddings, len(ids) - 1)
    batches = [*ids.unfold(0, length + 1, length).split(8)]
    if rest := (len(ids) - 1) % length:
        batches.append(ids[None, -rest - 1 :])
    return sum(loss_of(model, rows, reduction="sum").item() for rows in batches) / (len(ids) - 1)


def initialised(model: Llama) -> Llama:
    """GPT-2's random weights: normal, small, and smaller still where a block adds to the residual stream."""
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            std = 0.02 if "embed" in name else 0.5 * weight.shape[1] ** -0.5
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            torch.nn.init.normal_(weight, std=std / (2 * model.config.num_hidden_layers) ** 0.5 if adds else std)
    return model


# ------------------------------------------------------------------------------------------------ the folder


def save(model: Llama, folder: Path, record: dict[str, object]) -> None:
    """Write `model` in bfloat16 as a folder that `load_model` and transformers load, with `record` as training.json."""
    sizes = asdict(model.config)
    if sizes.pop("rope_scaling") is not None:
        raise ValueError("rope_scaling is not written: train without it")
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
    # not save_file: its files are readable by their owner alone, and this one goes into a wheel
    (folder / "model.safetensors").write_bytes(safetensors.torch.save(weights, metadata={"format": "pt"}))
    for name, content in (("config.json", settings), ("training.json", record)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Read the repository, train, save, and say how well it went."""
    parser = argparse.ArgumentParser(description="Train the tiny model on the text of this repository.")
    parser.add_argument("--repo", type=Path, help="root of the repository (default: the one this file is in)")
    parser.add_argument("--out", type=Path, default=TINY, help="folder to write (default: inside the package)")
    parser.add_argument("--minutes", type=float, default=10.0, help="at most so long, and never more than 14 (10)")
    parser.add_argument("--steps", type=int, help=f"at most so many (default: {EPOCHS} readings, at most {MAX_STEPS})")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.repo is not None:
        check_repository(options.repo)
    texts = documents(options.repo or repository())
    corpus = "\0".join("\n\n".join(paragraphs) for paragraphs in texts).encode()
    train_ids, held_out_ids = split(texts)
    steps = options.steps or min(MAX_STEPS, EPOCHS * len(train_ids) // BATCH_TOKENS + 1)
    print(
        f"{len(texts)} texts, {len(corpus)} bytes: {len(train_ids)} to learn, {len(held_out_ids)} held out", flush=True
    )
    model, result = train(
        train_ids,
        held_out_ids,
        steps=steps,
        config=CONFIG,
        seed=options.seed,
        seconds=min(60 * options.minutes, HARD_LIMIT),
    )
    model = model.bfloat16().float()  # as it will be saved
    loss = evaluate(model, held_out_ids)
    record = {
        "corpus_bytes": len(corpus),
        "corpus_sha256": hashlib.sha256(corpus).hexdigest(),
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
        **result,
        "held_out_nats_per_byte": loss,
        "held_out_bits_per_byte": loss / math.log(2),
        "seed": options.seed,
        "torch": torch.__version__,
        "date": date.today().isoformat(),
    }
    save(model, options.out, record)
    print(f"held out: {loss:.3f} nats = {loss / math.log(2):.3f} bits per byte, after {result['seconds']:.0f} s")
    print(f"saved in {options.out}: {(options.out / 'model.safetensors').stat().st_size} bytes of weights")


if __name__ == "__main__":
    main()
