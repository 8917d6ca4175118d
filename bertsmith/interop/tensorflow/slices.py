"""TensorFlow's V1 checkpoints: one file, a sorted table that holds names and values alike.

It never knows what a tensor is for, and never needs TensorFlow.
"""

import math
from collections.abc import Iterable
from pathlib import Path

from bertsmith.errors import ModelError
from bertsmith.interop.tensorflow.arrays import (
    FLOAT,
    Array,
    Part,
    decoded,
    joined,
    part_of,
    part_shape,
    shape_of,
)
from bertsmith.interop.tensorflow.table import blaming, entries
from bertsmith.interop.tensorflow.wire import messages, numbers, text


class TensorSlices:
    """A V1 checkpoint opened for reading: walked through and verified once, mapped, not loaded.

    ``shapes``: of each tensor by its name, in the order of the file.
    """

    def __init__(self, path: Path) -> None:
        """Read the file ``path``. Raises ModelError."""
        self.path = path
        self.form = "V1"
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._kinds: dict[str, int] = {}
        self._values: dict[str, list[tuple[Part, memoryview]]] = {}
        table = entries(path)
        with blaming(path):
            key, head = next(table, (b"?", memoryview(b"")))
            if key:
                raise ValueError("its first entry is no list of tensors")
            for said in [tensor for meta in messages(head, 1) for tensor in messages(meta, 1)]:
                name = text(said, 1)
                self.shapes[name] = shape_of((messages(said, 2) or [memoryview(b"")])[-1])
                self._kinds[name] = numbers(said).get(3, 0)
                self._values[name] = []
            for _, value in table:
                for one in messages(value, 2):
                    part, data = messages(one, 2), messages(one, 3)
                    if len(part) != 1 or len(data) != 1 or text(one, 1) not in self._values:
                        raise ValueError("an entry without part, data or name")
                    self._values[text(one, 1)].append((part_of(part[0]), data[0]))

    def check(self, names: Iterable[str]) -> None:
        """Raise ModelError unless the data of these tensors is there, as long as it should be."""
        for name in names:
            if self._kinds[name] != FLOAT:
                raise ModelError(
                    f"{self.path}: the tensor {name!r} is of type {self._kinds[name]}; "
                    "expected float32 (1), the type of the weights in a V1 checkpoint"
                )
            with blaming(self.path):
                sizes = [len(self._packed(data)) for _, data in self._values[name]]
                if sum(sizes) != 4 * math.prod(self.shapes[name]):
                    raise ValueError(
                        f"the tensor {name!r} of shape {self.shapes[name]} has {sum(sizes):,} bytes"
                    )

    def read(self, name: str) -> Array:
        """Return a tensor, float32, mapped where it can be, not copied. Raises ModelError."""
        self.check([name])
        shape = self.shapes[name]
        with blaming(self.path):
            parts = [
                (part, decoded(self._packed(data), FLOAT, part_shape(part, shape)))
                for part, data in self._values[name]
            ]
            return joined(shape, parts)

    @staticmethod
    def _packed(data: memoryview) -> memoryview:
        """Return the float32 values of a TensorProto, which lie one after another."""
        found = messages(data, 5)
        if len(found) != 1:
            raise ValueError("a tensor whose values do not lie in one piece")
        return found[0]
