"""The pages say what is true: their commands run, their quotations are the source's own lines."""

from __future__ import annotations

import ast
import csv
import functools
import importlib
import importlib.util
import inspect
import io
import json
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh-CN.md"
DOCS = sorted((ROOT / "docs").glob("*.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAMED = re.compile(r"`(causal_qwen(?:\.\w+)+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#\s]+)(?:#[^)]*)?\)")
EXTERNAL = re.compile(r"""<(?:script|link|img|iframe)[^>]+(?:src|href)=["']?(?:https?:)?//""")

# Shown, and only checked for being well-formed here: what they do takes too long or never ends.
NOT_RUN = {
    "causal-qwen app": "serves until Ctrl-C; the playground has browser tests of its own",
    "causal-qwen serve": "serves until Ctrl-C; test_serving.py runs it",
    "causal-qwen chat --url": "needs that server; test_serving.py runs it",
    "make": "makes an environment or runs for minutes; its dry run has to be possible",
    "pip": "the tests fetch nothing; what it names has to be a pinned package or our own extra",
    "python": "long benchmarks and the documents' scripts, which have tests; the file has to exist",
    "torchrun": "test_training_ecosystem.py runs two processes",
    "accelerate": "test_training_ecosystem.py runs two processes",
    "lm_eval": "test_training_ecosystem.py runs the harness",
}


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path) -> list[tuple[str, str]]:
    """(language, code) of every fenced block, in order."""
    return FENCE.findall(read(path))


def commands(code: str) -> list[list[str]]:
    """The commands of a bash block as words, comments dropped."""
    lines = code.replace("\\\n", " ").splitlines()
    whole = [shlex.split(part, comments=True) for line in lines for part in line.split(" && ")]
    return [words for words in whole if words]


@functools.cache
def script(name: str, folder: str = "scripts") -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / folder / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolve(name: str) -> Any:
    """`causal_qwen.module.Class.method` -> the thing itself."""
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        return functools.reduce(getattr, parts[cut:], found)
    raise LookupError(name)


# ---------------------------------------------------------------- commands


def check_only(words: list[str]) -> None:
    """What NOT_RUN names: as much as can be said without running it."""
    if words[0] == "make":
        dry = ["make", "-n", *words[1:]]
        done = subprocess.run(dry, cwd=ROOT, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr
    elif words[0] == "pip":
        assert words[1] == "install"
        check_requirements([word for word in words[2:] if not word.startswith("-")])
    elif words[0] == "python":
        assert words[1] == "-m" or (ROOT / words[1]).is_file(), words[1]
    elif words[0] == "causal-qwen":
        parse(words[1:])


def check_requirements(texts: list[str]) -> None:
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    locks = "\n".join(read(lock) for lock in (ROOT / "requirements").glob("*.lock"))
    for text in texts:
        # "." is this project, from a clone
        wanted = Requirement(project["name"] + text[1:] if text.startswith(".") else text)
        if wanted.name == project["name"]:
            assert wanted.extras <= set(project["optional-dependencies"]), text
        else:
            pins = dict(re.findall(r"^([\w.-]+)==(\S+)", locks, re.MULTILINE))
            pinned = {canonicalize_name(name): version for name, version in pins.items()}
            assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text


def parse(words: list[str]) -> None:
    """Read a command line as the command would, options and all, and do no more."""
    from causal_qwen.cli.program import app

    group: Any = typer.main.get_command(app)
    command = group.commands[words[0]]
    with command.make_context(words[0], words[1:]):
        pass


def run_command(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from causal_qwen.cli import main

    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/quit\n"))  # for those that talk
    ended = 0
    try:
        main()
    except SystemExit as stop:
        ended = stop.code
    assert not ended, f"{shlex.join(words)} ends with {ended}"


def is_only_checked(words: list[str]) -> bool:
    return words[0] in NOT_RUN or any(
        words[: len(key.split())] == key.split() for key in NOT_RUN if " " in key
    )


def run_page(path: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    """Run all of a page from top to bottom, as a reader would; says how much was run."""
    names: dict[str, Any] = {"__name__": "__page__"}
    count = 0
    for language, code in blocks(path):
        if language == "bash":
            for words in commands(code):
                if is_only_checked(words):
                    check_only(words)
                else:
                    run_command(words, monkeypatch)
                    count += 1
        elif language == "python" and not code.startswith("# causal_qwen."):
            exec(compile(code, path.name, "exec"), names)
            count += 1
    return count


@pytest.fixture(scope="module")
def small_cache(tmp_path_factory: pytest.TempPathFactory, tiny_directory: Path) -> Path:
    """A cache directory in which a tiny model has the embedded one's place."""
    from causal_qwen.paths import embedded_directory

    cache = tmp_path_factory.mktemp("cache")
    (cache / embedded_directory().name).symlink_to(tiny_directory)
    return cache


@pytest.fixture
def reader_place(tmp_path: Path, small_cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a reader stands: a directory with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(small_cache))
    rng = np.random.default_rng(0)
    for name, count in (("rings.csv", 510), ("more-rings.csv", 5)):
        with (tmp_path / name).open("w", newline="", encoding="utf-8") as file:
            table = csv.writer(file)
            table.writerow(["carat", "cut", "description", "price"])
            for carat in rng.uniform(0.2, 2.0, count).round(2).tolist():
                price = round(4000 * carat * rng.uniform(0.8, 1.2))
                table.writerow([carat, ("Fair", "Ideal")[price % 2], "A ring.", price])
    texts = ["The train was late.", "Our cat sleeps all day.", "A ring costs 900 dollars."]
    for name in ("rows.jsonl", "held-out.jsonl"):
        rows = "".join(json.dumps({"text": text}) + "\n" for text in texts * 8)
        (tmp_path / name).write_text(rows, encoding="utf-8")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "Once upon a time"}\n', encoding="utf-8")
    return tmp_path


@pytest.fixture
def small_base(monkeypatch: pytest.MonkeyPatch, tiny_directory: Path) -> None:
    """`convert smollm2-135m` converts the tiny model: the real one takes half a minute, and
    test_promise.py converts it."""
    from causal_qwen.conversion import convert

    base, tokenizer = convert.load_base, convert.load_tokenizer
    embedded = convert.EMBEDDED

    def small(name: Any) -> Any:
        return tiny_directory.parent / "base" if str(name) == embedded else name

    monkeypatch.setattr(convert, "load_base", lambda name, dtype=None: base(small(name), dtype))
    monkeypatch.setattr(convert, "load_tokenizer", lambda name: tokenizer(small(name)))


# The shortest example names no length, and Hugging Face recommends to.
NO_LENGTH = pytest.mark.filterwarnings("ignore:Using the model-agnostic default `max_length`")


@NO_LENGTH
@pytest.mark.usefixtures("small_base", "few_trees")
def test_every_command_of_the_readme_runs(
    reader_place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exactly as shown, with a tiny model in the embedded one's place."""
    assert run_page(README, reader_place, monkeypatch) >= 15
    capsys.readouterr()
    made = {path.name for path in reader_place.iterdir()}
    assert {"my-model", "priced", "tuned", "valued"} <= made


def test_the_chinese_readme_shows_the_same_commands_and_code() -> None:
    ours, theirs = ([one for one in blocks(path) if one[0] != "text"] for path in (README, CHINESE))
    assert len(ours) == len(theirs)
    for (language, english), (other, chinese) in zip(ours, theirs, strict=True):
        assert language == other
        if language == "bash":
            assert commands(english) == commands(chinese)
        else:
            assert ast.dump(ast.parse(english)) == ast.dump(ast.parse(chinese))


def test_the_two_readmes_link_to_each_other_and_have_the_same_outline() -> None:
    assert f"]({CHINESE.name})" in read(README)
    assert f"]({README.name})" in read(CHINESE)
    outlines = [re.findall(r"^#+ ", read(path), re.MULTILINE) for path in (README, CHINESE)]
    assert outlines[0] == outlines[1]
    rows = [read(path).count("\n|") for path in (README, CHINESE)]
    assert rows[0] == rows[1]
    printed = [
        [code for language, code in blocks(p) if language == "text"] for p in (README, CHINESE)
    ]
    assert printed[0][0] == printed[1][0]


@pytest.mark.parametrize("path", [README, CHINESE], ids=["English", "Chinese"])
def test_the_tree_in_the_readme_names_every_room(path: Path) -> None:
    tree = [code for language, code in blocks(path) if language == "text"][-1]
    package = ROOT / "src/causal_qwen"
    modules = {file.name for file in package.glob("[a-z]*.py")}
    folders = {f"{folder.parent.name}/" for folder in package.glob("*/__init__.py")}
    named = set(re.findall(r"[\w/]+\.py|\w+/", tree))
    assert modules | folders <= named
    assert {name for name in named if name.endswith(".py")} <= modules


RUN_DOCS = [
    page
    for page in DOCS
    if any(language in ("bash", "python") for language, _ in blocks(page))
    and page.name not in ("maths.md", "training.md")
]


@NO_LENGTH
@pytest.mark.usefixtures("small_base", "few_trees")
@pytest.mark.parametrize("page", RUN_DOCS, ids=lambda page: page.stem)
def test_the_code_of_a_page_runs(
    page: Path,
    reader_place: Path,
    tiny_directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Python as it stands; commands are read, and run only in the README's test."""
    (reader_place / "my-model").symlink_to(tiny_directory)
    reason = "read, not run: the README's test runs the commands"
    monkeypatch.setitem(NOT_RUN, "causal-qwen", reason)
    run_page(page, reader_place, monkeypatch)
    capsys.readouterr()


@pytest.mark.parametrize("page", [d for d in DOCS if d not in RUN_DOCS], ids=lambda page: page.stem)
def test_the_commands_of_other_pages_can_be_read(page: Path) -> None:
    for language, code in blocks(page):
        for words in commands(code) if language == "bash" else []:
            assert words[0] == "causal-qwen" or words[0] in NOT_RUN, words
            check_only(words)


# ---------------------------------------------------------------- quotations


def without_comments(code: str) -> list[str]:
    return [line.partition("  #")[0].strip() for line in textwrap.dedent(code).splitlines()]


QUOTED = [code for language, code in blocks(ROOT / "docs/maths.md") if language == "python"]


@pytest.mark.parametrize("quotation", QUOTED, ids=lambda code: code.splitlines()[0].split(".")[-1])
def test_a_quoted_line_is_in_the_source(quotation: str) -> None:
    head, _, code = quotation.partition("\n")
    found = resolve(head.removeprefix("# "))
    found = found.fget if isinstance(found, property) else found
    source, wanted = without_comments(inspect.getsource(found)), without_comments(code)
    starts = range(len(source) - len(wanted) + 1)
    assert any(source[start : start + len(wanted)] == wanted for start in starts), code


def test_every_equation_is_followed_by_the_lines_that_compute_it() -> None:
    kinds = [language for language, _ in blocks(ROOT / "docs/maths.md")]
    assert kinds.count("math") >= 20
    for place, kind in enumerate(kinds):
        if kind == "math":
            assert kinds[place + 1 : place + 2] == ["python"], blocks(ROOT / "docs/maths.md")[place]


def test_every_name_of_ours_in_the_pages_exists() -> None:
    names = {name for path in (*DOCS, README, CHINESE) for name in NAMED.findall(read(path))}
    assert len(names) > 40
    for name in sorted(names):
        resolve(name)


@pytest.mark.slow  # matplotlib, and four seconds of drawing
def test_the_pages_agree_with_the_pictures_that_the_code_draws(tmp_path: Path) -> None:
    drawn = script("pictures").draw(tmp_path)
    kept = {path.name for path in (ROOT / "docs/assets").glob("*.svg")}
    assert {path.name for path in drawn} == kept
    for path in drawn:
        assert rounded(path) == rounded(ROOT / "docs/assets" / path.name), f"{path.name}: make docs"


def rounded(svg: Path) -> str:
    """A picture with its coordinates in tenths, and its ids, hashes of exact coordinates, in order
    of appearance: processors differ in the last digits."""
    drawn = re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.1f}", read(svg))
    ids = dict.fromkeys(re.findall(r'id="(\w*[0-9a-f]{10})"', drawn))
    for place, name in enumerate(ids):
        drawn = drawn.replace(name, f"id-{place}")
    return drawn


# ---------------------------------------------------------------- links and the site


@pytest.mark.parametrize("path", [README, CHINESE], ids=["English", "Chinese"])
def test_every_link_of_a_readme_leads_somewhere(path: Path) -> None:
    targets = LINK.findall(read(path))
    assert len(targets) > 15
    for target in targets:
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("path", [README, CHINESE], ids=["English", "Chinese"])
def test_the_figures_of_a_readme_are_those_of_the_results(path: Path) -> None:
    """Every decimal beside a link to a page of results is a figure of that page, rounded."""
    checked = 0
    for row in re.findall(r"^\|.*\]\(docs/results/.*\|$", read(path), re.MULTILINE):
        claim, page = row.split(" | ")[0], ROOT / LINK.findall(row)[-1]
        figures = [float(figure) for figure in re.findall(r"\d+\.\d+", read(page))]
        for said in re.findall(r"(?<!\d)\d+\.\d+(?!B)", claim):
            places = len(said.partition(".")[2])
            assert any(abs(x - float(said)) <= 0.501 * 10**-places for x in figures), (said, page)
            checked += 1
    assert checked >= 10


def test_the_citation_is_of_this_version() -> None:
    import causal_qwen

    citation = dict(re.findall(r"^([\w-]+): *(\S.*)$", read(ROOT / "CITATION.cff"), re.MULTILINE))
    project = tomllib.loads(read(ROOT / "pyproject.toml"))["project"]
    assert citation["version"] == causal_qwen.__version__ == project["version"]
    assert citation["license"] == project["license"]


def test_the_page_of_results_lists_every_generated_page() -> None:
    listed = set(LINK.findall(read(ROOT / "docs/results.md")))
    for page in (ROOT / "docs/results").glob("*.md"):
        assert f"results/{page.name}" in listed


@pytest.mark.slow
def test_the_site_is_built_without_a_warning_and_asks_nobody_else(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 25
    for page in pages:
        asked = EXTERNAL.search(read(page))
        assert asked is None, f"{page.name}: {asked and asked.group()}"
    mathematics = read(tmp_path / "maths.html")
    equations = re.findall(r"<math.*?</math>", mathematics, re.DOTALL)
    assert len(equations) > 25
    for equation in equations:
        assert "\\" not in equation, equation  # a command that the converter does not know
    assert "src/causal_qwen/modeling/cauchy.py:" in mathematics


# ---------------------------------------------------------------- make reproduce


@pytest.fixture
def reproduce(tmp_path: Path, tiny_directory: Path) -> Callable[..., str]:
    """`reproduce(*arguments)`: the page that the smallest form writes about a tiny Qwen2."""

    def run(*arguments: str) -> str:
        base = tiny_directory.parent / "base"
        done = subprocess.run(
            [
                *(sys.executable, str(ROOT / "benchmarks/reproduce.py"), "--quick"),
                *("--model", str(base), "--output", str(tmp_path), *arguments),
            ],
            env={**os.environ, "CAUSAL_QWEN_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=1800,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return read(tmp_path / "base.md")

    return run


@pytest.mark.slow  # every benchmark once, if on a tiny model
def test_results_can_be_repeated_on_another_model(
    reproduce: Callable[..., str], tmp_path: Path
) -> None:
    page = reproduce("--parts", "promise", "engine")
    assert "| ours (SmolLM2-135M) | this model (base) |" in page
    rows = {row.split(" | ")[0]: row for row in page.splitlines() if row.startswith("| ")}
    assert rows["| largest difference of logits to the base model"].endswith("| 0 |")
    assert "100.0%" in rows["| `standard` chooses what the base model would"].split(" | ")[-1]
    engine = json.loads((tmp_path / "base.json").read_text(encoding="utf-8"))["engine"]
    assert engine["`causal-qwen verify`"] == "passed"


@pytest.mark.slow
def test_all_parts_can_be_repeated_on_another_model(reproduce: Callable[..., str]) -> None:
    page = reproduce()
    assert page.count("\n## ") == 5  # one for each part
    assert "nan" not in page
