"""Tiny models of every family, for the tests of the contract."""

from __future__ import annotations

from typing import Any

V, NUM = 97, 96
TINY: dict[str, Any] = {
    "vocab_size": V,
    "hidden_size": 32,  # H, and C where the head is tied
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,  # wide enough for the choices to depend on the context
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
OWN: dict[str, dict[str, Any]] = {  # what a family has and the others have not
    "qwen2": {},
    "qwen3": {"head_dim": 10},
    "qwen3_moe": {
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "output_router_logits": True,
    },
    "qwen3_5_text": {
        "head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "llama": {"attention_bias": True, "mlp_bias": True, "head_dim": 10},
    "mistral": {"head_dim": 8, "sliding_window": 6, "tie_word_embeddings": False},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma2": {"head_dim": 8, "final_logit_softcapping": 3.0},
    "gemma3_text": {
        "head_dim": 8,
        "sliding_window": 8,
        "final_logit_softcapping": 5.0,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi3": {"tie_word_embeddings": False},
    "olmo2": {},
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5},
}


def make_base(base: str, dtype: Any = None) -> Any:
    """A base model as its checkpoint of this dtype is loaded: rotary frequencies stay float32."""
    import torch
    from transformers import AutoModelForCausalLM

    from causal_qwen.backbones import base_class
    from causal_qwen.families import BY_BASE

    config = base_class(BY_BASE[base]).config_class(**TINY | OWN[base])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return AutoModelForCausalLM.from_config(config, dtype=dtype or torch.float32).eval()


def make_causal(base: str = "qwen2", **fields: Any) -> Any:
    """A causal model with a head and a padding token of its own."""
    import torch

    from causal_qwen.backbones import classes_of
    from causal_qwen.families import BY_BASE

    config, _, kind = classes_of(BY_BASE[base])
    own = {"tie_word_embeddings": False, "pad_token_id": 0}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return kind(config(**TINY | OWN[base] | own | fields)).eval()
