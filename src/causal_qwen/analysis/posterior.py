"""Posterior: the individuals that could have written an observed text.

In `causal` mode an observed token y puts linear inequalities on the noise t of the individual,

    (W_y - W_k) (loc_U + T kappa scale_U t) >= C_y - C_k     for every other token k.

Under them t is independent standard Cauchy. One t satisfies the inequalities of all positions.

Few of the V - 1 inequalities of a position are ever active, so they are added when violated:

1. start: the t of least norm under the inequalities found so far (least-distance programming by
   non-negative least squares, which also proves infeasibility), until none is violated;
2. draws: Gibbs steps along coordinates, where t is Cauchy on an interval;
3. check: after every sweep all V tokens are compared; a sweep that violates a new inequality is
   rejected and the inequality added (sweeps are reversible, so the distribution stays the same).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor

from causal_qwen.analysis.token_sequence import (
    TokenSequence,
    cuts_of,
    is_number,
    load_processor,
    observe,
    read_tokens,
    show_tokens,
)
from causal_qwen.decoding.decision import margin
from causal_qwen.decoding.step import Cuts, candidates_along
from causal_qwen.individuals import Individual, from_cauchy, noise_bound
from causal_qwen.modeling.abduction import whole
from causal_qwen.modeling.action import apply_head, head_weight
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.terminal import counted

Array = NDArray[np.float64]

# options of `generate` that inference needs
DECISIVE = ("noise_gain", "fresh_noise_gain", "min_p", "whole_words", "avoid_repeats")
MARGIN = 1e-3  # lead that the observed token must have; rounding of a float32 replay is far smaller
VIOLATIONS_PER_POSITION = 8  # inequalities added at once
MAX_ROUNDS = 400  # of adding inequalities, before the search for a start gives up


@dataclass(frozen=True)
class Posterior:
    """Individuals that could have written a text, or the reason why there are none."""

    individuals: list[Individual]
    success_rate: float  # share of the draws whose replay is the text
    effective_sample_size: float  # median over coordinates
    worst_sample_size: float  # minimum over coordinates
    rejection_rate: float  # share of rejected sweeps
    reason: str = ""  # why the result is empty

    def __bool__(self) -> bool:
        return bool(self.individuals)

    def __repr__(self) -> str:
        if not self:
            return f"Posterior(empty: {self.reason})"
        return (
            f"Posterior({counted(len(self.individuals), 'individual')}, "
            f"{self.success_rate:.0%} replay the text, effective sample size "
            f"{self.effective_sample_size:.1f} (worst coordinate {self.worst_sample_size:.1f}))"
        )


class UnreachableError(ValueError):
    """No individual satisfies all observations; `places` are the indices of those in conflict."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(f"observations {places} contradict each other")
        self.places = places


class Observation(NamedTuple):
    """One observed token and the constraint that it puts on t."""

    token: int
    loc: Array  # (V,) loc_S - C
    law: Array  # (C,) T kappa scale_U: the displacement of U per unit of t


# ---------------------------------------------------------------- inference


