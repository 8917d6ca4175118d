"""Pre-training on real text: the loss falls below the unigram entropy."""

import json
import sysconfig
from pathlib import Path

import pytest

from bertsmith.data.prepare import prepare
from bertsmith.text.corpus import find_sources
from bertsmith.text.docstrings import read_documentation
from bertsmith.text.wordpiece_trainer import train_wordpiece
from bertsmith.train.engine.metrics_log import read_metrics
from bertsmith.train.pretraining.pretrain import pretrain

#: Minimum size of the corpus, which is enough for 400 steps.
NUM_CHARACTERS = 400_000
SETTINGS = {
    "model.layers": 2,
    "model.width": 64,
    "model.heads": 4,
    "model.feed_forward": 128,
    "model.max_positions": 64,
    "model.dropout": 0,
    "data.max_seqlen": 64,
    "data.batch_size": 16,
    "optim.lr": 4e-3,
    "run.precision": "fp32",
    "run.device": "cpu",
    "run.threads": 1,
    "run.max_eval_sequences": 256,
    "run.eval_every": 200,
    "checkpoint.steps": 400,
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the standard library's docstrings, with a vocabulary of 800 tokens."""
    folder = tmp_path_factory.mktemp("context")
    texts: list[str] = []
    num_characters = 0
    for module in read_documentation([Path(sysconfig.get_paths()["stdlib"])]):
        text = "\n".join(" ".join(sentences) for sentences in module.paragraphs)
        texts.append(text)
        num_characters += len(text)
        if num_characters > NUM_CHARACTERS:
            break
    corpus = folder / "docstrings.jsonl"
    corpus.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer = train_wordpiece(iter(texts), 800)
    prepare(find_sources([str(corpus)]), tokenizer, folder / "store", workers=1)
    return folder / "store"


@pytest.mark.slow
def test_loss_falls_below_the_unigram_entropy(store: Path, tmp_path: Path) -> None:
    """The masked LM loss on held-out text falls 0.7 nats below the unigram entropy of the text.

    The unigram entropy is the lowest loss of a model that knows only the token frequencies.
    """
    options = [f"{key}={value}" for key, value in SETTINGS.items()]
    result = pretrain(store, tmp_path / "run", steps=400, assignments=options)
    assert result.outcome.signal is None
    heldout = [line for line in read_metrics(tmp_path / "run") if line["kind"] == "heldout"]
    assert heldout[-1]["mlm_loss"] < heldout[-1]["unigram_entropy"] - 0.7
    assert heldout[-1]["mlm_loss"] < heldout[0]["mlm_loss"]
