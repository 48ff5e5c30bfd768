"""Counterfactual: the same individual in another world.

    counterfactual(model, "The king's daughter", individual, "The king's son")

The factual world is what the individual says of the text as it is; the counterfactual world is
what the *same* individual says after an edit: another prompt, one other token, another number,
another model. What is held fixed between the worlds has a name:

    pearl   all noise. u = loc_U + T kappa scale_U t with the same t (and the same exogenous
            noise, if `exogenous` asks for any): a no-op edit changes nothing.
    disco   the individual only. u = loc_U + T kappa (scale_U t + b eps) with the same t, while
            the exogenous noise eps is drawn anew in each world: who somebody is stays, chance
            does not. A no-op edit may change the text, by chance alone.

Stability: where scale_U is constant, T kappa W (scale_U t) does not depend on the context. Then an
alternative that the edit makes relatively less likely under softmax(loc_S) cannot replace the
factual token; `stability_violations` counts how often it does when scales vary.
"""

from __future__ import annotations

import html
import io
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.analysis import gumbel
from causal_qwen.analysis.gumbel import GumbelIndividual
from causal_qwen.analysis.token_sequence import (
    TokenSequence,
    decode_sequence,
    decode_tokens,
    is_number,
    load_processor,
    observe,
    read_tokens,
    show_tokens,
)
from causal_qwen.generation.mixin import INDIVIDUAL_FIELDS
from causal_qwen.generation.streaming import end_ids
from causal_qwen.individuals.individual import Individual
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import field_space
from causal_qwen.options import NOISY_MODES, SEMANTICS, check_choice
from causal_qwen.text.numerals import render

Array = NDArray[np.float64]

TOLERANCE = 1e-4  # differences of scores that rounding can explain
LEVEL = 0.9
ENDS = " (ends here)"
STEPS_SHOWN = 60


@dataclass(frozen=True)
class ChangedPrompt:
    """Another prompt: a text, ids, or what a processor returns."""

    prompt: Any


@dataclass(frozen=True)
class ChangedToken:
    """One other token at a position of the factual text, counted from 0.

    In the prompt, the rest of the prompt stays; in what was said, what follows is said anew.
    `token` is an id, or a text that is one token.
    """

    position: int
    token: int | str


@dataclass(frozen=True)
class ChangedNumber:
    """Another value for the `index`-th number of the factual text, counted from 0.

    The value channel: the token stays `<NUM>`. What the individual said after it is said anew.
    """

    index: int
    value: float


@dataclass(frozen=True)
class OtherModel:
    """Another model: fine-tuned, or with edited weights. The individual stays."""

    model: CausalModel = field(repr=False)


Edit = ChangedPrompt | ChangedToken | ChangedNumber | OtherModel


def parse_edit(
    prompt: str | None = None,
    token: str | None = None,
    number: str | None = None,
    other_model: Any = None,
) -> Edit:
    """The one edit that was written on a command line; token and number as PLACE=NEW."""
    given = {"prompt": prompt, "token": token, "number": number, "other-model": other_model}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) != 1:
        raise ValueError(
            "A counterfactual changes one thing: --prompt, --token, --number or --other-model; "
            f"{len(asked)} were given."
        )
    if prompt is not None:
        return ChangedPrompt(prompt)
    if other_model is not None:
        return OtherModel(other_model)
    written = token if token is not None else number or ""
    place, is_whole, new = written.partition("=")
    if not (is_whole and place.strip().lstrip("-").isdecimal()):
        raise ValueError(f"--{asked[0]} {written!r} is not PLACE=NEW, e.g. 5= never, or 0=12.5.")
    if token is not None:
        return ChangedToken(int(place), new)
    try:
        return ChangedNumber(int(place), float(new))
    except ValueError:
        raise ValueError(f"--number {written!r}: {new!r} is no number.") from None


@dataclass(frozen=True, eq=False)
class World:
    """What was said, and what the model knew before each said token (N of them)."""

    passage: TokenSequence
    start: int  # where the prompt ends
    prompt: str
    text: str  # prompt and all
    tokens: list[str]  # the N said ones
    is_ended: bool  # by its last token
    u: Cauchy = field(repr=False)  # (N, C)
    probability: Array = field(repr=False)  # (N,) P_k of the said token
    log_prob: Array = field(repr=False)  # (N,) log softmax(loc_S) of it
    number: Array = field(repr=False)  # (N, 3) median and 90% interval of the value, if a number

    @property
    def said(self) -> list[int]:
        return self.passage.ids[self.start :].tolist()

    @property
    def spoken(self) -> list[str]:
        """The said tokens as a reader wants them: the end is told in words."""
        return [*self.tokens[:-1], ENDS] if self.is_ended else self.tokens

    def to_dict(self) -> dict[str, Any]:
        return {
            "text": self.text,
            "start": self.start,
            "ids": self.passage.ids.tolist(),
            "values": self.passage.values.tolist(),
            "tokens": self.tokens,
            "probability": self.probability.tolist(),
            "log_prob": self.log_prob.tolist(),
            "number": self.number.tolist(),
        }


