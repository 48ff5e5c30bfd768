"""Outputs: nothing of others is deleted, nothing is written by halves."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from causal_qwen.outputs import (
    check_not_inside,
    check_output_directory,
    foreign_files,
    lock,
    new_directory,
    whole_file,
)


def write(
    output: Path,
    overwrite: bool = False,
    text: str = "new",
    meanwhile: Callable[[], object] = lambda: None,
) -> None:
    with new_directory(output, overwrite) as directory:
        meanwhile()
        (directory / "config.json").write_text(text)
        (directory / "model").mkdir()
        (directory / "model" / "model.safetensors").write_bytes(b"12345")
        (directory / "model" / "model.safetensors").chmod(0o600)  # as safetensors does


def fail() -> None:
    raise RuntimeError("the work fails")


def names(directory: Path) -> list[str]:
    found = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(found)


# ---------------------------------------------------------------- directories


def test_a_directory_is_written_whole_with_the_modes_of_the_umask(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "out")
    assert names(tmp_path) == ["deep/out/config.json", "deep/out/model/model.safetensors"]
    umask = os.umask(0)
    os.umask(umask)
    weights = tmp_path / "deep/out/model/model.safetensors"
    assert stat.S_IMODE(weights.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("overwrite", [False, True])
def test_work_that_fails_leaves_what_was_there(overwrite: bool, tmp_path: Path) -> None:
    output = tmp_path / "out"
    if overwrite:
        write(output, text="old")
    with pytest.raises(RuntimeError, match="the work fails"):
        write(output, overwrite, meanwhile=fail)
    assert names(tmp_path) == (
        ["out/config.json", "out/model/model.safetensors"] if overwrite else []
    )
    if overwrite:
        assert (output / "config.json").read_text() == "old"


def test_overwriting_replaces_only_what_was_written(tmp_path: Path) -> None:
    output = tmp_path / "out"
    write(output, text="old")
    with pytest.raises(FileExistsError, match="not empty"):
        write(output)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"did not write: notes\.txt; move"):
        write(output, overwrite=True)
    (output / "notes.txt").unlink()
    write(output, overwrite=True)
    assert (output / "config.json").read_text() == "new"
    assert names(tmp_path) == ["out/config.json", "out/model/model.safetensors"]


def test_links_inside_the_output_belong_to_others(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out" / "report").symlink_to(tmp_path / "elsewhere")
    assert foreign_files(tmp_path / "out") == ["report"]


def test_a_link_to_a_directory_is_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real" / "config.json").read_text() == "new"


def test_a_file_that_appears_during_the_work_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"

    def appear() -> None:
        output.mkdir()
        (output / "precious.txt").write_text("mine")

    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="out"):
            write(output, overwrite, meanwhile=appear)
        assert names(tmp_path) == ["out/precious.txt"]
        (output / "precious.txt").unlink()
        output.rmdir()


def test_many_writers_at_once_leave_one_whole_directory(tmp_path: Path) -> None:
    output, refused = tmp_path / "out", list[str]()
    together = threading.Barrier(4)

    def work() -> None:
        try:
            write(output, meanwhile=together.wait)
        except OSError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 3
    assert names(tmp_path) == ["out/config.json", "out/model/model.safetensors"]


def test_impossible_outputs_are_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(NotADirectoryError, match="file is a file"):
        check_output_directory(tmp_path / "file", True)
    write(tmp_path / "out")
    monkeypatch.chdir(tmp_path / "out" / "model")
    with pytest.raises(ValueError, match="contains the working directory"):
        check_output_directory(tmp_path / "out", True)
    with pytest.raises(ValueError, match="which is read"):
        check_not_inside(tmp_path, tmp_path / "file")


def test_a_directory_has_one_writer_at_a_time(tmp_path: Path) -> None:
    second = lock(tmp_path / "run")
    with lock(tmp_path / "run"), pytest.raises(BlockingIOError, match="another process"), second:
        pass
    with lock(tmp_path / "run"):
        pass


# ---------------------------------------------------------------- files


def test_a_failure_keeps_the_old_file_and_leaves_no_other(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old")
    with pytest.raises(RuntimeError), whole_file(file):
        fail()
    assert [one.name for one in tmp_path.iterdir()] == ["file"]
    assert file.read_text() == "old"
    with pytest.raises(FileExistsError, match="exists; choose another"), whole_file(file, False):
        pass


def test_a_link_stays_a_link_and_a_device_a_device(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    for place in (tmp_path / "link", Path("/dev/null")):
        with whole_file(place) as partial:
            partial.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert Path("/dev/null").is_char_device()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="is a directory"), whole_file(tmp_path):
        pass
    missing = tmp_path / "missing" / "file"
    with pytest.raises(OSError, match=f"{missing} cannot be written"), whole_file(missing):
        pass
    with (
        pytest.raises(OSError, match="/dev/full cannot be written"),
        whole_file("/dev/full") as full,
    ):
        full.write_text("x" * 10_000)
