"""`causal-qwen serve` as a process of its own, over real sockets, with OpenAI's own client."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

openai = pytest.importorskip("openai")

GUARD = 1800  # seconds: ends a test that hangs; no test measures time
SAID = [{"role": "user", "content": "Hi"}]


class Server:
    """A running server, and its clients, which `serving` closes."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url
        self.closing = contextlib.ExitStack()

    def client(self, key: str = "sesame") -> Any:
        place = f"{self.url}/v1"
        client = openai.OpenAI(base_url=place, api_key=key, max_retries=0, timeout=GUARD)
        return self.closing.enter_context(client)

    def post(self, route: str, body: dict[str, Any]) -> Any:
        return self.client().post(route, body=body, cast_to=object)

    def end(self, number: int) -> tuple[int, str]:
        self.process.send_signal(number)
        _, errors = self.process.communicate(timeout=GUARD)
        return self.process.returncode, errors.removeprefix("loading the model ...\n")


@contextlib.contextmanager
def serving(model: Path, *options: str) -> Iterator[Server]:
    command = [sys.executable, "-m", "causal_qwen", "serve", "--model", str(model), "--port", "0"]
    command += ["--name", "tiny", *options]
    environment = {**os.environ, "CAUSAL_QWEN_API_KEY": "sesame", "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+", line)
        assert found is not None, (line, process.communicate())
        server = Server(process, found[0])
        with server.closing:
            yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def said(client: Any, **fields: Any) -> str:
    extra = {name: fields.pop(name) for name in ("individual",) if name in fields}
    answer = client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=6, extra_body=extra, **fields
    )
    text: str = answer.choices[0].message.content
    return text


def check_texts(client: Any) -> None:
    """Chat, stream, stop, n and user, as OpenAI's client sees them."""
    whole = client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=6, user="ada", n=2, logprobs=True
    )
    first, second = whole.choices
    assert first.finish_reason == "length"
    assert first.replay["individual"] == second.replay["individual"] == "ada"
    assert len(first.logprobs.content) == whole.usage.completion_tokens / 2 == 6
    stream = client.chat.completions.create(
        model="tiny", messages=SAID, max_tokens=6, user="ada", stream=True
    )
    parts = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(parts) == first.message.content == said(client, user="ada")
    plain = client.completions.create(model="tiny", prompt="a king", max_tokens=12, temperature=0)
    text = plain.choices[0].text
    stop = next(letter for letter in text if letter.isprintable() and letter != "\ufffd")
    cut = client.completions.create(
        model="tiny", prompt="a king", max_tokens=12, temperature=0, stop=[stop]
    )
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="'wild' is unknown"):
        client.completions.create(model="tiny", prompt="a", extra_body={"causal_mode": "wild"})
    with pytest.raises(openai.NotFoundError, match="this server has 'tiny'"):
        client.completions.create(model="gpt", prompt="a")
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_server_without_torch_answers_openais_client(tiny_directory: Path) -> None:
    with serving(tiny_directory, "--engine", "numpy") as server:
        client = server.client()
        check_texts(client)
        with pytest.raises(openai.AuthenticationError, match="API key is missing or wrong"):
            said(server.client("wrong"))
        text = said(client, individual="Ada")
        asked = ["chat", "--url", server.url, "--individual", "Ada", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "causal_qwen", *asked],
            input="Hi\n",
            capture_output=True,
            text=True,
            env={**os.environ, "CAUSAL_QWEN_API_KEY": "sesame"},
            check=True,
        )
        answer = json.loads(done.stdout)
        assert answer["individual"] == "Ada"
        with pytest.raises(openai.APIStatusError, match="without torch"):
            server.post("/numbers", {"input": "a"})
        assert said(client, user="ada") == text
        assert server.end(signal.SIGTERM) == (143, "")


