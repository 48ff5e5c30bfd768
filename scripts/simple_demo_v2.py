"""Basic use, as one would write it for Qwen2: load, generate, look inside.

python scripts/simple_demo_v2.py [--model DIR] [--seed N] [--prompt TEXT]
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer
from _report import Checks, ModelOption, SeedOption, console, load_subject, show_table
from rich.markup import escape
from torch import Tensor

from causal_qwen_mvp import CausalQwen2Config, CausalQwenMVPForCausalLM

NEW = 16
PromptOption = Annotated[str, typer.Option("--prompt", help="What the model continues.")]


def main(
    model: ModelOption = None,
    seed: SeedOption = 0,
    prompt: PromptOption = "The old lighthouse keeper opened the door and",
) -> None:
    """Show basic use; exits with 1 when something does not do what is said of it."""
    subject = load_subject(model)
    checks = Checks("Basic use", subject)
    ids = subject.ids(prompt)
    from_a_config(checks, seed)
    two_ways_to_generate(checks, ids, seed)
    individuals(checks, ids, seed)
    documented_calls(checks, ids, seed)
    checks.finish()


def from_a_config(checks: Checks, seed: int) -> None:
    checks.section("a new model from a config")
    config = CausalQwen2Config(
        vocab_size=500,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = CausalQwenMVPForCausalLM(config)
    ids = torch.randint(500, (2, 8), generator=torch.Generator().manual_seed(seed))
    calm = model.generate(ids, max_new_tokens=5, do_sample=False)
    lively = model.generate(
        ids, max_new_tokens=5, do_sample=True, temperature=0.8, top_k=50, top_p=0.9
    )
    checks.check(
        "it generates with do_sample=False and with do_sample=True",
        all(torch.equal(text[:, :8], ids) and text.shape[1] > 8 for text in (calm, lively)),
        f"{tuple(ids.shape)} -> {tuple(calm.shape)}",
    )
    loss = model(ids, labels=ids).loss
    loss.backward()
    moved = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    checks.check(
        "it has a loss, and the loss teaches abduction, action and decision",
        loss.isfinite()
        and {"abduction.scale.bias", "action.b_noise", "decision.threshold"} <= set(moved),
        f"loss {loss:.4g}",
    )


def two_ways_to_generate(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("generate(), exactly as with Qwen2")
    model = checks.subject.model
    calm = [generate(model, ids, do_sample=False) for _ in range(2)]
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    lively = [generate(model, ids, **sampling, individual=seed) for _ in range(2)]
    show(checks, ids, {"do_sample=False": calm[0], "do_sample=True, T=0.8": lively[0]})
    checks.check("do_sample=False says the same twice", torch.equal(*calm))
    checks.check("do_sample=True says the same twice to the same individual", torch.equal(*lively))
    checks.check(
        "both begin with the prompt and go on",
        all(
            torch.equal(text[:, : ids.shape[1]], ids) and text.shape[1] > ids.shape[1]
            for text in (calm[0], lively[0])
        ),
    )


def individuals(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("causal_mode='causal': one individual speaks the whole text")
    model = checks.subject.model
    who = range(seed, seed + 4)
    texts = {
        f"individual {i}": generate(model, ids, causal_mode="causal", individual=i) for i in who
    }
    show(checks, ids, texts)
    checks.check(
        "four individuals say at least three different things",
        len({tuple(text[0].tolist()) for text in texts.values()}) >= 3,
        unless=checks.subject.why_uncalibrated,
    )
    together = generate(model, ids.expand(len(who), -1), causal_mode="causal", individual=list(who))
    alike = [
        torch.equal(trim(row, text[0]), text[0])
        for row, text in zip(together, texts.values(), strict=True)
    ]
    checks.check("in one batch each says what it says alone", all(alike), f"{sum(alike)} of 4")


def documented_calls(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("the documents' calls")
    model = checks.subject.model
    output = model(ids)
    standard = model.inference(ids, mode="standard")
    causal = model.inference(ids, mode="causal", individual=seed)
    p = model.inference(ids, mode="compatible")
    checks.check(
        "inference gives ids, ids and probabilities for every position",
        standard.shape == causal.shape == ids.shape
        and p.shape == (*ids.shape, output.logits.shape[-1]),
        f"{tuple(standard.shape)}, {tuple(causal.shape)}, {tuple(p.shape)}",
    )
    checks.check(
        "the probabilities are the softmax of the logits",
        torch.allclose(p, output.logits.float().softmax(-1), rtol=1e-4, atol=0),
    )
    for mode, said in {"standard": standard, "causal": causal}.items():
        options = {"individual": seed} if mode == "causal" else {}
        text = model.generate_step_by_step(ids, 1, mode, **options)
        checks.check(
            f"generate_step_by_step goes on with what inference says ({mode})",
            torch.equal(text[:, -1], said[:, -1]),
        )
    console.print("\n  [bold]debug_forward_pass[/]")
    loc_S, scale_S = model.debug_forward_pass(ids)
    checks.check(
        "debug_forward_pass returns what forward computes",
        torch.equal(loc_S, output.loc_S) and torch.equal(scale_S, output.scale_S),
    )


def generate(model: Any, ids: Tensor, **options: Any) -> Tensor:
    mask = torch.ones_like(ids)
    text: Tensor = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, pad_token_id=0, **options
    )
    return text


def trim(row: Tensor, text: Tensor) -> Tensor:
    """What padding after the end of a text in a batch adds is no part of it."""
    return row[: len(text)] if not row[len(text) :].any() else row


def show(checks: Checks, ids: Tensor, texts: dict[str, Tensor]) -> None:
    console.print(f"  [dim]{escape(checks.subject.text(ids[0]))} …[/]")
    rows = [(name, checks.subject.text(text[0, ids.shape[1] :])) for name, text in texts.items()]
    show_table("", "continuation", rows=rows)


if __name__ == "__main__":
    typer.run(main)
