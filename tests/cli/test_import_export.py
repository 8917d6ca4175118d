"""The commands ``import`` and ``export``."""

import json
from pathlib import Path

import numpy as np
import torch

from bertsmith.bundle import HeadConfig, load, load_fine_tuned
from bertsmith.interop.tensorflow.writing import write_checkpoint
from bertsmith.model.packed import pack_sequences
from tests.cli.conftest import SENTENCES, RunCli
from tests.interop.conftest import DATA, write_config_and_vocab
from tests.interop.data import checkpoints


def test_tensorflow_export_can_be_imported(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """A model exported to TensorFlow and imported again has the same weights."""
    completed = run_cli("export", model, "--to", "tensorflow", "--out", tmp_path / "release")
    assert completed.status == 0, completed.err
    assert completed.out == ""
    assert "note: " in completed.err
    assert f"next: bertsmith import {tmp_path / 'release'}" in completed.err
    completed = run_cli("import", tmp_path / "release", "--out", tmp_path / "imported", "--json")
    assert completed.status == 0, completed.err
    report = json.loads(completed.out)
    assert report["newly_initialized"] == report["unused"] == []
    assert report["out"] == str(tmp_path / "imported")
    assert "read a TensorFlow checkpoint" in completed.err
    weights = load(model).model.state_dict()
    for name, weight in load(tmp_path / "imported").model.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    assert run_cli("inspect", tmp_path / "imported").status == 0
    for command in (["import", tmp_path / "release"], ["export", model, "--to", "tensorflow"]):
        rejected = run_cli(*command, "--out", tmp_path / "imported")
        assert rejected.status == 2
        assert "already exists" in rejected.err


def test_import_reports_unused_weights_and_casing(run_cli: RunCli, tmp_path: Path) -> None:
    """Unused and newly initialized weights and the casing are logged; --cased sets the casing."""
    files = write_config_and_vocab(tmp_path / "uncased")
    source = DATA / "v2" / "bert_model.ckpt"
    completed = run_cli("import", source, "--files-from", files, "--out", tmp_path / "a", "--cased")
    assert completed.status == 0, completed.err
    assert "not used: 93 tensors of the optimizer and the training" in completed.err
    assert "(cased)" in completed.err
    assert not load(tmp_path / "a").tokenizer.lowercase
    completed = run_cli("import", DATA / "official", "--files-from", files, "--out", tmp_path / "b")
    assert "newly initialized: mlm.transform.weight" in completed.err
    assert "'uncased'" in completed.err
    for command in (["fill", tmp_path / "b", "[MASK]"], ["pair", tmp_path / "b", "a", "b"]):
        completed = run_cli(*command)
        assert (completed.status, "this model has no" in completed.err) == (2, True), completed.err
    completed = run_cli("import", source, "--out", tmp_path / "c")
    assert completed.status == 2
    assert "--files-from" in completed.err
    assert not (tmp_path / "c").exists()


def test_fine_tuned_checkpoint_keeps_its_output_layer(run_cli: RunCli, tmp_path: Path) -> None:
    """A classifier of the original code is imported with its output layer."""
    values = {
        name: array for name, array in checkpoints.make_variables().items() if "cls/" not in name
    }
    values["output_weights"] = np.ones((3, checkpoints.WIDTH), dtype=np.float32)
    values["output_bias"] = np.array([0, 5, 0], dtype=np.float32)
    folder = write_config_and_vocab(tmp_path / "uncased")
    write_checkpoint(folder / "model.ckpt-17", values.items())
    completed = run_cli("import", folder, "--out", tmp_path / "model")
    assert completed.status == 0, completed.err
    bundle = load_fine_tuned(tmp_path / "model")
    assert bundle.head == HeadConfig("single", ("LABEL_0", "LABEL_1", "LABEL_2"))
    with torch.no_grad():
        logits = bundle.model(pack_sequences([([2, 7, 3], [0, 0, 0])]))
    assert logits.argmax(-1).tolist() == [1]


def test_unknown_export_format_is_an_error(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """The error lists the valid formats."""
    completed = run_cli("export", model, "--to", "caffe", "--out", tmp_path / "out")
    assert completed.status == 2
    assert (
        "--to caffe: expected one of hf, sentence-transformers, tensorflow, onnx, openvino, static"
        in completed.err
    )


def test_export_formats_and_their_options(run_cli: RunCli, model: Path, tmp_path: Path) -> None:
    """Each format is written with its options; an option of another format is an error."""
    text = tmp_path / "text.txt"
    text.write_text("\n".join(SENTENCES))
    options_and_file: dict[str, tuple[list[object], str]] = {
        "hf": ([], "model.safetensors"),
        "sentence-transformers": (["--pooling", "cls", "--no-normalize"], "modules.json"),
        "onnx": (["--int8"], "model_quantized.onnx"),
        "static": (["--dims", "9", "--frequencies", text], "model.safetensors"),
    }
    for name, (options, file) in options_and_file.items():
        completed = run_cli("export", model, "--to", name, "--out", tmp_path / name, *options)
        assert completed.status == 0, completed.err
        assert "next: " in completed.err
        assert (tmp_path / name / file).is_file(), list((tmp_path / name).iterdir())
    pooling = json.loads((tmp_path / "sentence-transformers/1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_cls_token"] is True
    assert json.loads((tmp_path / "static/config.json").read_text())["hidden_dim"] == 9
    assert run_cli("compare", model, tmp_path / "hf").status == 0
    completed = run_cli("import", tmp_path / "hf", "--out", tmp_path / "imported")
    assert completed.status == 0, completed.err
    assert run_cli("compare", model, tmp_path / "imported").status == 0
    # A run directory, and a run that is not finished.
    (tmp_path / "run").mkdir()
    (tmp_path / "hf").rename(tmp_path / "run/model")
    completed = run_cli("import", tmp_path / "run", "--out", tmp_path / "from_run")
    assert completed.status == 0, completed.err
    assert run_cli("compare", model, tmp_path / "from_run").status == 0
    (tmp_path / "new/checkpoints/step-1").mkdir(parents=True)
    (tmp_path / "new/settings.toml").touch()
    completed = run_cli("import", tmp_path / "new", "--out", tmp_path / "x")
    assert "this run has not written its model yet" in completed.err
    completed = run_cli("export", model, "--to", "hf", "--int8", "--out", tmp_path / "x")
    assert completed.status == 2
    assert "--int8: not an option of the format hf" in completed.err
