"""Individuals and counterfactuals: eight pieces of evidence on the embedded model.

    python benchmarks/individuals.py all [--model DIR] [--output docs/results/individuals.md]
    python benchmarks/individuals.py speakers --speakers 6 --prompts 10 --tokens 32

    grid       how the saved defaults were chosen, on prompts of its own
    speakers   individuals beside softmax sampling and shared Gumbel noise: quality, diversity,
               and whether a classifier recognises the speaker
    trained    the same after a short fine-tuning on `--data`, questions and answers
    stability  how far a small edit moves a text, beside the Gumbel-max baseline
    truth      counterfactuals against a known structural model
    analytic   closed forms against a million draws
    replay     the same text alone, in a batch, without a cache, and in NumPy
    reading    fifty texts at plain defaults, to be read

Each part writes its own section of the page; the others are kept from the JSON beside it. Every
part first prints how long it will take on this machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from _gumbel import GumbelIndividual
from _judges import TrigramModel
from _results import Row, interval, load, log, make_parser, parse, save, span, table
from _stability import stability as count_violations
from _texts import (
    LOOP,
    MIN_P,
    PROMPTS,
    SOFTMAX,
    TUNING_PROMPTS,
    TUNING_QUESTIONS,
    BiasIndividual,
    Texts,
    bias_strength,
    broken_share,
    generate_texts,
    has_loop,
    in_turn,
    prompt_ids,
    repetition,
    word_distance,
)

from causal_qwen.analysis.counterfactual import counterfactual
from causal_qwen.analysis.posterior import infer_individual
from causal_qwen.analysis.token_sequence import TokenSequence
from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.decoding.decision import SCALE_FLOOR
from causal_qwen.generation.logits import DecisionProcessor
from causal_qwen.individuals import Individual
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.numpy_engine import Engine
from causal_qwen.numpy_engine.calibration import DEFAULTS
from causal_qwen.training.run import Run, train

Options = argparse.Namespace
READ = 5  # individuals
GROUP = 6  # speakers among whom one is recognised: chance is 1 / 6
BASELINE = "softmax min-p 0.1"


class Subject:
    """The model and its prompts, openings and questions in turn."""

    def __init__(self, path: Path, prompts: int, tokens: int) -> None:
        self.path, self.tokens = path, tokens
        self.processor, self.model = open_model(path)
        self.prompts = in_turn(*prompt_ids(self.processor.tokenizer))[:prompts]

    def generate(self, prompts: Sequence[torch.Tensor], **options: Any) -> Texts:
        return generate_texts(self.model, prompts, **{"tokens": self.tokens, **options})

    def decode(self, rows: list[list[int]]) -> list[str]:
        return self.processor.tokenizer.batch_decode(rows, skip_special_tokens=True)

    def announce(self, part: str, texts: int, rows: int = 20) -> None:
        """Print how long `texts` texts will take, `rows` at a time, from one batch."""
        start = time.perf_counter()
        self.generate(self.prompts[:1] * rows, tokens=8, individual=0)
        each = (time.perf_counter() - start) / (rows * 8) * self.tokens
        print(f"{part}: {texts} texts, about {each * texts / 60:.0f} minutes", flush=True)

    def texts_of(self, kind: Kind, prompts: list[torch.Tensor], seeds: Sequence[int]) -> Texts:
        """Texts of every speaker after every prompt, speaker by speaker."""
        speakers = None
        if kind.draw is not None:
            rows = itertools.product(seeds, prompts)
            speakers = [kind.draw(self.model, seed, len(prompt)) for seed, prompt in rows]
        return self.generate(prompts * len(seeds), seed=seeds[0], speakers=speakers, **kind.options)


class Kind(NamedTuple):
    """A kind of speaker: options of `generate`, and who speaks on a row."""

    options: dict[str, Any]
    draw: Callable[[Any, int, int], Any] | None = None  # (model, seed, length of the prompt)


def individual(**fields: Any) -> Callable[[Any, int, int], Any]:
    return lambda model, seed, _: Individual.draw(model, seed=seed, **fields)


def gumbel(temperature: float = 1.0) -> Callable[[Any, int, int], Any]:
    """The same Gumbel noise at all positions: at T = 1, softmax sampling at each of them."""
    return lambda model, seed, _: GumbelIndividual.draw(
        model, seed=seed, fresh=False, temperature=temperature
    )


def fixed_seed(model: Any, seed: int, length: int) -> GumbelIndividual:
    """Softmax sampling whose n-th new token has the same random numbers after every prompt."""
    return GumbelIndividual.draw(model, seed=seed).shift(length - 1)


def logit_bias(model: Any, seed: int, length: int) -> BiasIndividual:
    return BiasIndividual(seed, model.config.vocab_size, False, 1.0, strength=bias_strength(model))


CANDIDATES = {"min_p": MIN_P}
# the candidates of individuals
THEIRS = {"min_p": MIN_P, "whole_words": True, "avoid_repeats": DEFAULTS["avoid_repeats"]}
REPEATING = {"avoid_repeats": 0}
KINDS: dict[str, Kind] = {
    BASELINE: Kind({**SOFTMAX, **CANDIDATES}),
    "softmax, candidates of individuals": Kind({**SOFTMAX, **THEIRS}),
    "softmax top-p 0.9": Kind({**SOFTMAX, "top_p": 0.9}),
    "softmax T=0.7": Kind({**SOFTMAX, "temperature": 0.7}),
    "`sampling`": Kind({"causal_mode": "sampling"}, individual(fresh=True)),
    "individuals (`causal`)": Kind({}, individual()),
    "individuals, T = 1/2": Kind({}, individual(temperature=0.5)),
    "individuals that repeat, T = 8": Kind(REPEATING, individual(temperature=8.0)),
    "individuals that repeat, persistence 0.5, T = 8": Kind(
        REPEATING, individual(temperature=8.0, persistence=0.5)
    ),
    "shared Gumbel, min-p 0.1": Kind(CANDIDATES, gumbel()),
    "shared Gumbel, candidates of individuals": Kind(THEIRS, gumbel()),
    "shared Gumbel, min-p 0.1, T = 8": Kind(CANDIDATES, gumbel(8.0)),
    "shared Gumbel": Kind({}, gumbel()),
    "shared logit bias, min-p 0.1": Kind(CANDIDATES, logit_bias),
    "softmax min-p 0.1, fixed seed": Kind(CANDIDATES, fixed_seed),
}


# ---------------------------------------------------------------- 1: how the defaults were chosen

# n of avoid_repeats, kappa, persistence
GRID = [(0, 8, 0.5), (0, 8, 1.0), (2, 1, 1.0)]
GRID += [(3, *rest) for rest in ((1, 0.7), (4, 0.7), (0.5, 1.0), (1, 1.0), (2, 1.0), (4, 1.0))]
GRID += [(3, 8, 1.0), (3, 1, 0.8)]


def grid(subject: Subject, options: Options) -> Row:
    """avoid_repeats x amplitude x persistence on the tuning prompts, beside softmax and Gumbel."""
    tokenizer = subject.processor.tokenizer
    prompts = in_turn(*prompt_ids(tokenizer, TUNING_PROMPTS, TUNING_QUESTIONS))
    prompts = prompts[: options.prompts]
    others = (BASELINE, "shared Gumbel, min-p 0.1")
    kinds = {name: KINDS[name] for name in others[:: options.every]}
    kinds |= {
        f"{name}, n = 3": Kind({**KINDS[name].options, "avoid_repeats": 3}, KINDS[name].draw)
        for name in others[:: options.every]
    }
    gain = subject.model.generation_config.fresh_noise_gain
    for n, factor, persistence in GRID[:: options.every]:
        name = f"individuals, n = {n}, {factor:g} kappa, persistence {persistence:g}"
        options_of = {"avoid_repeats": n, "noise_gain": factor * gain}
        kinds[name] = Kind(options_of, individual(persistence=persistence))
    subject.announce("grid", len(kinds) * len(prompts) * options.speakers)
    results = {}
    for name, kind in kinds.items():
        results[name] = measure(subject, kind, prompts, options.speakers)
        log(name, results[name])
    sizes = {"prompts": len(prompts), "speakers": options.speakers, "tokens": subject.tokens}
    return {**sizes, "kinds": results}


def grid_page(r: Row) -> list[str]:
    return [
        f"{r['prompts']} prompts of the grid's own x {r['speakers']} individuals x {r['tokens']} "
        "tokens, min-p 0.1. n tokens are not said again (0: they are). A row may become the "
        "default if it has no broken token, at most 3 points more repeated trigrams than "
        f"{BASELINE}, and no less distance between texts. 2 and 4 kappa are recognised more often "
        "than kappa itself; n = 2, kappa and persistence 1 was saved, for texts that are nearly "
        "as likely as softmax's and return to the same words as seldom.",
        "",
        *table(speaker_columns(r["kinds"]), r["kinds"]),
    ]


# ---------------------------------------------------------------- 2: speakers


def speakers(subject: Subject, options: Options) -> Row:
    """Every kind of speaker on prompts that took no part in any choice."""
    judge = None if options.judge_text is None else TrigramModel.read(options.judge_text)
    prompts = subject.prompts
    subject.announce("speakers", len(options.kinds) * len(prompts) * options.speakers)
    sizes = {"prompts": len(prompts), "speakers": options.speakers, "tokens": subject.tokens}
    last = load(options.output, {}).get("speakers", {})
    is_same = all(last.get(name) == sizes[name] for name in ("prompts", "tokens"))
    results = last["kinds"] if is_same else {}  # kinds that are not asked for are kept
    for name in options.kinds:
        results[name] = measure(subject, KINDS[name], prompts, options.speakers, judge)
        results[name]["texts"] = len(prompts) * options.speakers
        log(name, results[name])
    in_order = {name: results[name] for name in KINDS if name in results}
    return {**sizes, "kinds": in_order}


def measure(
    subject: Subject,
    kind: Kind,
    prompts: list[torch.Tensor],
    count: int,
    judge: TrigramModel | None = None,
) -> Row:
    """Quality, diversity and recognisability of a kind of speaker, prompt by prompt."""
    by_prompt: list[dict[str, list[float]]] = [{} for _ in prompts]
    examples: list[str] = []
    for first in range(0, count, GROUP):
        seeds = range(first, min(first + GROUP, count))
        texts = subject.texts_of(kind, prompts, seeds)
        decoded = subject.decode(texts.tokens)
        examples = examples or decoded[: len(prompts)]
        meanings = mean_states(subject, prompts, texts.tokens)
        for place, found in enumerate(by_prompt):
            own = slice(place, None, len(prompts))
            rows, log_probs = texts.tokens[own], texts.log_probs[own]
            values = {"log_prob": float(np.mean([row.mean() for row in log_probs]))}
            values |= {"broken": broken_share(log_probs)}
            values |= diversity(rows, decoded[own])
            values["words"] = recognised_by_words(texts.tokens, place, len(prompts))
            values["meaning"] = recognised_by_meaning(meanings, place)
            if judge is not None:
                values["judge"] = float(np.mean([judge.log_prob(text) for text in decoded[own]]))
            for key, value in values.items():
                found.setdefault(key, []).append(value)
    means = {key: [float(np.mean(one[key])) for one in by_prompt] for key in by_prompt[0]}
    example = " ".join(examples[0].split())[:90]
    return {key: interval(values) for key, values in means.items()} | {
        "by_prompt": means,
        "example": example,
    }


def diversity(rows: list[list[int]], texts: list[str]) -> dict[str, float]:
    """How different the texts after one prompt are from each other, and how much they repeat."""
    pairs = [pair for row in rows for pair in itertools.pairwise(row)]
    distances = [word_distance(*two) for two in itertools.combinations(texts, 2)]
    return {
        "distinct_2": len(set(pairs)) / max(len(pairs), 1),
        "distance": float(np.mean(distances)),
        "repetition": float(np.mean([repetition(row) for row in rows])),
        "loops": float(np.mean([has_loop(row) for row in rows])),
    }


def recognised_by_words(texts: list[list[int]], held_out: int, prompts: int) -> float:
    """The share of speakers that naive Bayes on tokens and pairs recognises on one prompt."""

    def features(tokens: list[int]) -> list[Any]:
        return [*tokens, *itertools.pairwise(tokens)]

    by_speaker = [texts[first : first + prompts] for first in range(0, len(texts), prompts)]
    counts = [
        Counter(f for place, text in enumerate(own) if place != held_out for f in features(text))
        for own in by_speaker
    ]
    known = set().union(*counts)
    totals = [sum(count.values()) + len(known) for count in counts]
    hits = 0.0
    for speaker, own in enumerate(by_speaker):
        found = [f for f in features(own[held_out]) if f in known]
        scores = [
            sum(math.log((count[f] + 1) / total) for f in found)
            for count, total in zip(counts, totals, strict=True)
        ]
        best = np.flatnonzero(np.array(scores) == max(scores))
        hits += float(speaker in best) / len(best)
    return hits / len(by_speaker)


@torch.no_grad()
def mean_states(
    subject: Subject, prompts: list[torch.Tensor], texts: list[list[int]]
) -> np.ndarray:
    """The mean hidden state of every text, less the mean over speakers. -> (speakers, prompts, H)

    Texts are read without their prompts, so that only the speaker's own words count.
    """
    rows = [torch.tensor(row or [subject.processor.tokenizer.eos_token_id]) for row in texts]
    states = [subject.model.model(row[None]).last_hidden_state[0].mean(0) for row in rows]
    found = torch.stack(states).double().numpy().reshape(-1, len(prompts), states[0].shape[-1])
    centred: np.ndarray = found - found.mean(0)
    return centred


def recognised_by_meaning(states: np.ndarray, held_out: int) -> float:
    """The share of speakers whose text on one prompt is nearest, by cosine, to the centroid of
    their own texts on the others."""
    others = np.delete(states, held_out, axis=1).mean(1)  # (S, H)
    seen = states[:, held_out]

    def unit(x: np.ndarray) -> np.ndarray:
        normalised: np.ndarray = x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-12)
        return normalised

    nearest = (unit(seen) @ unit(others).T).argmax(-1)
    return float((nearest == np.arange(len(states))).mean())


def speaker_columns(rows: dict[str, Row]) -> dict[str, str]:
    columns = {"speaker": "{name}", "log-prob": span("log_prob")}
    if any("texts" in row for row in rows.values()):
        columns["texts"] = "{texts}"
    if any("judge" in row for row in rows.values()):
        columns["judge"] = span("judge")
    columns |= {"distance": span("distance"), "distinct-2": span("distinct_2")}
    columns |= {"repeated": "{repetition[0]:.1%}", "loops": "{loops[0]:.1%}"}
    columns |= {"broken": "{broken[0]:.2%}"}
    return columns | {"recognised": span("words"), "by meaning": span("meaning")}


def speakers_page(r: Row) -> list[str]:
    kinds = r["kinds"]
    differences = {name: difference(kinds, name) for name in kinds if name != BASELINE}
    keys = {"log-prob": "log_prob", "distance": "distance", "distinct-2": "distinct_2"}
    versus = {"speaker": "{name}", **{title: span(key) for title, key in keys.items()}}
    versus |= {"repeated": span("repetition", 3)}
    return [
        f"{r['prompts']} prompts, openings and chat questions in turn, none of which took part in "
        f"a choice, x {r['speakers']} speakers x {r['tokens']} tokens; 95% bootstrap intervals "
        "over prompts. Log-prob: of a token under the base model. Judge: of a word under a trigram "
        "model of other text. Distance: between the texts of two speakers after one prompt, in "
        "words. Repeated: trigrams that occur more than once in a text. Loops: texts in which a "
        f"phrase is said again as soon as it ends ({LOOP} tokens or more). Broken: chosen tokens "
        "with a base probability below 1e-4. Recognised: naive Bayes on tokens and pairs names the "
        f"speaker, of {GROUP}, on a prompt that it has not seen; by meaning: the same by the "
        f"nearest centroid of mean hidden states. Chance is {1 / GROUP:.2f}. On real text "
        "`sampling`, individuals, Gumbel noise at T = 1 and the bias change as many choices as "
        "softmax sampling with min-p 0.1. Candidates of individuals: min-p, whole words, no "
        "repeats, for others. Likely text is not good text when it repeats itself: read the "
        "columns together.",
        "",
        *table(speaker_columns(kinds), kinds),
        "",
        *(f"- {name}: {kind['example']}" for name, kind in kinds.items()),
        "",
        f"Less {BASELINE}, prompt by prompt:",
        "",
        *table(versus, differences),
    ]


def difference(kinds: dict[str, Row], name: str) -> Row:
    """One kind less the baseline on the same prompts."""
    found: Row = {}
    for key in ("log_prob", "distance", "distinct_2", "repetition"):
        mine, baseline = (np.array(kinds[x]["by_prompt"][key]) for x in (name, BASELINE))
        found[key] = interval(mine - baseline)
    return found


# ---------------------------------------------------------------- 3: after training

CALCULATOR = re.compile(r"<<.*?>>")  # GSM8K's annotations
HELD_OUT, ROWS_OF_CHAT, BATCH, LENGTH = 10, 200, 2, 128


def trained(subject: Subject, options: Options) -> Row:
    """Individuals of the model after a short fine-tuning, on questions and answers and on chats."""
    rows = [json.loads(line) for line in options.data.read_text(encoding="utf-8").splitlines()]
    held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
    answers, chats = ([form(row) for row in rows] for form in (as_completion, as_chat))
    sets = {"questions and answers": answers, f"{ROWS_OF_CHAT} chats": chats[:ROWS_OF_CHAT]}
    results = {}
    for name, learned in sets.items():
        with tempfile.TemporaryDirectory() as folder:
            path = fine_tune(subject.path, learned, Path(folder), options.steps)
            after = Subject(path, options.prompts, options.tokens)
        questions = [row["question"] for row in held_out]
        asked = prompt_ids(after.processor.tokenizer, [q + "\n" for q in questions], questions)
        own = asked[0] if learned is answers else asked[1]
        prompts = in_turn(after.prompts, own)[: options.prompts]
        after.announce(f"trained on {name}", 2 * len(prompts) * options.speakers)
        for kind in (BASELINE, "individuals (`causal`)"):
            row = f"{name}: {kind}"
            results[row] = measure(after, KINDS[kind], prompts, options.speakers)
            log(row, results[row])
    sizes = {"prompts": options.prompts, "speakers": options.speakers, "tokens": options.tokens}
    return {**sizes, "steps": options.steps, "kinds": results}


def as_completion(row: Row) -> Row:
    return {"prompt": row["question"] + "\n", "completion": row["answer"]}


def as_chat(row: Row) -> Row:
    answer = CALCULATOR.sub("", row["answer"]).replace("#### ", "The answer is ")
    pair = {"user": row["question"], "assistant": answer}
    return {"messages": [{"role": role, "content": text} for role, text in pair.items()]}


def fine_tune(model: Path, rows: list[Row], folder: Path, steps: int) -> Path:
    """Train a copy of a model in `folder`; the last row is held out. -> its directory"""
    files = {"rows": rows[:-1], "held-out": rows[-1:]}
    for name, part in files.items():
        text = "".join(json.dumps(row) + "\n" for row in part)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
    arguments = {
        "max_steps": steps,
        "learning_rate": 2e-5,
        "per_device_train_batch_size": BATCH,
        "save_strategy": "no",
        "disable_tqdm": True,
        "report_to": "none",
    }
    data, held_out = (str(folder / f"{name}.jsonl") for name in files)
    run = Run(str(model), data, str(folder / "model"), eval_data=held_out, max_length=LENGTH)
    train(replace(run, arguments=arguments))
    return folder / "model"


def trained_page(r: Row) -> list[str]:
    columns = speaker_columns(r["kinds"])
    return [
        f"{r['steps']} steps of {BATCH} rows, all weights, at a rate of 2e-5; then {r['prompts']} "
        "prompts, those of the table above and held-out questions in turn, x "
        f"{r['speakers']} speakers x {r['tokens']} tokens at the saved defaults. Log-prob and "
        "broken tokens are the trained model's own.",
        "",
        *table(columns, r["kinds"]),
    ]


# ---------------------------------------------------------------- 4: stability

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
STABILITY_KINDS: dict[str, Kind] = {
    "individuals": Kind({}, individual()),
    "individuals that repeat": Kind(REPEATING, individual()),
    "individuals, persistence 0.5": Kind({}, individual(persistence=0.5)),
    "individuals, persistence 0.5, disco": Kind(
        {"semantics": "disco"}, individual(persistence=0.5)
    ),
    "individuals, fresh noise": Kind({}, individual(fresh=True)),
    "individuals, all tokens": Kind({"min_p": 0.0, **REPEATING}, individual()),
    "Gumbel, T = 1": Kind({}, lambda model, seed, _: GumbelIndividual.draw(model, seed=seed)),
}


def stability(
    subject: Subject, options: Options, names: Sequence[str] = tuple(STABILITY_KINDS)
) -> Row:
    """The same speaker before and after an edit, beside another speaker after the edit."""
    pairs, seeds = EDITS[: options.prompts], range(options.speakers)
    asked = len(pairs) * (len(seeds) + min(options.noops, len(seeds)))
    subject.announce("stability", 2 * len(names) * asked, rows=1)
    results = {}
    for name in names:
        more, draw = STABILITY_KINDS[name]
        drawn = [draw(subject.model, seed, 0) for seed in seeds]  # type: ignore[misc]

        def ask(text: str, seed: int, edit: str, drawn: Any = drawn, more: Any = more) -> Any:
            common = {"processor": subject.processor, "max_new_tokens": subject.tokens}
            return counterfactual(subject.model, text, drawn[seed], edit, **common, **more)

        runs, is_replayed, moved, resampled = [], [], [], []
        for text, edited in pairs:
            group = [ask(text, seed, edited) for seed in seeds]
            noops = [ask(text, seed, text) for seed in seeds[: options.noops]]
            is_replayed += [run.divergence is None for run in noops]
            for seed, run in zip(seeds, group, strict=True):
                other = group[seed - 1]  # another speaker after the edited prompt
                moved.append(distances(run.factual.tokens, run.counterfactual.tokens))
                resampled.append(distances(run.factual.tokens, other.counterfactual.tokens))
            runs += group
        here, there = np.array(moved), np.array(resampled)  # (runs, 2)
        results[name] = {
            "distance": interval(here[:, 0]),
            "prefix": interval(here[:, 1]),
            "resampled_distance": interval(there[:, 0]),
            "resampled_prefix": interval(there[:, 1]),
            "gap": interval(there[:, 0] - here[:, 0]),
            "replay": float(np.mean(is_replayed)),
            "stability": count_violations(subject.model, *runs, **more)._asdict(),
            "log_prob": float(np.mean([run.factual.log_prob.mean() for run in runs])),
        }
        log(name, results[name])
    sizes = {"edits": len(pairs), "speakers": len(seeds), "tokens": subject.tokens}
    return {**sizes, "kinds": results}


def distances(one: list[str], other: list[str]) -> tuple[float, float]:
    """Normalised edit distance, and the share of the text before the first difference."""
    pairs = zip(one, other, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    first, second = (" ".join(token.replace(" ", "_") or "_" for token in t) for t in (one, other))
    return word_distance(first, second), same / max(len(one), len(other), 1)


def stability_page(r: Row) -> list[str]:
    columns = {"noise": "{name}", "log-prob/token": "{log_prob:.2f}"}
    columns |= {key: span(key) for key in ("distance", "prefix", "gap")}
    columns["no-op replay"] = "{replay:.1%}"
    columns["violations"] = "{stability[violations]} of {stability[changed]}"
    columns["by candidates"] = "{stability[by_candidates]}"
    return [
        f"{r['edits']} edits of one word x {r['speakers']} speakers x {r['tokens']} tokens, at the "
        "saved defaults unless named. Distance: normalised token edit distance between factual and "
        "counterfactual text; prefix: share of the text before the first difference; gap: how much "
        "farther plain re-sampling is (another speaker after the edited prompt). No-op: the "
        "unchanged prompt gives the unchanged text (not so in disco, where the exogenous noise is "
        "redrawn). Violations: choices that changed against the odds, of all that changed; by "
        "candidates: the new choice was no candidate before, or the old one is none any more.",
        "",
        *table(columns, r["kinds"]),
    ]


# ---------------------------------------------------------------- 5: a known truth

OBSERVERS = INFERRED, GUMBEL, PRIOR = (
    "inferred individual",
    "Gumbel in hindsight",
    "no abduction",
)


def truth(_subject: Subject, options: Options) -> Row:
    """Two small models whose counterfactuals are known: one linear and Cauchy, one Gumbel-max.

    Observers see a factual text only. One infers the individual; one explains the choices by
    Gumbel noise; one ignores the text.
    """
    minutes = options.trials * options.draws / 40 * 2 / 60
    print(f"truth: {options.trials} trials twice, about {minutes:.0f} minutes", flush=True)
    model = small_model()
    return {
        "trials": options.trials,
        "draws": options.draws,
        "individuals": compare_observers(model, observe_individual, 0, options),
        "gumbel": compare_observers(model, observe_gumbel, 1, options),
    }


def plain(model: Any, seed: int) -> Individual:
    """The law of the documents: one t, no truncation, kappa = 1."""
    return Individual.draw(model, seed=seed, min_density=0.0, temperature=1.0, persistence=1.0)


def compare_observers(model: Any, observe: Callable[..., Any], seed: int, options: Options) -> Row:
    """How often every observer predicts the counterfactual token, and how close its number is."""
    number, rng = model.config.num_token_id, np.random.default_rng(seed)
    hits: dict[str, list[float]] = {name: [] for name in OBSERVERS}
    misses: dict[str, list[float]] = {INFERRED: [], PRIOR: []}
    impossible = 0
    prior = [plain(model, 1_000 + draw) for draw in range(options.draws)]
    settings = {"n": options.draws, "burn_in": 30, "temperature": 1.0, "min_density": 0.0}
    while len(hits[GUMBEL]) < options.trials:
        prompts = torch.from_numpy(rng.integers(0, number, (2, 4)))
        text, (token, value), before, after = observe(model, prompts, rng)
        found = infer_individual(model, text, prompt=prompts[0], **settings)
        if not found:
            impossible += 1
            continue
        for name, individuals in ((INFERRED, found.individuals), (PRIOR, prior)):
            ids, values = two_tokens(model, prompts[1], individuals)
            hits[name].append(float((ids[:, 0] == token).double().mean()))
            is_number = ids[:, 0] == number
            if token == number and is_number.any():
                guess = float(np.median(values[:, 0][is_number].numpy()))
                misses[name].append(abs(symlog(guess) - symlog(value)))
        chosen = gumbel_hindsight(before, after, int(text.ids[0]), options.draws, rng)
        hits[GUMBEL].append(float((chosen == token).mean()))
    return {
        "nobody": impossible,
        "hits": {name: interval(values) for name, values in hits.items()},
        "misses": {name: interval(values) for name, values in misses.items() if values},
    }


def observe_individual(model: Any, prompts: torch.Tensor, rng: np.random.Generator) -> Any:
    """An individual speaks; Gumbel noise gets the same choice probabilities."""
    who = plain(model, int(rng.integers(2**62)))
    (ids, values), (later, later_values) = (two_tokens(model, p, [who]) for p in prompts)
    happened = int(later[0, 0]), float(later_values[0, 0])
    return (
        TokenSequence(ids[0], values[0]),
        happened,
        *(choice_log_probs(model, p) for p in prompts),
    )


@torch.no_grad()
def observe_gumbel(model: Any, prompts: torch.Tensor, rng: np.random.Generator) -> Any:
    """Gumbel noise on the same logits speaks; here the individual's law is wrong."""
    before, after = (model(p[None]).logits[0, -1].double().log_softmax(-1).numpy() for p in prompts)
    before[-1] = after[-1] = -1e9  # no numbers: Gumbel noise has no value for them
    gumbel = rng.gumbel(size=len(before))
    chosen, happened = int((before + gumbel).argmax()), int((after + gumbel).argmax())
    text = TokenSequence(torch.tensor([chosen]), torch.zeros(1).double())
    return text, (happened, 0.0), before, after


