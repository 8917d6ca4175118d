"""Preparing a store again: after an interruption, and into a folder that exists."""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Self

import numpy as np
import pytest

from bertsmith.data import prepare as prepare_module
from bertsmith.data.plan import StorePlan
from bertsmith.data.prepare import prepare
from bertsmith.data.store import Store
from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.data.worker import ShardTask, build_shard
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.errors import CorpusError, StoreError
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import CorpusOptions, find_sources
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer
from tests.data.synthetic_corpus import (
    NUM_DOCUMENTS,
    SHARD_CHARACTERS,
    TOKENIZER,
    VOCAB,
    prepare_store,
    read_files,
    write_corpus,
)

FIXTURE = Path(__file__).parent / "fixtures" / "v0.1"

#: Script that prepares a store and sends a signal to its own process after some shards. Arguments:
#: source, store, signal, number of shards, stage.
INTERRUPTED_PREPARE = f"""
import os, sys
from pathlib import Path
from bertsmith.data.prepare import prepare
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import find_sources
from bertsmith.text.tokenizer_spec import TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

class SignalingProgress(NullProgress):
    remaining = int(sys.argv[4])
    def start(self, description, total, unit, initial=0):
        self.stage = description
    def advance(self, amount, **fields):
        if self.stage == sys.argv[5]:
            self.remaining -= 1
            if self.remaining == 0:
                os.kill(os.getpid(), int(sys.argv[3]))

tokenizer = Tokenizer(TokenizerSpec(vocab={VOCAB!r}))
prepare(find_sources([sys.argv[1]]), tokenizer, Path(sys.argv[2]), progress=SignalingProgress(),
        workers=2, shard_characters={SHARD_CHARACTERS})
"""


class _LocalPool:
    """Builds shards in this process instead of in workers."""

    def __init__(self, *_: object) -> None:
        self._tokenizer = CachedTokenizer(TOKENIZER)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def submit(self, task: ShardTask) -> None:
        build_shard(task, self._tokenizer, "en", 16).save(task.path)

    def drain(self) -> None:
        pass


def run_interrupted_prepare(
    corpus: Path, out: Path, signal_number: signal.Signals, num_shards: int, stage: str
) -> None:
    """Run ``prepare`` in a process that sends itself a signal after some shards of a stage."""
    arguments = [str(corpus), str(out), str(int(signal_number)), str(num_shards), stage]
    process = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_PREPARE, *arguments],
        capture_output=True,
        check=False,
        timeout=60,
    )
    assert process.returncode in {-int(signal_number), 1}, process.stderr.decode()
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("signal_number", "num_shards", "stage"),
    [
        (signal.SIGKILL, 2, "Tokenizing"),
        (signal.SIGKILL, 6, "Tokenizing"),
        (signal.SIGKILL, 3, "Joining the shards"),
        (signal.SIGTERM, 5, "Tokenizing"),
        (signal.SIGINT, 5, "Tokenizing"),
    ],
)
def test_interrupted_run_resumes(
    corpus: Path,
    expected_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signal_number: signal.Signals,
    num_shards: int,
    stage: str,
) -> None:
    """A stopped run resumes from its finished shards, and the store has the expected bytes."""
    out = tmp_path / "store"
    run_interrupted_prepare(corpus, out, signal_number, num_shards, stage)
    finished = {path.name for path in (out / "parts").glob("*.npz")}
    # Both workers may have been building a shard.
    assert len(finished) >= num_shards - 2
    submitted: list[str] = []
    submit = WorkerPool.submit

    def record_and_submit(self: WorkerPool, task: ShardTask) -> None:
        submitted.append(task.path.name)
        submit(self, task)

    monkeypatch.setattr(WorkerPool, "submit", record_and_submit)
    prepare_store(corpus, out)
    assert not finished & set(submitted)
    assert read_files(out) == read_files(expected_store)


