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
# One kernel imports torch once; each notebook begins with no names.
RUN = """
import sys
from pathlib import Path
import nbformat
from jupyter_client import KernelManager
from nbclient import NotebookClient

kernel = KernelManager(kernel_name="python3")
kernel.start_kernel()
try:
    for path in map(Path, sys.argv[2:]):
        notebook = nbformat.read(path, as_version=4)
        notebook.cells.insert(0, nbformat.v4.new_code_cell("%reset -f"))
        NotebookClient(notebook, km=kernel, timeout=None).execute()
        nbformat.write(notebook, Path(sys.argv[1], path.name))
finally:
    kernel.shutdown_kernel(now=True)
"""


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def pictures(path: Path) -> int:
    outputs = [output for cell in code_cells(path) for output in cell["outputs"]]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_examples_has_five_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS] == [
        "first_steps",
        "individuals_and_counterfactuals",
        "panels",
        "qwen2_numpy",
        "regression_from_text",
    ]


@pytest.mark.slow  # a kernel that imports torch
def test_notebooks_run_on_a_tiny_model(tiny_directory: Path, tmp_path: Path) -> None:
    settings = {
        "CAUSAL_QWEN_NOTEBOOK_MODEL": str(tiny_directory),
        "CAUSAL_QWEN_CACHE": str(tmp_path / "cache"),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path), *map(str, NOTEBOOKS)],
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for path in NOTEBOOKS:
        assert pictures(tmp_path / path.name) == pictures(path) > 0, path.stem


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_has_outputs_and_no_paths_of_the_machine(path: Path) -> None:
    assert path.stat().st_size < LARGEST
    cells = code_cells(path)
    assert all(cell["execution_count"] == place for place, cell in enumerate(cells, 1))
    assert sum(bool(cell["outputs"]) for cell in cells) > len(cells) / 2
    outputs = json.dumps([cell["outputs"] for cell in cells])
    assert "Warning" not in outputs
    assert not any(path in outputs for path in ("/tmp/", "/root/", "/home/", "site-packages"))
