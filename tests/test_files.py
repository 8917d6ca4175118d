"""Locks of files and directories, and directories that are written atomically or once."""

import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bertsmith.errors import InputError, StoreError
from bertsmith.files import (
    atomic_directory,
    atomic_file,
    check_new_directory,
    describe_missing_path,
    hold_lock,
    name_paths,
    write_directory_once,
)

HOLD_UNTIL_EOF = """
import sys
from pathlib import Path
from bertsmith.files import hold_lock

with hold_lock(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_names_of_paths_are_distinct() -> None:
    """A name has as many parts of the path as necessary; equal paths have the same name."""
    assert name_paths([Path("/x/a.csv"), Path("/x/b.csv")]) == ["a.csv", "b.csv"]
    paths = [Path("/x/12/a.csv"), Path("/x/13/a.csv"), Path("/x/12/a.csv")]
    assert name_paths(paths) == ["12/a.csv", "13/a.csv", "12/a.csv"]


def test_message_for_a_missing_path_helps_to_correct_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message has a missing folder, the most similar name, or the current folder.

    A name of a folder is suggested only if a folder is expected.
    """
    monkeypatch.chdir(tmp_path)
    Path("reviews.csv").touch()
    Path("titles").mkdir()
    Path("link.csv").symlink_to("removed.csv")
    current_folder = f"(the current folder is {tmp_path})"

    def describe(name: str, kind: str = "file") -> str:
        return describe_missing_path(Path(name), kind).removeprefix(f"{name}: no such {kind}; ")

    assert describe("revews.csv") == "did you mean reviews.csv?"
    assert describe("titels", "file or folder") == "did you mean titles?"
    assert describe("titels") == f"check the path {current_folder}"
    assert describe("x/reviews.csv") == f"there is no folder x {current_folder}"
    assert describe(f"{tmp_path}/titels") == "check the path"
    assert describe("link.csv") == "this link points to removed.csv, which does not exist"
    assert describe("a long text " * 30) == "check the path"
    shutil.rmtree(tmp_path)
    assert describe("reviews.csv") == "check the path"


@pytest.mark.parametrize("is_directory", [False, True])
def test_lock_is_held_by_one_process(tmp_path: Path, is_directory: bool) -> None:
    """While a process holds a lock, others fail with the given error, or wait until it exits."""
    path = tmp_path if is_directory else tmp_path / ".lock"
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_UNTIL_EOF, str(path)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    with pytest.raises(StoreError, match="in use"), hold_lock(path, error=StoreError("in use")):
        pytest.fail("the lock was acquired twice")
    with hold_lock(path, on_wait=process.stdin.close):
        assert process.wait(60) == 0
    process.stdout.close()


def test_directory_is_written_by_one_of_several_processes(tmp_path: Path) -> None:
    """Another process waits while the directory is written, and does not write it again."""
    path = tmp_path / "parent" / "directory"
    is_writing, may_finish = threading.Event(), threading.Event()

    def write_slowly(new: Path) -> None:
        is_writing.set()
        assert may_finish.wait(60)
        (new / "file.txt").write_text("first")

    def fail(_: Path) -> None:
        pytest.fail("the directory was written again")

    first = threading.Thread(target=write_directory_once, args=(path, write_slowly))
    first.start()
    assert is_writing.wait(60)
    second = threading.Thread(target=write_directory_once, args=(path, fail))
    second.start()
    second.join(0.1)
    assert second.is_alive()
    may_finish.set()
    first.join()
    second.join()
    assert (path / "file.txt").read_text() == "first"
    write_directory_once(path, fail)


def test_mount_points_are_rejected_as_new_directories(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, or a link to one, is rejected before hours of work; a folder in it is not."""
    mount = tmp_path.resolve() / "mount"
    mount.mkdir()
    (tmp_path / "link").symlink_to(mount)
    monkeypatch.setattr(Path, "is_mount", lambda path: path == mount)
    for name in ("mount", "link"):
        with pytest.raises(InputError, match=rf"a mount point.*such as .*/{name}/my-model"):
            check_new_directory(tmp_path / name)
    check_new_directory(tmp_path / "mount" / "my-model")


@pytest.mark.parametrize("exists", [True, False])
def test_directory_is_written_through_a_symbolic_link(tmp_path: Path, exists: bool) -> None:
    """The directory that a link refers to is written, and the link is kept."""
    target = tmp_path / "disk" / "model"
    if exists:
        target.mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(target)
    check_new_directory(link)
    with atomic_directory(link) as new:
        assert new.parent == target.parent.resolve()
        (new / "file.txt").write_text("text")
    assert link.is_symlink()
    assert (target / "file.txt").read_text() == "text"
    assert list(target.parent.iterdir()) == [target]


def test_error_names_the_requested_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the temporary directory cannot be made, the error names the requested directory."""
    make_directory = Path.mkdir

    def fail(path: Path, *args: Any, **options: Any) -> None:
        if path.name.startswith("."):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        make_directory(path, *args, **options)

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(PermissionError) as caught, atomic_directory(tmp_path / "model"):
        pytest.fail("the directory was made")
    assert caught.value.filename == str(tmp_path / "model")


def test_file_is_written_through_a_symbolic_link(tmp_path: Path) -> None:
    """The file that a link refers to is written, next to it, and the link is kept."""
    target = tmp_path / "disk" / "a.txt"
    target.parent.mkdir()
    target.write_text("old")
    link = tmp_path / "link.txt"
    link.symlink_to(target)
    with atomic_file(link) as new:
        assert new.parent == target.parent
        new.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"


def test_directory_is_restored_after_an_interrupted_replacement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between the two renames, or a kill and the same process id, lose nothing."""
    path = tmp_path / "model"
    path.mkdir()
    (path / "file.txt").write_text("old")
    replace = Path.replace

    def interrupt(source: Path, target: Path) -> Path:
        if source.name.endswith(".tmp"):
            raise KeyboardInterrupt
        return replace(source, target)

    monkeypatch.setattr(Path, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt), atomic_directory(path) as new:
        (new / "file.txt").write_text("new")
    assert (path / "file.txt").read_text() == "old"
    monkeypatch.undo()
    old = path.with_name(f".model.{os.getpid()}.old")
    path.replace(old)
    with pytest.raises(RuntimeError, match="failed"), atomic_directory(path):
        raise RuntimeError("failed")
    assert (path / "file.txt").read_text() == "old"
    shutil.copytree(path, old)
    with atomic_directory(path) as new:
        (new / "file.txt").write_text("new")
    assert (path / "file.txt").read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]
