"""The command line: thin, quick, the same everywhere, and readable when something is wrong."""

from __future__ import annotations

import copy
import http.client
import io
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pexpect
import pytest
import typer.main
from rich.cells import cell_len

from causal_qwen import __version__, terminal
from causal_qwen.cli import app, doctor, main
from causal_qwen.cli.chat import Conversation
from causal_qwen.conversion.convert import open_model
from causal_qwen.individuals.individual import Individual

COMMANDS: dict[str, Any] = typer.main.get_command(app).commands  # type: ignore[attr-defined]
PROGRAM = [sys.executable, "-m", "causal_qwen"]
SPEAKERS = ("generate", "chat", "counterfactual", "np-generate")
RESULTLESS = ("app",)  # prints nothing that a machine could want
MODELLESS = ("convert", "doctor", "report")


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
        timeout=600,
        env={**os.environ, **settings},
    )


class Done(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def here(*arguments: str, text: str = "", out: io.StringIO | None = None, **settings: str) -> Done:
    """The same in this process, which has paid for torch already."""
    out, err, code = out or io.StringIO(), io.StringIO(), 0
    with (
        mock.patch.object(sys, "argv", ["causal-qwen", *arguments]),
        mock.patch.object(sys, "stdin", io.StringIO(text)),
        mock.patch.dict(os.environ, settings),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    return Done(code, out.getvalue(), err.getvalue())


def heed_ctrl_c() -> None:
    """In a new process: what was started in the background may ignore it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def started(*command: str) -> subprocess.Popen[str]:
    """A process that goes on beside the test, and can be interrupted."""
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, preexec_fn=heed_ctrl_c)


def options(command: str) -> dict[str, Any]:
    """Every spelling of every option of a command."""
    return {name: one for one in COMMANDS[command].params for name in (*one.opts, one.name)}


# ---------------------------------------------------------------- one command line


def test_the_promised_commands_are_all_there_and_the_demo_is_the_first() -> None:
    assert set(COMMANDS) == {
        *("demo", "convert", "generate", "chat", "predict", "fit", "counterfactual", "train"),
        *("evaluate", "report", "verify", "np-generate", "app", "doctor"),
    }
    assert next(iter(COMMANDS)) == "demo"
    done = here("--help")
    places = [done.stdout.index(f" {name} ") for name in COMMANDS]
    assert places == sorted(places)


@pytest.mark.parametrize("module", ["causal_qwen", "causal_qwen.cli"])
def test_the_command_line_is_a_module_too(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: causal-qwen [OPTIONS] COMMAND" in done.stdout


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_has_the_same_options_as_the_others(command: str) -> None:
    known = options(command)
    assert ("--json" in known) == (command not in RESULTLESS)
    assert ("--model" in known) == (command not in MODELLESS)
    if "--model" in known:
        assert known["--model"] is known["-m"]
        assert known["--model"].default == ""  # the embedded one
    if command in SPEAKERS:
        assert known["--individual"] is known["-i"]
        assert known["--temperature"] is known["-t"]
        assert known["--max-new-tokens"] is known["-n"]
        assert "--min-density" in known


def test_a_letter_stands_for_one_option_in_every_command() -> None:
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
def test_the_help_of_a_command_has_an_example_that_can_be_read(command: str) -> None:
    import shlex

    *_, example = COMMANDS[command].help.partition("Example: ")
    words = shlex.split(" ".join(example.split()))
    assert words[:2] == ["causal-qwen", command]
    COMMANDS[command].make_context(command, words[2:])  # raises on what does not exist
    for one in COMMANDS[command].params:
        assert one.name == "help" or one.help, f"{command} {one.name} has no help"


def test_help_comes_at_once() -> None:
    """In processor time: the machine may be busy with something else."""

    def seconds() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    spent = []
    for _ in range(3):
        before = seconds()
        assert causal_qwen("--help").returncode == 0
        spent.append(seconds() - before)
    assert min(spent) < 0.5


# ---------------------------------------------------------------- completion


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("causal-qwen np", {"np-generate"}),
        ("causal-qwen generate --individ", {"--individual"}),
        ("causal-qwen chat --mode c", {"causal", "compatible"}),
    ],
)
def test_the_shell_completes_commands_options_and_modes(typed: str, offered: set[str]) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" "))}
    done = causal_qwen(_CAUSAL_QWEN_COMPLETE="complete_bash", **words)
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_completion_of_bash_is_shown() -> None:
    command = " ".join([*PROGRAM, "--show-completion", "; true"])  # `; true`: bash stays the parent
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False
    )
    assert "_CAUSAL_QWEN_COMPLETE=complete_bash" in done.stdout
    assert "complete -o default -F" in done.stdout
    assert done.stdout.rstrip().endswith("causal-qwen")


# ---------------------------------------------------------------- speaking


@pytest.mark.parametrize("command", ["generate", "np-generate"])
def test_the_embedded_model_speaks_unless_another_is_named(
    command: str, tiny_directory: Path, tmp_path: Path
) -> None:
    """The cache of this test holds a tiny model in its place."""
    (tmp_path / f"smollm2-135m-{version('causal-qwen')}").symlink_to(tiny_directory)
    asked = (command, "The train was late, so", "--mode", "causal", "-i", "7", "-n", "8", "--json")
    done = here(*asked, CAUSAL_QWEN_CACHE=str(tmp_path))
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["individual"] == 7
    assert told["text"]
    for name in ("smollm2-135m", str(tiny_directory)):
        again = here(*asked, "--model", name, CAUSAL_QWEN_CACHE=str(tmp_path))
        assert json.loads(again.stdout) == told


@pytest.mark.slow  # 135M parameters, read twice, once in a process that imports torch
def test_the_embedded_model_says_the_same_in_a_process_of_its_own() -> None:
    asked = ("The train was late, so", "--mode", "causal", "-i", "7", "-t", "0.3", "-n", "8")
    done = causal_qwen("generate", *asked, "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told == json.loads(here("generate", *asked, "--json").stdout)
    assert len(told["text"].split()) > 3


def test_generate_writes_the_prompt_and_the_text(tiny_directory: Path) -> None:
    asked = ("generate", "Hi there", "-m", str(tiny_directory), "-n", "6")
    told = json.loads(here(*asked, "--json").stdout)
    assert here(*asked).stdout == f"Hi there{told['text']}\n"
    assert here(*asked, "--numbers", "value").stdout == f"Hi there{told['text']}\n"
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


def test_a_text_with_numbers_comes_token_by_token(opened: Any, tmp_path: Path) -> None:
    processor, model = copy.deepcopy(opened)
    model.decision.threshold.data[model.config.num_token_id] -= 50.0  # it says numbers
    processor.encode_numbers = model.config.encode_numbers = "value"
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    words = ["generate", "a 7 b", "-m", str(tmp_path), "--mode", "causal", "-i", "3", "-n", "12"]
    told = json.loads(here(*words, "--json").stdout)
    assert told["numbers"]
    live = Pieces()
    assert here(*words, out=live).stdout == f"a 7 b{told['text']}\n"
    assert sum(bool(piece) for piece in live.pieces) > 5


def test_who_was_drawn_is_told_and_says_it_again(tiny_directory: Path) -> None:
    words = ["generate", "a b", "-m", str(tiny_directory), "--mode", "causal", "-n", "5"]
    drawn = here(*words)
    (told,) = re.findall(r"\(--individual (\d+) says it again\)", drawn.stderr)
    again = here(*words, "--individual", told)
    assert again.stdout == drawn.stdout
    assert "says it again" not in again.stderr


def test_cut_candidates_are_no_reason_for_a_warning(
    tiny_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = here("generate", "a b", "-m", str(tiny_directory), "--top-k", "5", "--top-p", "0.5")
    assert done.returncode == 0
    assert "not valid" not in done.stderr + caplog.text


def test_the_version_is_told() -> None:
    assert here("--version") == Done(0, f"causal-qwen {__version__}\n", "")


def test_a_text_ends_where_the_model_can_read_no_further(tiny_directory: Path) -> None:
    asked = ("x" * 2040, "-m", str(tiny_directory), "-n", "50", "--json")
    told = json.loads(here("np-generate", *asked).stdout)
    assert len(told["tokens"]) == 8  # of 2048
    assert json.loads(here("generate", *asked).stdout)["text"] == told["text"]


def test_numpy_takes_its_model_before_the_prompt_or_by_name(tiny_directory: Path) -> None:
    asked = ("-n", "4", "--json", "--mode", "causal", "-i", "3")
    first = here("np-generate", str(tiny_directory), "Hi there", *asked)
    named = here("np-generate", "Hi there", "--model", str(tiny_directory), *asked)
    assert first.returncode == 0, first.stderr
    assert json.loads(first.stdout) == json.loads(named.stdout)
    assert json.loads(first.stdout)["individual"] == 3
    missing = here("np-generate", str(tiny_directory))
    assert missing.stderr == "causal-qwen: The prompt is empty; write a few words.\n"
    both = here("np-generate", "a", "b", "--model", "c")
    assert "Two models were given, a and c" in both.stderr


@pytest.mark.parametrize("asked", [["--mode", "causal"], ["--mode", "compatible", "-t", "2"], []])
def test_what_numpy_tells_can_be_told_again(tiny_directory: Path, asked: list[str]) -> None:
    start = ("np-generate", str(tiny_directory), "Hi", "-n", "8", "--json")
    told = json.loads(here(*start, *asked).stdout)
    who = {"--mode": told["mode"], "-i": told["individual"], "--seed": told["seed"]}
    named = [str(part) for pair in who.items() if pair[1] is not None for part in pair]
    again = json.loads(here(*start, *named, *asked[2:]).stdout)
    assert again == told
    assert told["mode"] == (asked[1] if asked else "standard")


def test_numpy_speaks_as_a_saved_individual(tiny_directory: Path, tmp_path: Path) -> None:
    size = json.loads((tiny_directory / "config.json").read_text("utf-8"))["causal_size"] or 32
    Individual.draw(size, seed=5, temperature=3.0).save(tmp_path / "ada.safetensors")
    asked = ("np-generate", str(tiny_directory), "Hi", "-n", "6", "--json", "--mode", "causal")
    saved = here(*asked, "-i", str(tmp_path / "ada.safetensors"))
    seed = here(*asked, "-i", "5", "-t", "3")
    assert json.loads(saved.stdout)["text"] == json.loads(seed.stdout)["text"]


def test_numpy_finds_a_hub_model_in_the_cache_and_says_when_there_is_none(
    tiny_directory: Path, tmp_path: Path
) -> None:
    kept = tmp_path / "hub" / "models--me--tiny"
    (kept / "snapshots").mkdir(parents=True)
    (kept / "snapshots" / "abc").symlink_to(tiny_directory)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text("abc", encoding="utf-8")
    settings = {"HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = causal_qwen("np-generate", "me/tiny", "Hi", "-n", "3", "-q", **settings)
    assert done.returncode == 0, done.stderr
    assert done.stdout == here("np-generate", str(tiny_directory), "Hi", "-n", "3", "-q").stdout
    gone = causal_qwen("np-generate", "me/other", "Hi", **settings)
    assert gone.returncode == 1
    assert gone.stderr == (
        "causal-qwen: me/other is neither a local model directory nor a hub model that can be "
        "reached.\n"
    )


# ---------------------------------------------------------------- chat


def test_a_chat_through_a_pipe_is_a_line_of_json_per_turn(
    tiny_directory: Path, tmp_path: Path
) -> None:
    asked = ("chat", "--model", str(tiny_directory), "-i", "7", "-n", "5", "--json")
    kept = tmp_path / "talk.json"
    turns = f"hello\n\nand you?\n/save {kept}\n/individual 8\nhello\n/quit\nnever asked\n"
    done = here(*asked, text=turns)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(one["turn"], one["prompt"], one["individual"]) for one in told] == [
        (1, "hello", 7),
        (2, "and you?", 7),
        (3, "hello", 8),
    ]
    assert all(one["text"] and one["mode"] == "causal" for one in told)
    again = here(*asked, text=f"/load {kept}\nhello\n/reset\nhello\n")
    later = [json.loads(line) for line in again.stdout.splitlines()]
    assert later[1]["text"] == told[0]["text"]  # nothing remembered, the same individual
    assert later[0]["text"] != told[0]["text"]  # two turns remembered


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("/nonsense", "/nonsense is unknown; /help lists what there is."),
        ("/individual nobody.safetensors", "nobody.safetensors is neither a seed"),
        ("/mode loud", "/mode loud is unknown; choose one of standard"),
        ("/save", "/save needs the name of a file."),
        ("/load nothing.json", "nothing.json: No such file or directory"),
    ],
)
def test_a_pipe_is_ended_by_an_error(tiny_directory: Path, line: str, sentence: str) -> None:
    done = here("chat", "-m", str(tiny_directory), "-n", "2", text=f"{line}\nhello\n")
    assert done.returncode == 1
    assert done.stdout == ""
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr


def test_in_a_terminal_ctrl_c_stops_the_answer_and_ctrl_d_the_chat(tiny_directory: Path) -> None:
    program, *arguments = [*PROGRAM, "chat", "-m", str(tiny_directory), "-n", "1900"]
    with pexpect.spawn(program, arguments, timeout=120, preexec_fn=heed_ctrl_c) as terminal:
        terminal.expect("individual [0-9]+ is listening")
        terminal.expect("you> ")
        terminal.sendline("/nonsense")
        terminal.expect("is unknown")
        terminal.expect("you> ")
        terminal.sendline("hello")
        terminal.expect("individual [0-9]+> ")
        time.sleep(0.3)
        terminal.sendintr()
        terminal.expect(r"\(stopped\)")
        terminal.expect("you> ")
        terminal.sendeof()
        terminal.expect(pexpect.EOF)
        terminal.wait()
        assert terminal.exitstatus == 0


@pytest.fixture(scope="module")
def opened(tiny_directory: Path) -> tuple[Any, Any]:
    return open_model(tiny_directory)


def test_the_same_individual_speaks_through_the_whole_conversation(opened: Any) -> None:
    talk = Conversation(*opened, individual=7, max_new_tokens=6)
    said = [talk.ask("hello"), talk.ask("and you?")]
    assert said[0].individual == said[1].individual == talk.individual
    assert [one["role"] for one in talk.messages] == ["user", "assistant"] * 2
    assert talk.messages[1]["content"] == said[0].text.strip()
    talk.obey("/mode sampling")
    assert talk.individual is not None
    assert talk.individual.is_fresh
    assert talk.individual.seed == 7
    assert talk.obey("/mode standard") == "mode standard, standard speaks"
    assert talk.individual is None
    with pytest.raises(ValueError, match="Nobody in particular speaks in mode standard"):
        talk.obey("/individual 3")


@pytest.mark.parametrize("mode", ["causal", "sampling", "standard"])
def test_a_saved_conversation_goes_on_where_it_was(opened: Any, mode: str, tmp_path: Path) -> None:
    talk = Conversation(*opened, mode=mode, individual=7, temperature=2.0, max_new_tokens=5)
    talk.ask("hello")
    talk.obey(f"/save {tmp_path / 'talk.json'}")
    other = Conversation(*opened, mode="compatible", max_new_tokens=5)
    assert "1 turns" in other.obey(f"/load {tmp_path / 'talk.json'}")
    assert (other.mode, other.individual) == (talk.mode, talk.individual)
    assert other.ask("and you?").text == talk.ask("and you?").text


def test_a_long_conversation_forgets_its_beginning_and_not_its_system_message(opened: Any) -> None:
    room = opened[1].config.max_position_embeddings
    talk = Conversation(*opened, mode="standard", system="Be kind.", max_new_tokens=4)
    talk.ask("a" * (room // 2))
    talk.ask("b" * (room // 2))
    assert talk.messages[0]["content"].startswith("b")
    assert talk.first[0]["content"] == "Be kind."
    with pytest.raises(ValueError, match=f"makes {room + 10} tokens|shorten it"):
        talk.ask("c" * room)
    assert len(talk.messages) == 2  # as before


def test_stretched_positions_are_room_for_a_longer_conversation(opened: Any) -> None:
    processor, model = opened
    stretched = copy.copy(model)
    stretched.config = copy.deepcopy(model.config)
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
    stretched.config.rope_parameters = yarn
    talk = Conversation(processor, stretched, mode="standard", max_new_tokens=4)
    talk.ask("c" * model.config.max_position_embeddings)
    assert len(talk.messages) == 2


# ---------------------------------------------------------------- doctor


def test_the_doctor_tells_everything_to_machines_and_people() -> None:
    done = here("doctor", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["is_well"]
    assert found["extras"]["torch"]["is_complete"]
    assert found["device"] == "cpu" or found["device"]
    assert found["threads"] >= 1
    assert found["embedded_model"]["size"] > 10**8
    shown_text = here("doctor", COLUMNS="200").stdout
    assert found["verdict"] in shown_text
    assert found["embedded_model"]["path"] in shown_text


@pytest.mark.parametrize(
    ("gone", "is_well", "verdict"),
    [
        ("tokenizers", False, "The installation is incomplete: pip install causal-qwen"),
        ("transformers", True, "The NumPy engine works; for everything else: pip install"),
        ("peft", True, "Everything that is installed works; not installed: lora."),
    ],
)
def test_the_doctor_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, gone: str, is_well: bool, verdict: str
) -> None:
    there = {name: version for name, version in _suitable().items() if name != gone}
    monkeypatch.setattr(doctor, "_version", there.get)
    diagnosis = doctor.examine()
    assert diagnosis.is_well == is_well
    assert diagnosis.verdict.startswith(verdict)


def _suitable() -> dict[str, str]:
    """The lowest version that is wanted of every package."""
    wanted = [one for extra in ("", *doctor.PURPOSES) for one in doctor._own_requirements(extra)]
    lowest = ((one.name, [s for s in one.specifier if s.operator == ">="]) for one in wanted)
    return {name: found[0].version for name, found in lowest if found}  # not our own extras


def test_a_torch_that_cannot_be_imported_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise OSError(f"lib{name}.so: wrong ELF class")

    monkeypatch.setattr(doctor.importlib, "import_module", broken)
    diagnosis = doctor.examine()
    assert not diagnosis.is_well
    assert diagnosis.verdict == (
        "torch is installed and does not work: OSError: libtorch.so: wrong ELF class"
    )


@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("torch", "[torch]"),
        ("transformers", "[torch]"),
        ("accelerate", "[torch]"),
        ("datasets", "[train]"),
        ("peft", "[lora]"),
        ("pandas", "[tables]"),
        ("sklearn", "[tables]"),
        ("matplotlib", "[plot]"),
        ("gradio", "[app]"),
    ],
)
def test_a_missing_module_is_cured_by_the_extra_that_has_it(module: str, extra: str) -> None:
    assert doctor.cure(module) == f"{module} is not installed: pip install 'causal-qwen{extra}'"


def test_a_missing_module_of_nobody_is_cured_by_its_own_name() -> None:
    assert doctor.cure("safetensors") == "safetensors is not installed: pip install causal-qwen"
    assert doctor.cure("elsewhere") == "elsewhere is not installed: pip install elsewhere"


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


def test_the_demo_shows_everything_to_machines(demo: Callable[..., Any]) -> None:
    done = demo("--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout, parse_constant=pytest.fail)  # NaN is not JSON
    assert told["behaves_like_its_base"] is True
    assert set(told["modes"]) == {"standard", "sampling", "causal", "compatible"}
    assert told["modes"]["standard"] == told["modes"]["compatible"]
    assert all(len(texts) == 2 for texts in told["individuals"].values())
    assert told["counterfactual"]["factual"]["text"].startswith("The old lighthouse")
    assert told["counterfactual"]["counterfactual"]["text"].startswith("The young lighthouse")
    assert told["decision"]["candidates"]
    number = told["number"]
    assert number["low"] < number["median"] < number["high"]
    assert number["text"].endswith("The length of its petals in cm is")
    assert (number["rows"], number["calibration_rows"], number["held_out"]["rows"]) == (75, 50, 25)
    assert number["held_out"]["mdae"] > 0


@pytest.mark.parametrize("width", [80, 120])
def test_the_demo_can_be_read_at_every_width(demo: Callable[..., Any], width: int) -> None:
    done = demo(COLUMNS=str(width))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    for part in ("1 · The promise", "2 · Four modes", "3 · Individuals", "4 · Counterfactual"):
        assert any(part in line for line in lines), part
    for part in ("5 · Inside one decision", "6 · A number with its interval", "90% interval", "◆"):
        assert any(part in line for line in lines), part
    assert max(cell_len(line) for line in lines) <= width
    assert "\x1b" not in done.stdout


def test_the_demo_does_without_tables(
    demo: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("causal_qwen.cli.demo.find_spec", lambda name: None)
    done = demo()
    assert done.returncode == 0, done.stderr
    assert "interval: pandas is not installed: pip install 'causal-qwen[tables]'" in done.stdout


# ---------------------------------------------------------------- while it works


def test_long_work_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [0.0]
    monkeypatch.setattr(terminal.time, "monotonic", lambda: now[0])
    with terminal.counted("reading") as count:
        for done in range(1, 11):
            now[0] += 1.0
            count(done, 10)
    # after two seconds, and then every five
    assert capsys.readouterr().err == "reading: 2 of 10\nreading: 7 of 10\n"
    with terminal.counted("reading") as count, terminal.status() as stage:
        count(10, 10)
        stage("saving")
    assert capsys.readouterr().err == "saving ...\n"
    with terminal.counted("reading", False) as count, terminal.status(False) as stage:
        now[0] += 100.0
        count(10, 10)
        stage("saving")
    assert capsys.readouterr() == ("", "")


# ---------------------------------------------------------------- the playground


@pytest.mark.slow  # 11 s of processor time: gradio, pandas, scikit-learn and torch are imported
def test_the_playground_opens_answers_and_is_closed_by_ctrl_c(tiny_directory: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(sys.executable).with_name("causal-qwen")  # as it was installed
    asked = ["app", "--port", str(port), "--no-browser", "--model", str(tiny_directory)]
    with started(str(script), *asked) as process:
        assert process.stdout is not None
        told = [process.stdout.readline(), process.stdout.readline()]
        assert told == [
            "Opening the model ...\n",
            f"The playground is open at http://127.0.0.1:{port} (Ctrl-C closes it).\n",
        ]
        server = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        server.request("GET", "/")
        page = server.getresponse()
        assert page.status == 200
        assert "CausalQwen" in page.read().decode("utf-8")
        server.close()
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (process.returncode, rest, errors) == (0, "\nClosed.\n", "")


# ---------------------------------------------------------------- when something is wrong


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


SAYS_NO = {  # a command line with {places} -> what it is told, in a sentence
    "generate {blank}": "The prompt is empty; write a few words.",
    "generate x --mode causl": "--mode causl is unknown; choose one of standard, sampling,",
    "generate x --individual 3": "--individual has no part in mode 'standard'; use causal or",
    "generate x --seed 3": "--seed has no part in mode 'standard'; nothing is drawn there: use",
    "generate x --seed 3 --mode sampling": "--seed has no part in mode 'sampling'; name an --indiv",
    "np-generate x --seed 3 --mode causal": "--seed has no part in mode 'causal'; name an --indiv",
    "generate x --numbers loud": "--numbers loud is unknown; choose one of text, value.",
    "generate x --model nowhere": "nowhere is neither a local model directory nor a hub model",
    "generate x -m {root}/empty": "empty/config.json does not exist: give a model's directory.",
    "generate x -m {root}/broken": "broken/config.json is not valid JSON",
    "generate x -m {model} --mode causal -i nobody": "nobody is neither a seed (a whole",
    "generate x -m {model} --mode causal -i {root}/junk.safetensors": "holds no individual",
    "generate x -m {model} --mode causal -i {root}/stranger.safetensors": "7 coordinates",
    "generate x -m {model} --mode causal --save-individual {root}": "is a directory; give the name",
    "generate x -m {model} --mode causal --save-individual {root}/no/a": "no is no directory.",
    "generate x -m {model} -t inf --mode causal": "temperature=inf must be a number",
    "generate {long} -m {model}": "The prompt has 3000 tokens; this model reads 1 to 2047",
    "chat --mode loud": "--mode loud is unknown; choose one of standard, sampling,",
    "chat --numbers loud": "--numbers loud is unknown; choose one of text, value.",
    "chat -m {root}/empty": "empty/config.json does not exist: give a model's directory.",
    "demo -m {root}/empty": "empty/config.json does not exist: give a model's directory.",
    "demo -m nowhere": "nowhere is neither a local model directory nor a hub model",
    "counterfactual {blank} --prompt y": "The prompt is empty; write a few words.",
    "counterfactual x --prompt {blank}": "The prompt is empty; write a few words.",
    "counterfactual x": "A counterfactual changes one thing: --prompt, --token, --number or",
    "counterfactual x --prompt y --html {root}": "is a directory; give the name of a file.",
    "counterfactual x --prompt y -m {root}/broken": "broken/config.json is not valid JSON",
    "counterfactual x --prompt y --semantics loud": "--semantics loud is unknown; choose one of",
    "counterfactual {long} --prompt y -m {model}": "The prompt has 3000 tokens; this model reads",
    "counterfactual x --token 99=y -m {model} -n 2": "position 99 is outside the factual text",
    "np-generate {model}": "The prompt is empty; write a few words.",
    "np-generate x --mode loud": "--mode loud is unknown; choose one of standard, sampling,",
    "np-generate x -i 3 -m {model}": "individual= has no part in mode='standard'",
    "np-generate x -i 3 --mode standard": "--individual has no part in mode 'standard'",
    "np-generate x -m {root}/empty": "empty/config.json does not exist: give a model's directory.",
    "np-generate x -m {model} --dtype loud": "dtype='loud' is unknown",
    "np-generate {long} -m {model}": "The prompt has 3000 tokens; this model reads 1 to 2048",
    "verify nowhere": "nowhere is no directory: give that of a saved model.",
    "verify {model} --prompt {blank}": "The prompt is empty; write a few words.",
    "verify {model} -o {root}/rows.csv": "rows.csv is a file; give the name of a directory.",
    "convert {model} {root}/new": "is a CausalQwen model already",
    "convert {root}/empty {root}/new": "empty/config.json does not exist: give a model's",
    "convert smollm2-135m /proc/1/out": "/proc/1/out cannot be written",
    "convert {base} {root}/full": "full exists and is not empty; choose another",
    "convert {base} {root}/new --init loud": "--init loud is unknown; choose one of calibrated,",
    "convert {base} {root}/new --dtype loud": "--dtype loud is unknown; choose one of float32,",
    "convert {base} {root}/new --causal-size -3": "causal_size=-3 must be a positive integer",
    "convert {base} {root}/new --text {root}/gone.txt": "gone.txt: No such file or directory",
    "convert {base} {root}/new --text {root}/binary.txt": "binary.txt is not UTF-8 text: invalid",
    "convert {base} {root}/new --text {root}/nothing.txt": "nothing.txt is empty: there is nothing",
    "convert {base} . --force": "the directory you are in, which would be deleted",
    "fit {root}/gone.csv -y price -o {root}/new": "gone.csv is not a file",
    "fit {root}/rows.csv -y cost -o {root}/new": "there is no column 'cost'; the table has 'a',",
    "fit {root}/rows.csv -y price -o {root}/full": "full exists and is not empty; choose another",
    "fit {root}/rows.csv -y price -o .. --force": "which would be deleted; name another.",
    "fit {root}/rows.csv -y price -o {root}/new -m {root}/empty": "empty/config.json does not",
    "predict only.csv": "Predicting needs what `causal-qwen fit` has written, and a CSV file.",
    "predict {root}/empty {root}/rows.csv": "empty has no regressor.json",
    "predict {root}/empty {root}/rows.csv -o {root}": "is a directory; give the name of a file.",
    "train": "Training needs --data and --output (or --mock, which needs neither).",
    "train -d {root}/rows.jsonl -o {root}/new --steps 0": "Training takes at least one step",
    "train -d {root}/rows.jsonl -o {root}/new --precision loud": "--precision loud is unknown",
    "train -d {root}/rows.jsonl -o {root}/new --numbers loud": "--numbers loud is unknown",
    "train -d {root}/rows.jsonl -o {root}/full -m {model}": "full is not empty; choose another",
    "train -d {root}/gone.jsonl -o {root}/new -m {model}": "gone.jsonl is no file: check the path.",
    "evaluate {root}/gone.jsonl -m {model}": "gone.jsonl is no file: check the path.",
    "evaluate {root}/rows.csv -m {model}": "rows.csv needs a template that makes a text of its",
    "evaluate {root}/rows.jsonl --numbers loud": "--numbers loud is unknown; choose one of text,",
    "evaluate {root}/rows.jsonl -m {model} --base nowhere": "nowhere is neither a local model",
    "report {root}/gone": "gone holds no checkpoint with a log; is it a training run?",
    "app -m {root}/empty --no-browser --port 0": "empty/config.json does not exist: give a",
    "app --no-browser --port 0 --host 192.0.2.1": "192.0.2.1:0 cannot be used",
}


@pytest.mark.parametrize("line", SAYS_NO)
def test_an_error_is_one_sentence_and_nothing_is_written(line: str, place: dict[str, str]) -> None:
    words = [word.format(blank=" ", long="x" * 3000, **place) for word in line.split()]
    done = here(*words)
    assert done.returncode == 1
    assert done.stdout == ""
    *progress, told = done.stderr.splitlines()
    assert all(one.endswith(" ...") for one in progress), done.stderr
    assert told.startswith("causal-qwen: ")
    assert SAYS_NO[line] in told
    assert "--debug shows where" not in told
    root = Path(place["root"])
    assert not (root / "new").exists()
    assert [file.name for file in (root / "full").iterdir()] == ["precious.txt"]


@pytest.mark.parametrize(
    ("line", "option"),
    [
        ("generate x --temprature 1", "--temprature"),
        ("generate x -n 0", "--max-new-tokens"),
        ("generate x -t -1", "--temperature"),
        ("generate x --top-k 0", "--top-k"),
        ("generate x --seed -1", "--seed"),
        (f"generate x --seed {2**64}", "--seed"),
        ("np-generate x --min-density 1.5", "--min-density"),
        (f"fit rows.csv -y price -o new --seed {2**32}", "--seed"),
        ("fit rows.csv -y price -o new --calibration -1", "--calibration"),
        ("fit rows.csv -y price -o ", "--output"),
        ("evaluate ", "data"),
        ("convert  new", "base"),
        ("train --lr -1", "--learning-rate"),
        ("train --batch-size 0", "--batch-size"),
        ("verify --tolerance -1", "--tolerance"),
        ("app --port 70000", "--port"),
    ],
)
def test_what_can_not_be_meant_is_refused_by_its_name(line: str, option: str) -> None:
    done = here(*line.split(" "), COLUMNS="200")
    assert done.returncode == 2
    assert done.stdout == ""
    assert option in done.stderr.partition("Error")[2]


def test_an_error_is_one_sentence_in_a_process_of_its_own() -> None:
    done = causal_qwen("generate", " ")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "causal-qwen: The prompt is empty; write a few words.\n"


def test_debug_shows_the_traceback_wherever_it_stands() -> None:
    done = causal_qwen("generate", " ", "--debug")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback (most recent call last)")
    assert done.stderr.endswith("ValueError: The prompt is empty; write a few words.\n")
    with pytest.raises(ValueError, match="The prompt is empty"):
        here("--debug", "generate", " ")


def test_force_spares_the_directory_one_works_in(
    place: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An empty variable in a script must not cost a directory."""
    (tmp_path / "precious.txt").write_text("mine", "utf-8")
    monkeypatch.chdir(tmp_path)
    for output in ("", ".", str(tmp_path), str(tmp_path.parent)):
        done = here("convert", place["base"], output, "--force")
        assert "the working directory, which would be deleted" in done.stderr
    assert (tmp_path / "precious.txt").read_text("utf-8") == "mine"


# ---------------------------------------------------------------- Ctrl-C


class Interrupted(io.StringIO):
    """Somebody presses Ctrl-C as soon as there is something to read."""

    def write(self, text: str) -> int:
        if "Hi" in text:
            signal.raise_signal(signal.SIGINT)
        return super().write(text)


def test_ctrl_c_ends_torch_cleanly(tiny_directory: Path) -> None:
    done = here("generate", "Hi ", "-m", str(tiny_directory), "-n", "2000", out=Interrupted())
    assert done.returncode == 130
    assert "Traceback" not in done.stderr
    assert "causal-qwen:" not in done.stderr


@pytest.mark.parametrize(
    "command",
    ["np-generate", pytest.param("generate", marks=pytest.mark.slow)],  # which imports torch
)
def test_ctrl_c_ends_a_process_cleanly(command: str, tiny_directory: Path) -> None:
    arguments = [*PROGRAM, command, "Hi there", "-m", str(tiny_directory), "-n", "2000"]
    with started(*arguments) as process:
        assert process.stdout is not None
        assert process.stdout.read(2) == "Hi"  # it speaks
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "causal-qwen:" not in errors