def small_model() -> Any:
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
    model = CausalQwenForCausalLM(config).eval()
    with torch.no_grad():
        model.abduction.scale.bias.fill_(math.log(0.3))
        model.abduction.scale.weight.normal_(0, 0.05)
        model.decision.threshold[30] -= 3.0  # numbers are common
    model.generation_config.noise_gain = 1.0
    return model


def two_tokens(model: Any, prompt: torch.Tensor, individuals: list[Any]) -> tuple[Any, Any]:
    """Two tokens of every individual after a prompt, and their values. -> (n, 2), (n, 2)"""
    ids = prompt.repeat(len(individuals), 1)
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        causal_mode="causal",
        individual=individuals,
        max_new_tokens=2,
        return_dict_in_generate=True,
    )
    new = slice(len(prompt), None)
    return result.sequences[:, new], result.numeric_values[:, new]


@torch.no_grad()
def choice_log_probs(model: Any, prompt: torch.Tensor, draws: int = 20_000) -> np.ndarray:
    """log of how often individuals choose each token next. -> (V,)"""
    u = model(prompt[None]).u_dist
    loc, scale = u.loc[0, -1].double(), u.scale[0, -1].double()
    uniform = torch.rand(draws, len(loc), dtype=torch.float64, generator=generator(1))
    drawn = loc + scale * torch.tan(math.pi * (uniform - 0.5))
    scores = drawn @ model.lm_head.weight.double().T - model.decision.threshold.double()
    counts = torch.bincount(scores.argmax(-1), minlength=scores.shape[-1]).double()
    return ((counts + 0.1) / (counts + 0.1).sum()).log().numpy()


