"""Hostile calls of the playground's API: a function of a seed."""

from __future__ import annotations

import json
import math
import random
from collections import Counter
from typing import Any

from _playground import API, call, endpoints
from starlette.testclient import TestClient

GOOD = ["run", ["a king", 1, 1, 1, 1, 1, 0]]
TEXTS = (
    "",
    " \n\t",
    "a king has 7 horses",
    "Ada",
    "a word",
    "a number",
    "the prompt",
    "7",
    "-1e999",
    "NaN",
    "\0",
    "\ud800",
    "\u202e\ufeff\U0001f468\u200d\U0001f469",
    "e\u0301" * 50,
    "<script>alert(1)</script>",
    "{{7*7}}%s%n{0}",
    "../../../../etc/passwd",
    "~",
    "/dev/null",
    "no/such/model",
    "'; DROP TABLE x; --",
    "1" * 400,
    "(" * 900,
    "国王有一个女儿" * 140,
    "x" * 1001,
    "9" * 500_000,
    "a\n" * 100_000,
)
NUMBERS = (0, 1, -1, 2, 3, 80, 81, 2**63, -(2**70), 0.5, 1e308, -1e-320, 10**400)
RAW = (
    b"",
    b"null",
    b"[]",
    b"{",
    b'{"data": 1}',
    b"[" * 50_000,
    b"\xff\xfe",
    b'{"data": [NaN], "fn_index": 0}',
    b'{"data": [], "fn_index": -1, "session_hash": "a"}',
    b'{"data": [], "fn_index": 1e9, "session_hash": "a"}',
    b'{"data": [], "fn_index": "0", "session_hash": {}}',
    b'{"data": [], "fn_index": 10000, "session_hash": "a"}',
)
PATHS = ("queue/join", "run/run", "call/run", "api/run", "upload", "cancel", "reset", "run/none")


def attack(client: TestClient, seed: int, calls: int, skip: tuple[str, ...] = ()) -> Counter[str]:
    """Make hostile calls, check every answer, and check that the server still answers.

    -> the number of calls by outcome
    """
    draw = random.Random(seed)
    found = sorted((name, len(one)) for name, one in sizes(client).items() if name not in skip)
    outcomes: Counter[str] = Counter()
    for _ in range(calls):
        if draw.random() < 0.2:
            outcomes[send_raw(client, draw)] += 1
        else:
            name, size = draw.choice(found)
            outcomes[send_call(client, name, size, draw)] += 1
        assert client.get(f"{API}/startup-events").status_code == 200, f"dead after seed {seed}"
    done = call(client, *GOOD)  # type: ignore[arg-type]
    assert done["success"], f"a good call fails after seed {seed}: {done}"
    assert not done["log"]
    return outcomes


def sizes(client: TestClient) -> dict[str, list[int]]:
    """The named endpoints and their inputs, hidden ones included."""
    named = endpoints(client)
    functions = client.get("/config").json()["dependencies"]
    return {one["api_name"]: one["inputs"] for one in functions if one["api_name"] in named}


def send_call(client: TestClient, name: str, size: int, draw: random.Random) -> str:
    count = size + draw.choice((0,) * 27 + (-1, 1, 50))
    data = [draw_value(draw) for _ in range(max(count, 0))]
    done = call(client, name, data)
    check_text(json.dumps(done), name, data)
    assert done["msg"] in ("process_completed", "refused"), (name, data, done)
    if done["msg"] == "refused":
        assert 400 <= done["status"] < 500, (name, str(data)[:300], done)
        return "refused"
    if not done["success"]:
        assert done["output"]["error"], (name, str(data)[:300], done)
        return "error"
    return "warning" if done["log"] else "answer"


def send_raw(client: TestClient, draw: random.Random) -> str:
    path, content = draw.choice(PATHS), draw.choice(RAW)
    kind = draw.choice(("application/json", "multipart/form-data; boundary=x", "text/plain", ""))
    answer = client.post(f"{API}/{path}", content=content, headers={"Content-Type": kind})
    check_text(answer.text, path, content)
    return f"status {answer.status_code // 100}xx"


def check_text(text: str, *asked: Any) -> None:
    assert "Traceback (most recent call last)" not in text, str(asked)[:300]
    assert "site-packages" not in text, str(asked)[:300]


def draw_value(draw: random.Random, depth: int = 0) -> Any:
    """Any JSON value; often a plausible one, so that calls go deep."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return draw.choice((None, True, False))
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return draw.choice((1, 2, 3, 0.5))
    if kind == 3:
        return draw.choice(TEXTS)
    if kind == 4:
        ends = (127, 0x3000, 0x110000)
        return "".join(chr(draw.randrange(draw.choice(ends))) for _ in range(20))
    if kind == 5:
        return [draw_value(draw, depth + 1) for _ in range(draw.choice((0, 1, 5, 5, 60)))]
    if kind == 6:
        return [draw.choice(("Ada", "Bo", "Chen"))] * draw.choice((1, 2, 2000))
    path = draw.choice(("/etc/passwd", "http://127.0.0.1:1/x", "", None, 7))
    file = {"path": path, "meta": {"_type": "gradio.FileData"}, "size": math.pi}
    return draw.choice(({}, {"__type__": "update"}, file, {str(k): k for k in range(30)}))
