"""Page: five tabs. What is shown and which function answers; nothing is computed here."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from html import escape
from typing import Any

import gradio as gr

from causal_qwen.individual import Individual
from causal_qwen.playground import inside, oracles, people, pictures, voices, wording, worlds
from causal_qwen.playground.limits import (
    NEW_TOKENS,
    PARALLEL,
    PROMPTS,
    WAITING,
    check_prompt,
    check_prompts,
)
from causal_qwen.playground.oracles import Oracle, Sweep
from causal_qwen.playground.studio import Studio

TITLE = "CausalQwen playground"
PROMPT = "The old lighthouse keeper opened the door and"
OTHER_PROMPTS = "The young mayor opened the letter and\nThe best way to learn is to"
KING = "The king's daughter had 7 horses and"
SAMPLING, COMPATIBLE = 20.0, 0.7  # temperatures at which these two are lively and fluent
CLICKED = (  # a click on a token says which one
    "element.addEventListener('click', event => {"
    " const button = event.target.closest('button[data-place]');"
    " if (button) trigger('select', {index: Number(button.dataset.place)}); });"
)
LOOK = {
    "css": pictures.CSS
    + ".gradio-container { width: 100%; max-width: 72rem !important; margin: 0 auto; }"
    # all five tabs on a phone, instead of some in a menu
    + "@media (max-width: 30rem) { .tab-wrapper button { padding: 0 .2rem; font-size: .75rem; } }"
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
        mine.change(lambda them: [_choice(them, box) for box in choices], mine, choices)
    page.queue(default_concurrency_limit=PARALLEL, max_size=WAITING)
    return page


def polite(handler: Callable[..., Any]) -> Callable[..., Any]:
    """What a visitor got wrong is told in a sentence; the page stays as it was."""
    if inspect.isgeneratorfunction(handler):

        @functools.wraps(handler)
        def stream(*arguments: Any) -> Iterator[Any]:
            try:
                yield from handler(*arguments)
            except (ValueError, OSError) as error:
                gr.Warning(escape(str(error), quote=False))
                yield gr.skip()

        return stream

    @functools.wraps(handler)
    def answer(*arguments: Any) -> Any:
        try:
            return handler(*arguments)
        except (ValueError, OSError) as error:
            gr.Warning(escape(str(error), quote=False))
            return gr.skip()

    return answer


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
            seed = gr.Number(1, label="Seed: who speaks", precision=0, minimum=0)
            tokens = _tokens(30)
    said = gr.HTML(label="Four modes")

    @polite
    def run(
        text: str, hot: float, warm: float, soft: float, cut: float, who: int | None, n: int
    ) -> Iterator[str]:
        text = studio.worker.do(check_prompt, text, studio.processor)
        if who is None:
            raise ValueError("The seed is missing; give a whole number.")
        modes = voices.four_modes(hot, warm, soft, cut, int(who))
        streams = [
            voices.speak(studio.model, studio.processor, [text], n, mode.seed, **mode.options)
            for mode in modes
        ]
        titles = [(mode.title, mode.note, text) for mode in modes]
        yield from _growing(titles, studio.worker.each(voices.take_turns(streams)))

    settings = [prompt, sampling, causal, compatible, truncation, seed, tokens]
    running = [trigger(run, settings, said) for trigger in (start.click, prompt.submit)]
    stop.click(None, cancels=running)


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
    said = gr.HTML(label="What they say")

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

    @polite
    def run_one(them: list[Individual], who: str, lines: str, n: int) -> Iterator[str]:
        texts = studio.worker.do(check_prompts, lines, studio.processor)
        someone = people.find(them, who)
        yield from run([someone] * len(texts), texts, n)

    @polite
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

    draw.click(on_draw, [mine, name, seed, heat, cut], [mine, table, name, seed])
    load.upload(on_load, [mine, load], [mine, table])
    saved.change(on_save, [mine, saved], save, show_progress="hidden")
    ask_one.click(run_one, [mine, one, prompts, tokens], said)
    ask_many.click(run_many, [mine, many, prompt, tokens], said)
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
        value = gr.Number(12, label="into")
    with gr.Row(visible=False) as beginnings:
        other_prompt = _text("into", "The queen's dog had 7 puppies and")
    tokens = _tokens(16)
    imagine = gr.Button("Imagine", variant="primary")
    shown = gr.HTML(label="Two worlds")

    @polite
    def run(
        them: list[Individual],
        text: str,
        called: str,
        change: str,
        old: str,
        new: str,
        at: int | None,
        number: float | None,
        instead: str,
        n: int,
    ) -> str:
        return pictures.two_worlds(
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
                value=number,
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
    prompt.change(_number_box, prompt, place, show_progress="hidden")
    fields = [mine, prompt, who, kind, word, other_word, place, value, other_prompt, tokens]
    imagine.click(run, fields, shown)
    return who


def _numbers(studio: Studio, tab: gr.Tab) -> None:
    note = gr.HTML()
    text = _text("A text that asks for a number", "", lines=3)
    with gr.Row():
        place = _number_box("")
        dial = gr.Slider(0, 1, 0, label="Drag it", interactive=True, min_width=240)
    ask = gr.Button("Predict", variant="primary")
    with gr.Row():
        with gr.Column(min_width=300):
            picture = gr.HTML(label="Prediction")
        with gr.Column(min_width=300):
            moved = gr.HTML(label="While it is dragged")
    with gr.Accordion("Another regressor", open=False):
        path = gr.Textbox(label="Directory that causal-qwen fit has written, on this machine")
        with gr.Row():
            load = gr.Button("Ask this one")
            own = gr.Button("Ask the model's own number head")
    key = gr.State("")  # whom this visitor asks
    curve: gr.State = gr.State(None)

    def show(oracle: Oracle, sentence: str, at: int | None) -> tuple[Any, ...]:
        """Everything below the text, for a text that somebody wrote."""
        sentence = studio.worker.do(check_prompt, sentence, studio.processor)
        found = studio.worker.do(oracle.forecast, sentence)
        picked = pictures.forecast_picture(oracle.name, found)
        values = wording.numbers_of(sentence)
        if not values:
            return _number_box(sentence), gr.update(interactive=False), picked, "", None
        at = min(int(at or 0), len(values) - 1)
        ends, now = wording.dial_of(sentence, at), values[at][1]
        sweep = studio.worker.do(oracle.sweep, sentence, at)
        slider = gr.update(
            minimum=ends.low, maximum=ends.high, step=ends.step, value=now, interactive=True
        )
        drawn = pictures.sweep_picture(sweep, now, found.median)
        return _number_box(sentence, at), slider, picked, drawn, sweep

    def ask_oracle(chosen: str) -> Oracle:
        if chosen:
            return studio.oracle(chosen)
        if studio.flowers is None:
            raise ValueError("The irises are still being learned; wait a moment.")
        return studio.flowers

    @polite
    def on_open(sentence: str) -> Iterator[Any]:
        if sentence:
            return
        for news in studio.learn_flowers():
            if isinstance(news, Oracle):
                rest = show(news, news.example, len(wording.numbers_of(news.example)) - 1)
                yield pictures.note(news.note), news.example, *rest
            else:
                done = f"Learning from real flowers: {news[0]} of {news[1]} read ..."
                yield pictures.note(done), *[gr.skip()] * 6

    @polite
    def on_ask(chosen: str, sentence: str, at: int | None) -> tuple[Any, ...]:
        return show(ask_oracle(chosen), sentence, at)

    @polite
    def on_drag(
        chosen: str, sentence: str, at: int | None, value: float, sweep: Sweep | None
    ) -> tuple[Any, ...]:
        oracle = ask_oracle(chosen)
        sentence = wording.change_number(sentence, int(at or 0), value)
        found = studio.worker.do(oracle.forecast, sentence)
        drawn = "" if sweep is None else pictures.sweep_picture(sweep, value, found.median)
        box = _number_box(sentence, int(at or 0))
        return sentence, box, pictures.forecast_picture(oracle.name, found), drawn

    @polite
    def on_load(directory: str) -> tuple[Any, ...]:
        oracle = studio.oracle(directory.strip())
        return directory.strip(), pictures.note(oracle.note), oracle.example

    @polite
    def on_own() -> tuple[Any, ...]:
        return oracles.OWN, pictures.note(studio.oracle(oracles.OWN).note)

    below = [place, dial, picture, moved, curve]
    tab.select(on_open, text, [note, text, *below], show_progress="hidden")
    for trigger in (ask.click, text.submit, place.input):
        trigger(on_ask, [key, text, place], below)
    dial.input(
        on_drag,
        [key, text, place, dial, curve],
        [text, place, picture, moved],
        show_progress="hidden",
        trigger_mode="always_last",
    )
    load.click(on_load, path, [key, note, text])
    own.click(on_own, None, [key, note])


def _inside(studio: Studio) -> None:
    text = _text("Text", PROMPT)
    cut = gr.Button("Show its tokens", variant="primary")
    tokens = gr.HTML(
        pictures.token_buttons(inside.tokens_of(studio.model, studio.processor, PROMPT)),
        js_on_load=CLICKED,
    )
    shown = gr.HTML(pictures.note("Click a token to see how it was chosen."))
    cut_text = gr.State(PROMPT)  # whose tokens are shown

    @polite
    def on_cut(sentence: str) -> tuple[str, str]:
        sentence = studio.worker.do(check_prompt, sentence, studio.processor)
        return buttons(sentence), sentence

    @polite
    def on_click(sentence: str, event: gr.EventData) -> tuple[str, str]:
        place = int(event.index)
        found = studio.worker.do(
            inside.look, studio.model, studio.processor, sentence, place, studio.usual
        )
        return buttons(sentence, place), pictures.anatomy(found)

    def buttons(sentence: str, pressed: int | None = None) -> str:
        found = studio.worker.do(inside.tokens_of, studio.model, studio.processor, sentence)
        return pictures.token_buttons(found, pressed)

    for trigger in (cut.click, text.submit):
        trigger(on_cut, text, [tokens, cut_text])
    tokens.select(on_click, cut_text, [tokens, shown], show_progress="minimal")


# ---------------------------------------------------------------- pieces


def _text(label: str, value: str, lines: int = 2) -> gr.Textbox:
    return gr.Textbox(value, label=label, lines=lines, max_lines=8, min_width=240)


def _tokens(value: int) -> gr.Slider:
    return gr.Slider(1, NEW_TOKENS, value, step=1, label="New tokens")


def _truncation() -> gr.Slider:
    return gr.Slider(0, 1, people.TRUNCATION, step=0.01, label="Truncation: least likelihood")


def _who(them: Sequence[Individual], label: str) -> gr.Dropdown:
    return gr.Dropdown(people.names(them), value=people.names(them)[0], label=label)


def _choice(them: Sequence[Individual], box: Any) -> Any:
    """The box with everybody who is there; the newest is chosen where only one can be."""
    names = people.names(them)
    return gr.update(choices=names, value=names if isinstance(box, gr.CheckboxGroup) else names[-1])


def _number_box(text: str, chosen: int = 0) -> gr.Dropdown:
    """The numbers of a text, to choose one."""
    found = [
        (f"{surface} (number {place + 1})", place)
        for place, (surface, _) in enumerate(wording.numbers_of(text))
    ]
    value = min(chosen, len(found) - 1) if found else None
    return gr.Dropdown(found, value=value, label="This number of the text", min_width=240)


def _seed_of(someone: Individual) -> str:
    return "from a file" if someone.seed is None else f"individual {someone.seed}"


def _growing(titles: Sequence[tuple[str, str, str]], streams: Iterator[list[str]]) -> Iterator[str]:
    """Cards with titles, notes and prompts, while their texts grow."""
    texts = [""] * len(titles)
    yield pictures.cards([(*title, "") for title in titles], is_done=False)
    for texts in streams:
        yield pictures.cards(
            [(*title, said) for title, said in zip(titles, texts, strict=True)], is_done=False
        )
    yield pictures.cards(
        [(*title, said) for title, said in zip(titles, texts, strict=True)], is_done=True
    )
