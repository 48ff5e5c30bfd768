"""The command line: commands, options, completion, results, errors and interruption."""

from __future__ import annotations

import copy
import http.client
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import typer.main
from rich.cells import cell_len

from causal_qwen import Panel, __version__, terminal
from causal_qwen.cli import demo as demo_parts
from causal_qwen.cli import doctor, main
from causal_qwen.cli.chat import Conversation
from causal_qwen.cli.options import parse_settings
from causal_qwen.cli.program import app
from causal_qwen.conversion.convert import default_model
from causal_qwen.individuals import OWN_FIELDS, Individual
from causal_qwen.numpy_engine.calibration import TEXTS
from causal_qwen.session import Session
from causal_qwen.session import open as open_session

BENCHMARK_TEXTS = Path(__file__).parents[2] / "benchmarks" / "_texts.py"
COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PROGRAM = [sys.executable, "-m", "causal_qwen"]
GENERATING = ("generate", "chat", "counterfactual")
WITHOUT_JSON = ("app", "demo", "serve")
WITHOUT_MODEL = (
    "audit",
    "convert",
    "doctor",
    "export",
    "predict",
    "quantize",
    "report",
    "verify",
    "what-if",
)
GUARD = 1800  # seconds: ends a test that hangs; no test measures time


def causal_qwen(
    *arguments: str, text: str | None = None, **settings: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *arguments],
        input=text,
        stdin=subprocess.DEVNULL if text is None else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=GUARD,
        env={**os.environ, **settings},
    )


class Result(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def here(
    *arguments: str,
    text: str | bytes | io.StringIO = "",
    out: io.StringIO | None = None,
    **settings: str,
) -> Result:
    """The same in this process, which has imported torch already."""
    if isinstance(text, bytes):
        typed: io.TextIOBase = io.TextIOWrapper(io.BytesIO(text), "utf-8")
    else:
        typed = io.StringIO(text) if isinstance(text, str) else text
    out, err, code = out or io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["causal-qwen", *arguments]),
        mock.patch.object(sys, "stdin", typed),
        mock.patch.dict(os.environ, settings),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Result(code, out.getvalue(), err.getvalue())


def accept_ctrl_c() -> None:
    """In a new process: one started in the background may ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(*command: str) -> subprocess.Popen[str]:
    """A process that runs beside the test and can be interrupted."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=accept_ctrl_c)


def options(command: str) -> dict[str, Any]:
    """Every spelling of every option of a command."""
    return {name: one for one in COMMANDS[command].params for name in (*one.opts, one.name)}


# ---------------------------------------------------------------- commands and options


def test_every_command_exists_and_demo_is_listed_first() -> None:
    assert set(COMMANDS) == {
        *(
            "demo",
            "convert",
            "export",
            "generate",
            "chat",
            "predict",
            "fit",
            "counterfactual",
            "ask",
            "train",
        ),
        *("evaluate", "report", "verify", "app", "doctor"),
        *("audit", "what-if", "serve", "quantize"),
    }
    assert next(iter(COMMANDS)) == "demo"
    done = here("--help")
    places = [done.stdout.index(f" {name} ") for name in COMMANDS]
    assert places == sorted(places)


def test_the_command_line_runs_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "causal_qwen", "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: causal-qwen [OPTIONS] COMMAND" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_shared_options_have_the_same_names_in_every_command(command: str) -> None:
    known = options(command)
    assert ("--json" in known) == (command not in WITHOUT_JSON)
    assert ("--model" in known) == (command not in WITHOUT_MODEL)
    if "--model" in known:
        assert known["--model"] is known["-m"]
        assert known["--model"].default == ""  # the embedded one
    if command in GENERATING:
        assert known["--individual"] is known["-i"]
        assert known["--temperature"] is known["-t"]
        assert known["--max-new-tokens"] is known["-n"]
        assert "--set" in known


