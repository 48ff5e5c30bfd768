"""Counterfactual: the same individual in an edited world.

    counterfactual(model, "The king's daughter", individual, "The king's son")

The factual world is the individual's continuation of the text as it is; the counterfactual world
is that of the *same* individual after an edit: another prompt, one other token, another number.
The semantics name what both worlds share:

    pearl   all noise. u = loc_U + T kappa scale_U t with the same t (and the same exogenous
            noise, if `exogenous` is given): an edit that changes nothing changes no token.
    disco   the individual only. u = loc_U + T kappa (scale_U t + b eps) with the same t, while
            the exogenous noise eps is redrawn in each world: an edit that changes nothing may
            still change the text, by chance.
"""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from causal_qwen.analysis import rendering
from causal_qwen.analysis.shares import People
from causal_qwen.analysis.token_sequence import (
    TokenSequence,
    decode_sequence,
    decode_tokens,
    is_number,
    load_processor,
    observe,
    read_tokens,
    shares_at,
    show_tokens,
)
from causal_qwen.decoding.settings import end_ids
from causal_qwen.individuals import OWN_FIELDS, Individual
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import field_space
from causal_qwen.options import NOISY_MODES, SEMANTICS, check_choice
from causal_qwen.terminal import counted, finite

Array = NDArray[np.float64]

# options of `generate` that decide who is a candidate, and how far noise reaches
DECISIVE = ("min_p", "whole_words", "avoid_repeats", "noise_gain", "fresh_noise_gain")
PEOPLE = 256  # whose shares are shown beside the individual's tokens
LEVEL = 0.9


@dataclass(frozen=True)
class ChangedPrompt:
    """Another prompt: a text, ids, or what a processor returns."""

    prompt: Any


@dataclass(frozen=True)
class ChangedToken:
    """One other token at a position of the factual text, counted from 0.

    A change in the prompt keeps the rest of the prompt; a change in the continuation generates
    what follows again. `token` is an id, or a text that is one token.
    """

    position: int
    token: int | str


@dataclass(frozen=True)
class ChangedNumber:
    """Another value for the `index`-th number of the factual text, counted from 0.

    The token stays `<NUM>`; its value changes. The continuation after it is generated again.
    """

    index: int
    value: float


Edit = ChangedPrompt | ChangedToken | ChangedNumber


def is_baseline(individual: Any) -> bool:
    """Another noise to compare individuals with: it has its own `generate(model, ...)`."""
    return hasattr(individual, "generate")


def parse_edit(
    prompt: str | None = None, token: str | None = None, number: str | None = None
) -> Edit:
    """The one edit given on a command line; token and number as POSITION=NEW."""
    given = {"prompt": prompt, "token": token, "number": number}
    asked = [name for name, value in given.items() if value is not None]
    if len(asked) != 1:
        raise ValueError(
            f"Give exactly one of --prompt, --token and --number; {len(asked)} were given."
        )
    if prompt is not None:
        return ChangedPrompt(prompt)
    written = token if token is not None else number or ""
    position, separator, new = written.partition("=")
    if not (separator and position.strip().lstrip("-").isdecimal()):
        raise ValueError(f"--{asked[0]} {written!r} is not POSITION=NEW, e.g. 5= never, or 0=12.5.")
    if token is not None:
        return ChangedToken(int(position), new)
    try:
        return ChangedNumber(int(position), float(new))
    except ValueError:
        raise ValueError(f"--number {written!r}: {new!r} is not a number.") from None


