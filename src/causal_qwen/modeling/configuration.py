"""Configuration: the fields that CausalQwen adds to the configuration of a base model.

Legend used across the package: B batch, T tokens, H hidden size, C latent size, V vocabulary.
"""

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

from huggingface_hub.dataclasses import strict
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from causal_qwen.families import MARK, QWEN2, Family, family_of
from causal_qwen.options import (
    MODES,
    NUMBER_READINGS,
    NUMERIC_ENCODINGS,
    SCALE_ACTIVATIONS,
    THRESHOLD_CONTEXTS,
    VALUE_SPACES,
    check_choice,
)

CHOICES: dict[str, tuple[str, ...]] = {
    "scale_activation": SCALE_ACTIVATIONS,
    "abduction_init_strategy": ("identity", "xavier", "normal"),
    "decision_noise": ("equalize", "zero"),
    "threshold_context": THRESHOLD_CONTEXTS,
    "inference_mode": MODES,
    "numeric_encoding": NUMERIC_ENCODINGS,
    "value_space": VALUE_SPACES,
    "encode_numbers": NUMBER_READINGS,
    "ovr_reduction": ("sum", "mean"),
    "loss_precision": ("exact", "fast"),
}
LOSS_WEIGHTS = ("classification_loss_weight", "regression_loss_weight", "compat_loss_weight")
NUMBERS: dict[str, tuple[float, float, str | None]] = {  # least, most, and a word that may stand
    **dict.fromkeys(LOSS_WEIGHTS, (0, math.inf, None)),
    "gamma_init": (math.ulp(0.0), math.inf, "auto"),
    "b_noise_init": (0, math.inf, "auto"),
    "ovr_threshold_init": (-math.inf, math.inf, "auto"),
    "gate_alpha": (0, 1, None),
    "causal_size": (1, math.inf, None),
    "loss_chunk_size": (1, math.inf, "auto"),
}
NOT_INHERITED = ["model_type", "architectures", "transformers_version", "auto_map", "_name_or_path"]
BARE_THRESHOLD = 5.0  # "auto" threshold of a model that starts from random weights
BARE_BAR = 0.0  # the same over the bar of the context

# Saved with every checkpoint: `trust_remote_code=True` then finds the installed package.
AUTO_MODULE = "causal_qwen_auto"
PROCESSOR = "CausalQwenProcessor"
AUTO_PROCESSOR = {"AutoProcessor": f"{AUTO_MODULE}.{PROCESSOR}"}
AUTO_CODE = """from causal_qwen import {names}

__all__ = [{quoted}]
"""


def auto_code(family: Family) -> str:
    """The module beside the weights, which imports the installed package."""
    names = sorted([*family.names, PROCESSOR])
    return AUTO_CODE.format(names=", ".join(names), quoted=", ".join(f'"{name}"' for name in names))


def auto_map(family: Family) -> dict[str, str]:
    tools = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    return {tool: f"{AUTO_MODULE}.{name}" for tool, name in zip(tools, family.names, strict=True)}


