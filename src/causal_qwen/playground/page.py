"""Page: five tabs. What is shown and which function answers; nothing is computed here."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
import traceback
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import gradio as gr

from causal_qwen.individuals.individual import Individual
from causal_qwen.playground import inside, oracles, people, pictures, voices, wording, worlds
from causal_qwen.playground.limits import (
    NEW_TOKENS,
    PROMPT_LETTERS,
    PROMPTS,
    check_prompt,
    check_prompts,
)
from causal_qwen.playground.oracles import Oracle, Sweep
from causal_qwen.playground.studio import Studio
from causal_qwen.playground.wording import Dial
from causal_qwen.text.segmentation import INCOMPLETE

Curve = tuple[tuple[str, int], Sweep]  # of a text but for one number, and which

TITLE = "CausalQwen playground"
PROMPT = "The old lighthouse keeper opened the door and"
OTHER_PROMPTS = "The young mayor opened the letter and\nThe best way to learn is to"
LAST_WORD_MS = 500  # what was under way when somebody pressed Stop has arrived
KING = "The king's daughter had 7 horses and"
SAMPLING, COMPATIBLE = 20.0, 0.7  # temperatures at which these two are lively and fluent
EMPTY_SPEAK = "What the four modes say of the prompt stands here, word by word."
EMPTY_PEOPLE = "What they say stands here, word by word."
EMPTY_WORLDS = "Both worlds stand here: what is said of the text as it is, and after the change."
EMPTY_INSIDE = "Click a token to see how it was chosen."
EMPTY_NUMBERS = "Write a text that ends where a number would stand, and press Predict."
CLICKED = """
// a click on a token says which one
element.addEventListener('click', event => {
  const button = event.target.closest('button[data-place]');
  if (!button) return;
  window.clicked = Number(button.dataset.place);
  trigger('select');
});
"""
ASKED, ANSWER = "asked", "answer"
WRITTEN = f"""
// a text is changed by hand: typed, pasted, deleted or composed; Gradio tells of typed keys only
document.addEventListener('input', event => {{
  if (!event.target.closest('#{ASKED}')) return;
  for (const old of document.querySelectorAll('.{ANSWER} .cq')) old.classList.add('stale');
  setTimeout(() => trigger('edit'));
}});
"""
DRAGGED = """
// a number that is dragged, or moved by keys, says which one it is and what it is now
const PIXELS = 320;  // from one end to the other
let held = null;
const numberAt = event => event.target.closest('[data-place]');
const read = number => Object.fromEntries(
  ['low', 'high', 'step', 'value'].map(name => [name, Number(number.dataset[name])]));
