"""Tokenizers of the two kinds that checkpoints have, small, and a model that writes what a test says."""

from types import SimpleNamespace

import torch
from torch import nn

from pagewise.models.vocabulary import byte_of

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|endoftext|>")
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] in ('system', 'user', 'assistant') %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen's rules for roles: a message of another role is left out."""


def byte_level(merges=("Ġ t", "h e", "Ġt he", "â Ī"), **options):
    """A tokenizer like those of GPT-2, Llama 3 and Qwen: every byte has a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast  # takes three seconds, and every worker collects this module

    merges = [tuple(merge.split(" ")) for merge in merges]
    names = [*byte_of(), *("".join(merge) for merge in merges)]
    bpe = models.BPE({name: i for i, name in enumerate(names)}, merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{"eos_token": SPECIAL[2], "additional_special_tokens": SPECIAL[:2], "chat_template": TEMPLATE} | options,
    )


def byte_fallback(**options):
    """A tokenizer like that of Llama 2: a character without a token becomes tokens of one byte each."""
    from tokenizers import Tokenizer, decoders, models, normalizers
    from transformers import PreTrainedTokenizerFast

    merges = [("t", "h"), ("th", "e"), ("▁", "the")]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcehnt�Ġ"]  # Maltese has a Ġ
    names += ["".join(merge) for merge in merges]
    bpe = models.BPE({name: i for i, name in enumerate(names)}, merges, unk_token="<unk>", byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    strip = decoders.Strip(" ", 1, 0)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), strip])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, **{"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"} | options
    )


class Scripted(nn.Module):
    """Writes `script` after a prompt of `start` tokens, and then token 0. `logits` are those of all other tokens."""

    num_kv_heads = 1

    def __init__(self, script, *, start, vocab_size, context=256, logits=None):
        super().__init__()
        self.script, self.start = script, start
        self.weight = nn.Parameter(torch.zeros(1), requires_grad=False)  # has the dtype and device
        self.logits = torch.zeros(vocab_size) if logits is None else logits
        self.config = SimpleNamespace(
            vocab_size=vocab_size, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1, head_dim=8,
            hidden_size=8, max_position_embeddings=context,
        )  # fmt: skip

    def forward(self, token_ids, positions, attend, *, logits_for=None):
        attend(0, *(torch.zeros(len(token_ids), 1, token_ids.shape[1], 8) for _ in range(3)))
        positions = positions if logits_for is None else positions[:, logits_for]
        out = self.logits.repeat(*positions.shape, 1)
        for row, position in zip(out.flatten(0, 1), positions.flatten().tolist(), strict=True):
            at = position + 1 - self.start
            row[self.script[at] if at < len(self.script) else 0] += 9.0
        return out