def infer_individual(
    model: CausalModel,
    text: Any,
    *,
    prompt: Any = None,
    n: int = 16,
    seed: int = 0,
    temperature: float | None = None,
    min_density: float | None = None,
    burn_in: int = 50,
    sweeps: int = 5,
    processor: Processor | None = None,
    **options: Any,
) -> Posterior:
    """`n` posterior draws of the individual that wrote `text` after `prompt`, in `causal` mode.

    Without a prompt the first token of the text is given and the others are observed. Persistence
    is 1: the individuals write the text without chance. Draws are `sweeps` sweeps apart, after
    `burn_in` sweeps. `temperature` and `min_density` default to the model's saved ones, as in
    `Individual.draw`. Further options are those of `generate`, e.g. `noise_gain`; pass the same
    ones when the individuals generate again.

    If no individual can write the text, the result is empty and has a `reason`.
    """
    if n < 1 or burn_in < 0 or sweeps < 1:
        raise ValueError(f"n={n}, burn_in={burn_in} and sweeps={sweeps} must be at least 1, 0, 1.")
    if options.get("persistence", 1) != 1:
        raise ValueError("infer_individual explains a text without chance; omit persistence.")
    if processor is None and (isinstance(text, str) or isinstance(prompt, str)):
        processor = load_processor(model)
    sequence, start = _join(model, text, prompt, processor)
    if is_number(model, sequence.ids[start:]).any():
        raise ValueError(
            "infer_individual explains words, and the text has a number that is a value; put it "
            'into the prompt, or encode the text with encode_numbers="text".'
        )
    template = Individual.draw(
        model, seed=0, temperature=temperature, min_density=min_density, persistence=1.0
    )
    decisive = {name: value for name, value in options.items() if name in DECISIVE}
    settings = model.resolve_settings(causal_mode="causal", individual=template, **decisive)
    amplitude = model.decoding_noise(settings).gains.amplitude(template)
    cuts = cuts_of(model, settings)
    observations = _observations(model, sequence, start, amplitude, cuts)

    def nobody(reason: str, indices: list[int]) -> Posterior:
        tokens = show_tokens(model, sequence, processor)
        shown = ", ".join(f"{tokens[start + i]!r} (position {start + i})" for i in indices)
        return Posterior([], 0.0, 0.0, 0.0, 0.0, reason.format(shown))

    if outside := [i for i, one in enumerate(observations) if one.loc[one.token] == -math.inf]:
        return nobody(f"{{}}: not among the candidates at {_limits(cuts)}", outside)
    bound = noise_bound(template.min_density)
    polytope = Polytope(model, observations, bound)
    try:
        inside = polytope.find()
    except UnreachableError as error:
        return nobody(_reason(len(error.places), bound, amplitude), error.places)
    draws, rejected = polytope.sample(inside, n, burn_in, sweeps, np.random.default_rng(seed))
    noise = from_cauchy(draws, template.min_density)  # (n, C)
    individuals = [replace(template, noise=e, seed=None) for e in noise]
    sizes = effective_sample_sizes(noise)
    return Posterior(
        individuals,
        _success(model, sequence, start, individuals, options),
        float(np.median(sizes)),
        float(sizes.min()),
        rejected,
    )


def _join(
    model: CausalModel, text: Any, prompt: Any, processor: Processor | None
) -> tuple[TokenSequence, int]:
    """Prompt and text in one sequence, and the index of the first observed token."""
    sequence, start = read_tokens(model, text, processor, special=prompt is None), 1
    if prompt is not None:
        given = read_tokens(model, prompt, processor)
        start, sequence = len(given.ids), given.then(sequence)
    if start >= len(sequence.ids):
        raise ValueError("A text of one token has no observed token; pass prompt=.")
    return sequence, start


def _observations(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    amplitude: float,
    cuts: Cuts,
) -> list[Observation]:
    output = observe(model, sequence, start)
    scores = output.logits[0].detach().float().cpu()  # (N, V)
    scores = candidates_along(scores, sequence.ids, cuts)  # the others: -inf
    loc = margin(scores, whole(model.decision, "threshold").detach().cpu()).numpy()
    law = amplitude * output.scale_U[0].detach().cpu().numpy().astype(np.float64)
    tokens = sequence.ids[start:].tolist()
    return [Observation(token, loc[i], law[i]) for i, token in enumerate(tokens)]


def _limits(cuts: Cuts) -> str:
    """The limits of the candidates, and how a call goes without them."""
    numbers = {"min_p": cuts.min_p, "avoid_repeats": cuts.n}
    at = [f"{name}={value:g}" for name, value in numbers.items() if value]
    cure = [f"{name}=0" for name, value in numbers.items() if value]
    if cuts.edges is not None and cuts.whole_words:
        at, cure = [*at, "whole_words=True"], [*cure, "whole_words=False"]
    return f"{' and '.join(at)}; pass {', '.join(cure)}"


def _success(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    individuals: list[Individual],
    options: dict[str, Any],
) -> float:
    """The share of individuals whose replay is the text."""
    batch = sequence.cut(start).batch(model)
    arguments = {
        **{name: column.repeat(len(individuals), 1) for name, column in batch.items()},
        "max_new_tokens": len(sequence.ids) - start,
        "return_dict_in_generate": True,
        **options,
    }
    result = model.generate(causal_mode="causal", individual=individuals, **arguments)
    ids = result.sequences.cpu()
    if ids.shape[1] != len(sequence.ids):
        return 0.0
    return float((ids == sequence.ids).all(-1).double().mean())


def _reason(conflicts: int, bound: float, amplitude: float) -> str:
    if amplitude == 0:
        return "without noise (temperature or noise_gain 0) the model does not generate {}"
    limit = "" if bound == math.inf else f" with noise up to {bound:.3g}"
    if conflicts == 1:
        return f"no individual{limit} generates {{}}: another token always scores higher"
    return f"no single individual{limit} generates all of {{}}"


