"""The playground: its fields and pictures, and what it asks of a real server with a tiny model."""

from __future__ import annotations

import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from _damage_api import attack
from _fuzz import seeds
from _playground import call, serve_page
from _server import KEY, rounded, running, wait_for
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.analysis import token_view
from causal_qwen.analysis.counterfactual import ChangedPrompt, ChangedToken, counterfactual
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.playground import fields, local, rendering, served
from causal_qwen.playground.fields import drag_range
from causal_qwen.playground.served import Forecast, ServedModel, Sweep
from causal_qwen.regression.regressor import OpenModel
from causal_qwen.serving.client import Client
from causal_qwen.serving.service import Service
from causal_qwen.serving.connections import bind
from causal_qwen.text.edits import find_numbers, replace_number

TEXT = "a king has 7 horses"
TOKENS = 5
GRADIO = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting'", "ignore:The copy keyword is deprecated"
)


@pytest.fixture(scope="module")
def backend(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> TorchEngine:
    processor = CausalQwenProcessor(byte_tokenizer())
    model = make_model(
        vocab_size=260, max_position_embeddings=512, num_token_id=processor.num_token_id
    )
    model.generation_config.noise_gain = 3.0
    model.generation_config.persistence = 0.7
    return TorchEngine(model, processor)


@pytest.fixture(scope="module")
def service(
    backend: TorchEngine, priced: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("served")
    priced.save(root / "priced")
    found = Service(backend, "tiny", root / "people", regressors={"rings": root / "priced"})
    yield found
    found.close()


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with running(service) as found:
        yield found


@pytest.fixture(scope="module")
def state(address: str) -> ServedModel:
    return ServedModel.open(f"{address}/v1/", KEY)


@pytest.fixture(scope="module")
def lines(rings: Any) -> str:
    """A row of the regressor's table, as a visitor writes it."""
    return local.write_lines(rings.iloc[[95]], [name for name in rings if name != "price"])


def last(stream: Iterator[list[str]]) -> list[str]:
    return list(stream)[-1]


# ---------------------------------------------------------------- fields


def test_texts_and_prompts_are_neither_empty_nor_long() -> None:
    assert fields.read_text(" a ") == "a"
    assert fields.read_prompts("one\n\n two \n") == ["one", "two"]
    for text, message in ((None, "empty"), (" \n", "empty"), ("a" * 1001, "1,001 characters")):
        with pytest.raises(ValueError, match=message):
            fields.read_text(text)
    for lines, message in (("a\n" * 6, "6 prompts"), ("\n\n", "0 prompts")):
        with pytest.raises(ValueError, match=message):
            fields.read_prompts(lines)


@given(st.floats(-1e6, 1e6), st.integers(0, 2))
def test_replaced_number_has_the_new_value_and_nothing_else_changes(
    value: float, index: int
) -> None:
    text = "From 3 apples, 4.5 pears and 12 plums."
    changed = find_numbers(replace_number(text, index, value))
    expected = [3.0, 4.5, 12.0]
    expected[index] = value
    assert [found for _, found in changed] == pytest.approx(expected, rel=1e-14, abs=1e-300)


@given(st.decimals("0.1", "5000", places=1), st.floats(0, 1))
def test_drag_range_is_zero_to_twice_the_number_in_its_own_decimals(
    number: Any, share: float
) -> None:
    drag = drag_range(f"It weighs {number} kg.", 0)
    assert (drag.low, drag.high) == (0, 2 * float(number))
    value = drag.at(share)
    assert drag.low <= value <= drag.high + drag.step
    assert value == pytest.approx(drag.low + share * (drag.high - drag.low), abs=drag.step)
    assert round(value, 1) == pytest.approx(value, abs=1e-9)
    assert drag.at(0) == 0


def test_drag_ranges_of_negative_numbers_and_of_zero() -> None:
    assert drag_range("It is -4 degrees.", 0)[:2] == (-8, 0)
    assert drag_range("It is 0 degrees.", 0)[:2] == (-10, 10)


@given(st.floats(5e-324, 1.7e308) | st.floats(-1.7e308, -5e-324))
def test_every_number_has_a_drag_range_with_at_least_one_step(number: float) -> None:
    text = f"It is {number!r} now"
    drag = drag_range(text, 0)
    assert 0 < drag.step <= drag.high - drag.low < math.inf
    for share in (0.0, 0.4, 1.0):
        assert find_numbers(replace_number(text, 0, drag.at(share)))
    assert drag_range("It is 2e-5 now", 0).step == pytest.approx(4e-8)


def test_an_edit_is_one_of_a_word_a_number_or_the_prompt() -> None:
    def edit(kind: str, **given: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("word", "other_word", "index", "number", "other_prompt"))
        return fields.read_edit(TEXT, kind, empty | given, lambda: (19, [" and", " so"]))

    assert edit("a word", word="king", other_word="cat") == {"prompt": "a cat has 7 horses"}
    assert edit("a word", word="so", other_word="no") == {"token": 20, "by": " no"}
    assert edit("a number", number="2.5") == {"number": 0, "by": 2.5}
    assert edit("the prompt", other_prompt=" hello ") == {"prompt": "hello"}
    for kind, values, message in (
        ("a word", {"word": "", "other_word": "x"}, "empty"),
        ("a word", {"word": "absent", "other_word": "x"}, "'absent' is not a word"),
        ("a number", {"number": "1/2"}, "'1/2' is not a number"),
        ("a number", {"number": "7 or 8"}, "'7 or 8'"),
        ("a number", {"number": "1", "index": 4}, "Number 5"),
        ("the prompt", {"other_prompt": " "}, "empty"),
    ):
        with pytest.raises(ValueError, match=message):
            edit(kind, **values)


def test_lines_with_a_sign_of_equality_are_a_row() -> None:
    for text, row in {
        "carat = 0.9\ncut = Ideal\n\ndepth =": {"carat": 0.9, "cut": "Ideal", "depth": None},
        "url = a=b": {"url": "a=b"},
        "A ring of 0.7 carat costs": None,
        "carat = 1\nand a sentence": None,
        "= 3": None,
        "": None,
    }.items():
        assert fields.read_row(text) == row, text


def test_individuals_are_added_saved_and_loaded(tmp_path: Path) -> None:
    dora = Individual.draw(32, seed=42, name="  Dora  the 1st ", temperature=3.0, persistence=0.1)
    (added,) = fields.add([], dora)
    assert added == dora
    assert added.name == "Dora the 1st"
    path = fields.save(added, tmp_path)
    assert Path(path).name == "Dora-the-1st.safetensors"
    them = fields.load(fields.load([added], path, 32), path, 32)
    assert fields.names(them) == ["Dora the 1st", "Dora the 1st 2", "Dora the 1st 3"]
    assert them[-1] == dora
    assert fields.names(fields.add([], Individual.draw(32, seed=5))) == ["No. 5"]
    (tmp_path / "noise.safetensors").write_bytes(b"nothing of this kind")
    for file, size, message in (
        (path, 33, "has 32 coordinates"),
        (str(tmp_path / "noise.safetensors"), 32, "^noise.safetensors is not a saved"),
    ):
        with pytest.raises(ValueError, match=message):
            fields.load([], file, size)
    for name, message in (("Dora the 1st", "is taken"), ("A" * 25, "25 characters")):
        with pytest.raises(ValueError, match=message):
            fields.add([added], Individual.draw(32, seed=1, name=name))
    many = [Individual.draw(32, seed=seed, name=str(seed)) for seed in range(12)]
    with pytest.raises(ValueError, match="12 individuals"):
        fields.add(many, dora)
    with pytest.raises(ValueError, match="No individual"):
        fields.find(many, None)
    for seed in ("x1", "9" * 200):
        with pytest.raises(ValueError, match="is not a whole number"):
            fields.read_seed(seed)
    assert fields.read_seed(" 42 ") == 42


# ---------------------------------------------------------------- what a server is asked


def test_four_modes_write_what_the_model_writes(state: ServedModel, backend: TorchEngine) -> None:
    four = fields.four_modes(1.5, 1.2, 0.9, 0.6, seed=7)
    assert list(four) == ["standard", "sampling", "causal", "compatible"]
    grown = list(state.stream([{"prompt": TEXT, **one} for one in four.values()], TOKENS))
    assert len(grown) > len(four)
    for name, text in list(zip(four, grown[-1], strict=True))[:3]:  # softmax has draws of its own
        assert rounded(text) == rounded(generate(backend, TEXT, four[name])), name
    assert len(set(grown[-1])) > 1


def generate(backend: TorchEngine, prompt: str, options: dict[str, Any]) -> str:
    """The text of `model.generate`."""
    options = {name: value for name, value in options.items() if name != "seed"}
    inputs = backend.processor(prompt, return_tensors="pt")
    found = backend.model.generate(
        **inputs, max_new_tokens=TOKENS, return_dict_in_generate=True, **options
    )
    start = inputs["input_ids"].shape[1]
    new = found.sequences[0, start:], found.numeric_values[0, start:]
    return backend.processor.decode(*new, skip_special_tokens=True)


def test_individuals_write_what_they_write_here(state: ServedModel, backend: TorchEngine) -> None:
    assert state.persistence == 0.7
    them = [state.draw(1, "Ada", 1.0), state.draw(42, "Dora", 1.5, 0.25)]
    assert them[0] == Individual.draw(backend.model, seed=1, temperature=1.0)
    assert them[1] == Individual.draw(backend.model, seed=42, temperature=1.5, persistence=0.25)
    bodies = [{"prompt": TEXT, **served.request_fields(one)} for one in them]
    expected = [
        generate(backend, TEXT, {"causal_mode": "causal", "individual": one}) for one in them
    ]
    assert [*map(rounded, last(state.stream(bodies, TOKENS)))] == [*map(rounded, expected)]
    for noisy in (them[0].mix(them[0], 0.5), Individual.draw(backend.model, seed=1, fresh=True)):
        with pytest.raises(ValueError, match="noise that no seed draws"):
            served.request_fields(noisy)


def test_texts_that_nobody_reads_any_more_are_stopped(state: ServedModel, service: Service) -> None:
    four = fields.four_modes(1, 1, 1, 1, 3).values()
    stream = state.stream([{"prompt": TEXT, **one} for one in four], 400)
    for _ in range(4):  # the first token of each
        next(stream)
    assert service.batcher.counts()[0] > 0
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: service.batcher.counts() == (0, 0))


def test_a_comparison_is_drawn_as_that_of_the_model(
    state: ServedModel, backend: TorchEngine
) -> None:
    ada = state.draw(1, "Ada", 4.0, 1.0)

    def compare(kind: str, **given: Any) -> Any:
        empty = dict.fromkeys(("word", "other_word", "index", "number", "other_prompt"))
        return state.compare(ada, TEXT, kind, TOKENS, empty | given)

    def expect(edit: Any) -> str:
        options = {"processor": backend.processor, "max_new_tokens": TOKENS}
        return rendering.comparison(counterfactual(backend.model, TEXT, ada, edit, **options))

    found = compare("the prompt", other_prompt="another beginning")
    drawn = rendering.comparison(found)
    assert drawn == expect(ChangedPrompt("another beginning"))
    root = parsed(drawn)
    assert len(root.findall(".//table")[1].findall(".//tbody/tr")) == TOKENS
    assert [bar.get("class") for bar in root.findall(".//rect")].index("minus") == found.divergence
    for kind, values, changed in (
        ("a word", {"word": "king", "other_word": "queen"}, "a queen has 7 horses"),
        ("a number", {"index": 0, "number": "12"}, "a king has 12 horses"),
    ):
        assert rendering.comparison(compare(kind, **values)) == expect(ChangedPrompt(changed))
    tokens = found.factual.tokens
    step = next(i for i, token in enumerate(tokens) if token.strip() and token not in TEXT)
    edited = compare("a word", word=tokens[step].strip(), other_word="x")
    by = tokens[step].replace(tokens[step].strip(), "x")
    assert rendering.comparison(edited) == expect(ChangedToken(found.factual.start + step, by))


def test_numbers_are_those_of_the_servers_regressor(
    state: ServedModel, priced: Any, rings: Any, lines: str
) -> None:
    assert state.regressors == ["rings"]
    row = rings.iloc[[95]]
    found = state.forecast("rings", lines)
    assert found.median == pytest.approx(float(priced.predict(row)[0]))
    for level in served.LEVELS:
        low, high = priced.predict_interval(row, level)
        assert found.intervals[level] == pytest.approx((float(low[0]), float(high[0])))
    swept = state.sweep("rings", lines, 0, drag_range(lines, 0))
    for value, median in zip(swept.values, swept.median, strict=True):
        assert median == pytest.approx(float(priced.predict(row.assign(carat=value))[0]))
    other = re.sub("carat = .*", "carat = 1.9", lines)
    expected = priced.counterfactual(row, 3000.0, carat=1.9)
    answer = state.what_if("rings", lines, 3000.0, other)
    assert answer.startswith("Observed 3000 where ")
    assert f"would have been {expected.median:.4g} (" in answer
    for ask, message in (
        (lambda: state.forecast("rings", "A ring of 0.7 carat costs"), "reads columns, not sent"),
        (lambda: state.forecast("cars", lines), "no regressor 'cars'"),
        (lambda: state.what_if("rings", lines, 1.0, lines), "another text"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.filterwarnings("ignore:.* calibration rows are too few")
def test_an_infinite_interval_is_null(address: str, lines: str) -> None:
    body = {"input": [fields.read_row(lines)], "levels": [0.5, 0.999999]}
    found = Client(address, KEY).post("/v1/numbers", body)["data"][0]
    near, far = found["intervals"]
    assert near["low"] < found["median"] < near["high"]
    assert (far["low"], far["high"]) == (None, None)


def test_a_model_without_regressor_is_answered_with_a_sentence(
    state: ServedModel, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "regressors", {})
    with pytest.raises(ValueError, match=r"^The number head of this model is not trained; .*\.$"):
        state.forecast("", TEXT)
    with pytest.raises(ValueError, match="name a regressor"):
        state.what_if("", TEXT, 1.0, "another text")


def test_a_token_is_explained_as_the_analysis_does(
    state: ServedModel, backend: TorchEngine
) -> None:
    opened = backend.model, backend.processor
    typical = token_view.measure_typical(*opened)
    expected = token_view.explain_token(*opened, TEXT, 5, typical)
    drawn = rendering.token_view(state.explain_token(TEXT, 5))
    assert drawn == rendering.token_view(expected)
    root = parsed(drawn)
    assert len(root.findall(".//table")) == 2
    assert len(root.findall(".//circle")) == token_view.CANDIDATES
    assert len(root.findall(".//tr[@class='chosen']")) == 1
    assert state.tokens(TEXT) == token_view.split_tokens(*opened, TEXT)
    with pytest.raises(ValueError, match="first token has no context"):
        state.explain_token(TEXT, 0)


def test_a_wrong_key_is_one_sentence(address: str) -> None:
    for key in ("wrong", None):
        with pytest.raises(ValueError, match=r"^The API key is missing or wrong; .*--api-key.*\.$"):
            ServedModel.open(address, key)


def test_interleaved_streams_grow_one_token_at_a_time() -> None:
    streams = [iter(["a", "ab", "abc"]), iter(["x"])]
    grown = [["a", ""], ["a", "x"], ["ab", "x"], ["abc", "x"]]
    assert list(served.interleave(streams)) == grown


# ---------------------------------------------------------------- regressors of this process


def test_the_iris_regressor_learns(
    backend: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    regressor, opened = local.fit_irises(OpenModel(backend.processor, backend.model))
    assert opened.example.startswith("An iris versicolor has sepals 6.1 cm long")
    (low, high) = regressor.predict_interval([opened.example])
    assert float(low[0]) < float(regressor.predict([opened.example])[0]) < float(high[0])


def test_a_directory_is_opened_with_an_example(
    service: Service, backend: TorchEngine, rings: Any
) -> None:
    here = local.LocalServer.__new__(local.LocalServer)
    here.service, here.backend = service, backend
    directory = str(service.regressors["rings"])
    opened = here.open_regressor(directory)
    columns = [name for name in rings if name != "price"]
    assert [line.partition(" = ")[0] for line in opened.example.splitlines()] == columns
    assert opened.note == f"{directory}: calibrated intervals. A line for every column."
    for path, message in (("", "is missing"), ("/nowhere", "nowhere")):
        with pytest.raises((ValueError, OSError), match=message):
            here.open_regressor(path)
    assert "/nowhere" not in service.regressors
    del service.regressors[directory]
    with pytest.raises(ValueError, match="was not trained on values"):
        here.own_head()


# ---------------------------------------------------------------- pictures


def parsed(page: str) -> ElementTree.Element:
    """A picture is well-formed: every tag closed, every letter of a text escaped."""
    return ElementTree.fromstring(page)


@given(st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=40))
def test_card_holds_the_generated_text_unchanged(text: str) -> None:
    root = parsed(rendering.cards([("title", "note", "prompt ", text)], is_done=True))
    assert [one.text or "" for one in root.iter("span") if one.get("class") == "new"] == [text]
    buttons = parsed(rendering.token_buttons([text, "b"], pressed=1)).findall(".//button")
    assert [one.get("aria-pressed") for one in buttons] == ["false", "true", "false"]


@pytest.mark.parametrize("ends", [(1.0, 9.0), (None, None), (5.0, 5.0)])
def test_forecast_is_drawn_inside_the_picture(ends: tuple[Any, Any]) -> None:
    interval = served._ends(dict(zip(("low", "high"), ends, strict=True)))
    drawn = rendering.forecast_picture(
        "a <name>", Forecast(5.0, dict.fromkeys(served.LEVELS, interval))
    )
    assert len(parsed(drawn).findall(".//rect")) == len(served.LEVELS)
    assert "nan" not in drawn
    assert ("∞" in drawn) == (ends == (None, None))
    places = [float(x) for x in re.findall(r"x1?='([-\d.]+)'", drawn)]
    assert min(places) >= 0
    assert max(places) <= rendering.WIDTH


def test_unbounded_sweep_is_drawn_without_nan() -> None:
    low, high = np.full(3, -math.inf), np.full(3, math.inf)
    values = np.arange(3.0)
    assert "nan" not in rendering.sweep_picture(Sweep(values, values, low, high), 0, 1.0, 1.0)


def test_one_wide_interval_does_not_flatten_the_sweep() -> None:
    values = np.arange(5.0)
    wide = np.array([1, 1, 1e12, 1, 1])
    shown = rendering.sweep_picture(
        Sweep(values, values, values - wide, values + wide), 0, 1.0, 1.0
    )
    line = parsed(shown).find(".//polyline")
    assert line is not None
    heights = [float(point.split(",")[1]) for point in str(line.get("points")).split()]
    assert heights[0] - heights[-1] > 5


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.12345, "0.123"), (-999.9, "-1,000"), (123456.7, "123,457"), (1.7e308, "1.7e+308")],
)
def test_number_is_written_out_below_ten_million(value: float, shown: str) -> None:
    assert rendering._number(value) == shown


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=("C",)), max_size=12),
    st.lists(st.decimals(-1000, 1000, places=2), max_size=4),
)
def test_every_number_of_a_text_can_be_dragged(word: str, numbers: list[Any]) -> None:
    text = "a " + " x ".join([word, *map(str, numbers)])
    root = parsed(rendering.draggable_text(text, 1))
    read = root.find("p")
    assert read is not None
    assert "".join(read.itertext()) == f"{text} …"
    dragged = [one for one in root.iter("span") if one.get("class") == "drag"]
    found = [(one.text, float(str(one.get("data-value")))) for one in dragged]
    assert found == find_numbers(text)
    for one in dragged:
        low, value, high = (
            float(str(one.get(f"data-{name}"))) for name in ("low", "value", "high")
        )
        assert low <= value <= high


