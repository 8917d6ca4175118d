"""A stage of an experiment, identified by a hash of everything that determines its result."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from bertsmith.compatibility.lab import downgrade_stage_key
from bertsmith.files import compute_file_sha256

#: Hexadecimal digits of a stage's key: 48 bits, so collisions of thousands of stages are unlikely.
_KEY_LENGTH = 12
#: Version of each kind of stage, 1 if not listed. Increase the version if changed code or defaults
#: give other results for the same settings, so that older results are not reused.
KIND_VERSIONS: dict[str, int] = {"word-senses": 2, "softmax": 2}
#: How often each initialization of models was changed; 0 if not listed.
_INITIALIZATION_CHANGES: dict[str, int] = {"match-heads": 1, "cross-segment-heads": 1}


@dataclass(frozen=True)
class Stage:
    """One computation of an experiment: a vocabulary, a store, a training run or a measurement.

    Attributes:
        kind: What the stage computes, such as "pretrain": a key of
            ``stage_runners.STAGE_FUNCTIONS`` or of ``Experiment.stage_functions``.
        settings: The settings of the computation, as JSON values.
        dependencies: The stages whose outputs this stage reads, by their role.
        files: The files or directories that the stage reads, by their role. Their contents are
            part of the key, their paths are not.
        hashes: Hashes by role, for directories of which only some files determine the result. The
            key contains them instead of hashes of all files.
    """

    kind: str
    settings: Mapping[str, Any]
    dependencies: Mapping[str, "Stage"] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)
    hashes: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """The hash of everything that determines the result."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "settings": self.settings,
            "dependencies": {role: stage.key for role, stage in self.dependencies.items()},
            "files": {
                role: self.hashes.get(role) or hash_content(path)
                for role, path in self.files.items()
            },
        }
        if (version := self._version()) is not None:
            content["version"] = version
        # Renaming a setting must not change the key, so that older results are still found.
        text = json.dumps(downgrade_stage_key(content), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:_KEY_LENGTH]

    def _version(self) -> int | None:
        """Return the version of the stage's kind or settings; None for the first version."""
        run, model = self.settings.get("run", {}), self.settings.get("model", {})
        initialization = run.get("initialization", self.settings.get("initialization"))
        version = KIND_VERSIONS.get(self.kind, 1) + _INITIALIZATION_CHANGES.get(initialization, 0)
        if self.kind == "pretrain" and model.get("norm") == "pre":
            # In the first version, pre-norm models had no LayerNorm after the embeddings.
            version += 1
        return version if version > 1 else None

    @property
    def name(self) -> str:
        """The name of the stage's directory and record, such as "pretrain-0123456789ab"."""
        return f"{self.kind}-{self.key}"


def hash_content(path: Path) -> str:
    """Return the SHA-256 of a file, or of all file names and contents of a directory."""
    if not path.is_dir():
        return _hash_file(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)} {_hash_file(file)}\n".encode())
    return digest.hexdigest()


def _hash_file(path: Path) -> str:
    """Return the SHA-256 of a file, computed once unless its size or modification time changes."""
    status = path.stat()
    return _hash_cached(path, (status.st_size, status.st_mtime_ns))


@cache
def _hash_cached(path: Path, size_and_time: tuple[int, int]) -> str:  # noqa: ARG001 - cache key
    """Return the SHA-256 of a file; the second argument distinguishes versions in the cache."""
    return compute_file_sha256(path)
