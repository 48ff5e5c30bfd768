"""The server inside this process: batches, texts, routes, queue, names."""

from __future__ import annotations

import http.client
import json
import random
import re
import threading
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from _damage_requests import Attack
from _fuzz import IS_ON, seeds
from _server import CHAT, rounded, running, wait_for
from _tiny import OWN, make_causal
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient

from causal_qwen.cli import batch
from causal_qwen.cli.chat import RemoteConversation
from causal_qwen.engines.engine import Choice, Row, Tokens
from causal_qwen.engines.torch import TorchBatch, TorchEngine
from causal_qwen.individuals import seed_of
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.panel import Panel
from causal_qwen.serving.app import make_app
from causal_qwen.serving.batching import Batcher, Event, Job
from causal_qwen.serving.client import Client
from causal_qwen.serving.requests import Limits
from causal_qwen.serving.service import Service
from causal_qwen.session import GrowingText, Session

URL = "http://127.0.0.1:8000"
MODES: tuple[dict[str, Any], ...] = (
    {"causal_mode": "standard"},
    {"causal_mode": "standard", "repetition_penalty": 1.3},
    {"causal_mode": "sampling", "individual": 1},
    {"causal_mode": "causal", "individual": 2, "persistence": 0.5},
    {"causal_mode": "causal", "individual": 3, "min_p": 0.01, "temperature": 2.0},
    {"causal_mode": "causal", "individual": 4, "temperature": 0.0},
    {"causal_mode": "causal", "individual": 5, "persistence": 0.5, "exogenous": 6, "top_k": 9},
    {"causal_mode": "compatible"},
    {"causal_mode": "compatible", "do_sample": True, "temperature": 1.5, "top_p": 0.9},
    {"causal_mode": "compatible", "do_sample": True, "normalization": "ovr"},
)


@pytest.fixture(scope="module")
def backend(
    make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]
) -> Iterator[TorchEngine]:
    processor = CausalQwenProcessor(byte_tokenizer(chat_template=CHAT))
    model = make_model(
        vocab_size=260, max_position_embeddings=512, num_token_id=processor.num_token_id
    )
    model.generation_config.noise_gain = 3.0
    return TorchEngine(model, processor)


@pytest.fixture
def service(backend: TorchEngine, tmp_path: Path) -> Iterator[Service]:
    running = Service(backend, "tiny")
    yield running
    running.close()


@pytest.fixture
def client(service: Service) -> TestClient:
    return TestClient(make_app(service), base_url=URL)


def complete(client: TestClient, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/completions", json={"prompt": "a king", "max_tokens": 6, **body})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def texts(client: TestClient, **body: Any) -> list[str]:
    return [choice["text"] for choice in complete(client, **body)["choices"]]


def generated(backend: TorchEngine, row: Row) -> tuple[list[int], list[float]]:
    """What `generate` alone writes for a row."""
    ids, values = torch.tensor([row.prompt.ids]), torch.tensor([row.prompt.values])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(row.seed or 0)
        found = backend.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            numeric_values=values,
            max_new_tokens=row.max_new_tokens,
            return_dict_in_generate=True,
            **row.options,
        )
    new = slice(ids.shape[1], None)
    return found.sequences[0, new].tolist(), found.numeric_values[0, new].tolist()


# ---------------------------------------------------------------- batches


def run_staggered(running: TorchBatch, rows: list[Row], most: int, chance: random.Random) -> None:
    """Decode rows that join at random steps, in groups of one prompt, and leave when done."""
    waiting, live = list(rows), list[Row]()

    def take(row: Row, choice: Choice | Exception) -> None:
        assert isinstance(choice, Choice), choice
        row.append(choice)
        if len(row.new.ids) == row.max_new_tokens:
            live.remove(row)
            running.leave(row)

    while waiting or live:
        if waiting and len(live) < most and (not live or chance.random() < 0.4):
            prompts = {id(row.prompt): None for row in waiting}  # in order
            together = list(prompts)[: chance.randint(1, 3)]
            group = [row for row in waiting if id(row.prompt) in together]
            waiting = [row for row in waiting if row not in group]
            live += group
            for row, choice in zip(group, running.join(group), strict=True):
                take(row, choice)
        if live:
            for row, choice in running.step():
                take(row, choice)


