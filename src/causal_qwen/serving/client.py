"""Client: requests to a server that speaks OpenAI's protocol, with the standard library alone.

    client = Client("http://127.0.0.1:8000", api_key="secret")
    client.get("/v1/models")
    for record in client.stream("/v1/completions", {"prompt": "a king", "stream": True}): ...

Errors are one sentence: OSError where the server cannot be reached, ValueError where it refuses a
request. Redirections are not followed: they would send the key to another address.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

CONNECT_SECONDS = 20
ANSWER_SECONDS = 600  # between two parts of an answer
VERSION_HINT = "is it causal-qwen serve, and of this version?"


class Client:
    """Requests of any number of threads, each on a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = url.strip().rstrip("/").removesuffix("/v1")
        parts = urlsplit(self.address)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url} is no address; write http://127.0.0.1:8000.")
        self._kind = HTTPConnection if parts.scheme == "http" else HTTPSConnection
        self._place, self._path = (parts.hostname, parts.port), parts.path
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._sockets: WeakSet[socket.socket] = WeakSet()
        self._is_closed = False

    def close(self) -> None:
        """End all requests of other threads: they raise OSError."""
        self._is_closed = True
        for one in list(self._sockets):
            with suppress(OSError):  # it has ended
                one.shutdown(socket.SHUT_RDWR)

    def get(self, path: str) -> dict[str, Any]:
        with self._ask("GET", path) as answer:
            return self._read(path, answer.read())

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._ask("POST", path, body) as answer:
            return self._read(path, answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The records of server-sent events. Close the generator to stop the answer."""
        with self._ask("POST", path, body) as answer:
            for line in answer:
                data = line.removeprefix(b"data: ").strip()
                if data == b"[DONE]":
                    return
                if data:
                    record = self._read(path, data)
                    if "error" in record:
                        raise ValueError(_sentence(record) or f"{self.address} failed.")
                    yield record
            raise OSError("its answer has no end")

    @contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """An answer without the expected fields is the server's mistake: one sentence."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.address}{path} does not answer as expected ({error}); {VERSION_HINT}"
            ) from error

    @contextmanager
    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[HTTPResponse]:
        if self._is_closed:
            raise OSError(f"The connection to {self.address} is closed.")
        connection = self._kind(*self._place, timeout=CONNECT_SECONDS)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise OSError(f"{self.address} cannot be reached ({error}).") from None
            self._sockets.add(connection.sock)
            connection.sock.settimeout(ANSWER_SECONDS)
            try:
                data = None if body is None else json.dumps(body)
                connection.request(method, self._path + path, data, self._headers)
                with connection.getresponse() as answer:
                    if answer.status >= 300:
                        raise ValueError(self._refusal(answer, answer.read()))
                    yield answer
            except (OSError, HTTPException) as error:
                reason = str(error) or type(error).__name__
                raise OSError(f"{self.address} has stopped answering ({reason}).") from None
        finally:
            connection.close()

    def _read(self, path: str, data: bytes) -> dict[str, Any]:
        with suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(data), dict):
                return record
        raise ValueError(f"{self.address}{path} does not answer in JSON; {VERSION_HINT}")

    def _refusal(self, answer: HTTPResponse, data: bytes) -> str:
        if answer.status == 401:
            return (
                f"The API key is missing or wrong; give that of {self.address} with --api-key or "
                "CAUSAL_QWEN_API_KEY."
            )
        with suppress(ValueError, RecursionError):
            if said := _sentence(json.loads(data)):
                return said
        return f"{self.address} answers {answer.status} {answer.reason}."


def _sentence(record: Any) -> str:
    """The message of an error in OpenAI's form; "" if it has another."""
    with suppress(LookupError, TypeError):
        return str(record["error"]["message"])
    return ""