@pytest.mark.slow  # torch, pandas and scikit-learn are imported in a process of its own
def test_a_server_answers_openais_client_counterfactuals_and_numbers(
    tiny_directory: Path, tmp_path: Path
) -> None:
    pandas = pytest.importorskip("pandas")
    from causal_qwen.regression.regressor import CausalTextRegressor

    table = pandas.DataFrame({"carat": [i / 20 for i in range(1, 61)]})
    table["price"] = 4000 * table.carat + [(-1) ** i * 50 for i in range(60)]
    regressor = CausalTextRegressor(sources=["columns"], verbose=False).fit(table, "price")
    regressor.save(tmp_path / "priced")
    expected = regressor.predict_interval(table[["carat"]][:2], 0.8)
    options = ("--regressor", str(tmp_path / "priced"))
    with serving(tiny_directory, *options) as server:
        check_texts(server.client())
        body: dict[str, Any] = {"prompt": "the king has 3", "user": "ada", "max_tokens": 5}
        body["edit"] = {"prompt": "the queen has 3"}
        found = server.post("/counterfactuals", body)
        assert found["individual"] == "ada"
        assert found["counterfactual"]["text"].startswith("the queen has 3")
        rows = [{"carat": 0.05}, {"carat": 0.1}]
        asked = {"input": rows, "levels": [0.8], "quantiles": [0.25, 0.5]}
        answer = server.post("/numbers", asked)
        assert answer["regressor"] == "priced"
        lows = [one["intervals"][0]["low"] for one in answer["data"]]
        assert lows == pytest.approx(expected[0].tolist())
        assert answer["data"][0]["quantiles"][1]["value"] == pytest.approx(
            answer["data"][0]["median"]
        )
        assert server.end(signal.SIGTERM) == (143, "")


# `causal-qwen` where torch is not installed.
WITHOUT_TORCH = """
import sys
for name in ("torch", "transformers", "sklearn"): sys.modules[name] = None
from causal_qwen.cli import main
main()
"""


@pytest.mark.slow  # gradio is imported, in three processes
def test_the_playground_of_a_server_needs_no_torch(tiny_directory: Path, tmp_path: Path) -> None:
    app = [sys.executable, "-c", WITHOUT_TORCH, "app", "--port", "0", "--no-browser", "--url"]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "CAUSAL_QWEN_API_KEY": "sesame"}
    pipe = subprocess.PIPE
    with serving(tiny_directory, "--engine", "numpy") as server:
        process = subprocess.Popen(
            [*app, server.url], stdout=pipe, stderr=pipe, text=True, env=environment
        )
        try:
            assert process.stdout is not None
            found = re.search(r"http://(127\.0\.0\.1:\d+)", process.stdout.readline())
            assert found is not None, process.communicate()
            for host, status in ((found[1], 200), ("evil.example", 400)):
                connection = http.client.HTTPConnection(found[1], timeout=GUARD)
                connection.request("GET", "/config", headers={"Host": host})
                answer = connection.getresponse()
                assert answer.status == status
                assert ("answers texts only" in answer.read().decode()) == (status == 200)
                connection.close()
            process.send_signal(signal.SIGINT)
            rest, errors = process.communicate(timeout=GUARD)
            assert (process.returncode, rest.strip(), errors) == (0, "Closed.", "")
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
        environment["CAUSAL_QWEN_API_KEY"] = "wrong"
        refused = subprocess.run(
            [*app, server.url], capture_output=True, text=True, env=environment, check=False
        )
    gone = subprocess.run(
        [*app, server.url], capture_output=True, text=True, env=environment, check=False
    )
    for done, sentence in ((refused, "API key is missing or wrong"), (gone, "cannot be reached")):
        assert (done.returncode, done.stdout) == (1, "")
        assert sentence in done.stderr
        assert "Traceback" not in done.stderr
    assert [path.name for path in tmp_path.iterdir() if path.name != "people"] == []