class Stability(NamedTuple):
    """Of `steps` compared choices `changed` differ, `violations` of them against the property."""

    steps: int
    changed: int
    violations: int


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """Two worlds side by side, step by step: step i is the i-th said token of each."""

    factual: World
    counterfactual: World
    edit: str
    semantics: str
    individual: Any
    is_text: bool  # else tokens are shown as ids
    forced: int | None  # the step that the edit itself decided
    shift_U: Array = field(repr=False)  # (steps,) how far loc_U moved: the norm of its change
    scale_ratio: Array = field(repr=False)  # (steps,) median of scale_U' / scale_U
    odds: Array = field(repr=False)  # (steps, 2) loc_S of the factual minus the other choice

    @property
    def divergence(self) -> int | None:
        """The first step at which the worlds say something else; None if they never do."""
        pairs = zip(self._said(self.factual), self._said(self.counterfactual), strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        lengths = len(self.factual.tokens), len(self.counterfactual.tokens)
        return min(lengths) if first is None and lengths[0] != lengths[1] else first

    def stability(self, tolerance: float = TOLERANCE) -> Stability:
        """How often an alternative won although the edit made it relatively less likely.

        Each pair of steps is one comparison: contexts may differ by the edit and all it caused.
        A step that the edit itself decided is none.
        """
        steps = len(self.odds)
        is_choice = np.arange(steps) != (-1 if self.forced is None else self.forced)
        said = (np.array(world.said[:steps]) for _, world in self._worlds())
        is_changed = is_choice & np.not_equal(*said)
        is_violation = is_changed & (self.odds[:, 1] - self.odds[:, 0] > tolerance)
        return Stability(*(int(flags.sum()) for flags in (is_choice, is_changed, is_violation)))

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return {
            "edit": self.edit,
            "semantics": self.semantics,
            "individual": repr(self.individual),
            "divergence": self.divergence,
            "factual": self.factual.to_dict(),
            "counterfactual": self.counterfactual.to_dict(),
            "shift_U": self.shift_U.tolist(),
            "scale_ratio": self.scale_ratio.tolist(),
            "stability": self.stability()._asdict(),
        }

    def show(self, console: Any = None) -> None:
        """Print it, coloured on a terminal."""
        from rich.console import Console

        (console or Console()).print(self)

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        texts = Table("", "text", title=self._title(), show_header=False, expand=False)
        for name, world in self._worlds():
            texts.add_row(name, self._coloured(world))
        rows = self._rows()[:STEPS_SHOWN]
        shown = len(HEADINGS) if any(row.cells[-1] for row in rows) else len(HEADINGS) - 1
        steps = Table(*HEADINGS[:shown], caption=self._caption(), title_justify="left")
        for row in rows:
            style = "" if row.is_same else "bold"
            cells = [Text(cell) for cell in row.cells[:shown]]  # no column of values without one
            if not row.is_same:
                cells[1].stylize("red")
                cells[3].stylize("green")
            steps.add_row(*cells, style=style)
        return Group(texts, steps)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, no_color=True)
        console.print(self)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    def to_html(self) -> str:
        """A fragment for notebooks and pages: two texts and a table of steps."""
        texts = "".join(
            f"<tr><th style='text-align:left'>{name}</th>"
            f"<td style='text-align:left'>{self._marked(world)}</td></tr>"
            for name, world in self._worlds()
        )
        heads = "".join(f"<th>{html.escape(heading)}</th>" for heading in HEADINGS)
        rows = []
        for row in self._rows():
            colours = ("", "") if row.is_same else (RED, GREEN)
            styles = ["", colours[0], "", colours[1], *[""] * (len(HEADINGS) - 4)]
            cells = "".join(
                f"<td style='white-space:pre;{style}'>{html.escape(cell)}</td>"
                for cell, style in zip(row.cells, styles, strict=True)
            )
            rows.append(f"<tr>{cells}</tr>")
        return (
            f"<div class='counterfactual'><p><b>{html.escape(self._title())}</b></p>"
            f"<table>{texts}</table><table><thead><tr>{heads}</tr></thead>"
            f"<tbody>{''.join(rows)}</tbody></table><p>{html.escape(self._caption())}</p></div>"
        )

    def _repr_html_(self) -> str:
        return self.to_html()

    def _worlds(self) -> tuple[tuple[str, World], tuple[str, World]]:
        return ("factual", self.factual), ("counterfactual", self.counterfactual)

    def _said(self, world: World) -> list[tuple[int, str]]:
        return list(zip(world.said, world.tokens, strict=True))

    def _title(self) -> str:
        return f"{self.edit} · {self.semantics} · {self.individual!r}"

    def _caption(self) -> str:
        step = self.divergence
        where = "the worlds never diverge" if step is None else f"first divergence at step {step}"
        return f"{where}; ΔU: how far loc_U moved; P: one-vs-rest probability"

    def _parts(self, world: World) -> tuple[str, str, str]:
        """Prompt, what is the same, what is different."""
        step = len(world.tokens) if self.divergence is None else self.divergence
        gap = "" if self.is_text else " "
        prompt, same, other = world.prompt, world.spoken[:step], world.spoken[step:]
        return prompt + gap, gap.join([*same, ""]), gap.join(other)

    def _coloured(self, world: World) -> Any:
        from rich.text import Text

        prompt, same, other = self._parts(world)
        colour = "red" if world is self.factual else "green"
        return Text.assemble((prompt, "dim"), same, (other, f"bold {colour}"))

    def _marked(self, world: World) -> str:
        prompt, same, other = (html.escape(part) for part in self._parts(world))
        colour = RED if world is self.factual else GREEN
        return (
            f"<span style='opacity:.6'>{prompt}</span>{same}<span style='{colour}'>{other}</span>"
        )

    def _rows(self) -> list[_Row]:
        rows = []
        for step in range(max(len(self.factual.tokens), len(self.counterfactual.tokens))):
            cells = [str(step)]
            for _, world in self._worlds():
                is_there = step < len(world.tokens)
                cells.append(repr(world.tokens[step])[1:-1] if is_there else "")
                cells.append(f"{world.probability[step]:.3g}" if is_there else "")
            is_paired = step < len(self.shift_U)
            cells.append(f"{self.shift_U[step]:.3g}" if is_paired else "")
            cells.append(f"{self.scale_ratio[step]:.3g}" if is_paired else "")
            cells.append(self._numbers(step))
            is_same = is_paired and self.factual.said[step] == self.counterfactual.said[step]
            rows.append(_Row(cells, is_same and cells[1] == cells[3]))
        return rows

    def _numbers(self, step: int) -> str:
        """The distributions of the value, where one of the worlds says a number."""
        found = [
            world.number[step]
            for _, world in self._worlds()
            if step < len(world.number) and not np.isnan(world.number[step, 0])
        ]
        shown = [f"{render(m)} ({render(low)} to {render(high)})" for m, low, high in found]
        return " | ".join(shown)


