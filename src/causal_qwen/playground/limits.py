"""Limits: what a visitor may ask for, so that nobody waits for somebody else's novel."""

from __future__ import annotations

from causal_qwen.modeling.protocols import Processor

PROMPT_LETTERS = 1000
PROMPT_TOKENS = 200
NEW_TOKENS = 80
PROMPTS = 5  # of one individual
PEOPLE = 12  # of one visitor
REGRESSORS = 4  # of directories, open at the same time
NAME_LETTERS = 24
PARALLEL = 4  # requests that are worked on at the same time ...
WAITING = 24  # ... and that wait for their turn; together less than the server's 40 threads
SESSIONS = 1000  # whose individuals are remembered, the latest
FILE_BYTES = 1_000_000  # of an individual that is brought along


def check_prompt(text: str, processor: Processor) -> str:
    """The prompt as it is read; what is empty or too long is refused."""
    text = (text or "").strip()
    if not text:
        raise ValueError("The text is empty; write a few words.")
    if len(text) > PROMPT_LETTERS:
        raise ValueError(
            f"The text has {len(text):,} characters; the playground takes {PROMPT_LETTERS:,}."
        )
    if (tokens := len(processor(text)["input_ids"])) > PROMPT_TOKENS:
        raise ValueError(f"The text has {tokens} tokens; the playground takes {PROMPT_TOKENS}.")
    return text


def check_prompts(lines: str, processor: Processor) -> list[str]:
    """One prompt per line."""
    prompts = [line for line in (lines or "").splitlines() if line.strip()]
    if not prompts:
        raise ValueError("There is no prompt; write one on each line.")
    if len(prompts) > PROMPTS:
        raise ValueError(f"{len(prompts)} prompts are too many at once; give up to {PROMPTS}.")
    return [check_prompt(prompt, processor) for prompt in prompts]
