"""A real server and a real browser: Debian's Chromium, headless, driven by Playwright.

One process of `causal-qwen app` with the first layers of the embedded model serves every test.
Screenshots are written to $CAUSAL_QWEN_SCREENSHOTS, or to pytest's temporary directory. Without a
Chromium the tests are skipped; with CAUSAL_QWEN_REQUIRE_BROWSER=1 (CI) they fail.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, sync_playwright

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
REQUIRE = "CAUSAL_QWEN_REQUIRE_BROWSER"
MISSING = "No Chromium on the PATH; install it with: make chromium"
START_SECONDS = 600  # a guard; a fresh machine converts the embedded model first
WAIT_MILLISECONDS = 180_000  # a guard, too
KEY = "sesame"  # of the server that a playground asks
REBOUND = "rebound.example"  # a name that resolves to this machine, as after DNS rebinding
FRAMES = """
count => new Promise(done => {
  const next = () => count-- ? requestAnimationFrame(next) : requestIdleCallback(done);
  next();
})
"""
FULLY_SHOWN = """
() => [...document.querySelectorAll('.cq')].filter(x => x.checkVisibility()).every(shown => {
  for (let x = shown; x; x = x.parentElement) if (getComputedStyle(x).opacity < 1) return false;
  return true;
})
"""


# A toast leaves after ten seconds, which a loaded machine may not see.
RECORD_TOASTS = """
const seen = new WeakSet();
window.toasts = [];
const record = () => document.querySelectorAll('[data-testid="toast-body"]').forEach((box) => {
  if (!seen.has(box)) { seen.add(box); window.toasts.push(box.textContent); }
});
new MutationObserver(record).observe(document, {childList: true, subtree: true});
"""
CLOSE_TOASTS = "document.querySelectorAll('[data-testid=toast-close]').forEach((x) => x.click())"


class Visitor:
    """A browser page, used with mouse and keyboard."""

    def __init__(self, page: Page, url: str, shots: Path) -> None:
        self.page, self.url, self.shots = page, url, shots
        self.requests: list[str] = []
        self.errors: list[str] = []
        page.set_default_timeout(WAIT_MILLISECONDS)
        page.add_init_script(RECORD_TOASTS)
        page.on("request", lambda request: self.requests.append(request.url))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("console", self._log)

    def _log(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def load(self, query: str = "") -> Visitor:
        self.page.goto(self.url + query)
        self.page.get_by_role("tab", name="Generate").wait_for()
        return self

    def open(self, tab: str) -> None:
        """Open a tab and wait: in its first frames a field discards what is typed."""
        self.page.get_by_role("tab", name=tab).click()
        self.page.evaluate(FRAMES, 8)

    def press(self, name: str) -> None:
        self.page.get_by_role("button", name=name, exact=True).locator("visible=true").click()

    def unfold(self) -> None:
        """Show the settings of the first tab."""
        self.page.get_by_text("Temperature, persistence, seed, length").click()
        self.page.evaluate(FRAMES, 8)  # as in `open`

    def fill(self, label: str, value: str) -> None:
        """Write into the visible field with this label."""
        self.page.get_by_label(label, exact=True).locator("visible=true").first.fill(value)

    def wait_for_value(self, field: Any, part: str) -> None:
        """Wait until the field contains `part`."""
        field.evaluate(
            """(field, part) => new Promise(done => {
                 const look = () => field.value.includes(part) ? done() : setTimeout(look, 20);
                 look();
               })""",
            part,
        )

    def tokens(self, count: float) -> None:
        """Set the number of new tokens in the open tab."""
        self.page.get_by_label("number input for New tokens").locator("visible=true").fill(
            str(count)
        )

    def draw(self, name: str, seed: int) -> None:
        """Draw an individual."""
        self.fill("Name", name)
        self.fill("Seed", str(seed))
        self.press("Draw")
        self.page.get_by_role("cell", name=name).wait_for()

    def texts(self) -> dict[str, str]:
        """The texts of the visible cards by title, once generation has ended."""
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
        """The message of the page; it is closed after reading."""
        self.page.wait_for_function("window.toasts.length > 0")
        text: str = self.page.evaluate("window.toasts.shift()")
        self.page.evaluate(CLOSE_TOASTS)
        self.page.get_by_test_id("toast-body").first.wait_for(state="detached")
        return text

    def shoot(self, name: str) -> None:
        """Take a screenshot; check that nothing overflows the screen."""
        self.page.mouse.move(0, 0)
        self.page.wait_for_function(FULLY_SHOWN)
        self.page.screenshot(path=self.shots / f"{name}.png", full_page=True)
        width = self.page.evaluate("document.documentElement.scrollWidth")
        assert width <= self.page.viewport_size["width"], name


def find_chromium() -> str | None:
    return next((found for name in CHROMIUM if (found := shutil.which(name))), None)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test that needs a missing Chromium: here, so that the summary has one line for all."""
    is_needed = "chromium" in getattr(item, "fixturenames", ())
    if is_needed and not find_chromium() and os.environ.get(REQUIRE) != "1":
        pytest.skip(MISSING)


