"""Doctor: what is installed, which model and which device there are, what is missing and its cure.

Needs no torch: it is asked when something does not work.
"""

from __future__ import annotations

import importlib
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from causal_qwen.paths import (
    EMBEDDED,
    EMBEDDED_PACKAGE,
    cache_directory,
    embedded_directory,
    embedded_gguf,
    is_converted,
)

DISTRIBUTION = "causal-qwen"
# What every extra is for; those of the package's own developers are not shown.
PURPOSES = {
    "torch": "the model itself",
    "tables": "fit, predict: numbers from tables",
    "train": "train on datasets by name",
    "lora": "train --lora",
    "plot": "report, plots",
    "dashboards": "train --report-to",
    "app": "the playground in the browser",
}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # modules that bear another name than their package
EMBEDDED_CURE = f"pip install --no-deps {EMBEDDED_PACKAGE.replace('_', '-')}"


@dataclass(frozen=True)
class Package:
    """One that is wanted, in a range of versions, and the version that is there, if any."""

    name: str
    wanted: str
    version: str | None

    @property
    def is_good(self) -> bool:
        requirement = Requirement(f"{self.name}{self.wanted}")
        return self.version is not None and requirement.specifier.contains(self.version, True)

    def __str__(self) -> str:
        if self.version is None:
            return f"{self.name} missing"
        return f"{self.name} {self.version}" + ("" if self.is_good else f" (wanted {self.wanted})")


@dataclass(frozen=True)
class Group:
    """Packages that are installed together: what is always needed, or an extra."""

    purpose: str
    cure: str
    packages: tuple[Package, ...]

    @property
    def is_complete(self) -> bool:
        return all(package.is_good for package in self.packages)


@dataclass(frozen=True)
class Place:
    """A file or directory of ours, and its size in bytes if it is there."""

    path: str | None
    size: int | None

    @property
    def is_there(self) -> bool:
        return self.size is not None


@dataclass(frozen=True)
class Diagnosis:
    """Everything that was looked at."""

    version: str
    python: str
    system: str
    needed: Group
    extras: dict[str, Group]
    device: str | None  # None: no torch
    threads: int
    memory: int | None  # bytes
    embedded_package: Place  # the base model's file
    embedded_model: Place  # the converted model
    feature_cache: Place
    problem: str | None  # why torch is there and cannot be used

    @property
    def is_well(self) -> bool:
        """The basic things work: the engine, and torch if it was installed."""
        return self.needed.is_complete and self.problem is None

    @property
    def has_model(self) -> bool:
        return self.embedded_model.is_there or self.embedded_package.is_there

    @property
    def verdict(self) -> str:
        if not self.needed.is_complete:
            return f"The installation is incomplete: {self.needed.cure}"
        if self.problem is not None:
            return f"torch is installed and does not work: {self.problem}"
        torch = self.extras["torch"]
        if not torch.is_complete:
            return f"The NumPy engine works; for everything else: {torch.cure}"
        if not self.has_model:
            return f"The model works; the embedded one is missing: {EMBEDDED_CURE}"
        lacking = [name for name, group in self.extras.items() if not group.is_complete]
        more = f"; not installed: {', '.join(lacking)}" if lacking else ""
        return f"Everything that is installed works{more}."

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        record = asdict(self)
        for name, group in {"needed": self.needed, **self.extras}.items():
            shown = record["needed"] if name == "needed" else record["extras"][name]
            shown["is_complete"] = group.is_complete
        return {**record, "is_well": self.is_well, "verdict": self.verdict}

    def __rich__(self) -> Any:
        from rich.console import Group as Lines
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(no_wrap=True)
        table.add_column()
        told: set[Package] = set()
        for name, group in {"always": self.needed, **self.extras}.items():
            mark = "[green]✓[/]" if group.is_complete else "[yellow]–[/]"
            words = Text(", ".join(str(one) for one in group.packages if one not in told))
            told |= set(group.packages)
            if not group.is_complete:
                words.append(f"\n{group.purpose}: ", style="dim").append(group.cure, style="bold")
            table.add_row(f"{mark} {name}", words)
        for name, fact in self._facts():
            table.add_row(f"  {name}", Text(fact))
        heading = f"causal-qwen {self.version} · Python {self.python} · {self.system}"
        colour = "green" if self.is_well else "red"
        return Lines(Text(heading, style="bold"), table, Text(self.verdict, style=colour))

    def _facts(self) -> Iterator[tuple[str, str]]:
        memory = "" if self.memory is None else f", {_size(self.memory)} of memory"
        device = self.device or "no torch"
        yield "device", f"{device}; {self.threads} threads{memory}"
        base, model, cache = self.embedded_package, self.embedded_model, self.feature_cache
        if model.is_there:
            yield "model", f"{EMBEDDED}, converted: {model.path} ({_size(model.size)})"
        elif base.is_there:
            yield "model", f"{EMBEDDED}, converted when it is first used, from {base.path}"
        else:
            yield "model", f"{EMBEDDED} is missing: {EMBEDDED_CURE}"
        kept = f"{cache.path} ({_size(cache.size)})" if cache.is_there else "empty"
        yield "features", kept