def test_two_drawings_of_one_text_differ() -> None:
    text = "It has 7 doors"
    drawn = [rendering.draggable_text(text, turn) for turn in (1, 2)]
    assert drawn[0] != drawn[1]
    assert "no number" in rendering.draggable_text("no digit", 1)


def test_dot_of_a_sweep_is_at_the_present_value() -> None:
    values = np.linspace(0, 10, 5)
    sweep = Sweep(values, values * 2, values * 2 - 1, values * 2 + 1)
    root = parsed(rendering.sweep_picture(sweep, 1, 5.0, 10.0))
    assert "number 2, now 5" in "".join(root.itertext())
    dot = root.find(".//circle")
    line = root.find(".//polyline")
    assert dot is not None
    assert line is not None
    middle = str(line.get("points")).split()[2]
    assert (dot.get("cx"), dot.get("cy")) == tuple(middle.split(","))


# ---------------------------------------------------------------- the page


def test_error_of_a_handler_becomes_a_message_and_the_page_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from causal_qwen.playground import page  # and Gradio

    messages: list[str] = []
    monkeypatch.setattr(page.gr, "Warning", messages.append)

    @page.report_errors
    def stream(error: Exception) -> Iterator[str]:
        yield "a word"
        raise error

    unchanged = ["a word", page.gr.skip()]
    assert list(stream(ValueError("The text <b> is empty."))) == unchanged
    assert list(stream(OSError("no file"))) == unchanged
    assert capsys.readouterr().err == ""
    assert list(stream(KeyError("x"))) == unchanged
    assert "KeyError" in capsys.readouterr().err
    assert messages[:2] == ["The text &lt;b&gt; is empty.", "no file"]
    assert len(messages) == 3
    assert "KeyError" in messages[2]


