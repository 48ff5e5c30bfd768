"""Hostile requests to the server: a function of a seed.

Every route of its OpenAPI description is attacked, with the fields that it names there.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

from starlette.testclient import TestClient

TEXTS = (
    "",
    " \n\t",
    "a king has 7 horses",
    "-1e999",
    "NaN",
    "\0",
    "\ud800",
    "\u202e\ufeff\U0001f468\u200d\U0001f469",
    "<script>alert(1)</script>",
    "{{7*7}}%s%n{0}",
    "../../../../etc/passwd",
    "国王有一个女儿" * 140,
    "9" * 500_000,
)
NUMBERS = (0, 1, -1, 81, 2**63, -(2**70), 0.5, 1e308, -1e-320, 10**400)
SECONDS = 120  # after which an answer counts as never given
LONGEST = 1000  # characters of an error's sentence
GOOD = {"prompt": "a king", "max_tokens": 4, "individual": 7}
BODIES: dict[str, dict[str, Any]] = {  # valid ones, to be damaged
    "/v1/completions": {"prompt": "a king has 7 horses", "max_tokens": 2},
    "/v1/shares": {"prompt": "a", "individuals": 3},
    "/v1/panel": {"question": "a", "options": ["b", "c"], "individuals": ["ada", 2]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/counterfactuals": {
        "prompt": "a king has 7 horses",
        "individual": 3,
        "max_tokens": 2,
        "edit": {"token": 2, "by": " queen"},
    },
    "/v1/tokens": {"input": "a king has 7 horses", "index": 3},
    "/v1/numbers": {"input": [{"size": 4.0}, {"size": 1}], "regressor": "price", "levels": [0.5]},
}
MODES = ("standard", "sampling", "causal", "compatible")
PLAUSIBLE: dict[str, tuple[Any, ...]] = {  # so that requests go deep, and contradict themselves
    "causal_mode": MODES,
    "individual": (0, 7, "7", "Ada", "", 2**64),
    "stop": ("a", [], ["a", "b"], ["\ud800"]),
    "stream": (True, False),
    "stream_options": ({"include_usage": True}, {"include_usage": "x"}, {}),
    "messages": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}]}],
        [{"role": "assistant", "content": None}],
        [{"role": ["user"], "content": "a"}],
        [{"role": "user", "content": [{"type": {}, "text": "a"}]}],
    ),
    "edit": (
        {"token": 0, "by": 10**400},
        {"token": -1, "by": 7},
        {"token": 0, "by": 2**70},
        {"token": 10**9, "by": 1},
        {"token": 0, "by": "\ud800"},
        {"prompt": "another"},
        {"messages": []},
        {"prompt": "a", "by": "b"},
    ),
    "semantics": ("pearl", "disco"),
    "levels": ([0.5], [0.5, 0.999999999], [1e-320], [True], [float("nan")], [0.5] * 30),
    "quantiles": ([0.5], [1e-320, 1 - 1e-16], ["x"]),
    "input": ("a", [], [{}], [{"size": 10**400}], [{"other": 1}], [{"size": [1]}], ["a", {}]),
    "name": ("Ada", "..", "a/b", "\ud800", "x" * 65, "7", "", " "),
    "model": ("tiny", "other", "\ud800"),
    "normalization": ("softmax", "ovr"),
    "logprobs": (True, False, 3),
    "top_logprobs": (0, 5, 21),
    "logit_bias": ({}, {"5": 10**400}),
}
RAW = (
    b"",
    b"null",
    b"[]",
    b"{",
    b"\xff\xfe{\0}\0",
    b"\xef\xbb\xbf{}",
    b"[" * 50_000,
    b'{"prompt":' * 2_000 + b"1" + b"}" * 2_000,
    b'{"prompt": "a", "max_tokens": ' + b"9" * 5_000 + b"}",
    b'{"prompt": "a", "max_tokens": 1e999}',
    b'{"prompt": "a", "temperature": NaN}',
    b'{"prompt": "a", "prompt": 7}',
    b"\xff" * 2_000,
    b"x" * 1_000_001,
)
HEADERS: tuple[dict[str, str], ...] = (
    {},
    {"Content-Type": "text/plain"},
    {"Content-Type": "application/json; charset=utf-7"},
    {"Content-Type": "multipart/form-data; boundary=x"},
    {"Content-Encoding": "gzip"},
    {"Authorization": "Bearer \xff"},
    {"Range": "bytes=0-0"},
    {"Expect": "100-continue"},
)


class Attack:
    """Hostile requests from one seed; every answer is checked."""

    def __init__(self, client: TestClient, seed: int) -> None:
        self.client, self.draw = client, random.Random(seed)
        self.threads = ThreadPoolExecutor(1)
        self.paths = self._paths()

    def _paths(self) -> list[tuple[str, str, list[str]]]:
        """(method, path, fields) of every route."""
        found = []
        openapi = self.client.get("/openapi.json").json()
        for path, methods in openapi["paths"].items():
            for method, about in methods.items():
                content = about.get("requestBody", {}).get("content", {})
                ref = content.get("application/json", {}).get("schema", {}).get("$ref", "")
                schema = openapi["components"]["schemas"].get(ref.rpartition("/")[2], {})
                found.append((method.upper(), path, sorted(schema.get("properties", {}))))
        return sorted(found)

    def run(self, calls: int) -> Counter[int]:
        """-> the number of answers by status"""
        try:
            before = self._good()
            counts = Counter(self._once() for _ in range(calls))
            assert self._good() == before, "another answer after the attack"
            return counts
        finally:
            self.threads.shutdown(wait=False, cancel_futures=True)

    def _good(self) -> str:
        assert self.client.get("/health").json() == {"status": "ok"}
        answer = self._send("POST", "/v1/completions", json.dumps(GOOD).encode(), {})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"])

    def _once(self) -> int:
        draw = self.draw
        method, path, fields = draw.choice(self.paths)
        if fields and draw.random() < 0.8:
            body: Any = self.body(BODIES[path], fields)
            content = json.dumps(body).encode()
        else:
            content = draw.choice(RAW)
        if draw.random() < 0.05:
            method = draw.choice(("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD"))
        while "{" in path:
            name = str(draw.choice((*PLAUSIBLE["name"], *TEXTS)))[:300]
            path = path[: path.index("{")] + quote(name.encode("utf-8", "surrogatepass"))
        path += draw.choice(("",) * 18 + ("/", "?stream=true&x=%ff"))
        answer = self._send(method, path, content, draw.choice(HEADERS))
        check_answer(answer, f"{method} {path} {content[:400]!r}")
        return answer.status_code

    def body(self, good: dict[str, Any], fields: list[str]) -> Any:
        """A valid body with some fields replaced, added, dropped or nested."""
        draw, body = self.draw, dict(good)
        for _ in range(draw.choice((1, 1, 2, 3, 6))):
            field = draw.choice((*fields, *PLAUSIBLE, "unknown", "\ud800", "x" * 500, ""))
            if field not in fields and draw.random() < 0.7:
                field = draw.choice(fields)
            kind = draw.randrange(10)
            if kind == 0:
                body.pop(draw.choice([*good]), None)
            elif kind < 6 and field in PLAUSIBLE:
                body[field] = draw.choice(PLAUSIBLE[field])
            else:
                body[field] = self.value()
        return draw.choice((body,) * 30 + ([body], {"body": body}))

    def value(self, depth: int = 0) -> Any:
        """Any JSON value, NaN and half characters included."""
        draw = self.draw
        match draw.randrange(7 if depth < 3 else 4):
            case 0:
                return draw.choice((None, True, False, float("nan"), float("inf"), -0.0))
            case 1:
                return draw.choice(NUMBERS)
            case 2:
                return draw.choice((0, 1, 2, 3, 0.1, 0.5, 1.0))
            case 3:
                return draw.choice(TEXTS)
            case 4:
                return [self.value(depth + 1) for _ in range(draw.choice((0, 1, 3, 60)))]
            case 5:
                return {draw.choice(("role", "x", "")): self.value(depth + 1) for _ in range(3)}
            case _:
                nested: Any = 7
                for _ in range(draw.choice((10, 90, 500))):
                    nested = [nested] if draw.random() < 0.5 else {"x": nested}
                return nested

    def _send(self, method: str, path: str, content: bytes, headers: dict[str, str]) -> Any:
        raw = [(key.encode(), value.encode("latin-1")) for key, value in headers.items()]
        sent = self.threads.submit(
            self.client.request, method, path, content=content, headers=raw, follow_redirects=False
        )
        return sent.result(timeout=SECONDS)


def check_answer(answer: Any, what: str) -> None:
    """A valid answer, or a refusal of one sentence in JSON; never an error of the server."""
    assert answer.status_code < 500, f"{what}: {answer.status_code} {answer.text[:500]}"
    check_text(answer.text, what)
    if answer.request.method == "HEAD" or 300 <= answer.status_code < 400:
        return
    kind = answer.headers["content-type"].split(";")[0]
    if answer.status_code >= 400:
        check_error(json.loads(answer.text), what)
    elif kind == "application/json":
        json.loads(answer.text, parse_constant=_refuse)
    elif kind == "text/event-stream":
        *events, last = answer.text.removesuffix("\n\n").split("\n\n")
        for event in events:
            found = json.loads(event.removeprefix("data: "), parse_constant=_refuse)
            assert "error" not in found, f"{what}: {found}"
        if last != "data: [DONE]":
            check_error(json.loads(last.removeprefix("data: ")), what)
    else:
        assert kind in ("text/plain", "text/html"), f"{what}: {kind}"


def check_error(found: Any, what: str) -> None:
    error = found["error"]
    assert error["type"] in ("invalid_request_error", "authentication_error"), f"{what}: {error}"
    message = error["message"]
    assert message.strip(), what
    assert "\n" not in message, f"{what}: {message}"
    assert len(message) <= LONGEST, f"{what}: {message}"


def check_text(text: str, *asked: Any) -> None:
    assert "Traceback (most recent call last)" not in text, str(asked)[:300]
    assert "site-packages" not in text, str(asked)[:300]


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")