@dataclass(frozen=True, eq=False)
class World:
    """A text, and the model's outputs before each of its N generated tokens."""

    sequence: TokenSequence
    start: int  # the length of the prompt
    prompt: str
    text: str  # prompt included
    tokens: list[str]  # the N generated ones
    is_ended: bool  # the last token ends the text
    u: Cauchy = field(repr=False)  # (N, C)
    probability: Array = field(repr=False)  # (N,) P_k of the generated token
    log_prob: Array = field(repr=False)  # (N,) log softmax(loc_S) of it
    share: Array = field(repr=False)  # (N,) of PEOPLE other individuals who would choose it
    number: Array = field(repr=False)  # (N, 3) median and 90% interval of the value, if a number

    @property
    def new_ids(self) -> list[int]:
        return self.sequence.ids[self.start :].tolist()

    def to_dict(self) -> dict[str, Any]:
        record = {
            "prompt": self.prompt,
            "text": self.text,
            "is_ended": self.is_ended,
            "start": self.start,
            "ids": self.sequence.ids.tolist(),
            "values": self.sequence.values.tolist(),
            "tokens": self.tokens,
            "softmax": np.exp(self.log_prob).tolist(),
            "share": self.share.tolist(),
            "P": self.probability.tolist(),  # one-vs-rest
            "log_prob": self.log_prob.tolist(),
            "number": self.number.tolist(),
        }
        return {name: finite(value) for name, value in record.items()}


@dataclass(frozen=True, eq=False)
class Counterfactual:
    """Two worlds side by side: step i is the i-th generated token of each."""

    factual: World
    counterfactual: World
    edit: str
    semantics: str
    individual: Any
    is_text: bool  # else tokens are shown as ids
    forced: int | None  # the step that the edit itself decided
    shift_U: Array = field(repr=False)  # (steps,) how far loc_U moved: the norm of its change
    scale_ratio: Array = field(repr=False)  # (steps,) median of scale_U' / scale_U

    @property
    def divergence(self) -> int | None:
        """The first step at which the worlds differ; None if they never do."""
        worlds = (self.factual, self.counterfactual)
        pairs = zip(*(zip(w.new_ids, w.tokens, strict=True) for w in worlds), strict=False)
        first = next((i for i, (one, other) in enumerate(pairs) if one != other), None)
        lengths = len(self.factual.tokens), len(self.counterfactual.tokens)
        return min(lengths) if first is None and lengths[0] != lengths[1] else first

    def to_dict(self) -> dict[str, Any]:
        """Everything, for JSON; what is not finite (the number of a word) is None."""
        record = {
            "edit": self.edit,
            "semantics": self.semantics,
            "individual": repr(self.individual),
            "divergence": self.divergence,
            "factual": self.factual.to_dict(),
            "counterfactual": self.counterfactual.to_dict(),
            "shift_U": self.shift_U.tolist(),
            "scale_ratio": self.scale_ratio.tolist(),
        }
        return {name: finite(value) for name, value in record.items()}

    def show(self, console: Any = None) -> None:
        """Print it, coloured on a terminal."""
        from rich.console import Console

        (console or Console()).print(self)

    def __rich__(self) -> Any:
        return rendering.to_rich(self)

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=100, no_color=True)
        console.print(self)
        return str(console.file.getvalue())  # type: ignore[attr-defined]

    def to_html(self) -> str:
        """A fragment for notebooks and pages: two texts and a table of steps."""
        return rendering.to_html(self)

    _repr_html_ = to_html


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
    """The individual's continuation of `text`, and its continuation after the edit.

    `text` is a string, ids, or what a processor returns; `processor` encodes strings, by default
    the one saved with the model. `individual` is an `Individual`, a seed, e itself, or a
    baseline, which chooses tokens in its own way. `edit` is one of the three edit classes; a
    string is a changed prompt. Fresh noise follows the steps, not the positions: a longer prompt
    does not change it. Further options are those of `generate`.
    """
    _check_semantics(semantics, mode, individual, exogenous)
    if isinstance(edit, str):
        edit = ChangedPrompt(edit)
    if processor is None:  # ids need none, and are then shown as ids
        with contextlib.suppress(ValueError):
            processor = load_processor(model)
    prompt = read_tokens(model, text, processor)
    if not is_baseline(individual):
        individual, options = _resolve_individual(model, individual, mode, options)
    seeds = (exogenous, exogenous)
    if semantics == "disco":
        has_chance = exogenous is None and individual.has_chance
        seeds = (None, 0) if has_chance else (exogenous or 0, (exogenous or 0) + 1)

    generate = partial(_generate, model, mode, options)
    factual = generate(prompt, individual, seeds[0], max_new_tokens)
    start = len(prompt.ids)
    other_start = start
    if isinstance(edit, ChangedPrompt):
        edited = read_tokens(model, edit.prompt, processor)
        other_start = len(edited.ids)
        what = f"prompt: {decode_sequence(edited, processor)!r}"
    else:
        if isinstance(edit, ChangedNumber):
            position, changed = _change_number(model, factual, edit)
            which, shown = f"number {edit.index}", "{}"
        else:
            position, changed = edit.position, _change_token(model, factual, edit, processor)
            which, shown = f"token {position}", "{!r}"
        edited = changed.cut(max(start, position + 1))
        old, new = (show_tokens(model, one, processor)[position] for one in (factual, changed))
        what = f"{which}: {shown.format(old)} -> {shown.format(new)}"
    by = other_start - start
    remaining = other_start + max_new_tokens - len(edited.ids)
    other = generate(edited, individual.shift(by), seeds[1], remaining, shift=by)
    decisive = {name: value for name, value in options.items() if name in DECISIVE}
    people = People(model.resolve_settings, model.config.latent_size, PEOPLE, **decisive)
    return _compare(
        _observe_world(model, factual, start, processor, people),
        _observe_world(model, other, other_start, processor, people),
        edit=what,
        semantics=semantics,
        individual=individual,
        is_text=processor is not None,
        forced=len(edited.ids) - 1 - other_start if len(edited.ids) > other_start else None,
    )


