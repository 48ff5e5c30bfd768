"""Predictors: a text -> a number with its uncertainty.

The number head of a freshly converted model is random, so a `CausalTextRegressor` is fitted on a
real table first: the petal length of an iris, given its other measurements. Regressors saved by
`causal-qwen fit`, and models trained on values, are predictors too. A regressor that reads columns
is asked with a line for every column, "carat = 0.9".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pandas import DataFrame

from causal_qwen.modeling.protocols import CausalModel, Processor
from causal_qwen.paths import cache_directory
from causal_qwen.playground.provider import LEVELS, Forecast, Sweep, sweep_texts
from causal_qwen.playground.text_edits import DragRange
from causal_qwen.regression.feature_cache import CACHE_FILE
from causal_qwen.regression.features import features
from causal_qwen.regression.fitted import interval_of, median_of
from causal_qwen.regression.prediction import NumberPrediction
from causal_qwen.regression.regressor import LENGTH, CausalTextRegressor, OpenModel
from causal_qwen.regression.sentences import to_sentences
from causal_qwen.regression.whatif import NumberCounterfactual
from causal_qwen.tables.cells import is_missing, read_cell
from causal_qwen.tables.iris import iris_table
from causal_qwen.tables.rows import TEXT

Array = NDArray[np.float64]

IRIS_COLUMNS = ["species", "sepal length", "sepal width", "petal width"]
IRIS_TEMPLATE = (
    "An iris {species} has sepals {sepal length} cm long and {sepal width} cm wide, and petals "
    "{petal width} cm wide. The petal length in cm is"
)
FIT_ROWS, CALIBRATION_ROWS = 60, 30
ROWS_PER_STEP = 6  # read before other requests have their turn


@dataclass(frozen=True)
class Predictor:
    name: str
    note: str
    example: str  # "" if there is none
    distribution: Callable[[list[str]], NumberPrediction] = field(repr=False)
    median: Callable[[NumberPrediction], Array] = field(repr=False)
    interval: Callable[[NumberPrediction, float], tuple[Array, Array]] = field(repr=False)
    counterfactual: Callable[[str, float, str], NumberCounterfactual] | None = field(
        default=None, repr=False
    )  # of a text, its observed number and the edited text

    def what_if(self, text: str, observed: str, other: str) -> str:
        """What the number seen after `text` would have been after the `other` one, in words."""
        if self.counterfactual is None:
            raise ValueError("The model's own head keeps no individual; use a fitted regressor.")
        try:
            seen = float(observed)
        except ValueError:
            raise ValueError(f"The observed value {observed!r} is no number.") from None
        if text == other:
            raise ValueError("The two texts are the same; change a word or a number in one.")
        found = self.counterfactual(text, seen, other)
        return (
            f"Observed {seen:.4g} where {found.factual:.4g} was expected; after the edited text it "
            f"would have been {found.median:.4g} ({found.level:.0%}: {found.low:.4g} to "
            f"{found.high:.4g})."
        )

    def forecast(self, text: str) -> Forecast:
        number = self.distribution([text])
        ends = {level: self.interval(number, level) for level in LEVELS}
        intervals = {level: (float(low[0]), float(high[0])) for level, (low, high) in ends.items()}
        return Forecast(number[0], float(self.median(number)[0]), intervals)

    def sweep(self, text: str, index: int, drag: DragRange) -> Sweep:
        """`text` with its `index`-th number moved from one end of its range to the other."""
        values, texts = sweep_texts(text, index, drag)
        number = self.distribution(texts)
        return Sweep(values, self.median(number), *self.interval(number, LEVELS[-1]))


def read_irises() -> tuple[list[str], Array]:
    """Fisher's irises as sentences, shuffled, and their petal lengths."""
    frame = iris_table()[: FIT_ROWS + CALIBRATION_ROWS]
    texts = to_sentences(frame, IRIS_COLUMNS, template=IRIS_TEMPLATE)
    return texts, frame["petal length"].to_numpy()


def fit_irises(model: CausalModel, processor: Processor) -> Iterator[tuple[int, int] | Predictor]:
    """(rows read, rows in all), step by step; at last the fitted predictor.

    Features are cached on disk: the second fit takes a second.
    """
    texts, lengths = read_irises()
    longest = min(LENGTH, model.config.max_position_embeddings)
    for start in range(0, len(texts), ROWS_PER_STEP):
        some = texts[start : start + ROWS_PER_STEP]
        features(some, model, processor, max_length=longest, cache=cache_directory() / CACHE_FILE)
        yield start + len(some), len(texts)
    regressor = CausalTextRegressor(
        model=OpenModel(processor, model),
        sources=["model"],
        verbose=False,
        question="",
        value_space="symlog",
    )
    regressor.fit(texts[:FIT_ROWS], lengths[:FIT_ROWS])
    held_out, truth = texts[FIT_ROWS:], lengths[FIT_ROWS:]
    regressor.calibrate(held_out, truth)
    error = float(np.median(np.abs(regressor.predict(held_out) - truth)))
    note = (
        f"Fitted on {FIT_ROWS} irises; intervals calibrated on {CALIBRATION_ROWS} others, where "
        f"the median error is {error:.2f} cm."
    )
    yield from_regressor(regressor, "petal length of an iris, in cm", note, texts[0])


