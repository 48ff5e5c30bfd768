"""Panels: do a thousand individuals answer as the model does, and as themselves?

    python benchmarks/panels.py [--model qwen.gguf] [--people 1000]

Forty choices between two things, three wordings each, in English and (for a real Qwen) Chinese, in
both orders. Per question: how far shares are from softmax among the options, Cohen's kappa between
wordings, between languages and between orders, and how many independent draws a paired comparison
saves. Beside them, with the same probabilities: softmax draws, softmax with a fixed seed per person
(one uniform number that every question shares), Gumbel noise and a normal bias for every word, both
keyed by the word (which is generous: models have several tokens for one). Kappa between *unrelated*
questions, where a person that reads as a character has no reason to agree, should be 0.

From W alone: does a person who prefers one of two words in English prefer it in Chinese? 36 words.
Intervals: 95%, bootstrap over questions.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from itertools import combinations, count
from pathlib import Path
from typing import Any

import numpy as np
from _results import (
    Row,
    interval,
    log,
    make_parser,
    paired_ratio,
    parse,
    save,
    span,
    table,
    time_peers,
)

import causal_qwen
from causal_qwen import Panel, Session
from causal_qwen.panel import Answers

WORDINGS = {
    "English": (
        "Do you prefer {} or {}?",
        "Which do you like better, {} or {}?",
        "If you could have only one of them, would you choose {} or {}?",
    ),
    "Chinese": ("你更喜欢{}还是{}？", "{}和{}，你更喜欢哪一个？", "如果只能选一个，你选{}还是{}？"),
}
CHOICES = """\
coffee tea 咖啡 茶|summer winter 夏天 冬天|cats dogs 猫 狗
cities villages 城市 乡村|mountains beaches 山 海滩|books movies 书 电影
mornings evenings 早晨 晚上|red blue 红色 蓝色|rice noodles 米饭 面条
trains planes 火车 飞机|apples bananas 苹果 香蕉|football basketball 足球 篮球
beer wine 啤酒 葡萄酒|piano guitar 钢琴 吉他|buses bicycles 公交车 自行车
phones computers 手机 电脑|poetry novels 诗歌 小说|dancing singing 跳舞 唱歌
forests deserts 森林 沙漠|money time 金钱 时间|friends family 朋友 家人
math history 数学 历史|chocolate vanilla 巧克力 香草|meat vegetables 肉 蔬菜
bread cake 面包 蛋糕|spring autumn 春天 秋天|gold silver 黄金 白银
truth beauty 真理 美丽|freedom safety 自由 安全|work rest 工作 休息
fish chicken 鱼 鸡肉|milk juice 牛奶 果汁|lions tigers 狮子 老虎
flowers trees 花 树|sun rain 太阳 雨|radio television 广播 电视
hotels tents 酒店 帐篷|museums theatres 博物馆 剧院|painting music 绘画 音乐
running swimming 跑步 游泳"""
WORDS = """\
cat 猫|dog 狗|horse 马|fish 鱼|bird 鸟|tree 树|flower 花|water 水|fire 火
sun 太阳|moon 月亮|star 星星|mountain 山|river 河|sea 海|summer 夏天|winter 冬天
spring 春天|coffee 咖啡|tea 茶|bread 面包|rice 米饭|book 书|music 音乐
movie 电影|city 城市|house 房子|car 汽车|train 火车|money 金钱|time 时间|love 爱
work 工作|friend 朋友|red 红色|blue 蓝色"""
LANGUAGES = tuple(WORDINGS)
Q = list[tuple[tuple[str, str], tuple[str, str]]]
Choose = Callable[[Row], np.ndarray]  # an asked question -> whether each person takes the first


def split(text: str) -> list[list[str]]:
    return [one.split() for line in text.splitlines() for one in line.split("|")]


def ask_all(panel: Panel, languages: tuple[str, ...], choices: list[list[str]]) -> list[Row]:
    """Every choice in every wording and order, with the answers as whether it is the first word."""
    found = []
    for place, words in enumerate(choices):
        for language in languages:
            own = words[:2] if language == "English" else words[2:]
            for wording, text in enumerate(WORDINGS[language]):
                for order in (1, -1):
                    pair = own[::order]
                    answers: Answers = panel.ask(text.format(*pair), pair)
                    softmax = dict(zip(answers.options, answers.softmax, strict=True))
                    found.append(
                        {
                            "choice": place,
                            "language": language,
                            "wording": wording,
                            "order": order,
                            "words": own,
                            "mass": answers.mass,
                            "softmax": float(softmax[own[0]]),
                            "took": answers.chosen == answers.options.index(own[0]),
                        }
                    )
        log(place + 1, "of", len(choices))
    return found


# ---------------------------------------------------------------- peers, by the same softmax


def keyed(word: str, people: int) -> np.random.Generator:
    seed = int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest())
    return np.random.default_rng([seed, people])


def logit(p: float) -> float:
    p = min(max(p, 1e-12), 1 - 1e-12)
    return float(np.log(p / (1 - p)))


def peers(people: int) -> dict[str, Choose]:
    rng, uniform = np.random.default_rng(0), np.random.default_rng(1).random(people)

    def gumbel(row: Row) -> np.ndarray:
        one, other = (keyed(word, people).gumbel(size=people) for word in row["words"])
        return logit(row["softmax"]) + one - other > 0

    def bias(row: Row) -> np.ndarray:
        one, other = (keyed(word, people).normal(size=people) for word in row["words"])
        return logit(row["softmax"]) + 1.28 * (one - other) > 0

    def fixed(row: Row) -> np.ndarray:
        """A draw takes the first token whose cumulated probability exceeds the number."""
        is_first = row["order"] == 1
        p = row["softmax"] if is_first else 1 - row["softmax"]
        return (uniform < p) == is_first

    return {
        "individuals": lambda row: row["took"],
        "softmax draws": lambda row: rng.random(people) < row["softmax"],
        "softmax, fixed seed": fixed,
        "shared Gumbel": gumbel,
        "random word bias": bias,
    }


# ---------------------------------------------------------------- figures


def kappa(one: np.ndarray, other: np.ndarray) -> float:
    agreed, p, q = (one == other).mean(), one.mean(), other.mean()
    chance = p * q + (1 - p) * (1 - q)
    return float("nan") if chance == 1 else float((agreed - chance) / (1 - chance))


def saving(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """The variances of one person's difference, and of that of two strangers."""
    return float(np.var(one * 1.0 - other)), float(np.var(one) + np.var(other))