def _check_semantics(semantics: str, mode: str, individual: Any, exogenous: int | None) -> None:
    check_choice("semantics", semantics, SEMANTICS)
    if mode not in NOISY_MODES:
        raise ValueError(f"mode={mode!r} has no individual; use 'causal' or 'sampling'.")
    has_chance = mode == "causal" and not is_baseline(individual)
    if not has_chance and (semantics == "disco" or exogenous is not None):
        raise ValueError(
            "semantics='disco' and exogenous= are about the second noise of mode='causal', which "
            "baselines and mode='sampling' do not have: use 'pearl'."
        )


def _generate(
    model: CausalModel,
    mode: str,
    options: dict[str, Any],
    prompt: TokenSequence,
    individual: Any,
    exogenous: int | None,
    length: int,
    shift: int = 0,
) -> TokenSequence:
    """The prompt and up to `length` tokens more."""
    if length <= 0:
        return prompt
    asked = {"max_new_tokens": length, "return_dict_in_generate": True, **options}
    if is_baseline(individual):
        result = individual.generate(model, **prompt.batch(model), **asked)
    else:
        if exogenous is not None:
            source = Individual.draw(individual.size, seed=exogenous, fresh=True)
            asked["exogenous"] = source.shift(shift)
        named = {"causal_mode": mode, "individual": individual}
        result = model.generate(**prompt.batch(model), **named, **asked)
    ids = result.sequences[0].cpu()
    values = result.get("numeric_values")
    values = torch.zeros(len(ids)) if values is None else values[0].cpu()
    return TokenSequence(ids, values.double())


def _resolve_individual(
    model: CausalModel, individual: Any, mode: str, options: dict[str, Any]
) -> tuple[Individual, dict[str, Any]]:
    """One `Individual`, and the options that are not its own."""
    own = {name: options[name] for name in OWN_FIELDS if options.get(name) is not None}
    rest = {name: value for name, value in options.items() if name not in OWN_FIELDS}
    settings = model.resolve_settings(causal_mode=mode, individual=individual, **own)
    return model.decoding_noise(settings).individuals[0], rest