@pytest.fixture(scope="session")
def chromium() -> str:
    return find_chromium() or pytest.fail(MISSING)


@pytest.fixture(scope="session")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kept = os.environ.get("CAUSAL_QWEN_SCREENSHOTS")
    directory = Path(kept) if kept else tmp_path_factory.mktemp("screenshots")
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextmanager
def program(*arguments: str) -> Iterator[str]:
    """A command that serves until Ctrl-C, which closes it cleanly. -> its address"""
    process = subprocess.Popen(
        [sys.executable, "-m", "causal_qwen", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "CAUSAL_QWEN_API_KEY": KEY},
    )
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", "".join(lines))):
            lines.append(process.stdout.readline())
            assert lines[-1], f"{arguments[0]} did not open:\n{''.join(lines)}"
        yield found[0]
        process.send_signal(signal.SIGINT)
        rest, _ = process.communicate(timeout=START_SECONDS)
        assert process.returncode == 0, rest
        assert rest.endswith("Closed.\n"), rest
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def url(short_directory: Path) -> Iterator[str]:
    """The address of the playground with a model of its own; Ctrl-C must close it cleanly."""
    model = ("--model", str(short_directory))
    with program("app", *model, "--port", "0", "--no-browser") as address:
        yield f"{address}/"


@pytest.fixture(scope="session")
def browser(chromium: str) -> Iterator[Browser]:
    with sync_playwright() as playwright:
        rebinding = f"--host-resolver-rules=MAP {REBOUND} 127.0.0.1"
        opened = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", rebinding]
        )
        yield opened
        opened.close()


@contextmanager
def visiting(browser: Browser, url: str, shots: Path) -> Iterator[Callable[..., Visitor]]:
    """`visit(**options)`: a page in a browser context of its own.

    At the end, no page may have sent a request to another host, or logged an error.
    """
    visitors: list[Visitor] = []

    def make(query: str = "", **options: Any) -> Visitor:
        options = {"viewport": {"width": 1280, "height": 900}, **options}
        page = browser.new_context(**options).new_page()
        visitors.append(Visitor(page, url, shots))
        return visitors[-1].load(query)

    yield make
    for visitor in visitors:
        visitor.page.context.close()
        elsewhere = [one for one in visitor.requests if not one.startswith((url, "data:", "blob:"))]
        assert not elsewhere, f"fetched from elsewhere: {elsewhere}"
        # a heartbeat would hold one of a browser's six connections for every tab
        assert not any("heartbeat" in one for one in visitor.requests)
        assert not visitor.errors, visitor.errors


@pytest.fixture
def visit(browser: Browser, url: str, shots: Path) -> Iterator[Callable[..., Visitor]]:
    with visiting(browser, url, shots) as make:
        yield make
