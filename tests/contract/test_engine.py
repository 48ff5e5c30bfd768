"""What the NumPy engine promises a user: no torch, the torch side's words, honest errors."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _random_checkpoint import TINY, random_checkpoint

from causal_qwen.numpy_engine import Engine
from causal_qwen.numpy_engine.tokenization import TextReader

ROOT = Path(__file__).parents[2]


@pytest.fixture
def directory(
    tmp_path: Path, make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]
) -> Path:
    """A saved causal model with its processor: one token per byte, and <NUM>."""
    from causal_qwen.modeling.processor import CausalQwenProcessor

    processor = CausalQwenProcessor(byte_tokenizer(), encode_numbers="value")
    size = len(processor.tokenizer)
    model = make_model(vocab_size=size, num_token_id=processor.num_token_id, encode_numbers="value")
    model.decision.threshold.data[processor.num_token_id] = 0.0
    model.save_pretrained(tmp_path / "model")
    processor.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


WITHOUT_TORCH = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "transformers"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_without_torch(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", WITHOUT_TORCH + code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@torch.no_grad()
def test_engine_generates_where_torch_cannot_be_imported(directory: Path) -> None:
    """The same text as the torch side's, numbers read and said included."""
    from causal_qwen.conversion.opening import open_model

    out = run_without_torch(
        "import json\n"
        "from causal_qwen.numpy_engine import Engine\n"
        "engine = Engine.from_pretrained(sys.argv[1])\n"
        "result = engine.generate('It costs 12.5 or', mode='causal', individual=3, "
        "noise_gain=1.0, max_new_tokens=24)\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
        "values = result.numeric_values\n"
        "print(json.dumps([result.text, result.ids.tolist(), values.tolist()]))\n",
        str(directory),
    )
    text, ids, values = json.loads(out)
    processor, model = open_model(directory)
    inputs = processor(["It costs 12.5 or"], return_tensors="pt")
    assert (inputs["input_ids"] == processor.num_token_id).sum() == 1
    options = {"causal_mode": "causal", "individual": 3, "noise_gain": 1.0}
    result = model.generate(
        **inputs, **options, max_new_tokens=24, return_dict_in_generate=True, pad_token_id=0
    )
    assert ids == result.sequences[0].tolist()
    assert np.allclose(values, result.numeric_values[0].numpy(), rtol=1e-4)
    start = inputs["input_ids"].shape[1]
    assert processor.num_token_id in ids[start:]  # a number was said, and read again
    assert text == processor.decode(ids[start:], values[start:])


def test_generate_runs_where_torch_cannot_be_imported(directory: Path) -> None:
    code = (
        "from causal_qwen.cli import main\n"
        "sys.argv = ['causal-qwen', 'generate', '-m', sys.argv[1], 'It costs 12.5 or', '-n', '5']\n"
        "main()\n"
    )
    out = run_without_torch(code, str(directory))
    assert out.startswith("It costs 12.5 or")


def test_no_module_of_the_engine_imports_torch() -> None:
    files = list((ROOT / "src/causal_qwen/numpy_engine").glob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            modules += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {m.split(".")[0] for m in modules} & {"torch", "transformers"}, file


@torch.no_grad()
def test_embedded_model_generates_the_same_text_in_numpy_and_torch(short_directory: Path) -> None:
    from causal_qwen.conversion.opening import open_model

    engine = Engine.from_pretrained(short_directory)
    processor, model = open_model(short_directory)
    prompt = "The old lighthouse keeper opened the door and"
    inputs = processor([prompt], return_tensors="pt")
    for mode in ("standard", "causal", "sampling", "compatible"):
        noise = {"individual": 7} if mode in ("causal", "sampling") else {}
        ours = engine.generate(prompt, max_new_tokens=4, mode=mode, **noise)
        theirs = model.generate(**inputs, causal_mode=mode, max_new_tokens=4, **noise)
        assert ours.ids.tolist() == theirs[0].tolist(), mode
    chat = processor.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    ours = engine.generate(prompt, max_new_tokens=1, chat=True)
    assert ours.ids[: ours.new.start].tolist() == chat["input_ids"][0].tolist()


def test_text_reader_encodes_and_decodes_as_the_processor(directory: Path) -> None:
    from causal_qwen.modeling.processor import CausalQwenProcessor

    processor = CausalQwenProcessor.from_pretrained(directory)
    reader = TextReader.from_directory(
        directory, json.loads((directory / "config.json").read_text())
    )
    assert reader is not None
    for text in ("", "价格是99.9元", "a typed <NUM> stays text, 5 does not", "1e300 and -7.25%"):
        for encoding in ("text", "value"):
            expected = processor(text, encode_numbers=encoding)
            ids, values = reader.encode(text, encoding)
            assert (ids, values) == (expected["input_ids"], expected["numeric_values"])
            assert reader.decode(np.array(ids, np.int64), np.array(values)) == processor.decode(
                ids, values
            )


# ---------------------------------------------------------------- bad input


def edit(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**fields, **changes}), encoding="utf-8")


