"""The V2 mathematics: where noise enters, what temperature scales, and Cauchy stability.

python scripts/causal_qwen_v2_validation_test.py [--model DIR] [--seed N]
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import typer
from _report import Checks, ModelOption, SeedOption, load_subject, show_table
from torch import Tensor

from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.modeling.cauchy import Cauchy

TEXT = "Light from the sun needs about eight minutes to reach the earth, and when it arrives"
TOKENS = 1024  # rows of W that are recomputed in float64
DRAWS, BATCH = 100_000, 10_000
QUANTILES = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
SIGMAS = 5.0  # about one false alarm in 20,000 runs over all tokens and quantiles


def main(model: ModelOption = None, seed: SeedOption = 0) -> None:
    """Check the V2 mathematics on a model; exits with 1 when a check fails."""
    subject = load_subject(model)
    checks = Checks("V2 validation: location against scale", subject)
    with torch.no_grad():
        ids = subject.ids(TEXT)
        output = subject.model(ids)
        u = output.u_dist
        location_against_scale(checks, output, u, seed)
        temperature_selectivity(checks, u, ids, seed)
        linear_stability(checks, output, seed)
        one_vs_rest(checks, output)
    checks.finish()


def location_against_scale(checks: Checks, output: Any, u: Cauchy, seed: int) -> None:
    checks.section("do_sample selects scale noise or location noise")
    model = checks.subject.model
    act = model.action_network
    with exogenous_noise_off(model):
        bare = act(*u)
        unmoved = act(*u, do_sample=True, generator=seeded(seed))
    widened = act(*u, do_sample=False)
    moved = act(*u, do_sample=True, generator=seeded(seed))
    other = act(*u, do_sample=True, generator=seeded(seed + 1))

    checks.check(
        "do_sample=False: noise moves no centre by a single bit",
        torch.equal(widened[0], bare[0]),
        f"{bare[0].numel():,} values of loc_S",
    )
    ratio = (widened[1] / bare[1])[..., model.lm_head.weight.any(-1)]
    checks.check(
        "do_sample=False: noise widens every token that has weights",
        (ratio > 1).all(),
        f"scale_S grows {ratio.min():.3g} to {ratio.max():.3g} times",
    )
    tokens = some_tokens(model, seed)
    expected = exact_scale(model, u.scale.double() + model.action.b_noise.double().abs(), tokens)
    checks.at_most(
        "do_sample=False: scale_S = |W| (scale_U + |b|) + |a| mean(scale_U + |b|)",
        relative_error(widened[1][..., tokens], expected),
        1e-5,
    )
    checks.check(
        "do_sample=True: noise changes no width by a single bit", torch.equal(moved[1], bare[1])
    )
    expected = exact_scale(model, u.scale.double(), tokens)
    checks.at_most(
        "do_sample=True: scale_S = |W| scale_U + |a| mean(scale_U)",
        relative_error(moved[1][..., tokens], expected),
        1e-5,
    )
    checks.at_most(
        "do_sample=True: loc_S = W (loc_U + T |b| eps), error over |W| |loc_U'| in units of eps",
        location_error(model, u, moved[0], 1.0, tokens, seed),
        16,
    )
    is_moved = (moved[0] != bare[0]).any(-1) & (moved[0] != other[0]).any(-1)
    checks.check(
        "do_sample=True: every position moves, and differently for another draw", is_moved.all()
    )
    checks.check("control: without exogenous noise nothing moves", torch.equal(unmoved[0], bare[0]))
    checks.check(
        "forward() is the do_sample=False regime, bit for bit",
        torch.equal(output.loc_S, widened[0]) and torch.equal(output.scale_S, widened[1]),
    )


def temperature_selectivity(checks: Checks, u: Cauchy, ids: Tensor, seed: int) -> None:
    checks.section("temperature acts only where do_sample=True")
    subject, model = checks.subject, checks.subject.model
    act = model.action_network
    fixed = [act(*u, do_sample=False, temperature=t) for t in (0.0, 0.1, 1.0, 10.0)]
    checks.check(
        "do_sample=False: loc_S and scale_S are the same bits at T = 0, 0.1, 1, 10",
        all(torch.equal(s[0], fixed[0][0]) and torch.equal(s[1], fixed[0][1]) for s in fixed),
    )
    hot = {
        t: act(*u, do_sample=True, temperature=t, generator=seeded(seed)) for t in (0, 0.5, 1, 4)
    }
    checks.check("do_sample=True: at T = 0 nothing moves", torch.equal(hot[0][0], fixed[0][0]))
    tokens = some_tokens(model, seed)
    worst = max(location_error(model, u, s[0], t, tokens, seed) for t, s in hot.items())
    checks.at_most(
        "do_sample=True: the displacement is proportional to T (0.5, 1, 4), in units of eps",
        worst,
        16,
    )
    checks.check(
        "do_sample=True: scale_S is the same bits at every T",
        all(torch.equal(s[1], hot[0][1]) for s in hot.values()),
    )

    def generate(tokens: int, **options: Any) -> list[list[int]]:
        mask = torch.ones_like(ids)
        texts = model.generate(
            ids, attention_mask=mask, max_new_tokens=tokens, pad_token_id=0, **options
        )
        return texts[:, ids.shape[1] :].tolist()

    checks.check(
        "generate(do_sample=False): T = 0.1 and T = 5 give the same tokens",
        generate(8, do_sample=False, temperature=0.1)
        == generate(8, do_sample=False, temperature=5.0),
    )
    four = {"do_sample": True, "individual": seed, "num_return_sequences": 4}
    cold = generate(8, temperature=0.0, **four)
    checks.check(
        "generate(do_sample=True): at T = 0 four individuals give the same text",
        all(text == cold[0] for text in cold),
    )
    distinct = {tuple(text) for text in generate(16, temperature=1.0, **four)}
    checks.check(
        "generate(do_sample=True): at T = 1 their texts differ",
        len(distinct) > 1,
        f"{len(distinct)} texts",
        unless=subject.why_uncalibrated,
    )


def linear_stability(checks: Checks, output: Any, seed: int) -> None:
    checks.section(f"a linear image of a Cauchy is Cauchy: {DRAWS:,} draws of U at one position")
    model = checks.subject.model
    generator = seeded(seed)
    u = model.action.widen(Cauchy(output.loc_U[0, -1], output.scale_U[0, -1]))
    s = Cauchy(output.loc_S[0, -1], output.scale_S[0, -1])
    y = Cauchy(output.loc_Y[0, -1], output.scale_Y[0, -1])
    best = s.loc.topk(4).indices
    tokens = torch.cat([best, torch.randint(len(s.loc), (4,), generator=generator).to(best)])

    weight = torch.cat([model.lm_head.weight[tokens], model.action.value.weight]).double()
    bias = torch.zeros(len(weight), dtype=torch.float64, device=weight.device)
    bias[-1] = model.action.value.bias.double().item()
    if model.lm_head.bias is not None:
        bias[:-1] = model.lm_head.bias[tokens].double()
    own = torch.zeros_like(bias)
    own[:-1] = model.action.decision_noise[tokens].double().abs() * u.scale.double().mean()
    closed = Cauchy(
        torch.cat([s.loc[tokens].double(), y.loc.double().reshape(1)]),
        torch.cat([s.scale[tokens].double(), y.scale.double().reshape(1)]),
    )
    images = torch.cat([draw_images(u, weight, own, generator) for _ in range(DRAWS // BATCH)])
    images = images + bias

    euclidean = (((weight * u.scale.double()) ** 2).sum(-1) + own**2).sqrt()
    gaussian = Cauchy(closed.loc, euclidean)
    found, refuted = deviations(images, closed), deviations(images, gaussian)
    names = [f"token {int(k)}" for k in tokens] + ["number"]
    show_table(
        "image",
        "loc",
        "scale",
        "worst quantile",
        "if scales added like a Gaussian's",
        rows=[
            (name, f"{loc:.4g}", f"{scale:.4g}", f"{off:.1f} σ", f"{wrong:.0f} σ")
            for name, loc, scale, off, wrong in zip(
                names, closed.loc, closed.scale, found, refuted, strict=True
            )
        ],
    )
    checks.at_most(
        f"every quantile from {QUANTILES[0]:.0%} to {QUANTILES[-1]:.0%} agrees with the closed "
        "form, in standard deviations",
        float(found.max()),
        SIGMAS,
    )
    checks.check(
        "control: scales added as a Gaussian's are refuted for every image",
        (refuted > 4 * SIGMAS).all(),
        f"at least {refuted.min():.0f} σ",
    )


def one_vs_rest(checks: Checks, output: Any) -> None:
    checks.section("one-vs-rest decisions")
    subject, model = checks.subject, checks.subject.model
    p = model.ovr_classifier(output.loc_S, output.scale_S)
    margin = output.loc_S.double() - model.decision.threshold.double()
    ratio = margin / output.scale_S.double()
    exact = 0.5 + ratio.atan() / math.pi
    checks.at_most(
        "P = 1/2 + atan((loc_S - C) / scale_S) / pi, relative error in the model's precision",
        relative_error(p, exact),
        1e-5,
    )
    checks.check(
        "every P is strictly between 0 and 1",
        (p > 0).all() and (p < 1).all(),
        f"{p.min():.2g} to {p.max():.2g}",
    )
    chosen = model.decision.choose(output.s_dist)
    lost = 1 - exact.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) / exact.amax(-1)
    checks.at_most(
        "the standard choice has the highest P of its position, relative loss",
        float(lost.max()),
        1e-4,
    )
    total = float(p.double().sum(-1).median())
    checks.check(
        "the probabilities sum to about 1 before training (median within a factor of 2)",
        0.5 <= total <= 2,
        f"{total:.3g}",
        unless=subject.why_uncalibrated or subject.why_other_choices,
    )


def draw_images(u: Cauchy, weight: Tensor, own: Tensor, generator: torch.Generator) -> Tensor:
    """W u + own noise for BATCH individuals u ~ U. -> (BATCH, K)"""
    many = Cauchy(u.loc.double().expand(BATCH, -1), u.scale.double().expand(BATCH, -1))
    noise = Cauchy(torch.zeros_like(own), torch.ones_like(own))
    noise = Cauchy(noise.loc.expand(BATCH, -1), noise.scale.expand(BATCH, -1))
    return many.sample(generator) @ weight.T + own * noise.sample(generator)


def deviations(images: Tensor, law: Cauchy) -> Tensor:
    """Largest error of the share of draws below a quantile, in standard deviations. -> (K,)"""
    worst = torch.zeros(images.shape[1], dtype=torch.float64)
    for p in QUANTILES:
        share = (images <= law.icdf(p)).double().mean(0)
        sigma = math.sqrt(p * (1 - p) / len(images))
        worst = torch.maximum(worst, (share - p).abs().cpu() / sigma)
    return worst


def exact_scale(model: Any, scale: Tensor, tokens: Tensor) -> Tensor:
    """scale_S of some tokens in float64."""
    own = model.action.decision_noise[tokens].double().abs() * scale.mean(-1, keepdim=True)
    return (scale @ model.lm_head.weight[tokens].double().abs().T + own).clamp_min(SCALE_FLOOR)


def location_error(
    model: Any, u: Cauchy, loc_S: Tensor, temperature: float, tokens: Tensor, seed: int
) -> float:
    """|loc_S - W (loc_U + T |b| eps)| over |W| |loc_U'|, in units of the dtype's epsilon.

    eps is drawn again by the documented formula: tan(pi (uniform - 1/2)).
    """
    uniform = torch.rand(u.loc.shape, generator=seeded(seed)).double()
    eps = torch.tan(math.pi * (uniform - 0.5))
    individual = u.loc.double() + temperature * model.action.b_noise.double().abs() * eps
    weight = model.lm_head.weight[tokens].double()
    expected = individual @ weight.T
    if model.lm_head.bias is not None:
        expected = expected + model.lm_head.bias[tokens].double()
    error = (loc_S[..., tokens].double() - expected).abs()
    return float((error / (individual.abs() @ weight.abs().T)).max() / torch.finfo(loc_S.dtype).eps)


def relative_error(value: Tensor, expected: Tensor) -> float:
    return float((value.double() / expected - 1).abs().max())


def some_tokens(model: Any, seed: int) -> Tensor:
    vocabulary = model.config.vocab_size
    tokens = torch.randperm(vocabulary, generator=seeded(seed))[:TOKENS]
    return tokens[model.lm_head.weight[tokens].any(-1)]


@contextlib.contextmanager
def exogenous_noise_off(model: Any) -> Iterator[None]:
    kept = model.action.b_noise.detach().clone()
    model.action.b_noise.zero_()
    try:
        yield
    finally:
        model.action.b_noise.copy_(kept)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


if __name__ == "__main__":
    typer.run(main)