def examine() -> Diagnosis:
    """Look at everything; nothing is changed and nothing is downloaded."""
    extras = {
        name: Group(purpose, f"pip install '{DISTRIBUTION}[{name}]'", _packages(name))
        for name, purpose in PURPOSES.items()
    }
    device, problem = _device() if extras["torch"].is_complete else (None, None)
    model = embedded_directory()
    return Diagnosis(
        version=metadata.version(DISTRIBUTION),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        needed=Group("the NumPy engine", f"pip install {DISTRIBUTION}", _packages("")),
        extras=extras,
        device=device,
        threads=_threads(),
        memory=_memory(),
        embedded_package=_place(embedded_gguf()),
        embedded_model=_place(model if is_converted(model) else None, model),
        feature_cache=_place(cache_directory() / "features.sqlite"),
        problem=problem,
    )


def cure(module: str) -> str:
    """What to do about a module that cannot be imported, in a sentence."""
    package = canonicalize_name(DISTRIBUTIONS.get(module, module))
    for extra in ("", *PURPOSES):
        if any(canonicalize_name(one.name) == package for one in _own_requirements(extra)):
            wanted = f"'{DISTRIBUTION}[{extra}]'" if extra else DISTRIBUTION
            return f"{module} is not installed: pip install {wanted}"
    return f"{module} is not installed: pip install {package}"


@lru_cache
def _own_requirements(extra: str) -> list[Requirement]:
    """What an extra names itself; the empty one is what is always needed."""
    lines = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    if not extra:
        return [one for one in lines if one.marker is None]
    return [one for one in lines if one.marker is not None and _belongs(one, extra)]


def _belongs(requirement: Requirement, extra: str) -> bool:
    assert requirement.marker is not None
    return requirement.marker.evaluate({"extra": extra})


def _packages(extra: str) -> tuple[Package, ...]:
    """An extra's packages, and those of the extras that it is built on."""
    found: dict[str, Package] = {}
    for one in _own_requirements(extra):
        if canonicalize_name(one.name) == DISTRIBUTION:
            for other in sorted(one.extras):
                found |= {package.name: package for package in _packages(other)}
        else:
            found[one.name] = Package(one.name, str(one.specifier), _version(one.name))
    return tuple(found.values())


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _device() -> tuple[str | None, str | None]:
    """Where torch computes, and why it does not."""
    try:
        torch = importlib.import_module("torch")
        importlib.import_module("transformers")
    except Exception as error:  # a broken library fails in its own way
        return None, f"{type(error).__name__}: {' '.join(str(error).split())}"
    accelerator = torch.accelerator
    return str(accelerator.current_accelerator()) if accelerator.is_available() else "cpu", None


def _threads() -> int:
    """As many as this process may use."""
    has_affinity = hasattr(os, "sched_getaffinity")
    return len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1


def _memory() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on every system
        return None


def _place(path: Path | None, named: Path | None = None) -> Place:
    where = path or named
    if path is None or not path.exists():
        return Place(None if where is None else str(where), None)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return Place(str(path), sum(file.stat().st_size for file in files))


def _size(count: int | None) -> str:
    """Bytes, as people say them."""
    size = float(count or 0)
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
