"""Arrays: the functions of NumPy or of torch, by the kind of an array.

NumPy's own namespace follows the array API. `array_api_compat.numpy` imports all of NumPy, f2py
included, which takes a sixth of the time to the engine's first token.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # a NumPy array or a torch tensor


def array_namespace(array: Array) -> Any:
    if isinstance(array, np.ndarray | np.generic):
        return np
    import array_api_compat

    return array_api_compat.array_namespace(array)


def in_any_row(is_kept: Array) -> Array:
    """Columns that a row keeps. (B, V) -> (K,)"""
    xp = array_namespace(is_kept)
    return xp.nonzero(xp.max(xp.astype(is_kept, xp.uint8), axis=0))[0]  # torch's `any` is slow
