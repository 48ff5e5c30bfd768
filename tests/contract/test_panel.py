"""Shares and panels: the frequency of choices, the trie of options, paired comparisons."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import causal_qwen
from causal_qwen import Individual, Panel, Session
from causal_qwen.analysis.shares import People, softmax_of
from causal_qwen.engines.engine import Tokens
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.panel import Answers, Comparison, NumberAnswers, _Trie

N = 60
PROMPT = "the king said to the queen"
CHAT = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@pytest.fixture(scope="module", params=["torch", "numpy"])
def session(request: pytest.FixtureRequest, tiny_directory: Path) -> Session:
    return causal_qwen.open(str(tiny_directory), request.param)


@pytest.fixture(scope="module")
def talker(make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]) -> Session:
    """With trained heads, a chat template, and a token for every byte."""
    processor = CausalQwenProcessor(byte_tokenizer(chat_template=CHAT))
    model = make_model(
        vocab_size=260, max_position_embeddings=512, num_token_id=processor.num_token_id
    )
    model.generation_config.noise_gain = 3.0
    return Session(TorchEngine(model, processor))


# ---------------------------------------------------------------- shares


@pytest.mark.parametrize(
    "options",
    [{}, {"persistence": 0.4}, {"min_p": 0.0}, {"temperature": 3.0, "avoid_repeats": 0}],
)
def test_shares_are_the_frequencies_of_what_the_seeds_choose(
    session: Session, options: dict[str, Any]
) -> None:
    shares = session.shares(PROMPT, N, **options)
    texts = session.batch([PROMPT] * N, list(range(N)), max_new_tokens=1, **options)
    said = Counter(str(one) for one in texts)
    counted: Counter[str] = Counter()
    for one in shares.tokens:
        counted[session.engine.decode(Tokens([one.id], [0.0]))] += round(one.share * N)
    assert counted == said
    assert len(said) > 1
    assert sum(one.share for one in shares.tokens) == pytest.approx(1)


def test_engines_agree_on_shares_and_answers(tiny_directory: Path) -> None:
    one, other = (causal_qwen.open(str(tiny_directory), name) for name in ("torch", "numpy"))
    found = [engine.shares(PROMPT, N).tokens for engine in (one, other)]
    shares = [{(s.id, s.share): s.softmax for s in tokens} for tokens in found]
    assert shares[0] == pytest.approx(shares[1], rel=1e-5)
    both = [Panel(name, N).ask("Which?", ["the", "king"]) for name in (one, other)]
    assert both[0].chosen.tolist() == both[1].chosen.tolist()


def test_trained_scales_move_everybody_as_generate_does(talker: Session) -> None:
    people = [3, "ada", Individual.draw(talker.engine.size, seed=9, temperature=2.0, name="Bo")]
    shares = talker.shares(PROMPT, people=people)
    texts = talker.batch([PROMPT] * 3, people, max_new_tokens=1)
    said = Counter(str(one) for one in texts)
    assert Counter({one.token: round(3 * one.share) for one in shares.tokens}) == said
    assert Panel(talker, people).people.names == [3, "ada", "Bo"]


def test_tables_show_the_shares_of_a_session(talker: Session) -> None:
    found = talker.counterfactual(PROMPT, "the queen said", 4, max_new_tokens=5)
    for place in (0, 3):
        text = found.factual.sequence.ids[: found.factual.start + place].tolist()
        shares = {
            one.id: one.share for one in talker.shares(Tokens(text, [0.0] * len(text)), 256).tokens
        }
        assert found.factual.share[place] == pytest.approx(shares[found.factual.new_ids[place]])
    assert 0 < found.factual.share.mean() < 1


def test_the_share_of_two_equal_rows_is_a_half(make_model: Callable[..., Any]) -> None:
    """By symmetry: t and -t are equally likely."""
    import torch

    model = make_model(vocab_size=260, causal_size=32)
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.lm_head.weight[7, :] = 1.0
        model.lm_head.weight[8, :] = -1.0
        model.model.norm.weight.zero_()  # loc_S = 0
        model.decision.threshold.zero_()
    engine: Any = TorchEngine(model, None)  # type: ignore[arg-type]
    tokens = Tokens([1, 2, 3], [0.0] * 3)
    chosen = People(engine.resolve, engine.size, 4000, min_p=0.0).choose(
        engine.look(tokens), tokens
    )
    assert set(chosen) == {7, 8}
    assert (chosen == 7).mean() == pytest.approx(0.5, abs=4 * 0.5 / math.sqrt(4000))


# ---------------------------------------------------------------- options


def test_people_choose_the_first_token_that_options_differ_in(talker: Session) -> None:
    """Bytes: "tap" and "top" share a beginning, which costs a second pass; "tea" has a third."""
    panel = Panel(talker, N, min_p=0.0)
    found = panel.ask("Say", ["tap", "top", "x"], instruction="")
    assert found.shares.sum() == pytest.approx(1)
    assert found.softmax.sum() == pytest.approx(1)
    assert (found.shares > 0).sum() > 1
    before = talker.encode([{"role": "user", "content": "Say"}])
    view, engine = talker.engine.look(before), talker.engine
    likely = softmax_of(view)
    first = {engine.encode(form, special=False).ids[0] for form in ("t", "T", "x", "X", " x")}
    assert found.mass == pytest.approx(float(likely[sorted(first)].sum()))


def test_forms_of_one_option_count_together(talker: Session) -> None:
    panel = Panel(talker, N)
    plain = panel.ask("Say", ["a|b", "c"], instruction="")
    assert plain.options == ("a", "c")
    alone = panel.ask("Say", ["a", "c"], instruction="")
    assert plain.mass > alone.mass


def test_rare_forms_of_an_option_are_nobodys_choice(talker: Session) -> None:
    """Heavy tails would reach them: a form needs a tenth of the likeliest form's mass."""
    panel = Panel(talker, N, temperature=20.0)
    text = talker.encode([{"role": "user", "content": "Say"}])
    likely = softmax_of(talker.engine.look(text))
    branches = _Trie(panel._forms([*"abcdefghijkl"])).branches(set())
    kept, parts, shares, _ = panel._split(branches, text, np.arange(N))
    assert {k for k, _ in kept} < {*branches}
    best = [max(likely[k] for k, one in branches.items() if n in one.answers) for n in range(12)]
    for token, rest in branches.items():
        is_common = any(likely[token] >= 0.1 * best[answer] for answer in rest.answers)
        assert (token in {k for k, _ in kept}) == is_common
    assert sum(map(len, parts)) == N
    assert sum(shares) == pytest.approx(1)


