"""Fisher's iris table from scikit-learn: the example of the demo and the playground."""

from __future__ import annotations

from typing import Any


def iris_table() -> Any:
    """A DataFrame of 150 flowers; the same shuffled order in every call."""
    import numpy as np
    from sklearn.datasets import load_iris

    iris = load_iris(as_frame=True)
    table = iris.frame.rename(columns=lambda name: name.removesuffix(" (cm)"))
    table["species"] = [str(iris.target_names[code]) for code in table.pop("target")]
    return table.iloc[np.random.default_rng(0).permutation(len(table))]
