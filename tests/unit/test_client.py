"""Client: requests to a server, and what it says when a server does not answer as expected."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest
from _server import KEY, serving
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, StreamingResponse

from causal_qwen.app.served import ServedModel
from causal_qwen.serving.client import Client

GONE = "http://127.0.0.1:{port}"


def test_an_absent_server_and_a_bad_address_are_one_sentence() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        gone = GONE.format(port=probe.getsockname()[1])
    with pytest.raises(OSError, match=rf"^{gone} cannot be reached \(.*\)\.$"):
        ServedModel.open(gone)
    for url in ("127.0.0.1:8000", "ftp://a", "http://"):
        with pytest.raises(ValueError, match="is no address"):
            Client(url)


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
        (JSONResponse({"data": [{"id": "gpt"}]}), "serves another kind of model"),
        (PlainTextResponse("no", 502), "answers 502 Bad Gateway"),
    ],
)
def test_another_kind_of_server_is_named(answer: Any, message: str) -> None:
    with serving(answer) as address, pytest.raises(ValueError, match=message) as refused:
        ServedModel.open(address)
    assert address in str(refused.value)


@pytest.mark.parametrize(
    ("events", "kind", "message"),
    [
        ([{"choices": [{"text": "a"}]}], OSError, "has stopped answering"),
        ([{"choices": [{"text": "a"}]}, {"error": {"message": "It broke."}}], ValueError, "broke"),
    ],
)
def test_a_stream_that_breaks_is_an_error(
    events: list[Any], kind: type[Exception], message: str
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        lines = (f"data: {json.dumps(event)}\n\n" for event in events)
        await StreamingResponse(lines)(scope, receive, send)

    with serving(app) as address:
        broken = ServedModel(Client(address), "tiny", 32, 1.0, 80, True)
        with pytest.raises(kind, match=message):
            list(broken.stream([{"prompt": "a king"}], 5))
