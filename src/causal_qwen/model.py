"""Model: the whole chain on one screen.

text -> tokens + values -> embedding -> backbone -> z
     z -> U (abduction) -> S_1..S_V, Y (action) -> token, value (decision) | loss

`CausalBackbone` and `CausalChain` are our part of every family's classes; Qwen2's are at the end of
the file, the others' are made from the table of `families.py` in `backbones.py`.
"""

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, ModelOutput
from transformers.models.qwen2.modeling_qwen2 import Qwen2ForCausalLM, Qwen2Model
from transformers.processing_utils import Unpack
from transformers.utils import TransformersKwargs, can_return_tuple

from causal_qwen.decoding.noise import UNoise
from causal_qwen.families import MARK, TRAINED
from causal_qwen.generation.documented_calls import DocumentedCalls
from causal_qwen.generation.mixin import (
    CausalGenerationMixin,
    accepted_by_save,
    adopt_generation_config,
)
from causal_qwen.modeling.abduction import AbductionNetwork, LocationNetwork, ScaleNetwork
from causal_qwen.modeling.action import (
    ActionHead,
    ActionNetwork,
    ValueHead,
    apply_head,
    row_norms,
    score_pair,
)
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.configuration import (
    AUTO_MODULE,
    CausalConfig,
    CausalQwen2Config,
    auto_code,
)
from causal_qwen.modeling.loss import IGNORE, LossTerms, causal_loss, shift_fields, shift_left
from causal_qwen.modeling.thresholds import Decision
from causal_qwen.modeling.value_space import check_values, embed_values, fit_field

HUB_OPTIONS = ("repo_id", "commit_message", "private", "token", "revision", "create_pr", "tags")


@dataclass
class CausalQwenOutput(ModelOutput):
    """Output of the chain; T here counts the positions kept by `logits_to_keep`.

    `logits` is always loc_S: Hugging Face's name for it. `u_dist`, `s_dist` and `y_dist` are the
    same tensors as distributions. scale_S and Y belong to the scale-noise regime.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None  # (B, T, V)
    past_key_values: Cache | None = None
    hidden_states: tuple[Tensor, ...] | None = None
    attentions: tuple[Tensor, ...] | None = None
    loc_U: Tensor | None = None  # (B, T, C)
    scale_U: Tensor | None = None  # (B, T, C)
    scale_S: Tensor | None = None  # (B, T, V), None with output_scale_S=False
    loc_Y: Tensor | None = None  # (B, T)
    scale_Y: Tensor | None = None  # (B, T)
    shift_U: Tensor | None = None  # (B, 1, C), only when noise was given
    shift_S: Tensor | None = None  # (B, 1, V), the same, None with output_shift_S=False
    shift_Y: Tensor | None = None  # (B, 1), only when noise was given
    classification_loss: Tensor | None = None  # the loss's terms, for the record
    regression_loss: Tensor | None = None
    compatibility_loss: Tensor | None = None
    aux_loss: Tensor | None = None  # of a mixture of experts, with output_router_logits=True
    router_logits: tuple[Tensor, ...] | None = None

    @property
    def loc_S(self) -> Tensor | None:
        return self.logits

    @property
    def u_dist(self) -> Cauchy:
        return _distribution("U", self.loc_U, self.scale_U)

    @property
    def s_dist(self) -> Cauchy:
        return _distribution("S", self.logits, self.scale_S)

    @property
    def y_dist(self) -> Cauchy:
        return _distribution("Y", self.loc_Y, self.scale_Y)


def _distribution(name: str, loc: Tensor | None, scale: Tensor | None) -> Cauchy:
    if loc is None or scale is None:
        raise ValueError(
            f"{name} is incomplete in this output; call the model with output_scale_S=True."
        )
    return Cauchy(loc, scale)


class CausalInitMixin:
    """How every parameter beyond the base's starts; weights already loaded are left alone."""

    config: CausalConfig
    # an inferred device_map splits the backbone and names no buffer of it: `embed` moves this one
    _no_placement_params = ("value_direction",)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        config = self.config
        if isinstance(module, LocationNetwork):
            module.reset(config.abduction_init_strategy, config.initializer_range)
        elif isinstance(module, ScaleNetwork):
            module.reset(config.initial_gamma, config.scale_activation)
        elif isinstance(module, ValueHead):
            init.xavier_uniform_(module.weight)
            init.zeros_(module.bias)
        elif isinstance(module, ActionNetwork):
            init.constant_(module.b_noise, config.initial_b_noise)
            init.zeros_(module.decision_noise)
        elif isinstance(module, Decision):
            init.constant_(module.threshold, config.initial_threshold)
            init.zeros_(module.word_edges)
        else:
            super()._init_weights(module)  # type: ignore[misc]
            if isinstance(module, CausalBackbone):
                init.copy_(module.value_direction, initial_direction(config.hidden_size))


