"""Panel: many individuals answer questions, and the same ones answer the next question.

    question, options -> one forward pass -> what every individual chooses -> shares, comparisons

An option is whatever begins with one of its forms (Coffee, coffee, " coffee"), token by token: a
further pass is needed only where two options begin with the same token. A person is asked without
chance (persistence 1): what answers have in common is the individual. It is a model's distribution,
person by person, and not people. Does not import torch.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from causal_qwen.analysis.shares import People, Who, softmax_of
from causal_qwen.engines.engine import Tokens
from causal_qwen.text.segmentation import is_letter

if TYPE_CHECKING:
    from causal_qwen.session import Prompt, Session

Array = NDArray[Any]
Z = 1.96  # of a 95% interval
FORM_SHARE = 0.1  # a form of an option counts if it has this share of its likeliest form's mass
# instructions, by whether the script of the question has spaces between words
ONLY = {True: "Answer with only one of these: {}.", False: "只回答其中一个：{}。"}
COMMA = {True: ", ", False: "、"}
ONLY_NUMBER = {True: "Answer with a number only.", False: "只回答一个数字。"}
ENDS = (".", ",", "\n", "。", "，")  # after an option that is the beginning of another
SPELLINGS = "|"  # between spellings of an option: "cat|cats"
NUMBER_TOKENS = 12  # of an answer that is read as a number


class Panel:
    """Individuals of a session: so many seeds from 0 on, or names, seeds and `Individual`s."""

    def __init__(
        self, session: Session, people: int | Sequence[Who] = 1000, **options: Any
    ) -> None:
        self.session, self.options = session, {"persistence": 1.0, **options}
        if not isinstance(people, int) and not all(isinstance(one, int | str) for one in people):
            self.options = options  # saved individuals have a persistence of their own
        self._given = range(people) if isinstance(people, int) else list(people)
        self.people = People(session.engine.resolve, session.engine.size, people, **self.options)

    def __len__(self) -> int:
        return len(self.people)

    def ask(
        self,
        question: Prompt,
        options: Sequence[str] | None = None,
        *,
        number: bool = False,
        instruction: str | None = None,
        max_new_tokens: int = 40,
    ) -> Any:
        """`Answers` among options; `NumberAnswers` if a number is asked for; else `OpenAnswers`.

        A question that is a text is asked in the model's chat template if it has one, and followed
        by an `instruction`, by default to answer with an option or a number; messages have none.
        Spellings of one option are separated by "|".
        """
        names = tuple(one.partition(SPELLINGS)[0].strip() for one in options or ())
        prompt = self._prompt(question, names, number, instruction)
        if options is not None:
            return self._choose(question, prompt, names, options)
        engine = self.session.engine
        if number and getattr(self.session.reader, "encode_numbers", "text") == "value":
            tokens = self.session.encode(prompt)
            values = self.people.values(engine.look(tokens), tokens)
            return NumberAnswers(_shown(question), self.people.names, values.tolist())
        length = NUMBER_TOKENS if number else max_new_tokens
        found = self.session.batch(
            [prompt] * len(self), self._given, max_new_tokens=length, **self.options
        )
        texts = [one.text.strip() for one in found]
        if not number:
            return OpenAnswers(_shown(question), self.people.names, texts)
        return NumberAnswers(_shown(question), self.people.names, [*map(_read, texts)])

    def compare(
        self, first: Prompt, second: Prompt, options: Sequence[str], **how: Any
    ) -> Comparison:
        """The same people under two versions of a question."""
        one, other = (self.ask(question, options, **how) for question in (first, second))
        return one.versus(other)

    def crosstab(self, first: Answers, second: Answers) -> Any:
        """How many gave each pair of answers, as a DataFrame."""
        import pandas

        counts = _counts(first, second)
        return pandas.DataFrame(counts, index=[*first.options], columns=[*second.options])

    def _prompt(
        self, question: Prompt, names: Sequence[str], number: bool, instruction: str | None
    ) -> Prompt:
        if not isinstance(question, str):
            return question
        if instruction is None and (names or number):
            is_spaced = any(is_letter(letter) for letter in question)
            words = ONLY_NUMBER if number else ONLY
            instruction = words[is_spaced].format(COMMA[is_spaced].join(names))
        text = f"{question}\n{instruction}" if instruction else question
        if self.session.has_chat:
            return [{"role": "user", "content": text}]
        return f"{text}\n"

    def _choose(
        self, question: Prompt, prompt: Prompt, names: tuple[str, ...], options: Sequence[str]
    ) -> Answers:
        if len(set(names)) < max(len(names), 2) or "" in names:
            raise ValueError(f"options={list(options)!r} must be two or more different words.")
        tokens = self.session.encode(prompt)
        chosen = np.full(len(self), -1)
        softmax, mass = np.zeros(len(names)), 1.0
        waiting = [(_Trie(self._forms(options)), tokens, np.arange(len(self)), 1.0)]
        while waiting:
            trie, text, here, weight = waiting.pop()
            if trie.answer is not None and not trie.children:
                chosen[here] = trie.answer
                softmax[trie.answer] += weight
                continue
            branches = trie.branches(self._ends)
            if len(branches) == 1:
                kept, parts, shares = [*branches.items()], [here], [1.0]
            else:
                kept, parts, shares, total = self._split(branches, text, here)
                mass = total if text is tokens else mass
            for (token, rest), some, share in zip(kept, parts, shares, strict=True):
                after = Tokens([*text.ids, token], [*text.values, 0.0])
                waiting.append((rest, after, some, weight * share))
        return Answers(_shown(question), names, self.people.names, chosen, softmax, mass)

    def _split(self, branches: dict[int, _Trie], text: Tokens, here: Array) -> Any:
        """Who goes on with which token. -> tokens with their tries, the people of each, their
        shares by softmax, the mass of all of them"""
        view = self.session.engine.look(text)
        likely = softmax_of(view)
        best: dict[int, float] = {}
        for token, rest in branches.items():
            for answer in rest.answers:
                best[answer] = max(best.get(answer, 0.0), likely[token])
        kept = [
            (token, rest)
            for token, rest in sorted(branches.items())
            if any(likely[token] >= FORM_SHARE * best[answer] for answer in rest.answers)
        ]
        ids = np.array([token for token, _ in kept])
        said = self.people.choose(view, text, ids)[here]
        shares = likely[ids] / likely[ids].sum()
        parts = [here[said == token] for token in ids]
        return kept, parts, shares, float(sum(likely[token] for token in branches))

    def _forms(self, options: Sequence[str]) -> dict[tuple[int, ...], int]:
        """The tokens of every form of every option."""
        forms: dict[tuple[int, ...], int] = {}
        for place, option in enumerate(options):
            for spelling in map(str.strip, option.split(SPELLINGS)):
                cased = {spelling, spelling.lower(), spelling[:1].upper() + spelling[1:]}
                for text in sorted({*cased, spelling.upper()}):
                    for form in (text, f" {text}"):
                        ids = tuple(self.session.engine.encode(form, special=False).ids)
                        if forms.setdefault(ids, place) != place:
                            raise ValueError(f"Two options are written {form!r}; rename one.")
        return forms

    @cached_property
    def _ends(self) -> set[int]:
        engine = self.session.engine
        single = (engine.encode(text, special=False).ids for text in ENDS)
        return {*engine.ends, *(ids[0] for ids in single if len(ids) == 1)}


class _Trie:
    """Options by their tokens: the answer that ends here, and what may follow."""

    def __init__(self, forms: dict[tuple[int, ...], int]) -> None:
        self.answers = {*forms.values()}
        self.answer = forms.get(())
        self.children: dict[int, _Trie] = {}
        for token in {ids[0] for ids in forms if ids}:
            own = {ids[1:]: place for ids, place in forms.items() if ids[:1] == (token,)}
            self.children[token] = _Trie(own)

    def branches(self, ends: set[int]) -> dict[int, _Trie]:
        """Tokens and what follows; an option that ends here is any token that ends a sentence. One
        option alone needs no further tokens."""
        if len(self.answers) == 1:
            (answer,) = self.answers
            return {next(iter(self.children), 0): _Trie({(): answer})}
        if self.answer is None:
            return self.children
        return {**dict.fromkeys(ends, _Trie({(): self.answer})), **self.children}


@dataclass(frozen=True)
class Answers:
    """What everybody chose among options."""

    question: str
    options: tuple[str, ...]
    people: list[int | str] = field(repr=False)
    chosen: Array = field(repr=False)  # (N,) places of options
    softmax: Array = field(repr=False)  # (K,) probabilities among the options
    mass: float  # of softmax at the first token, on any option

    @property
    def shares(self) -> Array:
        """(K,)"""
        return np.bincount(self.chosen, minlength=len(self.options)) / len(self.chosen)

    @property
    def intervals(self) -> Array:
        """Wilson's, at 95%. (K, 2)"""
        n, p = len(self.chosen), self.shares
        centre, size = p + Z**2 / (2 * n), Z * np.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
        return np.stack([centre - size, centre + size], axis=-1) / (1 + Z**2 / n)

    def __getitem__(self, person: int | str) -> str:
        """The answer of a person."""
        return self.options[self.chosen[self.people.index(person)]]

    def versus(self, other: Answers) -> Comparison:
        """These people beside themselves, asked otherwise."""
        return Comparison(self, other)

    def pairs(self) -> list[tuple[int | str, str]]:
        """Everybody with the answer."""
        return [(who, self.options[k]) for who, k in zip(self.people, self.chosen, strict=True)]

    def to_frame(self) -> Any:
        """A DataFrame with a row for each person."""
        import pandas

        return pandas.DataFrame(self.pairs(), columns=["person", "answer"])

    def rows(self) -> list[dict[str, Any]]:
        """Every option with its figures."""
        ends = self.intervals.tolist()
        columns = zip(self.options, self.shares, ends, self.softmax, strict=True)
        return [
            {"option": name, "share": float(p), "low": a, "high": b, "softmax": float(q)}
            for name, p, (a, b), q in columns
        ]

    def to_dict(self) -> dict[str, Any]:
        own = {"question": self.question, "n": len(self.people), "mass": self.mass}
        return {**own, "options": self.rows()}

    def __str__(self) -> str:
        width = max(map(len, self.options)) + 2
        lines = [f"{self.question}", f"{'':<{width}}{'share':>7}   95% interval   softmax"]
        lines += [
            f"{one['option']:<{width}}{one['share']:>7.3f}   {one['low']:.3f} to {one['high']:.3f}"
            f"{one['softmax']:>10.3f}"
            for one in self.rows()
        ]
        outside = f"; {1 - self.mass:.0%} of the model's mass is on other answers"
        return "\n".join([*lines, f"{len(self.people)} individuals{outside}"])

    def to_html(self) -> str:
        """Bars, as a fragment for notebooks and pages."""
        return answer_bars(self.question, self.rows(), len(self.people), self.mass)

    _repr_html_ = to_html

    def plot(self, axes: Any = None) -> Any:
        """Shares with their intervals, on matplotlib's axes."""
        axes = axes or _axes()
        low, high = self.intervals.T
        errors = np.maximum([self.shares - low, high - self.shares], 0)
        axes.bar(self.options, self.shares, yerr=errors, color="#0f766e", capsize=4)
        axes.plot(self.options, self.softmax, "k_", markersize=20, label="softmax")
        axes.set(title=self.question, ylabel="share of individuals", ylim=(0, 1))
        axes.legend()
        return axes


