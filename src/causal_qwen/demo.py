"""Demo: what a causal language model is, shown on a real one in half a minute."""

from __future__ import annotations

import json
from typing import Any

import torch
from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from transformers import Qwen2ForCausalLM

PROMPT = "The old lighthouse keeper opened the door and"
OTHER_PROMPT = "The young mayor opened the letter and"
# Likelihood truncation keeps a small model on topic; what is left of the noise can be turned up.
PERSONA = {"causal_mode": "causal", "min_density": 0.05, "temperature": 4.0}
INDIVIDUALS = (1, 2, 3)
NEW_TOKENS = 28


@torch.no_grad()
def run(tokenizer: Any, model: Any, base: Qwen2ForCausalLM | None, as_json: bool = False) -> None:
    """Four things: the promise, the four modes, individuals, and one decision from inside."""
    console = Console(quiet=as_json)
    result: dict[str, Any] = {}

    def say(prompt: str, speaker: Any = model, **options: Any) -> str:
        ids = tokenizer(prompt, return_tensors="pt")
        out = speaker.generate(**ids, max_new_tokens=NEW_TOKENS, **options)
        text: str = tokenizer.decode(out[0, ids["input_ids"].shape[1] :], skip_special_tokens=True)
        return " ".join(text.split())

    if base is not None:
        same = say(PROMPT, base, do_sample=False) == say(PROMPT)
        result["behaves_like_its_base"] = same
        verdict = "[green]word for word the same[/]" if same else "[red]not the same[/]"
        console.print(
            Panel(f"Before training, it speaks like the model it came from: {verdict}.", title="1")
        )

    modes = {
        "standard": say(PROMPT),
        "sampling": say(PROMPT, causal_mode="sampling", individual=1),
        "causal": say(PROMPT, individual=1, **PERSONA),
        "compatible": say(PROMPT, causal_mode="compatible"),
    }
    result["modes"] = modes
    table = Table(title=f"2 · Four modes: “{PROMPT} …”", show_lines=True, expand=True)
    table.add_column("mode", style="bold")
    table.add_column("says")
    for mode, text in modes.items():
        table.add_row(mode, text)
    console.print(table)

    table = Table(title="3 · Individuals (causal mode): one e, every word", show_lines=True)
    table.add_column("individual", justify="right", style="bold")
    for prompt in (PROMPT, OTHER_PROMPT):
        table.add_column(f"{prompt} …")
    result["individuals"] = {}
    for seed in INDIVIDUALS:
        texts = [say(prompt, individual=seed, **PERSONA) for prompt in (PROMPT, OTHER_PROMPT)]
        result["individuals"][seed] = texts
        table.add_row(str(seed), *texts)
    console.print(table)

    result["decision"] = show_decision(tokenizer, model, console)
    if as_json:
        print(json.dumps(result, ensure_ascii=False))
    else:
        console.print(
            'Next: [bold]causal-qwen generate "Once upon a time" --mode causal --individual 42 '
            "--min-density 0.05 --temperature 4[/]"
        )


def show_decision(tokenizer: Any, model: Any, console: Console) -> dict[str, Any]:
    """One decision: the best candidates' scores, and the chance that each passes its threshold."""
    output = model(**tokenizer(PROMPT, return_tensors="pt"), logits_to_keep=1)
    probability = model.decision(output.s_dist)[0, -1]
    loc, scale = output.loc_S[0, -1], output.scale_S[0, -1]
    table = Table(title="4 · Inside one decision: S_k ~ Cauchy(loc, scale), wanted if S_k > C_k")
    for column in ("token", "loc_S", "scale_S", "C", "P_k"):
        table.add_column(column, justify="left" if column == "token" else "right")
    for k in loc.topk(5).indices.tolist():
        table.add_row(
            repr(tokenizer.decode([k])),
            f"{loc[k]:.2f}",
            f"{scale[k]:.2e}",
            f"{model.decision.threshold[k]:.2f}",
            f"{probability[k]:.2e}",
        )
    console.print(table)
    total = float(probability.sum())
    console.print(f"   sum of P over {len(loc):,} tokens: {total:.2f}")
    return {"sum_p": total, "chosen": tokenizer.decode([int(probability.argmax())])}
