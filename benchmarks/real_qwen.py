"""Texts of individuals on a real Qwen, in English and Chinese, beside softmax with min-p.

    python benchmarks/real_qwen.py model.gguf [--tokens 48]

Eight questions in each language, five individuals and two softmax draws each, at plain defaults.
All texts are in the JSON beside the page, to be read; counted here are texts that end in a loop,
characters that are broken, and how many answers to a question differ. The paragraph has the layer's
calibration, and how much of a text is the same alone and on the NumPy engine (int8 weights).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from _results import RESULTS, Row, log, page_path, save, table

import causal_qwen
from causal_qwen.session import Session

QUESTIONS = {
    "English": (
        "Write two sentences about the sea.",
        "What should I cook tonight?",
        "Tell me a short story about a lighthouse keeper.",
        "Why do people like music?",
        "Give me one piece of advice for a new teacher.",
        "Describe your ideal Sunday.",
        "I feel a bit sad today.",
        "Name a good present for a friend and say why.",
    ),
    "Chinese": (
        "用三句话讲一个关于猫的故事。",
        "今天晚上我该做什么菜？",
        "请写两句话描写大海。",
        "人们为什么喜欢音乐？",
        "给新老师一条建议。",
        "描述一下你理想的星期天。",
        "我今天有点难过。",
        "讲一个关于国王的儿子的故事。",
    ),
}
INDIVIDUALS = range(1, 6)
DRAWS = (1, 2)
SOFTMAX: dict[str, Any] = {"mode": "compatible", "do_sample": True, "min_p": 0.1}
LOOP = re.compile(r"(.{2,40}?)\1{2,}", re.DOTALL)  # said three times at once


def texts_of(session: Session, language: str, tokens: int) -> list[Row]:
    """Every answer, with who gave it."""
    found: list[Row] = []
    for question in QUESTIONS[language]:
        chat: Any = [{"role": "user", "content": question}]
        said = session.batch([chat] * len(INDIVIDUALS), list(INDIVIDUALS), max_new_tokens=tokens)
        calls = [
            (f"individual {who}", one.text) for who, one in zip(INDIVIDUALS, said, strict=True)
        ]
        for seed in DRAWS:
            drawn = session.generate(chat, seed=seed, max_new_tokens=tokens, **SOFTMAX)
            calls.append((f"softmax {seed}", drawn.text))
        for who, text in calls:
            found.append({"language": language, "question": question, "who": who, "text": text})
            log(found[-1])
    return found


def summary(rows: Sequence[Row], language: str, who: str) -> Row:
    mine = [row for row in rows if row["language"] == language and row["who"].startswith(who)]
    by_question: dict[str, list[str]] = {}
    for row in mine:
        by_question.setdefault(row["question"], []).append(row["text"])
    distinct = [len(set(texts)) / len(texts) for texts in by_question.values()]
    return {
        "what": f"{language}, {'individuals' if who == 'individual' else 'softmax, min-p 0.1'}",
        "texts": len(mine),
        "broken": sum("\ufffd" in row["text"] for row in mine),
        "looping": sum(LOOP.search(row["text"]) is not None for row in mine),
        "distinct": float(np.mean(distinct)),
        "characters": float(np.median([len(row["text"]) for row in mine])),
    }


EDITS = (
    ("The king's daughter opened the door and", "The king's son opened the door and"),
    ("国王的女儿打开门，", "国王的儿子打开门，"),
)


def same_start(one: str, other: str) -> float:
    """The share of a text that another begins with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return len(list(same)) / max(len(one), 1)


def beside(session: Session, model: Path, rows: Sequence[Row], tokens: int) -> Row:
    """Calibration, replay alone and on another engine, two counterfactuals."""
    layer: Any = session.engine.layer  # type: ignore[attr-defined]
    tensors = layer.tensors
    again = [row for row in rows if row["who"] == f"individual {INDIVIDUALS[0]}"]
    found: dict[str, list[float]] = {}
    for name, engine in (("alone", session), ("numpy", causal_qwen.open(str(model), "numpy"))):
        said = [engine.chat(r["question"], INDIVIDUALS[0], max_new_tokens=tokens) for r in again]
        found[name] = [same_start(r["text"], t.text) for r, t in zip(again, said, strict=True)]
    pairs = [session.counterfactual(*edit, 7, max_new_tokens=tokens).to_dict() for edit in EDITS]
    return {
        "noise_gain": layer.generation["noise_gain"],
        "gamma": float(np.exp(tensors["abduction.scale.bias"][0])),
        "threshold": float(tensors["decision.threshold"][0]),
        **{name: float(np.mean(shares)) for name, shares in found.items()},
        "counterfactuals": pairs,
    }


COLUMNS = {
    "what": "{what}",
    "texts": "{texts}",
    "with a broken character": "{broken}",
    "looping": "{looping}",
    "distinct answers to a question": "{distinct:.2f}",
    "characters, median": "{characters:.0f}",
}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--output", type=page_path("real_qwen"), default=RESULTS / "real_qwen.md")
    options = parser.parse_args(arguments)
    session = causal_qwen.open(str(options.model))
    rows = [row for language in QUESTIONS for row in texts_of(session, language, options.tokens)]
    lines = [
        summary(rows, language, who) for language in QUESTIONS for who in ("individual", "softmax")
    ]
    more = beside(session, options.model, rows, options.tokens)
    text = (
        f"`python benchmarks/real_qwen.py {options.model.name}`: eight questions in each language, "
        f"five individuals and two softmax draws each, at plain defaults, {options.tokens} tokens. "
        f"The layer: noise gain {more['noise_gain']:.0f}, gamma {more['gamma']:.2g}, threshold "
        f"{more['threshold']:.2f}. Of the first individual's texts {more['alone']:.0%} are said "
        f"again alone, {more['numpy']:.0%} on the NumPy engine with int8 weights before they part."
    )
    results = {"model": options.model.name, "summary": lines, **more, "texts": rows}
    save(["# Texts of a real Qwen", "", text, "", *table(COLUMNS, lines)], results, options.output)


if __name__ == "__main__":
    main()
