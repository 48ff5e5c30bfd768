"""Run the notebooks of examples/ with the embedded model, and save their outputs.

    make notebooks                                   # all of them
    python scripts/notebooks.py first_steps          # one

Outputs are small and independent of the machine: pictures in a palette, streams merged, no
warnings of tools.
"""

from __future__ import annotations

import base64
import io
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

EXAMPLES = Path(__file__).parents[1] / "examples"
COLOURS = 64
PICTURE = "image/png"


def run(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=600, resources={"metadata": {"path": EXAMPLES}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = tidy(cell.outputs)
    nbformat.write(notebook, path)


def tidy(outputs: list[Any]) -> list[Any]:
    """Drop warnings, merge streams, shrink pictures."""
    kept = [output for output in outputs if "Warning" not in output.get("text", "")]
    merged = []
    for name, group in groupby(kept, key=lambda output: output.get("name")):
        pieces = list(group)
        if name is not None:  # a stream
            pieces[0].text = "".join(piece.text for piece in pieces)
            del pieces[1:]
        merged += pieces
    for output in merged:
        if PICTURE in output.get("data", {}):
            output.data = {PICTURE: shrink(output.data[PICTURE])}
    return merged


def shrink(picture: str) -> str:
    """The same picture in a few colours."""
    image = Image.open(io.BytesIO(base64.b64decode(picture))).convert("RGB")
    out = io.BytesIO()
    image.quantize(COLOURS).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


if __name__ == "__main__":
    for name in sys.argv[1:] or sorted(path.stem for path in EXAMPLES.glob("*.ipynb")):
        print(f"{name} ...", file=sys.stderr, flush=True)
        run(EXAMPLES / f"{name}.ipynb")
