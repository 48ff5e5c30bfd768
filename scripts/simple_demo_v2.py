"""Basic use, with the same calls as Qwen2: load, generate, inspect.

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
PromptOption = Annotated[str, typer.Option("--prompt", help="Text to continue.")]


def main(
    model: ModelOption = None,
    seed: SeedOption = 0,
    prompt: PromptOption = "The old lighthouse keeper opened the door and",
) -> None:
    """Show basic use; exits with 1 when a check fails."""
    subject = load_subject(model)
    checks = Checks("Basic use", subject)
    ids = subject.ids(prompt)
    from_a_config(checks, seed)
    greedy_and_sampling(checks, ids, seed)
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
    greedy = model.generate(ids, max_new_tokens=5, do_sample=False)
    sampled = model.generate(
        ids, max_new_tokens=5, do_sample=True, temperature=0.8, top_k=50, top_p=0.9
    )
    checks.check(
        "it generates with do_sample=False and with do_sample=True",
        all(torch.equal(text[:, :8], ids) and text.shape[1] > 8 for text in (greedy, sampled)),
        f"{tuple(ids.shape)} -> {tuple(greedy.shape)}",
    )
    loss = model(ids, labels=ids).loss
    loss.backward()
    trained = [name for name, p in model.named_parameters() if p.grad is not None and p.grad.any()]
    checks.check(
        "the loss has gradients for abduction, action and decision",
        loss.isfinite()
        and {"abduction.scale.bias", "action.b_noise", "decision.threshold"} <= set(trained),
        f"loss {loss:.4g}",
    )


def greedy_and_sampling(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("generate(), exactly as with Qwen2")
    model = checks.subject.model
    greedy = [generate(model, ids, do_sample=False) for _ in range(2)]
    sampling = {"do_sample": True, "temperature": 0.8, "top_k": 50, "top_p": 0.9}
    sampled = [generate(model, ids, **sampling, individual=seed) for _ in range(2)]
    show(checks, ids, {"do_sample=False": greedy[0], "do_sample=True, T=0.8": sampled[0]})
    checks.check("do_sample=False gives the same text twice", torch.equal(*greedy))
    checks.check(
        "do_sample=True gives the same text twice for the same individual", torch.equal(*sampled)
    )
    checks.check(
        "both start with the prompt and add tokens",
        all(
            torch.equal(text[:, : ids.shape[1]], ids) and text.shape[1] > ids.shape[1]
            for text in (greedy[0], sampled[0])
        ),
    )


def individuals(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("causal_mode='causal': one individual for the whole text")
    model = checks.subject.model
    seeds = range(seed, seed + 4)
    texts = {
        f"individual {i}": generate(model, ids, causal_mode="causal", individual=i) for i in seeds
    }
    show(checks, ids, texts)
    checks.check(
        "four individuals give at least three different texts",
        len({tuple(text[0].tolist()) for text in texts.values()}) >= 3,
        unless=checks.subject.why_uncalibrated,
    )
    together = generate(
        model, ids.expand(len(seeds), -1), causal_mode="causal", individual=list(seeds)
    )
    is_same = [
        torch.equal(trim(row, text[0]), text[0])
        for row, text in zip(together, texts.values(), strict=True)
    ]
    checks.check(
        "each gives the same text in a batch as alone", all(is_same), f"{sum(is_same)} of 4"
    )


def documented_calls(checks: Checks, ids: Tensor, seed: int) -> None:
    checks.section("the documented calls")
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
    for mode, chosen in {"standard": standard, "causal": causal}.items():
        options = {"individual": seed} if mode == "causal" else {}
        text = model.generate_step_by_step(ids, 1, mode, **options)
        checks.check(
            f"generate_step_by_step adds the token that inference chooses ({mode})",
            torch.equal(text[:, -1], chosen[:, -1]),
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
    """Without the padding after the end of a text in a batch."""
    return row[: len(text)] if not row[len(text) :].any() else row


def show(checks: Checks, ids: Tensor, texts: dict[str, Tensor]) -> None:
    console.print(f"  [dim]{escape(checks.subject.text(ids[0]))} …[/]")
    rows = [(name, checks.subject.text(text[0, ids.shape[1] :])) for name, text in texts.items()]
    show_table("", "continuation", rows=rows)


if __name__ == "__main__":
    typer.run(main)