def test_resuming_with_other_inputs_is_rejected(corpus: Path, tmp_path: Path) -> None:
    """Resuming with a changed source, other options or another tokenizer is an error."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_bytes(corpus.read_bytes())
    run_interrupted_prepare(source, out, signal.SIGKILL, 4, "Tokenizing")
    before = read_files(out)
    source.write_bytes(corpus.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(StoreError, match=r"the source .*corpus.jsonl changed .*start again"):
        prepare_store(source, out)
    source.rename(tmp_path / "other.jsonl")
    with pytest.raises(StoreError, match=r"the source was .*corpus.jsonl, now .*other.jsonl"):
        prepare_store(tmp_path / "other.jsonl", out)
    source.write_bytes(corpus.read_bytes())
    # The same text with another suffix would be read in another format.
    shutil.copyfile(source, tmp_path / "corpus.md")
    with pytest.raises(StoreError, match=r"the source was .*corpus.jsonl, now .*corpus.md"):
        prepare_store(tmp_path / "corpus.md", out)
    with pytest.raises(StoreError, match=r"language was 'en', now 'ko'"):
        prepare_store(source, out, language="ko")
    with pytest.raises(StoreError, match=r"deduplicate was 'none', now 'documents'"):
        prepare_store(source, out, corpus=CorpusOptions(deduplicate="documents"))
    cased_tokenizer = Tokenizer(TokenizerSpec(vocab=VOCAB, lowercase=False))
    with pytest.raises(StoreError, match="the tokenizer changed"):
        prepare(
            find_sources([str(source)]), cased_tokenizer, out, shard_characters=SHARD_CHARACTERS
        )
    assert read_files(out) == before


def test_shards_of_another_version_of_the_sentence_splitter_are_rejected(
    corpus: Path, expected_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished store needs the same sentencex; a finished one and an old plan do not."""
    out = tmp_path / "store"
    run_interrupted_prepare(corpus, out, signal.SIGKILL, 4, "Tokenizing")
    version = metadata.version("sentencex")
    monkeypatch.setattr(prepare_module, "get_sentencex_version", lambda: "9.9")
    message = rf"sentencex, .*, was {version}, now 9\.9 \(.*pip install sentencex=={version}\)"
    with pytest.raises(StoreError, match=message):
        prepare_store(corpus, out)
    plan_file = out / "parts" / "plan.json"
    plan = json.loads(plan_file.read_text())
    # Plans of version 0.2 do not have this key.
    del plan["sentencex_version"]
    plan_file.write_text(json.dumps(plan))
    manifest = prepare_store(corpus, out)
    assert manifest.plan.sentencex_version == "9.9"
    monkeypatch.undo()
    assert prepare_store(corpus, out) == manifest
    assert manifest.checksums == Store.open(expected_store).manifest.checksums


