"""Models: a model that a command names, opened."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from causal_qwen.conversion.location import path_of
from causal_qwen.terminal import status

if TYPE_CHECKING:
    from causal_qwen.session import Session


def open_model(model: str, engine: str, **how: Any) -> Session:
    """A session, with a line that says what is being done."""
    from causal_qwen.session import choose_engine
    from causal_qwen.session import open as open_session

    if choose_engine(engine) == "numpy":
        return open_session(model, "numpy", **how)
    path = path_of(model)  # which may convert the embedded model, with a line of its own
    with status() as progress:
        progress("loading the model")
        return open_session(path, "torch", **how)
