"""A file is written completely or not at all."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from causal_qwen.outputs import whole_file, write_text


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_a_new_file_has_the_permissions_of_the_umask(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        with whole_file(tmp_path / "new") as partial:
            partial.write_text("words")
    finally:
        os.umask(before)
    assert (tmp_path / "new").stat().st_mode & 0o777 == mode
    assert (tmp_path / "new").read_text() == "words"


@pytest.mark.parametrize("error", [OSError("disk full"), KeyboardInterrupt(), ValueError("no")])
def test_a_failure_keeps_the_old_file_and_leaves_no_other(
    error: BaseException, tmp_path: Path
) -> None:
    (tmp_path / "old").write_text("precious")

    def fail() -> None:
        with whole_file(tmp_path / "old") as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(type(error)):
        fail()
    assert (tmp_path / "old").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_link_stays_a_link_to_the_new_content(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_a_device_is_written_and_not_replaced() -> None:
    with whole_file(os.devnull) as partial:
        assert partial == Path(os.devnull)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device of Linux")
def test_a_full_device_is_named() -> None:
    with (
        pytest.raises(OSError, match=r"/dev/full cannot be written: No space left"),
        whole_file("/dev/full") as partial,
        partial.open("wb") as file,
    ):
        file.write(b"words")


def test_a_name_of_the_greatest_length_is_written(tmp_path: Path) -> None:
    with whole_file(tmp_path / ("n" * 255)) as partial:
        partial.write_text("words")
    assert (tmp_path / ("n" * 255)).read_text() == "words"


def test_a_directory_or_a_place_in_none_is_refused_by_name(tmp_path: Path) -> None:
    with (
        pytest.raises(IsADirectoryError, match="is a directory; name a file"),
        whole_file(tmp_path),
    ):
        pass
    gone = tmp_path / "gone" / "new"
    with pytest.raises(OSError, match=f"{gone} cannot be written: No such file"), whole_file(gone):
        pass


def test_what_a_killed_process_left_is_removed_by_a_later_save(tmp_path: Path) -> None:
    stale, fresh = tmp_path / ".causal-qwen-0123", tmp_path / ".causal-qwen-4567"
    for file in (stale, fresh):
        file.write_text("a part")
    old = time.time() - 2 * 3600
    os.utime(stale, (old, old))
    write_text(tmp_path / "one", "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"one", fresh.name}  # another one's work
