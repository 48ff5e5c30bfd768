"""The playground in a real browser, used with mouse, keyboard and touch."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

MODES = ["standard", "sampling", "causal", "compatible"]
TABS = ["Generate", "Individuals", "Panel", "Counterfactual", "Numbers", "Tokens"]
PROMPTS = "Prompts, one per line"
REQUIRE = "CAUSAL_QWEN_REQUIRE_BROWSER"
NUMBER_TEXT = "Text that ends before a number"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
WAIT_MILLISECONDS = 60_000
SETTLE_MS = 500  # after which no late update arrives
Visit = Callable[..., Any]


def test_four_modes_generate_side_by_side(visit: Visit) -> None:
    visitor = visit()
    visitor.unfold()
    visitor.tokens(3)
    visitor.press("Generate")
    texts = visitor.texts()
    assert list(texts) == MODES
    assert all(text.strip() for text in texts.values())
    visitor.shoot("generate")
    # without noise, all modes choose the same tokens
    visitor.tokens(2.4)
    for mode in MODES[1:]:
        visitor.page.get_by_label(f"number input for Temperature of {mode}").fill("0")
    visitor.fill("Individual (seed)", "5")
    visitor.press("Generate")
    visitor.page.get_by_text("individual 5").wait_for()
    calm = set(visitor.texts().values())
    assert len(calm) == 1
    assert texts["standard"].startswith(calm.pop())


def test_two_visitors_draw_individuals_of_their_own(visit: Visit) -> None:
    visitors = one, other = visit(), visit()
    for seed, visitor in enumerate(visitors, start=7):
        visitor.open("Individuals")
        visitor.tokens(4)
        visitor.fill(PROMPTS, "The old lighthouse keeper opened the door and")
        visitor.draw("Zoe", seed)
    one.draw("Dora", 42)
    for visitor in visitors:  # both at the same time
        visitor.press("Generate")
    generated = [visitor.texts() for visitor in visitors]
    shared = ["Ada", "Bo", "Chen"]
    assert [list(texts) for texts in generated] == [[*shared, "Zoe", "Dora"], [*shared, "Zoe"]]
    assert [generated[0][name] for name in shared] == [generated[1][name] for name in shared]
    assert generated[0]["Zoe"] != generated[1]["Zoe"]
    notes = [visitor.page.locator(".card:visible .note").all_inner_texts() for visitor in visitors]
    assert [who[3:] for who in notes] == [["seed 7", "seed 42"], ["seed 8"]]

    one.shoot("individuals")
    assert other.page.get_by_role("cell", name="Dora").count() == 0
    other.draw("Dora", 42)
    for name in [*shared, "Zoe"]:
        other.page.get_by_role("checkbox", name=name).uncheck()
    prompts = "The old lighthouse keeper opened the door and\nThe young mayor opened the letter and"
    other.fill(PROMPTS, prompts)
    other.press("Generate")
    other.page.locator(".card:visible .prompt").get_by_text("The young mayor").wait_for()
    other.texts()
    texts = other.page.locator(".card:visible .new").all_inner_texts()
    assert len(texts) == 2
    assert texts[0] == generated[0]["Dora"]
    other.page.get_by_role("checkbox", name="Dora").uncheck()
    other.press("Generate")
    assert "0 individuals" in other.toast()


def test_a_panel_answers_and_is_asked_again(visit: Visit) -> None:
    visitor = visit()
    visitor.open("Panel")
    visitor.press("Ask")
    answer = visitor.page.locator(".panel:visible")
    answer.get_by_text("1000 individuals").wait_for()
    shares = re.findall(r"([\d.]+)% \(", answer.inner_text())
    assert sum(map(float, shares)) == pytest.approx(100, abs=0.2)
    visitor.fill("Another version of the question, to the same individuals", "Coffee or tea?")
    visitor.press("Ask")
    visitor.page.get_by_text("changed their answer").wait_for()
    visitor.shoot("panel")
    visitor.fill("Answers, separated by commas", "coffee")
    visitor.press("Ask")
    assert "at least 2" in visitor.toast()


def test_a_changed_prompt_changes_the_text(visit: Visit) -> None:
    visitor = visit()
    visitor.open("Counterfactual")
    visitor.tokens(4)
    visitor.press("Compare")
    texts = visitor.page.locator(".counterfactual table").first.locator("tr")
    texts.first.wait_for()
    factual, counterfactual = texts.all_inner_texts()
    assert "daughter" in factual
    assert "The king's son" in counterfactual
    assert visitor.page.locator(".counterfactual tbody tr:visible").count() == 2 + 4
    visitor.shoot("counterfactual")

    visitor.fill("The prompt with a change", "Once a <b>dragon</b>")
    visitor.press("Compare")
    texts.get_by_text("Once a <b>dragon</b>").wait_for()


def test_numbers_begin_with_an_example(visit: Visit) -> None:
    visitor = visit()
    visitor.open("Numbers")
    median = visitor.page.locator(".median")
    median.wait_for()  # 90 rows are read
    before = float(median.inner_text())
    assert 3 < before < 6
    text = visitor.page.get_by_label(NUMBER_TEXT)
    assert text.input_value().startswith("An iris versicolor")
    setosa = text.input_value().replace("petals 1.3 cm", "petals 0.2 cm")
    text.fill(setosa.replace("versicolor", "setosa"))
    visitor.press("Predict")
    visitor.page.wait_for_function(
        f"Number(document.querySelector('.median').innerText) < {before - 1}"
    )
    visitor.shoot("numbers")


def test_clicked_token_shows_how_it_was_chosen(visit: Visit) -> None:
    visitor = visit()
    visitor.open("Tokens")
    tokens = visitor.page.locator(".tokens button")
    assert tokens.first.inner_text() == "The"
    tokens.filter(has_text="keeper").click()
    total = visitor.page.locator(".sum")
    total.wait_for()
    found = re.search(r"ΣP = ([\d.]+) over 49,152 tokens", total.inner_text())
    assert found is not None
    assert 0.3 < float(found[1]) < 3
    assert visitor.page.locator(".tokens [aria-pressed=true]").inner_text() == "·keeper"
    chosen = visitor.page.locator("tr.chosen td").first
    assert chosen.inner_text() == "·keeper"
    visitor.shoot("tokens")
    for place in (1, 5, 6):  # faster than the model answers: the last click counts
        tokens.nth(place).click()
    visitor.page.get_by_text("How “·door” was chosen").wait_for()
    assert visitor.page.locator(".tokens [aria-pressed=true]").all_inner_texts() == ["·door"]
    visitor.fill("Text", "It costs 5 and")
    visitor.press("Show tokens")
    tokens.filter(has_text="costs").wait_for()
    tokens.filter(has_text="next?").click()
    visitor.page.get_by_text("How the next token was chosen").wait_for()
    tokens.first.click()
    assert "first token" in visitor.toast()


def test_invalid_prompt_is_answered_with_a_message_on_every_tab(visit: Visit) -> None:
    visitor = visit()
    for tab, label, button in (
        ("Generate", "Prompt", "Generate"),
        ("Individuals", PROMPTS, "Generate"),
        ("Counterfactual", "Prompt", "Compare"),
        ("Numbers", NUMBER_TEXT, "Predict"),
        ("Tokens", "Text", "Show tokens"),
    ):
        visitor.open(tab)
        if tab == "Numbers":
            visitor.page.locator(".median:visible").wait_for()
        before = visitor.page.locator(".cq:visible").all_inner_texts()
        prompts = [
            ("   ", "The text is empty|0 prompts"),
            ("word " * 1000, "4,999 characters"),
        ]
        for prompt, message in prompts:
            visitor.fill(label, prompt)
            visitor.press(button)
            answer = visitor.toast()
            assert re.search(message, answer), (tab, answer)
        if tab != "Numbers":  # which draws the text as it is typed
            assert visitor.page.locator(".cq:visible").all_inner_texts() == before
    assert "Traceback" not in visitor.page.content()

    typed = "<img src=x onerror=alert(1)> ${1+1} {{value}} </span>"  # shown, never run
    visitor.fill("Text", typed)
    visitor.press("Show tokens")
    visitor.page.locator(".tokens button").filter(has_text="alert").wait_for()
    shown = "".join(visitor.page.locator(".tokens button").all_inner_texts())
    assert shown.replace("·", " ") == typed + "next?"
    assert visitor.page.locator(".tokens img").count() == 0


def test_generation_stops_and_the_page_generates_again(visit: Visit) -> None:
    visitor, other = visit(), visit()
    for one in (visitor, other):
        one.unfold()
        one.tokens(80)
        one.press("Generate")
        one.page.wait_for_function("document.querySelector('.new')?.textContent")
    visitor.press("Stop")
    visitor.page.wait_for_function("!document.querySelector('.cursor')")
    texts = visitor.page.locator(".new").all_inner_texts()
    assert len(texts) == len(MODES)
    other.page.context.close()  # a visitor leaves during generation
    visitor.page.wait_for_timeout(SETTLE_MS)
    assert visitor.page.locator(".new").all_inner_texts() == texts  # and grows no more
    visitor.tokens(2)
    visitor.press("Generate")
    assert list(visitor.texts()) == MODES


# Light mode in the slow tier only: other tests use it, and the layout is the same.
@pytest.mark.parametrize("theme", [pytest.param("light", marks=pytest.mark.slow), "dark"])
def test_every_tab_fits_a_phone(visit: Visit, theme: str) -> None:
    visitor = visit(f"?__theme={theme}", **PHONE)
    for tab in TABS:
        visitor.open(tab)
        if tab == "Generate":
            visitor.unfold()
        if tab in ("Generate", "Counterfactual"):
            visitor.tokens(2)
            visitor.press({"Generate": "Generate", "Counterfactual": "Compare"}[tab])
            visitor.page.locator(".card:visible, .counterfactual").first.wait_for()
        if tab == "Numbers":
            visitor.page.locator(".median:visible").wait_for()
            assert visitor.page.locator(".cq .bar:visible").first.bounding_box()["width"] > 250
        if tab == "Tokens":
            visitor.page.locator(".tokens button").nth(2).click()
            visitor.page.locator(".sum").wait_for()
        visitor.shoot(f"phone-{theme}-{tab.lower()}")
        tables = visitor.page.locator(".scroll:visible")
        for table in tables.all():  # every column can be seen
            assert table.evaluate("x => x.scrollWidth - x.clientWidth") <= 0, tab
    letters = visitor.page.evaluate("getComputedStyle(document.querySelector('h1')).color")
    red = int(re.findall(r"\d+", letters)[0])
    assert red > 192 if theme == "dark" else red < 64


def test_other_sites_cannot_frame_the_page_write_to_it_or_rebind_its_name(
    browser: Any, url: str
) -> None:
    context = browser.new_context()
    context.set_default_timeout(WAIT_MILLISECONDS)
    page = context.new_page()
    rebound = url.replace("127.0.0.1", "rebound.example")
    answer = page.goto(rebound)
    assert answer.status == 400
    assert "Invalid host header" in page.content()

    page.goto("about:blank")
    page.set_content(f"<form method='post' action='{url}gradio_api/upload'></form>")
    with page.expect_navigation() as moved:
        page.evaluate("document.forms[0].submit()")
    assert moved.value.status == 403

    framed = context.new_page()
    framed.set_content(f"<iframe src='{url}'></iframe>")
    framed.wait_for_function("frames.length === 1")
    framed.wait_for_load_state("networkidle")
    assert [one.url.split(":")[0] for one in framed.frames[1:]] == ["chrome-error"]
    context.close()
