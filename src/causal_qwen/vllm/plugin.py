"""Plugin: what vLLM loads by the entry point `vllm.general_plugins`.

Names our architectures, with a check of each, which refuses what is not served and gives the model
its logits processor. Other models are untouched.
"""

from __future__ import annotations

from typing import Any

from causal_qwen.families import FAMILIES, QWEN2

MODEL = "causal_qwen.vllm.model:CausalQwenForCausalLM"
PROCESSORS = (  # of vLLM's first and second model runner
    "causal_qwen.vllm.processor:CausalLogitsProcessor",
    "causal_qwen.vllm.processor:CausalSlotProcessor",
)


def register() -> None:
    """Enter our names; vLLM calls it in every process, at times twice."""
    from vllm import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP

    for family in FAMILIES:  # importing this package has entered their configurations
        name = family.names[2]
        ModelRegistry.register_model(name, MODEL)
        MODELS_CONFIG_MAP[name] = ModelCheck


class ModelCheck:
    """vLLM calls it once per model, with its whole configuration, before anything is loaded."""

    @staticmethod
    def verify_and_update_model_config(model_config: Any) -> None: ...

    @staticmethod
    def verify_and_update_config(vllm_config: Any) -> None:
        from vllm.logger import init_logger

        from causal_qwen.vllm import processor
        from causal_qwen.vllm.admission import Served

        if reason := refusal(vllm_config):
            raise ValueError(reason)
        model = vllm_config.model_config
        own = PROCESSORS[vllm_config.use_v2_model_runner]
        model.logits_processors = [*(model.logits_processors or []), own]
        processor.serve(Served.of(vllm_config))
        if model.hf_config.num_token_id is not None:
            init_logger("vllm.causal_qwen").info(
                "<NUM> is not generated: vLLM cannot feed its value back. Numbers are digits."
            )


def refusal(vllm_config: Any) -> str:
    """One sentence for a configuration that is not served; empty if it is."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    name, pipeline = model.architecture, parallel.pipeline_parallel_size
    refused = {
        f"{name} is not served by this plugin, which knows {QWEN2.names[2]}; use `causal-qwen "
        "serve`, or `causal-qwen export` for the plain model.": name != QWEN2.names[2],
        "The model reads numbers as values, which requests to vLLM do not carry; use `causal-qwen "
        "serve`.": model.hf_config.encode_numbers == "value",
        "avoid_repeats reads the tokens of prompts; leave out --enable-prompt-embeds.": (
            model.enable_prompt_embeds
        ),
        "Speculative decoding guesses tokens by softmax, which does not decide here; start without "
        "--speculative-config.": vllm_config.speculative_config is not None,
        f"quantization={model.quantization!r} hides W, which decides; start without it.": (
            model.quantization is not None
        ),
        f"--pipeline-parallel-size {pipeline} is not supported; use --tensor-parallel-size, or "
        "serve the model several times with --data-parallel-size.": pipeline > 1,
    }
    return next((sentence for sentence, is_refused in refused.items() if is_refused), "")