def without(directory: Path, *names: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    for name in names:
        del tensors[name]
    save_file(tensors, directory / "model.safetensors")


def with_nan(directory: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(directory / "model.safetensors")
    tensors[name].view(-1)[3] = float("nan")
    save_file(tensors, directory / "model.safetensors")


def truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (lambda d: (d / "config.json").unlink(), "config.json does not exist"),
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "no model.safetensors"),
    "truncated": (truncate, "damaged or truncated"),
    "architecture": (
        lambda d: edit(d / "config.json", model_type="gpt2"),
        "architecture 'gpt2'; this engine runs Qwen2",
    ),
    "missing": (
        lambda d: without(d, "model.layers.1.mlp.up_proj.weight", "model.norm.weight"),
        "lacks model.layers.1.mlp.up_proj.weight, model.norm.weight",
    ),
    "rope": (
        lambda d: edit(d / "config.json", rope_parameters={"rope_type": "spiral"}),
        "rope_type='spiral' is unknown",
    ),
    "tokenizer": (
        lambda d: edit(d / "config.json", num_token_id=5),
        "tokenizer.json has .* tokens",
    ),
    "NaN": (
        lambda d: with_nan(d, "model.layers.0.self_attn.q_proj.weight"),
        "NaN or infinity in model.layers.0.self_attn.q_proj.weight;",
    ),
}


@pytest.mark.parametrize("what", list(BAD))
def test_damaged_checkpoint_raises_one_sentence(what: str, directory: Path) -> None:
    break_it, message = BAD[what]
    break_it(directory)
    with pytest.raises((ValueError, OSError), match=message) as caught:
        Engine.from_pretrained(directory).generate("Hello", max_new_tokens=2)
    assert "\n" not in str(caught.value)


def test_plain_qwen2_checkpoint_runs_in_compatible_mode_only(tmp_path: Path) -> None:
    engine = Engine.from_pretrained(random_checkpoint(tmp_path, TINY))
    assert engine.generate([5, 6, 7], max_new_tokens=3).mode == "compatible"
    with pytest.raises(ValueError, match="plain Qwen2"):
        engine.generate([5, 6, 7], mode="causal")
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        engine.generate("Hello")


# ---------------------------------------------------------------- commands


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = "from causal_qwen.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )


def test_watching_gives_every_token_with_its_probability(directory: Path) -> None:
    asked = ("generate", "It costs", "-m", str(directory), "--engine", "numpy", "-n", "6")
    plain = command(*asked, "--watch", "--quiet")
    assert plain.returncode == 0, plain.stderr
    record = json.loads(command(*asked, "--watch", "--json").stdout)
    assert plain.stdout == record["text"] + "\n"
    engine = Engine.from_pretrained(directory)
    assert record["text"] == engine.generate("It costs", max_new_tokens=6).text
    for token, step in zip(
        record["tokens"], engine.stream("It costs", max_new_tokens=6), strict=True
    ):
        assert token["token"] == engine.reader.show(step.token, step.value)
        assert token["probability"] == pytest.approx(step.probabilities[step.token])
        likely = [(engine.reader.show(one, step.y), p) for one, p in step.likeliest(4)]
        for name, p in token["runners_up"]:
            assert (name, pytest.approx(p)) in likely