def check_equal_to_generate(
    backend: TorchEngine, count: int, lengths: list[int], new: list[int]
) -> None:
    chance, number = random.Random(count), backend.num_token_id
    rows: list[Row] = []
    for place in range(count):
        ids = [chance.randrange(260) for _ in range(chance.choice(lengths))]
        values = [chance.uniform(-5, 5) if token == number else 0.0 for token in ids]
        prompt = Tokens(ids, values)
        options = MODES[place % len(MODES)]
        rows.append(Row(prompt, options, seed=place, max_new_tokens=chance.choice(new)))
        if place % 5 == 0:  # several texts of one prompt
            more = MODES[(place + 3) % len(MODES)]
            rows.append(Row(prompt, more, seed=place, max_new_tokens=chance.choice(new)))
    run_staggered(backend.new_batch(), rows, 6, chance)
    for row in rows:
        ids, values = generated(backend, row)
        assert row.new.ids == ids, (row.options, len(row.prompt.ids))
        np.testing.assert_allclose(row.new.values, values, rtol=1e-3)


def test_rows_that_join_and_leave_are_those_of_generate(backend: TorchEngine) -> None:
    check_equal_to_generate(backend, 12, [1, 4, 13, 40], [1, 3, 14])


@pytest.mark.slow
def test_long_rows_that_join_and_leave_are_those_of_generate(backend: TorchEngine) -> None:
    check_equal_to_generate(backend, 60, [1, 3, 20, 80, 150], [1, 5, 40, 160])


def _refuse(*_: Any) -> Any:
    raise ValueError("no choice")


# ---------------------------------------------------------------- growing texts


class Letters:
    """A backend whose tokens are letters."""

    ends = frozenset({0})

    def decode(self, tokens: Tokens) -> str:
        return "".join(chr(token) for token in tokens.ids if token)


@given(
    letters=st.text("ab.\ufffd", max_size=12),
    stops=st.lists(st.text("ab", min_size=1, max_size=3), max_size=2),
)
def test_additions_are_the_text_before_the_first_stop(letters: str, stops: list[str]) -> None:
    row = Row(Tokens([1], [0.0]), {}, max_new_tokens=len(letters) + 1)
    text = GrowingText(row, Letters(), stops)  # type: ignore[arg-type]
    sent = ""
    for token in [*map(ord, letters), 0]:
        sent += text.take(Choice(token))
        if text.finish is not None:
            break
    ends = [place for stop in stops if (place := letters.find(stop)) >= 0]
    assert sent == letters[: min(ends, default=len(letters))]
    assert text.finish == "stop"


def test_a_text_ends_at_its_length() -> None:
    text = GrowingText(Row(Tokens([1], [0.0]), {}, max_new_tokens=2), Letters(), ())  # type: ignore[arg-type]
    assert (text.take(Choice(97)), text.finish) == ("a", None)
    assert (text.take(Choice(98)), text.finish) == ("b", "length")


# ---------------------------------------------------------------- the queue


def job(notify: Callable[[Event], None], copies: int = 1, tokens: int = 4) -> Job:
    prompt = Tokens([5, 6], [0.0, 0.0])
    rows = [Row(prompt, MODES[0], max_new_tokens=tokens) for _ in range(copies)]
    return Job(rows, (), notify)


def test_a_failing_batch_is_told_to_its_clients_and_the_next_one_works(
    backend: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    batcher = Batcher(backend, Limits())
    failed, ended = threading.Event(), threading.Event()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(TorchBatch, "step", _refuse)
            batcher.submit(job(lambda event: failed.set() if event.error else None))
            assert failed.wait(60)
        batcher.submit(job(lambda event: ended.set() if event.finish else None))
        assert ended.wait(60)
    finally:
        batcher.close()


# ---------------------------------------------------------------- routes


def test_a_text_is_that_of_generate_with_the_reported_settings(
    client: TestClient, backend: TorchEngine
) -> None:
    answer = complete(client, individual=7, max_tokens=8)
    row = Row(backend.encode("a king"), {"individual": 7, "causal_mode": "causal"}, None, 8)
    ids, values = generated(backend, row)
    (choice,) = answer["choices"]
    assert choice["text"] == backend.decode(Tokens(ids, values))
    assert choice["finish_reason"] == "length"
    assert choice["replay"]["individual"] == 7
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 8, "total_tokens": 14}
    assert answer["model"] == "tiny"


