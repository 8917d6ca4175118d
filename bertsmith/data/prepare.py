"""Builds a token store from text: worker processes write shards, which are then merged.

The parent process only reads documents and sends them to the workers in groups. A worker turns a
group into a shard file, and the content of a shard depends only on its group. So a run that was
stopped resumes from the existing shards, and the store has the same bytes for any number of
workers.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bertsmith.data.held_out_split import DocumentSizes, HeldOutRule, choose_held_out
from bertsmith.data.long_sentences import MAX_PIECE_TOKENS, MAX_SENTENCE_TOKENS
from bertsmith.data.plan import (
    PARTS_DIR,
    PLAN_FILE,
    SHARD_CHARACTERS,
    PrepareOptions,
    StorePlan,
    fingerprint_sources,
    list_plan_changes,
    list_version_changes,
    read_plan,
    write_plan,
)
from bertsmith.data.store import (
    MANIFEST_FILE,
    SPLITS,
    TOKENIZER_DIR,
    UNKNOWN_TOKENS,
    Manifest,
    SplitName,
    SplitWriter,
    Store,
    choose_id_bits,
    write_manifest,
)
from bertsmith.data.unknown_shares import format_unknown_shares
from bertsmith.data.worker import DamagedShardError, Shard, ShardTask, hash_texts
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.errors import StoreError
from bertsmith.files import hold_lock
from bertsmith.plurals import count_noun
from bertsmith.progress import NullProgress, Progress
from bertsmith.text.archives import COMPRESSION_SUFFIXES
from bertsmith.text.corpus import CorpusReport, Document, Source, find_sources, read_documents
from bertsmith.text.sentences import check_language, get_sentencex_version
from bertsmith.text.sources import STDIN
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.version import __version__

#: Locked while a process builds the store, in PARTS_DIR.
LOCK_FILE = "lock"
#: Names of the files in PARTS_DIR: the lock, the plan, the shards, and files that are being
#: written.
_PART_NAME = re.compile(r"lock|plan\.json|\d{6}-\w+\.npz|\..+\.tmp")
#: Maximum share of the tokens in sentences that had to be cut. Wikipedia and books have 2 to 4 %;
#: a text with a larger share than this probably has no sentence ends.
_MAX_LONG_SENTENCES = 0.2


def prepare(
    sources: str | Path | Sequence[Source | str | Path],
    tokenizer: Tokenizer,
    out: Path | str,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    shard_characters: int = SHARD_CHARACTERS,
) -> Manifest:
    """Build the store ``out``. An unfinished store is resumed, and a finished one is verified.

    Args:
        sources: Text to tokenize: files, folders and globs, or the results of ``find_sources``.
        tokenizer: Tokenizer of the store.
        out: Directory of the store.
        options: Options; None for the defaults.
        progress: Receives the progress.
        workers: Maximum number of worker processes; None for one per core. The store does not
            depend on this number.
        shard_characters: Characters of text per shard, approximately. When a run is killed, each
            worker loses the work on at most one shard.

    Raises:
        StoreError: ``out`` holds other files, or a store of other sources or options.
        CorpusError: A source cannot be read.
    """
    options = PrepareOptions() if options is None else options
    check_language(options.language)
    progress = NullProgress() if progress is None else progress
    out = Path(out)
    sources = _resolve_sources(sources)
    plan = StorePlan(
        vocabulary_hash=tokenizer.hash,
        options=options,
        sources=fingerprint_sources(sources, progress),
        shard_characters=shard_characters,
        sentencex_version=get_sentencex_version(),
    )
    if (out / MANIFEST_FILE).exists():
        return _verify_existing(out, plan, sources, progress)
    with _lock_parts(out, plan, progress) as parts:
        tokenizer.save(out / TOKENIZER_DIR)
        bits = choose_id_bits(tokenizer.vocab_size)
        arguments = [str(out / TOKENIZER_DIR), options.language, str(bits)]
        report = CorpusReport()
        with WorkerPool(workers or _count_cores(), arguments) as pool:
            names = _build_shards(pool, parts, sources, plan, report, progress)
        report.require_documents()
        return _merge_shards(out, names, plan, tokenizer, report, progress)


def _resolve_sources(sources: str | Path | Sequence[Source | str | Path]) -> list[Source]:
    """Return the sources that files, folders and globs stand for."""
    items = [sources] if isinstance(sources, str | Path) else sources
    resolved: list[Source] = []
    for item in items:
        resolved += [item] if isinstance(item, Source) else find_sources([str(item)])
    return resolved


def _count_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def _verify_existing(
    out: Path, plan: StorePlan, sources: Sequence[Source], progress: Progress
) -> Manifest:
    """Return the manifest of a finished store; raise StoreError if it has another plan or text."""
    store = Store.open(out)
    manifest = store.manifest
    changes = list_plan_changes(manifest.plan, plan)
    if not changes:
        changes = _list_stream_changes(out, manifest, sources, progress)
    if changes:
        raise StoreError(_describe_mismatch(out, "holds a store made from other inputs", changes))
    store.verify(progress)
    # A run that was killed after it wrote the manifest has not removed its shards.
    if _has_only_parts(out / PARTS_DIR):
        _remove_parts(out)
    return manifest


def _list_stream_changes(
    out: Path, manifest: Manifest, sources: Sequence[Source], progress: Progress
) -> list[str]:
    """Return a phrase if standard input or a pipe has other text than a finished store; else none.

    Raises:
        StoreError: An earlier version made the store, so its manifest has no hash of the text.
    """
    streams = " and ".join(
        "standard input" if source.name == STDIN else source.name
        for source in sources
        if source.is_stream
    )
    if not streams:
        return []
    if not manifest.text_hash:
        raise StoreError(
            f"{out}: this store is finished, and its text cannot be compared with {streams}, "
            "because an earlier version of bertsmith made the store; name another folder with "
            "--out, or remove the folder to make the store again"
        )
    names = []
    progress.start("Comparing the text", None, "characters")
    for name, group in _read_shards(sources, manifest.plan, CorpusReport()):
        names.append(name)
        progress.advance(sum(len(document.text) for document in group))
    progress.finish()
    is_same = hash_texts(names) == manifest.text_hash
    return [] if is_same else [f"{streams} had other text than now"]


@contextmanager
def _lock_parts(out: Path, plan: StorePlan, progress: Progress) -> Iterator[Path]:
    """Start or resume a store under an exclusive lock; yield the directory of its shards."""
    parts = out / PARTS_DIR
    if out.exists() and not out.is_dir():
        raise StoreError(f"{out}: this is a file; --out names a folder for the store")
    is_unfinished = (parts / PLAN_FILE).is_file() or list(out.glob("*")) == [parts]
    if out.is_dir() and any(out.iterdir()) and not (is_unfinished and _has_only_parts(parts)):
        raise StoreError(
            f"{out}: this folder holds something else; name a new or empty folder with --out"
        )
    parts.mkdir(parents=True, exist_ok=True)
    error = StoreError(f"{out}: another process is building this store; wait until it has finished")
    with hold_lock(parts / LOCK_FILE, error=error):
        # If no shard exists yet, no work is lost with another plan, so it is accepted.
        if (parts / PLAN_FILE).exists() and any(parts.glob("*.npz")):
            old_plan = _adopt_skipping(read_plan(parts / PLAN_FILE), plan)
            changes = list_plan_changes(old_plan, plan) + list_version_changes(old_plan, plan)
            if changes:
                raise StoreError(_describe_mismatch(out, "was started with other inputs", changes))
            progress.log(f"Resuming the unfinished store in {out}")
        write_plan(parts / PLAN_FILE, plan)
        yield parts


def _has_only_parts(parts: Path) -> bool:
    """Return whether ``parts`` is a folder without files that ``prepare`` does not write."""
    return parts.is_dir() and all(_PART_NAME.fullmatch(path.name) for path in parts.iterdir())


def _remove_parts(out: Path) -> None:
    """Remove the shards of a finished store, as far as possible.

    On NFS, the lock that this process holds keeps the folder from being removed.
    """
    shutil.rmtree(out / PARTS_DIR, ignore_errors=True)


def _adopt_skipping(old: StorePlan, new: StorePlan) -> StorePlan:
    """Return ``old``, with errors skipped if ``new`` skips them.

    The shards that exist were built from text without errors, so they are the same in both cases.
    """
    if new.options.corpus.on_error != "skip":
        return old
    corpus = old.options.corpus.model_copy(update={"on_error": "skip"})
    return old.model_copy(update={"options": old.options.model_copy(update={"corpus": corpus})})


def _describe_mismatch(out: Path, problem: str, changes: list[str]) -> str:
    """Return the error message for a store folder whose plan differs from that of this run."""
    return (
        f"{out}: this folder {problem}: {'; '.join(changes)}. Restore what changed and run again, "
        "remove the folder to start again, or name another folder with --out"
    )


def _group_documents(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Yield groups of documents with ``characters`` or more; the last group may have fewer."""
    group: list[Document] = []
    size = 0
    for document in documents:
        group.append(document)
        size += len(document.text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def _read_shards(
    sources: Sequence[Source], plan: StorePlan, report: CorpusReport
) -> Iterator[tuple[str, list[Document]]]:
    """Yield the file name and the documents of each shard.

    The name has the number of the shard and the hash of its texts.
    """
    documents = read_documents(sources, plan.options.corpus, report)
    for number, group in enumerate(_group_documents(documents, plan.shard_characters)):
        yield f"{number:06d}-{hash_texts([document.text for document in group])}.npz", group


def _build_shards(
    pool: WorkerPool,
    parts: Path,
    sources: Sequence[Source],
    plan: StorePlan,
    report: CorpusReport,
    progress: Progress,
) -> list[str]:
    """Build all shards that do not exist yet; return the file names of all shards, in order."""
    existing = {path.name for path in parts.glob("*.npz")}
    names: list[str] = []
    progress.start("Tokenizing", _estimate_bytes(sources), "bytes")
    for name, group in _read_shards(sources, plan, report):
        texts = [document.text for document in group]
        names.append(name)
        is_intact = name in existing and _is_intact(parts / name)
        if name in existing and not is_intact:
            progress.log(
                f"{parts / name}: this shard of the unfinished store is damaged; building it again"
            )
        if not is_intact:
            prefix, _, _ = name.partition("-")
            if any(other.startswith(f"{prefix}-") for other in existing - {name}):
                changes = [f"shard {len(names):,} was made from other documents than it has now"]
                raise StoreError(
                    _describe_mismatch(parts.parent, "was started with other inputs", changes)
                )
            presplit = [document.presplit for document in group]
            pool.submit(ShardTask(parts / name, texts, presplit))
        num_bytes = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
        progress.advance(num_bytes, documents=f"{report.documents:,}")
    pool.drain()
    progress.finish()
    return names


def _is_intact(path: Path) -> bool:
    """Return whether a shard of an earlier run is undamaged."""
    try:
        Shard.load(path)
    except DamagedShardError:
        return False
    return True


def _estimate_bytes(sources: Sequence[Source]) -> float | None:
    """Return the approximate bytes of text; None for compressed files and streams."""
    # The text of a compressed file is several times as large as the file.
    compressed_suffixes = {*COMPRESSION_SUFFIXES, ".parquet"}
    total = 0
    for source in sources:
        if source.size is None or Path(source.name).suffix.lower() in compressed_suffixes:
            return None
        total += source.size
    return float(total)


def _merge_shards(
    out: Path,
    names: list[str],
    plan: StorePlan,
    tokenizer: Tokenizer,
    report: CorpusReport,
    progress: Progress,
) -> Manifest:
    """Merge the shards into the files of both splits, write the manifest, delete the shards."""
    shards = [out / PARTS_DIR / name for name in names]
    is_continuation = tokenizer.is_continuation

    def load_shard(path: Path) -> Shard:
        return Shard.load(path).cut_long_sentences(is_continuation)

    def iterate_sizes() -> Iterator[DocumentSizes]:
        return (load_shard(path).sizes for path in shards)

    rule = choose_held_out(iterate_sizes, plan.options.held_out)
    bits = choose_id_bits(tokenizer.vocab_size)
    writers = {name: SplitWriter(out, name, bits, tokenizer.unk_id) for name in SPLITS}
    num_empty = num_cut = num_long = 0
    progress.start("Joining the shards", len(shards), "shards")
    for path in shards:
        shard = load_shard(path)
        num_empty += shard.empty
        num_cut += rule.count_cut_documents(shard.sizes)
        num_long += shard.long_sentence_tokens
        _append_shard(writers, shard, rule)
        progress.advance(1)
    progress.finish()
    splits = {name: writer.close() for name, writer in writers.items()}
    if not splits["train"].documents:
        # The next run accepts other sources for this folder only if it has no shards.
        for path in shards:
            path.unlink()
        raise StoreError(
            f"{out}: the corpus holds no word, so there is nothing to learn from; "
            "give files with text"
        )
    checksums: dict[str, str] = {}
    for writer in writers.values():
        checksums |= writer.checksums
    counts = report.to_json() | {
        "documents_without_tokens": num_empty,
        "documents_cut": num_cut,
        "long_sentence_tokens": num_long,
    }
    counts[UNKNOWN_TOKENS] = {name: writer.num_unknown for name, writer in writers.items()}
    manifest = Manifest(
        bits=bits,
        vocab_size=tokenizer.vocab_size,
        lowercase=tokenizer.lowercase,
        plan=plan,
        held_out_below=rule.hash_limit / 2.0**64,
        splits=splits,
        report=counts,
        made_by=f"bertsmith {__version__}",
        checksums=checksums,
        # The file names have the hash of the texts of each shard.
        text_hash=hash_texts(names),
    )
    write_manifest(out, manifest)
    _remove_parts(out)
    return manifest


def _append_shard(writers: dict[SplitName, SplitWriter], shard: Shard, rule: HeldOutRule) -> None:
    """Append the documents of a shard to the training or held-out split."""
    is_held_out, train_sizes, held_out_sizes = rule.assign(shard.sizes)
    is_held_out_token = np.repeat(is_held_out, shard.sentence_sizes)
    writers["train"].append(
        shard.ids[~is_held_out_token], shard.sentence_sizes[~is_held_out], train_sizes
    )
    writers["heldout"].append(
        shard.ids[is_held_out_token], shard.sentence_sizes[is_held_out], held_out_sizes
    )


def summarize_store(manifest: Manifest) -> list[str]:
    """Return human-readable lines about the documents read, skipped and held out."""
    counts = dict(manifest.report)
    num_empty = counts.pop("documents_without_tokens", 0)
    num_cut = counts.pop("documents_cut", 0)
    num_long = counts.pop("long_sentence_tokens", 0)
    counts.pop(UNKNOWN_TOKENS, None)
    lines = CorpusReport(**counts).lines()
    if num_empty:
        lines.append(f"left out {count_noun(num_empty, 'document')} without a word")
    if num_cut:
        lines.append(
            f"split {count_noun(num_cut, 'long document')} so that enough tokens can be held out"
        )
    titles: dict[SplitName, str] = {"train": "training", "heldout": "held out"}
    for name, title in titles.items():
        split = manifest.splits[name]
        lines.append(
            f"{title}: {count_noun(split.documents, 'document')}, "
            f"{count_noun(split.sentences, 'sentence')}, {count_noun(split.tokens, 'token')}"
        )
    lines += format_unknown_shares({name: manifest.token_counts(name) for name in SPLITS})
    train, held_out = manifest.splits["train"], manifest.splits["heldout"]
    long_share = num_long / (train.tokens + held_out.tokens)
    if long_share > _MAX_LONG_SENTENCES:
        lines.append(
            f"warning: {long_share:.0%} of the tokens are in sentences of more than "
            f"{MAX_SENTENCE_TOKENS} tokens, which were cut into pieces of up to "
            f"{MAX_PIECE_TOKENS}; end sentences with punctuation or a line break, or check "
            "--language"
        )
    if not held_out.documents and manifest.plan.options.held_out != 0.0:
        size = f"{count_noun(train.sentences, 'sentence')}, {count_noun(train.tokens, 'token')}"
        lines.append(
            "nothing is held out: the corpus is too small or repeats itself too much "
            f"({size}), and pretrain needs held-out text; add more text"
        )
    return lines
