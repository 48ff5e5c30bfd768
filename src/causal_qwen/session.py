"""Session: an open model that writes texts.

    session = causal_qwen.open("Qwen/Qwen2.5-0.5B-Instruct")
    session.generate("The train was late, so", individual=7).text
    session.chat("What should I cook tonight?", individual=7).text

Command line, chat and files of prompts are adapters of it; the server adds a queue. Every engine
writes the same texts, up to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from causal_qwen.analysis.shares import People, Shares, Who, count_shares, no_draws
from causal_qwen.decoding.noise import DecodingNoise
from causal_qwen.decoding.settings import DecodingSettings, complete_call
from causal_qwen.engines.engine import Choice, Engine, Row, Tokens
from causal_qwen.individuals import Individual, parse_individual
from causal_qwen.options import ENGINES, check_choice
from causal_qwen.terminal import status
from causal_qwen.text.segmentation import stable_prefix

NEW_TOKENS = 60  # of a text, unless a call says otherwise
TOGETHER = 8  # texts of `batch` that are decoded at once

Prompt = str | list[dict[str, str]]  # a beginning, or the messages of a chat


def open(
    model: str = "",
    engine: str = "auto",
    *,
    device: str = "auto",
    dtype: str = "auto",
    kernel: str = "auto",
    numbers: str | None = None,
    n_ctx: int | None = None,
    n_gpu_layers: int | None = None,
) -> Session:
    """Open a model: a directory, a GGUF file, a hub name, or by default the embedded SmolLM2-135M.

    A base model without a causal layer is calibrated once; `model` may also be a layer, which names
    its base. `engine` is "torch", "llama.cpp" (GGUF files), "numpy" (no torch needed), or "auto":
    for a GGUF file llama.cpp if it is installed, else NumPy if numba is; torch for all else.
    `numbers` reads numbers as "text" or as "value", by default as the model was trained. The NumPy
    engine has a `dtype` of "int8", too, and a `kernel` compiled by "numba": for a GGUF file that is
    the default where numba is installed. `n_ctx` and `n_gpu_layers` are llama.cpp's: the tokens of
    all texts that it keeps, and the layers on the GPU.
    """
    from causal_qwen.conversion.location import directory_of, path_of
    from causal_qwen.layer import base_of, is_gguf

    base = base_of(model)
    chosen = choose_engine(engine, base)
    if device not in ("auto", "cpu") and chosen == "numpy":
        raise ValueError(f"device={device!r} is for torch; the NumPy engine runs on the CPU.")
    path: Any = model  # the embedded model is converted at its first use
    if not is_gguf(base):
        path = path_of(model) if chosen == "torch" else directory_of(model)
    opened: Any
    with status() as progress:
        if chosen == "torch":
            from causal_qwen.engines.torch import TorchEngine

            opened = TorchEngine.open(path, device, dtype, progress)
            reader = opened.processor
        elif chosen == "llama.cpp":
            from causal_qwen.engines.llama import LlamaEngine

            opened = LlamaEngine.open(path, device, progress, n_ctx, n_gpu_layers)
            reader = opened.reader
        else:
            from causal_qwen.engines.numpy import NumpyEngine

            kind = None if dtype == "auto" else dtype
            if kernel == "auto":
                kernel = "numba" if is_gguf(base) and _is_installed("numba") else "numpy"
            opened = NumpyEngine.open(path, kind, kernel, progress)
            reader = opened.reader
    reader.encode_numbers = numbers or reader.encode_numbers
    return Session(opened)


def choose_engine(name: str, model: str = "") -> str:
    """ "auto" as the fastest engine that is installed for this model."""
    from causal_qwen.layer import base_of, is_gguf

    base = base_of(model)
    if check_choice("engine", name, ENGINES) != "auto":
        if name == "llama.cpp" and not is_gguf(base):
            raise ValueError(f"engine={name!r} reads GGUF files only; {base!r} is none.")
        return name
    if is_gguf(base) and _is_installed("llama_cpp"):
        return "llama.cpp"
    if is_gguf(base) and _is_installed("numba"):
        return "numpy"
    return "torch" if _is_installed("torch") and _is_installed("transformers") else "numpy"


def _is_installed(module: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(module) is not None
    return False


@dataclass(frozen=True)
class Text:
    """A generated text with its numbers, its individual (in modes with noise) and its settings."""

    text: str
    numbers: list[float]
    individual: Individual | None
    settings: DecodingSettings
    seed: int | None = None  # of softmax draws
    is_stopped: bool = False
    finish: str | None = None  # "stop" or "length"; None if it was interrupted

    def __str__(self) -> str:
        return self.text

    def to_dict(self, prompt: str) -> dict[str, Any]:
        """For JSON: the text, and every setting that is needed to generate it again."""
        return {
            "prompt": prompt,
            "text": self.text,
            "numbers": self.numbers,
            "individual": None,
            **self.settings.to_dict(self.individual),
            "seed": self.seed,
            "is_stopped": self.is_stopped,
        }


@dataclass(frozen=True)
class TwoTexts:
    """What one individual writes after two prompts."""

    prompt: Prompt
    edited: Prompt
    factual: Text
    counterfactual: Text

    def __str__(self) -> str:
        return (
            f"factual         {self.prompt}‖{self.factual}\n"
            f"counterfactual  {self.edited}‖{self.counterfactual}"
        )

    def show(self) -> None:
        print(self)

    def to_dict(self) -> dict[str, Any]:
        pairs = ((self.prompt, self.factual), (self.edited, self.counterfactual))
        names = ("factual", "counterfactual")
        return {n: text.to_dict(str(p)) for n, (p, text) in zip(names, pairs, strict=True)}


class GrowingText:
    """The text of a row, which ends before the first stop string."""

    def __init__(self, row: Row, engine: Engine, stops: Sequence[str] = ()) -> None:
        self.row, self.engine, self.stops = row, engine, stops
        self.text = ""  # what later tokens cannot change
        self.choice: Choice | None = None  # the newest
        self.finish: str | None = None

    def take(self, choice: Choice) -> str:
        """Append a token. -> the addition that later tokens cannot change"""
        self.row.append(choice)
        self.choice = choice
        if choice.id in self.engine.ends:
            self.finish = "stop"
        elif len(self.row.new.ids) >= self.row.max_new_tokens:
            self.finish = "length"
        text = self.engine.decode(self.row.new)
        places = [place for stop in self.stops if (place := text.find(stop)) >= 0]
        if places:
            self.finish, text = "stop", text[: min(places)]
        elif self.finish is None:
            text = self._without_begun_stop(stable_prefix(text))
        addition = text[len(self.text) :]
        self.text += addition
        return addition

    def _without_begun_stop(self, text: str) -> str:
        """Hold back an end that may become a stop string."""
        held = 0
        for stop in self.stops:
            for length in range(min(len(stop) - 1, len(text)), held, -1):
                if text.endswith(stop[:length]):
                    held = length
                    break
        return text[: len(text) - held]


@dataclass
class TextStream:
    """A text as it grows: iterate over its additions; `result` is the text so far."""

    session: Session
    growing: GrowingText
    settings: DecodingSettings
    individual: Individual | None
    is_stopped: bool = field(default=False, init=False)

    def __iter__(self) -> Iterator[str]:
        for _, addition in self.session._grow([self.growing]):
            yield addition
            if self.is_stopped:
                return

    def stop(self) -> None:
        """End the text after the token that was just written."""
        self.is_stopped = True

    @property
    def choice(self) -> Choice:
        """The newest token."""
        assert self.growing.choice is not None
        return self.growing.choice

    @property
    def result(self) -> Text:
        growing, number = self.growing, self.session.engine.num_token_id
        new = growing.row.new
        numbers = [v for i, v in zip(new.ids, new.values, strict=True) if i == number]
        text = growing.text
        if growing.finish is None and not growing.stops:
            text = self.session.engine.decode(new)  # an interrupted text keeps its last character
        return Text(
            text,
            numbers,
            self.individual,
            self.settings,
            growing.row.seed,
            self.is_stopped,
            growing.finish,
        )


class Session:
    """An engine with a loaded model. The same calls work on every engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._asked: tuple[Any, People] | None = None  # whose shares were counted last

    @property
    def model(self) -> Any:
        """Hugging Face's model, or NumPy's engine."""
        return self.engine.model

    @property
    def reader(self) -> Any:
        """Texts to tokens: torch's processor, or the other engines' reader."""
        engine: Any = self.engine
        return engine.processor if engine.kind == "torch" else engine.reader

    @property
    def has_chat(self) -> bool:
        """Whether the model has a chat template."""
        name = "chat_template" if self.engine.kind == "torch" else "template"
        return getattr(self.reader, name) is not None

    @property
    def processor(self) -> Any:
        """Texts to tokens, of the torch engine."""
        return self._torch("processor")[1]

    def generate(self, prompt: Prompt, individual: Who | None = None, **options: Any) -> Text:
        """Continue a text, or answer messages. Options are those of `stream`."""
        stream = self.stream(prompt, individual, **options)
        for _ in stream:
            pass
        return stream.result

    def chat(self, message: Prompt, individual: Who | None = None, **options: Any) -> Text:
        """Answer a message, or the last of several."""
        if isinstance(message, str):
            message = [{"role": "user", "content": message}]
        return self.generate(message, individual, **options)

    def batch(
        self,
        prompts: Sequence[Prompt],
        individual: Who | Sequence[Who] | None = None,
        **options: Any,
    ) -> list[Text]:
        """Continue several texts, decoded together. One individual for all, or one for each."""
        one_each = isinstance(individual, Sequence) and not isinstance(individual, str)
        who: Any = individual if one_each else [individual] * len(prompts)
        read: dict[str, Tokens] = {}  # a prompt that is repeated is read once
        for prompt in prompts:
            if repr(prompt) not in read:
                read[repr(prompt)] = self.encode(prompt)
        streams = [
            self.stream(read[repr(prompt)], one, **options)
            for prompt, one in zip(prompts, who, strict=True)
        ]
        for first in range(0, len(streams), TOGETHER):
            for _ in self._grow([one.growing for one in streams[first : first + TOGETHER]]):
                pass
        return [stream.result for stream in streams]

    def stream(
        self,
        prompt: Prompt | Tokens,
        individual: Who | None = None,
        *,
        mode: str | None = None,
        max_new_tokens: int = NEW_TOKENS,
        seed: int | None = None,
        stop: Sequence[str] = (),
        alternatives: int | None = None,
        **options: Any,
    ) -> TextStream:
        """A text that grows while it is iterated over.

        An individual without a mode means `causal`. What the call leaves to chance is drawn now,
        and is in the result. `seed` is that of softmax draws, `stop` ends a text before any of
        these strings; `alternatives` asks for the probabilities of so many likely tokens beside the
        chosen one; further options are those of Hugging Face's `generate`.
        """
        if isinstance(individual, str):
            individual = parse_individual(individual)
        named = {name: value for name, value in options.items() if value is not None}
        named |= {"causal_mode": mode, "individual": individual}
        named, seed = complete_call(self.engine.resolve, named, seed)
        settings = self.engine.resolve(**named)
        tokens = self.encode(prompt)
        length = min(max_new_tokens, self.engine.context - len(tokens.ids))
        row = Row(tokens, named, seed, length, alternatives)
        growing = GrowingText(row, self.engine, stop)
        return TextStream(self, growing, settings, self.individual_of(settings))

    def individual_of(self, settings: DecodingSettings) -> Individual | None:
        """Who speaks by these settings, which name an individual in the modes with noise."""
        noise = DecodingNoise(settings, 1, 1, self.engine.size, no_draws)
        return noise.individuals[0] if noise.individuals else None

    def encode(self, prompt: Prompt | Tokens) -> Tokens:
        """A prompt as tokens, which must leave room for one more."""
        engine = self.engine
        if isinstance(prompt, Tokens):
            tokens = prompt
        elif isinstance(prompt, str):
            tokens = engine.encode(prompt)
        else:
            tokens = engine.encode_chat(prompt)
        if not 0 < len(tokens.ids) < engine.context:
            raise ValueError(
                f"The prompt has {len(tokens.ids)} tokens; this model reads 1 to "
                f"{engine.context - 1}."
            )
        return tokens

    def shares(
        self,
        prompt: Prompt | Tokens,
        n: int = 1000,
        people: Sequence[Who] | None = None,
        **options: Any,
    ) -> Shares:
        """The tokens that individuals choose next, with their shares: of seeds 0 to n - 1, or of
        some people. Options are those of `generate` in `causal` mode, such as `temperature`."""
        key = (n, None if people is None else (*people,), tuple(sorted(options.items())))
        if self._asked is None or self._asked[0] != key:
            who = n if people is None else people
            self._asked = key, People(self.engine.resolve, self.engine.size, who, **options)
        tokens = self.encode(prompt)
        return count_shares(self.engine, tokens, str(prompt), self._asked[1])

    def counterfactual(self, prompt: Any, edit: Any, individual: Who = 0, **options: Any) -> Any:
        """The individual's text, and the one after an edit: another prompt, or a `Changed...`.

        See `causal_qwen.counterfactual`. Engines other than torch compare two prompts, and give the
        two texts without the distributions behind them.
        """
        who = parse_individual(individual) if isinstance(individual, str) else individual
        if self.engine.kind != "torch" and isinstance(edit, str | list):
            texts = self.batch([prompt, edit], who, **options)
            return TwoTexts(prompt, edit, *texts)
        from causal_qwen.analysis.counterfactual import counterfactual

        model, processor = self._torch("This counterfactual")
        return counterfactual(model, prompt, who, edit, processor=processor, **options)

    def predict(self, texts: str | Sequence[str], **options: Any) -> Any:
        """The number that each text asks for next, as a `NumberPrediction`."""
        model, processor = self._torch("predict")
        return model.predict(texts, processor, **options)

    def _torch(self, what: str) -> tuple[Any, Any]:
        if self.engine.kind != "torch":
            raise ValueError(f"{what} needs the torch engine; open the model with engine='torch'.")
        engine: Any = self.engine
        return engine.model, engine.processor

    def _grow(self, texts: Sequence[GrowingText]) -> Iterator[tuple[GrowingText, str]]:
        """Decode until all texts have ended: each with what every token adds to it."""
        batch, growing = self.engine.new_batch(), {text.row: text for text in texts}
        choices = list(zip(growing, batch.join(list(growing)), strict=True))
        try:
            while choices:
                for row, choice in choices:
                    if isinstance(choice, Exception):
                        raise choice
                    text = growing[row]
                    yield text, text.take(choice)
                    if text.finish is not None:
                        batch.leave(row)
                        del growing[row]
                choices = batch.step() if growing else []
        finally:
            for row in growing:
                with suppress(StopIteration):  # of a row that did not join
                    batch.leave(row)
