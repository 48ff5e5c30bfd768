"""The playground: its fields and pictures, and what it asks of a real server with a tiny model."""

from __future__ import annotations

import html
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from _playground import call, serve_page
from _server import KEY, rounded, running, wait_for
from hypothesis import given
from hypothesis import strategies as st

from causal_qwen.analysis import token_view
from causal_qwen.analysis.counterfactual import ChangedPrompt, counterfactual
from causal_qwen.app import local, rendering, served
from causal_qwen.app.served import Forecast, ServedModel, Speaker
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.individuals import Individual
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.regression.regressor import OpenModel
from causal_qwen.serving.client import Client
from causal_qwen.serving.connections import bind
from causal_qwen.serving.service import Service

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
    found = Service(backend, "tiny", regressors={"rings": root / "priced"})
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
    row = rings.iloc[95].drop("price")
    return "\n".join(f"{name} = {cell}" for name, cell in row.items())


def last(stream: Iterator[list[str]]) -> list[str]:
    return list(stream)[-1]


# ---------------------------------------------------------------- what a visitor writes


def test_lines_with_a_sign_of_equality_are_a_row() -> None:
    for text, row in {
        "carat = 0.9\ncut = Ideal\n\ndepth =": {"carat": 0.9, "cut": "Ideal", "depth": None},
        "url = a=b": {"url": "a=b"},
        "A ring of 0.7 carat costs": None,
        "carat = 1\nand a sentence": None,
        "= 3": None,
        "": None,
    }.items():
        assert served.read_row(text) == row, text


# ---------------------------------------------------------------- what a server is asked


def test_four_modes_write_what_the_model_writes(state: ServedModel, backend: TorchEngine) -> None:
    four = served.four_modes(7, 1.5, 1.2, 0.9, 0.6)
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


def test_texts_that_nobody_reads_any_more_are_stopped(state: ServedModel, service: Service) -> None:
    four = served.four_modes(3, 1, 1, 1, 1).values()
    stream = state.stream([{"prompt": TEXT, **one} for one in four], 400)
    for _ in range(4):  # the first token of each
        next(stream)
    assert service.batcher.counts()[0] > 0
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: service.batcher.counts() == (0, 0))


def test_a_comparison_is_drawn_as_that_of_the_model(
    state: ServedModel, backend: TorchEngine
) -> None:
    ada = Speaker("Ada", 1, 4.0, 1.0)
    who = Individual.draw(32, seed=1, name="Ada", temperature=4.0, persistence=1.0)

    options = {"processor": backend.processor, "max_new_tokens": TOKENS}
    drawn = rendering.comparison(state.compare(ada, TEXT, "a queen has 9 horses", TOKENS))
    edit = ChangedPrompt("a queen has 9 horses")
    expected = rendering.comparison(counterfactual(backend.model, TEXT, who, edit, **options))
    assert drawn == expected.replace(html.escape(repr(who)), html.escape(repr(ada)))
    assert len(parsed(drawn).findall(".//table")[1].findall(".//tbody/tr")) == TOKENS


def test_numbers_are_those_of_the_servers_regressor(
    state: ServedModel, priced: Any, rings: Any, lines: str
) -> None:
    assert state.regressors == ["rings"]
    row = rings.iloc[[95]]
    found = state.forecast("rings", lines)
    assert found.median == pytest.approx(float(priced.predict(row)[0]))
    for level in served.LEVELS:
        ends = np.ravel(priced.predict_interval(row, level))
        assert found.intervals[level] == pytest.approx(tuple(ends))
    for ask, message in (
        (lambda: state.forecast("rings", "A ring of 0.7 carat"), "reads columns, not sent"),
        (lambda: state.forecast("cars", lines), "no regressor 'cars'"),
    ):
        with pytest.raises(ValueError, match=message):
            ask()


@pytest.mark.filterwarnings("ignore:.*too few for level")
def test_an_infinite_interval_is_null(address: str, lines: str) -> None:
    body = {"input": [served.read_row(lines)], "levels": [0.5, 0.999999]}
    found = Client(address, KEY).post("/v1/numbers", body)["data"][0]
    near, far = found["intervals"]
    assert near["low"] < found["median"] < near["high"]
    assert far["high"] is None


def test_a_token_is_explained_as_the_analysis_does(
    state: ServedModel, backend: TorchEngine
) -> None:
    opened = backend.model, backend.processor
    expected = token_view.explain_token(*opened, TEXT, 5)
    tokens, view = state.tokens(TEXT, 5)
    drawn = rendering.token_view(view)
    assert drawn == rendering.token_view(expected)
    root = parsed(drawn)
    assert len(root.findall(".//table")) == 1
    assert len(root.findall(".//tr[@class='chosen']")) == 1
    assert tokens == token_view.split_tokens(*opened, TEXT)
    with pytest.raises(ValueError, match="first token has no context"):
        state.tokens(TEXT, 0)