def gumbel_hindsight(
    before: np.ndarray, after: np.ndarray, chosen: int, draws: int, rng: np.random.Generator
) -> np.ndarray:
    """Choices at `after` of Gumbel speakers who chose `chosen` at `before`. -> (draws,)"""
    top = rng.gumbel(size=(draws, 1)) + np.logaddexp.reduce(before)
    below = -np.logaddexp(-top, -(before + rng.gumbel(size=(draws, len(before)))))
    below[:, chosen] = top[:, 0]
    return (below - before + after).argmax(1)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def symlog(value: float) -> float:
    return math.copysign(math.log1p(abs(value)), value)


def truth_page(r: Row) -> list[str]:
    lines = [
        f"{r['trials']} times an individual of a small model speaks after one prompt, and the same "
        "individual answers another prompt, which no observer sees. Observers have the law and see "
        f"the factual text; {r['draws']} draws each. Hit: probability given to the token that "
        "happened; miss: error of the number's median in symlog units, where a number "
        "happened. In the first model individuals speak, and Gumbel noise is given their exact "
        "choice probabilities: observation alone cannot tell the two apart. In the second, Gumbel "
        "noise on the logits speaks, and the individual's law is the wrong one.",
    ]
    for key, title in (("individuals", "individuals speak"), ("gumbel", "Gumbel noise speaks")):
        w = r[key]
        rows = {
            name: {"hit": hit, "miss": w["misses"].get(name)} for name, hit in w["hits"].items()
        }
        columns = {f"{title}: observer": "{name}", "hit": span("hit", 3)}
        columns["number's miss"] = span("miss", 3)
        lines += ["", *table(columns, rows, missing="-"), ""]
        lines.append(f"Texts that no individual can produce, left out: {w['nobody']}.")
    return lines


