"""Conversion: a plain checkpoint -> a causal model that behaves exactly like it, and back.

In:   a hub name, a directory, a GGUF file or a loaded model.
Out:  a causal layer, or a directory with the causal model, its tokenizer and its settings.

    location       the files of a model, by its name
    calibration    decision noise, thresholds, gamma and noise gains
    convert        base + calibration -> model; save to a directory, load from one
    opening        the name of a model of any kind -> processor and model; layers
    export         a causal model -> a plain checkpoint, or GGUF
    gguf_file      a plain model -> one file for llama.cpp
    placement      names of devices and dtypes -> torch's
    checkpoint_io  find, load and check models; base models; silence

Open `convert` first.
"""
