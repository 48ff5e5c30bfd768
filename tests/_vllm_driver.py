"""Runs requests in vLLM, in its own environment; tests/contract/test_vllm.py starts it.

    python _vllm_driver.py DIRECTORY

DIRECTORY has jobs, `NAME.job.json`, and gets their answers, `NAME.json`. A job has a model
directory, options of the engine, and requests: token ids of a prompt, options of `generate`, and
the step after which the request arrives. The answers are token ids; the counts have the steps whose
bar was computed. Every job has a process of its own, a copy of this one, which has imported vLLM.

vLLM's second model runner needs Triton, which has no compiler for CPUs here. Its interpreter
(TRITON_INTERPRET=1) runs the same kernels; vLLM asks for a backend of CPUs, and finds an empty one.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

if os.environ.get("TRITON_INTERPRET") == "1":  # before vLLM looks
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False))

from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.metrics.reader import get_metrics_snapshot

from causal_qwen.modeling.thresholds import Decision

SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "n")


def parameters(options: dict[str, Any], tokens: int) -> Any:
    """Options of `generate` -> vLLM's."""
    options = dict(options)
    own = {name: options.pop(name) for name in SAMPLING if name in options}
    return SamplingParams(
        max_tokens=tokens,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,  # all copies of a request at once
        extra_args=options or None,
        **own,
    )


def run(job: dict[str, Any]) -> dict[str, Any]:
    os.environ.update(job.get("environment", {}))
    bars, bar = [], Decision.bar

    def counted(self: Decision, scores: Any) -> Any:
        bars.append(len(scores))
        return bar(self, scores)

    Decision.bar = counted  # type: ignore[method-assign]
    usual = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True}
    engine = LLMEngine.from_engine_args(EngineArgs(job["model"], **{**usual, **job["engine"]}))
    waiting = dict(enumerate(job["requests"]))
    answers: dict[str, list[list[int]]] = {}
    step = 0
    while waiting or engine.has_unfinished_requests():
        for number, request in list(waiting.items()):
            if request.get("after", 0) <= step:
                params = parameters(request["options"], request["tokens"])
                prompt = {"prompt_token_ids": request["prompt"]}
                engine.add_request(str(number), prompt, params)
                del waiting[number]
        for output in engine.step():
            if output.finished:
                texts = sorted(output.outputs, key=lambda one: one.index)
                answers[output.request_id] = [list(one.token_ids) for one in texts]
        step += 1
    counts = {
        metric.name: metric.value
        for metric in get_metrics_snapshot()
        if metric.name in ("vllm:num_preemptions", "vllm:prefix_cache_hits")
    }
    counts["bars"] = len(bars)
    return {"answers": [answers[str(i)] for i in range(len(job["requests"]))], "counts": counts}


def main(directory: Path) -> None:
    for file in sorted(directory.glob("*.job.json")):
        if (child := os.fork()) == 0:
            found = run(json.loads(file.read_text("utf-8")))
            answers = file.with_name(file.name.replace(".job.json", ".json"))
            answers.write_text(json.dumps(found), "utf-8")
            os._exit(0)
        if os.waitpid(child, 0)[1] != 0:
            sys.exit(f"{file.name} failed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