def initial_direction(size: int) -> Tensor:
    """N(0, 0.02^2), normalised. One fixed draw: HF wants buffers that can be made again. -> (H,)"""
    generator = torch.Generator("cpu").manual_seed(0)
    direction = 0.02 * torch.randn(size, generator=generator, device="cpu", dtype=torch.float32)
    return direction / direction.norm()


class CausalBackbone(CausalInitMixin):
    """A base model's backbone, which also reads numbers. Without numbers it is the base's, bit for
    bit. Mixed into Hugging Face's `XModel`."""

    _keep_in_fp32_modules_strict = ("value_direction",)
    value_direction: Tensor
    embed_tokens: nn.Embedding
    training: bool

    def post_init(self) -> None:
        # XModel.__init__ ends here and initialises whatever parameters exist by then
        direction = initial_direction(self.config.hidden_size).to(torch.empty(0).device)
        if self.config.value_direction_trainable:
            self.value_direction = nn.Parameter(direction)
        else:
            self.register_buffer("value_direction", direction)  # type: ignore[attr-defined]
        super().post_init()  # type: ignore[misc]

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        direction = self.value_direction.data
        super()._apply(fn, recurse)  # type: ignore[misc]
        if self.value_direction.dtype.itemsize < 4:  # as in Float32Module
            self.value_direction.data = direction.to(self.value_direction.device)
        return self

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        numeric_values: Tensor | None = None,
        **kwargs: Unpack[TransformersKwargs],
    ) -> BaseModelOutputWithPast:
        if input_ids is None and numeric_values is not None and not numeric_values.any():
            numeric_values = None  # beside embeddings, as of prompt tuning: there is no number
        if input_ids is not None and not input_ids.numel():  # no base can reshape nothing
            nothing = self.embed_tokens(input_ids)
            return BaseModelOutputWithPast(nothing, past_key_values=past_key_values)
        num_token_id = self.config.num_token_id
        has_channel = num_token_id is not None or numeric_values is not None
        if has_channel and input_ids is not None and not torch.compiler.is_compiling():
            check_values(input_ids, numeric_values, num_token_id)
        if numeric_values is not None:
            inputs_embeds, input_ids = self.embed(input_ids, numeric_values), None
        elif self.training and self.value_direction.requires_grad and input_ids is not None:
            # a trained parameter without a gradient breaks FSDP: stay in the graph, with weight 0
            unused = 0.0 * self.value_direction.sum().to(self.embed_tokens.weight.dtype)
            inputs_embeds, input_ids = self.embed_tokens(input_ids) + unused, None
        return super().forward(  # type: ignore[misc]
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )

    def embed(self, input_ids: Tensor | None, numeric_values: Tensor) -> Tensor:
        """ids (B, T) + values (B, T) -> inputs_embeds (B, T, H)"""
        if input_ids is None:
            raise ValueError("numeric_values go with input_ids, not with inputs_embeds.")
        embeddings = self.embed_tokens(input_ids)
        direction = self.value_direction.to(embeddings.device)
        if (scale := getattr(self.embed_tokens, "embed_scale", None)) is not None:
            direction = direction * scale  # Gemma's: as if added before the embeddings are scaled
        return embed_values(
            embeddings,
            numeric_values,
            input_ids.eq(self.config.num_token_id or 0),
            direction,
            self.config.numeric_encoding,
        )


