"""Pre-training reports the share of [UNK], and leaves [UNK] out of its held-out figures."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.prepare import prepare
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import Split
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unigram import unigram_entropy
from bertsmith.errors import StoreError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.progress import NullProgress
from bertsmith.runtime import device
from bertsmith.text.corpus import find_sources
from bertsmith.train.pretraining.evaluation import HeldoutResult, build_heldout_stream, evaluate
from tests.train.conftest import WORDS, Train, make_tokenizer

UNK = 1


class RecordingProgress(NullProgress):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def log(self, text: str) -> None:
        """Keep a line."""
        self.messages.append(text)


def korean_store(folder: Path, known: int) -> Path:
    """Prepare sentences of ``known`` known words among two Korean ones, which are [UNK]."""
    chance = np.random.default_rng(5)
    lines, end = [], "." if known else ""
    for _ in range(120):
        sentences = [
            " ".join(["겨울에는", *chance.choice(WORDS, known), "춥습니다"]) + end for _ in range(6)
        ]
        lines.append(json.dumps({"text": "\n".join(sentences)}) + "\n")
    folder.mkdir()
    (folder / "corpus.jsonl").write_text("".join(lines))
    found = find_sources([str(folder / "corpus.jsonl")])
    prepare(found, make_tokenizer(), folder / "store", workers=1)
    return folder / "store"


def test_a_run_reports_the_share_of_unknown_tokens(train: Train, tmp_path: Path) -> None:
    """The share stands before the first step and in the held-out figures; above 2 % it warns."""
    notes = RecordingProgress()
    store = korean_store(tmp_path / "korean", known=2)
    result = train("run", store, steps=1, progress=notes)
    assert "[UNK]: 40.00% of the training tokens, 40.00% of the held-out tokens" in notes.messages
    assert sum(line.startswith("warning: 40.0% of the ") for line in notes.messages) == 1
    assert result.heldout["unknown_share"] == pytest.approx(0.4, abs=0.05)
    known = RecordingProgress()
    result = train("known", steps=1, progress=known)
    assert not any("warning" in line for line in known.messages)
    assert result.heldout["unknown_share"] == 0


def test_a_store_of_nothing_but_unknown_tokens_is_refused(train: Train, tmp_path: Path) -> None:
    """There is no target to learn; the error says so before the first step."""
    store = korean_store(tmp_path / "korean", known=0)
    with pytest.raises(StoreError, match=r"all [0-9,]+ tokens of the split 'train' are \[UNK\]"):
        train("run", store, steps=1)


def evaluated(stream: ExampleStream) -> HeldoutResult:
    """Evaluate a random model on a whole stream."""
    config = ModelConfig(
        vocab_size=stream.vocabulary.vocab_size, layers=1, width=16, heads=2, feed_forward=32,
        max_positions=64, nsp=False,
    )  # fmt: skip
    machine = device.resolve_machine("cpu", "fp32", "reference", attention_dropout=0.0, threads=1)
    return evaluate(BertForPreTraining(config).eval(), stream, len(stream), machine)


@pytest.mark.parametrize("objective", ["masked", "left-to-right"])
def test_held_out_figures_leave_unknown_targets_out(objective: str) -> None:
    """No target is [UNK], and the unigram entropy is that of the same words: all but [UNK]."""
    chance = np.random.default_rng(7)
    split = Split.from_documents(
        [
            [np.where(chance.random(9) < 0.8, UNK, chance.integers(5, 40, 9)).tolist()] * 4
            for _ in range(40)
        ]
    )
    facts = VocabularyInfo.from_tokenizer(make_tokenizer())
    settings = DataSettings.model_validate({"length": 32, "objective": objective, "nsp": False})
    stream = build_heldout_stream(split, facts, settings)
    batch = stream.batch(0, len(stream))
    assert UNK not in batch.masked_labels
    found = evaluated(stream)
    assert found.num_predictions == len(batch.masked_labels) > 0
    ids = batch.ids.copy()
    if stream.is_masked_lm:
        ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids, minlength=facts.vocab_size)
    assert found.unknown_share == counts[UNK] / (counts[UNK] + counts[5:].sum())
    counts[:5] = 0
    assert found.unigram_entropy == unigram_entropy(counts)


def test_a_text_without_targets_has_no_figures() -> None:
    """Held-out sequences of [UNK] alone give NaN, not an error after hours of training."""
    split = Split.from_documents([[[UNK] * 9] * 4 for _ in range(9)])
    facts = VocabularyInfo.from_tokenizer(make_tokenizer())
    figures = evaluated(
        build_heldout_stream(split, facts, DataSettings(length=32, nsp=False))
    ).to_metrics()
    assert math.isnan(figures["masked_lm"])
    assert figures["unknown_share"] == 1
