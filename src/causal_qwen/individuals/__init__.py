"""Individuals: the noise that makes an individual this one and no other. NumPy only.

In:   a seed, a saved file, or the numbers themselves.
Out:  e in (0, 1)^C, and from it standard Cauchy noise t, the same in torch and NumPy.

    noise       e from a seed; e <-> t, with likelihood truncation
    individual  `Individual`: noise that can be drawn, saved, mixed, truncated and replayed

Open `individual` first.
"""
