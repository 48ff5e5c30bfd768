"""Posterior: which individuals could have written a text that was observed?

In `causal` mode an observed token y puts linear inequalities on the noise t of its speaker,

    (W_y - W_k) (loc_U + T kappa scale_U t) >= C_y - C_k     for every other token k,

and an observed number v one equality, w.(loc_U + T kappa scale_U t) + c = y(v). Under them t is
independent standard Cauchy. One individual who speaks the whole text (`"shared"`) has to satisfy
the inequalities of every position at once; fresh noise satisfies each position's with its own t.

Of the V - 1 inequalities of a position few ever matter, so they are found when they are violated:

1. a start: the t of least norm under the inequalities found so far (least-distance programming
   by non-negative least squares, which also proves that there is none), until none is violated;
2. draws: Gibbs steps along lines. Along a coordinate, t is Cauchy on an interval; along a line
   through several coordinates its density is a product of Cauchy kernels, whose CDF is closed;
3. after every sweep all V tokens are checked; a sweep that broke an unknown inequality is taken
   back, and the inequality is kept (the sweep is reversible, so this leaves the law as it is).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from causal_qwen.analysis import gumbel
from causal_qwen.analysis.gumbel import GumbelIndividual, infer_gumbel
from causal_qwen.analysis.token_sequence import (
    TokenSequence,
    load_processor,
    observe,
    read_tokens,
    show_tokens,
)
from causal_qwen.decoding.decision import margin
from causal_qwen.individuals.individual import Individual, latent_size
from causal_qwen.individuals.noise import MAX_SEED, draw_noise, from_cauchy, noise_bound
from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.modeling.value_space import field_space
from causal_qwen.options import check_choice

Array = NDArray[np.float64]

MODES = ("shared", "fresh", "gumbel")
MARGIN = 1e-3  # by how much the observed token must win: float32 replays agree well below it
WORST = 8  # inequalities learnt from one position at once
ROUNDS = 400  # of learning, before a start is given up
NUMBER_TOLERANCE = 1e-4  # relative, between an observed number and its replay
LINES = 64  # through several coordinates, in a sweep over single ones
MIN_MASS = 1e-9  # of a line's density on its interval: less cannot be told from rounding
POINTS, ZOOMS = 33, 8  # the numeric inverse: a grid, zoomed in


@dataclass(frozen=True)
class Posterior:
    """Individuals that could have written a text, or the reason why there are none."""

    individuals: list[Any]  # Individual, or GumbelIndividual
    requested: int
    success_rate: float  # of the draws, how many say the text again
    effective_sample_size: float  # the median over coordinates; the worst one is beside it
    worst_sample_size: float
    rejection_rate: float  # sweeps taken back
    reason: str = ""  # why there is nobody
    inequalities: int = field(default=0, repr=False)

    @property
    def is_reachable(self) -> bool:
        return bool(self.individuals)

    def __bool__(self) -> bool:
        return self.is_reachable

    def __repr__(self) -> str:
        if not self:
            return f"Posterior(nobody: {self.reason})"
        return (
            f"Posterior({len(self.individuals)} individuals, {self.success_rate:.0%} say the text "
            f"again, effective sample size {self.effective_sample_size:.1f} (worst coordinate "
            f"{self.worst_sample_size:.1f}))"
        )


class UnreachableError(ValueError):
    """No individual satisfies what was observed; `places` are the observations that clash."""

    def __init__(self, places: list[int]) -> None:
        super().__init__(f"observations {places} cannot hold together")
        self.places = places


class Observation(NamedTuple):
    """What one observed token says about t."""

    token: int
    loc: Array  # (V,) loc_S - C
    law: Array  # (C,) T kappa scale_U: how far each coordinate's noise moves the individual
    target: float | None = None  # for a number: what w.(law t) has to be


# ---------------------------------------------------------------- the question


def infer_individual(
    model: CausalModel,
    text: Any,
    *,
    prompt: Any = None,
    n: int = 16,
    mode: str = "shared",
    seed: int = 0,
    temperature: float = 1.0,
    min_density: float = 0.0,
    burn_in: int = 50,
    sweeps: int = 5,
    processor: Processor | None = None,
    **options: Any,
) -> Posterior:
    """`n` posterior draws of who wrote `text` after `prompt`, in `causal` mode.

    Without a prompt the first token of the text is given, the others are observed. `mode` is
    "shared" (one individual speaks all of it), "fresh" (noise of its own at every position) or
    "gumbel" (the baseline: softmax sampling's noise in hindsight). Draws are `sweeps` sweeps apart,
    after `burn_in` of them. Options are those of `generate`, e.g. `noise_gain`; give them to it
    too when the individuals speak again.

    Nobody may be able to write a text: the result is then empty and says why.
    """
    check_choice("mode", mode, MODES)
    if n < 1 or burn_in < 0 or sweeps < 1:
        raise ValueError(f"n={n}, burn_in={burn_in} and sweeps={sweeps} must be at least 1, 0, 1.")
    if processor is None and (isinstance(text, str) or isinstance(prompt, str)):
        processor = load_processor(model)
    sequence = read_tokens(model, text, processor, special=prompt is None)
    start = 1
    if prompt is not None:
        given = read_tokens(model, prompt, processor)
        start, sequence = len(given.ids), given.then(sequence)
    if start >= len(sequence.ids):
        raise ValueError("A text of one token has nothing to observe; give a prompt before it.")
    if mode == "gumbel":
        speakers = infer_gumbel(model, sequence, start, n, seed, temperature)
        rate = _success(model, sequence, start, speakers, options)
        return Posterior(list(speakers), n, rate, float(n), float(n), 0.0)

    is_fresh = mode == "fresh"
    heat = _heat(model, is_fresh, temperature, min_density, options)
    observations = _observations(model, sequence, start, heat)
    groups = [[one] for one in observations] if is_fresh else [observations]
    rng = np.random.default_rng(seed)
    bound = noise_bound(min_density)
    traces, rejected, inequalities = [], [], 0
    for place, group in enumerate(groups):
        polytope = Polytope(model, group, bound)
        try:
            t = polytope.find()
        except UnreachableError as error:
            places = [place] if is_fresh else error.places
            reason = _reason(model, sequence, start, places, bound, heat, processor)
            return Posterior([], n, 0.0, 0.0, 0.0, 0.0, reason)
        trace, rejection = polytope.sample(t, n, burn_in, sweeps, rng)
        traces.append(from_cauchy(trace, min_density))  # (n, C)
        rejected.append(rejection)
        inequalities += len(polytope.floor)

    people = []
    for draw in range(n):
        own = (seed + draw) % (MAX_SEED + 1)
        if is_fresh:
            before = [draw_noise(own, latent_size(model), place) for place in range(start - 1)]
            noise = np.stack([*before, *(trace[draw] for trace in traces)])
            people.append(Individual(noise, own, min_density, temperature))
        else:
            people.append(Individual(traces[0][draw], None, min_density, temperature))
    sizes = np.concatenate([effective_sample_sizes(trace) for trace in traces])
    return Posterior(
        people,
        n,
        _success(model, sequence, start, people, options),
        float(np.median(sizes)),
        float(sizes.min()),
        float(np.mean(rejected)),
        inequalities=inequalities,
    )


def _heat(
    model: CausalModel,
    is_fresh: bool,
    temperature: float,
    min_density: float,
    options: dict[str, Any],
) -> float:
    """T kappa of such an individual, as `generate` would resolve it."""
    individual = Individual.draw(
        model, seed=0, fresh=is_fresh, temperature=temperature, min_density=min_density
    )
    gains = {name: options[name] for name in ("noise_gain", "fresh_noise_gain") if name in options}
    settings = model.resolve_settings(causal_mode="causal", individual=individual, **gains)
    return model.decoding_noise(settings).gains.amplitude(individual)


def _observations(
    model: CausalModel, sequence: TokenSequence, start: int, heat: float
) -> list[Observation]:
    output = observe(model, sequence, start)
    loc = margin(output.logits[0], model.decision.threshold).detach().cpu().numpy()  # (N, V)
    law = heat * output.scale_U[0].detach().cpu().numpy().astype(np.float64)
    space = field_space(model.config)
    wanted = space.encode(sequence.values[start:]) - output.loc_Y[0].double().detach().cpu()
    return [
        Observation(
            token,
            loc[i],
            law[i],
            float(wanted[i]) if token == model.config.num_token_id else None,
        )
        for i, token in enumerate(sequence.ids[start:].tolist())
    ]


def _success(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    people: Sequence[Any],
    options: dict[str, Any],
) -> float:
    """The share of `people` whose replay is the text, numbers up to rounding."""
    batch = {
        name: column.repeat(len(people), 1)
        for name, column in sequence.cut(start).batch(model).items()
    }
    settings = {
        **batch,
        "max_new_tokens": len(sequence.ids) - start,
        "return_dict_in_generate": True,
        **options,
    }
    if isinstance(people[0], GumbelIndividual):
        result = gumbel.generate(model, people, **settings)
    else:
        result = model.generate(causal_mode="causal", individual=people, **settings)
    ids = result.sequences.cpu()
    if ids.shape[1] != len(sequence.ids):
        return 0.0
    is_same = (ids == sequence.ids).all(-1)
    if not isinstance(people[0], GumbelIndividual) and result.get("numeric_values") is not None:
        values = result.numeric_values.cpu().double()
        error = (values - sequence.values).abs()
        is_same &= (error <= NUMBER_TOLERANCE * sequence.values.abs().clamp_min(1.0)).all(-1)
    return float(is_same.double().mean())


def _reason(
    model: CausalModel,
    sequence: TokenSequence,
    start: int,
    places: list[int],
    bound: float,
    heat: float,
    processor: Processor | None,
) -> str:
    tokens = show_tokens(model, sequence, processor)
    said = ", ".join(f"{tokens[start + place]!r} (position {start + place})" for place in places)
    if heat == 0:
        return f"without noise (temperature or noise_gain 0) the model does not say {said}"
    limit = "" if bound == math.inf else f" with noise up to {bound:.3g}"
    if len(places) == 1:
        return f"no individual{limit} says {said} here: for every one another token scores higher"
    return f"no one individual{limit} says all of {said}; fresh noise (mode='fresh') may"


# ---------------------------------------------------------------- inequalities on t


class Polytope:
    """The t that satisfy some observations: rows t >= floor, equal t = level, |t| <= bound.

    Rows are learnt as they are violated; `_violated` always looks at all tokens.
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
        self.places: list[int] = []  # the observation each row comes from
        self.known: set[tuple[int, int]] = set()
        weight = model.action.value.weight[0].detach().double().cpu().numpy()
        numbers = [(i, one) for i, one in enumerate(observations) if one.target is not None]
        self.number_places = [i for i, _ in numbers]
        self.equal = np.reshape([weight * one.law for _, one in numbers], (-1, size))  # (m, C)
        self.level = np.array([one.target for _, one in numbers], dtype=np.float64)

    def find(self) -> Array:
        """A t inside, of small norm; raises `UnreachableError` with the reason's observations."""
        start, basis = self._affine()
        t = start
        box: Array = np.zeros((0, len(t)))
        passive: Array | None = None
        for _ in range(ROUNDS):
            beyond = np.flatnonzero(np.abs(t) > self.bound)
            found = self._violated(t, 1.5 * self.margin)
            if not found and not len(beyond):
                return t
            self._learn(found)
            sides = -np.sign(t[beyond])[:, None] * np.eye(len(t))[beyond]
            box = np.concatenate([box, sides])
            rows = np.concatenate([self.rows, box])
            # twice the margin: the start then has room on every side that the draws know of
            floor = np.concatenate([self.floor + self.margin, np.full(len(box), -self.bound)])
            q, weights = least_distance(rows @ basis, floor - rows @ start, passive)
            passive = weights
            if q is None:
                clash = np.flatnonzero(weights > 0)
                named = {self.places[i] for i in clash if i < len(self.places)}
                raise UnreachableError(sorted(named | set(self.number_places)))
            t = start + basis @ q
        raise UnreachableError(sorted(set(self.places)))

    def sample(
        self, t: Array, n: int, burn_in: int, sweeps: int, rng: np.random.Generator
    ) -> tuple[Array, float]:
        """`n` draws, `sweeps` sweeps apart after `burn_in`, and the share of sweeps taken back."""
        draws, rejected = [], 0
        total = burn_in + n * sweeps
        for sweep in range(1, total + 1):
            proposal = self._sweep(t.copy(), rng)
            found = self._violated(proposal, self.margin)
            if found:
                rejected += sweep > burn_in
                self._learn(found)
            else:
                t = proposal
            if sweep > burn_in and (sweep - burn_in) % sweeps == 0:
                draws.append(t)
        return np.stack(draws), rejected / (n * sweeps)

    def _sweep(self, t: Array, rng: np.random.Generator) -> Array:
        """Gibbs steps along lines whose choice does not look at t, in a random order.

        Every coordinate alone (unless equalities tie them), and lines through a few coordinates,
        along which the equalities and one inequality stay as they are. An order and
        its reverse are equally likely: the whole sweep is reversible.
        """
        room = self.rows @ t - self.floor  # (K,) >= 0
        columns = np.ascontiguousarray(self.rows.T)  # (C, K)
        lines: list[tuple[NDArray[np.int64], Array]] = []
        if not len(self.equal):
            lines += [(np.array([c]), np.ones(1)) for c in range(len(t))]
        for _ in range(len(t) if len(self.equal) else min(len(t), LINES)):
            if (line := self._line(rng)) is not None:
                lines.append(line)
        for index in rng.permutation(len(lines)):
            support, direction = lines[index]
            slope = direction @ columns[support]  # (K,)
            low, high = _interval(t[support], direction, room, slope, self.bound)
            step = (
                draw_cauchy(t[support[0]], low, high, rng)
                if len(support) == 1
                else draw_product(t[support], direction, low, high, rng)
            )
            t[support] += step * direction
            room += step * slope
        return t

    def _line(self, rng: np.random.Generator) -> tuple[NDArray[np.int64], Array] | None:
        """A random direction in which the equalities, and one of the rows, do not change."""
        tied = self.equal
        if len(self.rows):
            tied = np.concatenate([tied, self.rows[rng.integers(len(self.rows))][None]])
        if len(tied) >= self.rows.shape[1] or not len(tied):
            tied = self.equal
        if not len(tied):
            return None
        support = rng.choice(self.rows.shape[1], len(tied) + 1, replace=False)
        direction = np.linalg.svd(tied[:, support])[2][-1]
        if (np.abs(direction) < 1e-9).any():  # some coordinates alone do not move: no such line
            return None
        return support, direction

    def _affine(self) -> tuple[Array, Array]:
        """(t0, basis): all t with `equal t = level` are t0 + basis q, |t|^2 = |t0|^2 + |q|^2."""
        count, size = self.equal.shape
        if not count:
            return np.zeros(size), np.eye(size)
        inverse = np.linalg.pinv(self.equal)
        start = inverse @ self.level
        if not np.allclose(self.equal @ start, self.level, rtol=1e-9, atol=1e-9):
            raise UnreachableError(self.number_places)
        full = np.linalg.svd(self.equal)[2]
        return start, full[np.linalg.matrix_rank(self.equal) :].T

    def _violated(self, t: Array, margin: float) -> list[tuple[int, int]]:
        """(observation, token) pairs that score above the observed token, the worst of each."""
        moved = torch.from_numpy(np.stack([one.law * t for one in self.observations]))
        loc = torch.from_numpy(np.stack([one.loc for one in self.observations]))
        said = torch.tensor([[one.token] for one in self.observations])
        scores = loc + _scores(self.model, moved)  # (N, V)
        excess = scores - scores.gather(-1, said) + margin
        excess.scatter_(-1, said, -math.inf)
        worst, tokens = excess.topk(min(WORST, excess.shape[-1]), dim=-1)
        where = (worst > 0).nonzero().tolist()
        return [(place, int(tokens[place, rank])) for place, rank in where]

    def _learn(self, found: list[tuple[int, int]]) -> None:
        new = [pair for pair in found if pair not in self.known]
        if not new:
            return
        self.known.update(new)
        weight = self.model.lm_head.weight.detach()
        rows, floor = [], []
        for place, token in new:
            one = self.observations[place]
            lead = (weight[one.token].double() - weight[token].double()).cpu().numpy()
            rows.append(lead * one.law)
            floor.append(one.loc[token] - one.loc[one.token] + self.margin)
            self.places.append(place)
        self.rows = np.concatenate([self.rows, np.stack(rows)])
        self.floor = np.concatenate([self.floor, floor])


@torch.no_grad()
def _scores(model: CausalModel, moved: Tensor) -> Tensor:
    """W x for displacements x of U, in the arithmetic of a replay. (N, C) -> (N, V) float64"""
    weight = model.lm_head.weight
    size = moved.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scaled = (moved / size).to(weight.device, weight.dtype)
    return model.lm_head(scaled, paired=True).double().cpu() * size


def _interval(
    t: Array, direction: Array, room: Array, slope: Array, bound: float
) -> tuple[float, float]:
    """How far t may move along a direction: backwards and forwards. Always contains 0."""
    with np.errstate(divide="ignore", over="ignore"):
        reach = -room / slope  # where each row becomes tight
    low = float(np.max(reach, where=slope > 0, initial=-math.inf))
    high = float(np.min(reach, where=slope < 0, initial=math.inf))
    if bound < math.inf:
        ends = (np.sign(direction) * np.array([[-bound], [bound]]) - t) / direction
        low, high = max(low, float(ends[0].max())), min(high, float(ends[1].min()))
    return min(low, 0.0), max(high, 0.0)


# ---------------------------------------------------------------- draws along a line


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


def draw_product(
    t: Array, direction: Array, low: float, high: float, rng: np.random.Generator
) -> float:
    """A step s in [low, high] of density proportional to prod_i 1 / (1 + (t_i + s d_i)^2).

    0 where the density on the interval is too small, or its poles too close, for the closed CDF:
    both are properties of the line, not of the place on it, so standing still is no bias.
    """
    centre, scale = -t / direction, 1 / np.abs(direction)
    unit = float(scale.min())
    line = CauchyProduct((centre - centre[0]) / unit, scale / unit)
    a, b = ((end - centre[0]) / unit for end in (low, high))
    if not line.is_safe:
        return 0.0
    mass = line.cdf(np.array([a, b]))
    if not mass[1] - mass[0] > MIN_MASS * line.total:
        return 0.0
    wanted = mass[0] + (mass[1] - mass[0]) * rng.random()
    step = line.inverse(float(wanted), a, b) * unit + centre[0]
    return float(min(max(step, low), high))


class CauchyProduct:
    """prod_i 1 / ((x - m_i)^2 + s_i^2): a density whose CDF is closed by partial fractions.

    With poles z_i = m_i + i s_i it is sum_i 2 Re(R_i / (x - z_i)), R_i the residues, and its
    integral sum_i 2 Re(R_i log(x - z_i)): x - z_i stays below the real axis, where log is smooth.
    """

    def __init__(self, centre: Array, scale: Array) -> None:
        self.centre, self.scale = centre, scale
        self.poles = centre + 1j * scale
        one, other = self.poles[:, None], self.poles[None, :]
        others = (one - other) * (one - other.conj())
        np.fill_diagonal(others, 2j * scale)
        with np.errstate(all="ignore"):
            self.residues = 1 / others.prod(axis=1)
        self.total = float(-2 * math.pi * self.residues.imag.sum())
        # poles that almost coincide have residues that almost cancel
        size = float(np.abs(self.residues).sum())
        self.is_safe = math.isfinite(size) and self.total > 0 and size < 1e5 * self.total

    def cdf(self, x: Array) -> Array:
        """The integral from -infinity to x, not normalised: `total` is the whole. (...) -> (...)"""
        finite = np.where(np.isfinite(x), x, 0.0)
        logs = np.log(finite[..., None] - self.poles)
        inside = 2 * (self.residues * logs).real.sum(-1) + self.total
        return np.where(np.isfinite(x), inside, np.where(x > 0, self.total, 0.0))

    def inverse(self, wanted: float, low: float, high: float) -> float:
        """The x in [low, high] with cdf(x) = wanted, on an angular grid around the sharpest kernel.

        x = m + s tan(angle) brings infinite ends near; every zoom divides the bracket by 32.
        """
        sharp = int(self.scale.argmin())
        m, s = float(self.centre[sharp]), float(self.scale[sharp])
        first, last = (math.atan((end - m) / s) for end in (low, high))
        for _ in range(ZOOMS):
            angles = np.linspace(first, last, POINTS)
            above = np.searchsorted(self.cdf(m + s * np.tan(angles)), wanted)
            index = min(max(int(above), 1), POINTS - 1)
            first, last = float(angles[index - 1]), float(angles[index])
        return m + s * math.tan((first + last) / 2)


# ---------------------------------------------------------------- least distance


def least_distance(
    rows: Array, floor: Array, weights: Array | None = None
) -> tuple[Array | None, Array]:
    """The q of least norm with rows q >= floor, or None when there is none; and multipliers.

    Lawson and Hanson's reduction: with f >= 0 minimising |rows^T f|^2 + (floor.f - 1)^2 and r that
    residual, q = -r[:-1] / r[-1]; r = 0 proves that the inequalities contradict each other, and
    f > 0 says which. `weights` of an earlier call (for the first rows) are a warm start.
    """
    norms = np.linalg.norm(rows, axis=1)
    if ((norms <= 1e-12 * max(norms.max(), 1e-300)) & (floor > 0)).any():
        return None, ((norms <= 1e-12 * norms.max()) & (floor > 0)).astype(np.float64)
    norms = np.where(norms > 0, norms, 1.0)
    scaled = floor / norms
    unit = max(float(np.abs(scaled).max()), 1e-300)
    stacked = np.concatenate([(rows / norms[:, None]).T, scaled[None] / unit])  # (C + 1, K)
    goal = np.zeros(len(stacked))
    goal[-1] = 1.0
    begin = np.zeros(len(rows))
    if weights is not None:
        begin[: len(weights)] = weights
    multipliers = nonnegative_least_squares(stacked, goal, begin)
    residual = stacked @ multipliers - goal
    if -residual[-1] < 1e-12:  # |r|^2, which is 1 / (1 + |q / unit|^2)
        return None, multipliers
    return -residual[:-1] / residual[-1] * unit, multipliers


def nonnegative_least_squares(matrix: Array, goal: Array, start: Array) -> Array:
    """argmin_{f >= 0} |matrix f - goal|, by Lawson and Hanson's active sets, from any f >= 0."""
    f = start.copy()
    is_free = f > 0
    tolerance = 1e-12
    for _ in range(3 * matrix.shape[1] + 10):
        while is_free.any():  # solve on the free set, and stop at the border it runs into
            best = np.zeros_like(f)
            best[is_free] = np.linalg.lstsq(matrix[:, is_free], goal, rcond=None)[0]
            blocked = is_free & (best <= tolerance)
            if not blocked.any():
                f = best
                break
            share = np.min(f[blocked] / np.maximum(f[blocked] - best[blocked], 1e-300))
            f = f + min(share, 1.0) * (best - f)
            is_free &= f > tolerance
            f[~is_free] = 0.0
        gain = matrix.T @ (goal - matrix @ f)
        gain[is_free] = -math.inf
        if not (gain > 1e-10).any():
            break
        is_free[int(gain.argmax())] = True
    return f


# ---------------------------------------------------------------- how good are the draws


def effective_sample_sizes(draws: Array) -> Array:
    """How many independent draws each column is worth: Geyer's initial positive sequence.

    (n, C) -> (C,). Columns that never move are worth one draw.
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
