"""From scratch: texts -> a new tokenizer and a small, untrained model.

    processor, model = new_model(texts, size="small")

For training without a base model: quick experiments, and data that is mostly numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from causal_qwen.conversion.convert import set_word_edges
from causal_qwen.model import CausalQwenForCausalLM
from causal_qwen.modeling.configuration import CausalQwen2Config
from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.options import check_choice
from causal_qwen.text.numerals import PLACEHOLDER
from causal_qwen.training.data import TEXT_KEYS

PAD, END = "<pad>", "<|endoftext|>"
SIZES = {"tiny": (96, 3), "small": (256, 6), "medium": (512, 8)}  # hidden size, layers
VOCABULARY, HEAD_SIZE = 4096, 32


def new_model(
    texts: Iterable[str],
    size: str = "small",
    max_length: int = 512,
) -> tuple[CausalQwenProcessor, CausalQwenForCausalLM]:
    """A processor with a tokenizer trained on `texts`, and a model of its vocabulary size."""
    hidden, layers = SIZES[check_choice("size", size, SIZES)]
    tokenizer = learn_tokenizer(texts, VOCABULARY)
    processor = CausalQwenProcessor(tokenizer)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 8 * hidden // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden // HEAD_SIZE,
        "num_key_value_heads": hidden // HEAD_SIZE,
        "max_position_embeddings": max_length,
        "tie_word_embeddings": True,
        "num_token_id": processor.num_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    model = CausalQwenForCausalLM(CausalQwen2Config(**shape))
    set_word_edges(model, tokenizer)
    return processor, model


def learn_tokenizer(texts: Iterable[str], vocabulary: int) -> Any:
    """Byte-level BPE: encodes any text."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[PAD, END],
        show_progress=False,
    )
    core.train_from_iterator(texts, trainer)
    core.add_tokens([AddedToken(PLACEHOLDER, special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=core, pad_token=PAD, eos_token=END)


def texts_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every text of the rows, for training a tokenizer."""
    parts: list[str] = []
    for row in rows:
        for name in TEXT_KEYS:
            part = row.get(name) or []
            parts += [part] if isinstance(part, str) else [turn["content"] for turn in part]
    return parts
