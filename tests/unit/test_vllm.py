"""The vLLM plugin, as far as it runs without vLLM: admission, rows, refusals, middleware.

tests/contract/test_vllm.py (slow) compares vLLM itself with `generate`.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from _server import run_async

from causal_qwen.decoding.settings import DecodingSettings
from causal_qwen.decoding.step import REACH
from causal_qwen.individuals import seed_of
from causal_qwen.modeling.action import ActionHead
from causal_qwen.options import CONTINUES, OPEN
from causal_qwen.serving.requests import RequestError
from causal_qwen.vllm.admission import Served, admit, admitted_settings
from causal_qwen.vllm.middleware import CausalFields, moved
from causal_qwen.vllm.plugin import refusal
from causal_qwen.vllm.rows import (
    Group,
    Row,
    Step,
    decide_rows,
    make_row,
    pad_texts,
    text_end,
)

SAVED = {
    "noise_gain": 3.0,
    "causal_min_p": 0.05,
    "whole_words": True,
    "avoid_repeats": 2,
}
SERVED = Served(SAVED, "standard")


def params(extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """What of vLLM's SamplingParams is read, with its defaults."""
    filled = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "seed": None, "n": 1}
    penalties = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return SimpleNamespace(**{**filled, **penalties, **fields}, extra_args=extra)


def settings_of(request: Any) -> Any:
    admit(request, SERVED)
    return admitted_settings(request, SERVED)


# ---------------------------------------------------------------- admission


@pytest.mark.parametrize(
    ("extra", "fields", "mode", "seed"),
    [
        ({"individual": 7}, {}, "causal", 7),
        ({"individual": "7"}, {}, "causal", 7),
        ({"user": "ada"}, {}, "causal", seed_of("ada")),
        ({"individual": "Ada"}, {"seed": 3}, "causal", seed_of("ada")),
        ({"causal_mode": "causal"}, {"seed": 5}, "causal", 5),
        (None, {"seed": 5}, "sampling", 5),
        (None, {"temperature": 0.0}, "standard", None),
        ({"causal_mode": "standard"}, {}, "standard", None),
        ({"causal_mode": "compatible"}, {"seed": 5}, "compatible", 5),
        ({"named": []}, {}, "standard", None),
        ({"causal_mode": "compatible", "named": []}, {}, "compatible", None),
        ({"named": ["temperature"]}, {"seed": 6}, "sampling", 6),
        ({"do_sample": 1, "individual": 2}, {}, "sampling", 2),
    ],
)
def test_a_request_gets_its_mode_and_its_individual(
    extra: Any, fields: dict[str, Any], mode: str, seed: int | None
) -> None:
    request = params(extra, **fields)
    settings = settings_of(request)
    assert (settings.mode, request.seed) == (mode, seed)
    assert settings.individual == (seed if settings.is_noisy else None)
    assert settings.noise_gain == 3.0
    assert request.temperature == (1.0 if settings.do_sample else 0.0) or settings.is_noisy
    assert mode == "compatible" or request.temperature == 0.0  # vLLM need not draw


def test_settings_come_from_the_request_then_from_the_model() -> None:
    settings = settings_of(params({"individual": 1, "persistence": 0.5}, min_p=0.2, top_k=9))
    found = (settings.persistence, settings.min_p, settings.top_k, settings.avoid_repeats)
    assert found == (0.5, 0.2, 9, 2)
    assert settings.whole_words
    assert not settings_of(params({"individual": 1, "whole_words": False})).whole_words
    assert settings_of(params({"individual": 1})).min_p == 0.05
    assert settings_of(params({"individual": 1, "causal_min_p": 0.0})).min_p == 0.0
    hot = settings_of(params({"individual": 1, "temperature": 2.5}))
    assert hot.temperature == 2.5


@pytest.mark.parametrize("value", [0, 1])
@pytest.mark.parametrize(
    "name", [one.name for one in fields(DecodingSettings) if one.type == "bool"]
)
def test_true_and_false_arrive_as_numbers(name: str, value: int) -> None:
    found = settings_of(params({"individual": 1, name: value}))
    if name == "do_sample":
        assert found.mode == ("sampling" if value else "causal")
    else:
        assert getattr(found, name) is bool(value)


