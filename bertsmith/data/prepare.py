"""Makes a token store from text: one worker process a core, shard by shard, then one join.

It never knows a model. The parent only reads documents and hands them out in groups; a worker
makes a group into a shard file. A shard is the same whichever worker makes it and whenever, so a
run that was stopped goes on from the shards that stand, and the store is the same byte for byte
for any number of workers.
"""

import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bertsmith.data.held_out_split import DocumentSizes, HeldOutRule, choose_held_out
from bertsmith.data.plan import (
    SHARD_CHARACTERS,
    PrepareOptions,
    StorePlan,
    fingerprint_sources,
    list_plan_changes,
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
    format_unknown_shares,
    write_manifest,
)
from bertsmith.data.worker import DamagedShardError, Shard, ShardTask, WorkerFailure, hash_texts
from bertsmith.data.worker_pool import WorkerPool
from bertsmith.errors import StoreError
from bertsmith.progress import NullProgress, Progress
from bertsmith.text.corpus import CorpusReport, Document, Source, read_documents
from bertsmith.text.sentences import check_language
from bertsmith.text.wordpiece import Tokenizer
from bertsmith.version import __version__

PARTS_DIR, PLAN_FILE, LOCK_FILE = "parts", "plan.json", "lock"


def prepare(
    sources: Sequence[Source],
    tokenizer: Tokenizer,
    out: Path,
    options: PrepareOptions | None = None,
    progress: Progress | None = None,
    workers: int | None = None,
    shard_characters: int = SHARD_CHARACTERS,
) -> Manifest:
    """Make the store ``out``; go on with one that was stopped; leave a finished one as it is.

    Raises StoreError where ``out`` is something else, or was begun from other sources or with
    other choices; CorpusError where a source cannot be read. ``workers``: processes at most, one
    a core by default; the store does not depend on it. ``shard_characters``: about how much text
    is lost by each worker when a run is killed.
    """
    options = PrepareOptions() if options is None else options
    check_language(options.language)
    progress = NullProgress() if progress is None else progress
    plan = StorePlan(
        vocabulary_hash=tokenizer.hash,
        options=options,
        sources=fingerprint_sources(sources, progress),
        shard_characters=shard_characters,
    )
    if (out / MANIFEST_FILE).exists():
        return _finished(out, plan, progress)
    with _begun(out, plan, progress) as parts:
        tokenizer.save(out / TOKENIZER_DIR)
        arguments = [
            str(out / TOKENIZER_DIR),
            options.language,
            str(choose_id_bits(tokenizer.vocab_size)),
        ]
        report = CorpusReport()
        with WorkerPool(workers or _cores(), "bertsmith.data.worker", arguments) as pool:
            names = _make_shards(pool, parts, sources, plan, report, progress)
        report.require_documents()
        return _join(out, [parts / name for name in names], plan, tokenizer, report, progress)


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _finished(out: Path, plan: StorePlan, progress: Progress) -> Manifest:
    """Return the manifest of a store that stands already, if it is the one asked for."""
    store = Store.open(out)
    manifest = store.manifest
    found = list_plan_changes(manifest.plan, plan)
    if found:
        raise StoreError(_refusal(out, "holds a store made from something else", found))
    store.verify(progress)
    # Parts may be left if the last run was killed at the very end.
    shutil.rmtree(out / PARTS_DIR, ignore_errors=True)
    return manifest


