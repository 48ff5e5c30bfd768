"""Individuals and counterfactuals: six pieces of evidence on the embedded model.

    python benchmarks/individuals.py all [--model DIR] [--output docs/results/individuals.md]
    python benchmarks/individuals.py persona --speakers 10 --prompts 10 --tokens 40

    persona    can one tell who wrote a text?
    quality    log-probability against diversity
    stability  how far a small edit moves a text, beside the Gumbel-max baseline
    truth      counterfactuals against a known structural model
    analytic   closed forms against a million draws
    replay     the same words alone, in company, without a cache, and in NumPy

Each part writes its own section of the page; the others are kept from the JSON beside it. Every
part first says how long it will take on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import save
from liveliness import PROMPTS, QUESTIONS, asked, repetition, word_distance
from transformers import LogitsProcessorList

from causal_qwen.analysis import gumbel
from causal_qwen.analysis.counterfactual import counterfactual, stability_violations
from causal_qwen.analysis.gumbel import GumbelIndividual
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.analysis.token_sequence import TokenSequence
from causal_qwen.conversion.calibration import LogProbRecorder, pad_left
from causal_qwen.conversion.convert import default_model, open_model
from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.engine import Engine
from causal_qwen.generation.mixin import ModeProcessor
from causal_qwen.generation.streaming import end_ids
from causal_qwen.individuals.individual import Individual
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config

EDITS = (  # a prompt, and the same with one thing changed
    ("The carpenter measured the plank twice and", "The carpenter measured the plank once and"),
    ("The old king had three sons, and the", "The old king had three daughters, and the"),
    ("Our cat refuses to", "Our dog refuses to"),
    ("The train to London was late, so", "The train to Paris was late, so"),
    ("My brother bought a red bicycle and", "My sister bought a red bicycle and"),
    ("In summer the village is full of", "In winter the village is full of"),
    ("The doctor said that the patient", "The nurse said that the patient"),
    ("Children learn to read when", "Children learn to swim when"),
    ("The engineer who designed the tunnel", "The engineer who designed the bridge"),
    ("After the rain the garden", "After the storm the garden"),
)
SOFTMAX = {"causal_mode": "compatible", "do_sample": True, "top_k": 0}
SETTINGS: dict[str, dict[str, Any]] = {
    **{f"softmax T={t}": {**SOFTMAX, "temperature": t} for t in (0.7, 1.0)},
    **{f"softmax top-p {p}": {**SOFTMAX, "top_p": p} for p in (0.5, 0.9)},
    "softmax top-k 50": {**SOFTMAX, "top_k": 50},
    "softmax min-p 0.1": {**SOFTMAX, "min_p": 0.1},
    **{
        f"shared T={t} rho={rho}": {"causal_mode": "causal", "temperature": t, "min_density": rho}
        for t, rho in (
            *((0.3, 0.0), (1.0, 0.0)),
            *((1.0, 0.001), (2.0, 0.01), (4.0, 0.05), (8.0, 0.05)),
        )
    },
    **{
        f"fresh T={t} rho={rho}": {
            "causal_mode": "causal",
            "fresh_noise": True,
            "temperature": t,
            "min_density": rho,
        }
        for t, rho in ((1.0, 0.0), (1.0, 0.01), (4.0, 0.05))
    },
}
RIVAL = "softmax top-p 0.9"
TOGETHER_PROMPTS = 5  # of one batch in `quality`
STEPS = 7  # of the bisection that finds a temperature
Said = tuple[list[list[int]], np.ndarray]  # tokens of every row; log-probability per token


class Stage:
    """The model, its prompts, and how its texts are made and scored."""

    def __init__(self, path: Path, prompts: int, tokens: int) -> None:
        self.processor, self.model = open_model(path)
        self.tokens = tokens
        texts = [*PROMPTS, *(asked(self.processor.tokenizer, one) for one in QUESTIONS)]
        order = [i for pair in zip(range(10), range(10, 20), strict=True) for i in pair]
        self.prompts = [
            torch.tensor(self.processor.tokenizer(texts[i]).input_ids) for i in order[:prompts]
        ]

    @torch.no_grad()
    def say(self, rows: Sequence[torch.Tensor], seed: int = 0, **options: Any) -> Said:
        """What is said after every row; `people` are Gumbel speakers, one per row."""
        batch = pad_left(rows, self.model)
        start = batch["input_ids"].shape[1]
        recorder = LogProbRecorder(start, end_ids(self.model))
        torch.manual_seed(seed)
        settings = {
            **batch,
            "max_new_tokens": self.tokens,
            "logits_processor": LogitsProcessorList([recorder]),
            **options,
        }
        people = settings.pop("people", None)
        ids = (
            self.model.generate(**settings)
            if people is None
            else gumbel.generate(self.model, people, **settings)
        )
        total, count = recorder.per_row(ids)
        said = [row[:n] for row, n in zip(ids[:, start:].tolist(), count.tolist(), strict=True)]
        return said, (total / count).numpy()

    def decode(self, rows: list[list[int]]) -> list[str]:
        return self.processor.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def announce(self, part: str, texts: int, rows: int = 20) -> None:
        """How long `texts` texts will take, `rows` at a time, from one batch on this machine."""
        before = time.perf_counter()
        self.say(self.prompts[:1] * rows, causal_mode="causal", individual=0, max_new_tokens=8)
        each = (time.perf_counter() - before) / (rows * 8) * self.tokens
        print(f"{part}: {texts} texts, about {each * texts / 60:.0f} minutes", flush=True)


def interval(values: Sequence[float], draws: int = 2000) -> list[float]:
    """[mean, low, high]: a 95% bootstrap interval of the mean."""
    x = np.asarray(values, dtype=np.float64)
    means = np.random.default_rng(0).choice(x, (draws, len(x))).mean(1)
    return [float(x.mean()), *np.quantile(means, (0.025, 0.975)).tolist()]


def shown(triple: Sequence[float], digits: int = 2) -> str:
    mean, low, high = triple
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"


# ---------------------------------------------------------------- 1: who wrote it?


def persona(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Leave one prompt out, and guess the speaker of its texts from the others'."""
    speakers, prompts = options.speakers, stage.prompts
    everybody = prompts * speakers
    stage.announce("persona", 4 * (STEPS + 1) * len(everybody), len(everybody))

    def individuals(heat: float, fresh: bool) -> Said:
        who = [
            Individual.draw(stage.model, seed=s, fresh=fresh, temperature=heat)
            for s in range(speakers)
            for _ in prompts
        ]
        return stage.say(everybody, causal_mode="causal", individual=who)

    def softmax(heat: float) -> Said:
        parts = [stage.say(prompts, **SOFTMAX, temperature=heat, seed=s) for s in range(speakers)]
        return [row for said, _ in parts for row in said], np.concatenate([lp for _, lp in parts])

    def gumbels(heat: float) -> Said:
        who = [
            GumbelIndividual.draw(stage.model, seed=s, fresh=False, temperature=heat)
            for s in range(speakers)
        ]
        return stage.say(everybody, people=[one for one in who for _ in prompts])

    kinds: dict[str, Callable[[float], Said]] = {
        "shared e": partial(individuals, fresh=False),
        "fresh e per token": partial(individuals, fresh=True),
        "softmax, fixed seed": softmax,
        "shared Gumbel": gumbels,
    }
    results = {}
    for name, speak in kinds.items():
        heat = matched(lambda heat, speak=speak: speak(heat)[1].mean(), options.target)
        said, log_probs = speak(heat)
        table = [said[s * len(prompts) : (s + 1) * len(prompts)] for s in range(speakers)]
        hits = [guessed(table, held_out) for held_out in range(len(prompts))]
        results[name] = {
            "temperature": heat,
            "log_prob": interval(log_probs),
            "accuracy": interval(hits),
            "examples": stage.decode([table[0][0], table[0][-1], table[1][0], table[1][-1]]),
        }
        print(name, json.dumps(results[name]), flush=True)
    return {"speakers": speakers, "prompts": len(prompts), "tokens": stage.tokens, "kinds": results}


