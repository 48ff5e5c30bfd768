"""Training: the documents' two helpers; they use the model's own loss.

For training runs use Hugging Face's Trainer: the model takes `labels` as any causal model does.
"""

from __future__ import annotations

import copy

from torch import Tensor

from causal_qwen.generation.documented_calls import DocumentedCalls
from causal_qwen.model import CausalQwenForCausalLM, CausalQwenOutput
from causal_qwen.modeling.loss import IGNORE, causal_loss, shift_left

__all__ = ["compute_ovr_loss", "training_step"]

training_step = DocumentedCalls.training_step


def compute_ovr_loss(
    model: CausalQwenForCausalLM, output: CausalQwenOutput, labels: Tensor
) -> Tensor:
    """The one-vs-rest part of the loss of a model's output for `labels` (B, T), shifted here.

    The documents take probabilities instead of the output: in float32, the logarithm of a rounded
    probability loses the gradients of most tokens. `config.ovr_reduction="mean"` is the documents'
    average over the vocabulary.
    """
    config = copy.copy(model.config)
    config.classification_loss_weight, config.compat_loss_weight = 1.0, 0.0
    config.regression_loss_weight, config.num_token_id = 0.0, None
    terms = causal_loss(
        output.u_dist,
        shift_left(labels, IGNORE),
        action=model.action,
        head=model.lm_head,
        decision=model.decision,
        config=config,
    )
    return terms.total
