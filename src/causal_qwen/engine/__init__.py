"""Qwen2 in NumPy, and CausalQwen's heads on top: no torch, no transformers.

from causal_qwen.engine import Engine

engine = Engine.from_pretrained("my-model")
print(engine.generate("The train was late, so", max_new_tokens=40).text)
for step in engine.stream("The train was late, so", mode="causal", individual=7):
    print(step.text, step.probability, step.runners_up)
"""

from causal_qwen.engine.engine import Engine, Generation, Step
from causal_qwen.engine.qwen2 import (
    KeyValueCache,
    Qwen2,
    Qwen2Config,
    apply_rotary_pos_emb,
    attention_forward,
    greedy_decode,
    repeat_kv,
    rms_norm,
)
from causal_qwen.engine.weights import read_tensors

__all__ = [
    "Engine",
    "Generation",
    "KeyValueCache",
    "Qwen2",
    "Qwen2Config",
    "Step",
    "apply_rotary_pos_emb",
    "attention_forward",
    "greedy_decode",
    "read_tensors",
    "repeat_kv",
    "rms_norm",
]
