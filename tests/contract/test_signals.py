"""Ctrl-C and SIGTERM: an exit code, no traceback, nothing left behind."""

from __future__ import annotations

import http.client
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from causal_qwen.cli import program
from causal_qwen.cli.signals import ExitOnSignals

GUARD = 120  # seconds
# Arguments: a signal, the module whose import is interrupted, and a command line.
INTERRUPT = """
import signal, sys
number, module = int(sys.argv[1]), sys.argv[2]
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
sys.argv[:] = ["causal-qwen", *sys.argv[3:]]

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            print("importing", name, flush=True)
            signal.raise_signal(number)

sys.meta_path.insert(0, Finder())
from causal_qwen.cli import main
main()
"""
COMMAND = ["generate", "Hi", "-m", "."]


@pytest.mark.parametrize(
    ("number", "code", "module"),
    [
        (signal.SIGINT, 130, "typer"),
        (signal.SIGINT, 130, "causal_qwen.cli.program"),
        (signal.SIGINT, 130, "torch"),  # whose C++ code would abort on an exception
        (signal.SIGTERM, 143, "torch"),
    ],
)
def test_a_signal_during_imports_prints_no_traceback(
    number: int, code: int, module: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "causal_qwen2"}', encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPT, str(int(number)), module, *COMMAND],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout == f"importing {module}\n", done.stderr
    assert done.returncode == code
    assert done.stderr.removeprefix("loading the model ...\n") == ""


def test_import_of_the_package_keeps_the_handlers_of_a_program() -> None:
    script = (
        "import signal; before = [signal.getsignal(one) for one in (2, 15)]\n"
        "import causal_qwen.cli\n"
        "assert [signal.getsignal(one) for one in (2, 15)] == before"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.slow  # gradio, pandas, scikit-learn and torch are imported
def test_sigterm_closes_a_protected_playground_and_leaves_no_file(
    tiny_directory: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "causal_qwen", "app", "--host", "0.0.0.0", "--port", "0"]
    with subprocess.Popen(
        [*command, "--no-browser", "-m", str(tiny_directory)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "Password: " in next(line for line in lines if line.startswith("User: "))
        found = re.search(r":(\d+) ", next(line for line in lines if "is open at" in line))
        assert found is not None
        assert [one.name for one in tmp_path.glob("causal-qwen-*")] != []
        for headers in ({}, {"Host": "evil.example"}):
            assert ask(found[1], headers) == 401
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=GUARD)
    assert process.returncode == 143
    assert errors.startswith("Warning: the playground listens on 0.0.0.0")
    assert len(errors.splitlines()) == 1
    assert list(tmp_path.glob("causal-qwen-*")) == list(tmp_path.glob("gradio*")) == []


def ask(port: str, headers: dict[str, str]) -> int:
    server = http.client.HTTPConnection("127.0.0.1", int(port), timeout=GUARD)
    try:
        server.request("GET", "/config", headers=headers)
        return server.getresponse().status
    finally:
        server.close()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_runs_every_finally(
    number: int, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def command(**_: Any) -> None:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            assert list(tmp_path.iterdir()) != []
            signal.raise_signal(number)

    handlers = [signal.signal(signal.SIGINT, signal.default_int_handler)]
    try:
        handlers.append(signal.getsignal(signal.SIGTERM))
        assert run_main(command, monkeypatch) == (code, "")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert signal.getsignal(signal.SIGTERM) is handlers[1]
    finally:
        signal.signal(signal.SIGINT, handlers[0])
    assert list(tmp_path.iterdir()) == []


def test_an_error_that_an_interrupt_has_caused_is_not_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def command(**_: Any) -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        except BaseException as error:
            raise ImportError("numpy.core failed to import") from error

    assert run_main(command, monkeypatch) == (143, "")


def test_a_forked_process_exits_at_once() -> None:
    with ExitOnSignals():
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 143


def run_main(command: Any, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, str]:
    """`main` with another app. -> its exit code and stderr"""
    monkeypatch.setattr(program, "app", command)
    monkeypatch.setattr(sys, "argv", ["causal-qwen"])
    errors = io.StringIO()
    with redirect_stderr(errors), pytest.raises(SystemExit) as end:
        program.main()
    return end.value.code, errors.getvalue()
