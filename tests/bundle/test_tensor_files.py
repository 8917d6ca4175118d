"""Writing of tensor files: permissions and full disks."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from bertsmith.bundle import save_tensors, tensor_files
from bertsmith.errors import ModelError
from bertsmith.files import atomic_directory


@pytest.mark.parametrize("umask", [0o022, 0o027, 0o077])
def test_tensor_files_follow_the_umask(tmp_path: Path, umask: int) -> None:
    """A tensor file has the permissions that the umask gives new files, not 0600."""
    old_umask = os.umask(umask)
    try:
        save_tensors({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    finally:
        os.umask(old_umask)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert load_file(tmp_path / "model.safetensors")["a"].tolist() == [1, 1, 1]


def test_full_disk_raises_os_error_with_file_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk raises an OSError that names the final directory and leaves no files."""

    def fail(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(tensor_files, "save_file", fail)
    with (
        pytest.raises(OSError, match="No space left") as caught,
        atomic_directory(tmp_path / "model") as directory,
    ):
        save_tensors({"a": torch.ones(3)}, directory / "model.safetensors")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_tensor_that_is_not_dense_is_named_as_such(tmp_path: Path) -> None:
    """A sparse tensor is an error that does not speak of its size."""
    path = tmp_path / "pytorch_model.bin"
    with pytest.raises(ModelError, match="tensor a is sparse, quantized or without data"):
        tensor_files._check_storage_sizes(path, {"a": torch.eye(3).to_sparse()})
    with pytest.raises(ModelError, match="tensor a is larger than its data"):
        tensor_files._check_storage_sizes(path, {"a": torch.ones(1).expand(5)})