def test_number_of_an_older_text_is_left_to_the_edit() -> None:
    """The browser sends a selection before it has received the choices of the new text."""
    from causal_qwen.playground import page  # and Gradio

    box = page._number_box("from 3 to 7")
    assert box.preprocess(1) == 1
    assert page._number_box("no numbers").preprocess(0) == 0  # Gradio would list its choices


def labels(client: Any, kind: str) -> list[str]:
    """Of the components of a page, by their type."""
    found = client.get("/config").json()["components"]
    return [one["props"].get("label") or one["props"].get("value") for one in found
            if one["type"] == kind]  # fmt: skip


@GRADIO
def test_page_of_a_server_has_every_tab_and_answers(state: ServedModel, tmp_path: Path) -> None:
    with serve_page(state, tmp_path) as client:
        assert labels(client, "tabitem") == list(served.TABS)
        (about,) = (text for text in labels(client, "markdown") if "Model:" in text)
        assert f"`tiny` at `{state.client.address}`." in about
        assert KEY not in client.get("/config").text
        assert client.get("/config", headers={"Host": "evil.example"}).status_code == 400
        rows = "carat = 0.7\ncut = Ideal\ndepth = 61"
        for name, data in {
            "run": [TEXT, 1, 1, 0.7, 0.7, "1", TOKENS],
            "on_draw": [None, "Dora", "7", 1, 0.5],
            "run_2": [None, ["Ada", "Bo", "Ada"], TEXT, TOKENS],
            "run_3": [None, "Ada", TEXT, "a word", TOKENS, "king", "queen", 0, "", ""],
            "on_predict": ["rings", rows],
            "on_drag": ["rings", rows, None, [0, 0.9, 0, 1.4, 0.1]],
            "on_ask": ["rings", rows, "3000", rows.replace("0.7", "0.9")],
            "on_show": [TEXT],
            "on_click": [None, 3],
        }.items():
            found = call(client, name, data)
            assert (found["msg"], found["log"]) == ("process_completed", []), (name, found)
            assert found["success"], (name, found)


