"""Engines: tokens -> the next token of every row; rows join and leave between two steps.

In:   prompts as tokens and values, the options of every row.
Out:  the chosen tokens, with their values and log-probabilities.

    engine      `Engine`, `Batch`, `Row`: what an engine offers
    torch       Hugging Face's model; rows in one batch
    llama       GGUF files, by llama.cpp; rows in one batch
    numpy       Qwen2 in NumPy; rows take turns

Open `engine` first.
"""
