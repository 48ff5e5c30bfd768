"""Compatibility with Qwen2: the same parameters, the same calls, the same answers.

    python scripts/qwen_compatibility_test.py [--model DIR] [--seed N]

The base model is the same directory, read as a plain Qwen2ForCausalLM.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import typer
from _report import Checks, ModelOption, SeedOption, load_subject
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    Qwen2Config,
    Qwen2ForCausalLM,
    StoppingCriteria,
    StoppingCriteriaList,
)
from transformers.generation.streamers import BaseStreamer

PROMPT = "The three things every traveller should remember are"
NEW = 6

OUR_KEYS = {
    "abduction.loc.weight",
    "abduction.loc.bias",
    "abduction.scale.weight",
    "abduction.scale.bias",
    "action.b_noise",
    "action.decision_noise",
    "action.value.weight",
    "action.value.bias",
    "decision.threshold",
    "decision.word_edges",
    "model.value_direction",
}
# Options of deterministic decoding, which must have the same effect as in Qwen2.
GREEDY_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "repetition_penalty=1.3": {"repetition_penalty": 1.3},
    "no_repeat_ngram_size=2": {"no_repeat_ngram_size": 2},
    "min_new_tokens=1": {"min_new_tokens": 1},
    "suppress_tokens": {"suppress_tokens": list(range(100, 200))},
    "use_cache=False": {"use_cache": False},
    "num_beams=2": {"num_beams": 2},
}


class StopAfter(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        is_done = input_ids.shape[1] >= self.length
        return torch.full((len(input_ids),), is_done, device=input_ids.device)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.ids: list[int] = []
        self.is_over = False

    def put(self, value: Tensor) -> None:
        self.ids += value.flatten().tolist()

    def end(self) -> None:
        self.is_over = True


class Only(LogitsProcessor):
    """Leaves one token possible."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        kept = scores[:, self.token].clone()
        scores = torch.full_like(scores, -torch.inf)
        scores[:, self.token] = kept
        return scores


def main(model: ModelOption = None, seed: SeedOption = 0) -> None:
    """Check compatibility with Qwen2; exits with 1 when a check fails."""
    subject = load_subject(model)
    checks = Checks("Qwen2 compatibility", subject)
    if subject.model.config.causal_size != subject.model.config.hidden_size:
        checks.check(
            "the checkpoint loads as plain Qwen2",
            False,
            f"its head has {subject.model.config.causal_size} columns, Qwen2's needs "
            f"{subject.model.config.hidden_size}",
        )
        checks.finish()
    with torch.no_grad():
        base, info = subject.base()
        ids = subject.ids(PROMPT)
        parameters(checks, base, info)
        interface(checks, base, ids)
        deterministic_options(checks, base, ids)
        sampling_options(checks, ids, seed)
        machinery(checks, ids, seed)
    checks.finish()