def matched(log_prob: Callable[[float], float], target: float) -> float:
    """The temperature at which texts have the target log-probability, by bisection."""
    low, high = math.log(0.02), math.log(8.0)
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if log_prob(math.exp(middle)) > target else (low, middle)
    return math.exp((low + high) / 2)


def guessed(table: list[list[list[int]]], held_out: int) -> float:
    """The share of speakers that naive Bayes on tokens and pairs recognises on one prompt."""

    def features(tokens: list[int]) -> list[Any]:
        return [*tokens, *itertools.pairwise(tokens)]

    counts = [
        Counter(
            f for prompt, text in enumerate(texts) if prompt != held_out for f in features(text)
        )
        for texts in table
    ]
    known = set().union(*counts)
    totals = [sum(count.values()) + len(known) for count in counts]
    hits = 0
    for speaker, texts in enumerate(table):
        words = [f for f in features(texts[held_out]) if f in known]
        scores = [
            sum(math.log((count[f] + 1) / total) for f in words)
            for count, total in zip(counts, totals, strict=True)
        ]
        best = np.flatnonzero(np.array(scores) == max(scores))
        hits += float(speaker in best) / len(best)
    return hits / len(table)


def persona_page(r: dict[str, Any]) -> list[str]:
    return [
        "## 1. Who wrote it?",
        "",
        f"{r['speakers']} speakers x {r['prompts']} prompts x {r['tokens']} tokens, temperatures "
        "matched in the mean log-probability of these texts. Accuracy: naive Bayes on tokens and "
        "token pairs guesses the speaker of a text on a prompt it has not seen; chance is "
        f"{1 / r['speakers']:.2f}. "
        "95% bootstrap intervals (over texts, over held-out prompts).",
        "",
        "| speaker | temperature | log-prob/token | accuracy |",
        "|---|---|---|---|",
        *(
            f"| {name} | {k['temperature']:.2f} | {shown(k['log_prob'])} | {shown(k['accuracy'])} |"
            for name, k in r["kinds"].items()
        ),
        "",
        *(
            f"- {name}: {' / '.join(' '.join(text.split())[:80] for text in k['examples'])}"
            for name, k in r["kinds"].items()
        ),
        "",
    ]


