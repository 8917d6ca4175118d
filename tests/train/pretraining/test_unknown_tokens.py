"""Pre-training reports the fraction of [UNK], and leaves [UNK] out of the held-out metrics."""

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
from bertsmith.data.unigram import compute_unigram_entropy
from bertsmith.errors import StoreError
from bertsmith.model.bert import BertForPreTraining
from bertsmith.model.config import ModelConfig
from bertsmith.runtime import device
from bertsmith.text.corpus import find_sources
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.evaluation import HeldoutResult, build_heldout_stream, evaluate
from tests.train.conftest import WORDS, RecordingProgress, TrainFunction, make_tokenizer

UNK_ID, NUM_SPECIAL_TOKENS = 1, 5


def make_korean_store(folder: Path, num_known_words: int) -> Path:
    """Prepare a store of sentences with two Korean words, which are [UNK], and known words."""
    rng = np.random.default_rng(5)
    # Without known words, the period is left out, so that all tokens are [UNK].
    period = "." if num_known_words else ""
    lines = []
    for _ in range(120):
        sentences = [
            " ".join(["겨울에는", *rng.choice(WORDS, num_known_words), "춥습니다"]) + period
            for _ in range(6)
        ]
        lines.append(json.dumps({"text": "\n".join(sentences)}) + "\n")
    folder.mkdir()
    (folder / "corpus.jsonl").write_text("".join(lines))
    sources = find_sources([str(folder / "corpus.jsonl")])
    prepare(sources, make_tokenizer(), folder / "store", workers=1)
    return folder / "store"


def test_batch_of_unknown_tokens_has_a_loss_of_0(train: TrainFunction, tmp_path: Path) -> None:
    """A batch whose tokens are all [UNK] has no predictions; 0 / 0 would end the run."""
    rng = np.random.default_rng(5)
    texts = [f"겨울 {chr(0xAC00 + number)}" for number in range(60)]
    texts += [" ".join(rng.choice(WORDS, 9)) + "." for _ in range(60)]
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sources = find_sources([str(corpus)])
    prepare(sources, make_tokenizer(), tmp_path / "mixed", workers=1)
    result = train(
        "run", tmp_path / "mixed", steps=20, data__batch_size=1, data__nsp="false", run__log_every=1
    )
    lines = read_metrics(tmp_path / "run")
    losses = [line["mlm_loss"] for line in lines if line["kind"] == "train"]
    assert 0 in losses
    assert max(losses) > 1
    assert math.isfinite(result.heldout["mlm_loss"])


def test_run_reports_the_fraction_of_unknown_tokens(train: TrainFunction, tmp_path: Path) -> None:
    """A run logs the fraction of [UNK] and has it in its metrics; above 2 %, it logs a warning."""
    progress = RecordingProgress()
    store = make_korean_store(tmp_path / "korean", num_known_words=2)
    result = train("run", store, steps=1, progress=progress)
    messages = progress.messages
    assert "[UNK]: 40.00% of the training tokens, 40.00% of the held-out tokens" in messages
    assert sum(message.startswith("warning: 40.0% of the ") for message in messages) == 1
    assert result.heldout["unknown_share"] == pytest.approx(0.4, abs=0.05)
    progress = RecordingProgress()
    result = train("known", steps=1, progress=progress)
    assert not any("warning" in message for message in progress.messages)
    assert result.heldout["unknown_share"] == 0


def test_store_with_only_unknown_tokens_is_rejected(train: TrainFunction, tmp_path: Path) -> None:
    """A store in which all tokens are [UNK] is an error before the first step."""
    store = make_korean_store(tmp_path / "korean", num_known_words=0)
    with pytest.raises(StoreError, match=r"all [0-9,]+ tokens of the split 'train' are \[UNK\]"):
        train("run", store, steps=1)


def evaluate_random_model(stream: ExampleStream) -> HeldoutResult:
    """Evaluate a model with random weights on all examples of a stream."""
    config = ModelConfig(
        vocab_size=stream.vocabulary.vocab_size,
        layers=1,
        width=16,
        heads=2,
        feed_forward=32,
        max_positions=64,
        nsp=False,
    )
    machine = device.resolve_machine(
        "cpu", "fp32", "reference", attention_dropout=0.0, head_dim=config.head_dim, threads=1
    )
    return evaluate(BertForPreTraining(config).eval(), stream, len(stream), machine)


@pytest.mark.parametrize("objective", ["masked", "left-to-right"])
def test_unknown_tokens_are_excluded_from_the_metrics(objective: str) -> None:
    """[UNK] is never a target, and is not counted in the unigram entropy."""
    rng = np.random.default_rng(7)
    documents = []
    for _ in range(40):
        is_unknown = rng.random(9) < 0.8
        sentence = np.where(is_unknown, UNK_ID, rng.integers(5, 40, 9)).tolist()
        documents.append([sentence] * 4)
    split = Split.from_documents(documents)
    vocabulary = VocabularyInfo.from_tokenizer(make_tokenizer())
    settings = DataSettings.model_validate({"max_seqlen": 32, "objective": objective, "nsp": False})
    stream = build_heldout_stream(split, vocabulary, settings)
    batch = stream.batch(0, len(stream))
    assert UNK_ID not in batch.masked_labels
    result = evaluate_random_model(stream)
    assert result.num_predictions == len(batch.masked_labels) > 0
    ids = batch.ids.copy()
    if stream.is_masked_lm:
        ids[batch.masked_positions] = batch.masked_labels
    counts = np.bincount(ids, minlength=vocabulary.vocab_size)
    num_words = counts[NUM_SPECIAL_TOKENS:].sum()
    assert result.unknown_share == counts[UNK_ID] / (counts[UNK_ID] + num_words)
    counts[:NUM_SPECIAL_TOKENS] = 0
    assert result.unigram_entropy == compute_unigram_entropy(counts)


def test_held_out_text_without_targets_has_a_nan_loss() -> None:
    """Held-out text with only [UNK] has a NaN loss instead of raising an error."""
    split = Split.from_documents([[[UNK_ID] * 9] * 4 for _ in range(9)])
    vocabulary = VocabularyInfo.from_tokenizer(make_tokenizer())
    stream = build_heldout_stream(split, vocabulary, DataSettings(max_seqlen=32, nsp=False))
    metrics = evaluate_random_model(stream).to_metrics()
    assert math.isnan(metrics["mlm_loss"])
    assert metrics["unknown_share"] == 1
