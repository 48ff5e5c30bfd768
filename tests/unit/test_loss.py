"""The loss against a brute-force float64 reference, its masks, counts and gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import causal_qwen.modeling.loss
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.loss import (
    AUTO_CHUNK_ELEMENTS,
    IGNORE,
    LossTerms,
    causal_loss,
    chunk_size,
    shift_left,
)

Make = Callable[..., Any]

B, T, C, V = 3, 7, 24, 97
NUM = 61
FIELDS: dict[str, Any] = {"causal_size": C, "num_token_id": NUM}


def batch(seed: int = 0, numbers: bool = True) -> dict[str, Tensor]:
    """Ids with some `<NUM>`, values beside them, and labels of which some are ignored."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(V, (B, T), generator=generator)
    ids[ids == NUM] = 0
    if numbers:
        ids[0, 2] = ids[0, 5] = ids[1, 3] = ids[2, 0] = NUM
    values = torch.randn(B, T, generator=generator) * 300
    values = values.where(ids == NUM, 0.0)
    labels = ids.clone()
    labels[1, :2] = labels[2, 5:] = IGNORE
    return {"input_ids": ids, "numeric_values": values, "labels": labels}


def loss_terms(model: Any, u: Cauchy, labels: Tensor, **options: Any) -> LossTerms:
    return causal_loss(
        u,
        labels,
        action=model.action,
        head=model.lm_head,
        decision=model.decision,
        config=model.config,
        **options,
    )


def reference(
    model: Any, u: Cauchy, labels: Tensor, targets: Tensor | None = None
) -> dict[str, Tensor]:
    """Section 3 of the specification, term by term and position by position, in float64."""
    config = model.config
    weight, threshold = model.lm_head.weight.double(), model.decision.threshold.double()
    bias = 0.0 if model.lm_head.bias is None else model.lm_head.bias.double()
    b, a = model.action.b_noise.double().abs(), model.action.decision_noise.double().abs()
    w, c = model.action.value.weight.double()[0], model.action.value.bias.double()[0]
    cls, nll, gates, ce = [], [], [], []
    for row in range(labels.shape[0]):
        for position in range(labels.shape[1]):
            label = int(labels[row, position])
            if label == IGNORE:
                continue
            loc = u.loc[row, position].double()
            scale = u.scale[row, position].double() + b
            s_loc = weight @ loc + bias
            s_scale = weight.abs() @ scale + a * scale.mean()
            has_bar = config.threshold_context == "competition"
            level = threshold + (s_loc.logsumexp(-1) if has_bar else 0.0)
            p = 0.5 + ((s_loc - level) / s_scale).atan() / math.pi
            one_hot = torch.zeros(len(p), dtype=torch.float64)
            one_hot[label] = 1
            cls.append(-(one_hot * p.log() + (1 - one_hot) * (1 - p).log()).sum())
            ce.append(s_loc.logsumexp(-1) - s_loc[label])
            if targets is not None and label == config.num_token_id:
                y = targets[row, position].double()
                if config.value_space == "symlog":
                    y = torch.sign(y) * torch.log(1 + torch.abs(y))
                y_loc, y_scale = w @ loc + c, w.abs() @ scale
                nll.append((math.pi * y_scale * (1 + ((y - y_loc) / y_scale) ** 2)).log())
                gate = config.gate_alpha + (1 - config.gate_alpha) * p[label]
                gates.append(gate if config.gate_grad else gate.detach())
    zero = torch.zeros((), dtype=torch.float64)
    terms = {
        "classification": torch.stack(cls).mean() if cls else zero,
        "compatibility": torch.stack(ce).mean() if ce else zero,
        "regression": (
            sum((g * n for g, n in zip(gates, nll, strict=True)), zero) / max(len(nll), 1)
        ),
    }
    if config.ovr_reduction == "mean":
        terms["classification"] = terms["classification"] / config.vocab_size
    terms["total"] = (
        config.classification_loss_weight * terms["classification"]
        + config.regression_loss_weight * terms["regression"]
        + config.compat_loss_weight * terms["compatibility"]
    )
    return terms


def shifted(data: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return shift_left(data["labels"], IGNORE), shift_left(data["numeric_values"], 0.0)


VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear values": {"value_space": "linear"},
    "gate floor": {"gate_alpha": 0.3},
    "gate open": {"gate_alpha": 1.0},
    "gate with gradient": {"gate_grad": True, "gate_alpha": 0.2},
    "mean over the vocabulary": {"ovr_reduction": "mean"},
    "weights": {
        "classification_loss_weight": 0.5,
        "regression_loss_weight": 3.0,
        "compat_loss_weight": 2.0,
    },
    "compatibility alone": {
        "classification_loss_weight": 0.0,
        "regression_loss_weight": 0.0,
        "compat_loss_weight": 1.0,
    },
    "head bias": {"head_bias": True, "compat_loss_weight": 1.0},
    "chunks of 2": {"loss_chunk_size": 2},
    "other activation": {"scale_activation": "softplus"},
    "tied": {"causal_size": None},
    "bar": {"threshold_context": "competition", "loss_chunk_size": 2, "head_bias": True},
    "bar with softmax": {"threshold_context": "competition", "compat_loss_weight": 2.0},
}


