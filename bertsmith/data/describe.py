"""Describes a token store in text: its metadata and some training examples."""

import numpy as np

from bertsmith.data.masking import VocabularyInfo
from bertsmith.data.packing import ExampleBatch
from bertsmith.data.settings import DataSettings
from bertsmith.data.store import SPLITS, Store
from bertsmith.data.stream import ExampleStream
from bertsmith.data.unknown_shares import format_unknown_shares
from bertsmith.errors import StoreError
from bertsmith.plurals import count_noun, shorten_list
from bertsmith.text.wordpiece import Tokenizer


def describe_store(
    store: Store, settings: DataSettings | None = None, *, examples: int = 3, seed: int = 0
) -> str:
    """Return a text with the metadata of a store and some training examples drawn from it.

    A token to predict is shown as {input→label}: the token that the model sees, and the token that
    it has to predict.

    Args:
        store: The store.
        settings: How examples are made; None for the defaults.
        examples: Maximum number of examples.
        seed: Random seed of the examples.
    """
    settings = DataSettings() if settings is None else settings
    lines = _describe_manifest(store)
    tokenizer = store.load_tokenizer()
    split = store.load_split("train")
    vocabulary = VocabularyInfo.from_tokenizer(tokenizer)
    try:
        stream = ExampleStream(split, vocabulary, settings, settings.max_seqlen, seed, 0)
    except StoreError as error:
        return "\n".join([*lines, f"no examples: {error}"])
    contents = "pairs of segments" if settings.nsp else "one segment each"
    lines.append(
        f"examples per epoch at length {settings.max_seqlen}: {len(stream):,} ({contents})"
    )
    num_examples = min(examples, len(stream))
    if not num_examples:
        return "\n".join(lines)
    batch = stream.batch(0, num_examples)
    for index in range(num_examples):
        example = batch.slice(index, index + 1)
        lines += ["", *_describe_example(example, tokenizer, settings.pair_objective)]
    return "\n".join(lines)


def _describe_manifest(store: Store) -> list[str]:
    """Return lines about the vocabulary, the splits, the sources and what was left out."""
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
            f"{name}: {count_noun(counts.documents, 'document')}, "
            f"{count_noun(counts.sentences, 'sentence')}, "
            f"{count_noun(counts.tokens, 'token')}"
        )
    lines += format_unknown_shares({name: manifest.token_counts(name) for name in SPLITS})
    sources = [
        f"{source.name} ({'a stream' if source.size is None else count_noun(source.size, 'byte')})"
        for source in manifest.plan.sources
    ]
    lines += [f"source: {source}" for source in shorten_list(sources)]
    omitted = dict(manifest.report.get("skipped", {}))
    for key in ("repeated_documents", "repeated_paragraphs", "empty_documents"):
        omitted[key.replace("_", " ")] = manifest.report.get(key, 0)
    lines += [f"left out: {count:,} ({reason})" for reason, count in omitted.items() if count]
    return lines


def _describe_example(
    example: ExampleBatch, tokenizer: Tokenizer, pair_objective: str
) -> list[str]:
    """Return a title line and the lines of the segments, for a batch of one sequence."""
    labels = dict(
        zip(example.masked_positions.tolist(), example.masked_labels.tolist(), strict=True)
    )
    tokens = tokenizer.ids_to_tokens(example.ids.tolist())
    for position, label in labels.items():
        tokens[position] = f"{{{tokens[position]}→{tokenizer.vocab[label]}}}"
    counts = f"{count_noun(len(tokens), 'token')}, {len(labels)} to predict"
    if example.nsp_labels is None:
        return [f"one segment, {counts}", "  " + " ".join(tokens)]
    b_start = int(np.searchsorted(example.segments, 1))
    other_relation = {"nsp": "B from another document", "sop": "A follows B"}[pair_objective]
    relation = other_relation if example.nsp_labels[0] else "B follows A"
    return [
        f"{relation}, {counts}",
        "  A: " + " ".join(tokens[:b_start]),
        "  B: " + " ".join(tokens[b_start:]),
    ]