def test_every_choice_can_be_replayed(client: TestClient) -> None:
    for body in (
        {"temperature": 0.7, "n": 2},
        {"user": "ada", "n": 2},
        {"individual": "Ada"},
        {"temperature": 0},
        {"causal_mode": "compatible", "temperature": 1.2, "n": 2},
        {"causal_mode": "compatible"},
    ):
        for choice in complete(client, **body)["choices"]:
            (again,) = texts(client, **choice["replay"])
            assert rounded(again) == rounded(choice["text"]), body


def test_several_prompts_are_answered_in_their_order(client: TestClient) -> None:
    both = complete(client, prompt=["a king", "a queen"], individual=7, n=2)
    alone = texts(client, individual=7, n=2) + texts(client, prompt="a queen", individual=7, n=2)
    assert [choice["text"] for choice in both["choices"]] == alone
    assert both["usage"]["prompt_tokens"] == len("a king") + len("a queen")


def test_chat_streams_the_text_that_it_would_send_whole(client: TestClient) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "individual": 4,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.post("/v1/chat/completions", json=body).json()
    more = {"stream": True, "stream_options": {"include_usage": True}}
    answer = client.post("/v1/chat/completions", json={**body, **more})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]"
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert chunks[-1]["usage"] == whole["usage"]
    for index, expected in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        said = "".join(choice["delta"]["content"] for choice in own)
        assert said == expected["message"]["content"]
        assert own[0]["delta"]["role"] == "assistant"
        assert own[0]["replay"] == expected["replay"]
        assert [choice["finish_reason"] for choice in own][-1] == "length"
        shown = [part for choice in own for part in choice["logprobs"]["content"]]
        assert shown == expected["logprobs"]["content"]
        assert len(shown) == 9


