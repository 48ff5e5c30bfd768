"""Pipeline: `text-generation` whose numbers go in and come out as values.

    pipeline("text-generation", model=path, pipeline_class=CausalTextGenerationPipeline)

It is Hugging Face's pipeline with the processor in the tokenizer's place. Every record also holds
`numeric_values`, the generated numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import TextGenerationPipeline
from transformers.pipelines.text_generation import Chat, ReturnType

from causal_qwen.modeling.processor import CausalQwenProcessor
from causal_qwen.modeling.protocols import Processor


class CausalTextGenerationPipeline(TextGenerationPipeline):
    """`text-generation` that reads and writes numbers as its processor does."""

    tokenizer: Any

    def __init__(self, *args: Any, processor: Processor | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if processor is None:
            if name := self.model.name_or_path:
                processor = CausalQwenProcessor.from_pretrained(name)
            else:  # a model that was never saved
                processor = CausalQwenProcessor(self.tokenizer)
            if self.model.config.encode_numbers == "value":
                processor.encode_numbers = "value"
        processor.check(self.model.config)
        if self.model.config.encode_numbers == "value" != processor.encode_numbers:
            raise ValueError(
                "This model reads numbers as values and its processor reads digits; "
                "use CausalQwenProcessor(..., encode_numbers='value')."
            )
        self.processor = processor
        self.tokenizer = processor.tokenizer
        self.tokenizer.padding_side = "left"

    def preprocess(
        self,
        prompt_text: Any,
        prefix: str = "",
        handle_long_generation: str | None = None,
        add_special_tokens: bool | None = None,
        truncation: Any = None,
        max_length: int | None = None,
        continue_final_message: bool | None = None,
        tokenizer_encode_kwargs: dict[str, Any] | None = None,
        tools: Any = None,
        documents: Any = None,
        **generate_kwargs: Any,
    ) -> Any:
        if handle_long_generation is not None:
            raise ValueError("handle_long_generation is unknown here; use truncation, max_length.")
        options = {"truncation": truncation, "max_length": max_length if truncation else None}
        options |= tokenizer_encode_kwargs or {}
        if isinstance(prompt_text, Chat):
            if continue_final_message is None:
                continue_final_message = prompt_text.messages[-1]["role"] == "assistant"
            text = self.tokenizer.apply_chat_template(
                prompt_text.messages,
                tokenize=False,
                add_generation_prompt=not continue_final_message,
                continue_final_message=continue_final_message,
                tools=tools,
                documents=documents,
            )
            options["add_special_tokens"] = False
        else:
            text = prefix + prompt_text
            if add_special_tokens is not None:
                options["add_special_tokens"] = add_special_tokens
        inputs = self.processor(text, return_tensors="pt", **options)
        inputs["prompt_text"] = prompt_text
        return inputs

    def _forward(self, model_inputs: Any, **generate_kwargs: Any) -> Any:
        """As in the parent; the values travel as one more argument of `generate`."""
        values = model_inputs.pop("numeric_values")
        if not values.shape[1]:  # where HF begins an empty prompt with its start token
            values = values.new_zeros(len(values), 1)
        generate_kwargs |= {"numeric_values": values, "return_dict_in_generate": True}
        outputs = super()._forward(model_inputs, **generate_kwargs)
        extra = outputs.pop("additional_outputs")
        outputs["numeric_values"] = extra.pop("numeric_values")  # here HF takes batches apart
        for name in ("individual", "settings"):
            extra.pop(name, None)
        return outputs | ({"additional_outputs": extra} if extra else {})

    def postprocess(
        self,
        model_outputs: Any,
        return_type: Any = ReturnType.FULL_TEXT,
        skip_special_tokens: bool | None = None,
        **options: Any,
    ) -> Any:
        values = model_outputs["numeric_values"][0]  # (copies, T)
        ids = model_outputs["generated_sequence"][0]
        start = 0 if model_outputs["input_ids"] is None else model_outputs["input_ids"].shape[-1]
        skip = True if skip_special_tokens is None else skip_special_tokens
        options |= {"return_type": return_type, "skip_special_tokens": skip}
        records = super().postprocess(model_outputs, **options)
        for record, row, numbers in zip(records, ids, values, strict=True):
            is_number = row[start:] == self.processor.num_token_id
            record["numeric_values"] = numbers[start:][is_number].tolist()
            if return_type != ReturnType.TENSORS and is_number.any():
                self._write(record, row[start:], numbers[start:], skip)
        return records

    def _write(self, record: Any, ids: torch.Tensor, values: torch.Tensor, skip: bool) -> None:
        """Put the numbers where the parent wrote `<NUM>`."""
        plain = self.tokenizer.decode(ids.tolist(), skip_special_tokens=skip)
        written = self.processor.decode(ids, values, skip_special_tokens=skip)
        text = record["generated_text"]
        if isinstance(text, str):
            record["generated_text"] = text.removesuffix(plain) + written
        else:
            message = text[-1]
            message["content"] = message["content"].removesuffix(plain) + written
