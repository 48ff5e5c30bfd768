"""Analysis: questions about a model and its texts.

In:   a model, a text, and an individual or none.
Out:  what the same individual says after an edit, who could have written a text, and whether
      the two engines agree.

    token_sequence  one text as ids and values, and the model's outputs before each token
    counterfactual  the same individual in an edited world
    rendering       a counterfactual as a table, HTML or JSON
    posterior       which individuals could have written an observed text
    gumbel          the baseline: the same questions asked of Gumbel-max sampling
    verify          the NumPy engine against torch, layer by layer and token by token

Open `counterfactual` first.
"""
