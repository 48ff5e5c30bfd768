"""Oracles: a text -> a number with its uncertainty.

The number head of a freshly converted model is random, so a `CausalTextRegressor` learns a real
table here: how long the petals of an iris are, told the rest of the flower. Regressors saved by
`causal-qwen fit` answer, too, and so does a model that was trained on values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.paths import cache_directory
from causal_qwen.playground.wording import Dial, change_number, on_dial
from causal_qwen.regression.features import CACHE_FILE, features
from causal_qwen.regression.iris import iris_table
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.regressor import LENGTH, CausalTextRegressor, OpenModel
from causal_qwen.regression.sentences import to_sentences

Array = NDArray[np.float64]

TEMPLATE = (
    "An iris {species} has sepals {sepal length} cm long and {sepal width} cm wide, and petals "
    "{petal width} cm wide. The petal length in cm is"
)
LEARN, HOLD_OUT = 60, 30  # flowers to learn from, and to calibrate on
AT_ONCE = 6  # flowers that are read before others have their turn
LEVELS = (0.5, 0.9)
SWEEP = 9  # places at which a dragged number is tried
IRISES, OWN = "<irises>", "<model>"  # asks these, not a directory


@dataclass(frozen=True)
class Forecast:
    """The number a text asks for: its density, its median and intervals, as level -> ends."""

    density: NumberPrediction = field(repr=False)
    median: float
    intervals: dict[float, tuple[float, float]]


@dataclass(frozen=True)
class Sweep:
    """How median and interval move when one number of the text takes other values, (N,) each."""

    values: Array
    median: Array
    low: Array
    high: Array


@dataclass(frozen=True)
class Oracle:
    """Somebody to ask for numbers."""

    name: str
    note: str
    example: str
    density: Callable[[list[str]], NumberPrediction] = field(repr=False)
    interval: Callable[[list[str], float], tuple[Array, Array]] = field(repr=False)

    def forecast(self, text: str) -> Forecast:
        density = self.density([text])[0]
        ends = {level: self.interval([text], level) for level in LEVELS}
        intervals = {level: (float(low[0]), float(high[0])) for level, (low, high) in ends.items()}
        return Forecast(density, float(density.median), intervals)

    def sweep(self, text: str, place: int, dial: Dial) -> Sweep:
        """`text` with its `place`-th number dragged from one end of its dial to the other."""
        values = np.unique([on_dial(dial, share) for share in np.linspace(0, 1, SWEEP)])
        texts = [change_number(text, place, float(value)) for value in values]
        return Sweep(values, self.density(texts).median, *self.interval(texts, LEVELS[-1]))


def flowers() -> tuple[list[str], Array]:
    """Fisher's irises as sentences, shuffled, and the length of their petals."""
    frame = iris_table()[: LEARN + HOLD_OUT]
    columns = ["species", "sepal length", "sepal width", "petal width"]
    return to_sentences(frame, columns, template=TEMPLATE), frame["petal length"].to_numpy()


def learn_flowers(model: CausalModel, processor: Processor) -> Iterator[tuple[int, int] | Oracle]:
    """(flowers read, flowers in all), again and again; at last the oracle that has learned them.

    What was read is kept on disk: the second time takes a second.
    """
    texts, lengths = flowers()
    longest = min(LENGTH, model.config.max_position_embeddings)
    for start in range(0, len(texts), AT_ONCE):
        some = texts[start : start + AT_ONCE]
        features(some, model, processor, max_length=longest, cache=cache_directory() / CACHE_FILE)
        yield min(start + AT_ONCE, len(texts)), len(texts)
    regressor = CausalTextRegressor(
        model=OpenModel(processor, model), verbose=False, question="", value_space="symlog"
    )
    regressor.fit(texts[:LEARN], lengths[:LEARN])
    regressor.calibrate(texts[LEARN:], lengths[LEARN:])
    error = float(np.median(np.abs(regressor.predict(texts[LEARN:]) - lengths[LEARN:])))
    yield of_regressor(
        regressor,
        "petal length of an iris, in cm",
        f"Learned just now from {LEARN} irises; on {HOLD_OUT} others the median error is "
        f"{error:.2f} cm, and the intervals are calibrated on them.",
        texts[0],
    )


def of_directory(path: str, opened: OpenModel) -> Oracle:
    """A regressor that `causal-qwen fit` has saved; of several targets, the first."""
    if not path.strip():
        raise ValueError("The directory is missing: give one that causal-qwen fit has written.")
    directory = Path(path.strip()).expanduser()
    try:
        regressor = CausalTextRegressor.load(directory, model=opened)
    except ValueError:  # fitted on another backbone
        regressor = CausalTextRegressor.load(directory)
    regressor.set_params(verbose=False)
    target = next(iter(regressor.targets_))
    is_calibrated = regressor.targets_[target].conformal is not None
    note = "calibrated intervals" if is_calibrated else "the Cauchy's own intervals"
    return of_regressor(regressor, target, f"From {path.strip()}: {note}.", example_of(regressor))


def of_regressor(regressor: CausalTextRegressor, name: str, note: str, example: str) -> Oracle:
    """Any fitted regressor, asked with whole sentences."""
    reader = regressor.of_sentences()
    target = next(iter(reader.targets_))

    def density(texts: list[str]) -> NumberPrediction:
        found = reader.predict_distribution(texts)
        return found[target] if isinstance(found, dict) else found

    def interval(texts: list[str], level: float) -> tuple[Array, Array]:
        low, high = reader.predict_interval(texts, level)
        return (low, high) if low.ndim == 1 else (low[:, 0], high[:, 0])

    return Oracle(name, note, example, density, interval)


def example_of(regressor: CausalTextRegressor) -> str:
    """The sentence of a row of which nothing is known, to be filled in."""
    from pandas import DataFrame

    if regressor.columns_ is None:
        return ""
    nothing = DataFrame([dict.fromkeys(regressor.columns_)])
    return regressor.sentences(nothing)[0]


def of_model(model: CausalModel, processor: Processor) -> Oracle:
    """The model's own number head, if it was trained on values."""
    if model.config.encode_numbers != "value":
        raise ValueError(
            "This model was not trained on values, so its own number head means nothing yet: train "
            "one with causal-qwen train --numbers value."
        )

    def density(texts: list[str]) -> NumberPrediction:
        found: NumberPrediction = model.predict(texts, processor)
        return found

    return Oracle(
        "the number this model would say next",
        "The model's own number head; the Cauchy's own intervals.",
        "",
        density,
        lambda texts, level: density(texts).interval(level),
    )