# ---------------------------------------------------------------- 2: quality against diversity


def quality(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    judge = None if options.judge is None else open_model(options.judge)
    stage.announce("quality", len(SETTINGS) * len(stage.prompts) * options.samples)
    results = {}
    for name, setting in SETTINGS.items():
        rows: dict[str, list[float]] = {}
        example = ""
        for first in range(0, len(stage.prompts), TOGETHER_PROMPTS):
            group = stage.prompts[first : first + TOGETHER_PROMPTS]
            batch = [prompt for prompt in group for _ in range(options.samples)]
            who = [*range(options.samples)] * len(group)
            more = {} if "do_sample" in setting else {"individual": who}
            said, log_probs = stage.say(batch, seed=first, **setting, **more)
            for place, prompt in enumerate(group):
                own = slice(place * options.samples, (place + 1) * options.samples)
                texts = stage.decode(said[own])
                example = example or " ".join(texts[0].split())[:90]
                measured = {"log_prob": float(log_probs[own].mean())} | diversity(
                    said[own], texts, prompt.tolist()
                )
                if judge is not None:
                    told = stage.decode([prompt.tolist()])[0]
                    measured["judge"] = judged(*judge, told, texts)
                for key, value in measured.items():
                    rows.setdefault(key, []).append(value)
        results[name] = {key: interval(values) for key, values in rows.items()}
        results[name] |= {"example": example, "by_prompt": rows}
        print(name, json.dumps(results[name]), flush=True)
    shape = {"prompts": len(stage.prompts), "samples": options.samples, "tokens": stage.tokens}
    return {**shape, "settings": results}


def diversity(said: list[list[int]], texts: list[str], prompt: list[int]) -> dict[str, float]:
    """How unlike each other the texts after one prompt are, and how much they repeat."""
    pairs = [pair for row in said for pair in itertools.pairwise(row)]
    two = itertools.combinations(texts, 2)
    return {
        "distinct_2": len(set(pairs)) / max(len(pairs), 1),
        "distance": float(np.mean([word_distance(*pair) for pair in two])),
        "repetition": float(np.mean([repetition(row) for row in said])),
        "copied": copied(said, prompt),
    }


def compared(r: dict[str, Any], name: str, key: str) -> list[float]:
    """One setting less the rival on the same prompts: [mean, low, high]."""
    mine, rival = (r["settings"][one]["by_prompt"][key] for one in (name, RIVAL))
    return interval([a - b for a, b in zip(mine, rival, strict=True)])


def copied(said: list[list[int]], prompt: list[int]) -> float:
    """The share of 4-grams that stand in the prompt or in an earlier place of the same text."""

    def share(row: list[int]) -> float:
        text = [*prompt, *row]
        grams = [tuple(text[i : i + 4]) for i in range(len(text) - 3)]
        fresh = range(max(len(prompt) - 3, 0), len(grams))
        seen: set[Any] = set(grams[: fresh.start])
        old = 0
        for i in fresh:
            old += grams[i] in seen
            seen.add(grams[i])
        return old / max(len(fresh), 1)

    return float(np.mean([share(row) for row in said]))


@torch.no_grad()
def judged(processor: Any, model: Any, prompt: str, texts: list[str]) -> float:
    """The mean log-probability per token that a second model gives the texts."""
    start = len(processor.tokenizer(prompt).input_ids)
    scores = []
    for text in texts:
        ids = processor.tokenizer(prompt + text, return_tensors="pt").input_ids
        if ids.shape[1] > start:
            log_p = model(ids, output_scale_S=False).logits[0, start - 1 : -1].log_softmax(-1)
            scores.append(float(log_p.gather(-1, ids[0, start:, None]).mean()))
    return float(np.mean(scores)) if scores else math.nan


def quality_page(r: dict[str, Any]) -> list[str]:
    has_judge = any("judge" in row for row in r["settings"].values())
    return [
        "## 2. Quality against diversity",
        "",
        f"{r['prompts']} prompts x {r['samples']} samples x {r['tokens']} tokens; 95% bootstrap "
        "intervals over prompts. rho is `min_density`. Repetition: repeated trigrams of a text; "
        "copied: 4-grams that stood in the prompt or earlier in the text. Likely text is not good "
        "text when it repeats itself: read the columns together.",
        "",
        "![log-probability against diversity](individuals-quality.png)",
        "",
        "| speaker | log-prob/token | distance | distinct-2 | repetition | copied |"
        + (" judge |" if has_judge else "")
        + " says |",
        "|---|---|---|---|---|---|" + ("---|" if has_judge else "") + "---|",
        *(
            f"| {name} | {shown(s['log_prob'])} | {shown(s['distance'])} | "
            f"{shown(s['distinct_2'])} | {s['repetition'][0]:.2f} | {s['copied'][0]:.2f} |"
            + (f" {s['judge'][0]:.2f} |" if has_judge else "")
            + f" {s['example'].replace('|', '/')} |"
            for name, s in r["settings"].items()
        ),
        "",
        f"Less {RIVAL}, prompt by prompt. A setting beats it on both axes if log-probability and "
        "distance are both higher, beyond chance; whether its text is worth reading is in the "
        "columns on repetition.",
        "",
        "| speaker | log-prob/token | distance | repetition | beats it on both axes |",
        "|---|---|---|---|---|",
        *(versus(r, name) for name in r["settings"] if name != RIVAL),
        "",
    ]


def versus(r: dict[str, Any], name: str) -> str:
    """A row of the comparison with the rival."""
    differences = [compared(r, name, key) for key in ("log_prob", "distance", "repetition")]
    (_, likelier, _), (_, farther, _), _ = differences
    cells = " | ".join(shown(one) for one in differences)
    return f"| {name} | {cells} | {'yes' if likelier > 0 and farther > 0 else 'no'} |"


def quality_plot(r: dict[str, Any], output: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4.5))
    for name, s in r["settings"].items():
        kind = name.split()[0]
        colour = {"softmax": "C0", "shared": "C3", "fresh": "C2"}[kind]
        for axis, key in zip(axes, ("distance", "repetition"), strict=True):
            axis.scatter(s[key][0], s["log_prob"][0], color=colour, s=18)
            label = name.removeprefix(f"{kind} ")
            axis.annotate(label, (s[key][0], s["log_prob"][0]), fontsize=6)
    for axis, key in zip(axes, ("word distance between samples", "repeated trigrams"), strict=True):
        axis.set_xlabel(key)
        axis.set_ylabel("log-probability per token")
    axes[0].set_title("softmax blue, shared red, fresh green", fontsize=9)
    figure.tight_layout()
    figure.savefig(output, dpi=130)
    pyplot.close(figure)


