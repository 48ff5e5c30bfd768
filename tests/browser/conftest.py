"""A real server and a real browser: Debian's Chromium, headless, driven by Playwright.

One server process serves every test. Screenshots go to $CAUSAL_QWEN_SCREENSHOTS, or to pytest's
temporary directory.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 240  # a fresh machine converts the embedded model first
WAIT_MILLISECONDS = 120_000
SERVE = (
    "import signal\n"
    "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from causal_qwen.playground import launch\n"
    "launch(port={port}, open_browser=False)\n"
)


class Visitor:
    """Somebody who opens the page and uses it with mouse and keyboard."""

    def __init__(self, page: Page, url: str, shots: Path) -> None:
        self.page, self.url, self.shots = page, url, shots
        self.requests: list[str] = []
        self.complaints: list[str] = []
        page.set_default_timeout(WAIT_MILLISECONDS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._listen)

    def _listen(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def come(self, query: str = "") -> Visitor:
        self.page.goto(self.url + query)
        self.page.get_by_role("tab", name="Speak").wait_for()
        return self

    def open(self, tab: str) -> None:
        self.page.get_by_role("tab", name=tab).click()

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

    def unfold(self) -> None:
        """Show the settings of the first tab."""
        self.page.get_by_text("Temperature, truncation, seed").click()

    def fill(self, label: str, value: str) -> None:
        """What is written in the one visible field with this label."""
        self.page.get_by_label(label, exact=True).locator("visible=true").first.fill(value)

    def choose(self, label: str, option: str) -> None:
        self.page.get_by_label(label, exact=True).locator("visible=true").click()
        self.page.get_by_role("option", name=option).click()

    def tokens(self, count: int) -> None:
        """How many new tokens the open tab may say."""
        self.page.get_by_label("number input for New tokens").locator("visible=true").fill(
            str(count)
        )

    def said(self) -> dict[str, str]:
        """What stands in the visible cards, by their titles, once nobody speaks any more."""
        cards = self.page.locator(".card:visible:has(.new)")
        cards.first.wait_for()
        self.page.wait_for_function(
            "[...document.querySelectorAll('.cursor')].every(x => !x.checkVisibility())"
        )
        return {
            card.locator("h4").inner_text(): card.locator(".new").inner_text()
            for card in cards.all()
        }

    def toast(self) -> str:
        """The sentence that the page answers, closed after reading."""
        box = self.page.get_by_test_id("toast-body").last
        box.wait_for()
        text = box.inner_text()
        self.page.get_by_test_id("toast-close").last.click()
        box.wait_for(state="detached")
        return text

    def shoot(self, name: str) -> None:
        self.page.screenshot(path=self.shots / f"{name}.png", full_page=True)

    def width(self) -> int:
        return int(self.page.evaluate("document.documentElement.scrollWidth"))


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("CAUSAL_QWEN_SCREENSHOTS")
    directory = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a running playground; at the end, Ctrl-C must close it cleanly."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log = tmp_path_factory.mktemp("server") / "log.txt"
    with log.open("w") as out:
        server = subprocess.Popen(
            [sys.executable, "-c", SERVE.format(port=port)], stdout=out, stderr=subprocess.STDOUT
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while "is open at" not in log.read_text():
            if server.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"The playground did not open:\n{log.read_text()}")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}/"
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
        assert log.read_text().endswith("Closed.\n"), log.read_text()
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        pytest.fail("There is no Chromium on the PATH: say make chromium, or install one.")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def visit(browser: Browser, url: str, shots: Path) -> Iterator[Callable[..., Visitor]]:
    """`visit(**options)`: somebody with a browser of their own.

    When a test ends, nobody may have asked any other machine for anything, and no browser may
    have complained.
    """
    visitors: list[Visitor] = []

    def make(query: str = "", **options: Any) -> Visitor:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        page = browser.new_context(**options).new_page()
        visitors.append(Visitor(page, url, shots))
        return visitors[-1].come(query)

    yield make
    for visitor in visitors:
        visitor.page.context.close()
        elsewhere = [one for one in visitor.requests if not one.startswith((url, "data:", "blob:"))]
        assert not elsewhere, f"fetched from elsewhere: {elsewhere}"
        assert not visitor.complaints, visitor.complaints