# ---------------------------------------------------------------- inequalities on t


class Polytope:
    """All t that satisfy some observations: rows t >= floor, |t| <= bound.

    Rows are added as they are violated; `_violated` always compares all tokens.
    """

    def __init__(
        self,
        model: CausalModel,
        observations: list[Observation],
        bound: float = math.inf,
        margin: float = MARGIN,
    ) -> None:
        self.model, self.observations = model, observations
        self.bound, self.margin = bound, margin
        size = len(observations[0].law)
        self.rows: Array = np.zeros((0, size))  # (K, C)
        self.floor: Array = np.zeros(0)  # (K,)
        self.row_observations: list[int] = []  # index of the observation of each row
        self.seen: set[tuple[int, int]] = set()  # (observation, token) of each row

    def find(self) -> Array:
        """A t inside, of small norm; raises `UnreachableError` if there is none."""
        t = np.zeros(self.rows.shape[1])
        box: Array = np.zeros((0, len(t)))
        for _ in range(MAX_ROUNDS):
            beyond = np.flatnonzero(np.abs(t) > self.bound)
            found = self._violated(t, 1.5 * self.margin)
            if not found and not len(beyond):
                return t
            self._add_rows(found)
            sides = -np.sign(t[beyond])[:, None] * np.eye(len(t))[beyond]
            box = np.concatenate([box, sides])
            rows = np.concatenate([self.rows, box])
            # twice the margin: the start then has room on the inner side of every row
            floor = np.concatenate([self.floor + self.margin, np.full(len(box), -self.bound)])
            nearest, weights = least_distance(rows, floor)
            if nearest is None:
                active = np.flatnonzero(weights > 1e-9 * weights.max())
                conflict = {
                    self.row_observations[i] for i in active if i < len(self.row_observations)
                }
                raise UnreachableError(sorted(conflict))
            t = nearest
        raise UnreachableError(sorted(set(self.row_observations)))

    def sample(
        self, t: Array, n: int, burn_in: int, sweeps: int, rng: np.random.Generator
    ) -> tuple[Array, float]:
        """`n` draws, `sweeps` sweeps apart after `burn_in`, and the share of rejected sweeps."""
        draws, rejected = [], 0
        total = burn_in + n * sweeps
        for sweep in range(1, total + 1):
            proposal = self._sweep(t.copy(), rng)
            found = self._violated(proposal, self.margin)
            if found:
                rejected += sweep > burn_in
                self._add_rows(found)
            else:
                t = proposal
            if sweep > burn_in and (sweep - burn_in) % sweeps == 0:
                draws.append(t)
        return np.stack(draws), rejected / (n * sweeps)

    def _sweep(self, t: Array, rng: np.random.Generator) -> Array:
        """Gibbs steps along all coordinates in random order: as an order and its reverse are
        equally likely, a sweep is reversible."""
        room = self.rows @ t - self.floor  # (K,) >= 0
        columns = np.ascontiguousarray(self.rows.T)  # (C, K)
        for c in rng.permutation(len(t)):
            step = draw_cauchy(t[c], *_interval(t[c], room, columns[c], self.bound), rng)
            t[c] += step
            room += step * columns[c]
        return t

    def _violated(self, t: Array, margin: float) -> list[tuple[int, int]]:
        """(observation, token) pairs: the tokens that exceed each observed token most."""
        moved = torch.from_numpy(np.stack([one.law * t for one in self.observations]))
        loc = torch.from_numpy(np.stack([one.loc for one in self.observations]))
        observed = torch.tensor([[one.token] for one in self.observations])
        scores = loc + _scores(self.model, moved)  # (N, V)
        excess = scores - scores.gather(-1, observed) + margin
        excess.scatter_(-1, observed, -math.inf)
        worst, tokens = excess.topk(min(VIOLATIONS_PER_POSITION, excess.shape[-1]), dim=-1)
        return [(i, int(tokens[i, rank])) for i, rank in (worst > 0).nonzero().tolist()]

    def _add_rows(self, found: list[tuple[int, int]]) -> None:
        new = [pair for pair in found if pair not in self.seen]
        if not new:
            return
        self.seen.update(new)
        weight = head_weight(self.model.lm_head).detach()
        rows, floor = [], []
        for index, token in new:
            one = self.observations[index]
            lead = (weight[one.token].double() - weight[token].double()).cpu().numpy()
            lead /= self.model.config.logit_divisor
            rows.append(lead * one.law)
            floor.append(one.loc[token] - one.loc[one.token] + self.margin)
            self.row_observations.append(index)
        self.rows = np.concatenate([self.rows, np.stack(rows)])
        self.floor = np.concatenate([self.floor, floor])


