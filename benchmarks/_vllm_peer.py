"""One engine of vLLM, in vLLM's environment; `vllm_throughput` starts it.

    python _vllm_peer.py MODEL

Reads jobs, one JSON object per line: `prompts` (token ids), `tokens` (new ones of every prompt),
`sampling` (fields of SamplingParams). Answers each with `texts` (token ids) and the `seconds` and
processor seconds (`cpu`) that they took. Prompts are not cached between jobs.
"""

from __future__ import annotations

import json
import os
import sys
import time

ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what vLLM prints is no answer

from vllm import LLM, SamplingParams  # noqa: E402


def main(model: str) -> None:
    engine = LLM(
        model,
        dtype="float32",
        enforce_eager=True,
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        max_model_len=512,
    )
    print("{}", file=ANSWERS, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        prompts = [{"prompt_token_ids": prompt} for prompt in job["prompts"]]
        params = [
            SamplingParams(
                max_tokens=job["tokens"], ignore_eos=True, detokenize=False, **job["sampling"]
            )
            for _ in prompts
        ]
        for one, extra in zip(params, job["extra"], strict=True):
            one.extra_args = extra
        begun, cpu = time.perf_counter(), time.process_time()
        found = engine.generate(prompts, params, use_tqdm=False)
        answer = {
            "seconds": time.perf_counter() - begun,
            "cpu": time.process_time() - cpu,
            "texts": [list(one.outputs[0].token_ids) for one in found],
        }
        print(json.dumps(answer), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
