"""What does P mean before training? P_k beside softmax, on held-out text of three kinds.

    python benchmarks/calibration.py --data gsm8k/test.jsonl [--model DIRECTORY] [--tokens 512]

A fresh conversion, calibrated on the built-in texts, with a fixed threshold ("none", the
documents') and over the bar of the context ("competition"). Reported on prose (below), Python code
(of the standard library) and school mathematics (DATA): the negative log-likelihood of P over its
sum beside that of softmax(loc_S), and the median of sum_k P_k, of every kind and of all. Then
reliability: of all pairs of a position and a token with a P in some range, the share in which the
token came next.

DATA is text: one JSON object per line, all its strings are used.
"""

from __future__ import annotations

import csv
import inspect
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _results import Row, log, make_parser, parse, save, table
from learning import read_texts as read_lines
from torch import Tensor

from causal_qwen.conversion.calibration import calibrate_scales, read_texts
from causal_qwen.conversion.checkpoint_io import encode_texts
from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.numpy_engine.calibration import TEXTS
from causal_qwen.options import THRESHOLD_CONTEXTS

PIECE = 256  # tokens read at once
POSITIONS = 64  # whose scores exist at once
ALL = "all"
EDGES = (0, 1e-5, 1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99, 1 + 1e-9)
PROSE = """
My grandfather kept bees behind the old railway station. Every spring he walked along the fence
with a notebook and counted the hives that had survived the winter. In a good year he lost two or
three of them; in a bad year half of the boxes were silent. He never complained about it. He
cleaned the frames, burned what was rotten, and waited for the first warm day in April. Then he
would call us, and we children had to stand very still while he lifted the lid. "Listen," he said,
"they are telling each other where the cherry trees are." We believed him, of course, and later I
learned that it was true.

The city was built on a river that floods every few years. For a long time people simply moved
their furniture to the upper floor and waited until the water was gone. In the last century
engineers built walls along both banks, and for two generations nobody got wet feet. But walls
make a river faster, and a fast river carries more sand. Slowly the bed rose, until the water
stood higher than the streets. When the flood finally came, it was the worst in living memory.
Today the city is trying something else. It has bought the fields upstream and lets them drown.
The farmers were paid, the frogs came back, and when it rains for a week the market square stays
dry.

A good teacher does not explain everything. She asks a question, waits, and asks it again in other
words. Most pupils are afraid of silence, and so are most teachers. But in the silence somebody
begins to think. I remember a lesson about falling stones. Our teacher held a heavy one and a
light one out of the window and asked which would reach the ground first. Everybody was sure. Then
she let them go, and we all heard only one sound. She did not say anything more that day. She
closed the window, wiped her hands and sent us home, and at dinner every family in the village was
talking about stones.

Sleep is not a waste of time. While we sleep, the brain sorts what it has seen during the day,
keeps some of it and throws the rest away. People who sleep too little remember less, catch more
colds and make worse decisions, and the strange thing is that they do not notice it. Ask a tired
driver how he feels, and he will tell you that he is fine. Doctors recommend between seven and
nine hours for adults, and more for children. It also helps to go to bed at the same time every
day, to keep the room dark and cool, and to leave the telephone in the kitchen.
"""


def held_out(data: Path) -> dict[str, str]:
    """Text of three kinds that calibration has not read."""
    maths = "\n\n".join(read_lines(data)[:40])
    prose = "\n\n".join(" ".join(paragraph.split()) for paragraph in PROSE.split("\n\n"))
    return {"prose": prose, "code": inspect.getsource(csv), "mathematics": maths}


@torch.no_grad()
def read(model: Any, tokenizer: Any, text: str, tokens: int) -> tuple[Tensor, Tensor]:
    """States before every token of a text but the first of a piece, and those tokens."""
    ids = tokenizer(text, return_tensors="pt").input_ids[0, :tokens]
    pieces = [piece for piece in ids.split(PIECE) if len(piece) > 1]
    states = [model.model(piece[None]).last_hidden_state[0, :-1] for piece in pieces]
    return torch.cat(states), torch.cat([piece[1:] for piece in pieces])