def test_a_short_option_means_the_same_in_every_command() -> None:
    meant = defaultdict(set)
    for command in COMMANDS.values():
        for one in command.params:
            long = next((name for name in one.opts if name.startswith("--")), None)
            for short in one.opts:
                if short.startswith("-") and not short.startswith("--"):
                    meant[short].add(long)
    assert meant
    assert {short: names for short, names in meant.items() if len(names) > 1} == {}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_in_the_help_of_a_command_parses(command: str) -> None:
    *_, example = COMMANDS[command].help.partition("Example: ")
    words = shlex.split(" ".join(example.split()))
    assert words[:2] == ["causal-qwen", command]
    COMMANDS[command].make_context(command, words[2:])  # raises on what does not exist
    for one in COMMANDS[command].params:
        assert one.name == "help" or one.help, f"{command} {one.name} has no help"


# ---------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("causal-qwen generate --individ", {"--individual"}),
        ("causal-qwen chat --mode c", {"causal", "compatible"}),
    ],
)
def test_the_shell_completes_commands_options_and_modes(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = causal_qwen(_CAUSAL_QWEN_COMPLETE="complete_bash", **words)
    assert set(done.stdout.split()) == offered, done.stderr


# ---------------------------------------------------------------- generate


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_the_embedded_model_is_the_default(
    engine: str, tiny_directory: Path, tmp_path: Path
) -> None:
    """The cache of this test holds a tiny model in its place."""
    (tmp_path / f"smollm2-135m-{version('causal-qwen')}").symlink_to(tiny_directory)
    asked = ("generate", "The train was late, so", "-i", "7", "-n", "8", "--json")
    asked = (*asked, "--engine", engine)
    done = here(*asked, CAUSAL_QWEN_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["individual"] == 7
    assert record["text"]
    for name in ("smollm2-135m", str(tiny_directory)):
        again = here(*asked, "--model", name, CAUSAL_QWEN_CACHE=str(tmp_path))
        assert json.loads(again.stdout) == record


def test_generate_prints_the_prompt_and_the_text(tiny_directory: Path) -> None:
    asked = ("generate", "Hi there", "-m", str(tiny_directory), "-n", "6")
    record = json.loads(here(*asked, "--json").stdout)
    assert here(*asked).stdout == f"Hi there{record['text']}\n"
    assert here(*asked, "--set", "numbers=value").stdout == f"Hi there{record['text']}\n"
    sampled = [here(*asked, "--mode", "compatible", "--seed", seed).stdout for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]


class Pieces(io.StringIO):
    """Everything that is written, as it is written."""

    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def write(self, text: str) -> int:
        self.pieces.append(text)
        return super().write(text)


def test_a_text_with_numbers_is_printed_token_by_token(opened: Any, tmp_path: Path) -> None:
    processor, model = copy.deepcopy((opened.processor, opened.model))
    model.decision.threshold.data[model.config.num_token_id] -= 50.0  # it says numbers
    processor.encode_numbers = model.config.encode_numbers = "value"
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    words = ["generate", "a 7 b", "-m", str(tmp_path), "-i", "3", "-n", "12", "--set", "min_p=0"]
    record = json.loads(here(*words, "--json").stdout)
    assert record["numbers"]
    live = Pieces()
    assert here(*words, out=live).stdout == f"a 7 b{record['text']}\n"
    assert sum(bool(piece) for piece in live.pieces) > 5


@pytest.fixture
def configured(tiny_directory: Path, tmp_path: Path) -> Callable[..., str]:
    """`configured(**fields)`: a copy of the model with these fields in its generation config."""

    def copy_model(**fields: Any) -> str:
        path = tmp_path / "configured"
        shutil.copytree(tiny_directory, path, dirs_exist_ok=True)
        saved = json.loads((tiny_directory / "generation_config.json").read_text("utf-8"))
        (path / "generation_config.json").write_text(json.dumps(saved | fields), "utf-8")
        return str(path)

    return copy_model


SAVED_CONFIGS: list[dict[str, Any]] = [
    {},
    {"do_sample": True, "top_p": 0.8, "temperature": 3.0},
    {"persistence": 0.3, "causal_min_p": 0.2},
]


@pytest.mark.parametrize("saved", SAVED_CONFIGS)
@pytest.mark.parametrize(
    "asked", [[], ["-i", "7"], ["-i", "7", "--mode", "sampling"], ["-i", "7", "-t", "2"]]
)
def test_both_engines_agree_under_every_saved_config(
    configured: Callable[..., str], saved: dict[str, Any], asked: list[str]
) -> None:
    words = ("Hi there", "-m", configured(**saved), "-n", "8", "--json", *asked)
    if not asked and saved.get("do_sample"):
        words = (*words, "-i", "3", "--mode", "sampling")  # else each draws its own individual
    torch, numpy = (
        json.loads(here("generate", *words, "--engine", one).stdout) for one in ("torch", "numpy")
    )
    assert torch["text"] == numpy["text"]
    same = {"mode", "individual", "do_sample", "min_p", *OWN_FIELDS}
    assert {name: torch[name] for name in same} == {name: numpy[name] for name in same}


@pytest.mark.parametrize("engine", ["torch", "numpy"])
def test_an_individual_implies_the_causal_mode(engine: str, tiny_directory: Path) -> None:
    tiny = ("-m", str(tiny_directory), "--engine", engine)
    words = ("generate", "Hi there", *tiny, "-n", "8", "--json", "-i", "7")
    implied = json.loads(here(*words).stdout)
    assert implied["mode"] == "causal"
    assert implied == json.loads(here(*words, "--mode", "causal").stdout)


@pytest.mark.parametrize("engine", ["torch", "numpy"])
@pytest.mark.parametrize(
    ("asked", "given"),
    [
        (["--mode", "causal"], "--mode causal --individual N"),
        (["--mode", "causal", "-t", "0.7"], "--mode causal --individual N --temperature 0.7"),
        (["--mode", "causal", "-t", "0"], "--mode causal --individual N --temperature 0.0"),
        (
            ["--mode", "causal", "-s", "whole_words=false", "-s", "min_p=0.2"],
            "--mode causal --individual N --set whole_words=false --set min_p=0.2",
        ),
        (["--mode", "sampling", "--chat"], "--mode sampling --individual N --chat"),
        (["--mode", "compatible", "-t", "2"], "--mode compatible --temperature 2.0 --seed N"),
    ],
)
def test_the_replay_hint_generates_the_same_text(
    engine: str, asked: list[str], given: str, configured: Callable[..., str]
) -> None:
    model = configured(min_density=0.3)
    drawn = here("generate", "a b", "-m", model, "--engine", engine, "-n", "9", *asked)
    (tail,) = re.findall(r"^replay: (.*)$", drawn.stderr, re.MULTILINE)
    words = shlex.split(tail)
    assert words[:4] == ["--model", model, "--engine", engine]
    assert re.sub(r"\d{5,}", "N", shlex.join(words[4:])).replace(" --max-new-tokens 9", "") == given
    again = here("generate", "a b", *words)
    assert again.stdout == drawn.stdout
    assert "replay" not in again.stderr


def test_version_is_printed() -> None:
    assert here("--version") == Result(0, f"causal-qwen {__version__}\n", "")


def test_a_text_ends_with_the_context(tiny_directory: Path) -> None:
    asked = ("x" * 2040, "-m", str(tiny_directory), "-n", "50", "--json")
    record = json.loads(here("generate", *asked, "--watch").stdout)
    assert len(record["tokens"]) == 8  # of 2048
    assert json.loads(here("generate", *asked).stdout)["text"] == record["text"]


def test_np_generate_is_an_old_name(tiny_directory: Path) -> None:
    asked = ("-n", "4", "--json", "--mode", "causal", "-i", "3")
    first = here("np-generate", str(tiny_directory), "Hi there", *asked)
    named = here("np-generate", "Hi there", "--model", str(tiny_directory), *asked)
    watched = here("generate", "Hi there", "-m", str(tiny_directory), *asked)
    assert first.returncode == 0, first.stderr
    said = json.loads(first.stdout)
    assert said == json.loads(named.stdout)
    assert said["text"] == json.loads(watched.stdout)["text"]
    assert json.loads(first.stdout)["individual"] == 3


def test_numpy_finds_a_hub_model_in_the_cache(tiny_directory: Path, tmp_path: Path) -> None:
    kept = tmp_path / "hub" / "models--me--tiny"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "snapshots" / "abc").symlink_to(tiny_directory)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    by_numpy = ("generate", "--engine", "numpy", "Hi", "-n", "3", "-q", "-m")
    done = causal_qwen(*by_numpy, "me/tiny", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == here(*by_numpy, str(tiny_directory)).stdout
    gone = causal_qwen(*by_numpy, "me/other", **settings)
    assert gone.returncode == 1
    assert re.fullmatch("causal-qwen: me/other .*\n", gone.stderr)


# ---------------------------------------------------------------- chat


def test_a_piped_chat_prints_one_line_of_json_per_turn(
    tiny_directory: Path, tmp_path: Path
) -> None:
    asked = ("chat", "--model", str(tiny_directory), "-i", "7", "-n", "5", "--json")
    saved = tmp_path / "ada.safetensors"
    turns = "hello\n\nand you?\n/individual 8\nhello\n/quit\nnever asked\n"
    done = here(*asked, text=turns)
    assert done.returncode == 0, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["turn"], one["prompt"], one["individual"]) for one in records] == [
        (1, "hello", 7),
        (2, "and you?", 7),
        (3, "hello", 8),
    ]
    assert all(one["text"] and one["mode"] == "causal" for one in records)
    assert all(one["temperature"] == 1.0 and "min_density" in one for one in records)
    one = ("-m", str(tiny_directory), "-i", "7", "-n", "1", "--save-individual", str(saved))
    assert here("generate", "x", *one).returncode == 0
    other = ("chat", "--model", str(tiny_directory), "-i", "8", "-n", "5", "--json")
    again = here(*other, text=f"/individual {saved}\nhello\nand you?\n/reset\nhello\n")
    later = [json.loads(line) for line in again.stdout.splitlines()]
    assert later[0]["text"] == later[2]["text"] == records[0]["text"]  # no history
    assert later[1]["text"] == records[1]["text"]


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("/nonsense", "/nonsense"),
        ("/individual nobody.safetensors", "nobody.safetensors"),
        ("/mode loud", "mode='loud'"),
    ],
)
def test_an_error_ends_its_own_line_of_a_piped_chat_only(
    tiny_directory: Path, line: str, token: str
) -> None:
    asked = ("chat", "-m", str(tiny_directory), "-i", "7", "-n", "2")
    good = here(*asked, text="hello\n")
    done = here(*asked, text=f"{line}\nhello\n")
    assert (good.returncode, done.returncode) == (0, 1)
    assert done.stdout == good.stdout != ""
    assert token in done.stderr
    assert "Traceback" not in done.stderr
    [error, answer] = here(*asked, "--json", text=f"{line}\nhello\n").stdout.splitlines()
    assert json.loads(error)["command"] == line
    assert token in json.loads(error)["error"]
    assert json.loads(answer)["turn"] == 1


