"""Modeling: the stages of the chain, one file each, in the order of the data flow.

    text -> tokens + values -> embedding -> backbone -> z
         z -> U (abduction) -> S_1..S_V, Y (action) -> token, value (decision) | loss

    configuration    fields added to the base model's configuration
    cauchy           the distribution: tails, quantiles, likelihood, CRPS
    value_space      values <-> the scale on which numbers are predicted; values -> embeddings
    processor        text -> ids + values, and back
    abduction        z -> U
    action           U -> S and Y
    thresholds       S -> P_k = P(S_k > C_k)
    protocols        the interface of a model and of a processor
    one_vs_rest      the classification loss and its gradients, fused
    loss             the whole loss

`causal_qwen/model.py` combines them; open it first. The decision rules are in `decoding`.
"""
