"""Conversion: a Qwen2 or Llama checkpoint -> a causal model that behaves exactly like it.

In:   a hub name, a directory, a GGUF file or a loaded model.
Out:  a directory with the causal model, its tokenizer and its generation settings.

    base_models    finds, loads and re-expresses the base model as Qwen2
    calibration    decision noise, thresholds, gamma and noise gains
    convert        base + calibration -> model; converts to a directory, loads from one
    checkpoint_io  checkpoint files: assembled, loaded, damaged ones named

Open `convert` first.
"""
