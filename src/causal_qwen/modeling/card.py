"""Card: the README.md of a saved model, with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData

from causal_qwen.families import CARD
from causal_qwen.modeling.configuration import CausalConfig

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LICENCES = {"HuggingFaceTB/SmolLM2-135M-Instruct": "apache-2.0"}  # of the embedded model

BODY = """
# A CausalQwen model

A `{model}`: {base} with an individual U between the hidden state and the scores. Before training
it generates its base model's text, token by token.

```python
import causal_qwen
from transformers import AutoModelForCausalLM, AutoProcessor

model = AutoModelForCausalLM.from_pretrained("this directory")
processor = AutoProcessor.from_pretrained("this directory")
```

`causal-qwen export DIRECTORY OUT --to plain` (or `gguf`) turns it into a plain checkpoint, which
needs no further package and keeps the scores loc_S alone.
"""
EXPORTED = """
# {architecture}, exported from a CausalQwen model

It has the scores loc_S of `{model}` as its logits, and needs no further package. Lost: {lost}.
The largest difference of a logit on the built-in texts was {difference:.3g}, and {same:.4f} of the
choices were the same.
"""


def model_card(
    config: CausalConfig, base: str = "", figures: Mapping[str, Any] | None = None
) -> str:
    """The text of README.md. `base` is named in the front matter if it is a name on the hub."""
    is_on_hub = bool(HUB_NAME.fullmatch(base)) and not Path(base).exists()
    front = _front_matter(
        library_name="transformers",
        pipeline_tag="text-generation",
        base_model=base if is_on_hub else None,
        license=LICENCES.get(base) or _named(base, "license"),
    )
    architecture = config.family.base_names[2]
    shown = f"`{base}`" if is_on_hub else f"a `{architecture}`"
    text = front + BODY.format(model=config.family.names[2], base=shown)
    if figures:
        rows = [f"| {name.replace('_', ' ')} | {value} |" for name, value in figures.items()]
        text += "\n".join(["\n## Conversion\n", "| figure | value |", "|---|---|", *rows, ""])
    return text


def exported_card(model: str, **figures: Any) -> str:
    """The README.md of a plain checkpoint or GGUF file, with the base model and the licence that
    the causal model's own card names."""
    named = {name: _named(model, name) for name in ("base_model", "license")}
    front = _front_matter(pipeline_tag="text-generation", **named)
    return front + EXPORTED.format(model=Path(model).name, **figures)


def _front_matter(**fields: Any) -> str:
    return f"---\n{ModelCardData(tags=['causal-qwen'], **fields)}\n---\n"


def _named(directory: str, name: str) -> str | None:
    """A field of the front matter of a local model's card."""
    card = Path(directory, CARD)
    if not directory or not card.is_file():
        return None
    front = card.read_text("utf-8", errors="replace").split("\n---", 1)[0]
    found = re.search(rf"^{name}:\s*(\S+)\s*$", front, re.MULTILINE)
    return None if found is None else found[1]