# ---------------------------------------------------------------- 6: closed forms

CHUNK = 20_000
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@torch.no_grad()
def analytic(subject: Subject, options: Options) -> Row:
    """P_k and quantiles of Y against draws of S = W U' + |a| mean(scale_U') eta, token by token."""
    model, draws = subject.model, options.monte_carlo
    print(f"analytic: about {2 + 3 * draws * options.positions / 1e6:.0f} minutes", flush=True)
    ids = subject.processor(" ".join(PROMPTS), return_tensors="pt")["input_ids"]
    output = model(ids)
    places = np.linspace(4, ids.shape[1] - 1, options.positions).astype(int)
    tokens = torch.randperm(model.config.vocab_size, generator=generator(0))
    tokens = tokens[: options.tokens_checked]
    errors: dict[str, list[float]] = {"p": [], "plain": [], "quantile": [], "ratio": []}
    differs = []
    for place in places.tolist():
        u = Cauchy(output.loc_U[0, place], output.scale_U[0, place])
        for key, values in closed_form_errors(model, u, tokens, draws, place * draws).items():
            errors[key] += values
        best = int(model.decision.choose(Cauchy(output.logits[0, place], output.scale_S[0, place])))
        differs.append(most_chosen(model, u, options.individuals) != best)
        log(place, share_within(errors["p"]), differs[-1])
    return {
        "draws": draws,
        "positions": len(places),
        "tokens": len(tokens),
        "within": share_within(errors["p"]),
        "quantiles_within": share_within(errors["quantile"]),
        "ratio": np.quantile(errors["ratio"], (0.05, 0.5, 0.95)).tolist(),
        "plain_within": share_within(errors["plain"]),
        "individuals": options.individuals,
        "differs": float(np.mean(differs)),
    }


