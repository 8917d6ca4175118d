"""Settings of a distillation run that are read from the settings.toml of another run."""

from pathlib import Path
from typing import Any

import pytest
import tomli_w
import torch

from bertsmith import bundle
from bertsmith.model.bert import BertForPreTraining
from bertsmith.train.distillation.settings import choose_layers, read_overrides
from tests.model.examples import make_prime_size_config
from tests.train.conftest import make_tokenizer

#: Student of a relations run with a teacher of 6 layers of width 32 and 97 positions.
STORED: dict[str, Any] = {
    "objective": "relations", "student_layers": choose_layers(6, 3), "teacher_layer": 6,
    "relation_heads": 32, "max_seqlen": 97, "batch_size": 32,
}  # fmt: skip


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with 6 layers, width 32 and 97 positions."""
    tokenizer = make_tokenizer()
    config = make_prime_size_config(
        vocab_size=tokenizer.vocab_size, layers=6, width=32, heads=2, max_positions=97
    )
    directory = tmp_path_factory.mktemp("teacher") / "model"
    with torch.no_grad():
        bundle.save(directory, BertForPreTraining(config), tokenizer, {})
    return directory


@pytest.mark.parametrize(
    ("changes", "user_values", "has_start_model", "expected"),
    [
        ({}, {}, False, {"layers": 3}),
        ({}, {"layers": 2}, False, {"layers": 2}),
        ({}, {"student_layers": [1, 6]}, False, {"student_layers": [1, 6]}),
        ({}, {"size": "tiny"}, False, {"size": "tiny"}),
        ({}, {}, True, {}),
        ({"student_layers": [1, 2]}, {}, False, {"student_layers": [1, 2]}),
        ({"teacher_layer": 5, "relation_heads": 16, "max_seqlen": 64, "batch_size": 8}, {}, False,
         {"layers": 3, "teacher_layer": 5, "relation_heads": 16, "max_seqlen": 64,
          "batch_size": 8}),
    ],
    ids=["same", "layers", "student_layers", "size", "from", "other layers", "no defaults"],
)  # fmt: skip
def test_defaults_of_another_run_are_replaced(
    teacher: Path,
    tmp_path: Path,
    changes: dict[str, Any],
    user_values: dict[str, Any],
    has_start_model: bool,
    expected: dict[str, Any],
) -> None:
    """A settings.toml has no defaults that its teacher determined, and the user's student wins."""
    config = tmp_path / "settings.toml"
    stored = STORED | changes | {"teacher": str(teacher), "fingerprint": "1a2b"}
    model = {"width": 32, "max_positions": 97}
    config.write_text(tomli_w.dumps({"model": model, "optim": {"lr": 1e-4}, "distill": stored}))
    overrides = read_overrides(
        config, {"distill": user_values}, (), has_start_model=has_start_model
    )
    del overrides["distill"]["teacher"]
    assert overrides["distill"] == {"objective": "relations", **expected}
    assert overrides["optim"] == {}


def test_values_of_a_missing_teacher_stay(tmp_path: Path) -> None:
    """If the teacher of the run no longer exists, the values that depend on it stay."""
    config = tmp_path / "settings.toml"
    stored = STORED | {"teacher": str(tmp_path / "missing"), "fingerprint": "1a2b"}
    config.write_text(tomli_w.dumps({"distill": stored}))
    distill = read_overrides(config, {}, (), has_start_model=False)["distill"]
    assert distill["student_layers"] == STORED["student_layers"]
    assert distill["teacher_layer"] == 6
