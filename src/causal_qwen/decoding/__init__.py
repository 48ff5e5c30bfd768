"""Decoding: how one step of generation is decided. Shared by both engines; runs without torch.

In:   the options of a call, and loc_S, scale_S and U of the last position.
Out:  the resolved settings, the noise of every row, and the chosen tokens.

    settings    `resolve_settings`: call > generation_config > config -> `DecodingSettings`;
                what a call leaves to chance, context lengths, ends of text
    noise       `DecodingNoise`: the noise of each row of a call, at each position
    step        `choose_tokens`: who may be chosen, noise and rule: the decision of every engine
    decision    the four decision rules, and the pruned argmax

Open `step` first.
"""
