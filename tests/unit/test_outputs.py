"""Output directories: nothing of others is deleted, nothing is written by halves."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

from causal_qwen import outputs
from causal_qwen.cli import doctor
from causal_qwen.outputs import (
    check_output_directory,
    damaged_files,
    foreign_files,
    new_directory,
    read_manifest,
    write_manifest,
)
from causal_qwen.paths import embedded_directory, is_converted

DAY = 86_400


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
        (directory / "model" / "weights.bin").write_bytes(b"12345")
        (directory / "model" / "weights.bin").chmod(0o600)  # as safetensors does


def files(directory: Path) -> dict[str, str]:
    return {
        path.relative_to(directory).as_posix(): path.read_text()
        for path in directory.rglob("*")
        if path.is_file()
    }


def copy(source: Path, target: Path) -> None:
    for name in files_of(source):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (target / name).write_bytes((source / name).read_bytes())


def files_of(directory: Path) -> list[str]:
    names = (p.relative_to(directory).as_posix() for p in directory.rglob("*") if p.is_file())
    return sorted(names)


# ---------------------------------------------------------------- deletion


@pytest.mark.parametrize("name", ["vscode", "*", "[a-z]*", "?scode"])
def test_old_hidden_directories_beside_the_output_are_never_deleted(
    tmp_path: Path, name: str
) -> None:
    for hidden in (".vscode-server", ".config-old", f".{name}-1"):
        (tmp_path / hidden).mkdir()
        (tmp_path / hidden / "precious").write_text("mine")
        os.utime(tmp_path / hidden, (time.time() - DAY, time.time() - DAY))
    before = files(tmp_path)
    write(tmp_path / name)
    after = files(tmp_path)
    assert after.items() >= before.items()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [".vscode-server", ".config-old", f".{name}-1", name]
    )


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    left = tmp_path / ".out.causal-qwen"
    (left / "new").mkdir(parents=True)
    (left / "new" / "half.bin").write_text("half")
    (left / outputs.LOCK).touch()
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert files_of(tmp_path / "out") == ["config.json", "manifest.json", "model/weights.bin"]


def test_an_interrupt_while_the_old_directory_is_deleted_leaves_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out", text="old")
    delete = shutil.rmtree

    def interrupt(directory: Path, **options: bool) -> None:
        if directory.name == "old":
            raise KeyboardInterrupt
        delete(directory, **options)

    monkeypatch.setattr(shutil, "rmtree", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", overwrite=True, text="new")
    monkeypatch.undo()
    assert files(tmp_path / "out")["config.json"] == "new"
    write(tmp_path / "out", overwrite=True, text="newer")
    assert files(tmp_path / "out")["config.json"] == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_mount_point_is_refused_before_the_work() -> None:
    """It cannot be renamed."""
    with pytest.raises(ValueError, match="/ is a mount point; name a directory in it"):
        check_output_directory("/", overwrite=True)


def test_a_directory_of_others_in_the_temporary_place_is_refused(tmp_path: Path) -> None:
    other = tmp_path / ".out.causal-qwen"
    (other / "new").mkdir(parents=True)
    (other / "new" / "precious").write_text("mine")
    with pytest.raises(FileExistsError, match=r"\.out\.causal-qwen was not made by this program"):
        write(tmp_path / "out")
    assert files(tmp_path) == {".out.causal-qwen/new/precious": "mine"}


def test_a_process_killed_while_overwriting_loses_nothing(tmp_path: Path) -> None:
    """It had moved the old directory away, and not yet the new one into its place."""
    write(tmp_path / "out", text="old")
    temporary = tmp_path / ".out.causal-qwen"
    temporary.mkdir()
    (temporary / outputs.LOCK).touch()
    (tmp_path / "out").rename(temporary / "old")
    with pytest.raises(FileExistsError, match="not empty"):
        write(tmp_path / "out")
    assert files(tmp_path / "out")["config.json"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------- two at once


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_file_that_appears_during_the_work_is_kept(tmp_path: Path, overwrite: bool) -> None:
    output = tmp_path / "out"
    if overwrite:
        write(output, text="old")
    before = files(output)

    def meanwhile() -> None:
        output.mkdir(exist_ok=True)
        (output / "precious.txt").write_text("mine")

    with pytest.raises(FileExistsError, match=r"has appeared|did not write: precious\.txt"):
        write(output, overwrite, meanwhile=meanwhile)
    assert files(output) == {**before, "precious.txt": "mine"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_with_the_name_of_the_output_that_appears_during_the_work_is_kept(
    tmp_path: Path,
) -> None:
    output = tmp_path / "out"
    with pytest.raises(FileExistsError, match="has appeared"):
        write(output, overwrite=True, meanwhile=lambda: output.write_text("mine"))
    assert files(tmp_path) == {"out": "mine"}


@pytest.mark.parametrize("overwrite", [False, True])
def test_of_two_writers_at_once_one_succeeds_and_one_is_refused(
    tmp_path: Path, overwrite: bool
) -> None:
    with new_directory(tmp_path / "out", overwrite) as directory:
        with pytest.raises(BlockingIOError, match="out is being written by another process"):
            write(tmp_path / "out", overwrite, text="second")
        (directory / "config.json").write_text("first")
    assert files(tmp_path / "out")["config.json"] == "first"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_many_writers_at_once_leave_one_whole_directory(tmp_path: Path) -> None:
    refused: list[str] = []

    def attempt(number: int) -> None:
        try:
            write(tmp_path / "out", text=str(number))
        except OSError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=attempt, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 15
    assert all(re.search("another process|not empty|appeared", words) for words in refused)
    assert damaged_files(tmp_path / "out", hashes=True) == []
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------- overwriting


def test_overwriting_replaces_only_what_was_written(tmp_path: Path) -> None:
    write(tmp_path / "out", text="old")
    write(tmp_path / "out", overwrite=True)
    assert files(tmp_path / "out")["config.json"] == "new"
    (tmp_path / "out" / "README.md").write_text("mine")
    (tmp_path / "out" / "model" / "notes").mkdir()
    with pytest.raises(
        FileExistsError, match=r"did not write: README\.md, model/notes/; move them away"
    ):
        write(tmp_path / "out", overwrite=True, text="newer")
    assert files(tmp_path / "out")["config.json"] == "new"
    assert files(tmp_path / "out")["README.md"] == "mine"


def test_overwriting_names_at_most_ten_files_of_others(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    for number in range(10, 30):
        (tmp_path / "out" / f"{number}.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"write: 10\.txt, .*, 19\.txt, and more; move"):
        check_output_directory(tmp_path / "out", overwrite=True)


@pytest.mark.parametrize("config", ['{"model_type": "qwen2"}', '{"port": 80}', "[]", "not JSON"])
def test_models_and_settings_of_other_programs_are_never_overwritten(
    tmp_path: Path, config: str
) -> None:
    """Their names are the same as ours."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "config.json").write_text(config)
    (tmp_path / "out" / "model.safetensors").write_text("mine")
    (tmp_path / "out" / "manifest.json").write_text('{"manifest_version": 3, "files": {}}')
    before = files(tmp_path)
    with pytest.raises(FileExistsError, match=r"config\.json, manifest\.json, model\.safetensors"):
        write(tmp_path / "out", overwrite=True)
    assert files(tmp_path) == before