def test_numpy_fails_with_one_sentence(directory: Path) -> None:
    truncate(directory)
    done = command("generate", "Hello", "-m", str(directory), "--engine", "numpy")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "damaged or truncated" in done.stderr


def test_a_long_text_leaves_room_for_the_newest_tokens(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it grows, the text's end, the table and the bar are seen; at the end, all of it."""
    import io

    from rich.console import Console

    import causal_qwen
    from causal_qwen.cli.live_view import show

    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system=None, width=60, height=14)
    session = causal_qwen.open(str(directory), "numpy")
    stream = session.stream("a king", max_new_tokens=3, alternatives=4)
    drawn: list[str] = []
    grow = session._grow

    def slowly(texts: Any) -> Iterator[Any]:
        for place, step in enumerate(grow(texts)):
            yield step
            while place < 2 and f"{place + 1}/3" not in out.getvalue():
                time.sleep(0.01)  # until the screen is drawn
            drawn.append(out.getvalue())

    monkeypatch.setattr(session, "_grow", slowly)
    show(stream, "beginning" + " and so on" * 200, console)
    assert "beginning" not in drawn[1]
    for part in ("1/3", "2/3", "tokens/s", "runners-up"):
        assert part in drawn[1], part
    assert out.getvalue().count("beginning") == 1


def test_verify_compares_quantiles_of_errors_not_their_maxima() -> None:
    from causal_qwen.analysis.verify import PAIRS, Row, Verification, checks_of

    def verified(maximum: float, percentile: float) -> Verification:
        """torch's own errors are at most 4.5e-5, and 3e-5 at 80%."""
        largest = dict.fromkeys(PAIRS, 4.5e-5) | {"numpy_float64": maximum}
        usual = dict.fromkeys(PAIRS, 3e-5) | {"numpy_float64": percentile}
        rows = [Row(name, largest, usual) for name in ("logits", "generated")]
        return Verification("model", rows, checks_of(rows, 0, 0.0, 0.0))

    assert verified(7.8e-5, 3.1e-5).is_passed
    assert "all 5 bounds are met" in verified(7.8e-5, 3.1e-5).sentence
    wrong = verified(7.8e-5, 6e-5)
    assert not wrong.is_passed
    assert "logits, NumPy to float64" in wrong.sentence


def test_verify_prints_layers_tokens_and_a_sentence(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from causal_qwen.cli.program import app

    model = random_checkpoint(tmp_path / "model", TINY, std=0.1, is_causal=True)
    done = CliRunner().invoke(app, ["verify", str(model), "-n", "12"])
    assert done.exit_code == 0, done.output
    assert "layer.1" in done.output
    assert "all 5 bounds are met" in done.output.splitlines()[-1]
    proof = json.loads(CliRunner().invoke(app, ["verify", str(model), "-n", "12", "--json"]).stdout)
    assert proof["is_passed"]
    assert [stage["name"] for stage in proof["stages"]][-3:] == ["norm", "logits", "generated"]
    assert 0 < proof["stages"][-1]["maximum"]["numpy_float32"] < 2e-4


@pytest.mark.slow
def test_the_embedded_model_meets_every_bar_for_256_tokens() -> None:
    from causal_qwen.analysis.verify import verify
    from causal_qwen.conversion.convert import default_model

    result = verify(default_model(), max_new_tokens=256)
    assert result.is_passed, result.checks


def test_verify_fails_where_the_engine_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from causal_qwen.analysis.verify import verify
    from causal_qwen.numpy_engine import qwen2

    model = random_checkpoint(tmp_path, TINY, std=0.1)
    assert verify(model, max_new_tokens=3).is_passed
    monkeypatch.setattr(qwen2, "swiglu", lambda gate, up: gate * up)
    result = verify(model, max_new_tokens=3)
    assert not result.is_passed
    assert not result.checks[0].is_met
