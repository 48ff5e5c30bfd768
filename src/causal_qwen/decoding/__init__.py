"""Decoding: how one step of generation is decided. Shared by both engines; runs without torch.

In:   the options of a call, and loc_S, scale_S and U of the last position.
Out:  the resolved settings, the noise of every row, and the chosen tokens.

    settings    `resolve_settings`: call > generation_config > config -> `DecodingSettings`
    noise       `DecodingNoise`: the noise of each row of a call, at each position
    candidates  who may be chosen: min-p, whole words, and no phrase said twice
    step        `choose_tokens`: candidates, noise and rule: the one decision of every engine
    decision    the four decision rules, and the pruned argmax
    draws       `complete_call`: the individual or seed that a call leaves to chance
    context     the context length of a model, and the tokens that end a text
    arrays      the functions of NumPy or of torch, by the kind of an array

Open `step` first.
"""
