"""Page: the tabs, their components and event handlers. Nothing is computed here. No torch."""

from __future__ import annotations

import functools
import itertools
import json
import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from causal_qwen.app import rendering, served
from causal_qwen.app.served import ServedModel, Speaker

Update = dict[Any, Any]  # component -> new value; other outputs stay

TITLE = "CausalQwen playground"
TABS = ("Generate", "Individuals", "Panel", "Counterfactual", "Numbers", "Tokens")
TEXTS_ONLY = "This server runs without torch and answers texts only, so the other tabs are left out"
MAX_TEXTS = 12  # generated at once
PARALLEL, WAITING = 4, 24  # calls of one function; Gradio shows the place in its queue
KEEP_SECONDS = (600, 3600)  # uploads are looked at every 10 minutes, deleted after an hour
PROMPT = "The old lighthouse keeper opened the door and"
QUESTION = "Do you prefer coffee or tea?"
EDITED_PROMPT = "The king's daughter had 7 horses and"
CLICK_HINT = "Click a token to see how it was chosen."
FIRST_NOTE = "Fitted on 60 irises when this tab is first opened, which may take a minute."
SERVED_NOTE = "For a regressor that reads columns write a line for each, such as carat = 0.7."
OWN_HEAD = ("the model's own number head, if it was trained on values", "")
STOP_MS = 500  # after which no more updates of a stopped stream arrive
CSS, TOKENS_JS = (
    Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("page.css", "tokens.js")
)
# Gradio drops the data of a deferred event, but reads its inputs when the event runs.
LAST_INPUT_JS = "(...inputs) => [...inputs.slice(0, -1), window.{}]"


def build(model: ServedModel, is_local: bool = False) -> gr.Blocks:
    """The whole page for one model; every visitor has a list of individuals of their own."""
    place = "." if is_local else f" at `{model.client.address}`."
    left_out = "" if model.has_analyses else f" {TEXTS_ONLY}."
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=KEEP_SECONDS) as page:
        gr.Markdown(
            f"# CausalQwen\nA language model that infers an individual, U, from the context and "
            f"then decides what this individual writes. Model: `{model.name}`{place}{left_out}"
        )
        own = served.TEMPERATURE, model.persistence
        mine = gr.State([Speaker(name, None, *own) for name in served.FIRST])
        with gr.Tabs(overflow_behavior="wrap"):  # a menu hides the last on some phones
            with gr.Tab(TABS[0]):
                _generate_tab(model)
            with gr.Tab(TABS[1]):
                choices = [_individuals_tab(model, mine)]
            with gr.Tab(TABS[2]):
                _panel_tab(model)
            if model.has_analyses:
                with gr.Tab(TABS[3]):
                    choices.append(_counterfactual_tab(model, mine))
                with gr.Tab(TABS[4]) as tab:
                    _numbers_tab(model, tab)
                with gr.Tab(TABS[5]):
                    _tokens_tab(model)
        mine.change(_choices, [mine, *choices], choices)
    page.queue(default_concurrency_limit=PARALLEL, max_size=WAITING)
    return page


