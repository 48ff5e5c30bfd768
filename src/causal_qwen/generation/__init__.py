"""Generation: the four modes inside Hugging Face's `generate`.

In:   a call of `generate`, its options and the model's outputs.
Out:  tokens, their values, and the individual of each row.

    mixin             `CausalGenerationMixin`: every override of a private Hugging Face method
    logits            `DecisionProcessor`: the mode as the last logits processor; values of tokens
    documented_calls  the calls and attribute names of the source documents

Open `mixin` first. What a mode decides is in `decoding`.
"""
