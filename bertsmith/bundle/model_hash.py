"""Tell whether a model directory is still the one that it was: a hash over what makes the model.

It never understands what it hashes.
"""

import hashlib
from pathlib import Path
from typing import Final

from bertsmith.files import sha256_of_file

#: Weights, config, tokenizer, and what sentence-transformers keep in folders; no README.
_FILES: Final = (
    "*.json", "*/config.json", "vocab.txt", "model*.safetensors", "*/model.safetensors",
    "pytorch_model*.bin",
)  # fmt: skip


def hash_model_files(directory: Path) -> str:
    """Return the SHA-256 over the names and the bytes of a model's files."""
    files = {file for pattern in _FILES for file in directory.glob(pattern)}
    whole = hashlib.sha256()
    for file in sorted(files):
        whole.update(f"{file.relative_to(directory)} {sha256_of_file(file)}\n".encode())
    return whole.hexdigest()
