"""Texts of individuals on a real Qwen, in English and Chinese, beside softmax with min-p.

    python benchmarks/real_qwen.py model.gguf [--tokens 48]

Eight questions in each language, five individuals and two softmax draws each, at plain defaults.
All texts are in the JSON beside the page, to be read; counted here are texts that end in a loop,
characters that are broken, and how many answers to a question differ.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
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
    text = (
        f"`python benchmarks/real_qwen.py {options.model.name}`: eight questions in each language, "
        f"five individuals and two softmax draws each, at plain defaults, {options.tokens} tokens."
    )
    results = {"model": options.model.name, "summary": lines, "texts": rows}
    save(["# Texts of a real Qwen", "", text, "", *table(COLUMNS, lines)], results, options.output)


if __name__ == "__main__":
    main()
