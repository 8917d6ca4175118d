"""The verbs import and export."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bertsmith.bundle import HeadConfig, load, load_fine_tuned
from bertsmith.interop.tensorflow.writing import write_checkpoint
from bertsmith.model.packed import pack_sequences
from tests.interop.conftest import DATA, write_config_and_vocab
from tests.interop.data import checkpoints

Run = Callable[..., Any]


def test_out_and_in_again(run: Run, model: Path, tmp_path: Path) -> None:
    """A model goes out to TensorFlow's form and comes back the same; each verb says what it did."""
    done = run("export", model, "--to", "tensorflow", "--out", tmp_path / "release")
    assert done.status == 0, done.err
    assert done.out == ""
    assert "note: the original's code takes accents off" in done.err
    assert f"next: bertsmith import {tmp_path / 'release'}" in done.err
    done = run("import", tmp_path / "release", "--out", tmp_path / "back", "--json")
    assert done.status == 0, done.err
    found = json.loads(done.out)
    assert found["new"] == found["left"] == []
    assert found["out"] == str(tmp_path / "back")
    assert "read a TensorFlow checkpoint of the V2 form" in done.err
    state = load(model).model.state_dict()
    for name, weight in load(tmp_path / "back").model.state_dict().items():
        assert torch.equal(weight, state[name]), name
    # What import advises exists, and neither verb writes over anything.
    assert run("inspect", tmp_path / "back").status == 0
    for again in (["import", tmp_path / "release"], ["export", model, "--to", "tensorflow"]):
        done = run(*again, "--out", tmp_path / "back")
        assert done.status == 2
        assert "something is there already" in done.err


def test_import_tells_what_it_left_and_assumed(run: Run, tmp_path: Path) -> None:
    """Optimizer tensors, new heads and the case are told; --cased and --files-from are heard."""
    files = write_config_and_vocab(tmp_path / "uncased")
    source = DATA / "v2" / "bert_model.ckpt"
    done = run("import", source, "--files-from", files, "--out", tmp_path / "a", "--cased")
    assert done.status == 0, done.err
    assert "left, of the optimizer and the training: 93 tensors" in done.err
    assert "left as it is (cased): the case is the one that was asked for" in done.err
    assert not load(tmp_path / "a").tokenizer.lowercase
    done = run("import", DATA / "official", "--files-from", files, "--out", tmp_path / "b")
    assert "new, drawn at random: mlm.transform.weight" in done.err
    assert "the folder's name, which says 'uncased'" in done.err
    done = run("import", source, "--out", tmp_path / "c")
    assert done.status == 2
    assert "--files-from names the folder" in done.err
    assert not (tmp_path / "c").exists()


def test_a_fine_tuned_checkpoint_becomes_a_fine_tuned_model(run: Run, tmp_path: Path) -> None:
    """A classifier of the original's code is imported with its output layer, and answers by it."""
    values = {
        name: array for name, array in checkpoints.make_variables().items() if "cls/" not in name
    }
    values["output_weights"] = np.ones((3, checkpoints.WIDTH), dtype=np.float32)
    values["output_bias"] = np.array([0, 5, 0], dtype=np.float32)
    folder = write_config_and_vocab(tmp_path / "uncased")
    write_checkpoint(folder / "model.ckpt-17", values.items())
    done = run("import", folder, "--out", tmp_path / "model")
    assert done.status == 0, done.err
    tuned = load_fine_tuned(tmp_path / "model")
    assert tuned.head == HeadConfig("single", ("LABEL_0", "LABEL_1", "LABEL_2"))
    with torch.no_grad():
        assert tuned.model(pack_sequences([([2, 7, 3], [0, 0, 0])])).argmax(-1).tolist() == [1]


def test_an_unknown_form_is_refused(run: Run, model: Path, tmp_path: Path) -> None:
    """--to with another word names the forms that there are."""
    done = run("export", model, "--to", "caffe", "--out", tmp_path / "out")
    assert done.status == 2
    assert "--to caffe: expected one of hf, sentence-transformers, tensorflow, onnx" in done.err


def test_every_form_is_written_with_its_own_options(run: Run, model: Path, tmp_path: Path) -> None:
    """Each names what it wrote and what comes next; an option of another form is refused."""
    wrote = {
        "hf": ([], "model.safetensors"),
        "sentence-transformers": (["--pooling", "cls", "--no-normalize"], "modules.json"),
        "onnx": (["--int8"], "model_quantized.onnx"),
    }
    for form, (options, file) in wrote.items():
        done = run("export", model, "--to", form, "--out", tmp_path / form, *options)
        assert done.status == 0, done.err
        assert "next: " in done.err
        assert (tmp_path / form / file).is_file(), list((tmp_path / form).iterdir())
    pooling = json.loads((tmp_path / "sentence-transformers/1_Pooling/config.json").read_text())
    assert pooling["pooling_mode_cls_token"] is True
    assert run("compare", model, tmp_path / "hf").status == 0
    done = run("import", tmp_path / "hf", "--out", tmp_path / "again")
    assert done.status == 0, done.err
    assert run("compare", model, tmp_path / "again").status == 0
    done = run("export", model, "--to", "hf", "--int8", "--out", tmp_path / "x")
    assert done.status == 2
    assert "--int8: the form hf has no such option" in done.err