@torch.no_grad()
def _scores(model: CausalModel, moved: Tensor) -> Tensor:
    """W x for displacements x of U, rounded as in a replay. (N, C) -> (N, V) float64"""
    weight = model.lm_head.weight
    size = moved.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    device = moved.device if weight.is_meta else weight.device  # an offloaded head moves its input
    scaled = (moved / size).to(device, weight.dtype)
    return apply_head(model.lm_head, scaled, paired=True).double().cpu() * size


def _interval(t: float, room: Array, slope: Array, bound: float) -> tuple[float, float]:
    """The steps of one coordinate that keep t inside: low <= 0 <= high."""
    with np.errstate(divide="ignore", over="ignore"):
        reach = -room / slope  # the step at which each row becomes tight
    low = max(float(np.max(reach, where=slope > 0, initial=-math.inf)), -bound - t)
    high = min(float(np.min(reach, where=slope < 0, initial=math.inf)), bound - t)
    return min(low, 0.0), max(high, 0.0)


def draw_cauchy(t: float, low: float, high: float, rng: np.random.Generator) -> float:
    """The step from t to a standard Cauchy draw on [t + low, t + high].

    Tails are measured from their own end: 1/2 + atan/pi would cancel there.
    """
    a, b = t + low, t + high
    is_left = b < 0
    if is_left:
        a, b = -b, -a
    if a > 0:  # upper tail: P(X > x) = atan2(1, x) / pi
        near, far = math.atan2(1.0, a), math.atan2(1.0, b)
        x = 1 / math.tan(far + (near - far) * rng.random()) if near > far else a
    else:
        first, last = math.atan(a), math.atan(b)
        x = math.tan(first + (last - first) * rng.random())
    x = min(max(x, a), b)
    return (-x if is_left else x) - t


# ---------------------------------------------------------------- least distance


def least_distance(rows: Array, floor: Array) -> tuple[Array | None, Array]:
    """The q of least norm with rows q >= floor (None if there is none), and the multipliers.

    Lawson and Hanson's reduction: with f >= 0 minimising |rows^T f|^2 + (floor.f - 1)^2 and r that
    residual, q = -r[:-1] / r[-1]; r = 0 proves that the inequalities with f > 0 contradict each
    other.
    """
    norms = np.linalg.norm(rows, axis=1)
    is_empty = norms <= 1e-12 * max(norms.max(), 1e-300)
    if (is_empty & (floor > 0)).any():
        return None, (is_empty & (floor > 0)).astype(np.float64)
    norms = np.where(norms > 0, norms, 1.0)
    scaled = floor / norms
    unit = max(float(np.abs(scaled).max()), 1e-300)
    stacked = np.concatenate([(rows / norms[:, None]).T, scaled[None] / unit])  # (C + 1, K)
    goal = np.zeros(len(stacked))
    goal[-1] = 1.0
    multipliers = nnls(stacked, goal)[0]
    residual = stacked @ multipliers - goal
    if -residual[-1] < 1e-12:  # |r|^2, which is 1 / (1 + |q / unit|^2)
        return None, multipliers
    return -residual[:-1] / residual[-1] * unit, multipliers


# ---------------------------------------------------------------- quality of the draws


def effective_sample_sizes(draws: Array) -> Array:
    """Effective sample size of each column, by Geyer's initial positive sequence.

    (n, C) -> (C,). A constant column counts as one draw.
    """
    n = len(draws)
    centred = draws - draws.mean(0)
    variance = (centred**2).mean(0)
    sizes = np.ones(draws.shape[1])
    for column in np.flatnonzero(variance > 1e-24):
        x = centred[:, column]
        correlation = np.correlate(x, x, "full")[n - 1 :] / (n * variance[column])
        pairs = correlation[: n // 2 * 2].reshape(-1, 2).sum(1)
        negative = np.flatnonzero(pairs <= 0)
        kept = pairs[: negative[0]] if len(negative) else pairs
        sizes[column] = n / max(2 * kept.sum() - 1, 1.0)
    return sizes