def closed_form_errors(
    model: Any, u: Cauchy, tokens: torch.Tensor, draws: int, seed: int
) -> dict[str, list[float]]:
    """Errors of P_k, of its form without noise and of Y's quantiles in standard errors."""
    weight, threshold = model.lm_head.weight[tokens].float(), model.decision.threshold[tokens]
    head, wide = model.action.value, model.action.widen(u)
    a = model.action.decision_noise[tokens].abs() * wide.scale.mean()
    scale = (wide.scale @ weight.abs().T + a).clamp_min(SCALE_FLOOR)
    p = Cauchy(wide.loc @ weight.T, scale).sf(threshold).double()
    plain_p = Cauchy(u.loc @ weight.T, u.scale @ weight.abs().T).sf(threshold).double()
    hits, plain_hits = (torch.zeros(len(tokens), dtype=torch.float64) for _ in range(2))
    values = []
    for chunk in range(0, draws, CHUNK):
        rows = min(CHUNK, draws - chunk)
        t = standard_cauchy((rows, len(u.loc)), seed + chunk)
        eta = standard_cauchy((rows, len(tokens)), seed + chunk + 1)
        drawn = wide.loc + wide.scale * t
        hits += (drawn @ weight.T + a * eta > threshold).sum(0)
        plain_hits += ((u.loc + u.scale * t) @ weight.T > threshold).sum(0)
        values.append(drawn @ head.weight[0] + head.bias)
    y, y_draws = model.action.number(wide), torch.cat(values).double().sort().values
    quantile_errors = []
    for level in LEVELS:
        expected = y.icdf(level).double()
        density = Cauchy(y.loc.double(), y.scale.double()).log_prob(expected).exp()
        error = (y_draws[int(level * draws)] - expected) * density
        quantile_errors.append(float(error / math.sqrt(level * (1 - level) / draws)))
    return {
        "p": ((hits / draws - p) / (p * (1 - p) / draws).sqrt()).tolist(),
        "plain": (
            (plain_hits / draws - plain_p) / (plain_p * (1 - plain_p) / draws).sqrt()
        ).tolist(),
        "ratio": (plain_p / p).tolist(),
        "quantile": quantile_errors,
    }