# ---------------------------------------------------------------- 3: stability


def stability(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    pairs = EDITS[: options.prompts]
    stage.announce("stability", 5 * 4 * len(pairs) * options.speakers, rows=1)
    model, heats = stage.model, dict[str, float]()
    factual = [torch.tensor(stage.processor.tokenizer(text).input_ids) for text, _ in pairs]

    def shared(seed: int) -> Any:
        return Individual.draw(model, seed=seed, temperature=heats["shared"])

    def fresh(seed: int) -> Any:
        return Individual.draw(model, seed=seed, fresh=True, temperature=heats["fresh"])

    def gumbels(seed: int) -> Any:
        return GumbelIndividual.draw(model, seed=seed, temperature=heats["gumbel"])

    def log_prob(kind: str, draw: Callable[[int], Any], heat: float) -> float:
        heats[kind] = heat
        people = [draw(seed) for seed in range(options.speakers) for _ in factual]
        is_gumbel = kind == "gumbel"
        who = {"people": people} if is_gumbel else {"causal_mode": "causal", "individual": people}
        return float(stage.say(factual * options.speakers, **who)[1].mean())

    for kind, draw in {"shared": shared, "fresh": fresh, "gumbel": gumbels}.items():
        heats[kind] = matched(
            lambda heat, kind=kind, draw=draw: log_prob(kind, draw, heat), options.target
        )
    kinds: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
        "shared e, pearl": (shared, {}),
        "shared e, disco": (shared, {"semantics": "disco"}),
        "fresh e, pearl": (fresh, {}),
        "shared e, pearl, top-p 0.9": (shared, {"top_p": 0.9}),
        "Gumbel": (gumbels, {}),
    }
    results = {}
    for name, (draw, more) in kinds.items():
        ask = {"processor": stage.processor, "max_new_tokens": stage.tokens, **more}
        runs, noops, others = [], [], []
        for text, other in pairs:
            seeds = range(options.speakers)
            group = [counterfactual(model, text, draw(seed), other, **ask) for seed in seeds]
            for seed in seeds[: options.noops]:
                again = counterfactual(model, text, draw(seed), text, **ask)
                noops.append(again.divergence is None)
            for seed, one in zip(seeds, group, strict=True):
                somebody = group[seed - 1]  # else, after the edited prompt
                others.append(distances(one.factual.tokens, somebody.counterfactual.tokens))
            runs += group
        moved = [distances(r.factual.tokens, r.counterfactual.tokens) for r in runs]
        results[name] = {
            "distance": interval([d for d, _ in moved]),
            "prefix": interval([p for _, p in moved]),
            "resampled_distance": interval([d for d, _ in others]),
            "resampled_prefix": interval([p for _, p in others]),
            "gap": interval([o[0] - m[0] for m, o in zip(moved, others, strict=True)]),
            "replay": float(np.mean(noops)),
            "stability": stability_violations(*runs)._asdict(),
            "log_prob": float(np.mean([r.factual.log_prob.mean() for r in runs])),
        }
        print(name, json.dumps(results[name]), flush=True)
    shape = {"edits": len(pairs), "speakers": options.speakers, "tokens": stage.tokens}
    return {**shape, "temperatures": heats, "kinds": results}


def distances(one: list[str], other: list[str]) -> tuple[float, float]:
    """Normalised edit distance, and the share of the text before the first difference."""
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    first, second = (" ".join(token.replace(" ", "_") or "_" for token in t) for t in (one, other))
    return word_distance(first, second), same / max(len(one), len(other), 1)


