"""What a store is made of: the sources, the tokenizer and the choices, and what changed in them.

It never knows how the store is made.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from bertsmith.errors import StoreError
from bertsmith.files import parse_json, write_json
from bertsmith.progress import Progress
from bertsmith.settings import Settings
from bertsmith.text.corpus import CorpusOptions, Source

#: The characters of text in a shard: a few seconds of one core, a few megabytes of memory.
SHARD_CHARACTERS = 1 << 22


class PrepareOptions(Settings):
    """The choices of ``prepare``.

    ``language``: ISO 639-1 code for sentence boundaries. ``held_out``: the share of tokens to
    hold out, 0 for none; None chooses (see ``choose_held_out``).
    """

    language: str = "en"
    held_out: float | None = Field(default=None, ge=0.0, lt=1.0)
    corpus: CorpusOptions = CorpusOptions()


class SourceInfo(Settings):
    """One file that a store is made from; the fingerprint is the SHA-256 of its bytes.

    Standard input has neither size nor fingerprint; its documents are compared one group after
    another as they come.
    """

    name: str
    size: int | None
    fingerprint: str


class StorePlan(Settings):
    """All that decides what stands in a store."""

    vocabulary_hash: str
    options: PrepareOptions = PrepareOptions()
    sources: tuple[SourceInfo, ...] = ()
    shard_characters: int = SHARD_CHARACTERS


def fingerprint_sources(sources: Sequence[Source], progress: Progress) -> tuple[SourceInfo, ...]:
    """Take the fingerprint of every source."""
    total = sum(source.size or 0 for source in sources)
    progress.start("Checking the sources", total, "bytes")
    found = []
    for source in sources:
        fingerprint = source.fingerprint()
        found.append(SourceInfo(name=source.name, size=source.size, fingerprint=fingerprint))
        progress.advance(source.size or 0)
    progress.finish()
    return tuple(found)


def write_plan(path: Path, plan: StorePlan) -> None:
    """Write the plan, so that a later start can compare."""
    write_json(path, plan.model_dump(mode="json"))


def read_plan(path: Path) -> StorePlan:
    """Read the plan that ``write_plan`` wrote."""
    try:
        return StorePlan.model_validate_json(json.dumps(parse_json(path.read_bytes())))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: not a readable plan of an unfinished store ({error}); "
            f"remove the folder {path.parent.parent} and start anew"
        ) from None


def list_plan_changes(old: StorePlan, new: StorePlan) -> list[str]:
    """Return what differs between two plans, a sentence each, for people."""
    found = []
    if old.vocabulary_hash != new.vocabulary_hash:
        found.append(
            f"the tokenizer changed (hash {old.vocabulary_hash[:12]}, "
            f"now {new.vocabulary_hash[:12]})"
        )
    before, after = (_flat(plan) for plan in (old, new))
    found += [
        f"{key} was {before.get(key)!r}, now {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key)
    ]
    if len(old.sources) != len(new.sources):
        found.append(f"there were {len(old.sources):,} sources, now {len(new.sources):,}")
        return found
    for one, two in zip(old.sources, new.sources, strict=True):
        same = (one.size, one.fingerprint) == (two.size, two.fingerprint)
        if not same and one.name != two.name:
            found.append(f"the source was {one.name}, now {two.name}")
        elif not same:
            found.append(f"the source {two.name} changed ({_told(one)}, now {_told(two)})")
    return found


def _flat(plan: StorePlan) -> dict[str, object]:
    """Return the choices of a plan by the names of their options."""
    values = plan.options.model_dump()
    corpus = values.pop("corpus")
    values |= corpus | {"shard_characters": plan.shard_characters}
    return {key.replace("_", "-"): value for key, value in values.items()}


def _told(source: SourceInfo) -> str:
    size = "a stream" if source.size is None else f"{source.size:,} bytes"
    return f"{size}, SHA-256 {source.fingerprint[:12]}" if source.fingerprint else size
