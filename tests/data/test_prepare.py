"""Preparing a store: the result does not depend on workers, interruptions or resumption."""

import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from bertsmith.data import prepare as prepare_module
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.plan import PrepareOptions, StorePlan
from bertsmith.data.prepare import prepare, summarize_store
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Manifest, Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.worker import ShardTask, hash_document
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.errors import CorpusError, SettingsError, StoreError
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import CorpusOptions, find_sources, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = (*SPECIAL_TOKENS, ".", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing")
TOKENIZER = Tokenizer(TokenizerSpec(vocab=VOCAB))
#: Characters per shard, so few that a small corpus has many shards.
SHARD_CHARACTERS = 3000
#: Number of documents in the fixture ``corpus``.
NUM_DOCUMENTS = 200
FIXTURE = Path(__file__).parent / "fixtures" / "v0.1"


def write_corpus(path: Path, num_documents: int, seed: int = 0) -> None:
    """Write documents of random sentences as JSON Lines."""
    rng = np.random.default_rng(seed)
    texts = []
    for _ in range(num_documents):
        sentences = []
        for _ in range(rng.integers(1, 12)):
            words = ["".join(rng.choice([*LETTERS], rng.integers(1, 9))) for _ in range(6)]
            sentences.append(" ".join(words).capitalize() + ".")
        texts.append(" ".join(sentences))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder, by relative path."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of short documents."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, NUM_DOCUMENTS)
    return path


def prepare_store(source: Path, out: Path, workers: int = 2, **options: object) -> Manifest:
    """Prepare a store with small shards."""
    return prepare(
        find_sources([str(source)]),
        TOKENIZER,
        out,
        PrepareOptions.model_validate(options),
        workers=workers,
        shard_characters=SHARD_CHARACTERS,
    )