class CausalChain(CausalInitMixin, CausalGenerationMixin, DocumentedCalls):
    """An individual U between the hidden state and the scores. Mixed into `XForCausalLM`.

    Drop-in: `logits` are the base model's until training changes them, and every Hugging Face
    tool that reads logits reads loc_S.
    """

    base_class: ClassVar[Any]  # XForCausalLM
    backbone_class: ClassVar[Any]
    config: CausalConfig
    name_or_path: str
    model: Any
    lm_head: ActionHead
    _no_split_modules = ("ActionNetwork",)  # beside the base's: a hook loads b and a together
    # a, b, C and W_scale decide between tokens whose scores differ in the last float32 bit
    _keep_in_fp32_modules_strict = (
        "abduction.scale",
        "action.b_noise",
        "action.decision_noise",
        "action.value",
        "decision.threshold",
        "value_direction",
    )
    _keys_to_ignore_on_load_missing = (r"^decision\.word_edges$",)  # before 0.4.0; zeros

    def __init__(self, config: CausalConfig) -> None:
        # the base's own backbone and head are not ours
        super(self.base_class, self).__init__(config)  # type: ignore[call-arg]
        self.vocab_size = config.vocab_size
        self.model = self.backbone_class(config)
        self.lm_head = ActionHead.of(config)
        self.abduction = AbductionNetwork(config)
        self.action = ActionNetwork(config)
        self.decision = Decision(config)
        self.post_init()  # type: ignore[attr-defined]
        self.generation_config = adopt_generation_config(self.generation_config)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = self.lm_head.weight.dtype
        super()._apply(fn, recurse)  # type: ignore[misc]
        if self.lm_head.weight.dtype != before and not self.lm_head.weight.is_meta:
            self.action.restore_equality(self.lm_head.weight)
        return self

    # Long by its arguments and outputs, which are Hugging Face's contract.
    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        numeric_values: Tensor | None = None,
        numeric_targets: Tensor | None = None,
        numeric_fields: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        num_numbers_in_batch: Tensor | int | None = None,
        u_noise: UNoise | None = None,
        output_scale_S: bool = True,
        output_shift_S: bool = True,
        skip_logits: bool = False,
        **kwargs: Unpack[TransformersKwargs],
    ) -> CausalQwenOutput:
        r"""
        numeric_values (`(B, T)`, optional): the value of every `<NUM>`, 0 elsewhere.
        labels (`(B, T)`, optional): token ids, -100 where ignored; shifted here.
        numeric_targets (`(B, T)`, optional): values beside `labels`; `numeric_values` by default.
        numeric_fields (`(B,)` or `(B, T)`, optional): the targets' fields, aligned with `labels`:
            indices into the sorted names of `config.value_fields`, -1 for the default field.
        u_noise (optional): noise that moves the individual at the last position, in generation;
            what it adds to U, S and Y is returned as `shift_U`, `shift_S` and `shift_Y`. With
            labels it moves U at every position, for the loss and for all that is returned.
        output_scale_S: False skips scale_S, the second half of the head's work.
        output_shift_S: False skips shift_S = W shift_U, for a caller that needs few rows of it.
        skip_logits: True skips loc_S and both of these; the loss needs none.
        """
        # not a named argument: Trainer would look for `shift_labels` in every batch
        shift_labels: Tensor | None = kwargs.pop("shift_labels", None)
        if hasattr(self.config, "output_router_logits"):  # a mixture of experts
            kwargs.setdefault("output_router_logits", self.config.output_router_logits)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            numeric_values=numeric_values,
            **kwargs,
        )
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        z = outputs.last_hidden_state[:, keep, :]  # (B, T, H)
        u = self.abduct(z)
        if u_noise is not None and (labels is not None or shift_labels is not None):
            u = Cauchy(u.loc + self.action.displacement(u, u_noise).to(u.loc), u.scale)
            u_noise = None
        loc_scores = shift = shift_u = shift_y = None
        if u_noise is not None:
            shift_u, shift_y = self.displace(u, u_noise)
        if skip_logits:
            output_scale_S = False
        elif shift_u is None or not output_shift_S:
            loc_scores = apply_head(self.lm_head, u.loc)  # (B, T, V)
        else:
            loc_scores, shift = self.score_moved(u, shift_u)
        widened = self.action.widen(u)
        y = self.action.number(widened)
        output = CausalQwenOutput(
            logits=loc_scores,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            loc_U=u.loc,
            scale_U=u.scale,
            scale_S=self.action.score_scale(widened.scale, self.lm_head)
            if output_scale_S
            else None,
            loc_Y=y.loc,
            scale_Y=y.scale,
            shift_U=shift_u,
            shift_S=shift,
            shift_Y=shift_y,
            aux_loss=self._balance(outputs, attention_mask),
            router_logits=getattr(outputs, "router_logits", None),
        )
        if labels is not None or shift_labels is not None:
            terms = self._loss(
                u,
                labels,
                shift_labels,
                values=numeric_values,
                targets=numeric_targets,
                fields=numeric_fields,
                num_items=num_items_in_batch,
                num_numbers=num_numbers_in_batch,
            )
            output.loss = terms.total
            output.classification_loss = terms.classification
            output.regression_loss = terms.regression.detach()
            output.compatibility_loss = terms.compatibility
            if output.aux_loss is not None:
                weighted = self.config.router_aux_loss_coef * output.aux_loss  # type: ignore[attr-defined]
                output.loss = output.loss + weighted.to(output.loss.device)
        return output

    def _balance(self, outputs: Any, attention_mask: Tensor | None) -> Tensor | None:
        """The load-balancing loss of a mixture of experts, by the base model's own function."""
        routers = getattr(outputs, "router_logits", None)
        if not routers:
            return None
        config: Any = self.config
        balance = sys.modules[self.base_class.__module__].load_balancing_loss_func
        loss: Tensor = balance(
            routers, config.num_experts, config.num_experts_per_tok, attention_mask
        )
        return loss

    def _loss(
        self,
        u: Cauchy,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        *,
        values: Tensor | None,
        targets: Tensor | None,
        fields: Tensor | None,
        **counts: Any,
    ) -> LossTerms:
        """The loss of U, against labels that are shifted here unless they already are."""
        if shift_labels is not None and values is not None and targets is None:
            raise ValueError("shift_labels with numeric_values need numeric_targets, shifted too.")
        if labels is not None and shift_labels is None:
            shift_labels = shift_left(labels, IGNORE)
            targets = values if targets is None else targets
            targets = None if targets is None else shift_left(targets, 0.0)
            fields = shift_fields(fields)
        assert shift_labels is not None
        return causal_loss(
            u,
            shift_labels,
            action=self.action,
            head=self.lm_head,
            decision=self.decision,
            config=self.config,
            targets=targets,
            fields=fields,
            **counts,
        )

    def abduct(self, hidden_states: Tensor) -> Cauchy:
        """z (..., H) -> U (..., C)"""
        u: Cauchy = self.abduction(hidden_states)
        return u

    def act(self, u: Cauchy) -> tuple[Cauchy, Cauchy]:
        """U (..., C) -> S (..., V) and Y (...), in the scale-noise regime."""
        s, y = self.action(u, self.lm_head)
        return s, y

    def displace(self, u: Cauchy, noise: UNoise) -> tuple[Tensor, Tensor]:
        """What noise adds to U and Y at the last position. U (B, T, C) -> (B, 1, C), (B, 1)"""
        last = Cauchy(u.loc[:, -1:], u.scale[:, -1:])
        values, exogenous = (
            None if part is None else part.unsqueeze(1) for part in (noise.values, noise.exogenous)
        )
        shift = self.action.displacement(last, UNoise(values, noise.regime, exogenous))
        return shift, apply_head(self.action.value, shift, moved=True).squeeze(-1)

    def score_moved(self, u: Cauchy, shift: Tensor) -> tuple[Tensor, Tensor]:
        """loc_S, and W shift, while W is read once for the last position.
        U (B, T, C), (N, 1, C) -> (B, T, V), (N, 1, V)"""
        cap = self.config.logit_softcap
        last, moved = score_pair(u.loc[:, -1], shift.squeeze(1), self.lm_head, cap)
        loc_scores = last.unsqueeze(1)
        if u.loc.shape[1] > 1:
            loc_scores = torch.cat([apply_head(self.lm_head, u.loc[:, :-1]), loc_scores], dim=1)
        return loc_scores, moved.unsqueeze(1)

    def predict(self, texts: str | Sequence[str], processor: Any, **options: Any) -> Any:
        """The number that each text asks for next, as a `NumberPrediction`.

        See `causal_qwen.regression.prediction.predict` for the options.
        """
        from causal_qwen.regression.prediction import predict

        return predict(self, texts, processor, **options)  # type: ignore[arg-type]

    def fit_value_field(self, name: str, values: Any) -> None:
        """Standardise the targets called `name` by the median and IQR of training values.

        The field "default" is used wherever no field is named.
        """
        fields = dict(self.config.value_fields or {})
        fields[name] = list(fit_field(values, self.config.value_space))
        self.config.value_fields = fields

    @classmethod
    def from_qwen(cls, base: Any = "smollm2-135m", **options: Any) -> Any:
        """A causal model that starts as `base` and behaves exactly like it.

        See `convert_model` in `causal_qwen.conversion.convert` for bases and options.
        """
        from causal_qwen.conversion.convert import convert_model

        return convert_model(base, model_class=cls, **options)

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: str | os.PathLike[str] | None, *args: Any, **kwargs: Any
    ) -> Any:
        """Load a CausalQwen checkpoint, or a plain one, which is then calibrated.

        Checkpoints of another family are loaded by that family's class.
        """
        from causal_qwen.conversion.convert import load

        from_pretrained = super().from_pretrained  # type: ignore[misc]
        return load(cls, from_pretrained, pretrained_model_name_or_path, *args, **kwargs)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> None:
        """Also writes the file through which tools find the CausalQwen classes and, once W_loc is
        trained, a field of config.json that says so."""
        push, options = kwargs.pop("push_to_hub", False), {}
        if push:
            options = {name: kwargs.pop(name) for name in HUB_OPTIONS if name in kwargs}
        with accepted_by_save(self):
            super().save_pretrained(save_directory, *args, **kwargs)  # type: ignore[misc]
        directory = Path(save_directory)
        if kwargs.get("is_main_process", True):
            code = auto_code(self.config.family)
            (directory / f"{AUTO_MODULE}.py").write_text(code, encoding="utf-8")
            if not self.is_plain(kwargs.get("state_dict")):
                fields = json.loads((directory / "config.json").read_text("utf-8"))
                marked = json.dumps({**fields, MARK: TRAINED}, indent=2) + "\n"
                (directory / "config.json").write_text(marked, encoding="utf-8")
            if push:
                self.push_to_hub(options.pop("repo_id", directory.name), **options)  # type: ignore[attr-defined]

    @torch.no_grad()
    def is_plain(self, state: Mapping[str, Tensor] | None = None) -> bool:
        """Whether loc_S = W z, as in the base model: W_loc is the identity, and all biases are 0.

        `state` replaces the parameters in memory, which may be sharded or offloaded.
        """
        own = self.state_dict() if state is None else state  # type: ignore[attr-defined]
        names = ("abduction.loc.weight", "abduction.loc.bias", "lm_head.bias")
        found = [own[name] for name in names if name in own]
        if any(tensor.is_meta for tensor in found) or len(found) < 2:
            return False
        weight, *biases = (t.full_tensor() if hasattr(t, "full_tensor") else t for t in found)
        is_identity = torch.equal(weight, torch.eye(*weight.shape).to(weight))
        return is_identity and not any(bool(bias.any()) for bias in biases)

    @classmethod
    def register_for_auto_class(cls, auto_class: str = "AutoModel") -> None:
        """Nothing: Hugging Face would copy our modules into every directory that is saved."""

    def _get_resized_lm_head(self, old_lm_head: nn.Linear, *args: Any, **kwargs: Any) -> ActionHead:
        """HF builds a plain Linear; the law needs its own class."""
        plain = super()._get_resized_lm_head(old_lm_head, *args, **kwargs)  # type: ignore[misc]
        head = ActionHead(
            plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta"
        )
        head.divisor, head.softcap = self.config.logit_divisor, self.config.logit_softcap
        head.weight, head.bias = plain.weight, plain.bias
        head._is_hf_initialized = True  # type: ignore[assignment]
        return head

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> nn.Embedding:
        """New tokens get the usual threshold, and the noise that gives them the usual scale; to
        `whole_words` they are no words."""
        old = len(self.decision.threshold)
        embeddings: nn.Embedding = super().resize_token_embeddings(*args, **kwargs)  # type: ignore[misc]
        if (size := embeddings.weight.shape[0]) != old:
            norms = row_norms(self.lm_head.weight.detach()).float()
            noise, threshold = self.action.decision_noise, self.decision.threshold
            usual = (norms[:old] + noise.detach().abs()[:size]).median()
            has_noise = bool((noise != 0).any())
            new_noise = (usual - norms).clamp_min(0) if has_noise else torch.zeros_like(norms)
            self.action.decision_noise = _resized(noise, new_noise)
            self.decision.threshold = _resized(
                threshold, threshold.detach().median().expand(size).clone()
            )
            edges = self.decision.word_edges
            self.decision.word_edges = nn.functional.pad(edges[:size], (0, max(size - old, 0)))
        return embeddings


def _resized(old: nn.Parameter, new: Tensor) -> nn.Parameter:
    """`old`, continued or cut to the length of `new`."""
    kept = min(len(old), len(new))
    new = new.to(old)
    new[:kept] = old.detach()[:kept]
    return nn.Parameter(new, requires_grad=old.requires_grad)


class CausalQwenModel(CausalBackbone, Qwen2Model):
    """Qwen2's backbone, which also reads numbers."""

    config_class = CausalQwen2Config


class CausalQwenForCausalLM(CausalChain, Qwen2ForCausalLM, GenerationMixin):
    """`Qwen2ForCausalLM` with an individual U between hidden state and scores."""

    config_class = CausalQwen2Config
    base_class = Qwen2ForCausalLM
    backbone_class = CausalQwenModel