def from_directory(path: str, opened: OpenModel) -> Predictor:
    """A regressor saved by `causal-qwen fit`; the first target if it has several."""
    if not path:
        raise ValueError("The directory is missing; give one that causal-qwen fit has written.")
    directory = Path(path).expanduser()
    try:
        regressor = CausalTextRegressor.load(directory, model=opened)
    except ValueError:  # fitted on another backbone
        regressor = CausalTextRegressor.load(directory)
    regressor.set_params(verbose=False)
    target = next(iter(regressor.targets_))
    is_calibrated = regressor.targets_[target].conformal is not None
    kind = "calibrated" if is_calibrated else "uncalibrated Cauchy"
    note = f"{path}: {kind} intervals."
    if regressor.source_ is not None and regressor.columns_ is not None:
        return from_columns(regressor, target, f"{note} A line for every column.")
    example = ""  # of a table: the sentence of a row whose cells are all unknown
    if regressor.columns_ is not None:
        example = regressor.sentences(DataFrame([dict.fromkeys(regressor.columns_)]))[0]
    return from_regressor(regressor, target, note, example)


def from_regressor(regressor: CausalTextRegressor, name: str, note: str, example: str) -> Predictor:
    """Any fitted regressor, asked with whole sentences."""
    reader = regressor.of_sentences()
    target = next(iter(reader.targets_))

    def counterfactual(text: str, observed: float, other: str) -> NumberCounterfactual:
        return reader.counterfactual(text, observed, {TEXT: other}, target=target)

    return _predictor(reader, name, note, example, lambda texts: texts, counterfactual)


def from_columns(regressor: CausalTextRegressor, name: str, note: str) -> Predictor:
    """A regressor that reads columns, asked with lines; the example is a typical training row."""
    columns, target = list(regressor.columns_ or ()), next(iter(regressor.targets_))

    def rows(texts: list[str]) -> DataFrame:
        return DataFrame([read_lines(text, columns) for text in texts], dtype=object)

    def counterfactual(text: str, observed: float, other: str) -> NumberCounterfactual:
        before, after = (read_lines(one, columns) for one in (text, other))
        changes = {name: after[name] for name in columns if str(after[name]) != str(before[name])}
        return regressor.counterfactual(before, observed, changes, target=target)

    return _predictor(
        regressor, name, note, write_lines(regressor.baseline_, columns), rows, counterfactual
    )


def _predictor(
    regressor: CausalTextRegressor,
    name: str,
    note: str,
    example: str,
    inputs: Callable[[list[str]], Any],
    counterfactual: Callable[[str, float, str], NumberCounterfactual],
) -> Predictor:
    """Of the first target; `inputs`: texts as the regressor takes them."""
    target = next(iter(regressor.targets_))

    def distribution(texts: list[str]) -> NumberPrediction:
        found = regressor.predict_distribution(inputs(texts))
        return found[target] if isinstance(found, dict) else found

    def median(number: NumberPrediction) -> Array:
        return median_of(number, regressor.targets_[target])

    def interval(number: NumberPrediction, level: float) -> tuple[Array, Array]:
        low, high = interval_of(number, regressor.targets_[target], level).T
        return low, high

    return Predictor(name, note, example, distribution, median, interval, counterfactual)


def write_lines(row: DataFrame, columns: Sequence[str]) -> str:
    """A table of one row as lines, "carat = 0.9"; nothing after the sign where a cell is empty."""
    cells = {name: "" if is_missing(str(row[name].iloc[0])) else row[name].iloc[0] for name in row}
    shown = {name: " ".join(str(cell).split()) for name, cell in cells.items()}  # a line each
    return "\n".join(f"{name} = {shown[name]}".rstrip() for name in columns)


def read_lines(text: str, columns: Sequence[str]) -> dict[str, Any]:
    """The inverse of `write_lines`; columns without a line are empty."""
    cells: dict[str, Any] = dict.fromkeys(columns)
    for line in filter(None, map(str.strip, text.splitlines())):
        named = (n for n in columns if line.startswith(n) and line[len(n) :].lstrip()[:1] == "=")
        name = max(named, key=len, default=None)
        if name is None:
            raise ValueError(
                f"{line!r} is no column and its value; write a line such as {columns[0]} = 1, for "
                f"any of {', '.join(columns)}."
            )
        value = line[len(name) :].lstrip()[1:].strip()
        cells[name] = None if is_missing(value) else read_cell(value)
    return cells


def from_model(model: CausalModel, processor: Processor) -> Predictor:
    """The number head of a model that was trained on values."""
    if model.config.encode_numbers != "value":
        raise ValueError(
            "This model was not trained on values, so its number head is random; train one with "
            "causal-qwen train --numbers value."
        )

    def distribution(texts: list[str]) -> NumberPrediction:
        found: NumberPrediction = model.predict(texts, processor)
        return found

    return Predictor(
        "the next number, by the model's own head",
        "The model's own number head: uncalibrated Cauchy intervals.",
        "",
        distribution,
        lambda number: number.median,
        lambda number, level: number.interval(level),
    )