HEADINGS = ("step", "factual", "P", "counterfactual", "P", "ΔU", "scale ratio", "value")
# Grounds, not letters, have the colour, and let the page's own through: readable in the dark, too.
RED, GREEN = (
    f"background:rgba({colour},.3);font-weight:bold" for colour in ("226,72,60", "40,160,90")
)


class _Row(NamedTuple):
    cells: list[str]
    is_same: bool


def counterfactual(
    model: CausalModel,
    text: Any,
    individual: Any,
    edit: Edit | str,
    *,
    semantics: str = "pearl",
    exogenous: int | None = None,
    mode: str = "causal",
    processor: Processor | None = None,
    max_new_tokens: int = 40,
    **options: Any,
) -> Counterfactual:
    """What `individual` says after `text`, and what the same individual says after the edit.

    `text` is a string, ids, or what a processor returns; strings are read by `processor`, by
    default the one that lies beside the model. `individual` is an `Individual`, a seed, e itself,
    or a `GumbelIndividual` for the baseline. `edit` is one of the four edit classes; a string is a
    changed prompt. Fresh noise goes with the steps, not with the positions: a longer prompt does
    not change it. Further options are those of `generate`.
    """
    check_choice("semantics", semantics, SEMANTICS)
    if mode not in NOISY_MODES:
        raise ValueError(f"mode={mode!r} has no individual; choose causal or sampling.")
    is_gumbel = isinstance(individual, GumbelIndividual)
    if semantics == "disco" and (is_gumbel or mode == "sampling"):
        raise ValueError(
            "semantics='disco' redraws the exogenous noise of mode='causal'; Gumbel speakers and "
            "mode='sampling' have no other noise than the one that is kept: use 'pearl'."
        )
    if exogenous is not None and (is_gumbel or mode == "sampling"):
        raise ValueError("exogenous= is the second noise of mode='causal'.")
    if isinstance(edit, str):
        edit = ChangedPrompt(edit)
    if processor is None:
        processor = _find_processor(model, is_needed=_has_text(text, edit))
    prompt = read_tokens(model, text, processor)
    if not is_gumbel:
        individual, options = _settle(model, individual, mode, options)
    seeds = (exogenous, exogenous)
    if semantics == "disco":
        seeds = (exogenous or 0, (exogenous or 0) + 1)

    speech = _Speech(mode, options)
    factual = speech.say(model, prompt, individual, seeds[0], max_new_tokens)
    start = len(prompt.ids)
    other_model, other_start = model, start
    if isinstance(edit, ChangedPrompt):
        begun = read_tokens(model, edit.prompt, processor)
        other_start = len(begun.ids)
        what = f"prompt: {decode_sequence(begun, processor)!r}"
    elif isinstance(edit, OtherModel):
        other_model, begun = edit.model, prompt
        what = f"model: {getattr(edit.model, 'name_or_path', '') or type(edit.model).__name__}"
    else:
        begun, what = _changed(model, factual, start, edit, processor)
    by = other_start - start
    remaining = other_start + max_new_tokens - len(begun.ids)
    other = speech.say(other_model, begun, individual.shift(by), seeds[1], remaining, shift=by)
    return _compare(
        (model, factual, start),
        (other_model, other, other_start),
        what,
        semantics,
        individual,
        processor,
        len(begun.ids) - 1 - other_start if len(begun.ids) > other_start else None,
    )


