"""Conversion: a plain checkpoint -> a causal model that behaves exactly like it, and back.

In:   a hub name, a directory, a GGUF file or a loaded model.
Out:  a directory with the causal model, its tokenizer and its generation settings.

    location       the files of a model, by its name
    calibration    decision noise, thresholds, gamma and noise gains
    convert        base + calibration -> model; save to a directory, load from one
    export         a causal model -> a plain checkpoint, or GGUF
    gguf_file      a plain model -> one file for llama.cpp
    placement      names of devices and dtypes -> torch's
    checkpoint_io  find, load and check models; base models; silence

Open `convert` first.
"""