@dataclass(frozen=True)
class Comparison:
    """The same people, asked twice."""

    first: Answers
    second: Answers

    def __post_init__(self) -> None:
        if self.first.people != self.second.people or self.first.options != self.second.options:
            raise ValueError("A comparison needs the same people and options; ask one panel twice.")

    @property
    def counts(self) -> Array:
        """How many gave each pair of answers. (K, K)"""
        return _counts(self.first, self.second)

    @property
    def difference(self) -> Array:
        """Of the shares, second minus first. (K,)"""
        return self.second.shares - self.first.shares

    @property
    def errors(self) -> Array:
        """Standard errors of the differences, person by person. (K,)"""
        return np.sqrt(self._variances[0] / len(self.first.people))

    @property
    def switched(self) -> float:
        """The share of people with another answer."""
        return float((self.first.chosen != self.second.chosen).mean())

    @property
    def kappa(self) -> float:
        """Cohen's: agreement beyond chance; 1 where all give one answer."""
        table = self.counts / self.counts.sum()
        chance = float(table.sum(0) @ table.sum(1))
        return 1.0 if chance == 1 else (float(table.trace()) - chance) / (1 - chance)

    @property
    def saving(self) -> float:
        """How many times as many independent draws would give intervals as narrow."""
        paired, independent = (float(one.sum()) for one in self._variances)
        return math.inf if paired == 0 else independent / paired

    @property
    def _variances(self) -> tuple[Array, Array]:
        """Of one person's difference, and of that of two strangers. (K,), (K,)"""
        places = range(len(self.first.options))
        pairs = [(self.second.chosen == k) * 1.0 - (self.first.chosen == k) for k in places]
        shares = np.stack([self.first.shares, self.second.shares])
        return np.var(pairs, axis=1), (shares * (1 - shares)).sum(0)

    def rows(self) -> list[dict[str, Any]]:
        found = []
        for k, name in enumerate(self.first.options):
            difference, error = float(self.difference[k]), float(self.errors[k])
            shares = {"first": float(self.first.shares[k]), "second": float(self.second.shares[k])}
            ends = {"low": difference - Z * error, "high": difference + Z * error}
            found.append({"option": name, **shares, "difference": difference, **ends})
        return found

    def switches(self) -> list[dict[str, Any]]:
        """Who changed from what to what, the most frequent first."""
        names, n = self.first.options, len(self.first.people)
        pairs = [(a, b) for a in range(len(names)) for b in range(len(names)) if a != b]
        found = [
            {
                "from": names[a],
                "to": names[b],
                "n": (count := int(self.counts[a, b])),
                "share": count / n,
            }
            for a, b in sorted(pairs, key=lambda pair: -self.counts[pair])
        ]
        return [one for one in found if one["n"]]

    def pairs(self) -> list[tuple[int | str, str, str]]:
        """Everybody with both answers."""
        both = zip(self.first.pairs(), self.second.pairs(), strict=True)
        return [(who, one, other) for (who, one), (_, other) in both]

    def to_frame(self) -> Any:
        """A DataFrame with a row for each person."""
        import pandas

        return pandas.DataFrame(self.pairs(), columns=["person", "first", "second"])

    def to_dict(self) -> dict[str, Any]:
        figures = {name: getattr(self, name) for name in ("switched", "kappa", "saving")}
        both = {"first": self.first.to_dict(), "second": self.second.to_dict()}
        return {**both, "options": self.rows(), "switches": self.switches(), **figures}

    def __str__(self) -> str:
        width = max(map(len, self.first.options)) + 2
        lines = [f"first   {self.first.question}", f"second  {self.second.question}"]
        lines += [f"{'':<{width}}{'first':>7}{'second':>8}   difference (95%)"]
        lines += [
            f"{one['option']:<{width}}{one['first']:>7.3f}{one['second']:>8.3f}   "
            f"{one['difference']:+.3f} ({one['low']:+.3f} to {one['high']:+.3f})"
            for one in self.rows()
        ]
        lines += [f"{s['n']} went from {s['from']} to {s['to']}" for s in self.switches()]
        saved = f"{self.saving:.1f}" if self.saving < math.inf else "any number of"
        figures = (
            f"kappa {self.kappa:.2f} (0 is chance); as narrow as {saved} times as many strangers"
        )
        return "\n".join([*lines, f"{len(self.first.people)} individuals; {figures}"])

    def to_html(self) -> str:
        """Both bars, and who switched."""
        moved = "".join(
            f"<li>{s['n']} from {html.escape(s['from'])} to {html.escape(s['to'])}</li>"
            for s in self.switches()
        )
        both = f"{self.first.to_html()}{self.second.to_html()}"
        words = f"{self.switched:.0%} of the same people switched; kappa {self.kappa:.2f}"
        return f"<div class='panel'>{both}<p>{words}</p><ul>{moved}</ul></div>"

    _repr_html_ = to_html

    def plot(self, axes: Any = None) -> Any:
        """Who switched: bands from the first answers to the second."""
        axes, n = axes or _axes(), len(self.first.people)
        left = np.concatenate([[0], np.cumsum(self.first.shares)])
        right = np.concatenate([[0], np.cumsum(self.second.shares)])
        begun, ended = left[:-1].copy(), right[:-1].copy()
        x = np.linspace(0, 1, 50)
        bend = x * x * (3 - 2 * x)
        for a, b in np.argwhere(self.counts):
            height = self.counts[a, b] / n
            low = begun[a] + (ended[b] - begun[a]) * bend
            axes.fill_between(x, low, low + height, color=f"C{a}", alpha=0.9 if a == b else 0.45)
            begun[a] += height
            ended[b] += height
        for k, name in enumerate(self.first.options):
            axes.text(-0.02, (left[k] + left[k + 1]) / 2, name, ha="right", va="center")
            axes.text(1.02, (right[k] + right[k + 1]) / 2, name, ha="left", va="center")
        axes.set(title=f"{self.switched:.0%} switched", xlim=(-0.3, 1.3))
        axes.axis("off")
        return axes


