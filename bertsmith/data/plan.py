"""Store plan: the inputs that determine the content of a token store.

``prepare`` compares its plan with that of an unfinished or existing store, so that a store is only
resumed with the inputs it was started with.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import Field

from bertsmith.errors import StoreError
from bertsmith.files import parse_json, write_json
from bertsmith.plurals import count_noun
from bertsmith.progress import Progress
from bertsmith.settings import Settings
from bertsmith.text.corpus import CorpusOptions, Source
from bertsmith.text.sources import detect_kind_from_name

#: Directory with the shards of an unfinished store, and its plan, a file in this directory.
PARTS_DIR, PLAN_FILE = "parts", "plan.json"
#: Characters of text per shard. Building a shard takes a few seconds on one core, and a few
#: megabytes.
SHARD_CHARACTERS = 1 << 22


class PrepareOptions(Settings):
    """Options of ``prepare``.

    Attributes:
        language: ISO 639-1 code, used for sentence splitting.
        held_out: Share of the tokens to hold out, 0 for none; None for the default (see
            ``choose_held_out``).
        corpus: How the sources are read.
    """

    language: str = "en"
    held_out: float | None = Field(default=None, ge=0.0, lt=1.0)
    corpus: CorpusOptions = CorpusOptions()


class SourceInfo(Settings):
    """Identity of one source file.

    Attributes:
        name: Path as the user gave it, or "-" for standard input.
        size: Size in bytes; None for standard input and pipes.
        fingerprint: SHA-256 of the content in hexadecimal; empty for standard input and pipes.
            Their documents are compared instead: with the shards of an unfinished store, and with
            ``Manifest.text_hash`` of a finished one.
    """

    name: str
    size: int | None
    fingerprint: str


class StorePlan(Settings):
    """The inputs that determine the content of a store, together with the version of Bertsmith.

    Attributes:
        vocabulary_hash: Hash of the tokenizer.
        options: Options of ``prepare``.
        sources: The source files, in order.
        shard_characters: Characters of text per shard.
        sentencex_version: Version of ``sentencex``, which splits documents into sentences; empty in
            the plans of versions up to 0.2.
    """

    vocabulary_hash: str
    options: PrepareOptions = PrepareOptions()
    sources: tuple[SourceInfo, ...] = ()
    shard_characters: int = SHARD_CHARACTERS
    sentencex_version: str = ""


def fingerprint_sources(sources: Sequence[Source], progress: Progress) -> tuple[SourceInfo, ...]:
    """Return the name, the size and the hash of every source."""
    total = sum(source.size or 0 for source in sources)
    progress.start("Checking the sources", total, "bytes")
    infos = []
    for source in sources:
        fingerprint = source.fingerprint()
        infos.append(SourceInfo(name=source.name, size=source.size, fingerprint=fingerprint))
        progress.advance(source.size or 0)
    progress.finish()
    return tuple(infos)


def write_plan(path: Path, plan: StorePlan) -> None:
    """Write a plan as JSON. A later run reads it and compares it with its own plan."""
    write_json(path, plan.model_dump(mode="json"))


def read_plan(path: Path) -> StorePlan:
    """Read a plan written by ``write_plan``.

    Raises:
        StoreError: The file cannot be read or is not a plan.
    """
    try:
        return StorePlan.model_validate_json(json.dumps(parse_json(path.read_bytes())))
    except (OSError, ValueError) as error:
        raise StoreError(
            f"{path}: not a readable plan of an unfinished store ({error}); "
            f"remove the folder {path.parent.parent} and start again"
        ) from None


def list_plan_changes(old: StorePlan, new: StorePlan) -> list[str]:
    """Return a phrase for each difference between two plans; none if they are equal.

    A new version of ``sentencex`` is not such a difference; see ``list_version_changes``.
    """
    changes = []
    if old.vocabulary_hash != new.vocabulary_hash:
        changes.append(
            f"the tokenizer changed (hash {old.vocabulary_hash[:12]}, "
            f"now {new.vocabulary_hash[:12]})"
        )
    old_options = _flatten_options(old)
    new_options = _flatten_options(new)
    changes += [
        f"{key} was {old_options.get(key)!r}, now {new_options.get(key)!r}"
        for key in sorted(old_options.keys() | new_options.keys())
        if old_options.get(key) != new_options.get(key)
    ]
    if len(old.sources) != len(new.sources):
        changes.append(
            f"there were {count_noun(len(old.sources), 'source')}, now {len(new.sources):,}"
        )
        return changes
    for old_source, new_source in zip(old.sources, new.sources, strict=True):
        old_content = (old_source.size, old_source.fingerprint)
        new_content = (new_source.size, new_source.fingerprint)
        # The suffix of a name determines how a file is read.
        kinds = {detect_kind_from_name(Path(source.name)) for source in (old_source, new_source)}
        if old_content == new_content and len(kinds) == 1:
            continue
        if old_source.name != new_source.name:
            changes.append(f"the source was {old_source.name}, now {new_source.name}")
        else:
            changes.append(
                f"the source {new_source.name} changed "
                f"({_describe_source(old_source)}, now {_describe_source(new_source)})"
            )
    return changes


def list_version_changes(old: StorePlan, new: StorePlan) -> list[str]:
    """Return a phrase if the shards of an unfinished store need another version of a library."""
    if old.sentencex_version in ("", new.sentencex_version):
        return []
    change = (
        f"sentencex, which splits text into sentences, was {old.sentencex_version}, now "
        f"{new.sentencex_version} (restore it with: pip install "
        f"sentencex=={old.sentencex_version})"
    )
    return [change]


def _flatten_options(plan: StorePlan) -> dict[str, object]:
    """Return the value of each option of a plan, by its name on the command line."""
    values = plan.options.model_dump()
    corpus_values = values.pop("corpus")
    values |= corpus_values | {"shard_characters": plan.shard_characters}
    return {key.replace("_", "-"): value for key, value in values.items()}


def _describe_source(source: SourceInfo) -> str:
    """Return the size and the hash of a source as text."""
    size = "a stream" if source.size is None else count_noun(source.size, "byte")
    return f"{size}, SHA-256 {source.fingerprint[:12]}" if source.fingerprint else size