def test_a_line_that_cannot_be_asked_ends_its_own_turn_only(tiny_directory: Path) -> None:
    asked = ("chat", "-m", str(tiny_directory), "-i", "7", "-n", "2", "--json")
    done = here(*asked, text=f"hello\n{'a' * 3000}\nhello\n")
    assert done.returncode == 1, done.stderr
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["turn"] for one in records] == [1, 2, 3]
    assert ["error" in one for one in records] == [False, True, False]
    assert "tokens" in records[1]["error"]
    assert "Traceback" not in done.stderr


class Terminal(io.StringIO):
    """Lines that are typed, and the end of input, Ctrl-D."""

    def isatty(self) -> bool:
        return True


class StoppedAnswer(io.StringIO):
    """Raises SIGINT at the first piece of an answer."""

    def write(self, text: str) -> int:
        if text and self.getvalue().endswith("> "):
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_stops_a_typed_answer_and_ctrl_d_the_chat(tiny_directory: Path) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        asked = ("chat", "-m", str(tiny_directory), "-i", "7", "-n", "1900")
        done = here(*asked, text=Terminal("/nonsense\nhello\n"), out=StoppedAnswer())
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 0, done.stderr
    notes = "individual 7 answers", "is unknown", "(stopped)"
    places = [done.stderr.index(note) for note in notes]
    assert places == sorted(places)
    assert done.stderr.count("you> ") == 3
    assert done.stdout.startswith("individual 7> ")
    assert len(done.stdout) < 1000