def test_a_link_to_a_directory_is_followed_and_kept(tmp_path: Path) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "disk" / "real")
    write(link)
    write(link, overwrite=True, text="newer")
    assert link.is_symlink()
    assert files(tmp_path / "disk" / "real")["config.json"] == "newer"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


def test_a_broken_link_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("nowhere")
    with (
        pytest.raises(FileNotFoundError, match="link is a symbolic link to nowhere, which does"),
        new_directory(tmp_path / "link", overwrite=True),
    ):
        pytest.fail("the work began")


def test_links_inside_the_output_belong_to_others(tmp_path: Path) -> None:
    """Such as those of a hub cache."""
    write(tmp_path / "out")
    (tmp_path / "blob").write_text("mine")
    (tmp_path / "out" / "config.json").unlink()
    (tmp_path / "out" / "config.json").symlink_to(tmp_path / "blob")
    (tmp_path / "out" / "linked").symlink_to(tmp_path)
    assert list(foreign_files(tmp_path / "out")) == ["config.json", "linked"]
    with pytest.raises(FileExistsError, match=r"config\.json, linked"):
        write(tmp_path / "out", overwrite=True)
    assert (tmp_path / "blob").read_text() == "mine"


# ---------------------------------------------------------------- permissions


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def modes(directory: Path) -> dict[str, int]:
    return {
        path.relative_to(directory.parent).as_posix(): stat.S_IMODE(path.stat().st_mode)
        for path in (directory, *directory.rglob("*"))
    }


