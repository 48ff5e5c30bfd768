"""Sources: the rows of a table -> features, by scikit-learn's own transformers.

    columns   numbers (standardised, and as splines; missing values flagged), categories (one-hot)
    words     TF-IDF of every text column, by words and pairs of words and by letters
    kernel    how similar a row is to training rows, in columns and words; see `similarity`
    boosting  numbers and categories as they are, the leading components of the words
    model     what the language model makes of the text columns; see `features`

No transformer sees a label, so each is fitted once, on all training rows, and cross-validation
splits rows of the result.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import sparse
from sklearn import preprocessing
from sklearn.base import clone
from sklearn.compose import ColumnTransformer
from sklearn.decomposition import TruncatedSVD
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.kernel_approximation import Nystroem
from sklearn.metrics.pairwise import euclidean_distances
from sklearn.model_selection import GroupKFold, KFold, check_cv
from sklearn.pipeline import make_pipeline

from causal_qwen.tables.frames import Kind, calendar, is_day_first, listed, plain, to_numbers
from causal_qwen.text.numerals import encode

Array = NDArray[np.float64]

SOURCES = ("columns", "words", "kernel", "boosting", "model")
LARGE = 4000  # rows; of more, the linear head takes the leading components of the words
WORD_COMPONENTS, TREE_COMPONENTS = 100, 30
MOST_FEATURES = 50_000  # n-grams of a text column
MOST_CATEGORIES = 250  # of a column, in a tree
KNOTS = 6
LANDMARKS = 600  # training rows, at most, to which a row is compared
ROUNDED = {"decimals": 6}  # components: rounding errors must not cross a tree's threshold
WORDS: dict[str, Any] = {
    "ngram_range": (1, 2),
    "sublinear_tf": True,
    "max_features": MOST_FEATURES,
    "token_pattern": r"(?u)\w+|[^\w\s]",
}
LETTERS = {**WORDS, "ngram_range": (2, 5), "analyzer": "char_wb", "token_pattern": None}
MOST_INNER_NUMBERS, INNER_SHARE = 8, 0.2  # of a text column
CALENDAR = ("year", "month", "weekday", "hour")  # of a date, beside its days since 1970
INNER = re.compile(rf"(?:number ([0-9]+)|({'|'.join(CALENDAR)})) of (.*)", re.DOTALL)
NUMERIC: tuple[Kind, ...] = ("number", "flag", "date")


class Schema(NamedTuple):
    """The columns that are used, by the way they are read."""

    numbers: list[str]
    categories: list[str]
    texts: list[str]
    day_first: Sequence[str] = ()  # of the numbers: dates such as 13/5/2024

    @classmethod
    def of_frame(cls, kinds: dict[str, Kind], frame: Any) -> Schema:
        """Numbers inside texts are columns, too: "number 1 of item" in "20 piece Nuggets", the
        first few of every text column, as far as a fifth of its rows have them; and "month of" a
        date, where it varies."""
        numbers = [name for name, kind in kinds.items() if kind in NUMERIC]
        texts = [name for name, kind in kinds.items() if kind == "text"]
        dates = [name for name, kind in kinds.items() if kind == "date"]
        day_first = [name for name in dates if is_day_first(frame[name])]
        for name in dates:
            days = to_numbers(frame[name], name in day_first)
            known = days[np.isfinite(days)]
            parts = CALENDAR if len(known) else ()
            numbers += [f"{part} of {name}" for part in parts if np.ptp(calendar(known, part))]
        for name in texts:
            found = [len(encode(text).values) for text in frame[name].dropna().astype(str)]
            for place in range(1, MOST_INNER_NUMBERS + 1):
                if found and np.mean([count >= place for count in found]) >= INNER_SHARE:
                    numbers.append(f"number {place} of {name}")
        categories = [name for name, kind in kinds.items() if kind == "category"]
        return cls(numbers, categories, texts, day_first)


def typed_cells(frame: Any, schema: Schema) -> Any:
    """Numbers as float64, categories and texts as str; "" where one is missing."""
    cells: dict[str, Any] = {name: _column_numbers(frame, name, schema) for name in schema.numbers}
    for name in (*schema.categories, *schema.texts):
        pairs = zip(frame[name].tolist(), frame[name].isna().tolist(), strict=True)
        cells[name] = np.array(["" if gone else str(value) for value, gone in pairs], dtype=object)
    return pd.DataFrame(cells, index=frame.index)


def _column_numbers(frame: Any, name: str, schema: Schema) -> Array:
    if name in frame:
        return to_numbers(frame[name], name in schema.day_first)
    place, part, column = INNER.fullmatch(name).groups()  # type: ignore[union-attr]
    if part is not None:
        return calendar(to_numbers(frame[column], column in schema.day_first), part)
    found = [encode(str(text)).values[int(place) - 1 : int(place)] for text in frame[column]]
    return np.array([values[0] if values else np.nan for values in found], dtype=np.float64)


class TableFeatures:
    """The transformers of the sources that need no language model, fitted on training rows."""

    def __init__(self, schema: Schema, sources: Sequence[str]) -> None:
        self.schema = schema
        self.transformers: dict[str, Any] = {}
        self.ranges: dict[str, tuple[float, float]] = {}  # of the numbers, in training
        self.categories: dict[str, list[str]] = {}  # in training
        self.sources = sources

    def fit(self, frame: Any) -> dict[str, Any]:
        """Fit every transformer; -> name of the source -> features (N, H)"""
        cells = typed_cells(frame, self.schema)
        for name in self.schema.numbers:
            known = cells[name].dropna()
            if len(known):
                self.ranges[name] = float(known.min()), float(known.max())
        for name in self.schema.categories:
            self.categories[name] = sorted({*cells[name]} - {""})
        schema = self.schema._replace(numbers=list(self.ranges))
        if "columns" in self.sources and (schema.numbers or schema.categories):
            self.transformers["columns"] = _columns(cells, schema)
        if "words" in self.sources and schema.texts:
            self.transformers["words"] = _words(cells, schema)
        if "boosting" in self.sources:
            self.transformers["boosting"] = _tree_columns(cells, schema)
        with np.errstate(invalid="ignore"):  # texts that are all the same have no variance
            for transformer in self.transformers.values():
                transformer.fit(cells)
        return self.transform(frame, cells)  # `fit_transform` differs by rounding errors

    def transform(self, frame: Any, cells: Any = None) -> dict[str, Any]:
        cells = typed_cells(frame, self.schema) if cells is None else cells
        found = {name: one.transform(cells) for name, one in self.transformers.items()}
        return {
            name: sparse.csr_array(block) if sparse.issparse(block) else np.asarray(block, float)
            for name, block in found.items()
        }

    def beyond(self, frame: Any) -> Array:
        """How far the numbers of every row are outside of the training range: the sum of the
        distances in widths of the ranges. (N,)"""
        cells = typed_cells(frame, self.schema)
        distance = np.zeros(len(cells))
        for name, (low, high) in self.ranges.items():
            if (inner := INNER.fullmatch(name)) and inner[2]:  # the date itself is compared
                continue
            values, width = cells[name].to_numpy(), high - low or max(abs(high), 1.0)
            distance += np.nan_to_num(np.maximum(low - values, values - high) / width).clip(0)
        return distance


class Spline(preprocessing.SplineTransformer):
    """Copies and files are without its B-splines, which follow from the knots."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: one for name, one in super().__getstate__().items() if name != "bsplines_"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "n_features_in_" in state:
            self.fit(self.knots)