def figures(rows: list[Row], choose: Choose) -> Row:
    took = {(r["choice"], r["language"], r["wording"], r["order"]): choose(r) for r in rows}
    softmax = {(r["choice"], r["language"], r["wording"], r["order"]): r["softmax"] for r in rows}
    choices, languages = sorted({key[0] for key in took}), sorted({key[1] for key in took})
    wordings = range(3)

    def mean_kappa(pairs: Callable[[int], Iterator[tuple[Any, Any]]]) -> list[float]:
        found = [np.nanmean([kappa(took[a], took[b]) for a, b in pairs(c)]) for c in choices]
        return interval(np.array([one for one in found if np.isfinite(one)]))

    def retest(language: str) -> Callable[[int], Iterator[tuple[Any, Any]]]:
        return lambda c: (
            ((c, language, a, 1), (c, language, b, 1)) for a, b in combinations(wordings, 2)
        )

    found: Row = {f"kappa {one}": mean_kappa(retest(one)) for one in languages}
    if len(languages) > 1:
        found["kappa across languages"] = mean_kappa(
            lambda c: (((c, "English", w, 1), (c, "Chinese", w, 1)) for w in wordings)
        )
    found["kappa across orders"] = mean_kappa(
        lambda c: (((c, one, w, 1), (c, one, w, -1)) for one in languages for w in wordings)
    )
    found["kappa of unrelated questions"] = interval(
        [
            abs(kappa(took[a, "English", 0, 1], took[b, "English", 0, 1]))
            for a, b in zip(choices, np.roll(choices, len(choices) // 2).tolist(), strict=True)
        ]
    )
    gaps = np.array([abs(took[key].mean() - softmax[key]) for key in took])
    found["share - softmax"] = [float(gaps.mean()), float(gaps.max())]
    parts = np.array(
        [
            saving(took[c, one, a, 1], took[c, one, b, 1])
            for c in choices
            for one in languages
            for a, b in combinations(wordings, 2)
        ]
    )
    draws = np.random.default_rng(0).integers(len(parts), size=(2000, len(parts)))
    paired, strangers = parts[draws].sum(1).T
    ratios = strangers / np.maximum(paired, 1e-12)
    total = parts.sum(0)
    found["saving"] = [total[1] / max(total[0], 1e-12), *np.quantile(ratios, (0.025, 0.975))]
    return found


def cost(session: Session, people: int, rounds: int) -> list[float]:
    """Seconds of shares in units of one forward pass, of prompts that nobody has read before."""
    places, filler = count(), "The committee met on a Monday in the old town hall. " * 3

    def prompt() -> Any:
        text = f"{next(places)}: {filler}Which of the two plans did they choose?"
        return [{"role": "user", "content": text}]

    peers: dict[str, Callable[[], Any]] = {
        "pass": lambda: session.engine.look(session.encode(prompt())),
        "shares": lambda: session.shares(prompt(), people),
    }
    times = time_peers(peers, rounds)
    return paired_ratio(times["shares"], times["pass"])


def words_alone(session: Session, people: int) -> Row:
    """Pairs of words in two languages, by the rows of W: agreement of preferences, cosines."""
    engine: Any = session.engine
    words = split(WORDS)
    ids = [[engine.encode(one, special=False).ids for one in pair] for pair in words]
    kept = [[a[0], b[0]] for a, b in ids if len(a) == len(b) == 1]
    rows = [engine.heads.rows(np.array(column)) for column in zip(*kept, strict=True)]
    pairs = list(combinations(range(len(kept)), 2))
    one, other = (np.array([part[a] - part[b] for a, b in pairs]) for part in rows)
    size = np.linalg.norm(one, axis=1) * np.linalg.norm(other, axis=1)
    t = np.random.default_rng(0).standard_cauchy((people, one.shape[1])).astype(np.float32)
    agreed = ((one @ t.T > 0) == (other @ t.T > 0)).mean(1)
    cosines = (one * other).sum(1) / size
    return {
        "words": len(kept),
        "pairs": len(pairs),
        "agreement": interval(agreed),
        "cosine": interval(cosines),
        "each": [cosines.round(3).tolist(), agreed.round(3).tolist()],
    }


def picture(alone: Row, path: Path) -> None:
    """The agreement of a pair against the cosine of its row differences."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(6, 4), layout="constrained").subplots()
    cosines, agreed = map(np.array, alone["each"])
    axes.plot(cosines, agreed, ".", color="#0f766e", alpha=0.4)
    axes.axhline(0.5, color="0.5", linestyle="--", label="Gumbel noise: 0.50")
    axes.set(xlabel="cosine of the differences of rows of W", ylabel="share of people who agree")
    axes.set_title("One of two words, in English and in Chinese")
    axes.legend()
    axes.figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = make_parser(__doc__, "panels", "four choices, 200 people")
    parser.add_argument("--model", default="", help="a GGUF file; the embedded one if absent")
    parser.add_argument("--people", type=int, default=1000)
    parser.add_argument("--choices", type=int, default=40)
    options = parse(parser, people=200, choices=4)
    session = causal_qwen.open(options.model)
    is_real = session.engine.kind == "llama.cpp"
    languages = LANGUAGES if is_real else LANGUAGES[:1]
    panel = Panel(session, options.people)
    rows = ask_all(panel, languages, split(CHOICES)[: options.choices])
    results: Row = {name: figures(rows, peer) for name, peer in peers(options.people).items()}
    results["cost"] = cost(session, options.people, rounds=3 if options.quick else 15)
    results["mass"] = float(np.mean([row["mass"] for row in rows]))
    if is_real:
        results["W alone"] = words_alone(session, 4000)
        picture(results["W alone"], options.output.with_name("panels.svg"))
    named = ["individuals", *list(peers(1))[1:]]
    kinds = list(results["individuals"])
    shown = [{"peer": name, **results[name]} for name in named]
    columns = {"who answers": "{peer}"} | {
        one: span(one)
        if len(results["individuals"][one]) == 3
        else "{" + one + "[0]:.3f}, worst {" + one + "[1]:.2f}"
        for one in kinds
    }
    model = Path(options.model).name or "SmolLM2-135M"
    about = (
        f"`python benchmarks/panels.py{' --model ' + model if options.model else ''}`: "
        f"{options.people} individuals, {options.choices} choices of two, three wordings, both "
        f"orders, {' and '.join(languages)}; {results['mass']:.0%} of the model's mass was on the "
        "options. Shares cost "
        + span("cost").format(cost=results["cost"])
        + " times a forward pass of some 76 tokens."
    )
    if is_real:
        alone = results["W alone"]
        about += (
            f" From W alone, {alone['pairs']} pairs of {alone['words']} words: a person who "
            f"prefers one in English prefers it in Chinese in {alone['agreement'][0]:.2f} of the "
            f"cases, Gumbel noise 0.50; mean cosine {alone['cosine'][0]:.2f} "
            "([picture](panels.svg))."
        )
    lines = [f"# Panels, {model}", "", about, "", *table(columns, shown)]
    save(lines, results, options.output)


if __name__ == "__main__":
    main()