@pytest.mark.parametrize(
    ("mask", "of_directory", "of_file"),
    [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)],
)
def test_files_have_the_modes_of_the_users_umask(
    tmp_path: Path, mask: int, of_directory: int, of_file: int
) -> None:
    with umask(mask):
        write(tmp_path / "out")
    assert modes(tmp_path / "out") == {
        "out": of_directory,
        "out/config.json": of_file,
        "out/manifest.json": of_file,
        "out/model": of_directory,
        "out/model/weights.bin": of_file,
    }


def test_an_existing_directory_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)
    write(tmp_path / "out")
    write(tmp_path / "out", overwrite=True)
    assert modes(tmp_path / "out")["out"] == 0o700


# ---------------------------------------------------------------- manifest


def test_the_manifest_lists_size_and_hash_of_every_file(tmp_path: Path) -> None:
    write(tmp_path / "out")
    manifest = read_manifest(tmp_path / "out")
    assert manifest is not None
    assert {name: entry.size for name, entry in manifest.items()} == {
        "config.json": 3,
        "model/weights.bin": 5,
    }
    digest = "5994471abb01112afcc18159f6cc74b4f511b99806da59b3caf5a9c173cacfc5"  # of 12345
    assert manifest["model/weights.bin"].sha256 == digest
    assert damaged_files(tmp_path / "out", hashes=True) == []


def test_damage_is_found_by_size_and_with_hashes_by_content(tmp_path: Path) -> None:
    write(tmp_path / "out")
    (tmp_path / "out" / "model" / "weights.bin").write_bytes(b"12045")
    (tmp_path / "out" / "added.txt").write_text("not listed, not damage")
    assert damaged_files(tmp_path / "out") == []
    changed = ["model/weights.bin has changed since it was written"]
    assert damaged_files(tmp_path / "out", hashes=True) == changed
    (tmp_path / "out" / "model" / "weights.bin").write_bytes(b"123")
    (tmp_path / "out" / "config.json").unlink()
    assert damaged_files(tmp_path / "out") == [
        "config.json is missing",
        "model/weights.bin has 3 bytes instead of 5",
    ]


def test_an_edited_generation_config_is_no_damage_except_by_content(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    file.write_text("{}")
    write_manifest(tmp_path)
    file.write_text('{"temperature": 0.5}')
    assert damaged_files(tmp_path) == []
    words = ["generation_config.json has 20 bytes instead of 2"]
    assert damaged_files(tmp_path, hashes=True) == words
    file.write_text('{"temperature": ')
    assert damaged_files(tmp_path) == ["generation_config.json has 16 bytes instead of 2"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"files": {}}',
        '{"format": "causal-qwen"}',
        '{"format": "causal-qwen", "files": []}',
        '{"format": "causal-qwen", "files": {"a": 1}}',
        '{"format": "causal-qwen", "files": {"a": {"size": "many", "sha256": ""}}}',
    ],
)
def test_a_damaged_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    assert read_manifest(tmp_path) is None
    assert damaged_files(tmp_path) == ["manifest.json is missing or damaged"]


def test_a_failed_manifest_leaves_the_former_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "out")
    before = files(tmp_path)

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_manifest(tmp_path / "out")
    assert files(tmp_path) == before
    assert json.loads(before["out/manifest.json"])["format"] == "causal-qwen"


# ---------------------------------------------------------------- signals

WRITER = """
import signal, sys, time
from pathlib import Path
from causal_qwen.outputs import new_directory
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # as the program does
with new_directory(Path(sys.argv[1]), overwrite=True) as directory:
    (directory / "half.bin").write_text("half")
    print("writing", flush=True)
    while True:  # a signal that comes just before a sleep does not end it
        time.sleep(0.05)
"""


