"""Text: find the numbers in a text and split it at them; where words end. Runs without torch.

In:   a string, for example "It costs 99.9 euro".
Out:  pieces of text, the values of the numbers between them, and the string again.

    numerals      the grammar: what is a number, its value, how to write it
    names         the laws: which digits are dates, phones and identifiers
    segmentation  pieces for a tokenizer, and the stable part of a growing text

Open `numerals` first.
"""
