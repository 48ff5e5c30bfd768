"""Checkpoint files: check them, build models from tensors, silence Hugging Face."""

from __future__ import annotations

import contextlib
import math
import os
import re
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import logging

from causal_qwen.backbones import base_class, classes_of
from causal_qwen.decoding.settings import resolve_settings
from causal_qwen.engine.checkpoint import (
    CAUSAL,
    QUANTIZER,
    ROTATIONS,
    SHAPE_FIELDS,
    Shapes,
    check_checkpoint,
    check_layers,
    check_numbers,
    check_token_ids,
    check_words,
    expected_tensors,
    found_optional,
    has_expected_tensors,
)
from causal_qwen.engine.heads import expected_tensors as causal_tensors
from causal_qwen.engine.weights import (
    BITS,
    INDEX,
    INFINITY,
    TIED_DIFFERS,
    check_shapes,
    file_named,
    is_finite,
    listed,
    read_headers,
    read_json,
    read_optional_json,
)
from causal_qwen.families import family_of, is_causal
from causal_qwen.modeling.action import dense
from causal_qwen.modeling.configuration import MOST_LAYERS
from causal_qwen.options import WORD_EDGES, check_choice
from causal_qwen.outputs import check_complete
from causal_qwen.paths import download

OTHER_WEIGHTS = ("variant", "gguf_file")  # options that name other files of weights
CONFIG, GENERATION = "config.json", "generation_config.json"
TEXT_PART = {  # names in a model that also sees -> in one of texts alone
    r"^(model\.)?language_model\.(model\.)?(?=layers\.|embed_tokens\.|norm\.)": "model.",
    r"^language_model\.lm_head\.": "lm_head.",
}
TEXT_TENSORS = ("model.layers.", "model.embed_tokens.", "model.norm.", "lm_head.")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
LISTS = ("id2label", "label2id", "layer_types")
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "revision", "token")
# types whose numbers are checked as integers: these integers, and the bits of infinity
WORDS = {
    torch.float32: (torch.uint32, INFINITY["F32"]),
    torch.float16: (torch.uint16, INFINITY["F16"]),
    torch.bfloat16: (torch.uint16, INFINITY["BF16"]),
}
FLOATS = {*INFINITY, "F64"}
WEIGHTS_PER_BYTE = 8  # at most, in a quantised checkpoint
SETTINGS = (
    *("processor_config.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json"),
)


# ---------------------------------------------------------------- before loading


def local_directory(path: str | os.PathLike[str], options: Mapping[str, Any] | None = None) -> Path:
    """The directory of a checkpoint; a hub model's is in the hub's cache, after a download."""
    given = options or {}
    if Path(path).is_dir():
        return Path(path, given.get("subfolder") or "")
    hub = {name: given[name] for name in HUB_OPTIONS if given.get(name) is not None}
    return Path(download(os.fspath(path), **hub), given.get("subfolder") or "")


def check_files(
    path: str | os.PathLike[str],
    options: Mapping[str, Any],
    config_class: Any,
    *,
    reads_heads: bool = True,
) -> dict[str, Any]:
    """The fields of a checkpoint's config.json, once its files were checked.

    `options` are those of `from_pretrained`: the hub's, and other fields or another config.
    A backbone alone has no heads.
    """
    directory, config = local_directory(path, options), options.get("config")
    given = config.to_dict() if isinstance(config, PreTrainedConfig) else dict(options)
    check_complete(directory)
    has_config = config is None or os.path.lexists(directory / CONFIG)
    fields = read_json(directory / CONFIG) if has_config else given
    with file_named(directory / CONFIG):
        family_of(fields.get("model_type", CAUSAL))
    names = (*SHAPE_FIELDS, "causal_size", "head_bias")
    if not any(options.get(name) for name in OTHER_WEIGHTS) and options["use_safetensors"]:
        fields_given = fields | {name: given[name] for name in names if name in given}
        check_weights(directory, fields_given, reads_heads=reads_heads)
    if has_config:
        check_settings(directory, fields, config_class)
    return fields