def test_log_probabilities_are_those_of_loc_s(client: TestClient, backend: TorchEngine) -> None:
    found = complete(client, individual=7, max_tokens=2, logprobs=3)["choices"][0]["logprobs"]
    ids = torch.tensor([backend.encode("a king").ids])
    expected = backend.model(ids).logits[0, -1].detach().log_softmax(-1)
    row = Row(backend.encode("a king"), {"individual": 7}, None, 1)
    chosen = generated(backend, row)[0][0]
    assert found["token_logprobs"][0] == pytest.approx(float(expected[chosen]), abs=1e-4)
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    body |= {"logprobs": True, "top_logprobs": 3}
    (first,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    ids = torch.tensor([backend.encode_chat(body["messages"]).ids])
    best = backend.model(ids).logits[0, -1].detach().log_softmax(-1).topk(3).values.tolist()
    shown = first["logprobs"]["content"][0]["top_logprobs"]
    assert [one["logprob"] for one in shown] == pytest.approx(best, abs=1e-4)


def test_errors_are_answered_with_their_status_and_one_sentence(client: TestClient) -> None:
    def post(path: str, **body: Any) -> Any:
        return client.post(path, json=body)

    long = "a" * 600
    cases = [
        (
            post("/v1/completions", prompt="a", temprature=1),
            400,
            "temprature: Extra inputs are not permitted",
        ),
        (post("/v1/completions", prompt="a", model="other"), 404, "this server has 'tiny'"),
        (post("/v1/completions", prompt="a", individual=" "), 400, "name is empty"),
        (post("/v1/completions", prompt=long), 400, "has 600 tokens; this server reads 1 to 511"),
        (post("/v1/completions", prompt="a", stream=True, value_field="x"), 400, "'x'"),
        (
            post("/v1/chat/completions", messages=[]),
            400,
            "messages: List should have at least 1 item",
        ),
        (post("/v1/counterfactuals", prompt="a"), 400, "edit: Field required"),
        (
            post("/v1/counterfactuals", prompt="a", edit={"token": 1}),
            400,
            "edit needs a prompt or messages",
        ),
        (
            post("/v1/counterfactuals", prompt="a", causal_mode="standard", edit={"prompt": "b"}),
            400,
            "'standard' has none",
        ),
        (post("/v1/numbers", input="a"), 400, "number head of this model is not trained"),
        (post("/v1/numbers", input="a", regressor="x"), 404, "There is no regressor 'x'"),
        (client.post("/v1/completions", content=b"{"), 400, "JSON decode error"),
        (client.post("/v1/completions", content=b"[" * 99_999), 400, "error parsing the body"),
        (client.post("/v1/completions", json=[1]), 400, "valid dictionary"),
        (client.get("/nowhere"), 404, "Not Found"),
    ]
    for answer, status, words in cases:
        assert answer.status_code == status, answer.text
        message = answer.json()["error"]["message"]
        assert words in message, message
        assert "\n" not in message


def test_a_full_queue_is_429_with_retry_after(backend: TorchEngine, tmp_path: Path) -> None:
    service = Service(backend, "tiny", Limits(max_rows=2, max_waiting=0))
    client = TestClient(make_app(service), base_url=URL)
    go_on = threading.Event()
    try:
        service.batcher.submit(job(lambda _: wait_for(go_on.is_set)))
        answer = client.post("/v1/completions", json={"prompt": "a", "n": 2, "user": "ada"})
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["type"] == "rate_limit_error"
    finally:
        go_on.set()
        service.close()


def test_many_clients_at_once_are_not_mixed_up(client: TestClient) -> None:
    """A small version of the hundred clients in tests/contract/test_serving.py."""

    def ask(seed: int) -> str:
        (text,) = texts(client, prompt=f"client {seed}", individual=seed, max_tokens=5)
        return re.sub(r"[0-9.]+", "#", text)  # the last digit of a value is rounded in the batch

    with ThreadPoolExecutor(12) as pool:
        together = list(pool.map(ask, range(24)))
    assert together == [ask(seed) for seed in range(24)]


@pytest.mark.parametrize("base", OWN)
def test_rows_of_every_family_are_the_texts_of_generate(
    base: str, byte_tokenizer: Callable[..., Any]
) -> None:
    processor = CausalQwenProcessor(byte_tokenizer())
    size = len(processor.tokenizer)
    model = make_causal(base, vocab_size=size, num_token_id=processor.num_token_id)
    served = TorchEngine(model, processor)
    call = {"causal_mode": "causal", "individual": 3}
    rows = [Row(served.encode(text), call, None, 5) for text in ("a", "the king has a long name")]
    run_staggered(served.new_batch(), rows, 2, random.Random(0))
    for row in rows:
        assert row.new.ids == generated(served, row)[0]


def test_a_counterfactual_stays_within_the_context(
    client: TestClient, backend: TorchEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "context", 12)
    body = {"prompt": "a king", "edit": {"prompt": "the queen"}, "individual": 1, "max_tokens": 20}
    found = client.post("/v1/counterfactuals", json=body).json()
    assert len(backend.encode(found["counterfactual"]["text"]).ids) <= 12
    assert found["factual"]["continuation"]


def test_counterfactuals_compare_two_worlds_of_one_individual(client: TestClient) -> None:
    common = {"prompt": "the king has 3", "individual": 3, "max_tokens": 5}
    expected = texts(client, **common)[0]
    for prompt in ("the queen has 3", "the king has 4", "a cat"):
        asked = {**common, "edit": {"prompt": prompt}}
        found = client.post("/v1/counterfactuals", json=asked).json()
        assert found["individual"] == 3
        assert found["factual"]["continuation"] == expected
        assert found["counterfactual"]["text"].startswith(prompt)
        other = texts(client, **{**common, "prompt": prompt})[0]
        assert found["counterfactual"]["continuation"] == other
    token = {**common, "edit": {"token": 4, "by": "K"}}
    found = client.post("/v1/counterfactuals", json=token).json()
    assert found["counterfactual"]["text"].startswith("the King has 3")
    chat = {"messages": [{"role": "user", "content": "the king"}], "user": "a", "max_tokens": 3}
    edit = {"messages": [{"role": "user", "content": "the queen"}]}
    found = client.post("/v1/counterfactuals", json={**chat, "edit": edit}).json()
    assert "user: the queen" in found["counterfactual"]["text"]
    assert found["individual"] == "a"


def test_models_health_metrics_and_pages(client: TestClient) -> None:
    complete(client)
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["context"], card["individual_size"]) == ("tiny", 512, 32)
    assert client.get("/health").json() == {"status": "ok"}
    metrics = client.get("/metrics").text
    assert "causal_qwen_generated_tokens_total 6" in metrics
    assert 'causal_qwen_requests_total{route="/v1/completions",status="200"} 1' in metrics
    assert 'causal_qwen_first_token_seconds_bucket{le="+Inf"} 1' in metrics
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    assert {"individual", "persistence", "min_p"} <= set(schemas["CompletionRequest"]["properties"])
    assert "/openapi.json" in client.get("/docs").text