def stability_violations(*results: Counterfactual, tolerance: float = TOLERANCE) -> Stability:
    """The counts of many counterfactuals together; see `Counterfactual.stability`."""
    counts = np.reshape([result.stability(tolerance) for result in results], (-1, 3))
    return Stability(*counts.sum(0, dtype=int).tolist())


@dataclass(frozen=True)
class _Speech:
    """How both worlds are spoken."""

    mode: str
    options: dict[str, Any]

    def say(
        self,
        model: CausalModel,
        prompt: TokenSequence,
        who: Any,
        exogenous: int | None,
        length: int,
        shift: int = 0,
    ) -> TokenSequence:
        """The prompt and up to `length` tokens more."""
        if length <= 0:
            return prompt
        settings = {
            **prompt.batch(model),
            "max_new_tokens": length,
            "return_dict_in_generate": True,
            **self.options,
        }
        if isinstance(who, GumbelIndividual):
            result = gumbel.generate(model, [who], **settings)
        else:
            if exogenous is not None:
                settings["exogenous"] = Individual.draw(who.size, seed=exogenous, fresh=True).shift(
                    shift
                )
            result = model.generate(causal_mode=self.mode, individual=who, **settings)
        ids = result.sequences[0].cpu()
        values = result.get("numeric_values")
        values = torch.zeros(len(ids)) if values is None else values[0].cpu()
        return TokenSequence(ids, values.double())


def _settle(
    model: CausalModel, individual: Any, mode: str, options: dict[str, Any]
) -> tuple[Individual, dict[str, Any]]:
    """One `Individual`, however it was given, and the options that are not its own."""
    own = {name: options[name] for name in INDIVIDUAL_FIELDS if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in INDIVIDUAL_FIELDS}
    _, sent = model._prepare_generation_config(None, causal_mode=mode, individual=individual, **own)
    speaker = sent["speaker"]
    speaker.meet(1, 1, model.config.causal_size)
    return speaker.people[0], rest


def _find_processor(model: CausalModel, is_needed: bool) -> Any:
    """The model's own; ids can do without, and are then shown as they are."""
    try:
        return load_processor(model)
    except ValueError:
        if is_needed:
            raise
        return None


def _has_text(text: Any, edit: Edit) -> bool:
    inside = edit.prompt if isinstance(edit, ChangedPrompt) else getattr(edit, "token", None)
    return isinstance(text, str) or isinstance(inside, str)


