"""Client: requests to a server that speaks OpenAI's protocol, with the standard library alone.

    client = Client("http://127.0.0.1:8000", api_key="secret")
    client.get("/v1/models")
    for record in client.stream("/v1/completions", {"prompt": "a king", "stream": True}): ...

Errors are one sentence: OSError where the server cannot be reached, ValueError where it refuses a
request. Redirections are not followed: they would send the key to another address.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Generator, Iterator
from typing import Any
from urllib.parse import urlsplit
from weakref import WeakSet

CONNECT_SECONDS = 20
TIMEOUT_SECONDS = 600  # between two parts of an answer
BRIEF_SECONDS = 30  # for what needs no model
VERSION_HINT = "is it causal-qwen serve, and of this version?"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    """Remembers the sockets of requests, so that they can be ended from another thread."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: WeakSet[socket.socket] = WeakSet()
        sockets = self.sockets

        class Brief(http.client.HTTPConnection):
            """A server that is not there is noticed before an answer that takes long."""

            def connect(self) -> None:
                seconds, self.timeout = self.timeout, CONNECT_SECONDS
                super().connect()
                self.sock.settimeout(seconds)
                sockets.add(self.sock)

        class BriefTLS(Brief, http.client.HTTPSConnection):
            pass

        self._kinds = Brief, BriefTLS

    def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kinds[0], request)

    def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
        return self.do_open(self._kinds[1], request)


class Client:
    """Requests of any number of threads."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = check_address(url)
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ValueError("The API key has characters that no HTTP header can hold.")
            self.headers["Authorization"] = f"Bearer {api_key}"
        self._connections, self._is_closed = _Connections(), False
        self._opener = urllib.request.build_opener(_NoRedirects, self._connections)

    def close(self) -> None:
        """End all requests of other threads: they raise OSError."""
        self._is_closed = True
        for one in list(self._connections.sockets):
            with contextlib.suppress(OSError):  # it has ended
                one.shutdown(socket.SHUT_RDWR)

    def get(self, path: str) -> dict[str, Any]:
        return self._whole(path, None, BRIEF_SECONDS)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self._whole(path, body, TIMEOUT_SECONDS)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The records of server-sent events. Close the generator to stop the answer."""
        with self._open(path, body, TIMEOUT_SECONDS) as response:
            for line in response:
                data = line.decode("utf-8").strip().removeprefix("data: ")
                if data == "[DONE]":
                    return
                if data:
                    record = self._read(path, data)
                    if "error" in record:
                        raise ValueError(_sentence(data) or f"{self.address} failed.")
                    yield record
            raise OSError("its answer has no end")

    @contextlib.contextmanager
    def reading(self, path: str) -> Iterator[None]:
        """An answer without the expected fields is the server's mistake: one sentence."""
        try:
            yield
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{self.address}{path} does not answer as expected ({error}); {VERSION_HINT}"
            ) from error

    def _whole(self, path: str, body: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
        with self._open(path, body, seconds) as response:
            return self._read(path, response.read())

    def _read(self, path: str, data: str | bytes) -> dict[str, Any]:
        with contextlib.suppress(ValueError, RecursionError):
            if isinstance(record := json.loads(data), dict):
                return record
        raise ValueError(f"{self.address}{path} does not answer in JSON; {VERSION_HINT}")

    @contextlib.contextmanager
    def _open(self, path: str, body: dict[str, Any] | None, seconds: float) -> Iterator[Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, self.headers)
        if self._is_closed:
            raise OSError(f"The connection to {self.address} is closed.")
        try:
            with self._opener.open(request, timeout=seconds) as response:
                yield response
        except urllib.error.HTTPError as error:
            raise ValueError(self._refusal(error)) from None
        except urllib.error.URLError as error:
            raise OSError(f"{self.address} cannot be reached ({error.reason}).") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error) or type(error).__name__
            raise OSError(f"{self.address} has stopped answering ({reason}).") from None

    def _refusal(self, error: urllib.error.HTTPError) -> str:
        """The sentence of a refused request."""
        with error:
            if error.code == 401:
                return (
                    f"The API key is missing or wrong; give that of {self.address} with --api-key "
                    "or CAUSAL_QWEN_API_KEY."
                )
            try:
                said = _sentence(error.read())
            except (OSError, http.client.HTTPException):
                said = ""
        return said or f"{error.url} answers {error.code} {error.reason}."


def check_address(url: str) -> str:
    """http://HOST:PORT of a server, without /v1."""
    address = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(address)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    is_plain = address.isascii() and address.isprintable() and not set(" @?#\\") & set(address)
    if not (is_address and is_plain):
        raise ValueError(f"--url {url} is no address; write http://127.0.0.1:8000.")
    return address


def _sentence(data: str | bytes) -> str:
    """The message of an error in OpenAI's form; "" if it has another."""
    try:
        return str(json.loads(data)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