def test_an_option_may_be_the_beginning_of_another(talker: Session) -> None:
    found = Panel(talker, N, temperature=20.0).ask("Say", ["a", "ab"], instruction="")
    assert 0 < found.shares[0] < 1


def test_the_order_of_options_and_people_changes_no_answer(talker: Session) -> None:
    panel = Panel(talker, ["ada", 5, 3])
    one = panel.ask("Say", ["cat", "dog", "owl"], instruction="")
    other = Panel(talker, [3, "ada", 5]).ask("Say", ["owl", "dog", "cat"], instruction="")
    assert [one[who] for who in ("ada", 5, 3)] == [other[who] for who in ("ada", 5, 3)]
    assert one.softmax.tolist() == pytest.approx(other.softmax[::-1].tolist())


@pytest.mark.parametrize(
    ("options", "words"),
    [(["a"], "two or more"), (["a", "a"], "two or more"), (["a", "A"], "Two options are written")],
)
def test_options_that_cannot_be_told_apart_are_refused(
    talker: Session, options: list[str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        Panel(talker, 3).ask("Say", options)


def test_the_default_instruction_has_the_language_of_the_question(talker: Session) -> None:
    panel = Panel(talker, 3)
    (asked,) = panel._prompt("Tea?", ("yes", "no"), False, None)
    assert asked["content"] == "Tea?\nAnswer with only one of these: yes, no."  # type: ignore[index]
    (asked,) = panel._prompt("茶？", ("是", "否"), False, None)
    assert asked["content"].endswith("：是、否。")  # type: ignore[index]


def test_open_questions_are_answered_by_what_everybody_writes(talker: Session) -> None:
    panel = Panel(talker, [1, "ada"])
    found = panel.ask("Say", max_new_tokens=5)
    message = [{"role": "user", "content": "Say"}]
    alone = [talker.generate(message, who, max_new_tokens=5).text.strip() for who in (1, "ada")]
    assert found.said == alone
    numbers = panel.ask("How many?", number=True)
    assert len(numbers.said) == 2


def test_numbers_of_a_model_with_values_are_those_of_its_individuals(
    make_model: Callable[..., Any], byte_tokenizer: Callable[..., Any]
) -> None:
    processor = CausalQwenProcessor(byte_tokenizer(), encode_numbers="value")
    model = make_model(vocab_size=260, num_token_id=processor.num_token_id, encode_numbers="value")
    model.generation_config.noise_gain = 0.5
    session = Session(TorchEngine(model, processor))
    found = Panel(session, 400).ask("It costs", number=True, instruction="")
    tokens = session.encode("It costs\n")
    import torch

    with torch.no_grad():
        out = model(
            torch.tensor([tokens.ids]), numeric_values=torch.tensor([tokens.values]).double()
        )
    w = model.action.value.weight[0].detach().double()
    expected = []
    for seed in range(400):
        t = torch.tensor(Individual.draw(model, seed=seed).cauchy())
        y = out.loc_Y[0, -1].double() + 0.5 * (w * out.scale_U[0, -1].double() * t).sum()
        expected.append(float(y.sign() * y.abs().expm1()))
    assert found.median == pytest.approx(np.median(expected), rel=1e-3, abs=1e-4)


# ---------------------------------------------------------------- figures


def answers(chosen: list[int], options: int = 2) -> Answers:
    names = tuple("abc"[:options])
    return Answers("Q", names, [*range(len(chosen))], np.array(chosen), np.ones(options), 1.0)


ROWS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=2, max_size=60)


@given(ROWS)
def test_a_comparison_has_the_figures_of_its_table(rows: list[tuple[int, int]]) -> None:
    one, other = (answers([row[k] for row in rows], 3) for k in (0, 1))
    found, n = one.versus(other), len(rows)
    assert found.counts.sum() == n
    assert found.switched == pytest.approx(sum(a != b for a, b in rows) / n)
    agreed = sum(a == b for a, b in rows) / n
    chance = sum(
        (sum(a == k for a, _ in rows) / n) * (sum(b == k for _, b in rows) / n) for k in range(3)
    )
    if chance < 1:
        assert found.kappa == pytest.approx((agreed - chance) / (1 - chance))
    assert -1 - 1e-9 <= found.kappa <= 1 + 1e-9
    assert sum(one["n"] for one in found.switches()) == sum(a != b for a, b in rows)
    assert found.difference.sum() == pytest.approx(0, abs=1e-12)


def test_strangers_save_nothing_and_faithful_people_everything() -> None:
    rng = np.random.default_rng(0)
    one = answers(rng.integers(0, 2, 4000).tolist())
    assert one.versus(answers(rng.integers(0, 2, 4000).tolist())).saving == pytest.approx(
        1, abs=0.1
    )
    assert one.versus(one).saving == math.inf
    assert one.versus(one).kappa == 1
    noisy = [k if rng.random() < 0.9 else 1 - k for k in one.chosen.tolist()]
    kept = one.versus(answers(noisy))
    assert kept.saving == pytest.approx(1 / (1 - kept.kappa), rel=0.05)  # equal shares


def test_intervals_are_wilsons() -> None:
    found = answers([0] * 7 + [1] * 3)
    exact = stats.binomtest(7, 10).proportion_ci(method="wilson")
    assert found.intervals[0] == pytest.approx([exact.low, exact.high], abs=1e-4)


def test_other_people_or_options_are_not_compared() -> None:
    with pytest.raises(ValueError, match="the same people"):
        Comparison(answers([0, 1]), answers([0, 1, 1]))


def test_answers_are_shown_as_text_html_frames_and_pictures() -> None:
    pytest.importorskip("matplotlib").use("Agg")
    one, other = answers([0, 0, 1, 1]), answers([0, 1, 1, 1])
    assert "1 went from a to b" in str(one.versus(other))
    assert "&lt;" in Answers("<", ("a", "b"), [0], np.array([0]), np.ones(2), 1.0).to_html()
    assert one.versus(other).to_frame().columns.tolist() == ["person", "first", "second"]
    assert len(one.plot().patches) >= 2
    assert one.versus(other).plot().get_title() == "25% switched"
    assert one.to_dict()["options"][0]["share"] == 0.5
    assert NumberAnswers("Q", [0, 1], [1.0, math.nan]).median == 1
