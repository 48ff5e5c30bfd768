"""What if: an observed number, and the same individual's number in an edited row.

    Y = loc + X + N,    X ~ Cauchy(0, a) the individual's own,  N ~ Cauchy(0, b) exogenous

in the space of the number head, where a = |w|.scale_U and b = |w|.|b_noise| are the two shares of
the predicted scale. *Abduction*: given the residual r = y - loc, X has the density
f_a(x) f_b(r - x) / f_(a+b)(r). *Action and prediction*: in the edited row

    Y' = loc' + k X + N',    k = a' / a,  N' ~ Cauchy(0, b') fresh.

The individual is kept, chance is drawn again: a residual that is mostly chance is not repeated. The
median and the interval are those of Y'. With `semantics="pearl"` N is kept, too, and the answer is
one number, y' = loc' + r (a' + b') / (a + b).

The posterior's characteristic function is, by residues at x = ia and x = r + ib, for u > 0

    A e^(-a u) + B e^((ir - b) u),    A = f_b(r - ia) / f_(a+b)(r),  B = f_a(r + ib) / f_(a+b)(r),

and k X + N' only moves the poles. So the law of Y' has a closed form, and no draw is needed:

    P(Y' - loc' <= t) = 1/2 + Im(A log(k a + b' + it) + B log(k b + b' + i(t - k r))) / pi

Hazard: for r = 0 and a = b both poles are one, and A and B are infinite. Near it a is moved by
1e-5 of itself, which moves the probability by as little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import optimize

from causal_qwen.options import SEMANTICS, check_choice
from causal_qwen.regression.conformal import Target
from causal_qwen.regression.source_model import SourceModel
from causal_qwen.tables.cells import is_missing
from causal_qwen.tables.frames import plain, require_columns, to_numbers
from causal_qwen.text.numerals import render

NEAR = 1e-5  # of the scale: poles that are closer cancel
WIDEST = 1e12  # of a bracket, in scales
SHOWN_VALUES = 8


class World(NamedTuple):
    """The law of one row in the head's space, and the predicted median as a value."""

    loc: float
    own: float  # a: the individual's share of the scale
    exogenous: float  # b
    median: float


class PosteriorLaw(NamedTuple):
    """Y' - loc' of an individual with residual `r`: k X + N'. All arguments are in one unit."""

    r: float
    a: float
    b: float
    k: float
    fresh: float  # b'

    def cdf(self, t: float) -> float:
        r, b = self.r, self.b
        a = self.a * (1 + NEAR) if abs(r) + abs(self.a - b) < NEAR * (self.a + b) else self.a
        evidence = _density(a + b, r)
        first, second = _density(b, r - 1j * a) / evidence, _density(a, r + 1j * b) / evidence
        poles = first * np.log(self.k * a + self.fresh + 1j * t) + second * np.log(
            self.k * b + self.fresh + 1j * (t - self.k * r)
        )
        return float(0.5 + poles.imag / math.pi)

    def icdf(self, p: float) -> float:
        """The t with cdf(t) = p: the CDF increases, so a bracket is doubled until it holds t."""
        middle, half = self.k * self.r / 2, abs(self.k * self.r) / 2 + self.k * self.a + self.fresh
        most = half * WIDEST
        while half < most and not self.cdf(middle - half) < p < self.cdf(middle + half):
            half *= 2
        found: float = optimize.brentq(lambda t: self.cdf(t) - p, middle - half, middle + half)
        return found


def _density(scale: float, x: Any) -> Any:
    return scale / math.pi / (x * x + scale * scale)


@dataclass(frozen=True, repr=False)
class NumberCounterfactual:
    """What an individual with this `observed` number would have had in the edited row.

    `factual` is the median that was predicted for the row as it is, `noise` the individual's
    residual in predicted scales, `median` with `low` and `high` the answer.
    """

    target: str
    observed: float
    factual: float
    noise: float
    median: float
    low: float
    high: float
    level: float
    semantics: str
    changes: dict[str, tuple[Any, Any]]  # column -> before, after

    def record(self) -> dict[str, Any]:
        """JSON's values."""
        changes = {
            name: {"before": plain(before), "after": plain(after)}
            for name, (before, after) in self.changes.items()
        }
        return vars(self) | {"changes": changes}

    def __repr__(self) -> str:
        edits = " and ".join(
            f"{name} been {_shown(after)} instead of {_shown(before)}"
            for name, (before, after) in self.changes.items()
        )
        how = f"{self.level:.0%}: {_shown(self.low)} to {_shown(self.high)}"
        how = "all noise kept" if self.semantics == "pearl" else how
        return (
            f"observed {_shown(self.observed)}; had {edits}, it would have been "
            f"{_shown(self.median)} ({how})"
        )


def answer(
    observed: float, here: World, there: World, target: Target, level: float, semantics: str
) -> dict[str, float]:
    """The numbers of a `NumberCounterfactual`: noise, median, low and high."""
    check_choice("semantics", semantics, SEMANTICS)
    if not 0 < level < 1:
        raise ValueError(f"level={level} is outside (0, 1).")
    if not math.isfinite(observed):
        raise ValueError(f"observed={observed!r} is no finite number; give the number seen.")
    y = float(target.space.encode(torch.tensor(observed, dtype=torch.float64)))
    residual, scale = y - here.loc, here.own + here.exogenous
    law = PosteriorLaw(
        residual / scale,
        here.own / scale,
        here.exogenous / scale,
        there.own / here.own,
        there.exogenous / scale,
    )

    def quantile(p: float) -> float:
        moved = residual * (there.own + there.exogenous) / scale
        moved = moved if semantics == "pearl" else law.icdf(p) * scale
        return float(target.decode(there.loc + moved))

    places = {"median": 0.5, "low": (1 - level) / 2, "high": (1 + level) / 2}
    return {"noise": residual / scale} | {name: quantile(p) for name, p in places.items()}


def edit_row(frame: Any, changes: Mapping[str, Any], source: SourceModel) -> Any:
    """The row with other values in some columns: numbers where numbers are read, and categories
    that training rows have."""
    if not changes:
        raise ValueError("no column is changed; name one with its other value, such as carat=1.0.")
    require_columns(frame, list(changes))
    other = frame.assign(**{name: [value] for name, value in changes.items()})
    for name, value in changes.items():
        schema, known = source.table.schema, source.table.categories.get(name)
        if value is None or is_missing(str(value)):
            continue
        if name in schema.numbers:
            if not np.isfinite(to_numbers(other[name], name in schema.day_first)).all():
                raise ValueError(f"{name}={value!r} is no finite number, which {name} is.")
        elif known is not None and str(value) not in known:
            raise ValueError(
                f"{name}={value!r} does not occur in the training rows, so nothing is known about "
                f"it; they have {', '.join(known[:SHOWN_VALUES])}."
            )
    return other


def _shown(value: Any) -> str:
    value = plain(value)
    is_number = isinstance(value, float) and math.isfinite(value)
    return render(float(f"{value:.4g}")) if is_number else str(value)
