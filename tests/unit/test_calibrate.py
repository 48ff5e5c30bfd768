"""Calibration's small helpers; what it finds is measured by the promise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from causal_qwen.generation.streaming import end_ids


@pytest.mark.parametrize(("saved", "ends"), [(None, set()), (2, {2}), ([2, 5], {2, 5})])
def test_a_text_may_end_in_no_token_in_one_or_in_several(
    fresh_model: Callable[..., Any], saved: Any, ends: set[int]
) -> None:
    model = fresh_model()
    model.generation_config.eos_token_id = saved
    assert end_ids(model) == ends