def parameters(checks: Checks, base: Any, info: dict[str, Any]) -> None:
    checks.section("parameters")
    subject, model = checks.subject, checks.subject.model
    theirs, ours = base.state_dict(), model.state_dict()
    missing = sorted(set(theirs) - set(ours))
    checks.check(
        "every parameter of Qwen2 exists under its name",
        not missing,
        ", ".join(missing[:3]) or f"{len(theirs)} keys",
    )
    shared = [name for name in theirs if name in ours]
    unequal = [name for name in shared if not torch.equal(ours[name], theirs[name])]
    checks.check(
        "all of them have the same bits",
        shared and not unequal,
        ", ".join(unequal[:3]) or f"{sum(theirs[name].numel() for name in shared):,} numbers",
    )
    added = set(ours) - set(theirs) - {"lm_head.bias"}
    checks.check(
        "the added parameters are exactly the documented ones",
        added == OUR_KEYS,
        ", ".join(sorted(added ^ OUR_KEYS)) or f"{len(added)} keys",
    )
    lost = [*info["missing_keys"], *info["mismatched_keys"]]
    checks.check(
        "our checkpoint has every key that Qwen2 loads", not lost, ", ".join(map(str, lost))
    )
    is_tied = base.config.tie_word_embeddings
    checks.check(
        "the head shares the embedding's memory exactly if the base model's does",
        (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied,
        "tied" if is_tied else "untied",
    )
    fields = Qwen2Config().to_dict().keys() - {
        "model_type",
        "architectures",
        "transformers_version",
    }
    changed = [
        name
        for name in sorted(fields)
        if getattr(model.config, name, None) != getattr(base.config, name, None)
    ]
    checks.check(
        "every field of Qwen2's configuration keeps its value",
        not changed,
        ", ".join(changed) or f"{len(fields)} fields",
    )
    checks.check(
        "AutoConfig and AutoModelForCausalLM find the causal model",
        type(AutoConfig.from_pretrained(subject.path)) is type(model.config)
        and AutoModelForCausalLM._model_mapping[type(model.config)] is type(model),
    )


def interface(checks: Checks, base: Any, ids: Tensor) -> None:
    checks.section("forward")
    subject, model = checks.subject, checks.subject.model
    checks.check("the model is a Qwen2ForCausalLM", isinstance(model, Qwen2ForCausalLM))
    wanted = set(inspect.signature(Qwen2ForCausalLM.forward).parameters)
    known = set(inspect.signature(type(model).forward).parameters)
    checks.check(
        "forward takes every argument that Qwen2's takes",
        wanted <= known,
        ", ".join(sorted(wanted - known)) or f"{len(wanted) - 1} arguments",
    )
    output, expected = model(ids), base(ids)
    unless = subject.why_other_logits
    checks.check(
        "the logits are Qwen2's, bit for bit",
        torch.equal(output.logits, expected.logits),
        f"{output.logits.numel():,} numbers, largest difference "
        f"{(output.logits - expected.logits).abs().max():.3g}",
        unless,
    )
    checks.check(
        "logits and loc_S are one tensor", output.logits is output.loc_S and "logits" in output
    )
    last = model(ids, logits_to_keep=1).logits
    checks.check(
        "logits_to_keep=1 keeps the last position",
        last.shape[1] == 1 and torch.allclose(last[:, 0], output.logits[:, -1], atol=1e-3),
    )
    as_tuple = model(ids, return_dict=False)
    checks.check("return_dict=False gives a tuple", torch.equal(as_tuple[0], output.logits))


def deterministic_options(checks: Checks, base: Any, ids: Tensor) -> None:
    checks.section("generate(do_sample=False): the same tokens as Qwen2")
    subject, model = checks.subject, checks.subject.model
    for name, options in GREEDY_OPTIONS.items():
        options = {k: usable(model, v) for k, v in options.items()}
        ours = generate(model, ids, do_sample=False, **options)
        theirs = generate(base, ids, do_sample=False, **options)
        # beams use compatible mode, which depends on the logits only
        unless = subject.why_other_logits if "beams" in name else subject.why_other_choices
        checks.check(name, torch.equal(ours, theirs), subject.text(ours[0, ids.shape[1] :]), unless)
    compatible = generate(model, ids, do_sample=False, causal_mode="compatible")
    checks.check(
        "causal_mode='compatible'",
        torch.equal(compatible, generate(base, ids, do_sample=False)),
        unless=subject.why_other_logits,
    )


def sampling_options(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("generate(do_sample=True): every sampling parameter acts")
    model = checks.subject.model

    def sample(**options: Any) -> Any:
        noise = {"individual": seed}
        return generate(model, ids, do_sample=True, **noise, **options)

    text = sample(temperature=0.8, top_k=50, top_p=0.9)
    checks.check(
        "temperature=0.8, top_k=50, top_p=0.9 together: the prompt, then new tokens",
        torch.equal(text[:, : ids.shape[1]], ids) and text.shape[1] > ids.shape[1],
        checks.subject.text(text[0, ids.shape[1] :]),
    )
    checks.check(
        "the same individual gives the same text again",
        torch.equal(text, sample(temperature=0.8, top_k=50, top_p=0.9)),
    )
    checks.check(
        "top_k=1 leaves the largest logit", (ranks(sample, top_k=1, temperature=2.0) == 0).all()
    )
    hot = {"temperature": 30.0}  # noise that would leave any small set of candidates
    checks.check(
        "control: at T = 30 tokens beyond the fifth are chosen", ranks(sample, **hot).max() >= 5
    )
    checks.check(
        "top_k=5 keeps every choice among the five largest logits",
        (ranks(sample, top_k=5, **hot) < 5).all(),
    )
    above = mass_above(sample, **hot)
    checks.check("control: at T = 30 tokens beyond the nucleus are chosen", above.max() >= 0.3)
    above = mass_above(sample, top_p=0.3, **hot)
    checks.check("top_p=0.3 keeps every choice inside the nucleus", (above < 0.3).all())
    rows = sample(num_return_sequences=3, **hot)
    checks.check(
        "num_return_sequences=3 gives three individuals",
        len({tuple(r.tolist()) for r in rows}) == 3,
    )


def machinery(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("generate(): configuration, streamers, stopping, padding")
    model = checks.subject.model
    start = ids.shape[1]
    plain = generate(model, ids, do_sample=False)

    settings = GenerationConfig(
        max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False, pad_token_id=0
    )
    checks.check(
        "a GenerationConfig object works like keywords",
        torch.equal(model.generate(ids, generation_config=settings), plain),
    )
    streamer = Collector()
    generate(model, ids, do_sample=False, streamer=streamer)
    checks.check(
        "a streamer gets every token", streamer.is_over and streamer.ids == plain[0].tolist()
    )
    stopped = generate(
        model, ids, do_sample=False, stopping_criteria=StoppingCriteriaList([StopAfter(start + 2)])
    )
    checks.check("a stopping criterion stops", torch.equal(stopped, plain[:, : start + 2]))
    token = model.config.vocab_size // 2
    forced = generate(
        model,
        ids,
        do_sample=True,
        individual=seed,
        logits_processor=LogitsProcessorList([Only(token)]),
    )
    checks.check("a logits processor is applied", (forced[:, start:] == token).all())
    scored = generate(model, ids, do_sample=False, return_dict_in_generate=True, output_scores=True)
    chosen = torch.stack([step.argmax(-1) for step in scored.scores], dim=-1)
    checks.check(
        "output_scores: the largest score is the token chosen",
        torch.equal(scored.sequences, plain) and torch.equal(chosen, plain[:, start:]),
    )
    end = int(plain[0, start + 1])
    ended = generate(model, ids, do_sample=False, eos_token_id=end, min_new_tokens=0)
    first = int((plain[0, start:] == end).nonzero()[0])
    checks.check("eos_token_id ends the text", torch.equal(ended, plain[:, : start + first + 1]))
    padded = torch.cat([torch.zeros_like(ids[:, :3]), ids], dim=-1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    for mode in ("standard", "causal"):
        options = {"individual": seed} if mode == "causal" else {}
        alone = generate(model, ids, causal_mode=mode, do_sample=None, **options)
        left = generate(
            model, padded, attention_mask=mask, causal_mode=mode, do_sample=None, **options
        )
        checks.check(f"left padding changes nothing ({mode})", torch.equal(left[:, 3:], alone))


def generate(model: Any, ids: Tensor, **options: Any) -> Any:
    defaults = {
        "attention_mask": torch.ones_like(ids),
        "max_new_tokens": NEW,
        "min_new_tokens": NEW,
        "pad_token_id": 0,
    }
    return model.generate(ids, **{**defaults, **options})


def usable(model: Any, value: Any) -> Any:
    """Token lists are cut to the vocabulary of small models."""
    if isinstance(value, list):
        return [token for token in value if token < model.config.vocab_size]
    return value


def chosen_among(sample: Callable[..., Any], **options: Any) -> tuple[Tensor, Tensor]:
    """The raw logits of every new position, and the chosen token's. -> (B, NEW, V), (B, NEW, 1)"""
    output = sample(return_dict_in_generate=True, output_logits=True, **options)
    logits = torch.stack(output.logits, dim=1).float()
    return logits, logits.gather(-1, output.sequences[:, -logits.shape[1] :].unsqueeze(-1))


def ranks(sample: Callable[..., Any], **options: Any) -> Tensor:
    """How many logits are larger than the chosen token's, at every new position."""
    logits, chosen = chosen_among(sample, **options)
    return (logits > chosen).sum(-1)


def mass_above(sample: Callable[..., Any], **options: Any) -> Tensor:
    """The probability of all tokens that are likelier than the chosen one."""
    logits, chosen = chosen_among(sample, **options)
    return logits.softmax(-1).where(logits > chosen, 0.0).sum(-1)


if __name__ == "__main__":
    typer.run(main)
