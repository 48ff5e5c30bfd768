"""The command line: thin, quick, and readable when something is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from causal_qwen.convert import default_model


def causal_qwen(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "causal_qwen.cli", *arguments],
        capture_output=True,
        text=True,
        check=False,
    )


def test_generate_prints_what_an_individual_says() -> None:
    arguments = ("generate", "The train was late, so", "--mode", "causal", "-i", "7", "-t", "0.3")
    said = [
        causal_qwen(*arguments, "-n", "8", "--json", "--model", str(default_model()))
        for _ in range(2)
    ]
    answers = [json.loads(done.stdout) for done in said]
    assert answers[0] == answers[1]
    assert answers[0]["individual"] == 7
    assert answers[0]["text"]


def test_convert_reports_parity(tmp_path: Path) -> None:
    done = causal_qwen("convert", str(default_model()), str(tmp_path / "out"))
    assert done.returncode == 1
    assert "is a CausalQwen model already" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("generate", "x", "--model", "no-such-directory"), "no-such-directory"),
        (("generate", "  "), "The prompt is empty"),
        (("generate", "x", "--mode", "causl"), "causal_mode='causl' is unknown"),
        (("generate", "x", "--individual", "3"), "--individual has no part in mode 'standard'"),
    ],
)
def test_an_error_is_one_sentence(arguments: tuple[str, ...], sentence: str) -> None:
    done = causal_qwen(*arguments)
    assert done.returncode == 1
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in done.stderr.splitlines() if "causal-qwen:" in line]) == 1


def test_debug_shows_the_traceback() -> None:
    done = causal_qwen("--debug", "generate", "  ")
    assert done.returncode != 0
    assert "Traceback" in done.stderr