def report_errors(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """An error of a handler becomes a message; the page stays as it was."""

    @functools.wraps(handler)
    def stream(*arguments: Any) -> Iterator[Any]:
        try:
            yield from handler(*arguments)
        except Exception as error:
            message = str(error)
            if not isinstance(error, ValueError | OSError):  # not the visitor's mistake
                traceback.print_exception(error)
                message = f"Internal error ({type(error).__name__}); see the server's terminal."
            gr.Warning(escape(message, quote=False))
        yield gr.skip()  # Gradio sends the last update twice: it must not undo what was typed since

    return stream


# ---------------------------------------------------------------- the tabs
# A tab is one function, of more than 60 lines where needed: its handlers share its components.


def _generate_tab(model: ServedModel) -> None:
    prompt = _text_box("Prompt", PROMPT)
    start, stop = _start_and_stop()
    with gr.Accordion("Temperature, persistence, seed, length", open=False):
        with gr.Row():
            sampling = _temperature("Temperature of sampling")
            causal = _temperature("Temperature of causal")
            soft = _temperature("Temperature of compatible", served.COMPATIBLE_TEMPERATURE, 2)
        with gr.Row():
            persistence = _persistence(model)
            seed = gr.Number(1, label="Individual (seed)", precision=0, min_width=120)
            tokens = _new_tokens(model, 30)
    output = gr.HTML(rendering.note("The texts of the four modes appear here."), label="Texts")

    @report_errors
    def run(text: str, n: int, who: int | None, *settings: float) -> Iterator[str]:
        text = served.read_text(text)
        four = served.four_modes(who or 0, *settings)
        titles = [(one, served.MODE_NOTES[one].format(seed=who or 0), text) for one in four]
        bodies = ({"prompt": text, **options} for options in four.values())
        yield from _growing_cards(titles, model.stream(bodies, n))

    inputs = [prompt, tokens, seed, sampling, causal, soft, persistence]
    running = [trigger(run, inputs, output) for trigger in (start.click, prompt.submit)]
    _cancel(stop, running, output)


def _individuals_tab(model: ServedModel, mine: gr.State) -> Any:
    """-> the component in which individuals are selected"""
    names = _names(mine.value)
    table = gr.HTML(rendering.individuals_table(mine.value))
    gr.Markdown("### Draw an individual")
    with gr.Row():
        name = gr.Textbox(label="Name", placeholder="Dora", min_width=120)
        seed = gr.Number(None, label="Seed", placeholder="of the name", precision=0)
    with gr.Row():
        temperature = _temperature("Temperature")
        persistence = _persistence(model)
    draw = gr.Button("Draw", variant="primary")
    gr.Markdown("### Generate with every selected individual after every prompt")
    speakers = gr.CheckboxGroup(names, value=names, label="Individuals")
    prompts = _text_box("Prompts, one per line", f"{PROMPT}\nThe best way to learn is to")
    tokens = _new_tokens(model, 24)
    start, stop = _start_and_stop()
    output = gr.HTML(rendering.note("The texts appear here."), label="Texts")

    @report_errors
    def on_draw(
        them: list[Speaker], who: str, number: int | None, t: float, own: float
    ) -> Iterator[tuple[Any, ...]]:
        if not (who := " ".join((who or "").split())):
            number = secrets.randbelow(10**6) if number is None else number
        new = Speaker(who or f"No. {number}", number, t, own)
        if new.name in _names(them):
            raise ValueError(f"The name {new.name} is taken; choose another one.")
        yield [*them, new], "", None

    @report_errors
    def run(them: list[Speaker], selected: list[str], lines: str, n: int) -> Iterator[str]:
        speaking = [one for one in them if one.name in selected]
        texts = [served.read_text(line) for line in (lines or "").splitlines() if line.strip()]
        rows = [(one, text) for text in texts for one in speaking]
        if not 0 < len(rows) <= MAX_TEXTS:
            raise ValueError(
                f"{len(speaking)} individuals and {len(texts)} prompts make {len(rows)} texts; "
                f"select 1 to {MAX_TEXTS}."
            )
        titles = [(one.name, _note(one), text) for one, text in rows]
        bodies = ({"prompt": text, **one.fields} for one, text in rows)
        yield from _growing_cards(titles, model.stream(bodies, n))

    for trigger in (draw.click, name.submit, seed.submit):
        trigger(on_draw, [mine, name, seed, temperature, persistence], [mine, name, seed])
    mine.change(rendering.individuals_table, mine, table)
    running = start.click(run, [mine, speakers, prompts, tokens], output)
    _cancel(stop, [running], output)
    return speakers


def _panel_tab(model: ServedModel) -> None:
    question = _text_box("Question", QUESTION)
    options = _text_box("Answers, separated by commas", "coffee, tea", lines=1)
    versus = _text_box("Another version of the question, to the same individuals", "", lines=1)
    people = gr.Slider(10, 5000, 1000, step=10, precision=0, label="Individuals")
    ask = gr.Button("Ask", variant="primary")
    output = gr.HTML(rendering.note("The shares of the answers appear here."), label="Answers")

    @report_errors
    def run(asked: str, among: str, other: str, n: int) -> Iterator[str]:
        other = (other or "").strip()
        yield rendering.panel(model.ask(served.read_text(asked), among or "", other, int(n)))

    for trigger in (ask.click, question.submit, options.submit, versus.submit):
        trigger(run, [question, options, versus, people], output)


def _counterfactual_tab(model: ServedModel, mine: gr.State) -> Any:
    """-> the component in which an individual is selected"""
    prompt = _text_box("Prompt", EDITED_PROMPT)
    edited = _text_box("The prompt with a change", EDITED_PROMPT.replace("daughter", "son"))
    names = _names(mine.value)
    speaker = gr.Dropdown(names, value=names[0], label="Speaker")
    tokens = _new_tokens(model, 16)
    compare = gr.Button("Compare", variant="primary")
    hint = "The text of the speaker appears here, before and after the change."
    output = gr.HTML(rendering.note(hint), label="Comparison")

    @report_errors
    def run(them: list[Speaker], name: str, text: str, other: str, n: int) -> Iterator[str]:
        (who,) = (one for one in them if one.name == name)
        found = model.compare(who, served.read_text(text), served.read_text(other), n)
        yield rendering.comparison(found)

    for trigger in (compare.click, prompt.submit, edited.submit):
        trigger(run, [mine, speaker, prompt, edited, tokens], output)
    return speaker


def _numbers_tab(model: ServedModel, tab: gr.Tab) -> None:
    choices = [*((one, one) for one in model.regressors), OWN_HEAD]
    has_irises = served.IRISES in model.regressors
    example = served.IRIS_TEXT if has_irises else ""
    gr.HTML(rendering.note(FIRST_NOTE if has_irises else SERVED_NOTE))
    text = _text_box("Text that ends before a number", example, lines=3)
    predict = gr.Button("Predict", variant="primary")
    picture = gr.HTML(label="Prediction", elem_classes="prediction")
    key = gr.Radio(choices, value=choices[0][1], label="Numbers by")

    @report_errors
    def on_predict(asked: str, words: str) -> Iterator[str]:
        found = model.forecast(asked, served.read_text(words))
        yield rendering.forecast_picture(asked or OWN_HEAD[0], found)

    def on_first(asked: str, words: str) -> Iterator[str]:
        if words and words == example:
            yield from on_predict(asked, words)

    for trigger in (predict.click, text.submit):
        trigger(on_predict, [key, text], picture)
    tab.select(on_first, [key, text], picture, show_progress="hidden")


def _tokens_tab(model: ServedModel) -> None:
    text = _text_box("Text", PROMPT)
    show = gr.Button("Show tokens", variant="primary")
    tokens = gr.HTML(rendering.token_buttons(model.tokens(PROMPT)[0]), js_on_load=TOKENS_JS)
    output = gr.HTML(rendering.note(CLICK_HINT))
    shown = gr.State(PROMPT)  # the text whose tokens are on the page
    clicked = gr.JSON(visible=False)  # the index of a token, set by the browser

    @report_errors
    def on_show(words: str) -> Iterator[tuple[str, str, str]]:
        words = served.read_text(words)
        buttons = rendering.token_buttons(model.tokens(words)[0])
        yield buttons, words, rendering.note(CLICK_HINT)

    @report_errors
    def on_click(words: str, index: int) -> Iterator[tuple[str, str]]:
        found, view = model.tokens(words, index)
        yield rendering.token_buttons(found, index), rendering.token_view(view)

    for trigger in (show.click, text.submit):
        trigger(on_show, text, [tokens, shown, output])
    tokens.select(
        on_click,
        [shown, clicked],
        [tokens, output],
        js=LAST_INPUT_JS.format("clicked"),
        show_progress="minimal",
        trigger_mode="always_last",
    )


# ---------------------------------------------------------------- components


def _text_box(label: str, value: str, lines: int = 2, name: str | None = None) -> gr.Textbox:
    return gr.Textbox(value, label=label, lines=lines, max_lines=8, min_width=240, elem_id=name)


def _temperature(label: str, value: float = served.TEMPERATURE, maximum: float = 3) -> gr.Slider:
    return gr.Slider(0, maximum, value, step=0.05, label=label)


def _persistence(model: ServedModel) -> gr.Slider:
    return gr.Slider(0, 1, model.persistence, step=0.05, label="Persistence")


def _new_tokens(model: ServedModel, value: int) -> gr.Slider:
    most = model.max_new_tokens
    return gr.Slider(1, most, min(value, most), step=1, precision=0, label="New tokens")


def _start_and_stop() -> tuple[gr.Button, gr.Button]:
    with gr.Row():
        return gr.Button("Generate", variant="primary"), gr.Button("Stop")


def _note(one: Speaker) -> str:
    return "by name" if one.seed is None else f"seed {one.seed}"


def _names(them: Sequence[Speaker]) -> list[str]:
    return [one.name for one in them]


def _choices(them: Sequence[Speaker], *selected: Any) -> list[Any]:
    """The new individual is offered and selected, in addition to others where many can be."""
    names = _names(them)
    return [
        gr.update(choices=names, value=[*one, names[-1]] if isinstance(one, list) else names[-1])
        for one in selected
    ]


def _cancel(button: gr.Button, running: Sequence[Any], output: gr.HTML) -> None:
    """Stop generation; the text stays, without its cursor."""
    wait = f"await new Promise(done => setTimeout(done, {STOP_MS}));"
    end = f"async html => {{ {wait} return html.replaceAll({json.dumps(rendering.CURSOR)}, ''); }}"
    button.click(None, cancels=list(running)).then(None, output, output, js=end)


def _growing_cards(
    titles: Sequence[tuple[str, str, str]], stream: Iterator[list[str]]
) -> Iterator[str]:
    """Cards with titles, notes and prompts, while their texts grow."""
    cards: list[rendering.Card] = []
    for texts in itertools.chain([[""] * len(titles)], stream):
        cards = [(*title, text) for title, text in zip(titles, texts, strict=True)]
        yield rendering.cards(cards, is_done=False)
    yield rendering.cards(cards, is_done=True)