const move = (number, wanted) => {
  const {low, high, step, value} = read(number);
  const near = low + Math.round((wanted - low) / step) * step;
  const now = Number(Math.min(Math.max(near, low), high).toPrecision(12));
  if (now === value) return;
  number.dataset.value = number.textContent = now;
  number.setAttribute('aria-valuenow', now);
  window.dragged = [Number(number.dataset.place), now];
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
# An event that waits loses its data, but is asked for its inputs when its turn has come.
LAST_INPUT = "(...inputs) => [...inputs.slice(0, -1), window.{}]"
LOOK = {
    "css": pictures.CSS
    + """
.gradio-container { width: 100%; max-width: 72rem !important; margin: 0 auto; }
.tab-wrapper button.selected { color: var(--primary-700); }
.dark .tab-wrapper button.selected { color: var(--primary-300); }
.min_value, .max_value, ::placeholder {
  color: color-mix(in srgb, var(--body-text-color) 68%, transparent) !important; }
/* all five tabs on a phone, instead of some in a menu */
@media (max-width: 30rem) { .tab-wrapper button { padding: 0 .2rem; font-size: .75rem; } }
"""
}


def build(studio: Studio) -> gr.Blocks:
    """The whole page for one model; every visitor has a list of people of their own."""
    with gr.Blocks(title=TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.Markdown(
            "# CausalQwen\nA language model that decides like an individual: it first infers *who "
            f"is speaking*, U, then what this individual says. Model: `{studio.name}`."
        )
        mine = gr.State(people.meet(studio.model))
        with gr.Tabs():
            with gr.Tab("Speak", id="speak"):
                _speak(studio)
            with gr.Tab("Individuals", id="individuals"):
                choices = _individuals(studio, mine)
            with gr.Tab("Counterfactual", id="counterfactual"):
                choices.append(_counterfactual(studio, mine))
            with gr.Tab("Numbers", id="numbers") as numbers:
                _numbers(studio, numbers)
            with gr.Tab("Inside", id="inside"):
                _inside(studio)
        mine.change(_choices, [mine, *choices], choices)
    page.queue(default_concurrency_limit=None)  # the studio has a door of its own
    return page


def polite(handler: Callable[..., Any]) -> Callable[..., Any]:
    """What a visitor got wrong is told in a sentence; the page stays as it was."""
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def stream(*arguments: Any) -> Iterator[Any]:
            try:
                yield from handler(*arguments)
            except Exception as error:
                _tell(error)
            yield gr.skip()  # the last one is sent twice: it must not undo what was typed meanwhile

        return stream

    @functools.wraps(handler)
    def answer(*arguments: Any) -> Any:
        try:
            return handler(*arguments)
        except Exception as error:
            _tell(error)
            return gr.skip()

    return answer


def _tell(error: Exception) -> None:
    if isinstance(error, ValueError | OSError):
        sentence = str(error)
    else:  # nobody's fault but ours
        traceback.print_exception(error)
        sentence = f"That went wrong ({type(error).__name__}); the terminal of the page says where."
    gr.Warning(escape(sentence, quote=False))


def served(studio: Studio, outputs: int = 0) -> Callable[..., Callable[..., Any]]:
    """A generator that waits for its turn with the model; with `outputs`, the first says so."""

    def decorate(handler: Callable[..., Iterator[Any]]) -> Callable[..., Any]:
        @polite
        @functools.wraps(handler)
        def stream(*arguments: Any) -> Iterator[Any]:
            with studio.door.enter() as ask:
                while before := ask():
                    if outputs:
                        waiting = pictures.note(f"Waiting: {before} before you ...")
                        yield waiting if outputs == 1 else (waiting, *[gr.skip()] * (outputs - 1))
                yield from handler(*arguments)

        return stream

    return decorate


# ---------------------------------------------------------------- the five tabs


def _speak(studio: Studio) -> None:
    prompt = _text("Prompt", PROMPT)
    with gr.Row():
        start = gr.Button("Speak", variant="primary")
        stop = gr.Button("Stop")
    with gr.Accordion("Temperature, truncation, seed", open=False):
        with gr.Row():
            sampling = gr.Slider(0, 50, SAMPLING, step=0.5, label="Temperature of sampling")
            causal = gr.Slider(0, 12, people.TEMPERATURE, step=0.1, label="Temperature of causal")
            compatible = gr.Slider(0, 2, COMPATIBLE, step=0.05, label="Temperature of compatible")
        with gr.Row():
            truncation = _truncation()
            seed = gr.Textbox("1", label="Seed: who speaks", min_width=120)
            tokens = _tokens(30)
    said = gr.HTML(pictures.note(EMPTY_SPEAK), label="Four modes")

    @served(studio, outputs=1)
    def run(
        text: str, hot: float, warm: float, soft: float, cut: float, who: str, n: int
    ) -> Iterator[str]:
        text = studio.worker.do(check_prompt, text, studio.processor)
        modes = voices.four_modes(hot, warm, soft, cut, people.seed_of(who))
        streams = [
            voices.speak(studio.model, studio.processor, [text], n, mode.seed, **mode.options)
            for mode in modes
        ]
        titles = [(mode.title, mode.note, text) for mode in modes]
        yield from _growing(titles, studio.worker.each(voices.take_turns(streams)))

    settings = [prompt, sampling, causal, compatible, truncation, seed, tokens]
    _stops(stop, [trigger(run, settings, said) for trigger in (start.click, prompt.submit)], said)


def _individuals(studio: Studio, mine: gr.State) -> list[Any]:
    """-> the boxes in which an individual is chosen"""
    first = people.meet(studio.model)
    table = gr.HTML(pictures.people_table(first))
    with gr.Row():
        with gr.Column():
            gr.Markdown("### Draw somebody")
            with gr.Row():
                name = gr.Textbox(label="Name", placeholder="Dora", min_width=120)
                seed = gr.Textbox(label="Seed", placeholder="anybody", min_width=120)
            with gr.Row():
                heat = gr.Slider(0, 12, people.TEMPERATURE, step=0.1, label="Temperature")
                cut = _truncation()
            draw = gr.Button("Draw", variant="primary")
        with gr.Column():
            gr.Markdown("### Save and reload")
            saved = _who(first, "Whom to save")
            with gr.Row():
                save = gr.DownloadButton("Save to a file", value=studio.keep(first[0]))
                load = gr.UploadButton("Reload from a file", file_types=[people.SUFFIX])
    tokens = _tokens(24)
    with gr.Row():
        with gr.Column():
            gr.Markdown("### One individual, many prompts")
            one = _who(first, "Individual")
            prompts = _text(f"Prompts, one on each line, up to {PROMPTS}", OTHER_PROMPTS, lines=3)
            ask_one = gr.Button("Let one speak", variant="primary")
        with gr.Column():
            gr.Markdown("### Many individuals, one prompt")
            many = gr.CheckboxGroup(
                people.names(first), value=people.names(first), label="Individuals"
            )
            prompt = _text("Prompt", PROMPT)
            ask_many = gr.Button("Let many speak", variant="primary")
    stop = gr.Button("Stop them")
    said = gr.HTML(pictures.note(EMPTY_PEOPLE), label="What they say")

    @polite
    def on_draw(
        them: list[Individual], called: str, number: str, warm: float, truncation: float
    ) -> tuple[Any, ...]:
        them = people.draw(them, studio.model, called.strip(), number, warm, truncation)
        return them, pictures.people_table(them), "", ""

    @polite
    def on_load(them: list[Individual], path: str) -> tuple[Any, ...]:
        them = people.bring(them, path, studio.model)
        return them, pictures.people_table(them)

    @polite
    def on_save(them: list[Individual], who: str) -> str:
        return studio.keep(people.find(them, who))

    @served(studio, outputs=1)
    def run_one(them: list[Individual], who: str, lines: str, n: int) -> Iterator[str]:
        texts = studio.worker.do(check_prompts, lines, studio.processor)
        someone = people.find(them, who)
        yield from run([someone] * len(texts), texts, n)

    @served(studio, outputs=1)
    def run_many(them: list[Individual], chosen: list[str], text: str, n: int) -> Iterator[str]:
        text = studio.worker.do(check_prompt, text, studio.processor)
        if not chosen:
            raise ValueError("Nobody is chosen; tick at least one individual.")
        everybody = [people.find(them, who) for who in chosen]
        yield from run(everybody, [text] * len(everybody), n)

    def run(speakers: list[Individual], texts: list[str], n: int) -> Iterator[str]:
        titles = [
            (str(one.name), _seed_of(one), text) for one, text in zip(speakers, texts, strict=True)
        ]
        options = voices.one_speaker(speakers)
        stream = voices.speak(studio.model, studio.processor, texts, n, **options)
        yield from _growing(titles, studio.worker.each(stream))

    for trigger in (draw.click, name.submit, seed.submit):
        trigger(on_draw, [mine, name, seed, heat, cut], [mine, table, name, seed])
    load.upload(on_load, [mine, load], [mine, table])
    saved.change(on_save, [mine, saved], save, show_progress="hidden")
    running = [
        ask_one.click(run_one, [mine, one, prompts, tokens], said),
        ask_many.click(run_many, [mine, many, prompt, tokens], said),
    ]
    _stops(stop, running, said)
    return [saved, one, many]


def _counterfactual(studio: Studio, mine: gr.State) -> Any:
    """-> the box in which an individual is chosen"""
    prompt = _text("What was said first", KING)
    with gr.Row():
        who = _who(people.meet(studio.model), "Who goes on")
        kind = gr.Radio(list(worlds.KINDS), value=worlds.KINDS[0], label="Change")
    with gr.Row() as words:
        word = gr.Textbox("daughter", label="This word, of the prompt or of what is said")
        other_word = gr.Textbox("son", label="into")
    with gr.Row(visible=False) as numbers:
        place = _number_box(KING)
        value = gr.Textbox("12", label="into")
    with gr.Row(visible=False) as beginnings:
        other_prompt = _text("into", "The queen's dog had 7 puppies and")
    tokens = _tokens(16)
    imagine = gr.Button("Imagine", variant="primary")
    shown = gr.HTML(pictures.note(EMPTY_WORLDS), label="Two worlds")

    @served(studio, outputs=1)
    def run(
        them: list[Individual],
        text: str,
        called: str,
        change: str,
        old: str,
        new: str,
        at: int | None,
        number: str,
        instead: str,
        n: int,
    ) -> Iterator[str]:
        yield pictures.two_worlds(
            studio.worker.do(
                worlds.imagine,
                studio.model,
                studio.processor,
                people.find(them, called),
                text,
                change,
                word=old,
                other_word=new,
                place=int(at or 0),
                number=number,
                other_prompt=instead,
                max_new_tokens=n,
            )
        )

    kind.change(
        lambda change: [gr.update(visible=change == one) for one in worlds.KINDS],
        kind,
        [words, numbers, beginnings],
        show_progress="hidden",
    )
    prompt.change(_number_box, [prompt, place], place, show_progress="hidden")
    fields = [mine, prompt, who, kind, word, other_word, place, value, other_prompt, tokens]
    for trigger in (imagine.click, prompt.submit, word.submit, other_word.submit, value.submit):
        trigger(run, fields, shown)
    return who


def _numbers(studio: Studio, tab: gr.Tab) -> None:
    note = gr.HTML()
    text = _text("A text that asks for a number", "", lines=3, name=ASKED)
    ask = gr.Button("Predict", variant="primary")
    sentence = gr.HTML(js_on_load=WRITTEN + DRAGGED)
    with gr.Row():
        with gr.Column(min_width=300):
            picture = gr.HTML(label="Prediction", elem_classes=ANSWER)
        with gr.Column(min_width=300):
            moved = gr.HTML(label="While it is dragged", elem_classes=ANSWER)
    with gr.Accordion("Ask somebody else", open=False):
        path = gr.Textbox(
            label="A regressor of yours",
            placeholder="the directory that causal-qwen fit has written, on this machine",
        )
        with gr.Row():
            load = gr.Button("Ask this regressor")
            own = gr.Button("Ask the model itself")
            irises = gr.Button("Ask about irises")
    key = gr.State(oracles.IRISES)  # whom this visitor asks
    dials = gr.State([])  # how far every number of the sentence can be dragged
    curve: gr.State = gr.State(None)  # of which text and number, and their sweep
    dragged = gr.JSON(visible=False)  # a place and its value now, told by the browser
    turns = itertools.count()

    def lay_out(words: str) -> tuple[str, list[Dial]]:
        """The sentence whose numbers can be dragged, drawn anew even if it was the same before."""
        words = words[:PROMPT_LETTERS]  # as much as can be asked
        rulers = wording.dials_of(words)
        return pictures.sentence(words, rulers, next(turns)), rulers

    def show(oracle: Oracle, words: str) -> Iterator[tuple[Any, ...]]:
        """Everything below a text that somebody wrote; its last number is tried out."""
        words = studio.worker.do(check_prompt, words, studio.processor)
        found = studio.worker.do(oracle.forecast, words)
        drawn, rulers = lay_out(words)
        shown = pictures.forecast_picture(oracle.name, found)
        if not rulers:
            yield drawn, rulers, shown, "", None
            return
        yield drawn, rulers, shown, gr.skip(), None
        place, (_, now) = len(rulers) - 1, wording.numbers_of(words)[-1]
        tried = try_out(oracle, words, place, rulers[place])
        swept = pictures.sweep_picture(tried[1], place, now, found.median)
        yield *[gr.skip()] * 3, swept, tried  # another sentence may have been typed meanwhile

    def try_out(oracle: Oracle, words: str, place: int, ruler: Dial) -> Curve:
        return rest_of(words, place), studio.worker.do(oracle.sweep, words, place, ruler)

    def rest_of(words: str, place: int) -> tuple[str, int]:
        """What stays while a number is dragged."""
        return wording.change_number(words, place, 0.0), place

    @served(studio, outputs=7)
    def on_open(asked: str, words: str) -> Iterator[Any]:
        if words or asked != oracles.IRISES:
            return
        for news in studio.learn_flowers():
            if isinstance(news, Oracle):
                yield from introduce(news)
            else:
                done = f"Learning from real flowers: {news[0]} of {news[1]} read ..."
                yield pictures.note(done), *[gr.skip()] * 6

    def introduce(oracle: Oracle) -> Iterator[tuple[Any, ...]]:
        """Who is asked now, with a text to begin with if there is one."""
        about = pictures.note(oracle.note)
        if not oracle.example:
            yield about, "", *lay_out(""), pictures.note(EMPTY_NUMBERS), "", None
            return
        example: Any = oracle.example
        for rest in show(oracle, oracle.example):
            yield about, example, *rest
            example = gr.skip()  # it is the visitor's to write in

    @served(studio)
    def on_ask(asked: str, words: str) -> Iterator[tuple[Any, ...]]:
        yield from show(studio.oracle(asked), words)

    @served(studio)
    def on_drag(
        asked: str, words: str, rulers: list[Dial], tried: Curve | None, now: tuple[int, float]
    ) -> Iterator[tuple[Any, ...]]:
        oracle, (place, value) = studio.oracle(asked), now
        words = wording.change_number(words, place, value)
        found = studio.worker.do(oracle.forecast, words)
        news = [words, pictures.forecast_picture(oracle.name, found)]
        if tried is None or tried[0] != rest_of(words, place):
            yield *news, gr.skip(), tried
            tried = try_out(oracle, words, place, rulers[place])
            news = [gr.skip()] * 2  # the text may have been typed in meanwhile
        yield *news, pictures.sweep_picture(tried[1], place, value, found.median), tried

    @served(studio)
    def on_load(directory: str) -> Iterator[tuple[Any, ...]]:
        for shown in introduce(studio.open_regressor(directory.strip())):
            yield directory.strip(), *shown

    @served(studio)
    def on_turn(to: str) -> Iterator[tuple[Any, ...]]:
        for shown in introduce(studio.oracle(to)):
            yield to, *shown

    below = [sentence, dials, picture, moved, curve]
    tab.select(on_open, [key, text], [note, text, *below], show_progress="hidden")
    sentence.edit(
        lay_out, text, [sentence, dials], show_progress="hidden", trigger_mode="always_last"
    )
    for trigger in (ask.click, text.submit):
        trigger(on_ask, [key, text], below)
    sentence.input(
        on_drag,
        [key, text, dials, curve, dragged],
        [text, picture, moved, curve],
        js=LAST_INPUT.format("dragged"),
        show_progress="hidden",
        trigger_mode="always_last",
    )
    everything = [key, note, text, *below]
    for trigger in (load.click, path.submit):
        trigger(on_load, path, everything)
    own.click(on_turn, gr.State(oracles.OWN), everything)
    irises.click(on_turn, gr.State(oracles.IRISES), everything)


def _inside(studio: Studio) -> None:
    text = _text("Text", PROMPT)
    cut = gr.Button("Show its tokens", variant="primary")
    tokens = gr.HTML(
        pictures.token_buttons(inside.tokens_of(studio.model, studio.processor, PROMPT)),
        js_on_load=CLICKED,
    )
    shown = gr.HTML(pictures.note(EMPTY_INSIDE))
    cut_text = gr.State(PROMPT)  # whose tokens are shown
    clicked = gr.JSON(visible=False)  # the place of a token, told by the browser

    @polite
    def on_cut(sentence: str) -> tuple[str, str, str]:
        sentence = studio.worker.do(check_prompt, sentence, studio.processor)
        return buttons(sentence), sentence, pictures.note(EMPTY_INSIDE)

    @served(studio)
    def on_click(sentence: str, place: int) -> Iterator[tuple[str, str]]:
        found = studio.worker.do(
            inside.look, studio.model, studio.processor, sentence, place, studio.usual
        )
        yield buttons(sentence, place), pictures.anatomy(found)

    def buttons(sentence: str, pressed: int | None = None) -> str:
        found = studio.worker.do(inside.tokens_of, studio.model, studio.processor, sentence)
        return pictures.token_buttons(found, pressed)

    for trigger in (cut.click, text.submit):
        trigger(on_cut, text, [tokens, cut_text, shown])
    tokens.select(
        on_click,
        [cut_text, clicked],
        [tokens, shown],
        js=LAST_INPUT.format("clicked"),
        show_progress="minimal",
        trigger_mode="always_last",
    )


# ---------------------------------------------------------------- pieces


def _text(label: str, value: str, lines: int = 2, name: str | None = None) -> gr.Textbox:
    return gr.Textbox(value, label=label, lines=lines, max_lines=8, min_width=240, elem_id=name)


def _stops(button: gr.Button, running: Sequence[Any], said: gr.HTML) -> None:
    """Nobody says more; what was said stays, without the sign that more comes."""
    wait = f"await new Promise(done => setTimeout(done, {LAST_WORD_MS}));"
    end = f"async html => {{ {wait} return html.replaceAll({json.dumps(pictures.CURSOR)}, ''); }}"
    button.click(None, cancels=list(running)).then(None, said, said, js=end)


def _tokens(value: int) -> gr.Slider:
    return gr.Slider(1, NEW_TOKENS, value, step=1, precision=0, label="New tokens")


def _truncation() -> gr.Slider:
    return gr.Slider(0, 1, people.TRUNCATION, step=0.01, label="Truncation: least likelihood")


def _who(them: Sequence[Individual], label: str) -> gr.Dropdown:
    return gr.Dropdown(people.names(them), value=people.names(them)[0], label=label)


def _choices(them: Sequence[Individual], *chosen: Any) -> list[Any]:
    """Boxes with everybody who is there: the newest is chosen, beside others where many can be."""
    names = people.names(them)
    return [
        gr.update(choices=names, value=[*one, names[-1]] if isinstance(one, list) else names[-1])
        for one in chosen
    ]


def _number_box(text: str, chosen: int | None = None) -> gr.Dropdown:
    """The numbers of a text, to choose one; the chosen one stays if it is still there."""
    found = [
        (f"{surface} (number {place + 1})", place)
        for place, (surface, _) in enumerate(wording.numbers_of(text))
    ]
    value = min(chosen or 0, len(found) - 1) if found else None
    return gr.Dropdown(found, value=value, label="This number of the text", min_width=240)


def _seed_of(someone: Individual) -> str:
    return "from a file" if someone.seed is None else f"individual {someone.seed}"


def _growing(titles: Sequence[tuple[str, str, str]], streams: Iterator[list[str]]) -> Iterator[str]:
    """Cards with titles, notes and prompts, while their texts grow."""
    said = [(*title, "") for title in titles]
    yield pictures.cards(said, is_done=False)
    for texts in streams:
        wholes = [text.rstrip(INCOMPLETE) for text in texts]
        said = [(*title, whole) for title, whole in zip(titles, wholes, strict=True)]
        yield pictures.cards(said, is_done=False)
    yield pictures.cards(said, is_done=True)