def stability_page(r: dict[str, Any]) -> list[str]:
    return [
        "## 3. A small edit",
        "",
        f"{r['edits']} edits of one word x {r['speakers']} speakers x {r['tokens']} tokens, "
        "temperatures matched in the mean log-probability of these texts (disco adds its exogenous "
        "noise on top). "
        "Distance: normalised token edit distance between the worlds; prefix: share of the text "
        "before the first difference; gap: how much farther plain re-sampling is (another speaker "
        "after the edited prompt). No-op: the unchanged prompt gives the unchanged text (not so "
        "in disco, where chance is redrawn). Violations: choices that changed against the odds, "
        "of all that changed.",
        "",
        "| noise | log-prob/token | distance | prefix | gap | no-op replay | violations |",
        "|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {k['log_prob']:.2f} | {shown(k['distance'])} | {shown(k['prefix'])} | "
            f"{shown(k['gap'])} | {k['replay']:.1%} | {k['stability']['violations']} of "
            f"{k['stability']['changed']} |"
            for name, k in r["kinds"].items()
        ),
        "",
    ]


# ---------------------------------------------------------------- 4: a known truth


def truth(_stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Two small worlds whose counterfactuals are known: one linear and Cauchy, one Gumbel-max.

    Observers see a factual text only. One infers the individual; one explains the choices by
    Gumbel noise; one ignores what was said.
    """
    minutes = options.trials * options.draws / 40 * 2 / 60
    print(f"truth: {options.trials} trials twice, about {minutes:.0f} minutes", flush=True)
    model = small_world()
    return {
        "trials": options.trials,
        "draws": options.draws,
        "individuals": linear_world(model, options),
        "gumbel": gumbel_world(model, options),
    }


def linear_world(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Who speaks is an individual; Gumbel noise has the same choice probabilities."""
    number, rng = model.config.num_token_id, np.random.default_rng(0)
    hits: dict[str, list[float]] = {name: [] for name in OBSERVERS}
    misses: dict[str, list[float]] = {name: [] for name in OBSERVERS if name != GUMBEL}
    nobody = 0
    while len(hits[GUMBEL]) < options.trials:
        prompts = torch.from_numpy(rng.integers(0, number, (2, 4)))
        who = Individual.draw(model, seed=int(rng.integers(2**62)))
        said, happened = (speak_twice(model, prompt, [who]) for prompt in prompts)
        text = TokenSequence(said[0][0], said[1][0])
        found = infer_individual(model, text, prompt=prompts[0], n=options.draws, burn_in=30)
        if not found:
            nobody += 1
            continue
        truth, value = happened[0][0, 0], float(happened[1][0, 0])
        for name, people in ((INFERRED, found.individuals), (ANYBODY, anybody(model, options))):
            ids, values = speak_twice(model, prompts[1], people)
            hits[name].append(float((ids[:, 0] == truth).double().mean()))
            is_number = (ids[:, 0] == number).numpy()
            if truth == number and is_number.any():
                guess = float(np.median(values[:, 0].numpy()[is_number]))
                misses[name].append(abs(symlog(guess) - symlog(value)))
        before, after = (choice_log_probs(model, prompt) for prompt in prompts)
        chosen = hindsight(before, after, int(text.ids[0]), options.draws, rng)
        hits[GUMBEL].append(float((chosen == int(truth)).mean()))
    return {
        "nobody": nobody,
        "hits": {name: interval(values) for name, values in hits.items()},
        "misses": {name: interval(values) for name, values in misses.items() if values},
    }


def gumbel_world(model: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Who speaks is Gumbel noise on the same logits; here the individual's law is wrong."""
    rng = np.random.default_rng(1)
    hits: dict[str, list[float]] = {name: [] for name in OBSERVERS}
    nobody = 0
    while len(hits[GUMBEL]) < options.trials:
        prompts = torch.from_numpy(rng.integers(0, model.config.num_token_id, (2, 4)))
        with torch.no_grad():
            before, after = (
                model(prompt[None]).logits[0, -1].double().log_softmax(-1).numpy()
                for prompt in prompts
            )
        before[-1] = after[-1] = -1e9  # nobody says a number: Gumbel noise has no value for it
        noise = rng.gumbel(size=len(before))
        said, truth = int((before + noise).argmax()), int((after + noise).argmax())
        text = TokenSequence(torch.tensor([said]), torch.zeros(1).double())
        found = infer_individual(model, text, prompt=prompts[0], n=options.draws, burn_in=30)
        if not found:
            nobody += 1
            continue
        for name, people in ((INFERRED, found.individuals), (ANYBODY, anybody(model, options))):
            ids, _ = speak_twice(model, prompts[1], people)
            hits[name].append(float((ids[:, 0] == truth).double().mean()))
        chosen = hindsight(before, after, said, options.draws, rng)
        hits[GUMBEL].append(float((chosen == truth).mean()))
    return {
        "nobody": nobody,
        "hits": {name: interval(values) for name, values in hits.items()},
        "misses": {},
    }


OBSERVERS = INFERRED, GUMBEL, ANYBODY = (
    "inferred individual",
    "Gumbel in hindsight",
    "no abduction",
)


def anybody(model: Any, options: argparse.Namespace) -> list[Individual]:
    return [Individual.draw(model, seed=1_000 + draw) for draw in range(options.draws)]


def small_world() -> Any:
    torch.manual_seed(0)
    config = CausalQwen2Config(
        vocab_size=31,  # the last of them <NUM>
        hidden_size=16,
        causal_size=8,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        num_token_id=30,
    )
    world = CausalQwenForCausalLM(config).eval()
    with torch.no_grad():
        world.abduction.scale.bias.fill_(math.log(0.3))
        world.abduction.scale.weight.normal_(0, 0.05)
        world.decision.threshold[30] -= 3.0  # numbers are common
    world.generation_config.noise_gain = 1.0
    return world


def speak_twice(world: Any, prompt: torch.Tensor, people: list[Any]) -> tuple[Any, Any]:
    """Two tokens of every speaker after a prompt, and their values. -> (n, 2), (n, 2)"""
    ids = prompt.repeat(len(people), 1)
    result = world.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        causal_mode="causal",
        individual=people,
        max_new_tokens=2,
        return_dict_in_generate=True,
    )
    new = slice(len(prompt), None)
    return result.sequences[:, new], result.numeric_values[:, new]


@torch.no_grad()
def choice_log_probs(world: Any, prompt: torch.Tensor, draws: int = 20_000) -> np.ndarray:
    """log of how often individuals choose each token next. -> (V,)"""
    u = world(prompt[None]).u_dist
    loc, scale = u.loc[0, -1].double(), u.scale[0, -1].double()
    uniform = torch.rand(draws, len(loc), dtype=torch.float64, generator=generator(1))
    people = loc + scale * torch.tan(math.pi * (uniform - 0.5))
    scores = people @ world.lm_head.weight.double().T - world.decision.threshold.double()
    counts = torch.bincount(scores.argmax(-1), minlength=scores.shape[-1]).double()
    return ((counts + 0.1) / (counts + 0.1).sum()).log().numpy()


def hindsight(
    before: np.ndarray, after: np.ndarray, said: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Choices after `after` of Gumbel speakers who said `said` after `before`. -> (draws,)"""
    top = rng.gumbel(size=(draws, 1)) + np.logaddexp.reduce(before)
    below = -np.logaddexp(-top, -(before + rng.gumbel(size=(draws, len(before)))))
    below[:, said] = top[:, 0]
    return (below - before + after).argmax(1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symlog(value: float) -> float:
    return math.copysign(math.log1p(abs(value)), value)


def truth_page(r: dict[str, Any]) -> list[str]:
    lines = [
        "## 4. A known truth",
        "",
        f"{r['trials']} times somebody in a small world speaks after one prompt, and the same "
        "somebody answers another prompt, which no observer sees. Observers know the law and see "
        f"the factual text; {r['draws']} draws each. Hit: probability given to what really "
        "happened next; miss: error of the number's median in symlog units, where a number "
        "happened. In the first world individuals speak, and Gumbel noise is given their exact "
        "choice probabilities: observation alone cannot tell the two apart. In the second, Gumbel "
        "noise on the logits speaks, and the individual's law is the wrong one.",
        "",
    ]
    for world, title in (("individuals", "individuals speak"), ("gumbel", "Gumbel noise speaks")):
        w = r[world]
        lines += [
            f"| {title}: observer | hit | number's miss |",
            "|---|---|---|",
            *(
                f"| {name} | {shown(hit, 3)} | "
                f"{shown(w['misses'][name], 3) if name in w['misses'] else '-'} |"
                for name, hit in w["hits"].items()
            ),
            "",
            f"Texts that no individual can say, left out: {w['nobody']}.",
            "",
        ]
    return lines


# ---------------------------------------------------------------- 5: closed forms


@torch.no_grad()
def analytic(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """P_k and quantiles of Y against draws of S = W U' + |a| mean(scale_U') eta, token by token."""
    model, draws = stage.model, options.monte_carlo
    cost = draws * options.positions / 1e6
    print(f"analytic: about {2 + 3 * cost:.0f} minutes", flush=True)
    ids = stage.processor(" ".join(PROMPTS), return_tensors="pt")["input_ids"]
    output = model(ids)
    places = np.linspace(4, ids.shape[1] - 1, options.positions).astype(int)
    size = model.config.vocab_size
    tokens = torch.randperm(size, generator=generator(0))[: options.tokens_checked]
    weight, threshold = model.lm_head.weight[tokens].float(), model.decision.threshold[tokens]
    head = model.action.value
    errors: list[float] = []
    quantile_errors: list[float] = []
    differs: list[bool] = []
    gaps: list[float] = []
    plain_errors: list[float] = []
    levels = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
    for place in places:
        u = Cauchy(output.loc_U[0, place], output.scale_U[0, place])
        wide = model.action.widen(u)
        a = model.action.decision_noise[tokens].abs() * wide.scale.mean()
        scale = (wide.scale @ weight.abs().T + a).clamp_min(SCALE_FLOOR)
        p = Cauchy(wide.loc @ weight.T, scale).sf(threshold).double()
        own = Cauchy(u.loc @ weight.T, u.scale @ weight.abs().T).sf(threshold).double()
        hits = torch.zeros(len(tokens), dtype=torch.float64)
        plain = torch.zeros_like(hits)
        values = []
        for chunk in range(0, draws, CHUNK):
            rows = min(CHUNK, draws - chunk)
            noise = standard_cauchy((rows, len(u.loc)), int(place) * draws + chunk)
            eta = standard_cauchy((rows, len(tokens)), int(place) * draws + chunk + 1)
            people = wide.loc + wide.scale * noise
            hits += (people @ weight.T + a * eta > threshold).sum(0)
            plain += ((u.loc + u.scale * noise) @ weight.T > threshold).sum(0)
            values.append(people @ head.weight[0] + head.bias)
        sigma = (p * (1 - p) / draws).sqrt()
        errors += ((hits / draws - p) / sigma).tolist()
        gaps += (own / p).tolist()
        plain_errors += ((plain / draws - own) / (own * (1 - own) / draws).sqrt()).tolist()
        y = model.action.number(wide)
        drawn = torch.cat(values).double().sort().values
        for level in levels.tolist():
            expected = y.quantile(level).double()
            density = Cauchy(y.loc.double(), y.scale.double()).log_prob(expected).exp()
            error = drawn[int(level * draws)] - expected
            quantile_errors.append(float(error * density / math.sqrt(level * (1 - level) / draws)))
        best = int(model.decision.choose(Cauchy(output.logits[0, place], output.scale_S[0, place])))
        differs.append(favourite(model, u, options.individuals) != best)
        print(place, float(np.mean(np.abs(errors) <= 3)), differs[-1], flush=True)
    return {
        "draws": draws,
        "positions": len(places),
        "tokens": len(tokens),
        "within": float(np.mean(np.abs(errors) <= 3)),
        "quantiles_within": float(np.mean(np.abs(quantile_errors) <= 3)),
        "ratio": np.quantile(gaps, (0.05, 0.5, 0.95)).tolist(),
        "plain_within": float(np.mean(np.abs(plain_errors) <= 3)),
        "individuals": options.individuals,
        "differs": float(np.mean(differs)),
    }


CHUNK = 20_000


def standard_cauchy(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """In float64 until the tangent: 24 bits of a float32 uniform end at 1e7, and a token needs more
    to pass its threshold."""
    uniform = torch.rand(shape, generator=generator(seed), dtype=torch.float64)
    return torch.tan(math.pi * (uniform.clamp_min(2.0**-54) - 0.5)).float()


def favourite(model: Any, u: Cauchy, count: int) -> int:
    """What most of `count` individuals choose at temperature 1, thresholds and all."""
    heat = model.generation_config.noise_gain
    votes: Counter[int] = Counter()
    for start in range(0, count, 100):
        noise = standard_cauchy((min(100, count - start), len(u.loc)), start)
        scores = (u.loc + heat * u.scale * noise) @ model.lm_head.weight.T
        votes.update((scores - model.decision.threshold).argmax(-1).tolist())
    return votes.most_common(1)[0][0]


def analytic_page(r: dict[str, Any]) -> list[str]:
    low, middle, high = r["ratio"]
    return [
        "## 5. Closed forms against draws",
        "",
        f"{r['draws']:,} draws of S = W U' + |a| mean(scale_U') eta at {r['positions']} positions "
        f"of real text, {r['tokens']} random tokens each. The tokens share the draws, as they "
        "share U, so their errors come in clusters.",
        "",
        "| | |",
        "|---|---|",
        f"| P_k within 3 standard errors | {r['within']:.2%} of tokens |",
        f"| quantiles of Y within 3 standard errors | {r['quantiles_within']:.2%} |",
        "| plain `causal` draws (no b, no eta, kappa = 1) above C_k, within 3 standard errors of "
        f"their own closed form | {r['plain_within']:.2%} of tokens |",
        f"| ... and that closed form relative to P_k | median {middle:.3f}, 5% to 95% of tokens "
        f"{low:.3f} to {high:.3f} |",
        f"| argmax_k P_k is not the favourite of {r['individuals']} individuals at T = 1 | "
        f"{r['differs']:.0%} of positions |",
        "",
    ]


# ---------------------------------------------------------------- 6: replay


def replay(stage: Stage, options: argparse.Namespace) -> dict[str, Any]:
    """Every text said again elsewhere, up to the first choice that rounding may decide."""
    model, prompts = stage.model, stage.prompts[: options.prompts // 2]
    stage.announce("replay", 4 * options.speakers * len(prompts), rows=1)
    engine = Engine.from_pretrained(options.model or default_model())
    said: dict[str, list[list[int]]] = {name: [] for name in REPLAYS}
    margins = []
    for seed in range(options.speakers):
        kind = {"temperature": 4.0, "min_density": 0.05} if seed % 3 == 2 else {"temperature": 0.5}
        who = Individual.draw(model, seed=seed, fresh=seed % 3 == 1, **kind)
        settings: dict[str, Any] = {"causal_mode": "causal", "individual": who}
        with margins_of_choices() as found:
            said[TOGETHER] += stage.say(prompts, **settings)[0]
        margins += torch.stack(found, dim=-1).tolist()  # (B, steps)
        for prompt in prompts:
            said[ALONE] += stage.say([prompt], **settings)[0]
            said[UNCACHED] += stage.say([prompt], use_cache=False, **settings)[0]
            told = engine.generate(
                prompt.tolist(), mode="causal", individual=who, max_new_tokens=stage.tokens
            )
            said[IN_NUMPY].append(told.ids[0, told.new].tolist())
    sure = [next((i for i, margin in enumerate(row) if margin < SURE), len(row)) for row in margins]
    choices = [
        margin
        for row, text in zip(margins, said[TOGETHER], strict=True)
        for margin in row[: len(text)]
    ]
    ways = {
        name: {
            "same": float(np.mean([a == b for a, b in zip(said[TOGETHER], texts, strict=True)])),
            "sure_but_other": sum(
                a[:n] != b[:n] for a, b, n in zip(said[TOGETHER], texts, sure, strict=True)
            ),
        }
        for name, texts in said.items()
        if name != TOGETHER
    }
    return {
        "texts": len(sure),
        "choices": len(choices),
        "unsure": sum(margin < SURE for margin in choices),
        "ways": ways,
    }


SURE = 1e-4  # a lead that rounding does not close
TOGETHER, ALONE, UNCACHED, IN_NUMPY = REPLAYS = (
    "in a padded batch",
    "alone",
    "alone, without a cache",
    "alone, in NumPy",
)


@contextmanager
def margins_of_choices() -> Iterator[list[torch.Tensor]]:
    """By how much every chosen token was ahead of the next one. (B,) per step"""
    choose, found = ModeProcessor.__call__, []

    def watch(self: Any, input_ids: Any, scores: Any) -> Any:
        result = choose(self, input_ids, scores)
        best = result.topk(2, dim=-1).values
        found.append(best[:, 0] - best[:, 1])
        return result

    ModeProcessor.__call__ = watch
    try:
        yield found
    finally:
        ModeProcessor.__call__ = choose


def replay_page(r: dict[str, Any]) -> list[str]:
    return [
        "## 6. Replay",
        "",
        f"{r['texts']} texts of a padded batch, {r['choices']} choices, said again under other "
        f"conditions. {r['unsure']} choices ({r['unsure'] / r['choices']:.2%}) had a lead below "
        f"{SURE:g}, which rounding may decide; what follows one of them may differ.",
        "",
        "| said again | the same text | another word before any such choice |",
        "|---|---|---|",
        *(
            f"| {name} | {way['same']:.1%} | {way['sure_but_other']} of {r['texts']} |"
            for name, way in r["ways"].items()
        ),
        "",
    ]


# ---------------------------------------------------------------- the page


PARTS = {
    "persona": persona,
    "quality": quality,
    "stability": stability,
    "truth": truth,
    "analytic": analytic,
    "replay": replay,
}
PAGES = {
    "persona": persona_page,
    "quality": quality_page,
    "stability": stability_page,
    "truth": truth_page,
    "analytic": analytic_page,
    "replay": replay_page,
}


def write(results: dict[str, Any], output: Path) -> None:
    lines = [
        "# Individuals and counterfactuals",
        "",
        "`python benchmarks/individuals.py all` on the embedded model, or part by part with the "
        "sizes that are named below.",
        "",
    ]
    for part, page in PAGES.items():
        if part in results:
            title, *rest = page(results[part])
            asked = " ".join([part, *results[part]["sizes"]])
            lines += [title, "", f"`python benchmarks/individuals.py {asked}`", *rest]
    if "quality" in results:
        output.parent.mkdir(parents=True, exist_ok=True)
        quality_plot(results["quality"], output.with_name("individuals-quality.png"))
    save(lines, results, output)


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["all", *PAGES])
    parser.add_argument("--model", type=Path, default=None)
    parser.add_argument("--judge", type=Path, default=None, help="a second model for `quality`")
    parser.add_argument("--output", type=Path, default=Path("docs/results/individuals.md"))
    parser.add_argument("--speakers", type=int, default=10, help="persona, stability")
    parser.add_argument("--noops", type=int, default=2, help="stability: speakers of no-op edits")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--target", type=float, default=-1.7, help="log-prob/token to match")
    parser.add_argument("--samples", type=int, default=20, help="quality: texts of a prompt")
    parser.add_argument("--trials", type=int, default=200, help="truth")
    parser.add_argument("--draws", type=int, default=40, help="truth: of a posterior")
    parser.add_argument("--monte-carlo", type=int, default=1_000_000, help="analytic: draws")
    parser.add_argument("--positions", type=int, default=4, help="analytic")
    parser.add_argument("--tokens-checked", type=int, default=200, help="analytic")
    parser.add_argument("--individuals", type=int, default=1000, help="analytic: who choose")
    return parser


def main() -> None:
    options = arguments().parse_args()
    path = options.model or default_model()
    saved = options.output.with_suffix(".json")
    results = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
    for part in PAGES if options.part == "all" else [options.part]:
        stage = Stage(path, options.prompts, options.tokens)
        results[part] = PARTS[part](stage, options) | {"sizes": sys.argv[2:]}
        write(results, options.output)


if __name__ == "__main__":
    main()