@contextmanager
def _begun(out: Path, plan: StorePlan, progress: Progress) -> Iterator[Path]:
    """Begin a store or go on with one, alone; yield the folder of its shards."""
    parts = out / PARTS_DIR
    if out.exists() and not out.is_dir():
        raise StoreError(f"{out}: this is a file; --out names a folder for the store")
    if out.is_dir() and any(out.iterdir()) and not parts.is_dir():
        raise StoreError(
            f"{out}: this folder holds something else; name a new or empty folder with --out"
        )
    parts.mkdir(parents=True, exist_ok=True)
    with (parts / LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StoreError(f"{out}: another process is making this store now") from None
        # A plan without a shard is of a run that failed at once: nothing of it would be lost.
        if (parts / PLAN_FILE).exists() and any(parts.glob("*.npz")):
            found = list_plan_changes(read_plan(parts / PLAN_FILE), plan)
            if found:
                raise StoreError(_refusal(out, "was begun from something else", found))
            progress.log(f"Going on with the store that was begun in {out}")
        write_plan(parts / PLAN_FILE, plan)
        yield parts


def _refusal(out: Path, what: str, found: list[str]) -> str:
    listed = "; ".join(found)
    return (
        f"{out}: this folder {what}: {listed}. Restore what changed and run again, "
        "remove the folder to start anew, or name another folder with --out"
    )


def _groups(documents: Iterable[Document], characters: int) -> Iterator[list[Document]]:
    """Gather documents until they have so many characters; the last group may have fewer."""
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


def _make_shards(
    pool: WorkerPool,
    parts: Path,
    sources: Sequence[Source],
    plan: StorePlan,
    report: CorpusReport,
    progress: Progress,
) -> list[str]:
    """Have every shard made that does not stand yet; return the names of all, in order."""
    standing = {path.name for path in parts.glob("*.npz")}
    names: list[str] = []
    total = _text_size(sources)
    progress.start("Tokenizing", total, "characters" if total is None else "bytes")
    for group in _groups(
        read_documents(sources, plan.options.corpus, report), plan.shard_characters
    ):
        texts = [document.text for document in group]
        number = f"{len(names):06d}-"
        name = f"{number}{hash_texts(texts)}.npz"
        names.append(name)
        if name not in standing or not _is_intact(parts / name, progress):
            if any(other.startswith(number) for other in standing - {name}):
                found = [f"shard {len(names):,} was made from other documents than it has now"]
                raise StoreError(_refusal(parts.parent, "was begun from something else", found))
            _check(pool.submit(ShardTask(parts / name, texts, [one.presplit for one in group])))
        progress.advance(sum(map(len, texts)), documents=f"{report.documents:,}")
    for answer in pool.drain():
        _check(answer)
    progress.finish()
    return names


def _is_intact(path: Path, progress: Progress) -> bool:
    """Tell whether a shard of an earlier run can be used."""
    try:
        Shard.load(path)
    except DamagedShardError:
        progress.log(f"{path}: this part of the unfinished store is damaged; making it again")
        return False
    return True


def _text_size(sources: Sequence[Source]) -> float | None:
    """Return about how much text there is, None where it cannot be told."""
    # A packed file holds several times its size in text.
    plain = all(Path(s.name).suffix not in {".gz", ".xz", ".zst", ".parquet"} for s in sources)
    sizes = [source.size for source in sources if source.size is not None]
    return float(sum(sizes)) if plain and len(sizes) == len(sources) else None


def _check(answer: WorkerFailure | None) -> None:
    """Raise what went wrong in a worker, if anything did."""
    if answer is None:
        return
    if answer.error is not None:
        raise answer.error
    raise RuntimeError(f"a worker process failed:\n{answer.traceback}")


def _join(
    out: Path,
    shards: list[Path],
    plan: StorePlan,
    tokenizer: Tokenizer,
    report: CorpusReport,
    progress: Progress,
) -> Manifest:
    """Join the shards into the flat files of both splits, write the manifest, remove the shards."""

    def lengths() -> Iterator[DocumentSizes]:
        return (Shard.load(path).sizes for path in shards)

    rule = choose_held_out(lengths, plan.options.held_out)
    bits = choose_id_bits(tokenizer.vocab_size)
    writers = {name: SplitWriter(out, name, bits, tokenizer.unk_id) for name in SPLITS}
    empty = cut = 0
    progress.start("Joining the shards", len(shards), "shards")
    for path in shards:
        shard = Shard.load(path)
        empty += shard.empty
        cut += rule.count_cut_documents(shard.sizes)
        _append(writers, shard, rule)
        progress.advance(1)
    progress.finish()
    splits = {name: writer.close() for name, writer in writers.items()}
    if not splits["train"].documents:
        # Nothing would be lost by other sources in the same place.
        for path in shards:
            path.unlink()
        raise StoreError(f"{out}: the corpus holds no word, so there is nothing to learn from")
    facts = report.to_json() | {"documents_without_tokens": empty, "documents_cut": cut}
    facts[UNKNOWN_TOKENS] = {name: writer.num_unknown for name, writer in writers.items()}
    manifest = Manifest(
        bits=bits,
        vocab_size=tokenizer.vocab_size,
        lowercase=tokenizer.lowercase,
        plan=plan,
        held_out_below=rule.hash_limit / 2.0**64,
        splits=splits,
        report=facts,
        made_by=f"bertsmith {__version__}",
        checksums={k: v for writer in writers.values() for k, v in writer.checksums.items()},
    )
    write_manifest(out, manifest)
    shutil.rmtree(out / PARTS_DIR)
    return manifest


def _append(writers: dict[SplitName, SplitWriter], shard: Shard, rule: HeldOutRule) -> None:
    """Append the documents of a shard to the splits."""
    held_out, train, heldout = rule.assign(shard.sizes)
    tokens = np.repeat(held_out, shard.sentence_sizes)
    writers["train"].append(shard.ids[~tokens], shard.sentence_sizes[~held_out], train)
    writers["heldout"].append(shard.ids[tokens], shard.sentence_sizes[held_out], heldout)


def summarize_store(manifest: Manifest) -> list[str]:
    """Return what was made and what was left out, a line each, for people."""
    facts = dict(manifest.report)
    empty = facts.pop("documents_without_tokens", 0)
    cut = facts.pop("documents_cut", 0)
    facts.pop(UNKNOWN_TOKENS, None)
    lines = CorpusReport(**facts).lines()
    if empty:
        lines.append(f"{empty:,} documents without a word left out")
    if cut:
        lines.append(f"{cut:,} documents cut into parts to meet the held-out share")
    for counts, what in zip(
        (manifest.splits[name] for name in SPLITS), ("to learn from", "held out"), strict=True
    ):
        lines.append(
            f"{what}: {counts.documents:,} documents, {counts.sentences:,} sentences, "
            f"{counts.tokens:,} tokens"
        )
    train = manifest.splits["train"]
    lines += format_unknown_shares({name: manifest.token_counts(name) for name in SPLITS})
    if not manifest.splits["heldout"].documents and manifest.plan.options.held_out != 0.0:
        lines.append(
            "nothing is held out: the corpus is too small or repeats itself too much "
            f"({train.sentences:,} sentences), and pretrain needs held-out text; add more text"
        )
    return lines
