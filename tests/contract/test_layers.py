"""Rooms: a package imports only the rooms that its rule names."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "causal_qwen"
SOURCE = Path(__file__).parents[2] / "src" / PACKAGE

# One rule per room (a package, or a file at the top): the rooms that it may import.
_GROUND = {"families", "options", "outputs", "paths", "terminal"}
_TORCH_FREE = {"options", "text", "individuals", "decoding"}
_MODEL = _TORCH_FREE | {"families", "modeling", "generation", "model", "backbones"}
_WORK = {"numpy_engine", "conversion", "analysis", "tables", "training", "regression"}
_LIBRARY = _GROUND | _MODEL | _WORK | {"engines", "layer", "session", "panel"}
ROOMS: dict[str, set[str]] = {
    "families": set(),
    "options": set(),
    "outputs": {"families"},
    "paths": {"outputs"},
    "terminal": set(),
    "text": {"options"},
    "individuals": {"options", "outputs"},
    "decoding": {"options", "individuals"},
    "numpy_engine": _TORCH_FREE | {"families", "outputs", "terminal"},
    "layer": _TORCH_FREE | {"numpy_engine", "outputs", "paths"},
    "modeling": _TORCH_FREE | {"families"},
    "generation": _TORCH_FREE | {"modeling"},
    "model": _TORCH_FREE | {"families", "modeling", "generation"},
    "backbones": _TORCH_FREE | {"families", "modeling", "model"},
    "conversion": _GROUND | _MODEL | {"numpy_engine", "layer"},
    "analysis": _GROUND | _MODEL | {"numpy_engine", "conversion", "engines", "layer"},
    "engines": _GROUND | _MODEL | {"numpy_engine", "conversion", "layer"},
    "session": _GROUND | _MODEL | {"layer", "numpy_engine", "engines", "conversion", "analysis"},
    "panel": {"analysis", "engines", "session", "text"},
    "tables": {"paths", "terminal", "text"},
    "training": _GROUND | _MODEL | {"numpy_engine", "conversion", "tables"},
    "regression": _GROUND | _MODEL | {"conversion", "tables", "training"},
    "serving": _LIBRARY,
    "vllm": _TORCH_FREE | {"families", "modeling", "generation", "serving"},
    "cli": _LIBRARY | {"serving", "app"},
    "app": _LIBRARY | {"serving"},
    "__main__": {"cli"},
    "_version": set(),
    "_registration": {"backbones", "families"},
    "__init__": _LIBRARY | {"_registration", "_version"},
}
ANYONES = ("_version",)
NO_TORCH = (
    *("families", "options", "outputs", "paths", "terminal"),
    *("text", "individuals", "decoding", "numpy_engine", "layer", "tables"),
)

# (importing room, imported room) -> functions that may import against the rule, with the reason.
EXCEPTIONS = {
    # A model offers to build itself from a checkpoint ...
    ("model", "conversion"): {"from_qwen", "from_pretrained"},
    # ... and to predict the number that a text asks for.
    ("model", "regression"): {"predict"},
}


def room_of(path: Path) -> str:
    first = path.relative_to(SOURCE).parts[0]
    return first.removesuffix(".py")


def imports(source: str) -> Iterator[tuple[str, str, int]]:
    """(module, enclosing function or "", line) of every import, at any depth."""

    def visit(node: ast.AST, function: str) -> Iterator[tuple[str, str, int]]:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = node.name
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = f"{PACKAGE}.{node.module or ''}".rstrip(".") if node.level else node.module
            modules = [f"{module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            target = node.args[0]
            if name in {"import_module", "__import__"} and isinstance(target, ast.Constant):
                modules = [str(target.value)]
        for module in modules:
            yield module, function, node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child, function)

    return visit(ast.parse(source), "")


def violations(room: str, source: str) -> list[str]:
    found = []
    for module, function, line in imports(source):
        package, *rest = module.split(".")
        if package == f"{PACKAGE}_mvp":
            imported = package
        elif package == PACKAGE:
            imported = rest[0] if rest and rest[0] in ROOMS else "__init__"
        else:
            if package in ("torch", "transformers") and room in NO_TORCH:
                found.append(f"{room}:{line} imports {package}; this room runs without torch.")
            continue
        if imported in (room, *ANYONES) or imported in ROOMS[room]:
            continue
        if function not in EXCEPTIONS.get((room, imported), set()):
            found.append(f"{room}:{line} imports {module}; its rule allows {sorted(ROOMS[room])}.")
    return found


def test_every_room_has_a_rule() -> None:
    rooms = {room_of(path) for path in SOURCE.rglob("*.py")}
    assert rooms == set(ROOMS)


def test_rules_point_one_way() -> None:
    order: list[str] = []
    while len(order) < len(ROOMS):
        ready = [room for room in ROOMS if room not in order and ROOMS[room] <= set(order)]
        assert ready, f"rooms import each other: {sorted(set(ROOMS) - set(order))}"
        order += ready


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_its_rule_names(room: str) -> None:
    files = [path for path in SOURCE.rglob("*.py") if room_of(path) == room]
    found = [line for file in files for line in violations(room, file.read_text(encoding="utf-8"))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "room",
    [path.name for path in SOURCE.iterdir() if (path / "__init__.py").exists()],
)
def test_a_package_explains_itself_in_its_docstring(room: str) -> None:
    docstring = ast.get_docstring(ast.parse((SOURCE / room / "__init__.py").read_text("utf-8")))
    assert docstring is not None
    assert len(docstring.splitlines()) >= 5
    for path in (SOURCE / room).glob("*.py"):
        if not path.stem.startswith("_"):
            assert path.stem in docstring, f"{room}/__init__.py does not mention {path.name}"


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
def test_the_check_sees_every_way_to_import_against_the_rule(source: str) -> None:
    assert len(violations("modeling", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from causal_qwen.modeling.cauchy import Cauchy",
        "from causal_qwen.text import numerals",
        "import torch.nn.functional",
        "def f():\n    from causal_qwen.options import MODES",
    ],
)
def test_the_check_passes_allowed_and_foreign_imports(source: str) -> None:
    assert violations("modeling", source) == []


def test_torch_is_refused_in_rooms_that_run_without_it() -> None:
    assert len(violations("numpy_engine", "import torch")) == 1
    assert len(violations("text", "from transformers import AutoTokenizer")) == 1


def test_an_exception_holds_only_inside_its_functions() -> None:
    upward = "from causal_qwen.conversion.convert import convert"
    assert violations("model", f"class M:\n  def from_qwen(cls):\n    {upward}") == []
    assert len(violations("model", f"class M:\n  def forward(self):\n    {upward}")) == 1
    assert len(violations("model", upward)) == 1
