"""Inference: the documents' calls as functions of a model, `inference(model, ids, mode=...)`."""

from __future__ import annotations

from causal_qwen.generation.documented_calls import DocumentedCalls
from causal_qwen.options import MODES as INFERENCE_MODES

__all__ = ["INFERENCE_MODES", "debug_forward_pass", "generate_step_by_step", "inference"]

inference = DocumentedCalls.inference
generate_step_by_step = DocumentedCalls.generate_step_by_step
debug_forward_pass = DocumentedCalls.debug_forward_pass
