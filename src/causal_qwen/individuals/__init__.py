"""Individuals: fixed noise that makes decoding deterministic. NumPy only.

In:   a seed, a saved file, or the numbers themselves.
Out:  e in (0, 1)^C, and from it standard Cauchy noise t, the same in torch and NumPy.

    noise       e from a seed; e <-> t, with likelihood truncation
    individual  `Individual`: noise to draw, save, mix, truncate and replay

Open `individual` first.
"""