# ---------------------------------------------------------------- guard


def test_the_key_host_and_origin_are_checked(service: Service) -> None:
    app = make_app(service, key="sesame")
    client = TestClient(app, base_url=URL)
    key = {"Authorization": "Bearer sesame"}
    refused = client.get("/v1/models")
    assert refused.status_code == 401
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert client.get("/v1/models", headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert client.get("/v1/models", headers=key).status_code == 200
    assert client.get("/health").status_code == 200
    for part in ("", "s", "sesam", "sesame-and-more", "wrong"):
        wrong = {"Authorization": f"Bearer {part}"}
        assert client.get("/v1/models", headers=wrong).status_code == 401, part
    rebound = client.get("/v1/models", headers={**key, "Host": "evil.example"})
    assert rebound.status_code == 400
    known = TestClient(make_app(service, "0.0.0.0", "sesame"), base_url="http://box.lan:8000")
    assert known.get("/v1/models", headers=key).status_code == 200
    foreign = client.get("/v1/models", headers={**key, "Origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert "access-control-allow-origin" not in foreign.headers


def test_origins_that_are_asked_for_may_call(service: Service) -> None:
    site = "http://app.example"
    client = TestClient(make_app(service, origins=[site]), base_url=URL)
    asked = {"Origin": site, "Access-Control-Request-Method": "POST"}
    assert client.options("/v1/completions", headers=asked).status_code == 200
    answer = client.get("/v1/models", headers={"Origin": site, "Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == site
    assert client.get("/v1/models", headers={"Origin": "http://b.example"}).status_code == 403


def test_a_long_body_is_refused(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("causal_qwen.serving.app.MAX_BODY", 100)
    client = TestClient(make_app(service), base_url=URL)
    body = json.dumps({"prompt": "a" * 200}).encode()
    for content in (body, iter([body[:90], body[90:]])):  # the second without its length
        answer = client.post("/v1/completions", content=content)
        assert answer.status_code == 413
        assert "longer than 100 bytes" in answer.json()["error"]["message"]


@pytest.fixture(scope="module")
def numbers_of_rows() -> Any:
    """A fitted regressor of a table."""
    pandas = pytest.importorskip("pandas")
    from causal_qwen.regression.regressor import CausalTextRegressor

    table = pandas.DataFrame({"size": np.arange(40.0), "price": np.arange(40.0) ** 1.5})
    regressor = CausalTextRegressor(sources=["columns"], folds=2, verbose=False)
    return regressor.fit(table, "price")


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:.*too few for level")
@pytest.mark.parametrize("seed", seeds(1, 40))
def test_hostile_requests_are_answered_and_the_server_lives(
    seed: int, backend: TorchEngine, numbers_of_rows: Any, tmp_path: Path, record_property: Any
) -> None:
    limits = Limits(max_tokens=4, max_prompt=200)
    service = Service(backend, "tiny", limits, {"price": tmp_path})
    service.opened["price"] = numbers_of_rows
    calls = 100 if IS_ON else 40
    record_property("cases", calls)
    try:
        client = TestClient(make_app(service), base_url=URL)
        counts = Attack(client, seed).run(calls)
        assert sum(counts.values()) == calls
        assert service.batcher.counts() == (0, 0)
    finally:
        service.close()
    assert {path.name for path in tmp_path.iterdir()} <= {"saved"}


# ---------------------------------------------------------------- names


def test_a_name_is_one_individual_everywhere(client: TestClient, service: Service) -> None:
    ada = texts(client, individual="Ada")
    assert ada == texts(client, user="ada") == texts(client, individual=seed_of(" ADA "))
    session = Session(service.backend)
    assert ada == [session.generate("a king", individual="ada", max_new_tokens=6).text]
    assert ada != texts(client, user="bo")


def test_a_named_individual_has_other_chances_and_stays_itself(client: TestClient) -> None:
    """With chance, `n` and `seed` draw it anew; without, all texts of one person are equal."""
    lively = {"user": "ada", "persistence": 0.3, "min_p": 0.01}
    three = complete(client, **lively, n=3)["choices"]
    assert {one["replay"]["individual"] for one in three} == {"ada"}
    assert len({one["text"] for one in three}) == 3
    assert texts(client, **lively, seed=1) == [three[1]["text"]]
    for one in three:
        assert texts(client, **one["replay"]) == [one["text"]]
    drawn = complete(client, user="ada", causal_mode="sampling", seed=4)["choices"][0]["replay"]
    assert drawn["individual"] == 4


# ---------------------------------------------------------------- shares and panels


def test_shares_and_panels_are_those_of_a_session(client: TestClient, service: Service) -> None:
    session = Session(service.backend)
    found = client.post("/v1/shares", json={"prompt": "a king", "individuals": 50}).json()
    own = session.shares("a king", 50).to_dict()
    assert found["tokens"] == own["tokens"]
    people = ["ada", 5, "bo"]
    body = {"question": "Say", "options": ["cat", "dog"], "individuals": people, "answers": True}
    asked = client.post("/v1/panel", json={**body, "versus": "Tell"}).json()
    panel = Panel(session, people)
    both = panel.compare("Say", "Tell", ["cat", "dog"])
    assert asked["answers"] == [[*pair] for pair in both.pairs()]
    assert asked["switched"] == both.switched
    refused = client.post("/v1/panel", json={**body, "options": ["cat", "Cat"]})
    assert refused.status_code == 400
    assert "Two options" in refused.json()["error"]["message"]


def test_a_panel_is_answered_while_texts_are_decoded(client: TestClient) -> None:
    alone = texts(client, prompt="a king", individual=3, max_tokens=60)
    body = {"question": "Say", "options": ["cat", "dog"], "individuals": 20}
    expected = client.post("/v1/panel", json=body).json()["options"]
    with ThreadPoolExecutor(4) as pool:
        growing = pool.submit(texts, client, prompt="a king", individual=3, max_tokens=60)
        asked = [pool.submit(client.post, "/v1/panel", json=body) for _ in range(6)]
        assert all(one.result().json()["options"] == expected for one in asked)
        assert growing.result() == alone


# ---------------------------------------------------------------- a file of prompts


def write_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


LINES: list[dict[str, Any]] = [
    {"prompt": "a king", "individual": 7, "id": "first"},
    {"prompt": "a queen", "temperature": 0, "max_tokens": 2},
    {"prompt": "a cat", "temprature": 0},
    {"messages": [{"role": "user", "content": "Hi"}], "user": "ada"},
    {"prompt": "a dog"},
]


def run_lines(backend: TorchEngine, source: Path, output: Path) -> int:
    defaults = {"max_tokens": 5, "individual": 3}
    return batch.run(backend, source, output, defaults, Limits(max_rows=2, max_waiting=20))


def test_a_file_of_prompts_is_answered_in_its_order(
    backend: TorchEngine, client: TestClient, tmp_path: Path
) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    assert run_lines(backend, source, output) == 2  # temperature 0 contradicts the individual, too
    found = read_records(output)
    assert [record["line"] for record in found] == [0, 1, 2, 3, 4]
    assert found[0]["id"] == "first"
    assert [found[0]["text"]] == texts(client, individual=7, max_tokens=5)
    assert "temperature 0 means standard" in found[1]["error"]
    assert "temprature: Extra inputs" in found[2]["error"]
    assert found[3]["replay"]["individual"] == 3
    assert [found[4]["text"]] == texts(client, prompt="a dog", **found[4]["replay"], max_tokens=5)


def test_a_killed_run_is_resumed_where_it_stopped(backend: TorchEngine, tmp_path: Path) -> None:
    source, output = write_lines(tmp_path / "in.jsonl", LINES), tmp_path / "out.jsonl"
    run_lines(backend, source, output)
    whole = output.read_bytes()
    for cut in (0, 1, whole.index(b"\n") + 1, len(whole) - 3, len(whole)):
        output.write_bytes(whole[:cut])
        run_lines(backend, source, output)
        assert output.read_bytes() == whole, cut
    output.write_bytes(b"my notes")  # without a newline, as the part of a killed run
    with pytest.raises(ValueError, match=r"Line 1 of .* is not of this input"):
        run_lines(backend, source, output)
    assert output.read_bytes() == b"my notes"
    output.write_bytes(whole)
    other = write_lines(tmp_path / "other.jsonl", LINES[1:])
    with pytest.raises(ValueError, match=r"Line 1 of .* is not of this input"):
        run_lines(backend, other, output)
    assert output.read_bytes() == whole
    (tmp_path / "bad.jsonl").write_text("{\n", encoding="utf-8")
    with pytest.raises(ValueError, match=r"Line 1 of .* is no request"):
        run_lines(backend, tmp_path / "bad.jsonl", tmp_path / "new.jsonl")


# ---------------------------------------------------------------- chat with a server


@pytest.fixture
def address(service: Service) -> Iterator[str]:
    with running(service) as found:
        yield found


def test_a_conversation_with_a_server(address: str, client: TestClient) -> None:
    server = Client(address, "sesame")
    chat = RemoteConversation(server, individual="7", system="Be brief.", max_new_tokens=5)
    said: list[str] = []
    first = chat.ask("Hi", said.append)
    assert "".join(said) == first.text
    assert first.settings["individual"] == 7
    second = chat.ask("Again")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    messages += [{"role": "assistant", "content": first.text.strip()}]
    messages += [{"role": "user", "content": "Again"}]
    body = {"messages": messages, "max_tokens": 5, "individual": 7}
    (expected,) = client.post("/v1/chat/completions", json=body).json()["choices"]
    assert second.text == expected["message"]["content"]
    assert chat.command("/individual ada") == "mode causal, answers by individual ada"
    assert chat.ask("Hi").settings["individual"] == "ada"
    assert "standard" in chat.command("/mode standard")
    chat.command("/reset")
    chat.ask("Hi")
    with pytest.raises(ValueError, match="API key is missing or wrong"):
        RemoteConversation(Client(address, "wrong")).ask("Hi")


def test_a_client_that_disconnects_stops_its_text(address: str, service: Service) -> None:
    body = {"prompt": "a king", "max_tokens": 500, "individual": 7}
    for more in ({}, {"stream": True}):
        host = address.removeprefix("http://")
        connection = http.client.HTTPConnection(host)
        headers = {"Authorization": "Bearer sesame"}
        connection.request("POST", "/v1/completions", json.dumps({**body, **more}), headers)
        wait_for(lambda: service.batcher.counts() == (1, 0))
        connection.close()
        wait_for(lambda: service.batcher.counts() == (0, 0))
    metrics = urllib.request.Request(f"{address}/metrics", headers=headers)
    wait_for(lambda: b"cancelled_texts_total 2" in urllib.request.urlopen(metrics).read())
