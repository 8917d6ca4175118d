"""Stores written by earlier versions can be read; fixtures/v0.1 was written by commit 6675940."""

import json
import shutil
from pathlib import Path

import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.prepare import prepare
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.worker import ShardTask
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.text.corpus import find_sources
from bertsmith.text.wordpiece import Tokenizer

V01 = Path(__file__).parent / "fixtures" / "v0.1"
#: Numbers of tokens in the splits of the store in V01.
NUM_TRAIN_TOKENS, NUM_HELD_OUT_TOKENS = 3185, 379


def test_store_v01_opens() -> None:
    """A store of version 0.1, which has no checksums, opens and yields examples."""
    store = Store.open(V01 / "store")
    assert not store.verify()
    counts = {name: store.load_split(name).counts for name in SPLITS}
    assert (counts["train"].documents, counts["train"].tokens) == (52, NUM_TRAIN_TOKENS)
    assert (counts["heldout"].documents, counts["heldout"].tokens) == (8, NUM_HELD_OUT_TOKENS)
    tokenizer = store.load_tokenizer()
    train = store.load_split("train")
    first_sentence = train.ids[: train.sentence_offsets[1]].tolist()
    assert tokenizer.decode(first_sentence) == "stone river evening water evening."
    settings = DataSettings(max_seqlen=32)
    vocabulary = VocabularyInfo.from_tokenizer(tokenizer)
    stream = ExampleStream(train, vocabulary, settings, settings.max_seqlen, seed=0, epoch=0)
    assert len(stream.batch(0, 8)) == 8


def test_unfinished_store_v01_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unfinished store of version 0.1 is finished without rebuilding its shards."""
    shutil.copytree(V01 / "unfinished", tmp_path / "store")
    shards = {path.name for path in (tmp_path / "store" / "parts").glob("*.npz")}
    assert len(shards) == 6
    submitted: list[str] = []
    submit = WorkerPool.submit

    def record_and_submit(self: WorkerPool, task: ShardTask) -> None:
        submitted.append(task.path.name)
        submit(self, task)

    monkeypatch.setattr(WorkerPool, "submit", record_and_submit)
    tokenizer = Tokenizer.load(V01 / "unfinished" / "tokenizer")
    sources = find_sources([str(V01 / "sources")])
    manifest = prepare(sources, tokenizer, tmp_path / "store", workers=1, shard_characters=2000)
    assert submitted
    assert not shards & set(submitted)
    num_tokens = sum(counts.tokens for counts in manifest.splits.values())
    assert num_tokens == NUM_TRAIN_TOKENS + NUM_HELD_OUT_TOKENS
    assert json.loads((tmp_path / "store" / "manifest.json").read_text())["format"] == 1
