"""The playground of a served model: every tab through the routes of a real server."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from _damage_api import attack
from _fuzz import seeds
from _playground import call, endpoints, serve_state
from _server import KEY, rounded, running, serving, wait_for
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse

from causal_qwen.cli.setup import playground
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.playground import individuals, modes, predictors, provider, remote, rendering
from causal_qwen.playground.remote import RemoteState
from causal_qwen.playground.state import AppState
from causal_qwen.playground.text_edits import drag_range
from causal_qwen.regression.regressor import OpenModel
from causal_qwen.serving.client import Client
from causal_qwen.serving.connections import serve_app
from causal_qwen.serving.service import Service
from causal_qwen.serving.sockets import bind
from causal_qwen.serving.torch_backend import TorchBackend

TEXT = "a king has 7 horses"
TOKENS = 5
GONE = "http://127.0.0.1:{port}"


@pytest.fixture(scope="module")
def local(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> Iterator[AppState]:
    """The same model in this process."""
    processor = CausalQwenProcessor(byte_tokenizer())
    model = make_model(
        vocab_size=260, max_position_embeddings=512, num_token_id=processor.num_token_id
    )
    model.generation_config.noise_gain = 3.0
    model.generation_config.persistence = 0.7
    state = AppState("tiny", processor, model)
    yield state
    state.close()


@pytest.fixture(scope="module")
def service(
    local: AppState, priced: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Service]:
    root = tmp_path_factory.mktemp("served")
    priced.save(root / "priced")
    backend = TorchBackend(local.model, local.processor)
    found = Service(backend, "tiny", root / "people", regressors={"rings": root / "priced"})
    yield found
    found.close()


@pytest.fixture(scope="module")
def address(service: Service) -> Iterator[str]:
    with running(service) as found:
        yield found


@pytest.fixture(scope="module")
def state(address: str) -> RemoteState:
    return RemoteState.open(f"{address}/v1/", KEY)


@pytest.fixture
def own_state(address: str) -> RemoteState:
    """For a page, which closes it."""
    return RemoteState.open(address, KEY)


def last(stream: Iterator[list[str]]) -> list[str]:
    return list(stream)[-1]


# ---------------------------------------------------------------- texts and individuals


def test_four_modes_write_what_the_model_here_writes(state: RemoteState, local: AppState) -> None:
    four = modes.four_modes(1.5, 1.2, 0.9, 0.6, seed=7)
    assert [one.name for one in four] == ["standard", "sampling", "causal", "compatible"]
    grown = list(state.stream_modes(TEXT, four, TOKENS, 7))
    assert len(grown) > len(four)
    here = last(local.stream_modes(TEXT, four, TOKENS, 7))
    assert [*map(rounded, grown[-1])] == [*map(rounded, here)]
    assert len(set(grown[-1])) > 1


def test_individuals_write_what_they_write_here(state: RemoteState, local: AppState) -> None:
    them, there = local.draw_first(), state.draw_first()
    assert there == them
    assert state.persistence == local.persistence == 0.7
    fields = ("Dora", "42", 1.5, 0.25)
    there, them = state.draw(there, *fields), local.draw(them, *fields)
    assert there == them
    prompts = [TEXT, "once", TEXT, "once"]
    assert last(state.stream_individuals(prompts, there, TOKENS)) == last(
        local.stream_individuals(prompts, them, TOKENS)
    )
    with pytest.raises(ValueError, match="Dora is taken"):
        state.draw(there, *fields)
    assert state.draw(there, "", "")[-1].name.startswith("No. ")


def test_a_file_is_loaded_if_a_seed_draws_its_noise(
    state: RemoteState, local: AppState, tmp_path: Path
) -> None:
    one, two, _ = state.draw_first()
    path = individuals.save(one, tmp_path)
    assert state.load([], path) == [one]
    for noisy in (one.mix(two, 0.5), Individual.draw(local.model, seed=1, fresh=True)):
        noisy.save(tmp_path / "noisy.safetensors", overwrite=True)
        with pytest.raises(ValueError, match="noise that no seed draws"):
            state.load([], str(tmp_path / "noisy.safetensors"))
    Individual.draw(7, seed=1).save(tmp_path / "stranger.safetensors")
    with pytest.raises(ValueError, match="another model"):
        state.load([], str(tmp_path / "stranger.safetensors"))


def test_texts_that_nobody_reads_any_more_are_stopped(state: RemoteState, service: Service) -> None:
    stream = state.stream_modes(TEXT, modes.four_modes(1, 1, 1, 1, 3), 400, 3)
    for _ in range(4):  # the first token of each
        next(stream)
    assert service.batcher.counts()[0] > 0
    stream.close()  # type: ignore[attr-defined]
    wait_for(lambda: service.batcher.counts() == (0, 0))
    assert re.search(r"cancelled_texts_total [1-9]", service.metrics.render(service.gauges()))


# ---------------------------------------------------------------- counterfactuals


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("a word", {"word": "king", "other_word": "queen"}),
        ("a number", {"index": 0, "number": "12"}),
        ("the prompt", {"other_prompt": "another beginning"}),
    ],
)
def test_comparison_is_drawn_as_that_of_the_model_here(
    state: RemoteState, local: AppState, kind: str, fields: dict[str, Any]
) -> None:
    ada = state.draw_first()[0]
    drawn = [
        rendering.comparison(one.compare(ada, TEXT, kind, max_new_tokens=TOKENS, **fields))
        for one in (state, local)
    ]
    assert drawn[0] == drawn[1]
    assert "counterfactual" in drawn[0]


def test_a_generated_word_is_replaced_on_the_server(state: RemoteState, local: AppState) -> None:
    ada = state.draw_first()[0]
    plain = local.compare(ada, TEXT, "the prompt", max_new_tokens=TOKENS, other_prompt=TEXT)
    letters = [token for token in plain.factual.tokens if token.strip() and token not in TEXT]
    fields = {"word": letters[0].strip(), "other_word": "x", "max_new_tokens": TOKENS}
    found, expected = (one.compare(ada, TEXT, "a word", **fields) for one in (state, local))
    assert rendering.comparison(found) == rendering.comparison(expected)
    assert "x" in found.counterfactual.tokens
    with pytest.raises(ValueError, match="nor one generated token"):
        state.compare(ada, TEXT, "a word", **{**fields, "word": "elephants"})


# ---------------------------------------------------------------- numbers


def test_an_interval_that_would_be_infinite_is_refused(address: str, rings: Any) -> None:
    row = {name: str(cell) for name, cell in rings.drop(columns="price").iloc[0].items()}
    client = Client(address, KEY)
    found = client.post("/v1/numbers", {"input": [row]})["data"][0]
    assert found["intervals"][0]["low"] < found["median"] < found["intervals"][0]["high"]
    for name, sentence in (("levels", "level 0.999999 is"), ("quantiles", "quantile 0.999999 is")):
        with pytest.raises(ValueError, match=sentence):
            client.post("/v1/numbers", {"input": [row], name: [0.5, 0.999999]})


def test_numbers_are_those_of_the_servers_regressor(
    state: RemoteState, local: AppState, priced: Any, rings: Any, service: Service
) -> None:
    assert state.offered == {"rings": "the regressor rings"}
    found = state.predictor(state.start.key)
    here = predictors.from_directory(
        str(service.regressors["rings"]), OpenModel(local.processor, local.model)
    )
    columns = [name for name in rings if name != "price"]
    text = predictors.write_lines(rings.iloc[[95]], columns)
    one, expected = found.forecast(text), here.forecast(text)
    assert one.distribution is None
    assert one.median == pytest.approx(float(priced.predict(rings.iloc[[95]])[0]))
    for level in provider.LEVELS:
        assert one.intervals[level] == pytest.approx(expected.intervals[level])
    drag = drag_range(text, 0)
    swept, wanted = (one.sweep(text, 0, drag) for one in (found, here))
    for name in ("values", "low", "high"):
        assert getattr(swept, name) == pytest.approx(getattr(wanted, name)), name
    with pytest.raises(ValueError, match="reads columns, not sentences"):
        found.forecast("A ring of 0.7 carat costs")
    with pytest.raises(ValueError, match="no regressor 'cars'"):
        state.predictor("cars")
    with pytest.raises(ValueError, match="left out"):
        found.what_if(text, "3000", text)


def test_a_model_without_regressor_is_answered_with_a_sentence(
    state: RemoteState, service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "regressors", {})
    bare = RemoteState.open(state.client.address, KEY)
    assert list(bare.offered) == [provider.OWN_HEAD]
    assert "without --regressor" in bare.start.note
    with pytest.raises(ValueError, match=r"^The number head of this model is not trained; .*\.$"):
        bare.predictor(bare.start.key).forecast(TEXT)


@pytest.mark.parametrize(
    ("text", "row"),
    [
        ("carat = 0.9\ncut = Ideal\n\ndepth =", {"carat": 0.9, "cut": "Ideal", "depth": None}),
        ("url = a=b", {"url": "a=b"}),
        ("A ring of 0.7 carat costs", None),
        ("carat = 1\nand a sentence", None),
        ("= 3", None),
        ("", None),
    ],
)
def test_lines_with_a_sign_of_equality_are_a_row(text: str, row: Any) -> None:
    assert remote.read_row(text) == row


@pytest.mark.parametrize("ends", [(1.0, 9.0), (None, None), (5.0, 5.0)])
def test_forecast_without_a_density_is_drawn(ends: tuple[Any, Any]) -> None:
    interval = remote._ends(dict(zip(("low", "high"), ends, strict=True)))
    found = provider.Forecast(None, 5.0, dict.fromkeys(provider.LEVELS, interval))
    drawn = rendering.forecast_picture("a <name>", found)
    root = ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert root.find(".//polyline") is None
    assert len(root.findall(".//rect")) == len(provider.LEVELS)
    assert ("∞" in drawn) == (ends == (None, None))


# ---------------------------------------------------------------- the page


GRADIO = pytest.mark.filterwarnings(
    "ignore:'future.no_silent_downcasting'", "ignore:The copy keyword is deprecated"
)


def labels(client: Any, kind: str) -> list[str]:
    """Of the components of a page, by their type."""
    found = client.get("/config").json()["components"]
    return [one["props"].get("label") or one["props"].get("value") for one in found
            if one["type"] == kind]  # fmt: skip


@GRADIO
def test_page_of_a_server_has_four_tabs_and_one_sentence_on_what_is_left_out(
    own_state: RemoteState, tmp_path: Path
) -> None:
    with serve_state(own_state, tmp_path) as client:
        assert labels(client, "tabitem") == list(provider.TABS[:4])
        (about,) = (text for text in labels(client, "markdown") if "Model:" in text)
        assert f"`tiny` at `{own_state.client.address}`. {remote.LEFT_OUT}." in about
        assert "Had the text been different" not in labels(client, "accordion")
        assert KEY not in client.get("/config").text
        assert "explain" not in " ".join(endpoints(client))
        assert client.get("/config", headers={"Host": "evil.example"}).status_code == 403
        edit = ["king", "queen", 0, "", "", TOKENS]
        for name, data in {
            "run": [TEXT, 1, 1, 0.7, 0.7, "1", TOKENS],
            "on_draw": [None, "Dora", "7", 1, 0.5],
            "run_2": [None, ["Ada", "Bo"], TEXT, TOKENS],
            "run_3": [None, "Ada", TEXT, "a word", *edit],
            "on_predict": ["rings", "carat = 0.7\ncut = Ideal\ndepth = 61", None],
        }.items():
            found = call(client, name, data)
            assert (found["msg"], found["log"]) == ("process_completed", []), (name, found)
            assert found["success"], (name, found)


@GRADIO
def test_page_of_a_server_without_torch_has_texts_only(
    state: RemoteState, service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(service.backend, "kind", "numpy")
    bare = RemoteState.open(state.client.address, KEY)
    with serve_state(bare, tmp_path) as client:
        assert labels(client, "tabitem") == ["Generate", "Individuals"]
        assert any(remote.TEXTS_ONLY in text for text in labels(client, "markdown"))


@GRADIO
def test_a_server_that_has_gone_is_a_message_and_the_page_stays(
    service: Service, tmp_path: Path
) -> None:
    with running(service) as address:
        state = RemoteState.open(address, KEY)
    with serve_state_offline(state, tmp_path) as client:
        found = call(client, "run", [TEXT, 1, 1, 0.7, 0.7, "1", TOKENS])
        (message,) = found["log"]
        assert message.startswith(f"{address} cannot be reached (")


def serve_state_offline(state: RemoteState, files: Path) -> Any:
    """The page was built while the server still answered."""
    them = [Individual.draw(state.size, seed=seed, name=name) for name, seed in
            individuals.FIRST.items()]  # fmt: skip
    state.draw_first = lambda: them  # type: ignore[method-assign]
    return serve_state(state, files)


@GRADIO
@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1, 5))
def test_hostile_calls_of_a_remote_page_get_a_message_and_the_server_lives(
    own_state: RemoteState, state: RemoteState, seed: int, record_property: Any, tmp_path: Path
) -> None:
    with serve_state(own_state, tmp_path) as client:
        outcomes = attack(client, seed, calls=40)
        assert sum(outcomes.values()) == 40
    record_property("cases", 40)
    assert state.client.get("/health") == {"status": "ok"}


# ---------------------------------------------------------------- errors


def test_a_wrong_key_an_absent_server_and_a_bad_address_are_one_sentence(address: str) -> None:
    for key in ("wrong", None):
        with pytest.raises(ValueError, match=r"^The API key is missing or wrong; .*--api-key.*\.$"):
            RemoteState.open(address, key)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = GONE.format(port=probe.getsockname()[1])
    with pytest.raises(OSError, match=rf"^{gone} cannot be reached \(.*\)\.$"):
        RemoteState.open(gone)
    for url in ("127.0.0.1:8000", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a b"):
        with pytest.raises(ValueError, match="is no address"):
            Client(url)
    with pytest.raises(ValueError, match="no HTTP header can hold") as refused:
        Client(address, "secret\nX: y")
    assert "secret" not in str(refused.value)


def test_a_key_is_not_sent_to_where_a_server_redirects() -> None:
    asked: list[str] = []

    async def redirect(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope["path"])
        await RedirectResponse("/elsewhere", 302)(scope, receive, send)

    with serving(redirect) as address, pytest.raises(ValueError, match="answers 302 Found"):
        Client(address, KEY).get("/v1/models")
    assert asked == ["/v1/models"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (PlainTextResponse("hello"), "does not answer in JSON; is it causal-qwen serve"),
        (JSONResponse([1]), "does not answer in JSON"),
        (JSONResponse({"data": [{"id": "gpt"}]}), "not answer as expected .'individual_size'"),
        (JSONResponse({"data": []}), "does not answer as expected"),
        (PlainTextResponse("no", 502), "answers 502 Bad Gateway"),
    ],
)
def test_another_kind_of_server_is_named(answer: Any, message: str) -> None:
    with serving(answer) as address, pytest.raises(ValueError, match=message) as refused:
        RemoteState.open(address)
    assert address in str(refused.value)


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([{"choices": [{"text": "a"}]}], OSError, "has stopped answering"),
        ([{"choices": [{"text": "a"}]}, {"error": {"message": "It broke."}}], ValueError, "broke"),
        ([{"choices": []}], ValueError, "does not answer as expected"),
    ],
)
def test_a_stream_that_breaks_is_an_error(
    state: RemoteState, events: list[Any], kind: type[Exception], message: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        lines = (f"data: {json.dumps(event)}\n\n" for event in events)
        await StreamingResponse(lines)(scope, receive, send)

    four = modes.four_modes(1, 1, 1, 1, 1)
    with serving(app) as address:
        broken = RemoteState(Client(address), "tiny", state.size, 1.0, 80, True)
        with pytest.raises(kind, match=message):
            list(broken.stream_modes(TEXT, four, TOKENS, 1))


def test_a_closed_client_ends_the_requests_of_other_threads() -> None:
    is_asked, may_end = threading.Event(), threading.Event()

    async def hang(scope: Any, receive: Any, send: Any) -> None:
        is_asked.set()
        await asyncio.to_thread(may_end.wait, 60)

    with serving(hang) as address, ThreadPoolExecutor(1) as pool:
        client = Client(address)
        asked = pool.submit(client.post, "/v1/numbers", {})
        assert is_asked.wait(60)
        client.close()
        with pytest.raises(OSError, match=address):  # while it sends, or while it waits
            asked.result(60)
        may_end.set()
    with pytest.raises(OSError, match="is closed"):
        client.get("/v1/models")


def test_a_server_that_ends_says_so_to_those_who_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it waits for its threads, which may wait for another server."""
    order: list[str] = []
    monkeypatch.setattr("uvicorn.Server.startup", _end_at_once)
    monkeypatch.setattr("uvicorn.Server.shutdown", _record_shutdown(order))
    with bind("127.0.0.1", 0) as bound:
        serve_app(
            PlainTextResponse("hello"),
            bound,
            max_connections=9,
            close_seconds=1,
            on_close=lambda: order.append("closed"),
        )
    assert order == ["requests have ended", "closed"]


async def _end_at_once(self: Any, sockets: Any = None) -> None:
    self.started = self.should_exit = True
    self.servers = []


def _record_shutdown(order: list[str]) -> Any:
    async def shutdown(self: Any, sockets: Any = None) -> None:
        order.append("requests have ended")

    return shutdown


def test_a_server_and_a_model_are_not_both_named() -> None:
    for options in ({"model": "mine"}, {"device": "cpu"}, {"dtype": "float32"}):
        with pytest.raises(ValueError, match="leave out --model"):
            playground(url="http://127.0.0.1:8000", **options)


def test_the_remote_page_imports_no_torch() -> None:
    modules = ["individuals", "modes", "provider", "remote", "rendering", "server", "text_edits"]
    absent = (
        "import sys\nfor name in ('torch', 'transformers', 'sklearn'): sys.modules[name] = None"
    )
    lines = [f"import causal_qwen.playground.{name}" for name in (*modules, "uploads")]
    subprocess.run([sys.executable, "-c", "\n".join([absent, *lines])], check=True)
