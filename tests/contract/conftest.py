"""A model on disk for the commands: tiny, converted, and able to chat."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CHAT = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="session")
def tiny_directory(
    tmp_path_factory: pytest.TempPathFactory,
    byte_tokenizer: Callable[..., Any],
    tiny_fields: dict[str, Any],
) -> Path:
    """What `convert` writes of a tiny Qwen2 that reads bytes."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from causal_qwen.conversion.convert import convert

    directory = tmp_path_factory.mktemp("tiny")
    fields = {**tiny_fields, "vocab_size": 260, "max_position_embeddings": 2048}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen2ForCausalLM(Qwen2Config(**fields)).save_pretrained(directory / "base")
    byte_tokenizer(chat_template=CHAT).save_pretrained(directory / "base")
    convert(directory / "base", directory / "model")
    return directory / "model"