@dataclass(frozen=True)
class OpenAnswers:
    """What everybody says."""

    question: str
    people: list[int | str] = field(repr=False)
    said: list[Any] = field(repr=False)  # texts, or numbers

    def to_frame(self) -> Any:
        """A DataFrame with a row for each person."""
        import pandas

        return pandas.DataFrame({"person": self.people, "answer": self.said})

    def to_dict(self) -> dict[str, Any]:
        said = zip(self.people, self.said, strict=True)
        return {"question": self.question, "answers": [{"person": p, "said": t} for p, t in said]}

    def __str__(self) -> str:
        said = zip(self.people, self.said, strict=True)
        return "\n".join([self.question, *(f"{person:>6}  {text}" for person, text in said)])


class NumberAnswers(OpenAnswers):
    """The number of everybody; NaN of those who said none."""

    def quantile(self, p: float) -> float:
        return float(np.nanquantile(self.said, p))

    @property
    def median(self) -> float:
        return self.quantile(0.5)

    def __str__(self) -> str:
        low, high = self.quantile(0.05), self.quantile(0.95)
        words = f"median {self.median:.4g}, nine of ten from {low:.4g} to {high:.4g}"
        return f"{self.question}\n{words}; {len(self.people)} individuals"


def _counts(first: Answers, second: Answers) -> Array:
    counts = np.zeros((len(first.options), len(second.options)), np.int64)
    np.add.at(counts, (first.chosen, second.chosen), 1)
    return counts


def answer_bars(question: str, rows: Sequence[dict[str, Any]], n: int, mass: float) -> str:
    """`Answers.rows` as an HTML fragment."""
    bars = "".join(
        f"<tr><th style='text-align:left'>{html.escape(row['option'])}</th><td style='width:50%'>"
        f"<div style='background:#0f766e;height:1em;width:{100 * row['share']:.1f}%'></div></td>"
        f"<td>{row['share']:.1%} ({row['low']:.1%} to {row['high']:.1%})</td></tr>"
        for row in rows
    )
    return (
        f"<div class='panel'><p><b>{html.escape(question)}</b></p><table style='width:100%'>{bars}"
        f"</table><p>{n} individuals; {1 - mass:.0%} of the model's mass is on other answers</p>"
        "</div>"
    )


def _axes() -> Any:
    import matplotlib.pyplot as plt

    return plt.subplots(figsize=(6, 4))[1]


def _read(text: str) -> float:
    from causal_qwen.text.numerals import encode

    return next(iter(encode(text).values), math.nan)


def _shown(question: Prompt) -> str:
    return question if isinstance(question, str) else question[-1]["content"]
