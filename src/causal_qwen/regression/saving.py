"""Saving: a fitted regressor -> its directory, and back.

    regressor.skops   version, parameters and fitted attributes

A skops file names the type of everything in it: what is neither scikit-learn's nor in TRUSTED is
not loaded. It is a zip archive, whose checksums find changed bytes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED

import skops.io

FILE = "regressor.skops"
VERSION = 3  # of the file; a change of what it contains is another version
OURS = {
    "modeling.value_space": ("ValueSpace",),
    "regression.conformal": ("Conformal", "Limits", "Target"),
    "regression.experts": ("Expert", "Ridge", "Stack"),
    "regression.head": ("Chain",),
    "regression.source_model": ("Reading", "SourceModel", "TargetModel"),
    "regression.sources": ("Schema", "Spline", "TableFeatures"),
}
TRUSTED = [  # beside what skops trusts: scikit-learn's estimators, arrays, plain containers
    *(f"causal_qwen.{module}.{name}" for module, names in OURS.items() for name in names),
    "sklearn.ensemble._hist_gradient_boosting.predictor.TreePredictor",
    *("functools.partial", "sklearn.utils.validation.check_array"),  # of trees with categories
    *("numpy.dtype", "numpy.round"),  # of an imputer, of rounded components
    "scipy.sparse._csr.csr_matrix",  # of rows with words, in a kernel
]


def write_state(state: dict[str, Any]) -> bytes:
    options = {"compression": ZIP_DEFLATED, "compresslevel": 1}
    content: bytes = skops.io.dumps({"version": VERSION, **state}, **options)
    return content


def read_state(file: Path) -> dict[str, Any]:
    """What `write_state` wrote; one sentence for a damaged file and for a foreign one."""
    if not file.is_file():
        raise FileNotFoundError(f"{file.parent} has no {FILE}; is it a saved regressor?")
    content = file.read_bytes()
    try:
        unknown = sorted({*skops.io.get_untrusted_types(data=content)} - {*TRUSTED})
        state = {} if unknown else skops.io.loads(content, trusted=TRUSTED)
    except Exception as error:  # whatever damaged bytes make zip, JSON and skops raise
        reason = (str(error).splitlines() or [""])[0][:100] or type(error).__name__
        raise ValueError(f"{file} is damaged ({reason}); restore it, or fit again.") from None
    if unknown or not isinstance(state, dict) or state.get("version") != VERSION:
        what = f"objects of the type {unknown[0]}" if unknown else "another version"
        raise ValueError(f"{file} has {what}, which this causal-qwen does not load; fit again.")
    found: dict[str, Any] = state
    return found
