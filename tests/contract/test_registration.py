"""The Auto classes load our directories, whichever import comes first."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

LOAD = "print(type(AutoModelForCausalLM.from_pretrained(r'{}')).__module__)"
ORDERS = {
    "our package first": "import causal_qwen; from transformers import AutoModelForCausalLM",
    "AutoConfig first": "import causal_qwen; from transformers import AutoConfig\n"
    "from transformers import AutoModelForCausalLM",
    "transformers first": "from transformers import AutoModelForCausalLM; import causal_qwen",
    "a stage of ours first": "import causal_qwen.modeling.action\n"
    "from transformers import AutoModelForCausalLM",
}


@pytest.mark.parametrize("imports", ORDERS.values(), ids=ORDERS)
def test_the_auto_class_loads_our_model(imports: str, tiny_directory: Path) -> None:
    code = f"{imports}\n{LOAD.format(tiny_directory)}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=1800
    )
    assert done.stdout.strip() == "causal_qwen.model", done.stderr