@pytest.mark.slow
def test_a_hundred_clients_are_answered_or_told_to_come_back(
    tiny_directory: Path, tmp_path: Path
) -> None:
    options = ("--set", "max_rows=8", "--set", "max_waiting=30")
    with serving(tiny_directory, *options) as server:
        clients, refused = ThreadPoolExecutor(100), list[Any]()

        def ask(number: int) -> tuple[str, int] | None:
            """The text and the individual; None if the queue was full."""
            try:
                answer = server.client().completions.create(
                    model="tiny", prompt=f"client {number}", max_tokens=8, user=f"user {number}"
                )
            except openai.RateLimitError as error:
                refused.append(error)
                return None
            (choice,) = answer.choices
            return choice.text, choice.replay["individual"]

        together = list(clients.map(ask, range(100)))
        answered = {number: found for number, found in enumerate(together) if found is not None}
        assert len(answered) >= 38  # a place for each, whatever the others do
        assert len(answered) + len(refused) == 100 > len(answered)
        for error in refused:
            assert int(error.response.headers["retry-after"]) >= 1
            assert "texts are waiting" in str(error)
        for number, (text, individual) in list(answered.items())[::5]:
            assert individual == f"user {number}"
            assert ask(number) == (text, individual)
        assert server.end(signal.SIGTERM) == (143, "")


@pytest.mark.slow
def test_sigterm_lets_running_requests_end(tiny_directory: Path, tmp_path: Path) -> None:
    with serving(tiny_directory) as server:
        stream = server.client().completions.create(
            model="tiny", prompt="a king", max_tokens=300, temperature=0, stream=True
        )
        first = next(iter(stream))
        server.process.send_signal(signal.SIGTERM)
        rest = list(stream)
        assert rest[-1].choices[0].finish_reason == "length"
        assert first.choices[0].replay["causal_mode"] == "standard"
        assert server.process.wait(GUARD) == 143


@pytest.mark.slow
def test_numbers_are_right_while_other_requests_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A served regressor reads its texts with the layers that decode the completions."""
    pandas = pytest.importorskip("pandas")
    from causal_qwen.conversion.convert import default_model
    from causal_qwen.conversion.opening import open_model
    from causal_qwen.regression.features import MIDDLE, features
    from causal_qwen.regression.regressor import CausalTextRegressor

    embedded = default_model()
    monkeypatch.setenv("CAUSAL_QWEN_CACHE", str(tmp_path / "cache"))
    processor, model = open_model(embedded)
    things = [f"{a} {b} {i}" for i in range(15) for a in ("old", "new") for b in ("ring", "lamp")]
    z = features(things, model, processor, [MIDDLE[0], MIDDLE[2]], max_length=64)
    law = np.random.default_rng(0).normal(size=(2, z.shape[-1]))
    table = pandas.DataFrame({"text": things} | dict(zip("ab", (z * law).sum(-1).T, strict=True)))
    options: dict[str, Any] = {"text": "text", "sources": ["words", "model"], "verbose": False}
    regressor = CausalTextRegressor(model=str(embedded), **options).fit(table, ["a", "b"])
    assert len(regressor.source_.poolings) > 1
    regressor.save(tmp_path / "priced")
    asked = [{"text": f"a {thing} of another kind"} for thing in things]
    expected = regressor.predict(pandas.DataFrame(asked))[:, 0]
    shutil.rmtree(tmp_path / "cache" / "features")

    def number(row: dict[str, str]) -> float:
        answer = server.post("/numbers", {"input": [row], "target": "a"})
        return float(answer["data"][0]["median"])

    given = ("--regressor", str(tmp_path / "priced"))
    with serving(embedded, *given) as server, ThreadPoolExecutor(6) as pool:
        create, body = server.client().completions.create, {"model": "tiny", "prompt": "a king"}
        said = [pool.submit(create, max_tokens=200, **body) for _ in range(4)]
        for _ in range(2):  # computed, then from the cache
            np.testing.assert_allclose([number(row) for row in asked], expected, rtol=1e-3)
        assert len({one.result().choices[0].text for one in said}) == 1
