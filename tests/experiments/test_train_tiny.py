"""Training the tiny model: the text, the held-out paragraphs, the loss, and that a run can be repeated."""

import json
import math

import pytest
import torch

from pagewise.experiments import train_tiny
from pagewise.experiments.train_tiny import documents, evaluate, is_held_out, main, prose, split, train
from pagewise.models.llama import Llama, LlamaConfig
from pagewise.models.load import ByteTokenizer, load_model

SMALL = LlamaConfig(
    vocab_size=257, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture
def repository(tmp_path):
    """A repository in miniature, with enough paragraphs that some are held out."""
    for folder in ("lessons", "src/pagewise", "kernels", "tests"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "README.md").write_text("# Pages\n\nThe cache is made of pages.\n")
    cells = [
        {"cell_type": "markdown", "source": ["### A claim\n", "The order does not matter."]},
        {"cell_type": "code", "source": ["secret = 'code is not prose'"]},
    ]
    (tmp_path / "lessons" / "01.ipynb").write_text(json.dumps({"cells": cells}))
    counted = "\n\n".join(f"Page {i} holds the keys and values of tokens {16 * i} to {16 * i + 15}." for i in range(60))
    (tmp_path / "lessons" / "index.md").write_text(counted)
    (tmp_path / "src" / "pagewise" / "module.py").write_text(
        '"""The module."""\n\nx = 1  # a comment\n\n'
        'def f():\n    """The cache is  made of pages."""\n    return "no docstring"\n'
    )
    return tmp_path


def test_prose_of_code_is_its_docstrings(repository):
    assert prose(repository / "src/pagewise/module.py") == "The module.\n\nThe cache is  made of pages."


def test_prose_of_a_notebook_is_its_markdown(repository):
    assert prose(repository / "lessons/01.ipynb") == "### A claim\nThe order does not matter."


def test_every_text_is_read_and_each_paragraph_once(repository):
    texts = documents(repository)
    assert [text[0].split("\n")[0] for text in texts] == [
        "# Pages",
        "Page 0 holds the keys and values of tokens 0 to 15.",
        "### A claim",
        "The module.",
    ]
    keys = [train_tiny.normal(paragraph) for text in texts for paragraph in text]
    assert len(keys) == len(set(keys))
    assert keys.count("the cache is made of pages.") == 1  # it occurs in README.md and in a docstring


def test_split_holds_out_one_paragraph_in_ten_and_loses_none(repository):
    texts = documents(repository)
    train_text, held_out_text = (ByteTokenizer().decode(ids) for ids in split(texts))
    for paragraph in (p for text in texts for p in text):
        assert (paragraph in held_out_text) == is_held_out(paragraph)
        assert (paragraph in train_text) != is_held_out(paragraph)
    held_out = sum(is_held_out(f"paragraph {i}") for i in range(1000))
    assert 60 <= held_out <= 140
    train_ids, _ = split(texts)
    trained = [text for text in texts if not all(map(is_held_out, text))]
    assert (train_ids == ByteTokenizer.eos_token_id).sum() == len(trained) > 2
    assert train_ids[-1] == ByteTokenizer.eos_token_id


def test_a_folder_without_the_texts_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"has no README.md and lessons: .*--repo"):
        main(["--repo", str(tmp_path), "--out", str(tmp_path / "out")])


def test_rows_are_runs_of_the_text():
    ids = torch.arange(20)
    torch.manual_seed(0)
    rows = train_tiny.random_rows(ids, 16)
    assert rows.shape == (train_tiny.BATCH_TOKENS // 16, 17)
    assert (rows.diff(dim=1) == 1).all()
    assert train_tiny.random_rows(ids, 512).shape[1] == 20  # a text shorter than a row is one row
    assert rows.min() == 0
    assert rows.max() == 19


def test_evaluate_averages_over_every_byte_once(monkeypatch):
    """With the loss of a token replaced by its id, the average is known."""
    monkeypatch.setattr(train_tiny, "loss_of", lambda model, ids, reduction: ids[:, 1:].double().sum())
    model = Llama(SMALL)
    for n in (2, 64, 65, 66, 129, 1000):
        assert evaluate(model, torch.arange(n)) == pytest.approx(sum(range(1, n)) / (n - 1))


TEXT = torch.tensor(ByteTokenizer().encode("one block after the other, page by page. " * 60))


def quick_train(steps=40, seed=0):
    return train(TEXT, steps=steps, config=SMALL, seed=seed)


@pytest.mark.slow
def test_training_reduces_the_loss():
    model = quick_train(steps=80)
    assert evaluate(model, TEXT[:200]) < 0.7 * math.log(257)


def test_the_seed_decides_everything():
    torch.manual_seed(1)
    first, before = quick_train(steps=5), torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == before, "training moved the caller's random stream"
    again, other = quick_train(steps=5), quick_train(steps=5, seed=1)
    for name, weight in first.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], weight, rtol=0, atol=0)
    assert evaluate(first, TEXT[:200]) != evaluate(other, TEXT[:200])


def test_bad_arguments_are_refused(shapes_unchecked):
    with pytest.raises(ValueError, match="steps must be at least 1"):
        quick_train(steps=0)
    with pytest.raises(ValueError, match="train_ids must hold at least 2 tokens, got 1"):
        train(TEXT[:1], steps=1)


def test_main_writes_a_folder_that_loads(repository, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_tiny, "CONFIG", SMALL)
    out = tmp_path / "trained"
    main(["--repo", str(repository), "--out", str(out), "--steps", "3", "--seed", "5"])
    model, tokenizer = load_model(out)
    record = json.loads((out / "training.json").read_text())
    _, held_out_ids = split(documents(repository))
    assert evaluate(model, held_out_ids) == pytest.approx(record["held_out_nats_per_byte"], rel=1e-5)
    assert record["held_out_bits_per_byte"] == pytest.approx(record["held_out_nats_per_byte"] / math.log(2))
    assert (record["steps"], record["seed"], record["torch"]) == (3, 5, torch.__version__)
    assert isinstance(tokenizer, ByteTokenizer)
    assert model.config == SMALL
    printed = capsys.readouterr().out
    assert f"{record['held_out_nats_per_byte']:.3f} nats = {record['held_out_bits_per_byte']:.3f} bits" in printed