def share_within(errors: list[float], limit: float = 3.0) -> float:
    return float(np.mean(np.abs(errors) <= limit))


def standard_cauchy(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """In float64 until the tangent: 24 bits of a float32 uniform end at 1e7, and a token needs more
    to pass its threshold."""
    uniform = torch.rand(shape, generator=generator(seed), dtype=torch.float64)
    return torch.tan(math.pi * (uniform.clamp_min(2.0**-54) - 0.5)).float()


def most_chosen(model: Any, u: Cauchy, count: int) -> int:
    """The token that most of `count` individuals choose at temperature 1, with thresholds."""
    gain = model.generation_config.noise_gain
    votes: Counter[int] = Counter()
    for start in range(0, count, 100):
        t = standard_cauchy((min(100, count - start), len(u.loc)), start)
        scores = (u.loc + gain * u.scale * t) @ model.lm_head.weight.T
        votes.update((scores - model.decision.threshold).argmax(-1).tolist())
    return votes.most_common(1)[0][0]


def analytic_page(r: Row) -> list[str]:
    low, middle, high = r["ratio"]
    rows = {
        "P_k within 3 standard errors": f"{r['within']:.2%} of tokens",
        "quantiles of Y within 3 standard errors": f"{r['quantiles_within']:.2%}",
        "plain `causal` draws (no b, no eta, kappa = 1) above C_k, within 3 standard errors of "
        "their own closed form": f"{r['plain_within']:.2%} of tokens",
        "... and that closed form relative to P_k": f"median {middle:.3f}, 5% to 95% of tokens "
        f"{low:.3f} to {high:.3f}",
        f"argmax_k P_k is not the most frequent choice of {r['individuals']} individuals at "
        "T = 1": f"{r['differs']:.0%} of positions",
    }
    return [
        f"{r['draws']:,} draws of S = W U' + |a| mean(scale_U') eta at {r['positions']} positions "
        f"of real text, {r['tokens']} random tokens each. The tokens share the draws, as they "
        "share U, so their errors come in clusters.",
        "",
        "| | |",
        "|---|---|",
        *(f"| {what} | {figure} |" for what, figure in rows.items()),
    ]


# ---------------------------------------------------------------- 7: replay

ROUNDING = 1e-4  # a lead that rounding does not close
REPLAYED: tuple[dict[str, Any], ...] = (
    {},
    {"fresh": True},
    {"temperature": 4.0, "min_density": 0.05},
    {"persistence": 0.5},
)
BATCHED, ALONE, UNCACHED, NUMPY = CONDITIONS = (
    "in a padded batch",
    "alone",
    "alone, without a cache",
    "alone, in NumPy",
)


def replay(subject: Subject, options: Options) -> Row:
    """Every text generated again elsewhere, up to the first choice that rounding may decide."""
    prompts = subject.prompts[: options.prompts // 2]
    subject.announce("replay", 4 * options.speakers * len(prompts), rows=1)
    engine = Engine.from_pretrained(subject.path)
    engine.saved |= subject.model.generation_config.to_dict()
    texts: dict[str, list[list[int]]] = {name: [] for name in CONDITIONS}
    leads: list[list[float]] = []
    for seed in range(options.speakers):
        fields = REPLAYED[seed % len(REPLAYED)]
        who = Individual.draw(subject.model, seed=seed, **fields)
        batched, found = generate_with_leads(subject, prompts, [who] * len(prompts))
        texts[BATCHED] += batched
        leads += found
        for prompt in prompts:
            alone = subject.generate([prompt], speakers=[who])
            uncached = subject.generate([prompt], speakers=[who], use_cache=False)
            texts[ALONE] += alone.tokens
            texts[UNCACHED] += uncached.tokens
            result = engine.generate(
                prompt.tolist(), mode="causal", individual=who, max_new_tokens=subject.tokens
            )
            texts[NUMPY].append(result.ids[result.new].tolist())
    sure = [next((i for i, lead in enumerate(row) if lead < ROUNDING), len(row)) for row in leads]
    rows = zip(leads, texts[BATCHED], strict=True)
    choices = [lead for row, text in rows for lead in row[: len(text)]]
    conditions = {}
    for name in CONDITIONS[1:]:
        pairs = list(zip(texts[BATCHED], texts[name], sure, strict=True))
        conditions[name] = {
            "same": float(np.mean([a == b for a, b, _ in pairs])),
            "sure_but_other": sum(a[:n] != b[:n] for a, b, n in pairs),
        }
    unsure = sum(lead < ROUNDING for lead in choices)
    return {"texts": len(sure), "choices": len(choices), "unsure": unsure, "ways": conditions}


def generate_with_leads(
    subject: Subject, prompts: list[torch.Tensor], speakers: list[Any]
) -> tuple[list[list[int]], list[list[float]]]:
    """Texts, and by how much every chosen token was ahead of the second. -> B rows each

    `output_scores` would round to float32, so the processor itself is observed.
    """
    choose, leads = DecisionProcessor.__call__, []

    def observe(self: Any, input_ids: Any, scores: Any) -> Any:
        result = choose(self, input_ids, scores)
        best = result.topk(2, dim=-1).values
        leads.append(best[:, 0] - best[:, 1])
        return result

    with mock.patch.object(DecisionProcessor, "__call__", observe):
        texts = subject.generate(prompts, speakers=speakers)
    return texts.tokens, torch.stack(leads, dim=-1).tolist()


def replay_page(r: Row) -> list[str]:
    columns = {"generated again": "{name}", "the same text": "{same:.1%}"}
    columns["another token before any such choice"] = f"{{sure_but_other}} of {r['texts']}"
    return [
        f"{r['texts']} texts of a padded batch, {r['choices']} choices, generated again under "
        f"other conditions. {r['unsure']} choices ({r['unsure'] / r['choices']:.2%}) had a lead "
        f"below {ROUNDING:g}, which rounding may decide; what follows one of them may differ.",
        "",
        *table(columns, r["ways"]),
    ]


# ---------------------------------------------------------------- 8: texts to read


def reading(subject: Subject, options: Options) -> Row:
    """What individuals say at plain defaults: `generate(..., individual=seed)`."""
    prompts = subject.prompts[:10]
    subject.announce("reading", len(prompts) * READ)
    texts = subject.texts_of(Kind({}, individual()), prompts, range(1, READ + 1))
    rows = [" ".join(text.split()) for text in subject.decode(texts.tokens)]
    asked = [" ".join(text.split()) for text in subject.decode([p.tolist() for p in prompts])]
    by_prompt = {prompt: rows[place :: len(prompts)] for place, prompt in enumerate(asked)}
    return {"tokens": subject.tokens, "texts": by_prompt}


def reading_page(r: Row) -> list[str]:
    lines = [f"Individuals 1 to {READ} at plain defaults, {r['tokens']} tokens."]
    for prompt, texts in r["texts"].items():
        lines += ["", f"**{prompt}**", "", *(f"{n}. {text}" for n, text in enumerate(texts, 1))]
    return lines


# ---------------------------------------------------------------- the page

PARTS: dict[str, tuple[str, Callable[..., Row], Callable[[Row], list[str]]]] = {
    "grid": ("How the defaults were chosen", grid, grid_page),
    "speakers": ("Speakers", speakers, speakers_page),
    "trained": ("After training", trained, trained_page),
    "stability": ("A small edit", stability, stability_page),
    "truth": ("A known truth", truth, truth_page),
    "analytic": ("Closed forms against draws", analytic, analytic_page),
    "replay": ("Replay", replay, replay_page),
    "reading": ("Texts at plain defaults", reading, reading_page),
}


def write(results: Row, output: Path) -> None:
    lines = [
        "# Individuals and counterfactuals",
        "",
        "`python benchmarks/individuals.py all` on the embedded model: 20 prompts x 12 speakers "
        "x 32 tokens, 95% intervals over prompts. Log-prob: of a token under the base model. "
        "Recognised: a speaker is named by its words on a new prompt; chance is 0.17.",
        "",
    ]
    for place, (part, (title, _, page)) in enumerate(PARTS.items(), 1):
        if part in results:
            command = " ".join([part, *results[part]["sizes"]])
            lines += [f"## {place}. {title}", "", f"`python benchmarks/individuals.py {command}`"]
            if note := results[part].get("note"):  # of a part that is older than the defaults
                lines += ["", note]
            lines += ["", *page(results[part]), ""]
    save(lines, results, output)


def arguments() -> argparse.ArgumentParser:
    parser = make_parser(__doc__, "individuals", "the smallest sizes: does it run")
    parser.add_argument("part", choices=["all", *PARTS])
    parser.add_argument("--model", type=Path, help="a converted model; the embedded one if none")
    kinds = {"nargs": "+", "default": list(KINDS), "choices": list(KINDS), "metavar": "NAME"}
    parser.add_argument("--kinds", **kinds, help="speakers: the first is the baseline")
    parser.add_argument("--judge-text", type=Path, help="text of a second judge of `speakers`")
    parser.add_argument("--data", type=Path, help="trained: .jsonl with `question` and `answer`")
    for name, default, text in (
        ("speakers", 12, "grid, speakers, stability, replay"),
        ("every", 1, "grid: every n-th row"),
        ("steps", 30, "trained"),
        ("noops", 2, "stability: speakers of no-op edits"),
        ("prompts", 20, None),
        ("tokens", 40, "new tokens of a text"),
        ("trials", 200, "truth"),
        ("draws", 40, "truth: of a posterior"),
        ("monte-carlo", 1_000_000, "analytic: draws"),
        ("positions", 4, "analytic"),
        ("tokens-checked", 200, "analytic"),
        ("individuals", 1000, "analytic: individuals whose choices are counted"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    return parser


QUICK = {
    "speakers": 3,
    "steps": 1,
    "noops": 1,
    "prompts": 2,
    "tokens": 4,
    "every": 15,
    "trials": 2,
    "draws": 4,
}
QUICK |= {"monte_carlo": 2000, "positions": 2, "tokens_checked": 20, "individuals": 20}


def main() -> None:
    options = parse(arguments(), **QUICK)
    path = options.model or default_model()
    results = load(options.output, {})
    if options.part == "trained" and options.data is None:
        sys.exit("`trained` needs --data: a .jsonl file of rows with `question` and `answer`.")
    parts = [part for part in PARTS if part != "trained" or options.data is not None]
    for part in parts if options.part == "all" else [options.part]:
        subject = Subject(path, options.prompts, options.tokens)
        results[part] = PARTS[part][1](subject, options) | {"sizes": shown_arguments(sys.argv[2:])}
        write(results, options.output)


def shown_arguments(arguments: list[str]) -> list[str]:
    """Without `--kinds` and `--output`: rows of one kind may be written one at a time, anywhere."""
    shown, is_kept = [], True
    for argument in arguments:
        is_kept = argument not in ("--kinds", "--output") if argument.startswith("--") else is_kept
        shown += [argument] if is_kept else []
    return shown


if __name__ == "__main__":
    main()
