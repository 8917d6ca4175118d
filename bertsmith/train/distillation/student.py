"""The student at the start of a run: weights from layers of the teacher, or random weights."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import torch
from torch import nn

from bertsmith.errors import ModelError
from bertsmith.text.wordpiece import Tokenizer

#: A layer's number in the name of a parameter.
_LAYER: Final = re.compile(r"\bencoder\.layers\.(\d+)\.")


@torch.no_grad()
def copy_teacher_weights(
    student: nn.Module, teacher: nn.Module, student_layers: Sequence[int]
) -> None:
    """Copy the teacher's weights to the parameters and buffers of the student with the same names.

    Weights that the teacher does not have, or has in another shape, stay unchanged.

    Args:
        student: The student.
        teacher: The teacher.
        student_layers: The layer of the teacher, from 1, for each layer of the student.
    """
    teacher_weights = teacher.state_dict()

    def rename(match: re.Match[str]) -> str:
        return f"encoder.layers.{student_layers[int(match[1])] - 1}."

    for name, weight in student.state_dict().items():
        source = teacher_weights.get(_LAYER.sub(rename, name))
        if source is not None and source.shape == weight.shape:
            weight.copy_(source)


def check_same_tokenizer(teacher: Tokenizer, student: Tokenizer, path: Path) -> None:
    """Raise ModelError unless teacher and student split texts into the same tokens.

    Args:
        teacher: The teacher's tokenizer.
        student: The student's tokenizer.
        path: The student's model directory.
    """
    if teacher.hash != student.hash:
        raise ModelError(
            f"{path}: the student's tokenizer ({student.vocab_size:,} tokens) differs from the "
            f"teacher's ({teacher.vocab_size:,} tokens); start from a model with the teacher's "
            "tokenizer, or use --layers or --size"
        )
