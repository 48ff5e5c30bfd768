"""Draw the pictures of the pages from the package's own formulas and results: docs/assets/*.svg.

    python scripts/pictures.py

The files are the same on every run, which a test checks. Their ink follows the
reader's light or dark mode.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib import pyplot as plt

from causal_qwen.decoding.decision import _may_win
from causal_qwen.individuals import draw_noise, noise_bound, to_cauchy
from causal_qwen.modeling.abduction import activate
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace, symlog
from causal_qwen.numpy_engine.calibration import solve_gamma, sum_p

ASSETS = Path(__file__).parents[1] / "docs" / "assets"
CALIBRATION = ASSETS.parent / "results" / "calibration.json"
INK = "#010203"  # placeholder, replaced by the ink of the reader's mode
BLUE, ORANGE, GREEN, GREY = "#3b7dd8", "#e0702a", "#2e9e5b", "#8a919c"
STYLE = """<style>
 svg { --ink: #24292f; }
 @media (prefers-color-scheme: dark) { svg { --ink: #e6edf3; } }
 text { font-family: ui-sans-serif, system-ui, "Noto Sans", "PingFang SC", sans-serif; }
</style>"""
SETTINGS = {
    "svg.hashsalt": "causal-qwen",
    "svg.fonttype": "none",
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "axes.facecolor": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
}


# ---------------------------------------------------------------- the chain


BOX, GAP, MARGIN, BETWEEN = (208, 62), 36, 14, 44


def chain() -> str:
    """Boxes and arrows: the whole model."""
    rows = (
        (
            ("text", "“… costs 99.9”", GREY),
            ("tokens + values", "… <NUM>, 99.9", GREY),
            ("embedding", "e + φ(v)", GREY),
        ),
        (
            ("Qwen2 backbone", "context → z", GREY),
            ("abduction", "z → U", ORANGE),
            ("action", "U → S₁ … S_V, Y", BLUE),
        ),
        (
            ("decision", "P(S_k > C_k) → the next token", GREEN),
            ("value", "the median and quantiles of Y", GREEN),
            ("loss", "one-vs-rest + gated number", GREY),
        ),
    )
    wide, tall = BOX
    lefts = [MARGIN + column * (wide + GAP) for column in range(3)]
    tops = [MARGIN + row * (tall + BETWEEN) for row in range(3)]
    centres = [left + wide / 2 for left in lefts]
    parts = [
        _box(left, top, *box)
        for top, row in zip(tops, rows, strict=True)
        for left, box in zip(lefts, row, strict=True)
    ]
    for top in tops[:2]:  # along the first two rows
        parts += [
            _arrow(f"M {left + wide + 3} {top + tall / 2} H {left + wide + GAP - 4}")
            for left in lefts[:2]
        ]
    turns = [(tops[0], centres[:1]), (tops[1], centres)]  # from the end of a row into the next
    parts += [
        _arrow(f"M {centres[2]} {top + tall + 3} v 19 H {end} V {top + tall + BETWEEN - 5}")
        for top, ends in turns
        for end in ends
    ]
    size = 3 * wide + 2 * GAP + 2 * MARGIN, tops[-1] + tall + MARGIN
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        f'width="{size[0]}" height="{size[1]}" role="img" aria-label="The chain of CausalQwen">'
        f"{STYLE}"
        '<defs><marker id="head" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="7" '
        f'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="{INK}"/></marker></defs>'
        f"{''.join(parts)}</svg>\n"
    )


def _box(x: float, y: float, title: str, detail: str, colour: str) -> str:
    wide, tall = BOX
    middle = f'x="{x + wide / 2}" text-anchor="middle" fill="{INK}"'
    return (
        f'<rect x="{x}" y="{y}" width="{wide}" height="{tall}" rx="9" fill="{colour}" '
        f'fill-opacity="0.14" stroke="{colour}" stroke-width="1.6"/>'
        f'<text {middle} y="{y + 26}" font-size="15" font-weight="600">{_escaped(title)}</text>'
        f'<text {middle} y="{y + 47}" font-size="13">{_escaped(detail)}</text>'
    )


def _arrow(path: str) -> str:
    style = f'fill="none" stroke="{INK}" stroke-width="1.5" marker-end="url(#head)"'
    return f'<path d="{path}" {style}/>'


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")


# ---------------------------------------------------------------- formulas


def density(axis: Any, x: torch.Tensor, loc: float, scale: float, **style: Any) -> None:
    one = Cauchy(torch.tensor(loc), torch.tensor(scale))
    axis.plot(x, one.log_prob(x).exp(), **style)


def affine(figure: Any) -> None:
    """Two coordinates of U, and a linear image of them: closed form and draws."""
    axis, x = figure.subplots(), torch.linspace(-8, 8, 400)
    u = Cauchy(torch.tensor([-1.0, 2.0]), torch.tensor([0.4, 0.8]))
    a = torch.tensor([[1.5, -0.5]])
    for place, colour in enumerate((GREY, GREEN)):
        style = {"color": colour, "linestyle": "--", "label": f"U_{place + 1}"}
        density(axis, x, float(u.loc[place]), float(u.scale[place]), **style)
    s = u.affine(a)
    generator = torch.Generator().manual_seed(0)
    many = Cauchy(u.loc.expand(50_000, 2), u.scale.expand(50_000, 2)).sample(generator)
    drawn = (many @ a.T).numpy().ravel()
    counts, edges = np.histogram(drawn, 80, (-8, 8))
    share = counts / len(drawn) / np.diff(edges)
    axis.stairs(share, edges, fill=True, color=BLUE, alpha=0.25, label="50,000 draws of a·U")
    label = "a·U in closed form"
    density(axis, x, float(s.loc[0]), float(s.scale[0]), color=BLUE, label=label, linewidth=2)
    axis.set(xlabel="value", ylabel="density")
    axis.legend()


def encoding(figure: Any) -> None:
    """phi(v) along its direction."""
    axis = figure.subplots()
    v = torch.cat([-torch.logspace(6, -2, 200), torch.logspace(-2, 6, 200)])
    axis.plot(v, symlog(v), color=BLUE)
    axis.set_xscale("symlog", linthresh=1)
    axis.set_xticks([-1e6, -1e4, -1e2, 0, 1e2, 1e4, 1e6])
    axis.set(xlabel="value v", ylabel="sign(v) ln(1 + |v|)")
    for value in (99.9, 999_000.0):
        height = float(symlog(torch.tensor(value)))
        axis.plot(value, height, "o", color=ORANGE)
        axis.annotate(
            f"{value:,g}", (value, height), (-8, 6), textcoords="offset points", ha="right"
        )


def activations(figure: Any) -> None:
    """The activations that make scale_U positive."""
    axis, x = figure.subplots(), torch.linspace(-6, 3, 300)
    for name, colour in (("exp", ORANGE), ("softplus", BLUE), ("abs", GREEN)):
        axis.semilogy(x, activate(x, name), color=colour, label=name)
    axis.set(xlabel="W_scale z + b_scale", ylabel="scale_U", ylim=(1e-3, 30))
    axis.legend()


def noise(figure: Any) -> None:
    """Scale noise widens, location noise moves."""
    left, right = figure.subplots(1, 2, sharey=True)
    x = torch.linspace(-6, 6, 400)
    for axis in (left, right):
        density(axis, x, 0.0, 0.5, color=GREY, linestyle="--", label="U")
        axis.set(xlabel="a coordinate of U")
    density(left, x, 0.0, 1.1, color=BLUE, label="U′: scale + b")
    left.set(title="scale noise (standard, training)", ylabel="density")
    for place, seed in enumerate((3, 11, 15)):
        moved = 0.6 * float(to_cauchy(draw_noise(seed, 1))[0])
        label = "U′: loc + T κ b ε" if not place else None
        density(right, x, moved, 0.5, color=ORANGE, label=label, alpha=0.9)
    right.set(title="location noise (sampling)")
    left.legend(fontsize="small")
    right.legend(fontsize="small")


# A law with three tokens and a number, for individuals of two coordinates.
NAMES, COLOURS = ("“door”", "“letter”", "“window”"), (BLUE, ORANGE, GREEN)
LAW = torch.tensor([[1.0, 0.4], [-0.7, 0.9], [0.2, -1.0]])
THRESHOLD = torch.tensor([2.0, 2.2, 1.9])
U = Cauchy(torch.tensor([0.5, 0.3]), torch.tensor([0.6, 0.9]))


def action(figure: Any) -> None:
    """Left: coordinates of U. Right: their scores under one law."""
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-6, 6, 400)
    for c, style in enumerate(("-", "--")):
        loc, scale = float(U.loc[c]), float(U.scale[c])
        density(left, x, loc, scale, color=GREY, linestyle=style, label=f"U_{c + 1}")
    left.set(xlabel="coordinate of U", ylabel="density", title="who is speaking")
    s = U.affine(LAW)
    for k, colour in enumerate(COLOURS):
        density(right, x, float(s.loc[k]), float(s.scale[k]), color=colour, label=NAMES[k])
        right.axvline(float(THRESHOLD[k]), color=colour, linestyle=":", linewidth=1)
    right.set(xlabel="score S_k, thresholds dotted", title="what they would say")
    left.legend(fontsize="small")
    right.legend(fontsize="small")


def decisions(figure: Any) -> None:
    """Individuals choose by their u; the distribution chooses by its P_k."""
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    e = np.array([draw_noise(seed, 2) for seed in range(4000)])
    u = U.loc + U.scale * torch.from_numpy(to_cauchy(e)).float()
    chosen = (u @ LAW.T - THRESHOLD).argmax(-1)
    side = torch.linspace(-5, 6, 150)
    place = torch.cartesian_prod(side, side)
    area = (place @ LAW.T - THRESHOLD).argmax(-1).reshape(150, 150).T
    left.contourf(side, side, area, levels=(-0.5, 0.5, 1.5, 2.5), colors=COLOURS, alpha=0.15)
    for k, colour in enumerate(COLOURS):
        mine = u[:250][chosen[:250] == k]
        left.plot(*mine.T, ".", color=colour, markersize=4, label=NAMES[k])
    left.plot(*U.loc, "+", color=INK, markersize=11)
    left.set(xlim=(-5, 6), ylim=(-5, 6), xlabel="u_1", ylabel="u_2", title="causal: who says what")
    left.legend(fontsize="small", loc="lower left")
    share = torch.bincount(chosen, minlength=3) / len(chosen)
    p = U.affine(LAW).sf(THRESHOLD)
    for k, colour in enumerate(COLOURS):
        right.bar(k - 0.2, float(share[k]), 0.36, color=colour, alpha=0.4)
        right.bar(k + 0.2, float(p[k]), 0.36, color=colour)
    right.set_xticks(range(3), NAMES)
    right.set_title("pale: share of individuals,\nfull: P_k", fontsize="medium")


def exceedance(figure: Any) -> None:
    """A score, its threshold and P_k; and why P_k is an atan2."""
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-2, 12, 500)
    s, threshold = Cauchy(torch.tensor(4.0), torch.tensor(1.0)), 6.5
    left.plot(x, s.log_prob(x).exp(), color=BLUE)
    beyond = x[x >= threshold]
    left.fill_between(beyond, s.log_prob(beyond).exp(), color=ORANGE, alpha=0.4)
    left.axvline(threshold, color=INK, linestyle="--", linewidth=1)
    left.annotate("C_k", (threshold, 0.26), (4, 0), textcoords="offset points")
    p = float(s.sf(threshold))
    left.annotate(f"P_k = {p:.2f}", (8.0, 0.04))
    left.set(xlabel="score S_k", ylabel="density")
    distance = torch.logspace(0, 9, 200, dtype=torch.float64)
    truth = torch.atan2(torch.ones_like(distance), distance) / math.pi
    # Arc tangents are computed in float64 and rounded once: processors differ in the last digit.
    textbook = 0.5 + torch.atan(-distance.float().double()).float() / math.pi
    ours = torch.atan2(torch.ones_like(distance), distance.float().double()).float() / math.pi
    for label, found, colour in (
        ("1/2 + atan(·)/π", textbook, GREY),
        ("atan2(·)/π", ours, ORANGE),
    ):
        wrong = ((found.double() - truth) / truth).abs().clamp_min(1e-9)
        right.loglog(truth, wrong, color=colour, label=label)
    right.invert_xaxis()
    right.set(xlabel="P_k", ylabel="relative error in float32")
    right.legend()


def reliability(figure: Any) -> None:
    """P of a fresh conversion and how often the token came, as benchmarks/calibration.py found."""
    axis = figure.subplots()
    rows = json.loads(CALIBRATION.read_text(encoding="utf-8"))
    counts = {row["context"]: row["counts"] for row in rows if row["kind"] == "all"}
    for context, label, colour in (
        ("none", "fixed threshold", GREY),
        ("competition", "over the bar", BLUE),
    ):
        pairs, total, came = np.array(counts[context])
        seen = came > 0
        axis.loglog(
            total[seen] / pairs[seen], came[seen] / pairs[seen], "o-", color=colour, label=label
        )
    axis.plot([1e-6, 1], [1e-6, 1], color=INK, linestyle="--", linewidth=1)
    axis.annotate("P is the frequency", (2e-4, 6e-5))
    axis.set(xlabel="P_k, mean of a range", ylabel="the token came")
    axis.legend()


def bounds(figure: Any) -> None:
    """Bounds of (loc - C) / scale of every token, and the tokens that can still win."""
    axis, count = figure.subplots(), 40
    generator = torch.Generator().manual_seed(1)
    margin = -3 - 6 * torch.rand(count, generator=generator)
    norms = 40 + 20 * torch.rand(count, generator=generator)
    low, high = 0.8 * norms, 1.25 * norms  # min(s) and max(s) times the row norm
    keep = _may_win(margin, low, high)
    worst, best = margin / low, margin / high  # all below their thresholds: certain is worse
    for place, k in enumerate(best.argsort(descending=True).tolist()):
        colour = ORANGE if keep[k] else GREY
        axis.vlines(place, float(worst[k]), float(best[k]), color=colour, linewidth=3)
    axis.axhline(float(worst.max()), color=INK, linestyle="--", linewidth=1)
    title = f"{int(keep.sum())} of {count} tokens can still win"
    axis.set(xlabel="tokens, best case first", ylabel="(loc − C) / scale", title=title)


def truncation(figure: Any) -> None:
    """e -> t for several truncations."""
    axis, e = figure.subplots(), np.linspace(0.002, 0.998, 400)
    for density_kept, colour in ((0.0, GREY), (0.01, GREEN), (0.05, ORANGE), (0.2, BLUE)):
        bound = noise_bound(density_kept)
        shown = "nothing is cut" if math.isinf(bound) else f"|t| at most {bound:.2f}"
        t = to_cauchy(e, density_kept)
        axis.plot(e, t, color=colour, label=f"min_density {density_kept:g}: {shown}")
    axis.set(xlabel="e", ylabel="t", ylim=(-12, 12))
    axis.legend(fontsize="small")


def values(figure: Any) -> None:
    """A predicted number as a density of values; how a value is scored."""
    left, right = figure.subplots(1, 2)
    space, y = ValueSpace("symlog"), Cauchy(torch.tensor(7.0).double(), torch.tensor(0.15).double())
    v = torch.linspace(250, 4000, 400, dtype=torch.float64)
    left.plot(v, (y.log_prob(space.encode(v)) + space.log_slope(v)).exp(), color=BLUE)
    for level, shade in ((0.5, 0.45), (0.8, 0.2)):
        low, high = (float(space.decode(end)) for end in y.interval(level))
        left.axvspan(low, high, color=ORANGE, alpha=shade / 2, label=f"{level:.0%} interval")
    left.axvline(float(space.decode(y.loc)), color=INK, linewidth=1, label="median")
    left.set(xlim=(250, 4000), xlabel="value v", ylabel="density", yticks=[])
    left.legend(fontsize="small")
    z = torch.linspace(-8, 8, 400)
    one = Cauchy(torch.zeros_like(z), torch.ones_like(z))
    right.plot(z, one.crps(z), color=GREEN, label="CRPS")
    right.plot(z, one.nll(z), color=BLUE, label="negative log-likelihood")
    right.set(xlabel="(y − loc_Y) / scale_Y", ylabel="score")
    right.legend(fontsize="small")


def loss(figure: Any) -> None:
    """The two terms of a token's loss, and the number's."""
    left, right = figure.subplots(1, 2)
    x = torch.linspace(-30, 30, 400)
    for scale, colour in ((1.0, BLUE), (0.1, ORANGE)):
        s = Cauchy(x, torch.full_like(x, scale))
        left.plot(x, -s.log_sf(0.0), color=colour, label=f"label, scale {scale:g}")
        style = {"color": colour, "linestyle": "--", "label": f"not the label, scale {scale:g}"}
        left.plot(x, -s.log_cdf(0.0), **style)
    left.set(xlabel="loc_S − C", ylabel="loss")
    left.legend(fontsize="small")
    y = Cauchy(torch.zeros_like(x), torch.ones_like(x))
    right.plot(x, y.nll(x), color=GREEN, label="Cauchy")
    right.plot(x, x**2 / 2 + 0.5 * math.log(2 * math.pi), color=GREY, label="Gaussian")
    right.set(xlabel="y − loc_Y", ylabel="negative log-likelihood", ylim=(0, 25))
    right.legend(fontsize="small")


def equaliser(figure: Any) -> None:
    """Which token has the largest P, with unequal and with equal scales."""
    left, right = figure.subplots(1, 2, sharey=True)
    loc = torch.tensor([19.0, 18.0, 16.0])
    norms = torch.tensor([35.0, 50.0, 90.0])
    thresholds = torch.linspace(0, 100, 300)
    names = ("loc 19, ‖W‖₁ 35", "loc 18, ‖W‖₁ 50", "loc 16, ‖W‖₁ 90")
    for axis, noise_of in ((left, torch.zeros(3)), (right, norms.max() - norms)):
        for k, colour in enumerate((BLUE, ORANGE, GREEN)):
            s = Cauchy(loc[k], 0.01 * (norms[k] + noise_of[k]))
            axis.semilogy(thresholds, s.sf(thresholds), color=colour, label=names[k])
        axis.set(xlabel="threshold C")
    left.set(title="without decision noise", ylabel="P_k")
    right.set(title="with decision noise")
    right.legend(fontsize="small")


def calibration(figure: Any) -> None:
    """Sum P against gamma for thresholds at and above the best score."""
    axis = figure.subplots()
    loc = 4 * np.random.default_rng(0).standard_normal((16, 2000), np.float32)  # like logits
    per_token = np.full(2000, 50.0, np.float32)
    gammas = np.logspace(-5, -2, 60)
    top = float(np.quantile(loc.max(-1), 0.9))
    for factor, colour in ((1.0, ORANGE), (2.0, BLUE), (4.0, GREEN)):
        c = factor * top
        sums = [float(np.median(sum_p(loc, per_token, c, 2 * g))) for g in gammas]
        axis.loglog(gammas, sums, color=colour, label=f"C = {c:.0f}")
        axis.plot(solve_gamma(loc, per_token, c, None), 1.0, "o", color=colour)
    axis.axhline(1.0, color=INK, linestyle="--", linewidth=1)
    axis.set(xlabel="γ = b", ylabel="median of Σ P")
    axis.legend()


PLOTS: dict[str, tuple[Callable[[Any], None], tuple[float, float]]] = {
    "affine": (affine, (6.4, 3.0)),
    "encoding": (encoding, (6.4, 2.8)),
    "activations": (activations, (6.4, 2.6)),
    "noise": (noise, (7.6, 2.8)),
    "action": (action, (7.6, 2.8)),
    "decisions": (decisions, (7.6, 3.6)),
    "exceedance": (exceedance, (7.6, 3.0)),
    "reliability": (reliability, (6.4, 3.4)),
    "bounds": (bounds, (6.4, 2.8)),
    "truncation": (truncation, (6.4, 3.0)),
    "values": (values, (7.6, 3.0)),
    "loss": (loss, (7.6, 3.0)),
    "equaliser": (equaliser, (7.6, 3.0)),
    "calibration": (calibration, (6.4, 2.8)),
}


def draw(directory: Path = ASSETS) -> list[Path]:
    """Write every picture into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    written = [directory / "chain.svg"]
    written[0].write_text(_with_css_ink(chain()), encoding="utf-8")
    matplotlib.use("svg")
    for name, (paint, size) in PLOTS.items():
        with matplotlib.rc_context(SETTINGS):
            figure = plt.figure(figsize=size, layout="constrained", facecolor="none")
            paint(figure)
            path = directory / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None}, transparent=True)
            plt.close(figure)
        text = path.read_text(encoding="utf-8")
        text = text.replace("<defs>", f"{STYLE}\n<defs>", 1)
        path.write_text(_with_css_ink(text), encoding="utf-8")
        written.append(path)
    return written


def _with_css_ink(svg: str) -> str:
    return svg.replace(INK, "var(--ink)")


if __name__ == "__main__":
    for picture in draw():
        print(picture)
