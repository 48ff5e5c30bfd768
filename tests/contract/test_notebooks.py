"""The notebooks run from top to bottom, and are saved with outputs of the embedded model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "examples").glob("*.ipynb"))
LARGEST = 400_000  # bytes
RUN = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.read(sys.argv[1], as_version=4)
NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def pictures(path: Path) -> int:
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_examples_has_four_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "first_steps",
        "individuals_and_counterfactuals",
        "qwen2_numpy",
        "regression_from_text",
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_on_a_tiny_model(path: Path, tiny_directory: Path, tmp_path: Path) -> None:
    out = tmp_path / "run.ipynb"
    settings = {
        "CAUSAL_QWEN_NOTEBOOK_MODEL": str(tiny_directory),
        "CAUSAL_QWEN_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path), str(out)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert pictures(out) == pictures(path) > 0


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_no_paths_of_the_machine(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    cells = code_cells(path)
    assert all(cell["execution_count"] == place for place, cell in enumerate(cells, 1))
    assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "Warning" not in outputs
    assert not any(path in outputs for path in ("/tmp/", "/root/", "/home/", "site-packages"))
