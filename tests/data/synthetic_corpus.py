"""A corpus of random sentences, and stores of it with many small shards."""

import json
from pathlib import Path

import numpy as np

from bertsmith.data.plan import PrepareOptions
from bertsmith.data.prepare import prepare
from bertsmith.data.store import Manifest
from bertsmith.text.corpus import find_sources
from bertsmith.text.tokenizer_spec import SPECIAL_TOKENS, TokenizerSpec
from bertsmith.text.wordpiece import Tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz"
VOCAB = (*SPECIAL_TOKENS, ".", *LETTERS, *(f"##{letter}" for letter in LETTERS), "the", "##ing")
TOKENIZER = Tokenizer(TokenizerSpec(vocab=VOCAB))
#: Characters per shard, so few that a small corpus has many shards.
SHARD_CHARACTERS = 3000
#: Number of documents in the fixture ``corpus``.
NUM_DOCUMENTS = 200


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