def _columns(cells: Any, schema: Schema) -> Any:
    parts: list[tuple[str, Any, Any]] = []
    if schema.numbers:
        filled = SimpleImputer(strategy="median", add_indicator=True)
        steps = make_pipeline(filled, preprocessing.StandardScaler())
        parts.append(("numbers", steps, schema.numbers))
    for place, name in enumerate(schema.numbers):  # scikit-learn's names have no "__"
        known = cells[name].dropna().to_numpy()
        knots = np.unique(np.quantile(known, np.linspace(0, 1, KNOTS)))
        if len(knots) > 2:
            spline = Spline(knots=knots[:, None], extrapolation="linear", include_bias=False)
            filled = SimpleImputer(strategy="median")
            steps = make_pipeline(filled, spline, preprocessing.StandardScaler())
            parts.append((f"spline {place}", steps, [name]))
    if schema.categories:
        encoder = preprocessing.OneHotEncoder(handle_unknown="ignore")
        parts.append(("categories", encoder, schema.categories))
    return ColumnTransformer(parts, sparse_threshold=1.0)


def _words(cells: Any, schema: Schema) -> Any:
    parts = []
    for place, name in enumerate(schema.texts):
        for kind, options in {"words": WORDS, "letters": LETTERS}.items():
            vectorizer: Any = TfidfVectorizer(**options)
            if len(cells) > LARGE:
                vectorizer = _leading(vectorizer, cells[name], WORD_COMPONENTS)
            parts.append((f"{kind} {place}", vectorizer, name))
    return ColumnTransformer(parts, sparse_threshold=1.0)


def _tree_columns(cells: Any, schema: Schema) -> Any:
    parts: list[tuple[str, Any, Any]] = []
    if schema.categories:  # first: `experts` names their places
        encoder = preprocessing.OrdinalEncoder(
            handle_unknown="use_encoded_value",
            unknown_value=np.nan,
            encoded_missing_value=np.nan,
            max_categories=MOST_CATEGORIES,
        )
        parts.append(("categories", encoder, schema.categories))
    if schema.numbers:
        parts.append(("numbers", "passthrough", schema.numbers))
    for place, name in enumerate(schema.texts):
        words = _leading(TfidfVectorizer(**WORDS), cells[name], TREE_COMPONENTS)
        parts.append((f"words {place}", words, name))
    return ColumnTransformer(parts, sparse_threshold=0)


