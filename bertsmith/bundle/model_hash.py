"""A hash over the files that define a model, to detect whether a model directory has changed."""

import hashlib
from pathlib import Path
from typing import Final

from bertsmith.files import sha256_of_file

#: Weights, configs and tokenizer, including the folders of sentence-transformers models. README.md
#: is excluded.
_PATTERNS: Final = (
    "*.json", "*/config.json", "vocab.txt", "model*.safetensors", "*/model.safetensors",
    "pytorch_model*.bin",
)  # fmt: skip


def hash_model_files(directory: Path) -> str:
    """Return the SHA-256 over the names and contents of a model's files."""
    files = {file for pattern in _PATTERNS for file in directory.glob(pattern)}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(directory)} {sha256_of_file(file)}\n".encode())
    return digest.hexdigest()