@pytest.fixture(scope="session")
def expected_store(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the corpus, prepared by one worker without interruption."""
    path = tmp_path_factory.mktemp("stores") / "expected"
    prepare_store(corpus, path, workers=1)
    return path


def test_store_contains_the_corpus(corpus: Path, expected_store: Path) -> None:
    """Each split has the documents whose hashes belong to it, in order, with all sentences."""
    store = Store.open(expected_store)
    hash_limit = store.manifest.held_out_below * 2.0**64
    expected: dict[str, list[list[list[int]]]] = {"train": [], "heldout": []}
    for document in read_documents(find_sources([str(corpus)])):
        is_held_out = hash_document(document.text) < hash_limit
        ids = [TOKENIZER.encode(sentence) for sentence in split_sentences(document.text)]
        expected["heldout" if is_held_out else "train"].append(ids)
    assert len(expected["heldout"]) >= 2
    for name, documents in expected.items():
        split = store.load_split("train" if name == "train" else "heldout")
        for number, sentences in enumerate(documents):
            first, last = split.document_offsets[number], split.document_offsets[number + 1]
            offsets = split.sentence_offsets[first : last + 1]
            ids = [split.ids[start:end].tolist() for start, end in pairwise(offsets)]
            assert ids == sentences
        assert split.counts.documents == len(documents)
    assert not (expected_store / "parts").exists()


def test_manifest_describes_sources_vocabulary_and_counts(
    corpus: Path, expected_store: Path
) -> None:
    """The manifest has the size and SHA-256 of sources, the vocabulary, language and counts."""
    manifest = Store.open(expected_store).manifest
    (source,) = manifest.plan.sources
    assert source.size == corpus.stat().st_size
    assert len(source.fingerprint) == 64
    assert manifest.vocabulary_hash == TOKENIZER.hash
    assert (manifest.vocab_size, manifest.lowercase, manifest.bits) == (len(VOCAB), True, 16)
    assert manifest.plan.options.language == "en"
    assert sum(counts.documents for counts in manifest.splits.values()) == NUM_DOCUMENTS
    assert any("held out" in line for line in summarize_store(manifest))


def test_store_does_not_depend_on_the_number_of_workers(
    corpus: Path, expected_store: Path, tmp_path: Path
) -> None:
    """Three workers write the same bytes as one."""
    prepare_store(corpus, tmp_path / "store", workers=3)
    assert read_files(tmp_path / "store") == read_files(expected_store)


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

    def record_and_submit(self: WorkerPool, task: ShardTask) -> object:
        submitted.append(task.path.name)
        return submit(self, task)

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


def test_source_can_be_corrected_before_the_first_shard(corpus: Path, tmp_path: Path) -> None:
    """Without a finished shard, other sources are accepted for the same store."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_text('{"text": "The first."}\n{"txet": "The second."}\n')
    with pytest.raises(CorpusError, match="line 2"):
        prepare_store(source, out)
    source.write_bytes(corpus.read_bytes())
    assert read_files(out) != {}
    assert prepare_store(source, out).report["documents"] == NUM_DOCUMENTS


def test_invalid_language_is_rejected(corpus: Path, tmp_path: Path) -> None:
    """The name of a language and codes that are not in ISO 639-1 are errors; nothing is written."""
    for language in ("Korean", "xx", "xx-hans"):
        with pytest.raises(SettingsError, match=f"{language!r}: not a language code.*en or ko"):
            prepare_store(corpus, tmp_path / "store", language=language)
    assert not (tmp_path / "store").exists()


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


def test_errors_in_the_corpus_stop_or_are_counted(corpus: Path, tmp_path: Path) -> None:
    """An invalid line is an error with its location; if skipped, the manifest counts the line."""
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(corpus.read_bytes() + b'{"text": "\xff"}\n')
    with pytest.raises(CorpusError, match=f"line {NUM_DOCUMENTS + 1}"):
        prepare_store(source, tmp_path / "one")
    manifest = prepare_store(source, tmp_path / "two", corpus=CorpusOptions(on_error="skip"))
    assert list(manifest.report["skipped"].values()) == [1]


def test_repeated_documents_are_left_out(corpus: Path, tmp_path: Path) -> None:
    """With deduplication, a corpus given twice holds each document once."""
    sources = find_sources([str(corpus), str(corpus)])
    options = PrepareOptions(corpus=CorpusOptions(deduplicate="documents"))
    manifest = prepare(sources, TOKENIZER, tmp_path / "store", options, workers=1)
    assert manifest.report["repeated_documents"] == NUM_DOCUMENTS
    assert sum(counts.documents for counts in manifest.splits.values()) == NUM_DOCUMENTS


def test_corpus_without_words_is_rejected(tmp_path: Path) -> None:
    """An empty corpus, and one without tokens after normalization, are errors."""
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(CorpusError, match="empty"):
        prepare_store(tmp_path / "empty.txt", tmp_path / "one")
    (tmp_path / "invisible.txt").write_text("\u200b\u200b\n")
    with pytest.raises(StoreError, match="holds no word"):
        prepare_store(tmp_path / "invisible.txt", tmp_path / "two")
    (tmp_path / "invisible.txt").write_text("The end\n")
    manifest = prepare_store(tmp_path / "invisible.txt", tmp_path / "two")
    assert manifest.splits["train"].documents == 1


def test_single_document_is_cut_for_the_held_out_split(tmp_path: Path) -> None:
    """A single document is cut between sentences; both splits have enough documents for pairs."""
    file = tmp_path / "plain.txt"
    sentences = [f"{first}{second} the" for first in LETTERS for second in LETTERS]
    file.write_text("\n\n".join(sentences))
    manifest = prepare_store(file, tmp_path / "store")
    assert manifest.report["documents_cut"] == 1
    lines = summarize_store(manifest)
    assert "split 1 long document so that enough tokens can be held out" in lines
    store = Store.open(tmp_path / "store")
    vocabulary = VocabularyInfo.from_tokenizer(TOKENIZER)
    texts: list[str] = []
    for name in SPLITS:
        split = store.load_split(name)
        for start, end in pairwise(split.sentence_offsets):
            texts.append(TOKENIZER.decode(split.ids[start:end].tolist()))
        assert split.counts.documents >= 2
        ExampleStream(split, vocabulary, DataSettings(), 32, seed=0, epoch=0)
    assert sorted(texts) == sorted(sentences)
    # Each sentence, such as "ab the", has 3 tokens.
    share = manifest.splits["heldout"].tokens / (3 * len(sentences))
    assert share == pytest.approx(0.05, rel=0.35)


def test_summary_explains_an_empty_held_out_split(tmp_path: Path) -> None:
    """If the corpus is too small to hold text out, the summary says so, unless 0 was requested."""
    (tmp_path / "plain.txt").write_text("The end.\nThe beginning.\n")
    lines = summarize_store(prepare_store(tmp_path / "plain.txt", tmp_path / "store"))
    assert lines[-1].startswith("nothing is held out: the corpus is too small")
    # the e ##n ##d . the b ##e ##g ##i ##n ##n ##ing .
    assert "(2 sentences, 14 tokens)" in lines[-1]
    manifest = prepare_store(tmp_path / "plain.txt", tmp_path / "other", held_out=0.0)
    assert not any("nothing is held out" in line for line in summarize_store(manifest))


def test_summary_explains_a_text_without_sentence_ends(tmp_path: Path) -> None:
    """A text without sentence ends is not called too small."""
    (tmp_path / "plain.txt").write_text("the end " * 2000)
    lines = summarize_store(prepare_store(tmp_path / "plain.txt", tmp_path / "store"))
    assert lines[-1].startswith("nothing is held out: the text has too few sentence ends (1 sent")
    assert "end sentences with punctuation or a line break" in lines[-1]
    assert any(line.startswith("training: 1 document, 1 sentence,") for line in lines)


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    """The manifest has the number of [UNK] tokens by split; the summary warns above 2 %."""
    write_corpus(tmp_path / "known.jsonl", 60)
    manifest = prepare_store(tmp_path / "known.jsonl", tmp_path / "known")
    assert manifest.report["unknown_tokens"] == {"train": 0, "heldout": 0}
    korean = "나룻배는 아침에 강을 건넜다. 겨울에는 날씨가 춥습니다."
    lines = [json.dumps({"text": f"{korean} the {'a' * n}."}) + "\n" for n in range(1, 61)]
    (tmp_path / "korean.jsonl").write_text("".join(lines))
    manifest = prepare_store(tmp_path / "korean.jsonl", tmp_path / "korean")
    store = Store.open(tmp_path / "korean")
    for name in SPLITS:
        num_unknown = int((store.load_split(name).ids == TOKENIZER.unk_id).sum())
        assert manifest.report["unknown_tokens"][name] == num_unknown
        assert num_unknown > 0
        counts = store.token_counts(name, TOKENIZER.unk_id)
        assert counts.num_tokens == manifest.splits[name].tokens
        assert counts.num_unknown == num_unknown
    # The two Korean sentences have 7 words.
    assert sum(manifest.report["unknown_tokens"].values()) == 7 * len(lines)
    summary = "\n".join(summarize_store(manifest))
    assert "% of the training tokens, " in summary
    assert summary.count("warning: ") == 1
    assert "are [UNK]: the vocabulary does not cover this text" in summary
    manifest_of_known_words = Store.open(tmp_path / "known").manifest
    assert "warning" not in "\n".join(summarize_store(manifest_of_known_words))


def test_unknown_tokens_of_an_old_store_are_counted_on_demand(tmp_path: Path) -> None:
    """A store of version 0.1 has no count of [UNK]; it is computed from the ids when needed."""
    (tmp_path / "a.jsonl").write_text('{"text": "the 강. 강을"}\n' * 9 + '{"text": "the a. b"}\n')
    prepare_store(tmp_path / "a.jsonl", tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    del manifest["report"]["unknown_tokens"]
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(manifest))
    store = Store.open(tmp_path / "store")
    assert "[UNK]" not in "\n".join(summarize_store(store.manifest))
    counts = [store.token_counts(name, TOKENIZER.unk_id) for name in SPLITS]
    # Nine documents have 2 unknown words, and all ten have 4 tokens.
    assert sum(split_counts.num_unknown for split_counts in counts) == 9 * 2
    assert sum(split_counts.num_tokens for split_counts in counts) == 10 * 4


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
        f"{shard}: this part of the unfinished store is damaged; building it again",
    ]