def check_lengths(fields: Mapping[str, Any]) -> None:
    """Refuse lists that Hugging Face would make, or read, entry by entry for minutes."""
    labels = fields.get("num_labels")
    lengths = {"num_labels": labels if isinstance(labels, int) else 0}
    lengths |= {n: len(fields[n]) for n in LISTS if isinstance(fields.get(n), list | dict)}
    for name, length in lengths.items():
        if length > MOST_LAYERS:
            raise ValueError(f"{name} has {length} entries, more than {MOST_LAYERS}.")


def check_rotations(fields: Mapping[str, Any]) -> None:
    """Refuse a kind of rotation that transformers does not know: loading would end in a KeyError.
    Gemma has one rotation for each kind of layer."""
    found = [fields.get(name) for name in ROTATIONS]
    found += [inner for one in found if isinstance(one, Mapping) for inner in one.values()]
    for rotation in found:
        if isinstance(rotation, Mapping) and "rope_type" in rotation:
            check_choice("rope_type", rotation["rope_type"], ROPE_TYPES)


def check_settings(directory: Path, fields: Mapping[str, Any], config_class: Any) -> None:
    """Refuse fields of config.json that do not form a configuration, and a generation_config.json
    that cannot be read: Hugging Face would ignore it."""
    with file_named(directory / CONFIG):
        check_lengths(fields)
        check_numbers(fields)
        check_rotations(fields)
        config = config_class.from_pretrained(directory)
        name = "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"
        if (activation := getattr(config, name)) not in ACT2FN:
            raise ValueError(f"{name}={activation!r} is unknown; Qwen2 has 'silu'.")
        if not -config.vocab_size <= (config.pad_token_id or 0) < config.vocab_size:
            raise ValueError(
                f"pad_token_id={config.pad_token_id} is outside the vocabulary of "
                f"{config.vocab_size}."
            )
    with file_named(directory / GENERATION):
        saved = read_optional_json(directory / GENERATION)
        check_token_ids(saved)
        GenerationConfig.from_dict(saved)
        resolve_settings({}, saved, default_mode=fields.get("inference_mode", "standard"))


def check_weights(
    directory: Path,
    fields: Mapping[str, Any],
    *,
    text_part: bool = False,
    reads_heads: bool = True,
) -> None:
    """Compare the headers of the weights' files with config.json, before memory is allocated.

    With `text_part`, of a model that also sees: `fields` are those of the part that reads.
    """
    if os.path.lexists(directory / INDEX):
        with file_named(directory / INDEX):
            read_json(directory / INDEX)["metadata"].copy()  # Hugging Face needs it
    headers = read_headers(directory)
    entries = {name: entry for header in headers.values() for name, entry in header.items()}
    shapes = {name: entry.shape for name, entry in entries.items()}
    if text_part:
        shapes = text_names(shapes)
    if shapes and not any(name.startswith("model.") for name in shapes):
        shapes = {f"model.{name}": shape for name, shape in shapes.items()}  # a backbone alone
    has_known_shapes = has_expected_tensors(fields)
    with file_named(directory / CONFIG):
        check_layers(fields, shapes, str(directory))
        expected = expected_tensors(fields) if has_known_shapes else _described_tensors(fields)
    if not reads_heads:
        expected = {name: expected[name] for name in expected if name.startswith("model.")}
    if fields.get("quantization_config") is None:
        if has_known_shapes:
            expected = {**expected, **found_optional(fields, shapes)}
            check_shapes(shapes, expected, str(directory))
        else:  # this family's files may name and split their tensors differently
            _check_size(expected, sum(file.stat().st_size for file in headers), directory)
        kinds = {name: {*FLOATS, *BITS} if name == WORD_EDGES else FLOATS for name in entries}
        if strange := [n for n, entry in entries.items() if entry.dtype not in kinds[n]]:
            raise ValueError(
                f"{directory} stores {listed(strange)} as {entries[strange[0]].dtype}, which is no "
                "floating-point type; download it again."
            )
    elif is_causal(fields.get("model_type")) and _is_written_by_quantize(fields):
        raise ValueError(
            f"{directory} has int8 weights, which only the NumPy engine reads: use `causal-qwen "
            "generate --engine numpy`, or the model that was quantised."
        )
    else:
        _check_size(expected, sum(file.stat().st_size for file in headers), directory)
    if reads_heads:
        check_words(read_optional_json(directory / GENERATION), fields, shapes, str(directory))
    is_ours = is_causal(fields.get("model_type", CAUSAL))
    if not is_ours and (ours := sorted(causal_tensors(fields).keys() & shapes.keys())):
        raise ValueError(
            f"{directory} has {listed(ours)} and model_type={fields.get('model_type')!r} in "
            "config.json; use the config.json of this model."
        )