@dataclass(kw_only=True, repr=False)
class CausalConfig:
    r"""The fields of the causal chain, mixed into the configuration of a base model.

    Args:
        causal_size: C, the number of coordinates of an individual; None means the hidden size.
        scale_activation: how `abduction.scale` becomes positive: `exp`, `softplus` or `abs`.
        abduction_init_strategy: `identity` keeps the base model's behaviour; `xavier`, `normal`.
        gamma_init: initial scale of U; `"auto"` makes the one-vs-rest probabilities sum to 1.
        b_noise_init: initial exogenous noise; `"auto"` equals gamma.
        ovr_threshold_init: initial thresholds; `"auto"` is 5 from scratch, measured at conversion.
        b_noise_trainable, threshold_trainable: whether training moves them.
        threshold_context: `competition` raises every threshold of a position by the level of its
            scores, logsumexp(loc_S); `none` is the documents' fixed threshold.
        decision_noise: at conversion, `equalize` gives every token the same scale; `zero` does not.
        head_bias: a learnable bias on loc_S.
        inference_mode: the default mode of `generate`.
        num_token_id: the id of `<NUM>`, or None for a model without number tokens.
        numeric_encoding: how a value enters its embedding: `log` or `sigmoid`.
        value_direction_trainable: whether training moves the value direction.
        value_space: the scale of the number head: `symlog` or `linear`.
        value_fields: name -> (center, spread) of standardised targets; see `value_space.py`.
        encode_numbers: how the model was trained to read numbers: as `text` (digits) or `value`.
        classification_loss_weight, regression_loss_weight, compat_loss_weight: weights of the loss.
        gate_alpha, gate_grad: the regression gate's floor, and whether gradients pass through it.
        ovr_reduction: one-vs-rest terms are summed over the vocabulary, or averaged (`mean`).
        loss_chunk_size: positions whose scores exist at once in the loss, or `"auto"`.
        loss_precision: `fast` multiplies with |W| in bfloat16 (4e-3), as bfloat16 models do anyway.
    """

    family: ClassVar[Family]
    if TYPE_CHECKING:  # fields of the base model's configuration, which are used here

        def __init__(self, **fields: Any) -> None: ...

        hidden_size: int
        vocab_size: int
        max_position_embeddings: int
        rope_parameters: Any
        initializer_range: float
        tie_word_embeddings: bool

    keys_to_ignore_at_inference = [  # noqa: RUF012 - a class attribute of HF's contract
        "past_key_values",
        "loc_U",
        "scale_U",
        "scale_S",
        "loc_Y",
        "scale_Y",
        "shift_U",
        "shift_S",
        "shift_Y",
        "classification_loss",
        "regression_loss",
        "compatibility_loss",
        "aux_loss",
        "router_logits",
    ]

    causal_size: int | None = None
    scale_activation: str = "exp"
    abduction_init_strategy: str = "identity"
    gamma_init: float | int | str = "auto"
    b_noise_init: float | int | str = "auto"
    ovr_threshold_init: float | int | str = "auto"
    b_noise_trainable: bool = True
    threshold_trainable: bool = True
    threshold_context: str = "none"
    decision_noise: str = "equalize"
    head_bias: bool = False
    inference_mode: str = "standard"
    num_token_id: int | None = None
    numeric_encoding: str = "log"
    value_direction_trainable: bool = False
    value_space: str = "symlog"
    value_fields: dict[str, list[float] | tuple[float, ...]] | None = None
    encode_numbers: str = "text"
    classification_loss_weight: float | int = 1.0
    regression_loss_weight: float | int = 1.0
    compat_loss_weight: float | int = 0.0
    gate_alpha: float | int = 0.0
    gate_grad: bool = False
    ovr_reduction: str = "sum"
    loss_chunk_size: int | str = "auto"
    loss_precision: str = "exact"

    def __post_init__(self, **kwargs: Any) -> None:
        if self.causal_size is None:
            self.causal_size = self.hidden_size
        super().__post_init__(**kwargs)  # type: ignore[misc]
        self.validate_causal_fields()

    def __setattr__(self, name: str, value: Any) -> None:
        size = self.__dict__.get("causal_size")
        if name == "hidden_size" and size is not None and size == self.__dict__[name]:
            super().__setattr__("causal_size", value)  # C = H: C follows H
        super().__setattr__(name, value)

    def validate_causal_fields(self) -> None:
        """Raise for invalid values, naming the field, its value and the cure."""
        for name, allowed in CHOICES.items():
            check_choice(name, getattr(self, name), allowed)
        for name, (least, most, word) in NUMBERS.items():
            value = getattr(self, name)
            is_good = value == word or (not isinstance(value, str) and least <= value <= most)
            if not is_good or value in (math.inf, -math.inf):
                also = f' or "{word}"' if word else ""
                raise ValueError(f"{name}={value!r} must be a number in [{least}, {most}]{also}.")
        if self.tie_word_embeddings and self.causal_size != self.hidden_size:
            raise ValueError(
                f"causal_size={self.causal_size} cannot share weights with embeddings of "
                f"hidden_size={self.hidden_size}; set tie_word_embeddings=False."
            )
        if self.num_token_id is not None and not 0 <= self.num_token_id < self.vocab_size:
            raise ValueError(
                f"num_token_id={self.num_token_id} is outside the vocabulary of {self.vocab_size}."
            )
        for name, pair in (self.value_fields or {}).items():
            if len(pair) != 2 or not all(map(math.isfinite, pair)) or pair[1] <= 0:
                raise ValueError(
                    f"value_fields[{name!r}]={pair!r} must be (center, spread), two finite "
                    "numbers, the second above 0."
                )

    def to_dict(self) -> dict[str, Any]:
        """With `auto_map`, for tools that have not imported this package."""
        return {**super().to_dict(), "auto_map": auto_map(self.family)}  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        fields = {name: value for name, value in config_dict.items() if name != MARK}
        return super().from_dict(fields, **kwargs)  # type: ignore[misc]

    @classmethod
    def get_config_dict(cls, *args: Any, **kwargs: Any) -> Any:
        """Accept plain configurations of the family too; raise for other architectures."""
        fields, unused = super().get_config_dict(*args, **kwargs)  # type: ignore[misc]
        family = family_of(fields.get("model_type", cls.family.model_type))
        if family != cls.family:
            raise ValueError(
                f"The checkpoint has the architecture {fields['model_type']!r}; "
                f"{cls.__name__} is for {cls.family.base!r}, {family.names[0]} for this one."
            )
        if fields.get("model_type") == family.base:
            fields = {k: v for k, v in fields.items() if k not in ("model_type", "architectures")}
        return fields, unused

    @classmethod
    def from_base(cls, config: Any, **overrides: Any) -> Self:
        """The configuration of a causal model that starts from a plain model."""
        fields = {k: v for k, v in config.to_dict().items() if k not in NOT_INHERITED}
        return cls(**{**fields, **overrides})

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoConfig") -> None:
        """Nothing: Hugging Face would copy this file into every directory that is saved."""

    @property
    def logit_divisor(self) -> float:
        """loc_S = W loc_U / divisor, in the families that scale their logits."""
        name = self.family.divisor
        return float(getattr(self, name)) if name else 1.0

    @property
    def logit_softcap(self) -> float | None:
        """loc_S = cap tanh(W loc_U / cap), in the families that cap their logits."""
        cap: float | None = getattr(self, "final_logit_softcapping", None)
        return cap

    @property
    def latent_size(self) -> int:
        """C, resolved."""
        return self.hidden_size if self.causal_size is None else self.causal_size

    @property
    def initial_threshold(self) -> float:
        """C_k before training and calibration."""
        bare = BARE_THRESHOLD if self.threshold_context == "none" else BARE_BAR
        return _number_or(self.ovr_threshold_init, bare)

    @property
    def initial_gamma(self) -> float:
        """The scale of U before training and calibration.

        `"auto"` solves sum_k P_k = 1 for random weights: each of the V tokens exceeds C with
        probability scale_S / (pi d), and scale_S = (gamma + b) E||W_k||_1. Scores start at 0, and
        over the bar at -log V, so d is C or C + log V. The budget pi d / (V r) is for gamma + b
        together, so gamma takes half of it.
        """
        row_norm = self.latent_size * self.initializer_range * math.sqrt(2 / math.pi)
        row_norm /= self.logit_divisor
        distance = self.initial_threshold
        distance += 0.0 if self.threshold_context == "none" else math.log(self.vocab_size)
        budget = math.pi * max(distance, 1.0) / (self.vocab_size * row_norm)
        return _number_or(self.gamma_init, budget / 2)

    @property
    def initial_b_noise(self) -> float:
        return _number_or(self.b_noise_init, self.initial_gamma)


@strict
class CausalQwen2Config(CausalConfig, Qwen2Config):
    """Qwen2's configuration plus the fields of the causal chain; see `CausalConfig`."""

    family = QWEN2
    model_type = QWEN2.model_type


def _number_or(value: float | int | str, default: float) -> float:
    return default if isinstance(value, str) else float(value)
