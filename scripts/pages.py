"""Hooks of mkdocs: equations, quoted code and notebooks, without JavaScript.

The pages in docs/ are plain Markdown. When the site is built,

    a ```math block                                  becomes MathML,
    a Python block that begins "# causal_qwen.x.y"   is titled with the file and line it is from,
    `causal_qwen.x.y`                                links to the API reference, if listed there,
    examples/*.ipynb                                 become pages, with their saved outputs.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import latex2mathml.converter
from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
NOTEBOOKS = "notebooks"
QUOTED = re.compile(r"^```python\n# (causal_qwen[\w.]+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"(?<![`\[])`(causal_qwen(?:\.\w+)+)`(?!\])")
FENCED = re.compile(r"^(```.*?^```)$", re.MULTILINE | re.DOTALL)
DOCUMENTED = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
NOTEBOOK_LINK = re.compile(r"\]\((?:(?:\.\./)*examples/)?(\w+)\.ipynb\)")


# ---------------------------------------------------------------- hooks that mkdocs calls


def on_config(config: Any) -> Any:
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {})
    fences["custom_fences"] = [{"name": "math", "class": "math", "format": as_mathml}]
    return config


def on_files(files: Any, config: Any) -> Any:
    for path in sorted((ROOT / "examples").glob("*.ipynb")):
        page = as_markdown(json.loads(path.read_text(encoding="utf-8")))
        files.append(File.generated(config, f"{NOTEBOOKS}/{path.stem}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    up = "../" * page.file.src_uri.count("/")
    markdown = NOTEBOOK_LINK.sub(rf"]({up}{NOTEBOOKS}/\1.md)", markdown)
    markdown = markdown.replace("](../docs/", f"]({up}")  # links of notebooks
    markdown = QUOTED.sub(_titled, markdown)
    parts = FENCED.split(markdown)  # prose at even places, code at odd ones
    parts[::2] = [NAMED.sub(_linked, prose) for prose in parts[::2]]
    return "".join(parts)


def as_mathml(source: str, *_: Any, **__: Any) -> str:
    """One block per paragraph of the source."""
    lines = [latex2mathml.converter.convert(x, display="block") for x in source.split("\n\n") if x]
    return f'<div class="math">{"".join(lines)}</div>'


# ---------------------------------------------------------------- code


def find(name: str) -> tuple[Path, int]:
    """The file and the line in which `causal_qwen.module.Class.method` is defined."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT / "src" / Path(*parts[:cut])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if file.is_file():
            return file, _line(file, parts[cut:], name)
    raise LookupError(f"{name} has no module under src/; correct the name.")


def _line(file: Path, inside: list[str], name: str) -> int:
    scope: Any = _parsed(file)
    for part in inside:
        found = _members(file, scope, part)
        if not found:
            raise LookupError(f"{name} is not in {file.relative_to(ROOT)}: {part!r} is missing.")
        scope = found[-1]
    return getattr(scope, "lineno", 1)


def _members(file: Path, scope: Any, part: str) -> list[ast.stmt]:
    """The statements that define `part` in a module or a class, or in its bases of this file."""
    if found := [node for node in scope.body if part in _defined(node)]:
        return found
    bases = {base.id for base in getattr(scope, "bases", []) if isinstance(base, ast.Name)}
    classes = (node for node in _parsed(file).body if isinstance(node, ast.ClassDef))
    return [node for one in classes if one.name in bases for node in _members(file, one, part)]


@cache
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def _defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    yield from (target.id for target in targets if isinstance(target, ast.Name))


def _titled(match: re.Match[str]) -> str:
    name, code = match.groups()
    file, line = find(name)
    first, lines = code.splitlines()[0].strip(), file.read_text(encoding="utf-8").splitlines()
    code_of = (text.partition("  #")[0].strip() for text in lines)
    at = next((n for n, text in enumerate(code_of, 1) if n >= line and text == first), None)
    if at is None:
        raise LookupError(f"{name} has no line {first!r}; copy the present code.")
    title = f"{file.relative_to(ROOT)}:{at} · {name.partition('.')[2]}"
    return f'``` {{ .python title="{title}" }}\n{code}```'


@cache
def _reference() -> tuple[str, ...]:
    """The modules of the API reference."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    return tuple(DOCUMENTED.findall(page))


def _linked(match: re.Match[str]) -> str:
    name = match.group(1)
    is_private = any(part.startswith("_") for part in name.split("."))
    if is_private or not any(f"{name}.".startswith(f"{known}.") for known in _reference()):
        return match.group()
    find(name)
    return f"[`{name}`][{name}]"


# ---------------------------------------------------------------- notebooks


def as_markdown(notebook: dict[str, Any]) -> str:
    """A notebook as a page: text, code and saved outputs."""
    parts = []
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
        else:
            parts.append(f"```python\n{source}\n```")
            parts += [_output(output) for output in cell["outputs"]]
    return "\n\n".join(part for part in parts if part) + "\n"


def _output(output: dict[str, Any]) -> str:
    if "text" in output:  # printed
        return _text("".join(output["text"]))
    data = output.get("data", {})
    if "image/png" in data:
        picture = "".join(data["image/png"]).replace("\n", "")
        return f'<img alt="" src="data:image/png;base64,{picture}">'
    if "text/html" in data:
        return f'<div class="output">{"".join(data["text/html"])}</div>'
    return _text("".join(data.get("text/plain", "")))


def _text(text: str) -> str:
    return f"```text\n{text.rstrip()}\n```" if text.strip() else ""