def test_a_terminated_process_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path / "out", text="old")
    before = files(tmp_path)
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=600) == 143
    assert files(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_lock_of_a_killed_process_is_free(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WRITER, str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "writing\n"
        with pytest.raises(BlockingIOError, match="another process"):
            write(tmp_path / "out")
        process.kill()
    write(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


# ---------------------------------------------------------------- doctor, and the cached model


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory, and torch that is not imported; -> the embedded model's place."""
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    devices = {"auto": "cpu", "all": ["cpu"], "precision": "fp32"}
    monkeypatch.setattr(doctor, "_devices", lambda: (devices, None))
    return embedded_directory()


def test_doctor_verifies_sizes_and_with_deep_every_byte(tmp_path: Path, installed: Path) -> None:
    for place in (installed, tmp_path / "mine"):
        write(place)
    weights = tmp_path / "mine" / "model" / "weights.bin"
    assert doctor.examine([tmp_path / "mine"], deep=True)["verified"] == {
        str(tmp_path / "mine"): [],
        str(installed): [],
    }
    weights.write_bytes(b"12045")
    found = doctor.examine([tmp_path / "mine"])
    assert found["is_well"]
    assert found["verified"] == {str(tmp_path / "mine"): []}
    found = doctor.examine([tmp_path / "mine"], deep=True)
    assert not found["is_well"]
    words = "model/weights.bin has changed since it was written"
    assert found["verdict"] == f"{tmp_path / 'mine'} is damaged ({words}); write it again."
    weights.unlink()
    found = doctor.examine([tmp_path / "mine"])
    assert found["verified"] == {str(tmp_path / "mine"): ["model/weights.bin is missing"]}
    assert not found["is_well"]


def test_doctor_verifies_the_checkpoints_of_a_run(tmp_path: Path, installed: Path) -> None:
    for step in (2, 4):
        write(tmp_path / "run" / f"checkpoint-{step}")
    assert doctor.examine([tmp_path / "run"])["is_well"]
    (tmp_path / "run" / "checkpoint-4" / "config.json").write_text("longer")
    words = "checkpoint-4/config.json has 6 bytes instead of 3"
    assert doctor.examine([tmp_path / "run"])["verified"] == {str(tmp_path / "run"): [words]}
    assert doctor.examine([tmp_path])["verified"] == {
        str(tmp_path): ["manifest.json is missing or damaged"]
    }


def test_doctor_names_a_damaged_embedded_model_and_its_cure(installed: Path) -> None:
    write(installed)
    (installed / "model" / "weights.bin").write_bytes(b"12045")
    assert doctor.examine()["is_well"]
    verdict = doctor.examine(deep=True)["verdict"]
    assert verdict.endswith("written); delete it: its next use converts it again.")
    (installed / "model" / "weights.bin").write_bytes(b"1")
    verdict = doctor.examine(deep=True)["verdict"]
    assert verdict.endswith("1 bytes instead of 5); its next use converts it again.")
    found = doctor.examine()
    assert found["is_well"]
    assert not found["embedded_model"]["is_whole"]
    out = io.StringIO()
    Console(file=out, width=400).print(doctor.render(found))
    assert "damaged: converted at its next use" in out.getvalue()


@pytest.mark.parametrize(
    "name", ["config.json", "model/weights.bin", "manifest.json"], ids=["config", "weights", "list"]
)
@pytest.mark.parametrize("is_deleted", [True, False], ids=["deleted", "truncated"])
def test_a_damaged_embedded_model_counts_as_not_converted(
    installed: Path, name: str, is_deleted: bool
) -> None:
    write(installed)
    assert is_converted(installed)
    (installed / name).unlink()
    if not is_deleted:
        (installed / name).touch()
    assert not is_converted(installed)


def test_a_directory_that_another_process_just_removed_is_busy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mkdir(exist_ok=True)` raises if the directory is gone before it looks again."""

    def vanish(path: Path, *_: object, **__: object) -> None:
        raise FileExistsError(17, "File exists", str(path))

    monkeypatch.setattr(Path, "mkdir", vanish)
    with (
        pytest.raises(BlockingIOError, match="another process"),
        new_directory(tmp_path / "a", False),
    ):
        pass


@pytest.mark.parametrize("size", ["Infinity", "null", '"x"', "[]"])
def test_manifest_with_an_impossible_size_is_none(tmp_path: Path, size: str) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    outputs.write_manifest(tmp_path)
    file = tmp_path / outputs.MANIFEST
    file.write_text(file.read_text("utf-8").replace('"size": 1', f'"size": {size}'), "utf-8")
    assert outputs.read_manifest(tmp_path) is None
