"""Looks into a store: its facts, and what its examples look like to a reader.

It never knows how a store is made, nor a model.
"""

import numpy as np

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import Batch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Store, format_unknown_shares
from bertsmith.data.stream import ExampleStream
from bertsmith.errors import StoreError
from bertsmith.text.wordpiece import Tokenizer


def describe_store(
    store: Store, settings: DataSettings | None = None, *, examples: int = 3, seed: int = 0
) -> str:
    """Return a store's facts and some examples drawn from it, as text for people.

    A token that is asked for stands in braces with what the model sees before it: {seen→asked}.
    """
    settings = DataSettings() if settings is None else settings
    lines = _facts(store)
    tokenizer = store.load_tokenizer()
    split = store.load_split("train")
    try:
        stream = ExampleStream(
            split, VocabularyInfo.from_tokenizer(tokenizer), settings, settings.length, seed, 0
        )
    except StoreError as error:
        return "\n".join([*lines, f"no examples: {error}"])
    lines.append(f"examples an epoch at length {settings.length}: {len(stream):,}")
    examples = min(examples, len(stream))
    if not examples:
        return "\n".join(lines)
    batch = stream.batch(0, examples)
    for number in range(len(batch)):
        lines += ["", *_example(batch.slice(number, number + 1), tokenizer)]
    return "\n".join(lines)


def _facts(store: Store) -> list[str]:
    manifest = store.manifest
    case = "lower case" if manifest.lowercase else "cased"
    lines = [
        f"token store {store.path}, format {manifest.format}, {manifest.bits}-bit ids",
        f"vocabulary: {manifest.vocab_size:,} words, {case}, hash {manifest.vocabulary_hash[:12]}",
        f"language: {manifest.plan.options.language}; made by {manifest.made_by or 'unknown'}",
    ]
    for name in SPLITS:
        counts = manifest.splits[name]
        lines.append(
            f"{name}: {counts.documents:,} documents, {counts.sentences:,} sentences, "
            f"{counts.tokens:,} tokens"
        )
    lines += format_unknown_shares({name: manifest.token_counts(name) for name in SPLITS})
    for source in manifest.plan.sources:
        size = "a stream" if source.size is None else f"{source.size:,} bytes"
        lines.append(f"source: {source.name} ({size})")
    left_out = {**manifest.report.get("skipped", {})}
    for fact in ("repeated_documents", "repeated_paragraphs", "empty_documents"):
        left_out[fact.replace("_", " ")] = manifest.report.get(fact, 0)
    lines += [f"left out: {count:,} ({reason})" for reason, count in left_out.items() if count]
    return lines


def _example(one: Batch, tokenizer: Tokenizer) -> list[str]:
    """Return one sequence as its label and a line a segment."""
    asked = dict(zip(one.masked_positions.tolist(), one.masked_labels.tolist(), strict=True))
    shown = tokenizer.ids_to_tokens(one.ids.tolist())
    for place, label in asked.items():
        shown[place] = f"{{{shown[place]}→{tokenizer.vocab[label]}}}"
    border = int(np.searchsorted(one.segments, 1))
    if one.nsp_labels is None:
        return [f"one segment, {len(one.ids)} tokens", "  " + " ".join(shown)]
    label = "B from another document" if one.nsp_labels[0] else "B follows A"
    head = f"{label}, {len(one.ids)} tokens, {len(asked)} asked for"
    return [head, "  A: " + " ".join(shown[:border]), "  B: " + " ".join(shown[border:])]