def test_source_can_be_corrected_before_the_first_shard(corpus: Path, tmp_path: Path) -> None:
    """Without a finished shard, other sources are accepted for the same store."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_text('{"text": "The first."}\n{"txet": "The second."}\n')
    with pytest.raises(CorpusError, match="line 2"):
        prepare_store(source, out)
    source.write_bytes(corpus.read_bytes())
    assert read_files(out) != {}
    assert prepare_store(source, out).report["documents"] == NUM_DOCUMENTS


def test_existing_folders_are_not_changed(
    corpus: Path, expected_store: Path, tmp_path: Path
) -> None:
    """A finished store is not written again; other options, folders or files are errors."""
    times = {path: path.stat().st_mtime_ns for path in expected_store.rglob("*")}
    manifest = prepare_store(corpus, expected_store)
    assert manifest == Store.open(expected_store).manifest
    assert {path: path.stat().st_mtime_ns for path in expected_store.rglob("*")} == times
    with pytest.raises(StoreError, match=r"made from other inputs: held-out was None, now 0\.5"):
        prepare_store(corpus, expected_store, held_out=0.5)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds something else"):
        prepare_store(corpus, tmp_path)
    with pytest.raises(StoreError, match="this is a file"):
        prepare_store(corpus, tmp_path / "letter.txt")


def test_folder_named_parts_is_not_removed(corpus: Path, tmp_path: Path) -> None:
    """A folder whose subfolder "parts" has files of the user is no unfinished store."""
    file = tmp_path / "data" / "parts" / "text.jsonl"
    file.parent.mkdir(parents=True)
    file.write_bytes(corpus.read_bytes())
    for plan in (None, "plan.json"):
        if plan:
            (file.parent / plan).touch()
        with pytest.raises(StoreError, match="holds something else"):
            prepare_store(file.parent, tmp_path / "data")
        assert file.read_bytes() == corpus.read_bytes()


def test_errors_can_be_skipped_after_a_stop(corpus: Path, tmp_path: Path) -> None:
    """A run that an error has stopped continues with ``on_error`` "skip", as the message says."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_bytes(corpus.read_bytes() + b'{"txet": "The last."}\n')
    with pytest.raises(CorpusError, match="--on-error skip"):
        prepare_store(source, out)
    shards = {path: path.stat().st_mtime_ns for path in (out / "parts").glob("*.npz")}
    assert shards
    links = [tmp_path / path.name for path in shards]
    for path, link in zip(shards, links, strict=True):
        link.hardlink_to(path)
    manifest = prepare_store(source, out, corpus=CorpusOptions(on_error="skip"))
    assert manifest.report["documents"] == NUM_DOCUMENTS
    # The shards were not built again.
    assert [link.stat().st_mtime_ns for link in links] == list(shards.values())


def test_workers_do_not_import_from_the_current_directory(corpus: Path, tmp_path: Path) -> None:
    """A file named like a module of the standard library is not executed."""
    (tmp_path / "tokenize.py").write_text("raise SystemExit('imported')\n")
    TOKENIZER.save(tmp_path / "tokenizer")
    program = str(Path(sys.executable).with_name("bertsmith"))
    command = [program, "prepare", str(corpus), "--tokenizer", "tokenizer", "--out", "store"]
    completed = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert completed.returncode == 0, completed.stderr


def test_damaged_finished_store_is_rejected(
    corpus: Path, expected_store: Path, tmp_path: Path
) -> None:
    """Preparing an existing store verifies it; the error says how to replace a damaged one."""
    shutil.copytree(expected_store, tmp_path / "store")
    file = tmp_path / "store" / "train.ids"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"train.ids: .*damaged.*; remove the folder"):
        prepare_store(corpus, tmp_path / "store")


def test_changed_stream_is_rejected(tmp_path: Path) -> None:
    """A pipe has no fingerprint, so its documents are compared with the shards or the manifest."""
    out = tmp_path / "store"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write_corpus(tmp_path / "one.jsonl", 60)
    write_corpus(tmp_path / "two.jsonl", 60, seed=1)

    def write_to_pipe(name: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sh", "-c", f"cat {tmp_path / name} > {pipe}"])

    with write_to_pipe("one.jsonl"):
        run_interrupted_prepare(pipe, out, signal.SIGKILL, 4, "Tokenizing")
    message = "shard 1 was made from other documents"
    with write_to_pipe("two.jsonl"), pytest.raises(StoreError, match=message):
        prepare_store(pipe, out)
    with write_to_pipe("one.jsonl"):
        manifest = prepare_store(pipe, out)
    assert Store.open(out).load_split("train").counts.documents > 30
    before = read_files(out)
    message = rf"holds a store made from other inputs: .*{pipe.name} had other text than now"
    with write_to_pipe("two.jsonl"), pytest.raises(StoreError, match=message):
        prepare_store(pipe, out)
    with write_to_pipe("one.jsonl"):
        assert prepare_store(pipe, out) == manifest
    assert read_files(out) == before


def test_standard_input_is_compared_with_a_finished_store(tmp_path: Path) -> None:
    """``prepare -`` accepts the same text again; other text, or no hash of it, is an error."""
    out = tmp_path / "store"
    TOKENIZER.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "bertsmith", "prepare", "-", "--out", str(out)]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--workers", "1"]

    def run_prepare(text: bytes) -> "subprocess.CompletedProcess[bytes]":
        return subprocess.run(command, input=text, check=False, capture_output=True, timeout=60)

    lines = b'{"text": "The end."}\n'
    assert run_prepare(lines).returncode == 0
    assert run_prepare(lines).returncode == 0
    process = run_prepare(b'{"text": "The beginning."}\n')
    assert process.returncode == 2
    assert b"standard input had other text than now" in process.stderr
    manifest = json.loads((out / "manifest.json").read_text())
    del manifest["text_hash"]
    (out / "manifest.json").write_text(json.dumps(manifest))
    process = run_prepare(lines)
    assert process.returncode == 2
    assert b"its text cannot be compared with standard input" in process.stderr
    assert b"name another folder with --out" in process.stderr