@GRADIO
def test_page_of_a_server_without_torch_has_texts_only(
    state: ServedModel, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service.backend, "kind", "numpy")
    with serve_page(ServedModel.open(state.client.address, KEY), tmp_path) as client:
        assert labels(client, "tabitem") == ["Generate", "Individuals"]
        assert any(served.TEXTS_ONLY in text for text in labels(client, "markdown"))


@GRADIO
def test_a_server_that_has_gone_is_a_message_and_the_page_stays(
    service: Service, tmp_path: Path
) -> None:
    with running(service) as address:
        page = serve_page(ServedModel.open(address, KEY), tmp_path)
        client = page.__enter__()  # built while the server still answers
    (message,) = call(client, "run", [TEXT, 1, 1, 0.7, 0.7, "1", TOKENS])["log"]
    assert message.startswith(f"{address} cannot be reached (")
    page.__exit__(None, None, None)


@GRADIO
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1, 20))
def test_hostile_calls_get_a_message_and_the_server_lives(
    state: ServedModel, seed: int, record_property: Any, tmp_path: Path
) -> None:
    with serve_page(state, tmp_path) as client:
        outcomes = attack(client, seed, calls=40)
        assert sum(outcomes.values()) == 40
    record_property("cases", 40)
    assert state.client.get("/health") == {"status": "ok"}


# ---------------------------------------------------------------- server


def test_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^127.0.0.1:{port} cannot be used .*--port\.$"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match="^no such host:0 cannot be used"):
        bind("no such host", 0)


def test_the_page_of_a_server_imports_no_torch() -> None:
    absent = (
        "import sys\nfor name in ('torch', 'transformers', 'sklearn'): sys.modules[name] = None"
    )
    modules = ("fields", "rendering", "served", "server")
    lines = [f"import causal_qwen.playground.{name}" for name in modules]
    subprocess.run([sys.executable, "-c", "\n".join([absent, *lines])], check=True)
