"""Page: the tabs, their components and event handlers. Nothing is computed here.

Does not import torch: the model is its provider's.
"""

from __future__ import annotations

import functools
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from causal_qwen.individuals.individual import Individual
from causal_qwen.playground import individuals, modes, rendering, text_edits, uploads
from causal_qwen.playground.provider import OWN_HEAD, NumberSource, Provider, Sweep
from causal_qwen.playground.text_edits import DragRange
from causal_qwen.text.edits import find_numbers, replace_number
from causal_qwen.text.segmentation import INCOMPLETE

Curve = tuple[tuple[str, int], Sweep]  # the text without one number, its index, and the sweep
Update = dict[Any, Any]  # component -> new value; other outputs stay

TITLE = "CausalQwen playground"
MAX_TEXTS = 12  # generated at once
MAX_PATH = 4096  # characters
KEEP_SECONDS = (600, 3600)  # files are looked at every 10 minutes, deleted after an hour
PROMPT = "The old lighthouse keeper opened the door and"
PROMPTS = f"{PROMPT}\nThe best way to learn is to"
EDITED_PROMPT = "The king's daughter had 7 horses and"
CLICK_HINT = "Click a token to see how it was chosen."
TEXT_HINT = "Write a text that ends before a number, and press Predict."
STOP_MS = 500  # after which no more updates of a stopped stream arrive
TEXT_ID, PREDICTION_CLASS = "number-text", "prediction"
TOKEN_JS = """
element.addEventListener('click', event => {
  const button = event.target.closest('button[data-index]');
  if (!button) return;
  window.clicked = Number(button.dataset.index);
  trigger('select');
});
"""
# The browser's own input event also reports pasted, deleted and composed text; Gradio's does not.
TEXT_JS = f"""
document.addEventListener('input', event => {{
  if (!event.target.closest('#{TEXT_ID}')) return;
  for (const old of document.querySelectorAll('.{PREDICTION_CLASS} .cq'))
    old.classList.add('stale');
  setTimeout(() => trigger('edit'));
}});
"""
DRAG_JS = """
const PIXELS = 320;  // from one end of the range to the other
let held = null;
const numberAt = event => event.target.closest('[data-index]');
const read = number => Object.fromEntries(
  ['index', 'low', 'high', 'step', 'value'].map(name => [name, Number(number.dataset[name])]));
const move = (number, wanted) => {
  const {index, low, high, step, value} = read(number);
  const near = low + Math.round((wanted - low) / step) * step;
  const now = Number(Math.min(Math.max(near, low), high).toPrecision(12));
  if (now === value) return;
  number.dataset.value = number.textContent = now;
  number.setAttribute('aria-valuenow', now);
  window.dragged = [index, now, low, high, step];
  trigger('input');
};
element.addEventListener('pointerdown', event => {
  const number = numberAt(event);
  if (!number) return;
  event.preventDefault();
  number.focus();
  number.setPointerCapture(event.pointerId);
  held = {number, from: event.clientX, value: read(number).value};
});
element.addEventListener('pointermove', event => {
  if (!held) return;
  const {low, high} = read(held.number);
  move(held.number, held.value + (event.clientX - held.from) / PIXELS * (high - low));
});
for (const end of ['pointerup', 'pointercancel']) element.addEventListener(end, () => held = null);
element.addEventListener('keydown', event => {
  const number = numberAt(event);
  if (!number) return;
  const {low, high, step, value} = read(number);
  const stride = Math.max(step, (high - low) / 50);
  const wanted = {
    ArrowLeft: value - stride, ArrowDown: value - stride, Home: low,
    ArrowRight: value + stride, ArrowUp: value + stride, End: high,
  }[event.key];
  if (wanted === undefined) return;
  event.preventDefault();
  move(number, wanted);
});
"""
# Gradio drops the data of a deferred event, but reads its inputs when the event runs.
LAST_INPUT_JS = "(...inputs) => [...inputs.slice(0, -1), window.{}]"
CSS = (
    rendering.CSS
    + """
.gradio-container { width: 100%; max-width: 72rem !important; margin: 0 auto; }
.tab-wrapper button.selected { color: var(--primary-700); }
.dark .tab-wrapper button.selected { color: var(--primary-300); }
.min_value, .max_value, ::placeholder {
  color: color-mix(in srgb, var(--body-text-color) 68%, transparent) !important; }
/* all five tabs on a phone, instead of some in a menu */
@media (max-width: 30rem) { .tab-wrapper button { padding: 0 .1rem; font-size: .7rem; } }
"""
)


