"""Text: numbers are found in a text, and a text is split at them. Runs without torch.

In:   a string, for example "It costs 99.9 euro".
Out:  pieces of text, the numbers between them as values, and the way back to a string.

    numerals      the grammar: which characters are a number, which value they have, how to write it
    segmentation  pieces for a tokenizer, and a growing text as far as it is stable

Open `numerals` first.
"""