def _leading(vectorizer: Any, texts: Any, count: int) -> Any:
    """The leading components of what a vectorizer finds in these texts."""
    features = len(clone(vectorizer).fit(texts).vocabulary_)
    components = TruncatedSVD(min(count, features), random_state=0)
    return make_pipeline(
        vectorizer, components, preprocessing.FunctionTransformer(np.round, kw_args=ROUNDED)
    )


def similarity(x: Any, seed: int = 0) -> Nystroem:
    """Fitted to the columns and words of training rows (N, H): exp(-d^2 / 2m) to LANDMARKS of them,
    d the distance and m the median of d^2."""
    rows = np.random.default_rng(seed).permutation(x.shape[0])[:LANDMARKS]
    squares = euclidean_distances(x[rows], squared=True)
    apart = squares[squares > 1e-9 * max(squares.max(), 1e-300)]
    gamma = 0.5 / float(np.median(apart)) if len(apart) else 1.0
    known = sparse.csr_matrix(x) if sparse.issparse(x) else x  # which skops saves, no csr_array
    return Nystroem(gamma=gamma, n_components=len(rows), random_state=seed).fit(known)


# ---------------------------------------------------------------- choice


def without_ids(kinds: dict[str, Kind], is_asked_for: bool) -> dict[str, Kind]:
    """Columns that only name rows are left out, with a warning, unless there are no others or
    they were asked for: then they are categories."""
    ids = [name for name, kind in kinds.items() if kind == "id"]
    if len(ids) == len(kinds) or is_asked_for:
        return {**kinds, **dict.fromkeys(ids, "category")}
    if ids:
        names = ", ".join(map(repr, ids))
        warnings.warn(f"left out, as they name rows: {names} (--column uses them).", stacklevel=4)
    return kinds


def choose_sources(sources: str | Sequence[str], schema: Schema) -> list[str]:
    """Those that the table has, in the order of SOURCES. The language model can always be asked
    for; `auto` takes it only for texts."""
    has = {
        "columns": bool(schema.numbers or schema.categories),
        "words": bool(schema.texts),
        "kernel": True,
        "boosting": True,
        "model": bool(schema.texts) or sources != "auto",
    }
    chosen = SOURCES if sources == "auto" else listed(sources)
    found = [name for name in SOURCES if name in chosen and has[name]]
    has_kernel = "kernel" not in found or {"columns", "words"} & {*found}
    if {*chosen} - {*SOURCES} or not found or not has_kernel:
        raise ValueError(
            f"sources={sources!r} must be 'auto', or of {', '.join(SOURCES)} what the table has "
            "('kernel' compares rows by columns and words)."
        )
    return found


def row_texts(frame: Any, schema: Schema) -> list[str]:
    """What the language model reads of every row: its texts, or "carat is 0.9, cut is Ideal" where
    all columns are texts, or none is."""
    columns = {*schema.numbers, *schema.categories}
    names = schema.texts or [name for name in frame if name in columns]
    cells = frame[names].astype(object).where(frame[names].notna(), "")
    rows = [[*map(_said, row)] for row in cells.itertuples(index=False)]
    if schema.texts and schema.texts != [*frame]:
        return [" ".join(filter(None, row)) for row in rows]
    parts = ([f"{n} is {c or 'unknown'}" for n, c in zip(names, row, strict=True)] for row in rows)
    return [", ".join(row).replace("_", " ") for row in parts]


def _said(cell: Any) -> str:
    return f"{cell:.10g}" if isinstance(cell, float) else " ".join(str(cell).split())


def typical_row(frame: Any, schema: Schema) -> dict[str, Any]:
    """The row with which explanations begin: of numbers and dates the cell nearest to their median,
    of categories the most frequent one, "" for texts."""
    cells: dict[str, Any] = {}
    for name in frame.columns:
        column, cells[name] = frame[name].dropna(), "" if name in schema.texts else None
        if name in schema.numbers:
            numbers = to_numbers(column, name in schema.day_first)
            if (known := np.isfinite(numbers)).any():
                distance = np.abs(numbers - np.median(numbers[known]))
                cells[name] = plain(column.iloc[int(np.nanargmin(distance))])
        elif name not in schema.texts and len(column):
            cells[name] = plain(column.mode().iloc[0])
    return cells


def split_rows(rows: int, groups: Any, cv: Any, folds: int, seed: int) -> list[tuple[Any, Any]]:
    """(training, test) rows: by `cv`, else by groups, else at random."""
    if cv is None:
        cv = KFold(min(folds, rows), shuffle=True, random_state=seed)
        cv = cv if groups is None else GroupKFold(min(folds, len(np.unique(groups))))
    return list(check_cv(cv).split(np.zeros(rows), None, groups))
