"""Inference: the documents' calls as functions of a model, `inference(model, ids, mode=...)`."""

from __future__ import annotations

from causal_qwen.choices import MODES as INFERENCE_MODES
from causal_qwen.documents import DocumentedCalls

__all__ = ["INFERENCE_MODES", "debug_forward_pass", "generate_step_by_step", "inference"]

inference = DocumentedCalls.inference
generate_step_by_step = DocumentedCalls.generate_step_by_step
debug_forward_pass = DocumentedCalls.debug_forward_pass