def text_names(shapes: Shapes) -> dict[str, tuple[int, ...]]:
    """The tensors of the part that reads, by their names in a model of texts alone."""
    found = {}
    for name, shape in shapes.items():
        for pattern, plain in TEXT_PART.items():
            name = re.sub(pattern, plain, name)
        if name.startswith(TEXT_TENSORS):
            found[name] = shape
    return found


def check_family_tensors(fields: Mapping[str, Any], shapes: Shapes, where: str) -> None:
    """`check_checkpoint` for every family: tensors (name -> shape) against config.json's fields."""
    if has_expected_tensors(fields):
        return check_checkpoint(fields, shapes, where)
    check_numbers(fields)
    check_layers(fields, shapes, where)
    expected = _described_tensors(fields)
    if fields["tie_word_embeddings"]:
        expected = {name: shape for name, shape in expected.items() if name != "lm_head.weight"}
    check_shapes(shapes, expected, where)


def _described_tensors(fields: Mapping[str, Any]) -> Shapes:
    """The tensors of the model that config.json describes, without memory for their values."""
    family = family_of(fields["model_type"])
    kind = classes_of(family)[2] if is_causal(fields["model_type"]) else base_class(family)
    with torch.device("meta"), quiet():
        model = kind(kind.config_class.from_dict(dict(fields)))
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def _check_size(expected: Shapes, size: int, directory: Path) -> None:
    weights = sum(map(math.prod, expected.values()))
    if weights > WEIGHTS_PER_BYTE * size:
        raise ValueError(
            f"{directory / CONFIG} describes {weights} weights and its files have {size} bytes; "
            "download them again."
        )


def _is_written_by_quantize(fields: Mapping[str, Any]) -> bool:
    """Not by bitsandbytes or torchao, whose weights transformers itself reads."""
    method = fields["quantization_config"]
    return isinstance(method, Mapping) and method.get("quant_method") == QUANTIZER


@contextlib.contextmanager
def tokenizer_checked(directory: Path) -> Iterator[Path]:
    """Refuse a tokenizer's or processor's files that cannot be read; what goes wrong in the body
    is an error of tokenizer.json."""
    for name in SETTINGS:
        read_optional_json(directory / name)
    tokenizer, template = directory / "tokenizer.json", directory / "chat_template.jinja"
    for file in (tokenizer, template):
        if os.path.lexists(file) and not file.is_file():
            raise OSError(f"{file} cannot be read; download it again.")
    with file_named(template):
        if template.exists():
            template.read_text(encoding="utf-8")
    with file_named(tokenizer):
        yield tokenizer


def check_encodes(tokenizer: Any, directory: Path) -> None:
    """Encode a text, which settings of the wrong type prevent, and an empty vocabulary."""
    with file_named(directory / "tokenizer_config.json"):
        tokenizer("a 1", truncation=True)
    if not len(tokenizer("a 1").input_ids):
        raise ValueError(
            f"{directory / 'tokenizer.json'} makes no token of 'a 1': its vocabulary is empty or "
            "damaged; download it again."
        )


