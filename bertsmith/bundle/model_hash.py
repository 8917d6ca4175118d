"""A hash over the files that define a model, which detects changes to a model directory."""

import hashlib
from pathlib import Path
from typing import Final

from bertsmith.files import compute_file_sha256

#: Patterns for weights, configs and tokenizer files, also in the folders of sentence-transformers
#: models. README.md has no influence on the hash.
_PATTERNS: Final = (
    "*.json", "*/config.json", "vocab.txt", "model*.safetensors", "*/model.safetensors",
    "pytorch_model*.bin",
)  # fmt: skip


def hash_model_files(directory: Path) -> str:
    """Return the SHA-256 hash over the names and contents of a model's files, as hexadecimal."""
    files = {file for pattern in _PATTERNS for file in directory.glob(pattern)}
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(f"{file.relative_to(directory)} {compute_file_sha256(file)}\n".encode())
    return digest.hexdigest()
