"""The playground as another site, another machine and a hostile visitor find it: 401, 403, 413."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from _playground import API, serve_page
from _server import KEY, running
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from causal_qwen.engines.torch import TorchEngine
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.playground import server
from causal_qwen.playground.served import ServedModel
from causal_qwen.serving import security
from causal_qwen.serving.client import Client
from causal_qwen.serving.security import Login, guard
from causal_qwen.serving.service import Service

pytestmark = [  # of Gradio's statistics
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting'"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]
JOIN = f"{API}/queue/join"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def client(
    make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any], files: Path
) -> Iterator[TestClient]:
    """A browser on the machine of the page, whose model is served in this process."""
    processor = CausalQwenProcessor(byte_tokenizer())
    tiny = make_model(
        vocab_size=300, num_token_id=processor.num_token_id, max_position_embeddings=256
    )
    service = Service(TorchEngine(tiny, processor), "tiny", files)
    with (
        closing(service),
        running(service) as address,
        serve_page(model := ServedModel.open(address, KEY), files) as one,
    ):
        one.model = model  # type: ignore[attr-defined]
        yield one


# ---------------------------------------------------------------- Host and Origin

GOOD_HOSTS = ["127.0.0.1:7860", "127.0.0.1:9000", "localhost", "LocalHost:7860", "[::1]:7860"]
BAD_HOSTS = [
    "evil.example:7860",
    "127.0.0.1.evil.example",
    "evil-localhost",
    "localhost@evil.example",
    "localhost, evil.example",
    "[::1",
    "192.168.1.5:7860",
    "2130706433",
    "",
    "*",
]


def test_names_of_this_machine_are_answered_and_others_as_dns_rebinding_sends_them_refused(
    client: TestClient,
) -> None:
    for host in GOOD_HOSTS:
        assert client.get("/config", headers={"Host": host}).status_code == 200, host
    for host in BAD_HOSTS:
        assert client.get("/config", headers={"Host": host}).status_code == 400, host


ENDPOINTS = [
    ("GET", "/"),
    ("GET", "/config"),
    ("POST", JOIN),
    ("GET", f"{API}/queue/data?session_hash=a"),  # server-sent events
    ("POST", f"{API}/run/run"),
    ("POST", f"{API}/upload"),
    ("GET", "/no/such/path"),
    ("OPTIONS", JOIN),
]


def test_no_endpoint_answers_to_a_foreign_name_or_site(client: TestClient) -> None:
    foreign: list[dict[str, str]] = [
        {"Host": "evil.example:7860"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ]
    for (method, path), headers in itertools.product(ENDPOINTS, foreign):
        asked = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
        answer = client.request(method, path, headers={**asked, **headers})
        assert answer.status_code in (400, 403), (method, path, headers)
        assert "access-control-allow-origin" not in answer.headers


ORIGINS = [
    ("127.0.0.1:7860", "http://127.0.0.1:7860", True),
    ("localhost:7860", "http://LOCALHOST:7860", True),
    ("[::1]:7860", "http://[::1]:7860", True),
    ("localhost", "https://localhost", True),  # behind a proxy
    ("127.0.0.1:7860", "http://localhost:7860", False),
    ("127.0.0.1:7860", "http://127.0.0.1:3000", False),  # another server of this machine
    ("127.0.0.1:7860", "http://127.0.0.1:7860@evil.example", False),
    ("127.0.0.1:7860", "http://[", False),
    ("127.0.0.1:7860", "", False),
]


def test_a_write_comes_from_the_page_itself(client: TestClient) -> None:
    for host, origin, is_welcome in ORIGINS:
        headers = {"Host": host, "Origin": origin}
        answer = client.post(f"{API}/reset", json={"event_id": "a"}, headers=headers)
        assert answer.status_code == (200 if is_welcome else 403), (host, origin)


def test_a_link_on_another_site_opens_the_page(client: TestClient) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200


# ---------------------------------------------------------------- frames


@pytest.mark.parametrize("path", ["/", "/config", "/no/such/path", f"{API}/info"])
def test_no_answer_may_be_framed(client: TestClient, path: str) -> None:
    for headers in ({}, {"Host": "evil.example"}):
        answer = client.get(path, headers=headers)
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"


# ---------------------------------------------------------------- password and token


def basic(user: str, password: str) -> dict[str, str]:
    pair = base64.b64encode(f"{user}:{password}".encode()).decode()
    return {"Authorization": f"Basic {pair}"}


def guarded(login: Login) -> TestClient:
    return TestClient(guard(_empty_app, "0.0.0.0", 10, login), base_url="http://192.0.2.7")


def test_a_password_admits_its_user_only() -> None:
    one = guarded(Login.parse("ada:se:cret"))
    assert one.get("/", headers=basic("ada", "se:cret")).status_code == 200
    for headers in (
        {},
        basic("ada", "se"),
        basic("bob", "se:cret"),
        basic("", "se:cret"),
        {"Authorization": "Bearer se:cret"},
        {"Authorization": "Basic"},
        {"Authorization": b"Basic \xe9"},
        {"Cookie": f"{security.COOKIE}=se:cret"},
    ):
        answer = one.get("/?token=se:cret", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"].startswith("Basic ")
    for text in ("ada", "ada:", ":secret"):
        with pytest.raises(ValueError, match="--auth ada:secret"):
            Login.parse(text)


def test_a_part_of_the_token_admits_nobody() -> None:
    one = guarded(Login("secret-token"))
    for given in ("", "s", "secret", "secret-toke", "secret-token-and-more", "token"):
        for headers in ({"Authorization": f"Bearer {given}"}, basic("anyone", given)):
            assert one.get("/", headers=headers).status_code == 401, headers
        assert one.get(f"/?token={given}").status_code == 401, given
        cookie = {"Cookie": f"{security.COOKIE}={given}"}
        assert one.get("/", headers=cookie).status_code == 401, given
    assert one.get("/", headers={"Authorization": "Bearer secret-token"}).status_code == 200


def test_a_token_is_exchanged_for_a_cookie() -> None:
    login = Login.for_host("0.0.0.0", None)
    assert login is not None
    assert len(login.password) == 32
    assert login != Login.for_host("0.0.0.0", None)
    assert Login.for_host("localhost", None) is None
    one = guarded(login)
    first = one.get(f"/path?token={login.password}&theme=dark", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/path?theme=dark")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert one.get("/").status_code == 200
    elsewhere = guarded(login).get(
        f"//evil.example/?token={login.password}", follow_redirects=False
    )
    assert not elsewhere.headers["location"].startswith("//")


def test_the_page_of_a_protected_server_needs_the_login(client: TestClient, files: Path) -> None:
    with serve_page(client.model, files, Login("secret", "ada")) as protected:  # type: ignore[attr-defined]
        for path in ("/", "/config", f"{API}/info", "/theme.css"):
            assert protected.get(path).status_code == 401
            assert protected.get(path, headers=basic("ada", "secret")).status_code == 200
        assert protected.post(JOIN, json={}).status_code == 401


@pytest.mark.parametrize(
    ("host", "auth", "parts"),
    [
        ("127.0.0.1", None, ["http://127.0.0.1:"]),
        ("0.0.0.0", None, ["/?token=", "Warning: the playground listens on 0.0.0.0", "the token"]),
        ("0.0.0.0", "ada:secret", ["Warning: the playground listens on 0.0.0.0", "a password"]),
    ],
)
def test_a_server_for_other_machines_prints_a_warning_and_its_token(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    auth: str | None,
    parts: list[str],
) -> None:
    logins: list[Login | None] = []

    def make_app(page: Any, host: str, login: Login | None, client: Any) -> Any:
        logins.append(login)
        return _empty_app

    fake = SimpleNamespace(client=Client("http://127.0.0.1:8000"))
    monkeypatch.setattr("causal_qwen.playground.served.ServedModel.open", lambda *_: fake)
    monkeypatch.setattr("causal_qwen.playground.page.build", lambda *_: None)
    monkeypatch.setattr(server, "make_app", make_app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    for name in ("GRADIO_ANALYTICS_ENABLED", "HF_HUB_DISABLE_TELEMETRY", "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "")
    server.launch(host=host, port=0, open_browser=False, auth=auth, url="http://there")
    printed = "".join(capsys.readouterr())
    for part in parts:
        assert part in printed
    [login] = logins
    if host == "127.0.0.1":
        assert "Warning" not in printed
        assert login is None
    else:
        assert login is not None
        assert login.is_token == (auth is None)
        assert (login.password in printed) == (auth is None)


# ---------------------------------------------------------------- uploads


def upload(client: TestClient, content: bytes, name: str = "a.safetensors") -> Any:
    return client.post(f"{API}/upload", files={"files": (name, content)})


def test_a_long_request_is_refused_before_it_is_read(client: TestClient) -> None:
    most = server.MAX_REQUEST_BYTES
    assert upload(client, b"a" * server.MAX_FILE_BYTES).status_code == 200
    assert upload(client, b"a" * most).status_code == 413
    many = [("files", (f"{n}.safetensors", b"a" * 600_000)) for n in range(2)]
    assert client.post(f"{API}/upload", files=many).status_code == 413
    without_length = client.post(JOIN, content=(b"a" * 100_000 for _ in range(20)))
    assert without_length.status_code == 413
    for length in ("-1", "1e9", "9" * 100):
        headers = {"Content-Length": length}
        assert client.post(JOIN, content=b"a", headers=headers).status_code == 413


def test_files_outside_the_page_are_not_served(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    for path in (tmp_path / "secret.txt", Path(__file__), Path("/etc/passwd")):
        assert client.get(f"{API}/file={path}").status_code == 403


async def _empty_app(scope: Any, receive: Any, send: Any) -> None:
    await PlainTextResponse("")(scope, receive, send)
