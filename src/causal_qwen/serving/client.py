"""Client: requests to a server that speaks OpenAI's protocol.

    client = Client("http://127.0.0.1:8000", api_key="secret")
    client.get("/v1/models")
    for record in client.stream("/v1/completions", {"prompt": "a king"}): ...

Errors are one sentence: OSError where the server cannot be reached, ValueError where it refuses a
request. Redirections are not followed: they would send the key to another address.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx2

SECONDS = httpx2.Timeout(600, connect=20)  # between two parts of an answer; to connect


class Client:
    """Requests of any number of threads, each on a connection of its own."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.address = url.strip().rstrip("/").removesuffix("/v1")
        scheme, _, host = self.address.partition("://")
        if scheme not in ("http", "https") or not host:
            raise ValueError(f"--url {url} is no address; write http://127.0.0.1:8000.")
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        limits = httpx2.Limits(max_keepalive_connections=0)
        self._http = httpx2.Client(
            headers=headers, timeout=SECONDS, limits=limits, trust_env=False, base_url=self.address
        )

    def get(self, path: str) -> dict[str, Any]:
        with self._ask("GET", path) as answer:
            return self._read(path, answer.read())

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        with self._ask("POST", path, body) as answer:
            return self._read(path, answer.read())

    def stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any]]:
        """The records of server-sent events. Close the generator to stop the answer."""
        with self._ask("POST", path, {**body, "stream": True}) as answer:
            rest = b""
            for part in answer.iter_bytes():
                *lines, rest = (rest + part).split(b"\n")
                for line in filter(None, lines):
                    if (data := line.removeprefix(b"data: ")) == b"[DONE]":
                        return
                    record = self._read(path, data)
                    if "error" in record:
                        raise ValueError(record["error"]["message"])
                    yield record
        raise OSError(f"{self.address} has stopped answering.")

    @contextmanager
    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None
    ) -> Iterator[httpx2.Response]:
        try:
            with self._http.stream(method, path, json=body) as answer:
                if answer.status_code >= 300:
                    raise ValueError(self._refusal(answer))
                yield answer
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise OSError(f"{self.address} cannot be reached ({error}).") from None
        except httpx2.HTTPError as error:
            raise OSError(f"{self.address} has stopped answering ({error}).") from None

    def _read(self, path: str, data: bytes) -> dict[str, Any]:
        with suppress(ValueError):
            if isinstance(record := json.loads(data), dict):
                return record
        raise ValueError(f"{self.address}{path} does not answer in JSON; is it causal-qwen serve?")

    def _refusal(self, answer: httpx2.Response) -> str:
        if answer.status_code == 401:
            return (
                f"The API key is missing or wrong; give that of {self.address} with --api-key or "
                "CAUSAL_QWEN_API_KEY."
            )
        with suppress(ValueError, LookupError, TypeError):
            return str(json.loads(answer.read())["error"]["message"])
        return f"{self.address} answers {answer.status_code} {answer.reason_phrase}."
