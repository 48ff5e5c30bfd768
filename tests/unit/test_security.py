"""The playground as another site, another machine and a hostile visitor find it: 401, 403, 413."""

from __future__ import annotations

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

from causal_qwen.app import server
from causal_qwen.app.served import ServedModel
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.serving.client import Client
from causal_qwen.serving.security import guard
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
    service = Service(TorchEngine(tiny, processor), "tiny")
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


def test_no_answer_may_be_framed(client: TestClient) -> None:
    for path, headers in (("/", {}), ("/no/such/path", {}), ("/", {"Origin": "null"})):
        answer = client.get(path, headers=headers)
        assert answer.headers["content-security-policy"] == "frame-ancestors 'none'"
        assert answer.headers["x-frame-options"] == "DENY"
        assert answer.headers["x-content-type-options"] == "nosniff"


# ---------------------------------------------------------------- key and password


def test_a_part_of_the_key_admits_nobody() -> None:
    app = guard(PlainTextResponse(""), "0.0.0.0", 10, key="secret-key")
    one = TestClient(app, base_url="http://192.0.2.7")
    for given in ("", "s", "secret", "secret-ke", "secret-key-and-more", "\xe9"):
        headers = {"Authorization": f"Bearer {given}".encode("latin-1")}
        assert one.get("/", headers=headers).status_code == 401, given
    assert one.get("/", headers={"Authorization": "Basic secret-key"}).status_code == 401
    assert one.get("/", headers={"Authorization": "Bearer secret-key"}).status_code == 200


def test_the_page_of_a_protected_server_needs_the_login(client: TestClient, files: Path) -> None:
    with serve_page(client.model, files, ("ada", "secret")) as page:  # type: ignore[attr-defined]
        protected = ("/config", f"{API}/info", f"{API}/queue/data?session_hash=a")
        for path in protected:
            assert page.get(path).status_code == 401, path
        assert page.post(JOIN, json={}).status_code == 401
        assert upload(page, b"a").status_code == 401
        for user, password in (("ada", "secre"), ("bob", "secret"), ("ada", "")):
            login = page.post("/login", data={"username": user, "password": password})
            assert login.status_code >= 400
        assert page.post("/login", data={"username": "ada", "password": "secret"}).is_success
        assert page.get(f"{API}/info").status_code == 200


@pytest.mark.parametrize("auth", [None, "ada:secret"])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_server_for_other_machines_prints_a_warning_and_its_password(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    auth: str | None,
) -> None:
    accounts: list[Any] = []

    def make_app(page: Any, host: str, account: Any) -> Any:
        accounts.append(account)
        return PlainTextResponse("")

    fake = SimpleNamespace(client=Client("http://127.0.0.1:8000"))
    monkeypatch.setattr("causal_qwen.app.served.ServedModel.open", lambda *_: fake)
    monkeypatch.setattr("causal_qwen.app.page.build", lambda *_: None)
    monkeypatch.setattr(server, "make_app", make_app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: None)
    for name in ("GRADIO_ANALYTICS_ENABLED", "HF_HUB_DISABLE_TELEMETRY", "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "")
    server.launch(host=host, port=0, open_browser=False, auth=auth, url="http://there")
    printed = "".join(capsys.readouterr())
    [account] = accounts
    assert ("Warning: the playground listens on 0.0.0.0" in printed) == (host == "0.0.0.0")
    if auth is not None:
        assert account == ("ada", "secret")
        assert "secret" not in printed
    elif host == "127.0.0.1":
        assert account is None
    else:
        assert len(account[1]) > 30
        assert account[1] in printed
    with pytest.raises(ValueError, match="--auth ada:secret"):
        server.launch(host=host, port=0, open_browser=False, auth="ada:", url="http://there")


# ---------------------------------------------------------------- uploads


def upload(client: TestClient, content: bytes, name: str = "a.safetensors") -> Any:
    return client.post(f"{API}/upload", files={"files": (name, content)})


def test_a_long_request_is_refused_before_it_is_read(client: TestClient) -> None:
    most = server.MAX_REQUEST_BYTES
    assert upload(client, b"a" * (most // 2)).status_code == 200
    assert upload(client, b"a" * most).status_code == 413
    without_length = client.post(JOIN, content=(b"a" * 10_000 for _ in range(20)))
    assert without_length.status_code == 413
    for length in ("-1", "1e9", "9" * 100):
        headers = {"Content-Length": length}
        assert client.post(JOIN, content=b"a", headers=headers).status_code == 413


def test_files_outside_the_page_are_not_served(client: TestClient, tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("secret", encoding="utf-8")
    for path in (tmp_path / "secret.txt", Path(__file__), Path("/etc/passwd")):
        assert client.get(f"{API}/file={path}").status_code == 403