def test_an_unnamed_individual_is_drawn_anew_for_every_use_of_the_same_parameters() -> None:
    request = params({"named": ["temperature"]}, temperature=0.7)
    clones = []
    for _ in range(3):
        admit(request, SERVED)
        clones.append(copy.deepcopy(request))
    assert {admitted_settings(clone, SERVED).temperature for clone in clones} == {0.7}
    assert len({clone.seed for clone in clones}) == 3
    assert [admitted_settings(clone, SERVED).individual for clone in clones] == [
        clone.seed for clone in clones
    ]


def test_a_penalty_is_left_to_vllm_in_compatible_alone() -> None:
    request = params({"individual": 7}, repetition_penalty=1.5)
    for _ in range(2):  # the same parameters, used again
        assert settings_of(request).repetition_penalty == 1.5
        assert request.repetition_penalty == 1.0  # vLLM would apply it a second time
    request = params({"causal_mode": "compatible"}, repetition_penalty=1.5)
    admit(request, SERVED)
    assert request.repetition_penalty == 1.5


@pytest.mark.parametrize(
    ("extra", "fields", "sentence"),
    [
        ({"individul": 7}, {}, "individul: Extra inputs"),
        ({"individual": 7}, {"temperature": 0.0}, "temperature 0 means standard"),
        ({"causal_mode": "wild"}, {}, "causal_mode='wild' is unknown"),
        ({"individual": 7}, {"presence_penalty": 0.5}, "in mode 'compatible' only"),
        (
            {"causal_mode": "compatible", "normalization": "ovr"},
            {"repetition_penalty": 1.5},
            "without penalties",
        ),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_in_one_sentence(
    extra: Any, fields: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence):
        admit(params(extra, **fields), SERVED)


# ---------------------------------------------------------------- rows


class FakeModel:
    """The part of the plugin's model that `decide_rows` uses, around a model of Hugging Face."""

    def __init__(self, model: Any) -> None:
        self.config, self.inner = model.config, model
        head = ActionHead(model.config.latent_size, model.config.vocab_size, device="meta")
        head.weight, head.bias = model.lm_head.weight, None
        self.law = SimpleNamespace(
            config=model.config,
            lm_head=head,
            action=model.action,
            decision=model.decision,
            groups=WeakValueDictionary(),
        )
        self.u: Any = None
        self.bar: Any = None

    def compute(self, texts: list[list[int]]) -> torch.Tensor:
        outputs = [self.inner(torch.tensor([text]), logits_to_keep=1) for text in texts]
        self.u = type(outputs[0].u_dist)(
            torch.cat([o.loc_U[:, -1] for o in outputs]),
            torch.cat([o.scale_U[:, -1] for o in outputs]),
        )
        scores = torch.cat([o.logits[:, -1] for o in outputs])
        self.bar = self.inner.decision.bar(scores)
        return scores.clone()


CALLS: list[dict[str, Any]] = [
    {"causal_mode": "standard"},
    {"individual": 7},
    {"individual": 8, "persistence": 0.5},
    {"individual": 9, "persistence": 0.0, "temperature": 0.5},
    {"causal_mode": "sampling", "individual": 5},
    {"individual": 12, "top_k": 5, "avoid_repeats": 0},
    {"individual": 13, "top_p": 0.7, "whole_words": False},
    {"individual": 14, "repetition_penalty": 1.5},
    {"individual": 15, "exogenous": 4, "min_density": 0.05},
    {"individual": 16, "causal_min_p": 0.0},
    {"causal_mode": "sampling", "individual": 17, "causal_min_p": 0.0},
    {"causal_mode": "compatible", "normalization": "ovr", "do_sample": False},
]


def again(call: dict[str, Any]) -> dict[str, Any]:
    """The same call of another individual."""
    return {**call, "individual": call["individual"] + 100} if "individual" in call else call


@pytest.mark.parametrize("kind", ["fresh_model", "make_model"])
@torch.no_grad()
def test_rows_of_all_modes_choose_together_what_generate_chooses_alone(
    request: pytest.FixtureRequest, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = request.getfixturevalue(kind)(threshold_context="competition", num_token_id=96)
    for name, value in SAVED.items():
        setattr(model.generation_config, name, value)
    if kind == "fresh_model":
        model.generation_config.noise_gain = 300.0  # scales of a fresh model are small
    model.decision.word_edges[::3] = CONTINUES | OPEN
    generator, tokens = torch.Generator().manual_seed(3), 10
    calls = CALLS + [again(call) for call in CALLS]  # two rows of every rule
    prompts = [
        torch.randint(0, 96, (4 + 7 * (i % 13),), generator=generator).tolist()
        for i in range(len(calls))
    ]
    wanted = []
    for prompt, call in zip(prompts, calls, strict=True):
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=tokens, suppress_tokens=[96], **call
        )
        wanted.append(found[0, len(prompt) :].tolist())
    sizes: list[int] = []
    decide = Group.decide

    def counted(self: Group, *args: Any) -> Any:
        sizes.append(len(args[-1]))
        return decide(self, *args)

    monkeypatch.setattr(Group, "decide", counted)
    fake: Any = FakeModel(model)
    rows = [make_row(fake.law, model.resolve_settings(**call)) for call in calls]
    outputs: list[list[int]] = [[] for _ in calls]
    for _ in range(tokens):
        scores = fake.compute([p + o for p, o in zip(prompts, outputs, strict=True)])
        steps = [
            Step(place, row, len(prompt) + len(output), text_end(row, prompt, output))
            for place, (row, prompt, output) in enumerate(zip(rows, prompts, outputs, strict=True))
            if row is not None
        ]
        for output, token in zip(
            outputs, decide_rows(fake, scores, steps).argmax(-1).tolist(), strict=True
        ):
            output.append(token)
    assert outputs == wanted
    rules = {row.group for row in rows if row is not None}
    assert sizes.count(2 * 4) == tokens  # four calls differ in their noise alone
    assert sizes == [2 if size == 2 else 8 for size in sizes]
    assert len(sizes) == tokens * len(rules) == tokens * (len(CALLS) - 3)
    whole = [group for group in rules if group.decision.shift is not None]
    assert {(group.settings.mode, group.settings.min_p) for group in whole} == {
        ("causal", 0.0),
        ("sampling", 0.0),
    }  # all tokens are candidates; else W is read for candidates alone


def test_a_row_without_its_bar_is_an_error(fresh_model: Callable[..., Any]) -> None:
    """A model that was not told to compute it must not decide without it."""
    model = fresh_model(threshold_context="competition")
    fake: Any = FakeModel(model)
    standard = make_row(fake.law, model.resolve_settings(causal_mode="standard"))
    causal = make_row(fake.law, model.resolve_settings(individual=7))
    assert standard is not None
    assert causal is not None
    assert (standard.needs_bar, causal.needs_bar) == (True, False)
    with torch.no_grad():
        scores = fake.compute([[1, 2, 3]])
    fake.bar = None
    decide_rows(fake, scores.clone(), [Step(0, causal, 3, [1, 2, 3])])
    with pytest.raises(RuntimeError, match="bar of a row is missing"):
        decide_rows(fake, scores, [Step(0, standard, 3, [1, 2, 3])])


def test_texts_are_padded_with_their_own_first_token() -> None:
    """A repetition penalty counts every token once: padding must be no other token."""
    assert pad_texts([[5, 6, 7], [8]]).tolist() == [[5, 6, 7], [8, 8, 8]]


def test_only_the_chosen_token_is_left_to_draw(fresh_model: Callable[..., Any]) -> None:
    model = fresh_model(num_token_id=96)
    fake: Any = FakeModel(model)
    row = make_row(fake.law, model.resolve_settings(individual=7, noise_gain=300.0))
    assert isinstance(row, Row)
    with torch.no_grad():
        scores = fake.compute([[1, 2, 3], [1, 2, 3]])
        assert scores[1, 96] > -torch.inf
        scores = decide_rows(fake, scores, [Step(0, row, 3, [1, 2, 3])])
    assert scores[0].isfinite().sum() == 1
    assert scores[1].isfinite().sum() == 96  # a row of softmax: all tokens but <NUM>
    assert scores[1, 96] == -torch.inf


def test_a_row_reads_as_much_of_the_text_as_its_rules_need(fresh_model: Any) -> None:
    model = fresh_model()
    law = FakeModel(model).law
    prompt, output = list(range(100)), list(range(100, 130))
    row = make_row(law, model.resolve_settings(individual=1))
    assert row is not None
    assert text_end(row, prompt, output) == [*range(130 - REACH, 130)]
    assert text_end(row, prompt[:5], output) == [*range(5), *output]
    assert text_end(row, prompt, output * 3) == (output * 3)[-REACH:]
    strict = make_row(law, model.resolve_settings(individual=1, repetition_penalty=1.5))
    assert strict is not None
    assert text_end(strict, prompt, output) == prompt + output


# ---------------------------------------------------------------- starting, and HTTP


def vllm_config(**changes: Any) -> Any:
    config = SimpleNamespace(encode_numbers="text")
    model = SimpleNamespace(
        architecture="CausalQwenForCausalLM",
        hf_config=config,
        quantization=None,
        enable_prompt_embeds=False,
    )
    parallel = SimpleNamespace(pipeline_parallel_size=1)
    whole = SimpleNamespace(
        model_config=model,
        parallel_config=parallel,
        speculative_config=None,
        use_v2_model_runner=False,
    )
    for name, value in changes.items():
        for part in (config, model, parallel, whole):
            if hasattr(part, name):
                setattr(part, name, value)
    return whole


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({}, ""),
        ({"architecture": "CausalLlamaForCausalLM"}, "is not served by this plugin"),
        ({"encode_numbers": "value"}, "which requests to vLLM do not carry"),
        ({"speculative_config": object()}, "Speculative decoding"),
        ({"quantization": "fp8"}, "quantization='fp8'"),
        ({"enable_prompt_embeds": True}, "--enable-prompt-embeds"),
        ({"pipeline_parallel_size": 4}, "--pipeline-parallel-size 4"),
    ],
)
def test_what_is_not_served_is_refused_at_the_start(change: dict[str, Any], sentence: str) -> None:
    found = refusal(vllm_config(**change))
    assert sentence in found
    assert bool(found) == bool(sentence)