def build(state: Provider, files: Path) -> gr.Blocks:
    """The whole page for one model; every visitor has a list of individuals of their own.

    Saved individuals are written to `files`, to be downloaded.
    """
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=KEEP_SECONDS) as page:
        gr.Markdown(
            "# CausalQwen\nA language model that infers an individual, U, from the context and "
            f"then decides what this individual writes. Model: `{state.name}`{state.place}."
        )
        mine = gr.State(state.draw_first())
        choices: list[Any] = []  # components in which an individual is selected
        with gr.Tabs(overflow_behavior="wrap"):  # a menu hides the last on some phones
            for name in state.tabs:
                with gr.Tab(name) as tab:
                    if name == "Generate":
                        _generate_tab(state)
                    elif name == "Individuals":
                        choices += _individuals_tab(state, mine, files)
                    elif name == "Counterfactual":
                        choices.append(_counterfactual_tab(state, mine))
                    elif name == "Numbers":
                        _numbers_tab(state, tab)
                    else:
                        _tokens_tab(state)
        mine.change(_choices, [mine, *choices], choices)
    page.queue(default_concurrency_limit=None)  # the state has an admission queue of its own
    return page


def report_errors(handler: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
    """An error of a handler becomes a message; the page stays as it was."""

    @functools.wraps(handler)
    def stream(*arguments: Any) -> Iterator[Any]:
        try:
            yield from handler(*arguments)
        except CancelledError:
            return  # the server is closing
        except Exception as error:
            message = str(error)
            if not isinstance(error, ValueError | OSError):  # not the visitor's mistake
                traceback.print_exception(error)
                message = f"Internal error ({type(error).__name__}); see the server's terminal."
            gr.Warning(escape(message, quote=False))
        yield gr.skip()  # Gradio sends the last update twice: it must not undo what was typed since

    return stream


def queued(state: Provider, status: gr.HTML | None = None) -> Callable[..., Callable[..., Any]]:
    """A handler that waits for its turn with the model; `status` shows the place in the queue."""

    def decorate(handler: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        @report_errors
        @functools.wraps(handler)
        def stream(*arguments: Any) -> Iterator[Any]:
            with state.queue.enter() as wait:
                while ahead := wait():
                    if status is not None:
                        yield {status: rendering.note(f"Waiting: {ahead} ahead of you ...")}
                yield from handler(*arguments)

        return stream

    return decorate


# ---------------------------------------------------------------- the tabs
# A tab is one function, of more than 60 lines where needed: its handlers share its components.


def _generate_tab(state: Provider) -> None:
    prompt = _text_box("Prompt", PROMPT)
    with gr.Row():
        start = gr.Button("Generate", variant="primary")
        stop = gr.Button("Stop")
    with gr.Accordion("Temperature, persistence, seed, length", open=False):
        with gr.Row():
            sampling = _temperature("Temperature of sampling")
            causal = _temperature("Temperature of causal")
            compatible = _temperature("Temperature of compatible", modes.COMPATIBLE_TEMPERATURE, 2)
        with gr.Row():
            persistence = _persistence(state)
            seed = gr.Textbox("1", label="Individual (seed)", min_width=120)
            tokens = _new_tokens(state, 30)
    output = gr.HTML(rendering.note("The texts of the four modes appear here."), label="Texts")

    @queued(state, output)
    def run(text: str, hot: float, t: float, soft: float, own: float, who: str, n: int) -> Any:
        text = state.check_prompt(text)
        number = individuals.parse_seed(who)
        four = modes.four_modes(hot, t, soft, own, number)
        titles = [(mode.name, mode.note, text) for mode in four]
        yield from _growing_cards(titles, state.stream_modes(text, four, n, number))

    inputs = [prompt, sampling, causal, compatible, persistence, seed, tokens]
    running = [trigger(run, inputs, output) for trigger in (start.click, prompt.submit)]
    _cancel(stop, running, output)


# Long, as the tab: its components, and the handlers that refer to them.
def _individuals_tab(state: Provider, mine: gr.State, files: Path) -> list[Any]:
    """-> the components in which an individual is selected"""
    first = mine.value
    saved_files = files / "saved"
    saved_files.mkdir(exist_ok=True)
    table = gr.HTML(rendering.individuals_table(first))
    with gr.Row():
        with gr.Column():
            gr.Markdown("### Draw an individual")
            with gr.Row():
                name = gr.Textbox(label="Name", placeholder="Dora", min_width=120)
                seed = gr.Textbox(label="Seed", placeholder="random", min_width=120)
            with gr.Row():
                temperature = _temperature("Temperature")
                persistence = _persistence(state)
            draw = gr.Button("Draw", variant="primary")
        with gr.Column():
            gr.Markdown("### Save and load")
            saved = _individual_box(first, "Individual to save")
            with gr.Row():
                save = gr.DownloadButton(
                    "Save to a file", value=individuals.save(first[0], saved_files)
                )
                load = gr.UploadButton("Load from a file", file_types=[individuals.SUFFIX])
    gr.Markdown("### Generate with every selected individual after every prompt")
    names = individuals.names(first)
    speakers = gr.CheckboxGroup(names, value=names, label="Individuals")
    prompts = _text_box(f"Prompts, one per line, up to {text_edits.MAX_PROMPTS}", PROMPTS)
    tokens = _new_tokens(state, 24)
    with gr.Row():
        start = gr.Button("Generate", variant="primary")
        stop = gr.Button("Stop")
    output = gr.HTML(rendering.note("The texts appear here."), label="Texts")

    @report_errors
    def on_draw(them: list[Individual], *fields: Any) -> Iterator[tuple[Any, ...]]:
        yield state.draw(them, *fields), "", ""

    @report_errors
    def on_load(them: list[Individual], path: str | None) -> Iterator[list[Individual]]:
        if not path:
            raise ValueError("No file is uploaded; choose one.")
        try:
            yield state.load(them, path)
        finally:
            if not Path(path).is_relative_to(saved_files):  # which the page itself offers
                uploads.remove(Path(path))

    def on_save(them: list[Individual], selected: str) -> str:
        return individuals.save(individuals.find(them, selected), saved_files)

    @queued(state, output)
    def run(them: list[Individual], selected: list[str], lines: str, n: int) -> Iterator[str]:
        speaking = individuals.select(them, selected)
        texts = state.check_prompts(lines)
        rows = [(one, text) for text in texts for one in speaking]
        if not 0 < len(rows) <= MAX_TEXTS:
            raise ValueError(
                f"{len(speaking)} individuals and {len(texts)} prompts make {len(rows)} texts; "
                f"select 1 to {MAX_TEXTS}."
            )
        who, after = map(list, zip(*rows, strict=True))
        stream = state.stream_individuals(after, who, n)
        titles = [
            (str(x.name), "from a file" if x.seed is None else f"seed {x.seed}", text)
            for x, text in rows
        ]
        yield from _growing_cards(titles, stream)

    for trigger in (draw.click, name.submit, seed.submit):
        trigger(on_draw, [mine, name, seed, temperature, persistence], [mine, name, seed])
    load.upload(on_load, [mine, load], mine)
    saved.change(on_save, [mine, saved], save, show_progress="hidden")
    mine.change(rendering.individuals_table, mine, table)
    running = start.click(run, [mine, speakers, prompts, tokens], output)
    _cancel(stop, [running], output)
    return [saved, speakers]


def _counterfactual_tab(state: Provider, mine: gr.State) -> Any:
    """-> the component in which an individual is selected"""
    prompt = _text_box("Prompt", EDITED_PROMPT)
    with gr.Row():
        speaker = _individual_box(mine.value, "Speaker")
        kinds = text_edits.KINDS
        kind = gr.Radio(list(kinds), value=kinds[0], label="Change")
    with gr.Row() as words:
        word = gr.Textbox("daughter", label="Word to replace, in the prompt or the generated text")
        other_word = gr.Textbox("son", label="Replacement")
    with gr.Row(visible=False) as numbers:
        index = _number_box(EDITED_PROMPT)
        number = gr.Textbox("12", label="Replacement")
    with gr.Row(visible=False) as prompts:
        other_prompt = _text_box("Replacement", "The queen's dog had 7 puppies and")
    tokens = _new_tokens(state, 16)
    compare = gr.Button("Compare", variant="primary")
    hint = "The text of the speaker appears here, before and after the change."
    output = gr.HTML(rendering.note(hint), label="Comparison")
    edit = {
        "word": word,
        "other_word": other_word,
        "index": index,
        "number": number,
        "other_prompt": other_prompt,
        "max_new_tokens": tokens,
    }

    @queued(state, output)
    def run(
        them: list[Individual], name: str, text: str, change: str, *fields: Any
    ) -> Iterator[str]:
        named = dict(zip(edit, fields, strict=True))
        who = individuals.find(them, name)
        yield rendering.comparison(state.compare(who, text, change, **named))

    kind.change(
        lambda change: [gr.update(visible=change == one) for one in kinds],
        kind,
        [words, numbers, prompts],
        show_progress="hidden",
    )
    prompt.change(_number_box, [prompt, index], index, show_progress="hidden")
    for trigger in (compare.click, prompt.submit, word.submit, other_word.submit, number.submit):
        trigger(run, [mine, speaker, prompt, kind, *edit.values()], output)
    return speaker


# Long, as the tab: its components, and the handlers that refer to them.
def _numbers_tab(state: Provider, tab: gr.Tab) -> None:
    versions = itertools.count()

    def draw_text(words: str) -> str:
        return rendering.draggable_text((words or "")[: text_edits.MAX_CHARACTERS], next(versions))

    first = state.start
    example = first.text
    note = gr.HTML(rendering.note(first.note))
    text = _text_box("Text that ends before a number", example, lines=3, name=TEXT_ID)
    predict = gr.Button("Predict", variant="primary")
    sentence = gr.HTML(draw_text(example), js_on_load=TEXT_JS + DRAG_JS)
    with gr.Row():
        with gr.Column(min_width=300):
            picture = gr.HTML(label="Prediction", elem_classes=PREDICTION_CLASS)
        with gr.Column(min_width=300):
            sweep = gr.HTML(label="Prediction for other numbers", elem_classes=PREDICTION_CLASS)
    if state.has_what_if:
        with gr.Accordion("Had the text been different", open=False):
            with gr.Row():
                observed = gr.Textbox(
                    label="Observed value", placeholder="the number seen", scale=1
                )
                other = gr.Textbox(example, label="The same text, edited", scale=4)
            ask = gr.Button("Ask")
            answered = gr.HTML()
    uses = _predictor_choice(state)
    key = gr.State(first.key)  # of the visitor's predictor
    curve: gr.State = gr.State(None)  # the last sweep
    dragged = gr.JSON(visible=False)  # index, value and range, set by the browser

    def show(predictor: NumberSource, words: str | None) -> Iterator[Update]:
        """Everything below the text; then the sweep of its last number."""
        words = state.check_prompt(words)
        found = state.call(predictor.forecast, words)
        drawn = rendering.forecast_picture(predictor.name, found)
        update: Update = {sentence: draw_text(words), picture: drawn, curve: None}
        numbers = find_numbers(words)
        if not numbers:
            yield update | {sweep: ""}
            return
        yield update
        last, drag = len(numbers) - 1, text_edits.drag_range(words, len(numbers) - 1)
        yield show_sweep(predictor, words, last, numbers[-1][1], drag, found.median)

    def show_sweep(
        predictor: NumberSource,
        words: str,
        index: int,
        value: float,
        drag: DragRange,
        median: float,
        known: Curve | None = None,
    ) -> Update:
        if known is None:
            swept = state.call(predictor.sweep, words, index, drag)
            known = (fixed_part(words, index), swept)
        return {sweep: rendering.sweep_picture(known[1], index, value, median), curve: known}

    def fixed_part(words: str, index: int) -> tuple[str, int]:
        """What stays the same while a number is dragged."""
        return replace_number(words, index, 0.0), index

    @queued(state, note)
    def on_open(asked: str) -> Iterator[Update]:
        for progress in state.prepare(asked):
            yield {note: rendering.note(progress)}

    @queued(state)
    def on_predict(asked: str, words: str) -> Iterator[Update]:
        yield from show(state.predictor(asked), words)

    @queued(state)
    def on_first(asked: str, words: str | None, known: Curve | None) -> Iterator[Update]:
        if known is None and (words or "").strip():
            yield from show(state.predictor(asked), words)

    @queued(state)
    def on_drag(asked: str, words: str, known: Curve | None, now: list[float]) -> Iterator[Update]:
        index, value, drag = text_edits.check_drag(now)
        state.check_prompt(words)
        predictor = state.predictor(asked)
        words = replace_number(words, index, value)
        found = state.call(predictor.forecast, words)
        yield {text: words, picture: rendering.forecast_picture(predictor.name, found)}
        if known is not None and known[0] != fixed_part(words, index):
            known = None
        yield show_sweep(predictor, words, index, value, drag, found.median, known)

    @queued(state)
    def on_use(asked: str) -> Iterator[Update]:
        """Another predictor, with its example; a directory is read anew."""
        asked = text_edits.check_length("directory", (asked or "").strip(), MAX_PATH)
        predictor = state.predictor(asked, is_new=True)
        yield {key: asked, note: rendering.note(predictor.note), text: predictor.example}
        if predictor.example:
            yield from show(predictor, predictor.example)
        else:
            hint = rendering.note(TEXT_HINT)
            yield {sentence: draw_text(""), picture: hint, sweep: "", curve: None}

    def on_ask(asked: str, words: str, seen: str, edited: str) -> Iterator[str]:
        before, after = (state.check_prompt(one) for one in (words, edited))
        seen = text_edits.check_length("observed value", seen or "", MAX_PATH)
        predictor = state.predictor(asked)
        yield rendering.note(state.call(predictor.what_if, before, seen, after))

    answer = [sentence, picture, sweep, curve]
    if state.has_what_if:
        run_ask = queued(state, answered)(on_ask)
        for trigger in (ask.click, observed.submit, other.submit):
            trigger(run_ask, [key, text, observed, other], answered)
    opened = tab.select(on_open, key, note, show_progress="hidden")
    opened.then(on_first, [key, text, curve], answer, show_progress="hidden")
    sentence.edit(draw_text, text, sentence, show_progress="hidden", trigger_mode="always_last")
    for trigger in (predict.click, text.submit):
        trigger(on_predict, [key, text], answer)
    sentence.input(
        on_drag,
        [key, text, curve, dragged],
        [text, picture, sweep, curve],
        js=LAST_INPUT_JS.format("dragged"),
        show_progress="hidden",
        trigger_mode="always_last",
    )
    for trigger, chosen in uses:
        trigger(on_use, chosen, [key, note, text, *answer])


def _predictor_choice(state: Provider) -> list[tuple[Any, Any]]:
    """-> events by which another predictor is chosen, and the component that holds its key"""
    if state.offered is not None:
        titles = [(title, key) for key, title in state.offered.items()]
        chosen = gr.Radio(titles, value=state.start.key, label="Numbers by")
        return [(chosen.input, chosen)]
    with gr.Accordion("Use another regressor", open=False):
        path = gr.Textbox(
            label="Directory of a saved regressor",
            placeholder="written by causal-qwen fit on this machine",
        )
        with gr.Row():
            load = gr.Button("Load this regressor")
            own_head = gr.Button("Use the model's own number head")
            irises = gr.Button("Use the iris regressor")
    return [
        (load.click, path),
        (path.submit, path),
        (own_head.click, gr.State(OWN_HEAD)),
        (irises.click, gr.State(state.start.key)),
    ]


def _tokens_tab(state: Provider) -> None:
    def buttons(words: str, pressed: int | None = None) -> str:
        return rendering.token_buttons(state.split_tokens(words), pressed)

    text = _text_box("Text", PROMPT)
    show = gr.Button("Show tokens", variant="primary")
    tokens = gr.HTML(buttons(PROMPT), js_on_load=TOKEN_JS)
    output = gr.HTML(rendering.note(CLICK_HINT))
    shown = gr.State(PROMPT)  # the text whose tokens are on the page
    clicked = gr.JSON(visible=False)  # the index of a token, set by the browser

    @report_errors
    def on_show(words: str) -> Iterator[tuple[str, str, str]]:
        words = state.check_prompt(words)
        yield buttons(words), words, rendering.note(CLICK_HINT)

    @queued(state)
    def on_click(words: str, index: Any) -> Iterator[tuple[str, str]]:
        if not isinstance(index, int):
            raise ValueError(CLICK_HINT)
        view = state.explain_token(words, index)
        yield buttons(words, index), rendering.token_view(view)

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


def _temperature(
    label: str, value: float = individuals.TEMPERATURE, maximum: float = 3
) -> gr.Slider:
    return gr.Slider(0, maximum, value, step=0.05, label=label)


def _persistence(state: Provider) -> gr.Slider:
    return gr.Slider(0, 1, state.persistence, step=0.05, label="Persistence")


def _new_tokens(state: Provider, value: int) -> gr.Slider:
    most = state.max_new_tokens
    return gr.Slider(1, most, min(value, most), step=1, precision=0, label="New tokens")


def _individual_box(them: Sequence[Individual], label: str) -> gr.Dropdown:
    names = individuals.names(them)
    return gr.Dropdown(names, value=names[0], label=label)


def _choices(them: Sequence[Individual], *selected: Any) -> list[Any]:
    """The new individual is offered and selected, in addition to others where many can be."""
    names = individuals.names(them)
    return [
        gr.update(choices=names, value=[*one, names[-1]] if isinstance(one, list) else names[-1])
        for one in selected
    ]


def _number_box(text: str, selected: Any = None) -> gr.Dropdown:
    """The numbers of a text; the selected one stays selected if it still exists."""
    found = [
        (f"{surface} (number {index + 1})", index)
        for index, (surface, _) in enumerate(
            find_numbers((text or "")[: text_edits.MAX_CHARACTERS])
        )
    ]
    index = selected if isinstance(selected, int) else 0
    value = min(max(index, 0), len(found) - 1) if found else None
    # The browser may send a selection before it has the choices of a new text: `compare` checks it.
    return gr.Dropdown(
        found, value=value, label="Number to replace", min_width=240, allow_custom_value=True
    )


def _cancel(button: gr.Button, running: Sequence[Any], output: gr.HTML) -> None:
    """Stop generation; the text stays, without its cursor."""
    wait = f"await new Promise(done => setTimeout(done, {STOP_MS}));"
    end = f"async html => {{ {wait} return html.replaceAll({json.dumps(rendering.CURSOR)}, ''); }}"
    button.click(None, cancels=list(running)).then(None, output, output, js=end)


def _growing_cards(
    titles: Sequence[tuple[str, str, str]], stream: Iterator[list[str]]
) -> Iterator[str]:
    """Cards with titles, notes and prompts, while their texts grow."""
    texts = [""] * len(titles)

    def draw(is_done: bool) -> str:
        shown = ((*title, text) for title, text in zip(titles, texts, strict=True))
        return rendering.cards(shown, is_done)

    yield draw(is_done=False)
    for grown in stream:
        texts = [text.rstrip(INCOMPLETE) for text in grown]
        yield draw(is_done=False)
    yield draw(is_done=True)