# ---------------------------------------------------------------- after loading


def check_loading_info(
    info: Mapping[str, Any], where: str, may_lack: Collection[str] = (), may_have: Any = ()
) -> None:
    """Refuse what Hugging Face reports: missing tensors, which it has drawn at random, and
    tensors that the model does not have."""
    if missing := sorted({*info["missing_keys"]} - {*may_lack}):
        raise ValueError(f"{where} lacks {listed(missing)}; download it again.")
    if strange := sorted({*info["unexpected_keys"]} - {*may_have}):
        raise ValueError(
            f"{where} has {listed(strange)}, which its configuration does not describe; download "
            "it again."
        )


def check_finite(model: torch.nn.Module, where: str) -> None:
    """Refuse NaN and infinity in the weights that are in memory; tied ones are read once."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    broken = [name for name, tensor in tensors if not _is_finite(tensor)]
    if broken:
        raise ValueError(
            f"{where} holds NaN or infinity in {listed(broken)} ({model.dtype}); download it again."
        )


def _is_finite(tensor: Tensor) -> bool:
    if tensor.is_meta or not tensor.is_floating_point():
        return True
    local: Tensor = dense(tensor.to_local() if hasattr(tensor, "to_local") else tensor)
    if local.is_cpu and local.dtype in WORDS:  # one core; torch's threads would wait for each other
        integers, infinity = WORDS[local.dtype]
        return is_finite(local.detach().contiguous().view(integers).numpy(), infinity)
    total = local.sum(dtype=torch.float32)  # fast; it can also overflow
    return bool(torch.isfinite(total)) or bool(torch.isfinite(local).all())


def check_tied(model: Any, where: str) -> None:
    """Refuse a stored head that differs from the embeddings to which config.json ties it."""
    if model.config.tie_word_embeddings and "lm_head.weight" not in model.all_tied_weights_keys:
        raise ValueError(f"{where} {TIED_DIFFERS}")


# ---------------------------------------------------------------- tensors and texts


def assemble(
    from_pretrained: Any,
    config: Any,
    state: dict[str, Tensor],
    dtype: Any,
    may_lack: Collection[str] = (),
) -> Any:
    """A model from tensors in memory; those it may lack are initialised by the config."""
    with quiet():
        model, info = from_pretrained(
            None, config=config, state_dict=state, dtype=dtype, output_loading_info=True
        )
    check_loading_info(info, "The base model", may_lack)
    model.name_or_path = model.config.name_or_path = ""  # not "None", which may be on the hub
    return model


def encode_texts(tokenizer: Any, texts: Sequence[str]) -> list[Tensor] | None:
    if tokenizer is None:
        return None
    return [tokenizer(text, return_tensors="pt").input_ids[0] for text in texts]


@contextlib.contextmanager
def damaged_files_named(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except SafetensorError as error:
        raise ValueError(
            f"A weights file of {path} is damaged or truncated ({error}); download it again."
        ) from error


# ---------------------------------------------------------------- silence


class _Silence:
    """Hugging Face's verbosity belongs to the process: the first thread that asks for silence
    begins it, and the last one ends it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.count = 0
        self.before = (logging.WARNING, True)  # verbosity, and whether bars are shown

    def begin(self) -> None:
        with self.lock:
            if not self.count:
                self.before = logging.get_verbosity(), logging.is_progress_bar_enabled()
                logging.set_verbosity_error()
                logging.disable_progress_bar()
            self.count += 1

    def end(self) -> None:
        with self.lock:
            self.count -= 1
            if not self.count:
                verbosity, has_bars = self.before
                logging.set_verbosity(verbosity)
                if has_bars:
                    logging.enable_progress_bar()


_silence = _Silence()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and reports of loading, which are checked here instead."""
    _silence.begin()
    try:
        yield
    finally:
        _silence.end()