def test_concurrent_runs_are_rejected(corpus: Path, tmp_path: Path) -> None:
    """A second process cannot prepare the same store at the same time."""
    out = tmp_path / "store"
    plan = StorePlan(vocabulary_hash="")
    with (
        prepare_module._lock_parts(out, plan, NullProgress()),
        pytest.raises(StoreError, match="another process"),
    ):
        prepare_store(corpus, out)


def test_long_sentences_of_shards_of_version_0_2_are_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An unfinished store of version 0.2 has uncut sentences; the result has the expected bytes."""
    corpus, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    write_corpus(corpus, 60)
    with corpus.open("a") as file:
        for letter in "abcdefgh":
            # The text of half a shard, so that a shard contains several long sentences.
            text = f"The end. {f'{letter} the ' * 250}. The end."
            file.write(json.dumps({"text": text}) + "\n")
    expected = prepare_store(corpus, tmp_path / "expected")
    assert expected.report["long_sentence_tokens"] == 8 * 501
    # A copy of the shards, without the field that version 0.2 did not have.
    with monkeypatch.context() as context:
        context.setattr("bertsmith.data.long_sentences.MAX_SENTENCE_TOKENS", 1 << 30)
        context.setattr(prepare_module, "_merge_shards", lambda *_: None)
        context.setattr(prepare_module, "WorkerPool", _LocalPool)
        prepare_store(corpus, out)
    shards = list((out / "parts").glob("*.npz"))
    for path in shards:
        values = dict(np.load(path))
        assert values.pop("long_sentence_tokens") == 0
        np.savez(path, **values)
    assert len(shards) > 4
    assert prepare_store(corpus, out).report == expected.report
    assert read_files(out) == read_files(tmp_path / "expected")


@pytest.mark.parametrize("damage", ["empty", "truncated", "changed"])
def test_damaged_shard_is_built_again(tmp_path: Path, damage: str) -> None:
    """A damaged shard of an unfinished store is built again, and the others are not."""
    out = tmp_path / "store"
    shutil.copytree(FIXTURE / "unfinished", out)
    shard = sorted((out / "parts").glob("*.npz"))[2]
    content = shard.read_bytes()
    changed = content[:300] + bytes([content[300] ^ 0x11]) + content[301:]
    shard.write_bytes({"empty": b"", "truncated": content[:900], "changed": changed}[damage])
    messages: list[str] = []

    class RecordingProgress(NullProgress):
        def log(self, text: str) -> None:
            messages.append(text)

    tokenizer = Tokenizer.load(out / "tokenizer")
    sources = find_sources([str(FIXTURE / "sources")])
    manifest = prepare(
        sources, tokenizer, out, None, RecordingProgress(), workers=1, shard_characters=2000
    )
    # The number of tokens in the finished store of the fixtures.
    assert sum(counts.tokens for counts in manifest.splits.values()) == 3564
    assert messages == [
        f"Resuming the unfinished store in {out}",
        f"{shard}: this shard of the unfinished store is damaged; building it again",
    ]
