"""The models in models/, each of which is tested: size, files, and agreement with transformers."""

import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForMaskedLM, AutoTokenizer

from bertsmith.bundle import load
from bertsmith.bundle.directory import REFERENCE_MODELS, format_model_path, pin_model_path
from bertsmith.cli.model_options import REFERENCE_MODEL
from bertsmith.model.packed import pack_sequences
from bertsmith.use.fill import fill

ROOT = Path(__file__).resolve().parents[2]
MODELS = sorted(path.parent for path in (ROOT / "models").glob("*/config.json"))
MAX_BYTES = 16_000_000
#: Files of a released model besides those of a model directory.
RECORD_FILES = ("README.md", "settings.toml", "training.json", "curve.png")
TEXTS = (
    "The capital of France is [MASK].",
    "She was born in 1850 and [MASK] in 1921, in a small town near the river.",
    "서울은 대한민국의 [MASK]이다.",
    "[MASK]",
)

parametrize_models = pytest.mark.parametrize("path", MODELS, ids=lambda path: path.name)


def test_the_default_model_is_shipped() -> None:
    """models/ contains the model that serve and the demo use, and the package finds it there."""
    assert REFERENCE_MODEL in [path.name for path in MODELS]
    assert (REFERENCE_MODELS / REFERENCE_MODEL).resolve() == ROOT / "models" / REFERENCE_MODEL


def test_messages_call_a_model_as_users_do() -> None:
    """A reference model and a hub model have their names in messages; other models their paths."""
    cached = Path("/cache/models--a--b/snapshots/0123")
    assert format_model_path(pin_model_path(REFERENCE_MODEL)) == REFERENCE_MODEL
    assert format_model_path(cached) == "a/b"
    assert format_model_path(Path.cwd() / "my-run" / "model") == "my-run/model"
    assert format_model_path(Path("/elsewhere/model")) == "/elsewhere/model"


@parametrize_models
def test_a_model_is_small_and_has_its_record(path: Path) -> None:
    """A model needs at most 16 MB, and has a card with license, settings, evaluations and curve."""
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) <= MAX_BYTES
    assert all((path / name).is_file() for name in RECORD_FILES)
    card = (path / "README.md").read_text(encoding="utf-8")
    assert re.search(r'^license: "', card, re.MULTILINE)
    notes = path.with_suffix(".md").read_text(encoding="utf-8")
    assert notes.partition("\n## ")[2] in card
    assert json.loads((path / "training.json").read_text())["evaluations"]
    text_files = [*path.glob("*.md"), *path.glob("*.toml"), path / "bertsmith.json",
                  *path.glob("results/*")]  # fmt: skip
    for file in text_files:
        assert not re.search(r"[\"'`( ]/\w+/", file.read_text(encoding="utf-8")), file


@parametrize_models
def test_a_model_has_the_same_logits_in_transformers(path: Path) -> None:
    """Weights, tokens and logits are the same in transformers.

    In double precision, because rounding in single precision depends on the CPU.
    """
    bundle = load(path)
    assert not bundle.new_weights
    assert not bundle.unused_weights
    tokenizer = AutoTokenizer.from_pretrained(path)
    reference, report = AutoModelForMaskedLM.from_pretrained(path, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    reference.double()
    bundle.model.double()
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        body = bundle.tokenizer.encode(text, allow_special=True)
        assert [bundle.tokenizer.cls_id, *body, bundle.tokenizer.sep_id] == ids
        with torch.no_grad():
            expected = reference(input_ids=torch.tensor([ids])).logits[0]
            hidden = bundle.model.bert(pack_sequences([(ids, [0] * len(ids))]))
            logits = bundle.model.mlm(hidden)
        torch.testing.assert_close(logits, expected, rtol=0, atol=1e-9)


@parametrize_models
def test_a_model_fills_masks_by_name_from_any_folder(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of a shipped model can be used in any folder, offline."""
    monkeypatch.chdir(tmp_path)
    assert fill(path.name, TEXTS[0]) == fill(path, TEXTS[0])
