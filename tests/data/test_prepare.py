"""Preparing a store: its content, its summary, and invalid input."""

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.plan import PrepareOptions
from bertsmith.data.prepare import prepare, summarize_store
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.worker import hash_document
from bertsmith.errors import CorpusError, SettingsError, StoreError
from bertsmith.text.corpus import CorpusOptions, find_sources, read_documents
from bertsmith.text.sentences import split_sentences
from tests.data.synthetic_corpus import (
    LETTERS,
    NUM_DOCUMENTS,
    TOKENIZER,
    VOCAB,
    prepare_store,
    read_files,
    write_corpus,
)


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


def test_paths_are_accepted_as_sources(corpus: Path, tmp_path: Path) -> None:
    """A path, a string, and a list of them are text sources, and the store can be a string."""
    expected = prepare(find_sources([str(corpus)]), TOKENIZER, tmp_path / "expected")
    arguments: list[Path | str | list[Path | str]] = [corpus, str(corpus), [corpus]]
    for number, sources in enumerate(arguments):
        manifest = prepare(sources, TOKENIZER, str(tmp_path / f"store-{number}"))
        assert manifest == expected
    # A finished store is recognized.
    assert prepare([str(corpus)], TOKENIZER, str(tmp_path / "expected")) == expected


def test_store_does_not_depend_on_the_number_of_workers(
    corpus: Path, expected_store: Path, tmp_path: Path
) -> None:
    """Three workers write the same bytes as one."""
    prepare_store(corpus, tmp_path / "store", workers=3)
    assert read_files(tmp_path / "store") == read_files(expected_store)


def test_invalid_language_is_rejected(corpus: Path, tmp_path: Path) -> None:
    """The name of a language and codes that are not in ISO 639-1 are errors; nothing is written."""
    for language in ("Korean", "xx", "xx-hans"):
        with pytest.raises(SettingsError, match=f"{language!r}: not a language code.*en or ko"):
            prepare_store(corpus, tmp_path / "store", language=language)
    assert not (tmp_path / "store").exists()


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
    """A text without sentence ends is cut into pieces, can be held out, and causes a warning."""
    (tmp_path / "plain.txt").write_text("the end " * 2000)
    manifest = prepare_store(tmp_path / "plain.txt", tmp_path / "store")
    # the e ##n ##d, 2,000 times: a piece has 8 times 4 tokens.
    assert sum(counts.sentences for counts in manifest.splits.values()) == 250
    assert manifest.splits["heldout"].documents
    lines = summarize_store(manifest)
    assert lines[-1] == (
        "warning: 100% of the tokens are in sentences of more than 128 tokens, which were cut into "
        "pieces of up to 32; end sentences with punctuation or a line break, or check --language"
    )
    # A single long sentence is no reason for a warning.
    (tmp_path / "mixed.txt").write_text(("the end " * 10 + ".\n\n") * 90 + "the end " * 40)
    manifest = prepare_store(tmp_path / "mixed.txt", tmp_path / "mixed", held_out=0.1)
    assert manifest.report["long_sentence_tokens"] == 160
    assert not any("warning" in line for line in summarize_store(manifest))


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