# ---------------------------------------------------------------- regressors of this process


def test_the_iris_regressor_learns(
    backend: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path))
    opened = OpenModel(backend.processor, backend.model)
    regressor, example = local.fit_irises(opened), served.IRIS_TEXT
    (low, high) = regressor.predict_interval([example])
    assert float(low[0]) < float(regressor.predict([example])[0]) < float(high[0])


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


@pytest.mark.parametrize("ends", [(1.0, 9.0), (-math.inf, math.inf), (5.0, 5.0), (-1e308, 1e308)])
def test_forecast_is_drawn_inside_the_picture(ends: tuple[float, float]) -> None:
    found = Forecast(5.0, dict.fromkeys(served.LEVELS, ends))
    drawn = rendering.forecast_picture("a <name>", found)
    assert len(parsed(drawn).findall(".//i")) == len(served.LEVELS)
    assert ("∞" in drawn) == math.isinf(ends[0])
    places = [float(x) for x in re.findall(r"(?:left|right):([-\d.]+)%", drawn)]
    assert len(places) == 6
    assert min(places) >= 0
    assert max(places) <= 100


# ---------------------------------------------------------------- the page


def test_error_of_a_handler_becomes_a_message_and_the_page_stays(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from causal_qwen.app import page  # and Gradio

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


def labels(client: Any, kind: str) -> list[str]:
    """Of the components of a page, by their type."""
    found = client.get("/config").json()["components"]
    return [one["props"].get("label") or one["props"].get("value") for one in found
            if one["type"] == kind]  # fmt: skip


@GRADIO
def test_page_of_a_server_has_every_tab_and_answers(state: ServedModel, tmp_path: Path) -> None:
    from causal_qwen.app import page  # and Gradio

    with serve_page(state, tmp_path) as client:
        assert labels(client, "tabitem") == list(page.TABS)
        (about,) = (text for text in labels(client, "markdown") if "Model:" in text)
        assert f"`tiny` at `{state.client.address}`." in about
        assert KEY not in client.get("/config").text
        assert client.get("/config", headers={"Host": "evil.example"}).status_code == 400
        rows = "carat = 0.7\ncut = Ideal\ndepth = 61"
        for name, data in {
            "run": [TEXT, TOKENS, 1, 1, 1, 0.7, 0.7],
            "on_draw": [None, "Dora", 7, 1, 0.5],
            "run_2": [None, ["Ada", "Bo", "Ada"], TEXT, TOKENS],
            "run_3": ["Which?", "cat, dog", "Who?", 20],
            "run_7": [None, "Ada", TEXT, TEXT.replace("king", "queen"), TOKENS],
            "on_predict": ["rings", rows],
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
    from causal_qwen.app import page  # and Gradio

    monkeypatch.setattr(service.backend, "kind", "numpy")
    with serve_page(ServedModel.open(state.client.address, KEY), tmp_path) as client:
        assert labels(client, "tabitem") == ["Generate", "Individuals", "Panel"]
        assert any(page.TEXTS_ONLY in text for text in labels(client, "markdown"))


@GRADIO
def test_a_server_that_has_gone_is_a_message_and_the_page_stays(
    service: Service, tmp_path: Path
) -> None:
    with running(service) as address:
        page = serve_page(ServedModel.open(address, KEY), tmp_path)
        client = page.__enter__()  # built while the server still answers
    (message,) = call(client, "run", [TEXT, TOKENS, 1, 1, 1, 0.7, 0.7])["log"]
    assert message.startswith(f"{address} cannot be reached (")
    page.__exit__(None, None, None)


# ---------------------------------------------------------------- server


def test_port_in_use_is_named() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=rf"^127.0.0.1:{port} cannot be used .*--port\.$"):
            bind("127.0.0.1", port)
    with pytest.raises(OSError, match="no such host:0 cannot be used"):
        bind("no such host", 0)


def test_the_page_of_a_server_imports_no_torch() -> None:
    absent = (
        "import sys\nfor name in ('torch', 'transformers', 'sklearn'): sys.modules[name] = None"
    )
    modules = ("rendering", "served", "server")
    lines = [f"import causal_qwen.app.{name}" for name in modules]
    subprocess.run([sys.executable, "-c", "\n".join([absent, *lines])], check=True)