def test_our_fields_of_a_request_move_to_where_vllm_reads_them() -> None:
    body = {"prompt": "Hi", "individual": 7, "user": "ada", "top_p": 0.5, "min_density": None}
    found = json.loads(moved(json.dumps(body).encode()))
    assert found == {
        "prompt": "Hi",
        "user": "ada",
        "top_p": 0.5,
        "vllm_xargs": {"individual": 7, "user": "ada", "named": ["top_p"]},
    }
    written = json.loads(moved(b'{"vllm_xargs": {"causal_mode": "causal"}, "temperature": 1}'))
    assert written["vllm_xargs"] == {"causal_mode": "causal", "named": ["temperature"]}
    assert moved(b"no json") == b"no json"


def test_the_middleware_changes_requests_for_texts_only() -> None:
    seen: list[tuple[str, bytes, bytes]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        message = await receive()
        seen.append((scope["path"], message["body"], dict(scope["headers"])[b"content-length"]))

    async def ask(path: str) -> None:
        parts = [
            {"type": "http.request", "body": b'{"indiv', "more_body": True},
            {"type": "http.request", "body": b'idual": 7}', "more_body": False},
        ]
        scope = {"type": "http", "method": "POST", "path": path}

        async def receive() -> Any:
            return parts.pop(0)

        await CausalFields(app)({**scope, "headers": [(b"content-length", b"17")]}, receive, None)

    run_async(ask("/v1/completions"))
    run_async(ask("/tokenize"))
    (_, body, length), other = seen
    assert json.loads(body) == {"vllm_xargs": {"individual": 7, "named": []}}
    assert int(length) == len(body)
    assert other == ("/tokenize", b'{"indiv', b"17")