# --- the value


@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_equals_the_brute_force_reference(make_model: Make, variant: str) -> None:
    model = make_model(**{**FIELDS, **VARIANTS[variant]})
    data = batch()
    with torch.no_grad():
        out = model(**data)
        labels, targets = shifted(data)
        expected = reference(model, out.u_dist, labels, targets)
        terms = loss_terms(model, out.u_dist, labels, targets=targets)
    assert float(out.loss) == pytest.approx(float(expected["total"]), rel=2e-5)
    assert float(terms.total) == float(out.loss)
    assert float(terms.classification) == pytest.approx(float(expected["classification"]), rel=2e-5)
    assert float(terms.regression) == pytest.approx(float(expected["regression"]), rel=2e-5)
    if model.config.compat_loss_weight:
        assert float(terms.compatibility) == pytest.approx(
            float(expected["compatibility"]), rel=2e-5
        )


def test_a_head_in_parts_has_the_same_bar(
    make_model: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The path of tensor-parallel heads, by autograd, and the fused one."""
    model = make_model(**{**FIELDS, **VARIANTS["bar with softmax"], "gate_grad": True})
    found = []
    for can_fuse in (True, False):
        monkeypatch.setattr(causal_qwen.modeling.loss, "_can_fuse", lambda head, can=can_fuse: can)
        model.zero_grad()
        loss = model(**batch()).loss
        loss.backward()
        names = (model.lm_head.weight, model.decision.threshold, model.abduction.scale.bias)
        found.append((loss, *(p.grad.clone() for p in names)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_tokens_and_numbers_are_reduced_separately(make_model: Make) -> None:
    """Twice as many positions without numbers leave the regression term as it was."""
    model = make_model(**FIELDS)
    data = batch()
    with torch.no_grad():
        u = model(**data).u_dist
        labels, targets = shifted(data)
        alone = loss_terms(model, u, labels, targets=targets)
        plain = labels.where(labels != NUM, 5)
        both = loss_terms(
            model,
            Cauchy(torch.cat([u.loc, u.loc]), torch.cat([u.scale, u.scale])),
            torch.cat([labels, plain]),
            targets=torch.cat([targets, targets]),
        )
    assert float(both.regression) == pytest.approx(float(alone.regression), rel=1e-6)
    assert float(alone.regression) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_model_computes_the_loss_of_its_u_in_float32(
    make_model: Make, dtype: torch.dtype
) -> None:
    model = make_model(**FIELDS, compat_loss_weight=1.0).to(dtype)
    data = batch()
    with torch.no_grad():
        out = model(**data)
        labels, targets = shifted(data)
        expected = reference(model, out.u_dist, labels, targets)
        terms = loss_terms(model, out.u_dist, labels, targets=targets)
    for name, term in terms._asdict().items():
        assert term.dtype == torch.float32, name
        # W loc_U is rounded as in the base model; nothing after it is
        assert float(term) == pytest.approx(float(expected[name]), rel=1e-2), name


# --- what counts


def test_labels_are_shifted_to_the_next_token(make_model: Make) -> None:
    model = make_model(**FIELDS)
    data = batch()
    with torch.no_grad():
        expected = model(**data).loss
        first = data["labels"].clone()
        first[:, 0] = 17  # nobody predicts the first token
        assert torch.equal(model(**{**data, "labels": first}).loss, expected)
        second = data["labels"].clone()
        second[0, 1] = (second[0, 1] + 1) % V
        assert not torch.equal(model(**{**data, "labels": second}).loss, expected)


def test_padding_changes_neither_loss_nor_gradients(make_model: Make) -> None:
    model = make_model(**FIELDS)
    data = batch()
    padded = {
        "input_ids": torch.nn.functional.pad(data["input_ids"], (0, 4), value=0),
        "numeric_values": torch.nn.functional.pad(data["numeric_values"], (0, 4), value=0.0),
        "labels": torch.nn.functional.pad(data["labels"], (0, 4), value=IGNORE),
        "attention_mask": torch.nn.functional.pad(torch.ones(B, T, dtype=torch.long), (0, 4)),
    }
    loss, gradients = loss_and_gradients(model, data)
    padded_loss, padded_gradients = loss_and_gradients(model, padded)
    assert float(padded_loss) == pytest.approx(float(loss), rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(padded_gradients[name], gradient, rtol=1e-4, atol=1e-6)


def test_batch_of_ignored_labels_has_zero_loss_and_gradients(make_model: Make) -> None:
    model = make_model(**FIELDS, compat_loss_weight=1.0)
    data = batch()
    loss, gradients = loss_and_gradients(model, {**data, "labels": data["labels"] * 0 + IGNORE})
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_targets_at_other_tokens_have_no_effect(make_model: Make) -> None:
    model = make_model(**FIELDS)
    data = batch()
    targets = data["numeric_values"].clone()
    targets[data["labels"] != NUM] = math.nan
    with torch.no_grad():
        expected = model(**data).loss
    loss, gradients = loss_and_gradients(model, {**data, "numeric_targets": targets})
    assert float(loss) == pytest.approx(float(expected), rel=1e-6)
    assert all(torch.isfinite(gradient).all() for gradient in gradients.values())


@pytest.mark.parametrize("as_tensor", [True, False])
def test_two_micro_batches_equal_one_big_batch(make_model: Make, as_tensor: bool) -> None:
    """With the whole batch's counts the sum of both losses, and gradients, is the big one's."""
    model = make_model(**FIELDS, compat_loss_weight=0.7)
    data = batch()
    labels = shift_left(data["labels"], IGNORE)
    items, numbers = int((labels != IGNORE).sum()), int((labels == NUM).sum())
    counts: dict[str, Any] = {"num_items_in_batch": items, "num_numbers_in_batch": numbers}
    if as_tensor:
        counts = {name: torch.tensor(count) for name, count in counts.items()}
    loss, gradients = loss_and_gradients(model, data)
    parts = [{name: x[rows] for name, x in data.items()} for rows in ([0], [1, 2])]
    sizes = [int((shift_left(part["labels"], IGNORE) != IGNORE).sum()) for part in parts]
    assert sizes[0] != sizes[1]  # else a plain mean would pass
    results = [loss_and_gradients(model, {**part, **counts}) for part in parts]
    assert float(sum(result[0] for result in results)) == pytest.approx(float(loss), rel=1e-5)
    for name, gradient in gradients.items():
        summed = sum(result[1][name] for result in results)
        torch.testing.assert_close(summed, gradient, rtol=1e-4, atol=1e-5, msg=name)


# --- numbers


@pytest.mark.parametrize("training", [True, False])
def test_batch_without_numbers_has_regression_loss_0_with_a_graph(
    make_model: Make, training: bool
) -> None:
    model = make_model(**FIELDS, value_direction_trainable=True).train(training)
    data = batch(numbers=False)
    out = model(**data)
    labels, targets = shifted(data)
    terms = loss_terms(model, out.u_dist, labels, targets=targets)
    assert float(terms.regression.detach()) == 0
    assert terms.regression.requires_grad
    out.loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
    assert not model.action.value.weight.grad.any()
    assert model.abduction.scale.weight.grad.any()


def test_gate_passes_no_gradient_by_default(make_model: Make) -> None:
    """A hard value must not teach the model to stop predicting <NUM>."""
    only_numbers = {"classification_loss_weight": 0.0, "regression_loss_weight": 1.0}
    detached = make_model(**FIELDS, **only_numbers)
    _, gradients = loss_and_gradients(detached, batch())
    assert not gradients["decision.threshold"].any()
    assert not gradients["action.decision_noise"].any()
    assert not gradients["lm_head.weight"].any()
    assert gradients["action.value.weight"].any()

    open_gate = make_model(**FIELDS, **only_numbers, gate_grad=True)
    _, gradients = loss_and_gradients(open_gate, batch())
    moved = gradients["decision.threshold"].nonzero().flatten().tolist()
    assert moved == [NUM]
    assert gradients["lm_head.weight"][NUM].any()


def test_gate_alpha_of_1_disables_the_gate(make_model: Make) -> None:
    model = make_model(**FIELDS, gate_alpha=1.0, value_space="linear")
    data = batch()
    labels, targets = shifted(data)
    with torch.no_grad():
        out = model(**data)
        terms = loss_terms(model, out.u_dist, labels, targets=targets)
        expected = out.y_dist.nll(targets)[labels == NUM].mean()
    assert float(terms.regression) == pytest.approx(float(expected), rel=1e-5)


# --- chunks


@pytest.mark.parametrize("positions", [1, 164, 165, 1024, 10_000])
def test_scores_and_softmax_of_a_chunk_fit_into_the_memory_of_scores_alone(positions: int) -> None:
    sizes = {}
    for context, tensors in (("none", 1), ("competition", 2)):
        config = CausalQwen2Config(vocab_size=151_936, threshold_context=context)
        sizes[context] = size = chunk_size(config, positions)
        assert size * tensors * config.vocab_size <= AUTO_CHUNK_ELEMENTS
        assert 1 <= size <= positions
    assert sizes["competition"] <= sizes["none"]


@pytest.mark.parametrize("size", [1, 2, 5, 20, 21, 1000])
def test_chunk_size_changes_neither_loss_nor_gradients(make_model: Make, size: int) -> None:
    whole = make_model(**FIELDS, compat_loss_weight=1.0)
    chunked = make_model(**FIELDS, compat_loss_weight=1.0, loss_chunk_size=size)
    loss, gradients = loss_and_gradients(whole, batch())
    chunked_loss, chunked_gradients = loss_and_gradients(chunked, batch())
    assert float(chunked_loss) == pytest.approx(float(loss), rel=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(
            chunked_gradients[name], gradient, rtol=1e-4, atol=1e-5, msg=name
        )


# --- gradients


def loss_and_gradients(model: Any, data: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    model.zero_grad()
    loss = model(**data).loss
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    return loss.detach(), gradients


@pytest.mark.parametrize("variant", ["default", "gate with gradient", "head bias", "chunks of 2"])
def test_gradients_match_the_float64_reference(make_model: Make, variant: str) -> None:
    """U of a float64 copy through the brute-force loss; our float32 gradients must be close."""
    model = make_model(**{**FIELDS, **VARIANTS[variant]})
    data = batch()
    truth = copy.deepcopy(model).double()
    labels, targets = shifted(data)
    out = truth(data["input_ids"], numeric_values=data["numeric_values"])
    reference(truth, out.u_dist, labels, targets)["total"].backward()
    _, ours64 = loss_and_gradients(copy.deepcopy(model).double(), data)
    _, ours32 = loss_and_gradients(model, data)
    for name, parameter in truth.named_parameters():
        if parameter.grad is None:
            assert not ours32.get(name, torch.zeros(1)).any(), name
            continue
        size = float(parameter.grad.norm())
        assert float((ours64[name] - parameter.grad).norm()) <= 1e-6 * size + 1e-12, name
        assert float((ours32[name].double() - parameter.grad).norm()) <= 1e-4 * size + 1e-9, name


@pytest.mark.parametrize("size", [1e2, 1e4, 1e6, 1e9])
def test_extreme_scores_give_a_finite_loss_and_finite_gradients(
    make_model: Make, size: float
) -> None:
    model = make_model(**FIELDS, compat_loss_weight=1.0)
    data = batch()
    labels, targets = shifted(data)
    generator = torch.Generator().manual_seed(1)
    loc = (torch.randn(B, T, C, generator=generator) * size).requires_grad_()
    scale = torch.full((B, T, C), 1e-6).requires_grad_()
    with torch.no_grad():
        model.action.b_noise.zero_()
    terms = loss_terms(model, Cauchy(loc, scale), labels, targets=targets * size)
    terms.total.backward()
    for name, term in terms._asdict().items():
        assert torch.isfinite(term), name
    assert torch.isfinite(loc.grad).all()
    assert torch.isfinite(scale.grad).all()
    for name, parameter in model.named_parameters():
        assert parameter.grad is None or torch.isfinite(parameter.grad).all(), name


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e12])
def test_extreme_scales_give_a_finite_loss_and_finite_gradients(
    make_model: Make, scale: float
) -> None:
    model = make_model(**FIELDS)
    data = batch()
    labels, targets = shifted(data)
    loc = torch.randn(B, T, C, generator=torch.Generator().manual_seed(1), requires_grad=True)
    scales = torch.full((B, T, C), scale, requires_grad=True)
    with torch.no_grad():
        model.action.b_noise.zero_()
    terms = loss_terms(model, Cauchy(loc, scales), labels, targets=targets)
    terms.total.backward()
    assert torch.isfinite(terms.total)
    assert torch.isfinite(loc.grad).all()
    assert torch.isfinite(scales.grad).all()


def test_gradients_reach_labels_far_below_their_threshold(make_model: Make) -> None:
    """Where 1/2 + atan(.)/pi is 0 in float32 and its logarithm -inf, the label still pulls."""
    model = make_model(causal_size=C)
    with torch.no_grad():
        model.decision.threshold.fill_(1e9)
        model.action.b_noise.zero_()
    u = Cauchy(torch.zeros(1, 1, C), torch.full((1, 1, C), 0.01))
    terms = loss_terms(model, u, torch.tensor([[4]]))
    terms.total.backward()
    expected = reference(model, u, torch.tensor([[4]]))
    assert float(terms.total.detach()) == pytest.approx(float(expected["total"].detach()), rel=1e-3)
    assert float(model.decision.threshold.grad[4]) == pytest.approx(1e-9, rel=1e-4)
    # the others are content: their gradient is density / (1 - P), practically nothing
    assert float(model.decision.threshold.grad[:4].abs().max()) < 1e-15