@pytest.fixture(scope="module")
def opened(tiny_directory: Path) -> Session:
    return open_session(str(tiny_directory), "torch")


def test_one_individual_answers_every_turn(opened: Any) -> None:
    talk = Conversation(opened, individual=7, max_new_tokens=6)
    answers = [talk.ask("hello"), talk.ask("and you?")]
    assert answers[0].settings == answers[1].settings
    assert answers[0].settings["individual"] == 7
    assert [one["role"] for one in talk.messages] == ["user", "assistant"] * 2
    assert talk.messages[1]["content"] == answers[0].text.strip()
    assert "standard" in talk.command("/mode standard")
    assert talk.ask("hello").settings["individual"] is None


def test_a_long_conversation_leaves_out_its_oldest_turns_and_keeps_its_system_message(
    opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, read = opened.engine.context, list[Any]()
    stream = opened.stream
    monkeypatch.setattr(
        opened,
        "stream",
        lambda messages, *a, **b: [read.append(messages), stream(messages, *a, **b)][1],
    )
    talk = Conversation(opened, mode="standard", system="Be kind.", max_new_tokens=4)
    talk.ask("a" * (room // 2))
    talk.ask("b" * (room // 2))
    assert [one["content"][:2] for one in read[-1]] == ["Be", "bb"]
    with pytest.raises(ValueError, match="tokens"):
        talk.ask("c" * room)
    assert len(talk.messages) == 4  # as before


def test_a_new_individual_speaks_after_reset_as_in_a_new_chat(opened: Any) -> None:
    talk = Conversation(opened, individual=7, max_new_tokens=4)
    talk.ask("hello")
    talk.command("/individual 4")
    talk.command("/reset")
    fresh = Conversation(opened, individual=4, max_new_tokens=4)
    assert talk.ask("hello").text == fresh.ask("hello").text


def test_chat_and_generate_have_the_defaults_of_the_model(configured: Callable[..., str]) -> None:
    model = configured(min_density=0.3, temperature=2.0)
    asked = ("-m", model, "-i", "7", "-n", "6", "--json")
    chat = json.loads(here("chat", *asked, text="hello\n").stdout)
    text = json.loads(here("generate", "hello", "--chat", *asked).stdout)
    assert chat["text"] == text["text"]
    assert chat["temperature"] == text["temperature"] == 2.0
    assert chat["min_density"] == text["min_density"] == 0.3


def test_counterfactual_prints_both_texts_and_writes_a_page(
    tiny_directory: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    ask = ("counterfactual", "The king", "-m", str(tiny_directory), "-i", "7", "-n", "4")
    done = here(*ask, "--prompt", "The queen", "--html", str(page))
    assert done.returncode == 0, done.stderr
    assert all(word in done.stdout for word in ("factual", "The king", "The queen"))
    assert page.read_text(encoding="utf-8").startswith("<div class='counterfactual'>")


# ---------------------------------------------------------------- doctor


def test_a_panel_answers_a_question_and_its_other_version(tiny_directory: Path) -> None:
    asked = ["ask", "Which?", "cat", "dog", "--model", str(tiny_directory), "--individuals", "40"]
    record = json.loads(here(*asked, "--json").stdout)
    panel = Panel(open_session(str(tiny_directory)), 40)
    assert record == json.loads(json.dumps(panel.ask("Which?", ["cat", "dog"]).to_dict()))
    both = json.loads(here(*asked, "--versus", "Who?", "--json").stdout)
    assert both["kappa"] == panel.compare("Which?", "Who?", ["cat", "dog"]).kappa


def test_answers_to_a_file_of_questions_resume_after_a_kill(
    tiny_directory: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    source, output = tmp_path / "survey.csv", tmp_path / "answers.parquet"
    source.write_text("question,options\nWhich?,cat;dog\nWho?,\nHow many?,number\n")
    call = ["ask", "--questions", str(source), "--output", str(output)]
    call += ["--model", str(tiny_directory), "--individuals", "ada,7"]
    assert here(*call).returncode == 0
    whole = pandas.read_parquet(output)
    assert whole["id"].tolist() == ["1", "1", "2", "2", "3", "3"]
    assert whole["person"].tolist() == ["ada", "7"] * 3
    (output / "000001.parquet").unlink()
    assert here(*call).returncode == 0
    pandas.testing.assert_frame_equal(pandas.read_parquet(output), whole)
    source.write_text("id,what\n9,Other?\n")
    assert "name its column question" in here(*call).stderr


def test_doctor_prints_the_same_facts_as_json_and_as_text() -> None:
    default_model()  # is converted
    done = here("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_well"]
    assert found["extras"]["torch"]["is_complete"]
    assert found["device"] == "cpu" or found["device"]
    shown_text = here("doctor", COLUMNS="200").stdout
    assert found["verdict"] in shown_text
    assert found["embedded_model"] in shown_text
    assert "dequantised from" in shown_text
    assert "SmolLM2-135M-Instruct.Q4_1.gguf" in shown_text


def test_doctor_measures_the_engines() -> None:
    record = json.loads(here("doctor", "--speed", "--json").stdout)
    assert {"torch", "numpy"} <= {*record["tokens_per_second"]}
    assert all(rate > 0 for rate in record["tokens_per_second"].values())


@pytest.mark.parametrize(
    ("gone", "is_well", "verdict"),
    [
        ("tokenizers", False, "The installation is incomplete: pip install . in a clone"),
        (
            "transformers",
            True,
            "The NumPy engine works; for everything else: pip install '.[torch]'",
        ),
        ("peft", True, "Everything that is installed works; not installed: lora."),
    ],
)
def test_doctor_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, gone: str, is_well: bool, verdict: str
) -> None:
    there = {name: version for name, version in _suitable().items() if name != gone}
    monkeypatch.setattr(doctor, "_version", there.get)
    found = doctor.examine()
    assert found["is_well"] == is_well
    assert found["verdict"].startswith(verdict)


def _suitable() -> dict[str, str]:
    """The lowest version that is wanted of every package."""
    wanted = [one for extra in ("", *doctor.PURPOSES) for one in doctor._requirements(extra)]
    lowest = ((one.name, [s for s in one.specifier if s.operator == ">="]) for one in wanted)
    return {name: found[0].version for name, found in lowest if found}  # not our own extras


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("precious")
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", f"{tmp_path}/file/deeper")
    done = here("generate", "x", "--engine", "numpy")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines()[-1].startswith(f"causal-qwen: {tmp_path}/file")
    assert (tmp_path / "file").read_text() == "precious"


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "[torch]"),
        ("datasets", "[train]"),
        ("peft", "[lora]"),
        ("sklearn", "[tables]"),
    ],
)
def test_the_cure_for_a_missing_module_names_its_extra(module: str, extra: str) -> None:
    where = "in a clone of the project"
    assert doctor.cure(module) == f"{module} is not installed: pip install '.{extra}' {where}"


# ---------------------------------------------------------------- demo


@pytest.fixture(scope="module")
def demo(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The whole demo on a tiny model, in few words; its features are kept from run to run."""
    cache = str(tmp_path_factory.mktemp("cache"))

    @mock.patch("causal_qwen.cli.demo.NEW_TOKENS", 5)
    def run(*arguments: str, **settings: str) -> Any:
        model = ("--model", str(tiny_directory))
        return here("demo", *model, *arguments, CAUSAL_QWEN_CACHE=cache, **settings)

    return run


def test_no_prompt_of_the_demo_took_part_in_calibration() -> None:
    ours = {demo_parts.PROMPT, demo_parts.CHANGED_PROMPT, demo_parts.OTHER_PROMPT}
    assert len(ours) == 3
    read = " ".join(TEXTS) + BENCHMARK_TEXTS.read_text(encoding="utf-8")
    assert not any(prompt in read for prompt in ours)


def test_the_demo_fits_the_width_of_the_terminal(demo: Callable[..., Any]) -> None:
    done = demo(COLUMNS="80")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for part in ("1 · The promise", "2 · Four modes", "3 · Individuals", "4 · Counterfactual"):
        assert any(part in line for line in lines), part
    for part in ("5 · A number with its interval", "90% interval"):
        assert any(part in line for line in lines), part
    assert max(cell_len(line) for line in lines) <= 80
    assert "\x1b" not in done.stdout


def test_the_demo_runs_without_pandas(
    demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("causal_qwen.cli.demo.find_spec", lambda name: None)
    done = demo()
    assert done.returncode == 0, done.stderr
    assert "interval: pandas is not installed: pip install '.[tables]'" in done.stdout


# ---------------------------------------------------------------- progress


def test_progress_is_printed_in_lines_outside_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.progress_bar("reading") as count:
        for done in range(1, 11):
            now[0] += 1.0
            count(done, 10)
    # after two seconds, and then every five
    assert capsys.readouterr().err == "reading: 2 of 10\nreading: 7 of 10\n"
    with terminal.progress_bar("reading") as count, terminal.status() as stage:
        count(10, 10)
        stage("saving")
    assert capsys.readouterr().err == "saving ...\n"
    with terminal.progress_bar("reading", False) as count, terminal.status(False) as stage:
        now[0] += 100.0
        count(10, 10)
        stage("saving")
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- the playground


@pytest.mark.slow  # 11 s of processor time: gradio, pandas, scikit-learn and torch are imported
def test_the_playground_serves_its_page_until_ctrl_c(tiny_directory: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(sys.executable).with_name("causal-qwen")  # as it was installed
    asked = ["app", "--port", str(port), "--no-browser", "--model", str(tiny_directory)]
    with started(str(script), *asked) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline(), process.stdout.readline()]
        assert lines[0].endswith(" ...\n")
        assert f"http://127.0.0.1:{port}" in lines[1]
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=GUARD)
        server.request("GET", "/")
        page = server.getresponse()
        assert page.status == 200
        assert "CausalQwen" in page.read().decode("utf-8")
        server.close()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=GUARD)
    assert (process.returncode, errors) == (0, "")
    assert rest.endswith("losed.\n")


# ---------------------------------------------------------------- errors


@pytest.fixture(scope="module")
def place(tiny_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What a user may name by mistake; `{model}` and `{base}` are good."""
    root = tmp_path_factory.mktemp("places")
    (root / "empty").mkdir()
    (root / "broken").mkdir()
    (root / "broken" / "config.json").write_text("{not json", "utf-8")
    (root / "full").mkdir()
    (root / "full" / "precious.txt").write_text("mine", "utf-8")
    (root / "nothing.txt").write_text("\n", "utf-8")
    (root / "binary.txt").write_bytes(b"\xff\xfe\x00")
    (root / "junk.safetensors").write_bytes(b"junk")
    rows = "".join(f"{row},{2 * row}\n" for row in range(20))
    (root / "rows.csv").write_text(f"a,price\n{rows}", "utf-8")
    (root / "rows.jsonl").write_text('{"text": "a b c"}\n' * 8, "utf-8")
    Individual.draw(7, seed=1).save(root / "stranger.safetensors")
    model = str(tiny_directory)
    return {"root": str(root), "model": model, "base": str(tiny_directory.parent / "base")}


ERRORS = {  # a command line with {places} -> the key token of its error
    "generate x --individual 3 --mode standard": "--individual",
    "generate x --seed 3 -m {model}": "--seed",
    "generate x --model nowhere": "nowhere",
    "generate x -m {root}/broken": "broken/config.json",
    "generate x -m {model} -i {root}/junk.safetensors": "junk.safetensors",
    "generate x -m {model} -i {root}/stranger.safetensors": "7",
    "generate {long} -m {model}": "3000",
    "counterfactual x": "--number",
    "verify nowhere": "nowhere",
    "convert {model} {root}/new --merge": "CausalQwen",
    "convert smollm2-135m /proc/1/out --merge": "/proc/1/out",
    "convert {base} {root}/full --merge": "full",
    "convert {base} {root}/new --merge --causal-size -3": "causal_size=-3",
    "convert {base} {root}/new": "new would be a causal layer: name it",
    "convert {base} {root}/new.causal --dtype float32": "add --merge",
    "fit {root}/gone.csv -y price -o {root}/new": "gone.csv",
    "fit {root}/rows.csv -y cost -o {root}/new": "'cost'",
    "fit {root}/rows.csv -y price -o {root}/full": "full",
    "predict {root}/empty {root}/rows.csv": "regressor.skops",
    "train": "--data",
    "train -d {root}/rows.jsonl -o {root}/full -m {model}": "full",
    "evaluate {root}/rows.csv -m {model}": "template",
    "generate x -m {model} --set loud=1": "min_p",
    "generate x -m {model} --set top_k=-1": "top_k=-1",
    "train -d {root}/rows.jsonl -o {root}/new -m {model} --set loud=1": "--set loud=1",
    "app --no-browser --port 0 --host 192.0.2.1": "192.0.2.1:0",
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_is_one_sentence_and_nothing_is_written(line: str, place: dict[str, str]) -> None:
    words = [word.format(long="x" * 3000, **place) for word in line.split()]
    done = here(*words)
    assert done.returncode == 1
    assert done.stdout == ""
    *progress, sentence = done.stderr.splitlines()
    assert all(one.endswith(" ...") for one in progress), done.stderr
    assert sentence.startswith("causal-qwen: ")
    assert ERRORS[line] in sentence
    assert "--debug" not in sentence
    root = Path(place["root"])
    assert not (root / "new").exists()
    assert [file.name for file in (root / "full").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("line", "token"),
    [
        ("generate  ", "prompt"),
        ("generate x --save-individual {root}", "{root} is a directory"),
        ("counterfactual x --prompt y --semantics loud", "'pearl', 'disco'"),
        ("generate x --temprature 1", "--temprature"),
        ("generate x -n 0", "--max-new-tokens"),
        (f"generate x --seed {2**64}", "--seed"),
    ],
)
def test_a_wrong_option_is_refused_by_name_in_one_sentence(
    line: str, token: str, place: dict[str, str]
) -> None:
    done = here(*(word.format(**place) for word in line.split(" ")))
    assert done.returncode == 2
    assert done.stdout == ""
    (sentence,) = done.stderr.splitlines()
    assert sentence.startswith("causal-qwen: ")
    assert token.format(**place) in sentence
    assert not (Path(place["root"]) / "new").exists()


def test_debug_shows_the_traceback_in_any_position() -> None:
    done = causal_qwen("train", "--debug")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert "\nValueError: " in done.stderr
    with pytest.raises(ValueError, match="--data"):
        here("--debug", "train")


def test_the_program_without_arguments_prints_its_help() -> None:
    assert here().stdout == here("--help").stdout


def test_force_never_deletes_the_working_directory(
    place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable in a script must not cost a directory."""
    (tmp_path / "precious.txt").write_text("mine", "utf-8")
    monkeypatch.chdir(tmp_path)
    for output in ("", ".", str(tmp_path), str(tmp_path.parent)):
        done = here("convert", place["base"], output, "--merge", "--force")
        assert "working directory" in done.stderr
    assert (tmp_path / "precious.txt").read_text("utf-8") == "mine"


# ---------------------------------------------------------------- Ctrl-C


def test_ctrl_c_ends_a_process_without_a_traceback(tiny_directory: Path) -> None:
    words = ("generate", "Hi there", "--engine", "numpy", "-m", str(tiny_directory), "-n", "2000")
    with started(*PROGRAM, *words) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "Hi"  # it speaks
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=GUARD)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "causal-qwen:" not in errors


def test_settings_are_json_or_pythons_own_words() -> None:
    given = ["a=False", "b=true", "c=None", "d=0.5", "e=cosine"]
    found = parse_settings(given, "abcde")
    assert found == {"a": False, "b": True, "c": None, "d": 0.5, "e": "cosine"}
    with pytest.raises(ValueError, match="--set f=1: name one of a, b"):
        parse_settings(["f=1"], "ab")


def test_a_missing_file_that_is_read_is_named_and_not_the_output(tmp_path: Path) -> None:
    done = here("predict", str(tmp_path), str(tmp_path / "no.csv"), "-o", str(tmp_path / "o.csv"))
    assert done.returncode == 1
    assert "o.csv cannot be written" not in done.stderr
    assert not (tmp_path / "o.csv").exists()
