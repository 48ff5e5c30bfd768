"""Terminal output: every text prints in every encoding."""

from __future__ import annotations

import io
import json
import sys
from unittest import mock

import pytest

from causal_qwen.cli import doctor, main
from causal_qwen.terminal import counted, escape_unencodable, print_json, status

ENCODINGS = ["ascii", "cp1252", "cp437", "gbk", "shift_jis", "utf-8"]
TEXT = "✓ caf\u00e9 – “你好” … \U0001f44d \ud800"


class Stream(io.TextIOWrapper):
    """Standard output as Python opens it for a terminal with this encoding."""

    def __init__(self, encoding: str, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=encoding, errors="strict", write_through=True)
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    @property
    def text(self) -> str:
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


def program(*words: str, encoding: str, is_terminal: bool = False) -> tuple[int, str]:
    """Exit code and output of a command."""
    out, err = Stream(encoding, is_terminal), Stream(encoding, is_terminal)
    with (
        mock.patch.object(sys, "argv", ["causal-qwen", *words]),
        mock.patch.object(sys, "stdout", out),
        mock.patch.object(sys, "stderr", err),
        pytest.raises(SystemExit) as end,
    ):
        main()
    return int(end.value.code or 0), out.text


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("is_terminal", [False, True])
def test_doctor_prints_in_every_encoding(
    encoding: str, is_terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices = {"auto": "cpu", "all": ["cpu"], "precision": "fp32"}
    monkeypatch.setattr(doctor, "_devices", lambda: (devices, None))
    code, text = program("doctor", encoding=encoding, is_terminal=is_terminal)
    assert code == 0
    mark = "✓" if encoding == "utf-8" else "\\u2713"
    assert f"{mark} always" in text.replace("\x1b[32m", "").replace("\x1b[0m", "")


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_help_page_prints_in_every_encoding(encoding: str) -> None:
    code, text = program("--help", encoding=encoding)
    assert code == 0
    assert "causal-qwen demo" in text


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 rows"), (1, "1 row"), (2, "2 rows"), (12345, "12345 rows")]
)
def test_a_noun_has_the_number_of_its_count(count: int, words: str) -> None:
    assert counted(count, "row") == words
    irregular = "1 row is" if count == 1 else f"{count} rows are"
    assert counted(count, "row is", "rows are") == irregular


def test_characters_that_an_encoding_lacks_become_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {}
    for encoding in ("ascii", "cp1252", "utf-8"):
        monkeypatch.setattr(sys, "stdout", Stream(encoding))
        escape_unencodable()
        print(TEXT, end="")
        shown[encoding] = sys.stdout.text  # type: ignore[attr-defined]
    assert shown == {
        "ascii": r"\u2713 caf\xe9 \u2013 \u201c\u4f60\u597d\u201d \u2026 \U0001f44d \ud800",
        "cp1252": "\\u2713 café – “\\u4f60\\u597d” … \\U0001f44d \\ud800",
        "utf-8": "✓ café – “你好” … 👍 \\ud800",
    }


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_json_is_exact_in_every_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", Stream(encoding))
    escape_unencodable()
    print_json({"text": "✓ café 你好 👍"})
    assert json.loads(sys.stdout.text) == {"text": "✓ café 你好 👍"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-8"])
def test_the_spinner_turns_in_every_encoding(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", Stream(encoding, is_terminal=True))
    with status() as progress:
        progress("working")
    assert "working ..." in sys.stderr.text  # type: ignore[attr-defined]