def test_torch_is_not_imported(corpus: Path, tmp_path: Path) -> None:
    """Neither the parent nor a worker imports torch; a fake torch would leave a file behind."""
    (tmp_path / "torch").mkdir()
    marker = tmp_path / "imported"
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(marker)!r}, 'w')")
    TOKENIZER.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "bertsmith", "prepare", str(corpus)]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=60)
    assert not marker.exists()
    Store.open(tmp_path / "store")
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment, timeout=60)
    assert marker.exists()


def test_command_line(corpus: Path, expected_store: Path, tmp_path: Path) -> None:
    """``prepare --json`` prints the manifest on stdout and the next command on stderr."""
    TOKENIZER.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "bertsmith", "prepare", str(corpus), "--json"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "store")]
    process = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(process.stdout)["splits"]["train"]["documents"] > 100
    assert "next: bertsmith pretrain --data" in process.stderr
    files, expected_files = read_files(tmp_path / "store"), read_files(expected_store)
    # The shard size differs, and only the manifest depends on it.
    for name in expected_files.keys() - {"manifest.json"}:
        assert files[name] == expected_files[name]
    changed_command = [*command, "--held-out", "0.5"]
    process = subprocess.run(
        changed_command, check=False, capture_output=True, text=True, timeout=60
    )
    assert process.returncode == 2
    assert process.stderr.startswith("error: ")
    assert "Traceback" not in process.stderr
