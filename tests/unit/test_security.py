"""The playground as another site, another machine and a hostile visitor find it: 401, 403, 413."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _damage_api import attack
from _fuzz import seeds
from _playground import API, call, serve
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect

from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.playground import server, text_edits, uploads
from causal_qwen.playground.individuals import MAX_INDIVIDUALS
from causal_qwen.serving import security
from causal_qwen.serving.security import BoundNames, Guard, Login, parse_authority
from causal_qwen.text import edits

pytestmark = [  # of Gradio's statistics
    pytest.mark.filterwarnings("ignore:'future.no_silent_downcasting'"),
    pytest.mark.filterwarnings("ignore:The copy keyword is deprecated"),
]
SOCKET = "ws://127.0.0.1:7860/"
FITS = ("on_open",)  # fits the iris regressor
JOIN = f"{API}/queue/join"
TEXT = "a king has 7 horses"


@pytest.fixture(scope="module")
def loaded(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> tuple[Any, Any]:
    processor = CausalQwenProcessor(byte_tokenizer())
    return processor, make_model(
        vocab_size=300, num_token_id=processor.num_token_id, max_position_embeddings=256
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="module")
def client(loaded: Any, files: Path) -> Iterator[TestClient]:
    """A browser on the machine of the server."""
    with serve(*loaded, files) as one:
        yield one


# ---------------------------------------------------------------- Host


GOOD_HOSTS = [
    "127.0.0.1:7860",
    "127.0.0.1",
    "127.0.0.1:9000",  # the other end of an ssh tunnel
    "127.0.0.2",
    "localhost:7860",
    "LocalHost:7860",
    "localhost.:7860",
    "[::1]:7860",
    "[::1]",
    "[0:0:0:0:0:0:0:1]:7860",
]
BAD_HOSTS = [
    "evil.example",
    "evil.example:7860",
    "127.0.0.1.evil.example",
    "127.0.0.1.evil.example:7860",
    "localhost.evil.example",
    "evil-localhost",
    "sub.localhost",
    "localhost..",
    "localhost:7860.evil.example",
    "localhost:port",
    "localhost:",
    "localhost:123456",
    "evil.example@localhost",
    "localhost@evil.example",
    "localhost, evil.example",
    "localhost/",
    "[::1",
    "::1",
    "[localhost]",
    "[127.0.0.1]",
    "[::2]",
    "0.0.0.0:7860",
    "192.168.1.5:7860",
    "10.0.0.1",
    "0x7f000001",
    "2130706433",
    "",
    " ",
    ".",
    "*",
]


@pytest.mark.parametrize("host", GOOD_HOSTS)
def test_loopback_names_are_answered(client: TestClient, host: str) -> None:
    assert client.get("/config", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", BAD_HOSTS)
def test_other_names_are_refused_as_dns_rebinding_sends_them(client: TestClient, host: str) -> None:
    answer = client.get("/", headers={"Host": host})
    assert answer.status_code == 403
    assert answer.text.startswith("This server answers to 127.0.0.1, [::1], localhost only")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/"),
        ("HEAD", "/"),
        ("GET", "/config"),
        ("GET", f"{API}/info"),
        ("POST", JOIN),
        ("GET", f"{API}/queue/data?session_hash=a"),  # server-sent events
        ("POST", f"{API}/run/run"),
        ("POST", f"{API}/call/run"),
        ("POST", f"{API}/upload"),
        ("GET", f"{API}/upload_progress?upload_id=a"),
        ("POST", f"{API}/cancel"),
        ("GET", f"{API}/heartbeat/a"),
        ("GET", f"{API}/startup-events"),
        ("GET", "/static/img/logo.svg"),
        ("GET", "/no/such/path"),
        ("OPTIONS", JOIN),
    ],
)
def test_no_endpoint_answers_to_a_foreign_name_or_site(
    client: TestClient, method: str, path: str
) -> None:
    asked = {"Access-Control-Request-Method": "POST"} if method == "OPTIONS" else {}
    foreign: list[dict[str, str]] = [
        {"Host": "evil.example:7860"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    ]
    for headers in foreign:
        answer = client.request(method, path, headers={**asked, **headers})
        assert answer.status_code == 403, headers
        assert "access-control-allow-origin" not in answer.headers


def test_a_missing_or_a_second_host_is_refused() -> None:
    guard = Guard(_empty_app, BoundNames("127.0.0.1", "127.0.0.1"), 10)
    for pairs in ([], [(b"host", b"localhost"), (b"host", b"localhost")]):
        assert guard.check_host(security.Headers(raw=pairs)) is not None
    assert guard.check_host(security.Headers(raw=[(b"host", b"localhost")])) is None


@pytest.mark.parametrize(
    ("host", "address", "good", "bad"),
    [
        ("::1", "::1", ["[::1]:1", "localhost", "127.0.0.1"], ["evil.example", "[::2]"]),
        ("localhost", "127.0.0.1", ["localhost", "127.0.0.1", "[::1]"], ["evil.example"]),
        ("192.0.2.7", "192.0.2.7", ["192.0.2.7:80"], ["localhost", "127.0.0.1", "192.0.2.8"]),
        ("Box.lan", "192.0.2.7", ["box.lan", "BOX.LAN.:1", "192.0.2.7"], ["box", "evil.box.lan"]),
        ("0.0.0.0", "0.0.0.0", ["192.0.2.8", "localhost", "[::1]", "ada", "ada.local"], ["evil"]),
        ("::", "::", ["192.0.2.8", "[2001:db8::1]:80", "localhost", "ADA"], ["ada.evil.example"]),
    ],
)
def test_a_server_answers_to_the_names_it_is_bound_to(
    monkeypatch: pytest.MonkeyPatch, host: str, address: str, good: list[str], bad: list[str]
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "Ada")
    guard = Guard(_empty_app, BoundNames(host, address), 10)
    for name in good:
        assert guard.check_host(security.Headers({"host": name})) is None, name
    for name in bad:
        assert guard.check_host(security.Headers({"host": name})) is not None, name


def test_a_host_is_a_name_and_a_port() -> None:
    assert parse_authority("LOCALHOST.:80") == ("localhost", 80)
    assert parse_authority("[::1]") == ("::1", None)
    assert parse_authority("a b") is None


# ---------------------------------------------------------------- Origin


@pytest.mark.parametrize(
    ("host", "origin", "is_welcome"),
    [
        ("127.0.0.1:7860", "http://127.0.0.1:7860", True),
        ("localhost:7860", "http://LOCALHOST:7860", True),
        ("[::1]:7860", "http://[::1]:7860", True),
        ("localhost", "http://localhost", True),
        ("localhost:80", "http://localhost", True),
        ("localhost", "https://localhost", True),  # behind a proxy
        ("127.0.0.1:7860", "http://localhost:7860", False),
        ("127.0.0.1:7860", "http://127.0.0.1:3000", False),  # another server of this machine
        ("127.0.0.1:7860", "http://127.0.0.1", False),
        ("127.0.0.1:7860", "http://127.0.0.1:7860.evil.example", False),
        ("127.0.0.1:7860", "http://127.0.0.1:7860@evil.example", False),
        ("127.0.0.1:7860", "http://evil.example", False),
        ("127.0.0.1:7860", "file://", False),
        ("127.0.0.1:7860", "null", False),
        ("127.0.0.1:7860", "", False),
    ],
)
def test_a_write_comes_from_the_page_itself(
    client: TestClient, host: str, origin: str, is_welcome: bool
) -> None:
    headers = {"Host": host, "Origin": origin}
    answer = client.post(f"{API}/reset", json={"event_id": "a"}, headers=headers)
    assert answer.status_code == (200 if is_welcome else 403)


def test_a_link_on_another_site_opens_the_page(client: TestClient) -> None:
    headers = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"}
    assert client.get("/", headers=headers).status_code == 200
    assert client.get("/config", headers={"Sec-Fetch-Site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Origin": "http://evil.example"}], ids=["Host", "Origin"]
)
def test_a_foreign_websocket_is_refused(headers: dict[str, str]) -> None:
    names = BoundNames("127.0.0.1", "127.0.0.1")
    one = TestClient(Guard(_echo_app, names, 10))
    with one.websocket_connect(SOCKET, headers={"Origin": "http://127.0.0.1:7860"}) as socket:
        assert socket.receive_text() == "hello"
    with pytest.raises(WebSocketDisconnect), one.websocket_connect(SOCKET, headers=headers):
        pass


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
    names = BoundNames("0.0.0.0", "0.0.0.0")
    return TestClient(Guard(_empty_app, names, 10, login), base_url="http://192.0.2.7")


def test_a_password_admits_its_user_only() -> None:
    one = guarded(Login.parse("ada:se:cret"))
    assert one.get("/", headers=basic("ada", "se:cret")).status_code == 200
    for headers in (
        {},
        basic("ada", "se"),
        basic("ada", ""),
        basic("bob", "se:cret"),
        basic("", "se:cret"),
        {"Authorization": "Bearer se:cret"},
        {"Authorization": "Basic"},
        {"Authorization": "Basic ???"},
        {"Authorization": "Basic /w=="},
        {"Authorization": b"Basic \xe9"},
        {"Authorization": "Digest x"},
        {"Cookie": f"{security.COOKIE}=se:cret"},
    ):
        answer = one.get("/?token=se:cret", headers=headers)
        assert answer.status_code == 401, headers
        assert answer.headers["www-authenticate"].startswith("Basic ")
        assert "secret" not in answer.text
    with pytest.raises(WebSocketDisconnect), one.websocket_connect(SOCKET):
        pass


def test_a_part_of_the_token_admits_nobody() -> None:
    one = guarded(Login("secret-token"))
    for given in ("", "s", "secret", "secret-toke", "secret-token-and-more", "token"):
        for headers in ({"Authorization": f"Bearer {given}"}, basic("anyone", given)):
            assert one.get("/", headers=headers).status_code == 401, headers
        assert one.get(f"/?token={given}").status_code == 401, given
        cookie = {"Cookie": f"{security.COOKIE}={given}"}
        assert one.get("/", headers=cookie).status_code == 401, given
    assert one.get("/", headers={"Authorization": "Bearer secret-token"}).status_code == 200


@pytest.mark.parametrize("text", ["ada", "ada:", ":secret", "", ":"])
def test_a_password_without_its_user_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--auth ada:secret"):
        Login.parse(text)


def test_a_token_is_exchanged_for_a_cookie() -> None:
    login = Login.draw_token()
    assert len(login.password) == 32
    assert login != Login.draw_token()
    one = guarded(login)
    assert one.get("/").status_code == 401
    assert one.get("/?token=wrong").status_code == 401
    first = one.get(f"/path?token={login.password}&theme=dark", follow_redirects=False)
    assert (first.status_code, first.headers["location"]) == (303, "/path?theme=dark")
    cookie = first.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert one.get("/").status_code == 200
    one.cookies.clear()
    assert one.get("/", headers={"Authorization": f"Bearer {login.password}"}).status_code == 200
    assert one.get("/", headers=basic("anyone", login.password)).status_code == 200
    elsewhere = one.get(f"//evil.example/?token={login.password}", follow_redirects=False)
    assert not elsewhere.headers["location"].startswith("//")


def test_the_page_of_a_protected_server_needs_the_login(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client.app, "login", Login("secret", "ada"))
    for path in ("/", "/config", f"{API}/info", f"{API}/startup-events", "/theme.css"):
        assert client.get(path).status_code == 401
        assert client.get(path, headers=basic("ada", "secret")).status_code == 200
    assert client.post(JOIN, json={}).status_code == 401


@pytest.mark.parametrize(
    ("host", "auth", "parts"),
    [
        ("127.0.0.1", None, ["http://127.0.0.1:"]),
        ("::1", None, ["http://[::1]:"]),
        ("0.0.0.0", None, ["/?token=", "Warning: the playground listens on 0.0.0.0", "the token"]),
        ("0.0.0.0", "ada:secret", ["Warning: the playground listens on 0.0.0.0", "a password"]),
    ],
)
def test_a_server_for_other_machines_prints_a_warning_and_its_token(
    loaded: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    host: str,
    auth: str | None,
    parts: list[str],
) -> None:
    served: list[Any] = []
    monkeypatch.setattr("causal_qwen.playground.state.AppState.open", lambda *_: _State())
    monkeypatch.setattr("causal_qwen.playground.page.build", lambda *_: None)
    monkeypatch.setattr(server, "make_app", _fake_app)
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: served.append(self.config.app))
    for name in (*server.OFFLINE, "GRADIO_TEMP_DIR"):
        monkeypatch.setenv(name, "")
    server.launch(host=host, port=0, open_browser=False, auth=auth)
    printed = "".join(capsys.readouterr())
    for part in parts:
        assert part in printed
    [app] = served
    if host in ("127.0.0.1", "::1"):
        assert "Warning" not in printed
        assert app.login is None
    else:
        assert app.login.is_token == (auth is None)
        assert (app.login.password in printed) == (auth is None)


# ---------------------------------------------------------------- uploads


def upload(client: TestClient, content: bytes, name: str = "a.safetensors") -> Any:
    return client.post(f"{API}/upload", files={"files": (name, content)})


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def test_an_upload_is_deleted_when_it_has_been_read(
    client: TestClient, loaded: Any, files: Path, tmp_path: Path
) -> None:
    Individual.draw(loaded[1], seed=5, name="Eva").save(tmp_path / "eva.safetensors")
    good = (tmp_path / "eva.safetensors").read_bytes()
    for content, messages in ((good, []), (b"damaged", ["is not a saved individual"])):
        [path] = upload(client, content).json()
        assert Path(path).read_bytes() == content
        assert Path(path).is_relative_to(files)
        file = {"path": path, "orig_name": "eva.safetensors", "meta": {"_type": "gradio.FileData"}}
        done = call(client, "on_load", [None, file])
        assert done["success"]
        assert len(done["log"]) == len(messages)
        assert all(part in text for part, text in zip(messages, done["log"], strict=True))
        assert not Path(path).parent.exists()


def test_a_file_that_the_page_offers_is_not_deleted_as_an_upload(
    client: TestClient, files: Path
) -> None:
    [offered] = files.rglob("Ada.safetensors")
    file = {"path": str(offered), "meta": {"_type": "gradio.FileData"}}
    call(client, "on_load", [None, file])
    assert offered.is_file()
    [shown] = call(client, "on_load", [None, None])["log"]
    assert shown == "No file is uploaded; choose one."


def test_uploads_stay_within_a_total_size(
    client: TestClient, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bounded: Any = client.app.app  # type: ignore[attr-defined]
    assert isinstance(bounded, uploads.BoundedFiles)
    assert bounded.max_bytes == server.MAX_FILES_BYTES == 20_000_000
    monkeypatch.setattr(bounded, "max_bytes", 50_000)
    kept = {path: path.read_bytes() for path in bounded.kept}
    assert [path.name for path in kept] == ["Ada.safetensors"]
    for number in range(20):
        assert upload(client, bytes([number]) * 10_000).status_code == 200
        assert total(files) <= 50_000 + 10_000 + sum(map(len, kept.values()))
    for number in range(30):  # small ones count as the blocks that they take
        upload(client, bytes([number]))
    assert len(list(files.rglob("*.safetensors"))) <= 50_000 // uploads.BLOCK + 2
    assert {path: path.read_bytes() for path in kept} == kept


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
    for path in uploads.UNUSED:
        assert client.get(path).status_code == client.post(path).status_code == 404


# ---------------------------------------------------------------- limits count work


LONG = "1" * 1_000_000


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("run", [LONG, 1, 1, 1, 0, "1", 3], "1,000,000 characters; the playground takes 1,000."),
        ("run", [TEXT, 1, 1, 1, 0, LONG, 3], "is not a whole number of up to 18 digits"),
        (
            "run_2",
            [None, ["Ada"] * 2000, TEXT, 3],
            "2000 individuals are selected; select 1 to",
        ),
        ("run_2", [None, ["Ada", "Bo"], "a\n" * 9, 3], "There are 9 prompts"),
        ("run_2", [None, ["Ada", "Bo", "Chen"], "a\n" * 5, 3], "make 15 texts"),
        ("run_2", [None, ["Ada"], LONG, 3], "1,000,000 characters"),
        ("run_2", [None, ["Ada"], "a\n" * 250_000, 3], "500,000 characters"),
        ("on_draw", [None, LONG, "1", 1, 0], "has 1000000 characters; use 1 to 24."),
        (
            "run_3",
            [None, "Ada", TEXT, "a number", "", "", 0, LONG, "", 3],
            "The number has 1,000,000 characters; the playground takes 100.",
        ),
        (
            "run_3",
            [None, "Ada", TEXT, "a word", LONG, "x", 0, "", "", 3],
            "The word has 1,000,000 characters",
        ),
        (
            "run_3",
            [None, "Ada", TEXT, "a word", "king", LONG, 0, "", "", 3],
            "The replacement has 1,000,000 characters",
        ),
        (
            "run_3",
            [None, "Ada", TEXT, "the prompt", "", "", 0, "", LONG, 3],
            "The text has 1,000,000 characters",
        ),
        ("on_drag", [None, LONG, None, [0, 1, 0, 2, 1]], "1,000,000 characters"),
        ("on_drag", [None, TEXT, None, [0, 1, 0, 2, 1e-320]], "The dragged number is unknown"),
        ("on_drag", [None, TEXT, None, [0, 1, 0, 2]], "The dragged number is unknown"),
        ("on_use", [LONG], "The directory has 1,000,000 characters"),
        ("on_show", [LONG], "1,000,000 characters"),
        ("on_click", [None, "first"], "Click a token"),
        ("on_click", [None, 10**6], "outside a text of"),
    ],
)
def test_work_is_limited_before_it_begins(
    client: TestClient,
    name: str,
    data: list[Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(text: str) -> Any:
        assert len(text) <= text_edits.MAX_CHARACTERS, "long text is being read"
        return encode(text)

    encode = edits.encode
    for module in (edits, text_edits):
        monkeypatch.setattr(module, "encode", refuse)
    done = call(client, name, data)
    [shown] = done["log"]
    assert message in shown
    assert len(shown) < 300
    assert "Internal error" not in shown


def test_a_name_selected_twice_generates_one_text(client: TestClient) -> None:
    twice = [call_cards(client, ["Ada"] * copies) for copies in (1, 2, MAX_INDIVIDUALS)]
    assert twice == [1, 1, 1]


def call_cards(client: TestClient, selected: list[str]) -> int:
    """The number of texts that appear on the page."""
    done = client.post(f"{API}/call/run_2", json={"data": [selected, TEXT, 1]})
    events = client.get(f"{API}/call/run_2/{done.json()['event_id']}").text
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: [")]
    return max(str(one).count("class='card'") for one in data)


@pytest.mark.parametrize("tokens", [0, 81, 1e9, -1])
def test_new_tokens_are_limited(client: TestClient, tokens: float) -> None:
    done = call(client, "run", [TEXT, 1, 1, 1, 0, "1", tokens])
    assert not done["success"]
    assert "Value" in done["output"]["error"]


def test_no_address_is_fetched_for_a_visitor(client: TestClient) -> None:
    for path in ("http://example.com/x.safetensors", " HTTPS://example.com/x", "ftp://example.com"):
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        answer = client.post(JOIN, json={"data": [[{"deep": file}]], "fn_index": 0})
        assert answer.status_code == 400
        assert "uploaded" in answer.text


@pytest.mark.parametrize("index", [999, -1, 1e9, "999", True, [0]])
@pytest.mark.parametrize("path", ["queue/join", "run/run", "api/run"])
def test_a_function_that_does_not_exist_is_not_found(
    client: TestClient, path: str, index: Any
) -> None:
    for session in ("a", None):
        body = {"data": [], "fn_index": index, "session_hash": session}
        answer = client.post(f"{API}/{path}", json=body)
        assert (answer.status_code, answer.text) == (404, "There is no such function.\n")


@pytest.mark.parametrize("path", ["run/none", "api/none/", "call/none", "call/v2/none"])
def test_an_endpoint_that_does_not_exist_is_not_found(client: TestClient, path: str) -> None:
    answer = client.post(f"{API}/{path}", json={"data": []})
    assert answer.status_code == 404, answer.text
    assert "Traceback" not in answer.text


# ---------------------------------------------------------------- hostile calls


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", seeds(1, 20))
def test_hostile_calls_get_a_message_and_the_server_lives(
    client: TestClient, seed: int, record_property: Any
) -> None:
    outcomes = attack(client, seed, calls=40, skip=FITS)
    record_property("cases", 40)
    assert sum(outcomes.values()) == 40


# ---------------------------------------------------------------- stand-ins


class _State:
    @staticmethod
    def close() -> None: ...


def _fake_app(_: Any, files: Path, names: BoundNames, login: Login | None) -> Guard:
    assert files.is_dir()
    return Guard(_empty_app, names, 10, login)


async def _empty_app(scope: Any, receive: Any, send: Any) -> None:
    await security.PlainTextResponse("")(scope, receive, send)


async def _echo_app(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})
    await send({"type": "websocket.send", "text": "hello"})