def _changed(
    model: CausalModel,
    factual: TokenSequence,
    start: int,
    edit: ChangedToken | ChangedNumber,
    processor: Processor,
) -> tuple[TokenSequence, str]:
    """The text up to where it must be said anew, changed; and what the change is."""
    number = model.config.num_token_id
    length = len(factual.ids)
    if isinstance(edit, ChangedNumber):
        places = is_number(model, factual.ids).nonzero().flatten().tolist()
        if not 0 <= edit.index < len(places):
            raise ValueError(
                f"number {edit.index} is asked to change, but the text holds {len(places)} "
                'numbers; a text is read with its values by encode_numbers="value".'
            )
        if not np.isfinite(edit.value):
            raise ValueError(f"value={edit.value} is not finite.")
        position, token, value = (
            places[edit.index],
            int(factual.ids[places[edit.index]]),
            edit.value,
        )
        what = f"number {edit.index}: {render(float(factual.values[position]))} -> {render(value)}"
    else:
        position, value = edit.position, 0.0
        if not 0 <= position < length:
            raise ValueError(
                f"position {position} is outside the factual text, which has {length} tokens "
                f"(0 to {length - 1})."
            )
        token = _one_token(model, edit.token, processor)
        if token == number:
            raise ValueError("A token cannot become <NUM> without a value; use ChangedNumber.")
        one = factual.change(position, token)
        (old,), (new,) = (
            show_tokens(
                model,
                TokenSequence(p.ids[position : position + 1], p.values[position : position + 1]),
                processor,
            )
            for p in (factual, one)
        )
        what = f"token {position}: {old!r} -> {new!r}"
    begun = factual.cut(max(start, position + 1)).change(position, token, value)
    return begun, what


def _one_token(model: CausalModel, token: int | str, processor: Processor) -> int:
    if isinstance(token, str):
        ids = read_tokens(model, token, processor, special=False).ids.tolist()
        if len(ids) != 1:
            raise ValueError(f"{token!r} is {len(ids)} tokens; a changed token is one.")
        return int(ids[0])
    if not 0 <= token < model.config.vocab_size:
        raise ValueError(f"token {token} is outside a vocabulary of {model.config.vocab_size}.")
    return int(token)


def _compare(
    one: tuple[Any, TokenSequence, int],
    other: tuple[Any, TokenSequence, int],
    edit: str,
    semantics: str,
    individual: Any,
    processor: Processor,
    forced: int | None,
) -> Counterfactual:
    (factual, loc_S), (counter, other_loc_S) = (_look(*seen, processor) for seen in (one, other))
    steps = min(len(factual.said), len(counter.said))
    if factual.u.loc.shape[-1] != counter.u.loc.shape[-1]:
        raise ValueError("The other model has another latent size: its individuals are others.")
    f, c = (Cauchy(*(x[:steps].double() for x in w.u)) for w in (factual, counter))
    shift = (c.loc - f.loc).norm(dim=-1)
    ratio = (c.scale / f.scale).median(dim=-1).values if steps else torch.zeros(0)
    pair = torch.tensor([factual.said[:steps], counter.said[:steps]])  # (2, steps)
    rows = torch.arange(steps)
    odds = [
        (loc[rows, pair[0]] - loc[rows, pair[1]]).double()
        for loc in (loc_S[:steps], other_loc_S[:steps])
    ]
    return Counterfactual(
        factual,
        counter,
        edit,
        semantics,
        individual,
        processor is not None,
        forced,
        shift.numpy(),
        ratio.double().numpy(),
        torch.stack(odds, dim=-1).numpy(),
    )


@torch.no_grad()
def _look(
    model: CausalModel, passage: TokenSequence, start: int, processor: Processor
) -> tuple[World, Tensor]:
    """The world as the model saw it, and loc_S (N, V)."""
    count = len(passage.ids) - start
    said = TokenSequence(passage.ids[start:], passage.values[start:])
    tokens = decode_tokens(model, said, processor)
    number = np.full((count, 3), np.nan)
    if count:
        output = observe(model, passage, start)
        place = said.ids.unsqueeze(-1).to(output.logits.device)
        p = model.decision(output.s_dist)[0].gather(-1, place).squeeze(-1)
        log_p = output.logits[0].float().log_softmax(-1).gather(-1, place).squeeze(-1)
        if (has_value := is_number(model, said.ids).numpy()).any():
            space, y = field_space(model.config), output.y_dist
            ends = (y.loc, *y.interval(LEVEL))
            columns = [space.clamped(end[0]).cpu().numpy() for end in ends]
            number[has_value] = np.stack(columns, axis=-1)[has_value]
        u = Cauchy(output.loc_U[0].float().cpu(), output.scale_U[0].float().cpu())
        loc_S = output.logits[0].float().cpu()
    else:
        p = log_p = torch.zeros(0)
        u = Cauchy(*[torch.zeros(0, model.config.latent_size)] * 2)
        loc_S = torch.zeros(0, model.config.vocab_size)
    world = World(
        passage,
        start,
        decode_sequence(passage.cut(start), processor),
        decode_sequence(passage, processor),
        tokens,
        count > 0 and int(said.ids[-1]) in end_ids(model),
        u,
        p.double().cpu().numpy(),
        log_p.double().cpu().numpy(),
        number,
    )
    return world, loc_S
