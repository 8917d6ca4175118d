"""From text to a store: the same bytes however it is made, stopped or gone on with."""

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

from bertsmith.data import prepare as module
from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.plan import PrepareOptions, StorePlan
from bertsmith.data.prepare import prepare, summarize_store
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Manifest, Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.word_cache import CachedTokenizer
from bertsmith.data.worker import DamagedShardError, Shard, ShardTask, build_shard, hash_document
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.errors import CorpusError, SettingsError, StoreError, TokenizerError
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import CorpusOptions, find_sources, read_documents
from bertsmith.text.sentences import split_sentences
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = (*SPECIAL_TOKENS, ".", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing")
TOKENIZER = Tokenizer(TokenizerSpec(vocab=VOCAB))
#: Small shards, so that a small corpus has many.
SHARD = 3000


def write_corpus(path: Path, documents: int, seed: int = 0) -> list[str]:
    """Write JSON lines of random sentences; return the texts."""
    chance = np.random.default_rng(seed)
    texts = []
    for _ in range(documents):
        sentences = []
        for _ in range(chance.integers(1, 12)):
            words = ["".join(chance.choice([*LETTERS], chance.integers(1, 9))) for _ in range(6)]
            sentences.append(" ".join(words).capitalize() + ".")
        texts.append(" ".join(sentences))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return texts


def content(store: Path) -> dict[str, bytes]:
    """Return all that a store holds, by name."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus of 200 short documents."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    write_corpus(path, 200)
    return path


def make(source: Path, out: Path, workers: int = 2, **options: object) -> Manifest:
    """Prepare a store with small shards."""
    parsed = PrepareOptions.model_validate(options)
    found = find_sources([str(source)])
    return prepare(found, TOKENIZER, out, parsed, workers=workers, shard_characters=SHARD)


@pytest.fixture(scope="session")
def undisturbed(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The store of the corpus, made in one go by one worker."""
    path = tmp_path_factory.mktemp("stores") / "undisturbed"
    make(corpus, path, workers=1)
    return path


def test_holds_the_corpus(corpus: Path, undisturbed: Path) -> None:
    """Every document stands in one split, by its hash, in order, sentence by sentence."""
    store = Store.open(undisturbed)
    limit = store.manifest.held_out_below * 2.0**64
    expected: dict[str, list[list[list[int]]]] = {"train": [], "heldout": []}
    for document in read_documents(find_sources([str(corpus)])):
        held_out = hash_document(document.text) < limit
        ids = [TOKENIZER.encode(sentence) for sentence in split_sentences(document.text)]
        expected["heldout" if held_out else "train"].append(ids)
    assert len(expected["heldout"]) >= 2
    for name, documents in expected.items():
        found = store.load_split("train" if name == "train" else "heldout")
        for number, sentences in enumerate(documents):
            first, last = found.document_offsets[number], found.document_offsets[number + 1]
            bounds = found.sentence_offsets[first : last + 1]
            ids = [found.ids[low:high].tolist() for low, high in pairwise(bounds)]
            assert ids == sentences
        assert found.counts.documents == len(documents)
    assert not (undisturbed / "parts").exists()


def test_the_manifest_tells_the_facts(corpus: Path, undisturbed: Path) -> None:
    """Sources with size and SHA-256, vocabulary, case, language and counts stand there."""
    manifest = Store.open(undisturbed).manifest
    (source,) = manifest.plan.sources
    assert source.size == corpus.stat().st_size
    assert len(source.fingerprint) == 64
    assert manifest.vocabulary_hash == TOKENIZER.hash
    assert (manifest.vocab_size, manifest.lowercase, manifest.bits) == (len(VOCAB), True, 16)
    assert manifest.plan.options.language == "en"
    assert sum(counts.documents for counts in manifest.splits.values()) == 200
    assert any("held out" in line for line in summarize_store(manifest))


def test_any_number_of_workers(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """One worker and three make the same bytes."""
    make(corpus, tmp_path / "store", workers=3)
    assert content(tmp_path / "store") == content(undisturbed)


KILLED = """
import os, signal, sys
from pathlib import Path
from tests_prepare import TOKENIZER, SHARD
from bertsmith.data.prepare import prepare
from bertsmith.progress import NullProgress
from bertsmith.text.corpus import find_sources

class Killer(NullProgress):
    left = int(sys.argv[4])
    def start(self, description, total, unit):
        self.stage = description
    def advance(self, amount, **fields):
        if self.stage == sys.argv[5]:
            self.left -= 1
            if self.left == 0:
                os.kill(os.getpid(), int(sys.argv[3]))

prepare(find_sources([sys.argv[1]]), TOKENIZER, Path(sys.argv[2]), progress=Killer(), workers=2,
        shard_characters=SHARD)
"""


def killed(corpus: Path, out: Path, stop: signal.Signals, after: int, stage: str) -> None:
    """Run ``prepare`` in a process that sends itself a signal after some shards of a stage."""
    code = KILLED.replace(
        "from tests_prepare import TOKENIZER, SHARD",
        "from bertsmith.text.tokenizer_spec import TokenizerSpec\n"
        "from bertsmith.text.wordpiece import Tokenizer\n"
        f"TOKENIZER, SHARD = Tokenizer(TokenizerSpec(vocab={VOCAB!r})), {SHARD}",
    )
    arguments = [str(corpus), str(out), str(int(stop)), str(after), stage]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, check=False, timeout=60
    )
    assert done.returncode in {-int(stop), 1}, done.stderr.decode()
    assert not (out / "manifest.json").exists()


@pytest.mark.parametrize(
    ("stop", "after", "stage"),
    [
        (signal.SIGKILL, 2, "Tokenizing"),
        (signal.SIGKILL, 6, "Tokenizing"),
        (signal.SIGKILL, 3, "Joining the shards"),
        (signal.SIGTERM, 5, "Tokenizing"),
        (signal.SIGINT, 5, "Tokenizing"),
    ],
)
def test_stopped_and_started_again(
    corpus: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    stop: signal.Signals,
    after: int,
    stage: str,
) -> None:
    """A run that was stopped goes on from its finished shards to the undisturbed bytes."""
    out = tmp_path / "store"
    killed(corpus, out, stop, after, stage)
    standing = {path.name for path in (out / "parts").glob("*.npz")}
    assert len(standing) >= after - 2
    made: list[str] = []
    submit = WorkerPool.submit

    def watched(self: WorkerPool, task: ShardTask) -> object:
        made.append(task.path.name)
        return submit(self, task)

    monkeypatch.setattr(WorkerPool, "submit", watched)
    make(corpus, out)
    # A worker may still have finished a shard after its parent died and we looked.
    assert not standing & set(made)
    assert content(out) == content(undisturbed)


def test_a_source_that_changed_is_refused(corpus: Path, tmp_path: Path) -> None:
    """Going on from a changed source, other options or another tokenizer is refused by name."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_bytes(corpus.read_bytes())
    killed(source, out, signal.SIGKILL, 4, "Tokenizing")
    before = content(out)
    source.write_bytes(corpus.read_bytes().replace(b"a", b"b", 1))
    with pytest.raises(StoreError, match=r"the source .*corpus.jsonl changed .*start again"):
        make(source, out)
    source.rename(tmp_path / "other.jsonl")
    with pytest.raises(StoreError, match=r"the source was .*corpus.jsonl, now .*other.jsonl"):
        make(tmp_path / "other.jsonl", out)
    source.write_bytes(corpus.read_bytes())
    with pytest.raises(StoreError, match=r"language was 'en', now 'ko'"):
        make(source, out, language="ko")
    with pytest.raises(StoreError, match=r"deduplicate was 'none', now 'documents'"):
        make(source, out, corpus=CorpusOptions(deduplicate="documents"))
    other = Tokenizer(TokenizerSpec(vocab=VOCAB, lowercase=False))
    with pytest.raises(StoreError, match="the tokenizer changed"):
        prepare(find_sources([str(source)]), other, out, shard_characters=SHARD)
    assert content(out) == before


def test_a_source_that_failed_may_be_mended(corpus: Path, tmp_path: Path) -> None:
    """As long as no shard stands, nothing would be lost by other sources in the same place."""
    source, out = tmp_path / "corpus.jsonl", tmp_path / "store"
    source.write_text('{"text": "The first."}\n{"txet": "The second."}\n')
    with pytest.raises(CorpusError, match="line 2"):
        make(source, out)
    source.write_bytes(corpus.read_bytes())
    assert content(out) != {}
    assert make(source, out).report["documents"] == 200


def test_a_language_has_a_code(corpus: Path, tmp_path: Path) -> None:
    """A name in words is refused before anything is written."""
    with pytest.raises(SettingsError, match=r"language 'Korean': expected .*such as en or ko"):
        make(corpus, tmp_path / "store", language="Korean")
    assert not (tmp_path / "store").exists()


def test_a_finished_store_is_left_alone(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The same command again changes nothing; another is refused; so is a foreign folder."""
    times = {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")}
    manifest = make(corpus, undisturbed)
    assert manifest == Store.open(undisturbed).manifest
    assert {path: path.stat().st_mtime_ns for path in undisturbed.rglob("*")} == times
    with pytest.raises(StoreError, match=r"made from other inputs: held-out was None, now 0\.5"):
        make(corpus, undisturbed, held_out=0.5)
    (tmp_path / "letter.txt").write_text("mine")
    with pytest.raises(StoreError, match="holds something else"):
        make(corpus, tmp_path)
    with pytest.raises(StoreError, match="this is a file"):
        make(corpus, tmp_path / "letter.txt")


def test_finished_store_that_is_damaged(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The same command again verifies the store, and says how to replace a damaged one."""
    shutil.copytree(undisturbed, tmp_path / "store")
    file = tmp_path / "store" / "train.ids"
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)
    with pytest.raises(StoreError, match=r"train.ids: .*damaged.*; remove the folder"):
        make(corpus, tmp_path / "store")


def test_standard_input_that_changed_is_refused(tmp_path: Path) -> None:
    """Text from a pipe has no fingerprint: its documents are compared as they come."""
    out = tmp_path / "store"
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    write_corpus(tmp_path / "one.jsonl", 60)
    write_corpus(tmp_path / "two.jsonl", 60, seed=1)

    def fed(name: str) -> "subprocess.Popen[bytes]":
        return subprocess.Popen(["sh", "-c", f"cat {tmp_path / name} > {pipe}"])

    with fed("one.jsonl"):
        killed(pipe, out, signal.SIGKILL, 4, "Tokenizing")
    with fed("two.jsonl"), pytest.raises(StoreError, match="shard 1 was made from other documents"):
        make(pipe, out)
    with fed("one.jsonl"):
        make(pipe, out)
    assert Store.open(out).load_split("train").counts.documents > 30


def test_two_at_once_are_refused(corpus: Path, tmp_path: Path) -> None:
    """A second process that would make the same store is told so."""
    out = tmp_path / "store"
    plan = StorePlan(vocabulary_hash="")
    with (
        module._lock_parts(out, plan, NullProgress()),
        pytest.raises(StoreError, match="another process"),
    ):
        make(corpus, out)


def test_faults_are_told_or_counted(corpus: Path, tmp_path: Path) -> None:
    """A broken line stops with its place, or is skipped and counted in the manifest."""
    source = tmp_path / "corpus.jsonl"
    source.write_bytes(corpus.read_bytes() + b'{"text": "\xff"}\n')
    with pytest.raises(CorpusError, match="line 201"):
        make(source, tmp_path / "one")
    manifest = make(source, tmp_path / "two", corpus=CorpusOptions(on_error="skip"))
    assert list(manifest.report["skipped"].values()) == [1]


def test_repeated_documents_are_left_out(corpus: Path, tmp_path: Path) -> None:
    """With deduplication a corpus given twice holds each document once, and says so."""
    found = find_sources([str(corpus), str(corpus)])
    options = PrepareOptions(corpus=CorpusOptions(deduplicate="documents"))
    manifest = prepare(found, TOKENIZER, tmp_path / "store", options, workers=1)
    assert manifest.report["repeated_documents"] == 200
    assert sum(counts.documents for counts in manifest.splits.values()) == 200


def test_a_corpus_without_words(tmp_path: Path) -> None:
    """An empty corpus, and one of which no word is left, are errors that say so."""
    (tmp_path / "empty.txt").write_text("\n\n")
    with pytest.raises(CorpusError, match="empty"):
        make(tmp_path / "empty.txt", tmp_path / "one")
    (tmp_path / "silent.txt").write_text("\u200b\u200b\n")
    with pytest.raises(StoreError, match="holds no word"):
        make(tmp_path / "silent.txt", tmp_path / "two")
    (tmp_path / "silent.txt").write_text("The end\n")
    assert make(tmp_path / "silent.txt", tmp_path / "two").splits["train"].documents == 1


def test_plain_file_is_cut_for_the_held_out_part(tmp_path: Path) -> None:
    """A single document is cut at sentence boundaries; both sides have documents for pairs."""
    file, sentences = tmp_path / "plain.txt", [f"{a}{b} the" for a in LETTERS for b in LETTERS]
    file.write_text("\n\n".join(sentences))
    manifest = make(file, tmp_path / "store")
    assert manifest.report["documents_cut"] == 1
    assert "1 documents cut into parts to meet the held-out share" in summarize_store(manifest)
    store = Store.open(tmp_path / "store")
    texts: list[str] = []
    for name in SPLITS:
        split_ = store.load_split(name)
        texts += [
            TOKENIZER.decode(split_.ids[a:b].tolist()) for a, b in pairwise(split_.sentence_offsets)
        ]
        assert split_.counts.documents >= 2
        ExampleStream(split_, VocabularyInfo.from_tokenizer(TOKENIZER), DataSettings(), 32, 0, 0)
    assert sorted(texts) == sorted(sentences)
    share = manifest.splits["heldout"].tokens / (3 * 26**2)
    assert share == pytest.approx(0.05, rel=0.35)


def test_why_nothing_is_held_out(tmp_path: Path) -> None:
    """Of a corpus that is too small nothing is held out, and the summary says why."""
    (tmp_path / "plain.txt").write_text("The end.\nThe beginning.\n")
    lines = summarize_store(make(tmp_path / "plain.txt", tmp_path / "store"))
    assert lines[-1].startswith("nothing is held out: the corpus is too small")
    none = make(tmp_path / "plain.txt", tmp_path / "other", held_out=0.0)
    assert not any("nothing is held out" in line for line in summarize_store(none))


def test_unknown_tokens_are_counted(tmp_path: Path) -> None:
    """The manifest has the number of [UNK] by split, and the summary warns above 2 %."""
    write_corpus(tmp_path / "known.jsonl", 60)
    assert make(tmp_path / "known.jsonl", tmp_path / "known").report["unknown_tokens"] == {
        "train": 0,
        "heldout": 0,
    }
    korean = "나룻배는 아침에 강을 건넜다. 겨울에는 날씨가 춥습니다."
    lines = [json.dumps({"text": f"{korean} the {'a' * n}."}) + "\n" for n in range(1, 61)]
    (tmp_path / "korean.jsonl").write_text("".join(lines))
    manifest = make(tmp_path / "korean.jsonl", tmp_path / "korean")
    store = Store.open(tmp_path / "korean")
    for name in ("train", "heldout"):
        unknown = int((store.load_split(name).ids == TOKENIZER.unk_id).sum())
        assert manifest.report["unknown_tokens"][name] == unknown
        assert unknown > 0
        counts = store.token_counts(name, TOKENIZER.unk_id)
        assert (counts.num_tokens, counts.num_unknown) == (manifest.splits[name].tokens, unknown)
    assert sum(manifest.report["unknown_tokens"].values()) == 7 * 60
    told = "\n".join(summarize_store(manifest))
    assert "% of the training tokens, " in told
    assert told.count("warning: ") == 1
    assert "are [UNK]: the vocabulary does not cover this text" in told
    assert "warning" not in "\n".join(summarize_store(Store.open(tmp_path / "known").manifest))


def test_a_store_without_the_count_is_counted_from_its_ids(tmp_path: Path) -> None:
    """A store of version 0.1 opens, has a summary, and its [UNK] are counted when asked for."""
    (tmp_path / "a.jsonl").write_text('{"text": "the 강. 강을"}\n' * 9 + '{"text": "the a. b"}\n')
    make(tmp_path / "a.jsonl", tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    del manifest["report"]["unknown_tokens"]
    (tmp_path / "store" / "manifest.json").write_text(json.dumps(manifest))
    store = Store.open(tmp_path / "store")
    assert "[UNK]" not in "\n".join(summarize_store(store.manifest))
    counts = [store.token_counts(name, TOKENIZER.unk_id) for name in ("train", "heldout")]
    assert sum(one.num_unknown for one in counts) == 9 * 2
    assert sum(one.num_tokens for one in counts) == 10 * 4


def test_a_worker_that_dies_is_told(tmp_path: Path) -> None:
    """A worker that ends without an answer is an error that names how, and what to do."""
    TOKENIZER.save(tmp_path)
    with WorkerPool(1, "bertsmith.data.worker", [str(tmp_path), "en", "16"]) as pool:
        pool.submit(ShardTask(tmp_path / "shard.npz", ["the end"] * 100_000, [False] * 100_000))
        (process,) = pool._workers.values()
        process.kill()
        with pytest.raises(StoreError, match=r"SIGKILL.*fewer --workers.*same command again"):
            pool.drain()


def test_no_more_workers_than_tasks(tmp_path: Path) -> None:
    """However many workers are allowed, one is started only for a task that finds none idle."""
    TOKENIZER.save(tmp_path)
    with WorkerPool(1000, "bertsmith.data.worker", [str(tmp_path), "en", "16"]) as pool:
        assert not pool._workers
        for number in range(3):
            pool.submit(ShardTask(tmp_path / f"{number}.npz", ["the end"], [False]))
            assert len(pool._workers) <= number + 1
        pool.drain()
        started = len(pool._workers)
        pool.submit(ShardTask(tmp_path / "more.npz", ["the end"], [False]))
        assert len(pool._workers) == started
        pool.drain()
    assert len(list(tmp_path.glob("*.npz"))) == 4


def test_workers_are_limited(tmp_path: Path) -> None:
    """Two workers make any number of shards."""
    TOKENIZER.save(tmp_path)
    with WorkerPool(2, "bertsmith.data.worker", [str(tmp_path), "en", "16"]) as pool:
        for number in range(6):
            pool.submit(ShardTask(tmp_path / f"{number}.npz", ["the end"], [False]))
        pool.drain()
        assert len(pool._workers) <= 2
    assert len(list(tmp_path.glob("*.npz"))) == 6


def test_any_damage_of_a_shard_is_found(tmp_path: Path) -> None:
    """A shard with a changed byte or a missing end is found damaged, or holds the same arrays."""
    shard = build_shard(
        ShardTask(tmp_path, ["the end. an end."] * 3, [False] * 3),
        CachedTokenizer(TOKENIZER),
        "en",
        16,
    )
    file = tmp_path / "shard.npz"
    shard.save(file)
    content = file.read_bytes()
    messages = []
    for position in range(0, len(content), 11):
        for damaged in (content[:position], _flipped(content, position)):
            file.write_bytes(damaged)
            try:
                loaded = Shard.load(file)
            except DamagedShardError as error:
                messages.append(str(error))
                continue
            for name, values in vars(shard).items():
                assert np.array_equal(getattr(loaded, name), values), position
    assert len(messages) > len(content) / 11
    start = f"{file}: this part of an unfinished store is damaged: "
    assert all(message.startswith(start) for message in messages)


def _flipped(content: bytes, position: int) -> bytes:
    return content[:position] + bytes([content[position] ^ 0x11]) + content[position + 1 :]


@pytest.mark.parametrize("damage", ["empty", "cut off", "changed"])
def test_damaged_part_is_made_again(tmp_path: Path, damage: str) -> None:
    """A damaged part of an unfinished store is made again, and the others are not."""
    fixture = Path(__file__).parent / "fixtures" / "v0.1"
    out = tmp_path / "store"
    shutil.copytree(fixture / "unfinished", out)
    part = sorted((out / "parts").glob("*.npz"))[2]
    content = part.read_bytes()
    part.write_bytes(
        {"empty": b"", "cut off": content[:900], "changed": _flipped(content, 300)}[damage]
    )
    notes: list[str] = []

    class Notes(NullProgress):
        def log(self, text: str) -> None:
            notes.append(text)

    tokenizer = Tokenizer.load(out / "tokenizer")
    corpus = find_sources([str(fixture / "sources")])
    manifest = prepare(corpus, tokenizer, out, None, Notes(), workers=1, shard_characters=2000)
    assert sum(counts.tokens for counts in manifest.splits.values()) == 3564
    assert notes == [
        f"Resuming the unfinished store in {out}",
        f"{part}: this part of the unfinished store is damaged; making it again",
    ]


def test_an_error_of_a_worker_is_raised(tmp_path: Path) -> None:
    """What a worker cannot do is raised in the parent, as the error that it is."""
    with WorkerPool(1, "bertsmith.data.worker", [str(tmp_path / "none"), "en", "16"]) as pool:
        pool.submit(ShardTask(tmp_path / "shard.npz", ["the end"], [False]))
        (answer,) = pool.drain()
    with pytest.raises(TokenizerError, match="no such tokenizer"):
        module._raise_failure(answer)


def test_torch_is_never_loaded(corpus: Path, tmp_path: Path) -> None:
    """Neither the parent nor a worker imports torch: one that tells of it stands in its place."""
    (tmp_path / "torch").mkdir()
    told = tmp_path / "told"
    (tmp_path / "torch" / "__init__.py").write_text(f"open({str(told)!r}, 'w')")
    TOKENIZER.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "bertsmith", "prepare", str(corpus)]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "store")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    subprocess.run(command, check=True, env=environment, capture_output=True, timeout=60)
    assert not told.exists()
    Store.open(tmp_path / "store")
    subprocess.run([sys.executable, "-c", "import torch"], check=True, env=environment, timeout=60)
    assert told.exists()


def test_the_verb(corpus: Path, undisturbed: Path, tmp_path: Path) -> None:
    """The verb ends with the manifest on stdout, and what it wrote and what is next on stderr."""
    TOKENIZER.save(tmp_path / "tokenizer")
    command = [sys.executable, "-m", "bertsmith", "prepare", str(corpus), "--json"]
    command += ["--tokenizer", str(tmp_path / "tokenizer"), "--out", str(tmp_path / "store")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout)["splits"]["train"]["documents"] > 100
    assert "next: bertsmith pretrain --data" in done.stderr
    made, expected = content(tmp_path / "store"), content(undisturbed)
    for name in expected.keys() - {"manifest.json"}:
        # The manifest differs in the size of shards; the tokens do not depend on it.
        assert made[name] == expected[name]
    again = [*command, "--held-out", "0.5"]
    refused = subprocess.run(again, check=False, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
