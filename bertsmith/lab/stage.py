"""A stage of an experiment: what is to be made of what, and the hash by which it is found again.

It never makes anything: that is ``making``'s.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from bertsmith.compatibility import downgrade_settings
from bertsmith.files import sha256_of_file

#: Characters of a stage's hash: 48 bits tell some thousand stages apart.
_LENGTH = 12
#: Of each kind, how often what it makes of the same settings has changed: raised by hand when
#: defaults or code change what comes out, so that older results are not taken for today's.
KIND_VERSIONS: dict[str, int] = {"senses": 2, "softmax": 2}
#: The same of runs by a setting of their model: pre-norm has a LayerNorm after the embeddings now.
_MODEL_FORMS: dict[tuple[str, str], int] = {("norm", "pre"): 2}


@dataclass(frozen=True)
class Stage:
    """One thing that an experiment makes: a vocabulary, a store, a run, a measurement.

    kind: which of ``making.KINDS`` makes it. settings: plain values that decide what comes out.
    dependencies: stages whose outcome it reads, by the part they play. files: what it reads from outside;
    their content counts, not their place.
    """

    kind: str
    settings: Mapping[str, Any]
    dependencies: Mapping[str, "Stage"] = field(default_factory=dict)
    files: Mapping[str, Path] = field(default_factory=dict)

    @cached_property
    def key(self) -> str:
        """The hash of all that decides the outcome: equal keys are the same stage."""
        content: dict[str, Any] = {
            "kind": self.kind,
            "settings": downgrade_settings(self.settings),
            "needs": {part: stage.key for part, stage in self.dependencies.items()},
            "files": {part: content_hash(path) for part, path in self.files.items()},
        }
        if (form := self._form()) is not None:
            content["form"] = form
        text = json.dumps(content, sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:_LENGTH]

    def _form(self) -> int | None:
        if self.kind == "pretrain":
            model = self.settings.get("model", {})
            return next((form for (name, value), form in _MODEL_FORMS.items()
                         if model.get(name) == value), None)  # fmt: skip
        return KIND_VERSIONS.get(self.kind)

    @property
    def name(self) -> str:
        """The name of its folder and of its result's file."""
        return f"{self.kind}-{self.key}"


def content_hash(path: Path) -> str:
    """Return the hash of a file's bytes, or of the names and bytes of all files in a folder."""
    if not path.is_dir():
        return _hash(path)
    whole = hashlib.sha256()
    for file in sorted(own for own in path.rglob("*") if own.is_file()):
        whole.update(f"{file.relative_to(path)} {_hash(file)}\n".encode())
    return whole.hexdigest()


def _hash(path: Path) -> str:
    facts = path.stat()
    return _remembered(path, (facts.st_size, facts.st_mtime_ns))


@cache
def _remembered(path: Path, facts: tuple[int, int]) -> str:  # noqa: ARG001 - of the memory's key
    """Hash a file once, however many stages read it, as long as it is the same one."""
    return sha256_of_file(path)
