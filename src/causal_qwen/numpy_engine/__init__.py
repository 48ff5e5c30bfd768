"""Engine: Qwen2 and CausalQwen's heads in NumPy. Does not import torch or transformers.

    engine = Engine.from_pretrained("my-model")
    print(engine.generate("The train was late, so", max_new_tokens=40).text)

In:   a checkpoint directory, and prompts as text or token ids.
Out:  generated tokens, their values and probabilities; logits and layer outputs on request.

    engine             `Engine`: load a checkpoint, generate, stream
    generation         the loop over tokens, in one of the four modes
    calibration        scores on a few texts -> threshold, scales and noise gains
    gguf               GGUF files: metadata, tokenizer, weights
    heads              CausalQwen's heads: z -> U -> S, Y
    qwen2              the backbone, from token ids to hidden states and logits
    fast               products with weights in 8, 16 or 32 bits, shared among cores
    quantization       matrices in int8, and `quantize` a directory
    weights            safetensors files, memory-mapped
    checkpoint         the tensors that a config.json describes
    tokenization       text <-> ids and values
    sampling           softmax, top-k, top-p, min-p, draws

Open `engine` first, then `qwen2`. The decision rules are in `causal_qwen.decoding`.
"""

from causal_qwen.numpy_engine.engine import Engine, Generation
from causal_qwen.numpy_engine.qwen2 import (
    KeyValueCache,
    Qwen2,
    Qwen2Config,
    apply_rotary_pos_emb,
    attention_forward,
    greedy_decode,
    repeat_kv,
    rms_norm,
)
from causal_qwen.numpy_engine.weights import read_tensors

__all__ = [
    "Engine",
    "Generation",
    "KeyValueCache",
    "Qwen2",
    "Qwen2Config",
    "apply_rotary_pos_emb",
    "attention_forward",
    "greedy_decode",
    "read_tensors",
    "repeat_kv",
    "rms_norm",
]