def _change_number(
    model: CausalModel, factual: TokenSequence, edit: ChangedNumber
) -> tuple[int, TokenSequence]:
    """The position of the number, and the changed text."""
    positions = is_number(model, factual.ids).nonzero().flatten().tolist()
    if not 0 <= edit.index < len(positions):
        raise ValueError(
            f"There is no number {edit.index}: the text has {counted(len(positions), 'number')}; "
            'encode it with encode_numbers="value".'
        )
    if not np.isfinite(edit.value):
        raise ValueError(f"value={edit.value} is not finite.")
    position = positions[edit.index]
    return position, factual.change(position, int(factual.ids[position]), edit.value)


def _change_token(
    model: CausalModel, factual: TokenSequence, edit: ChangedToken, processor: Processor | None
) -> TokenSequence:
    """The changed text."""
    length = len(factual.ids)
    if not 0 <= edit.position < length:
        raise ValueError(
            f"position {edit.position} is outside the factual text, which has "
            f"{counted(length, 'token')} (0 to {length - 1})."
        )
    token = _one_token(model, edit.token, processor)
    if token == model.config.num_token_id:
        raise ValueError("A token cannot become <NUM> without a value; use ChangedNumber.")
    return factual.change(edit.position, token)


def _one_token(model: CausalModel, token: int | str, processor: Processor | None) -> int:
    if isinstance(token, str):
        ids = read_tokens(model, token, processor, special=False).ids.tolist()
        if len(ids) != 1:
            raise ValueError(f"{token!r} is {len(ids)} tokens; a changed token is one.")
        return int(ids[0])
    if not 0 <= token < model.config.vocab_size:
        raise ValueError(f"token {token} is outside a vocabulary of {model.config.vocab_size}.")
    return int(token)


def _compare(factual: World, other: World, **fields: Any) -> Counterfactual:
    steps = min(len(factual.new_ids), len(other.new_ids))
    f, c = (Cauchy(*(x[:steps].double() for x in world.u)) for world in (factual, other))
    ratio = (c.scale / f.scale).median(dim=-1).values if steps else torch.zeros(0)
    return Counterfactual(
        factual,
        other,
        **fields,
        shift_U=(c.loc - f.loc).norm(dim=-1).numpy(),
        scale_ratio=ratio.double().numpy(),
    )


@torch.no_grad()
def _observe_world(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    processor: Processor | None,
    people: People,
) -> World:
    """A text with the model's outputs before its generated tokens."""
    count, share = len(sequence.ids) - start, list[float]()
    new = TokenSequence(sequence.ids[start:], sequence.values[start:])
    number = np.full((count, 3), np.nan)
    if count:
        output = observe(model, sequence, start)
        index = new.ids.unsqueeze(-1).to(output.logits.device)
        p = model.decision(output.s_dist)[0].gather(-1, index).squeeze(-1)
        log_p = output.logits[0].float().log_softmax(-1).gather(-1, index).squeeze(-1)
        if (has_value := is_number(model, new.ids).numpy()).any():
            space, y = field_space(model.config), output.y_dist
            ends = (y.loc, *y.interval(LEVEL))
            columns = [space.clamped(end[0]).cpu().numpy() for end in ends]
            number[has_value] = np.stack(columns, axis=-1)[has_value]
        for place, token in enumerate(new.ids.tolist()):
            before = sequence.ids[: start + place]
            share.append(shares_at(model, output, place, before, people).get(token, 0.0))
        u = Cauchy(output.loc_U[0].float().cpu(), output.scale_U[0].float().cpu())
    else:
        p = log_p = torch.zeros(0)
        u = Cauchy(*[torch.zeros(0, model.config.latent_size)] * 2)
    return World(
        sequence,
        start,
        prompt=decode_sequence(sequence.cut(start), processor),
        text=decode_sequence(sequence, processor),
        tokens=decode_tokens(model, new, processor),
        is_ended=count > 0 and int(new.ids[-1]) in end_ids(model),
        u=u,
        probability=p.double().cpu().numpy(),
        log_prob=log_p.double().cpu().numpy(),
        share=np.array(share),
        number=number,
    )
