"""Analysis: counterfactuals, posteriors and engine comparison.

In:   a model, a text, and (for counterfactuals) an individual.
Out:  the text of the same individual after an edit, individuals that could have written a text,
      and the differences between the two engines.

    token_sequence  one text as ids and values, and the model's outputs before each token
    counterfactual  the same individual after an edit of prompt, token, number or model
    rendering       a counterfactual as a table, HTML or JSON
    token_view      one token -> the scores that chose it
    shares          how many of many individuals choose each token next
    posterior       individuals that could have written an observed text
    verify          the NumPy engine against torch, layer by layer

Open `counterfactual` first.
"""