@torch.no_grad()
def measure(model: Any, hidden: Tensor, labels: Tensor) -> dict[str, Any]:
    """Likelihoods, sums and the counts of the reliability table."""
    nll, softmax, sums = [], [], []
    counts = np.zeros((3, len(EDGES) - 1))  # pairs, sum of P, tokens that came next
    for z, label in zip(hidden.split(POSITIONS), labels.split(POSITIONS), strict=True):
        s, _ = model.act(model.abduct(z))
        at = label.unsqueeze(-1)
        p = model.decision(s)
        nll.append(-model.decision.log_normalized(s).gather(-1, at))
        softmax.append(-s.loc.log_softmax(-1).gather(-1, at))
        sums.append(p.sum(-1))
        came = p.gather(-1, at).flatten().numpy()
        flat = p.flatten().double().numpy()
        counts[0] += np.histogram(flat, EDGES)[0]
        counts[1] += np.histogram(flat, EDGES, weights=flat)[0]
        counts[2] += np.histogram(came, EDGES)[0]
    return {
        "ovr_nll": float(torch.cat(nll).mean()),
        "softmax_nll": float(torch.cat(softmax).mean()),
        "sum_p": float(torch.cat(sums).median()),
        "positions": len(labels),
        "counts": counts.tolist(),
    }


def page(results: list[Row], data: str) -> list[str]:
    columns = {"kind": "{kind}", "threshold": "{context}", "softmax NLL": "{softmax_nll:.2f}"}
    columns |= {"NLL of P / ΣP": "{ovr_nll:.2f}", "median ΣP": "{sum_p:.2f}"}
    columns |= {"positions": "{positions}"}
    lines = [
        "# What does P mean before training?",
        "",
        f"`python benchmarks/calibration.py --data {data}`: a fresh conversion, calibrated on the "
        "built-in texts, on held-out text of three kinds, with a fixed threshold (none) and over "
        "the bar of the context (competition). A uniform guess has the log of the vocabulary, "
        f"{np.log(results[0]['vocabulary']):.1f}.",
        "",
        *table(columns, results),
    ]
    for context in THRESHOLD_CONTEXTS:
        (row,) = (row for row in results if (row["kind"], row["context"]) == (ALL, context))
        pairs, total, came = np.array(row["counts"])
        reliability = [
            {"low": low, "high": min(high, 1), "pairs": int(n), "p": p / n, "frequency": hit / n}
            for low, high, n, p, hit in zip(EDGES, EDGES[1:], pairs, total, came, strict=False)
            if n
        ]
        columns = {"P": "{low:g} to {high:g}", "pairs": "{pairs:,}", "mean P": "{p:.2g}"}
        lines += [
            "",
            f"## Reliability: {context}",
            "",
            "Of all pairs of a position and a token with P in the range, how often the token came.",
            "",
            *table(columns | {"frequency": "{frequency:.2g}"}, reliability),
        ]
    return lines


def main() -> None:
    parser = make_parser(__doc__, "calibration", "32 tokens of every kind: does it run")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, help="a converted model; default: the embedded one")
    parser.add_argument("--tokens", type=int, default=512, help="of every kind")
    options = parse(parser, tokens=32)
    processor, model = open_model(options.model or default_model())
    texts = encode_texts(processor.tokenizer, TEXTS)
    assert texts is not None
    fitted = read_texts(model, texts)
    kinds = {
        kind: read(model, processor.tokenizer, text, options.tokens)
        for kind, text in held_out(options.data).items()
    }
    hidden, labels = zip(*kinds.values(), strict=True)
    kinds[ALL] = torch.cat(hidden), torch.cat(labels)
    results = []
    for context in THRESHOLD_CONTEXTS:
        model.config.threshold_context = context
        threshold, gamma, _, _ = calibrate_scales(model, fitted)
        log({"context": context, "threshold": threshold, "gamma": gamma})
        for kind, (hidden, labels) in kinds.items():
            row = {"kind": kind, "context": context, **measure(model, hidden, labels)}
            results.append({**row, "vocabulary": model.config.vocab_size, "threshold": threshold})
    save(page(results, "/".join(options.data.parts[-2:])), results, options.output)


if __name__ == "__main__":
    main()
