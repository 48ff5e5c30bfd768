"""File names are the data flow: a module imports only what stands above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "causal_qwen"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

ORDER = [
    "choices",
    "numerals",
    "pieces",
    "config",
    "cauchy",
    "value",
    "processor",
    "embedding",
    "abduction",
    "action",
    "decision",
    "individual",
    "home",
    "shown",
    "engine",
    "watch",
    "one_vs_rest",
    "loss",
    "generation",
    "documents",
    "model",
    "passage",
    "gumbel",
    "posterior",
    "prediction",
    "data",
    "tables",
    "conformal",
    "features",
    "fit",
    "pipeline",
    "calibrate",
    "convert",
    "verify",
    "scratch",
    "metrics",
    "checkpoints",
    "progress",
    "trainer",
    "train",
    "mock",
    "report",
    "regressor",
    "tabular",
    "counterfactual",
    "doctor",
    "speech",
    "chat",
    "demo",
    "playground",
    "cli",
    "__main__",
]

# Upward imports with a reason: (importer, imported) -> the functions that may contain them.
ALLOWED_UPWARD = {
    # A model offers to build itself from a checkpoint; the chain itself needs no converter.
    ("model", "convert"): {"from_qwen", "from_pretrained"},
    # ... and to say which number a text asks for.
    ("model", "prediction"): {"predict"},
}

# A stage is a file or a subpackage; the facade `__init__` re-exports everything, lazily.
STAGES = sorted(
    {path.stem for path in SOURCE.glob("*.py")}.union(
        path.parent.name for path in SOURCE.glob("*/__init__.py")
    )
    - {"__init__"}
)


def imported_stages(source: str) -> Iterator[tuple[str, str, int]]:
    """(stage, enclosing function or "", line) for every import of our own, at any depth.

    An import of the package's facade yields the stage `__init__`, one of `causal_qwen_mvp` itself.
    """

    def stage_of(module: str, names: list[str]) -> list[str]:
        root, *rest = module.split(".")
        if root == f"{PACKAGE}_mvp":
            return [root]
        if root != PACKAGE:
            return []
        if rest:
            return [rest[0]]
        return [name if (name in ORDER or name in STAGES) else "__init__" for name in names]

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        stages: list[str] = []
        if isinstance(node, ast.Import):
            for alias in node.names:
                stages += stage_of(alias.name, ["__init__"])
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                module = f"{PACKAGE}.{module}".rstrip(".")
            stages = stage_of(module, [alias.name for alias in node.names])
        elif isinstance(node, ast.Call) and node.args:
            callee = node.func
            name = callee.attr if isinstance(callee, ast.Attribute) else getattr(callee, "id", "")
            target = node.args[0]
            if name in {"import_module", "__import__"} and isinstance(target, ast.Constant):
                stages = stage_of(str(target.value).replace("..", ".").lstrip("."), ["__init__"])
        for stage in stages:
            yield stage, function, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    yield from visit(ast.parse(source), "")


def violations(importer: str, source: str) -> list[str]:
    found = []
    for stage, function, line in imported_stages(source):
        if stage == importer or function in ALLOWED_UPWARD.get((importer, stage), set()):
            continue
        if stage == "__init__" or stage == f"{PACKAGE}_mvp":
            why = "goes through a facade; import from the file that defines the name"
        elif stage not in ORDER:
            why = "has no place in ORDER (tests/contract/test_layers.py); give it one"
        elif ORDER.index(stage) > ORDER.index(importer):
            why = "stands below it; move the function up, or the importer down"
        else:
            continue
        found.append(f"{importer}.py:{line} imports {stage}, which {why}")
    return found


def test_every_stage_has_its_place_in_the_order() -> None:
    unplaced = [stage for stage in STAGES if stage not in ORDER]
    assert not unplaced, (
        f"{', '.join(unplaced)}: no place in the data flow yet. Add the name to ORDER in "
        "tests/contract/test_layers.py, below what it imports and above what imports it."
    )


@pytest.mark.parametrize("stage", [stage for stage in STAGES if stage in ORDER])
def test_a_stage_imports_only_what_stands_above_it(stage: str) -> None:
    path = SOURCE / f"{stage}.py"
    files = [path] if path.exists() else sorted((SOURCE / stage).rglob("*.py"))
    found = [line for file in files for line in violations(stage, file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from causal_qwen.model import CausalQwenForCausalLM",
        "import causal_qwen.model",
        "import causal_qwen.model as m",
        "from causal_qwen import model",
        "from .model import CausalQwenForCausalLM",
        "from . import model",
        "def f():\n    from causal_qwen.model import CausalQwenForCausalLM",
        "if TYPE_CHECKING:\n    from causal_qwen.model import CausalQwenForCausalLM",
        "import importlib\nimportlib.import_module('causal_qwen.model')",
        "from causal_qwen import CausalQwenForCausalLM",
        "import causal_qwen",
        "import causal_qwen_mvp",
        "from causal_qwen.nowhere import f",
    ],
)
def test_the_check_sees_every_way_to_import_upwards(source: str) -> None:
    assert len(violations("action", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from causal_qwen.cauchy import Cauchy",
        "from . import cauchy",
        "import torch.nn.functional",
        "def f():\n    from causal_qwen.config import CausalQwen2Config",
    ],
)
def test_the_check_lets_downward_and_foreign_imports_pass(source: str) -> None:
    assert violations("action", source) == []


def test_the_allowed_upward_import_is_allowed_only_inside_its_functions() -> None:
    upward = "from causal_qwen.convert import convert"
    assert violations("model", f"class M:\n  def from_qwen(cls):\n    {upward}") == []
    assert len(violations("model", f"class M:\n  def forward(self):\n    {upward}")) == 1
    assert len(violations("model", upward)) == 1
