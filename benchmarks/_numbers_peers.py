"""Peers of the regressor: what a data scientist would try on the same table, with good defaults.

Every peer is a function (training frame, training values, other frame) -> points, and the choice
that it made, which a second fit on more rows may repeat. Columns are sorted by what they hold, from
the training rows alone:

    numbers     median where missing, and a flag for that; standardised for linear models
    dates       days since 1970, month, weekday: three numbers
    categories  one-hot, rare ones together; native categories for trees
    texts       TF-IDF of words and pairs of words; its first 20 singular vectors for trees

Where no training value is negative, a peer may also learn log(1 + y); penalties and that scale
are chosen by the mean absolute error of three folds of the training rows (CatBoost's scale and
number of trees by that of one held-out sixth).

CatBoost needs `pip install '.[bench]'` in a clone; nothing else of the project uses it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import sparse
from sklearn.base import clone
from sklearn.compose import TransformedTargetRegressor
from sklearn.decomposition import TruncatedSVD
from sklearn.ensemble import HistGradientBoostingRegressor
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.impute import SimpleImputer
from sklearn.linear_model import HuberRegressor, RidgeCV
from sklearn.model_selection import KFold
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, RobustScaler, StandardScaler

Array = NDArray[np.float64]


class Choice(NamedTuple):
    """What a peer has chosen on training rows: a model (or a number of trees), and the scale."""

    place: int = 0
    is_log: bool = False


class Fitted(NamedTuple):
    points: Array
    choice: Choice


class Peer(Protocol):
    def __call__(
        self, train: Any, y: Array, other: Any, choice: Choice | None = None
    ) -> Fitted: ...


FOLDS = 3
WORDS = 3000  # of a vocabulary
SINGULAR = 20  # vectors of a text column
CATEGORIES = 100  # of a column; a native category of trees allows 255
FEW = 20  # distinct values up to which a column of words is one of categories
DATE = r"\d{4}-\d{2}-\d{2}|\d{1,2}/\d{1,2}/\d{2,4}"
PENALTIES = (0.1, 1.0, 10.0)  # of Huber
LOG_LIMIT = 30.0  # no prediction is larger than exp of this
RIDGE_PENALTIES = np.logspace(-2, 4, 13)
TREES: dict[str, Any] = {"max_iter": 100, "random_state": 0}
CATBOOST: dict[str, Any] = {
    "loss_function": "MAE",
    "learning_rate": 0.1,
    "boosting_type": "Plain",
    "border_count": 64,
    "thread_count": 1,
    "random_seed": 0,
    "verbose": False,
    "allow_writing_files": False,
}
CATBOOST_TREES = 500
CATBOOST_FEWEST = 30  # twenty held-out rows, some of them wrong, may ask for one


# ---------------------------------------------------------------- columns


@dataclass(frozen=True)
class Columns:
    """Names of columns by what they hold."""

    numbers: list[str]
    dates: list[str]
    categories: list[str]
    texts: list[str]

    @classmethod
    def of(cls, frame: Any) -> Columns:
        found = cls([], [], [], [])
        for name in frame.columns:
            getattr(found, kind_of(frame[name])).append(name)
        return found

    def numeric(self, frame: Any) -> Array:
        """Numbers and the parts of dates, (N, D), with NaN where missing."""
        parts = [frame[self.numbers].to_numpy(float)]
        for name in self.dates:
            days = pd.to_datetime(frame[name], format="mixed", errors="coerce", utc=True)
            since = (days - pd.Timestamp(0, tz="UTC")) / pd.Timedelta(days=1)
            parts.append(np.stack([since, days.dt.month, days.dt.day_of_week], -1).astype(float))
        return np.concatenate(parts, axis=1)

    def categorical(self, frame: Any) -> Any:
        return as_text(frame[self.categories], "missing")


def kind_of(column: Any) -> str:
    """The field of `Columns` to which a column belongs."""
    if pd.api.types.is_numeric_dtype(column):  # truth values, too
        return "numbers"
    words = column.dropna().astype(str)
    if len(words) and words.str.match(DATE).mean() > 0.9:
        return "dates"
    is_text = words.nunique() > FEW and words.str.contains(" ", regex=False).mean() > 0.5
    return "texts" if is_text else "categories"


def as_text(frame: Any, missing: str = "") -> Any:
    return frame.astype(object).where(frame.notna(), missing).astype(str)


def tfidf() -> TfidfVectorizer:
    return TfidfVectorizer(
        ngram_range=(1, 2), sublinear_tf=True, max_features=WORDS, token_pattern=r"(?u)\b\w+\b"
    )


def linear_features(train: Any, other: Any) -> tuple[Any, Any]:
    """Sparse features of both frames, fitted to the first: (N, F), (M, F)."""
    columns = Columns.of(train)
    pairs: list[tuple[Any, Callable[[Any], Any]]] = []
    if columns.numbers or columns.dates:
        impute = SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True)
        pairs.append((make_pipeline(impute, StandardScaler()), columns.numeric))
    if columns.categories:
        encoder = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=2)
        pairs.append((encoder, columns.categorical))
    for name in columns.texts:
        pairs.append((tfidf(), lambda frame, name=name: as_text(frame[[name]])[name]))
    parts = [
        (model.fit_transform(read(train)), model.transform(read(other))) for model, read in pairs
    ]
    first, second = (
        sparse.hstack([sparse.csr_matrix(part) for part in side]).tocsr()
        for side in zip(*parts, strict=True)
    )
    return first, second


def tree_features(train: Any, other: Any, is_ordinal: bool) -> tuple[Any, Any, list[int]]:
    """Dense features of both frames and the places of the categories.

    Categories are numbers (N, F) if `is_ordinal`; else they stay words, in frames.
    """
    columns = Columns.of(train)
    first, second = ([columns.numeric(frame)] for frame in (train, other))
    for name in columns.texts:
        vectors = tfidf()
        words = vectors.fit_transform(as_text(train[[name]])[name])
        svd = TruncatedSVD(min(SINGULAR, min(words.shape) - 1), random_state=0)
        first.append(svd.fit_transform(words))
        second.append(svd.transform(vectors.transform(as_text(other[[name]])[name])))
    start = sum(part.shape[1] for part in first)
    places = list(range(start, start + len(columns.categories)))
    categories = [columns.categorical(frame) for frame in (train, other)]
    if is_ordinal and places:
        encoder = OrdinalEncoder(
            handle_unknown="use_encoded_value", unknown_value=np.nan, max_categories=CATEGORIES
        )
        categories = [encoder.fit_transform(categories[0]), encoder.transform(categories[1])]
    if is_ordinal:
        return *(
            np.hstack([*side, c]) for side, c in zip((first, second), categories, strict=True)
        ), places
    frames = []
    for side, words in zip((first, second), categories, strict=True):
        numbers = pd.DataFrame(np.hstack(side))
        words = words.reset_index(drop=True).set_axis(places, axis=1)
        frames.append(pd.concat([numbers, words], axis=1))
    return frames[0], frames[1], places


# ---------------------------------------------------------------- models


def exponential(values: Array) -> Array:
    return np.expm1(np.minimum(values, LOG_LIMIT))


def in_log(model: Any) -> Any:
    return TransformedTargetRegressor(
        model, func=np.log1p, inverse_func=exponential, check_inverse=False
    )


def may_be_log(y: Array) -> bool:
    return bool((y >= 0).all())


def unseen_error(model: Any, x: Any, y: Array) -> float:
    """Mean absolute error on training rows that a fold leaves out."""
    folds = KFold(FOLDS, shuffle=True, random_state=0).split(y)
    with warnings.catch_warnings():  # the last digits of a Huber fit are not worth the time
        warnings.simplefilter("ignore", ConvergenceWarning)
        parts = [(clone(model).fit(x[seen], y[seen]), unseen) for seen, unseen in folds]
    return float(np.mean([np.abs(y[rows] - part.predict(x[rows])).mean() for part, rows in parts]))


def choose(models: Sequence[Any], x: Any, y: Array) -> Choice:
    """The best model, and then whether it is better in log(1 + y)."""
    place, error = 0, np.inf
    if len(models) > 1 or may_be_log(y):
        errors = [unseen_error(model, x, y) for model in models]
        place, error = int(np.argmin(errors)), min(errors)
    return Choice(place, may_be_log(y) and unseen_error(in_log(models[place]), x, y) < error)


def fit_chosen(
    models: Sequence[Any], x: Any, y: Array, other: Any, choice: Choice | None
) -> Fitted:
    choice = choice or choose(models, x, y)
    model = in_log(models[choice.place]) if choice.is_log else models[choice.place]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return Fitted(model.fit(x, y).predict(other), choice)


def huber_models() -> list[Any]:
    """By penalty; of standardised values, because the optimiser starts at zero."""
    return [
        TransformedTargetRegressor(
            HuberRegressor(alpha=a, max_iter=100), transformer=RobustScaler()
        )
        for a in PENALTIES
    ]


def boosted(loss: str, places: list[int]) -> Any:
    return HistGradientBoostingRegressor(loss=loss, categorical_features=places or None, **TREES)


# ---------------------------------------------------------------- peers


def training_median(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
    return Fitted(np.full(len(other), np.median(y)), Choice())


def ridge(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
    x, test = linear_features(train, other)
    return fit_chosen([RidgeCV(RIDGE_PENALTIES)], x, y, test, choice)


def huber(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
    x, test = linear_features(train, other)
    return fit_chosen(huber_models(), x, y, test, choice)


def text_huber(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
    """All cells of a row as one text."""
    texts = [as_text(frame).agg(" ".join, axis=1) for frame in (train, other)]
    vectors = tfidf()
    x, test = vectors.fit_transform(texts[0]), vectors.transform(texts[1])
    return fit_chosen(huber_models(), x, y, test, choice)


def boosting(loss: str) -> Peer:
    def predict(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
        x, test, places = tree_features(train, other, is_ordinal=True)
        return fit_chosen([boosted(loss, places)], x, y, test, choice)

    return predict


def catboost(train: Any, y: Array, other: Any, choice: Choice | None = None) -> Fitted:
    """As many trees as are best on a sixth of the training rows, then all rows.

    Without that, exact leaves follow every wrong label: with a fifth of them corrupted the error is
    many times that of boosting with the same loss.
    """
    try:
        from catboost import CatBoostRegressor
    except ModuleNotFoundError:
        raise ImportError(
            "The peer CatBoost is not installed: pip install '.[bench]' in a clone."
        ) from None
    x, test, places = tree_features(train, other, is_ordinal=False)
    model = partial(CatBoostRegressor, cat_features=places, **CATBOOST)
    if choice is None:
        order = np.random.default_rng(0).permutation(len(y))
        unseen, seen = np.split(order, [len(y) // 6])
        tried = []
        for is_log in (False, True)[: 1 + may_be_log(y)]:
            v = np.log1p(y) if is_log else y
            tree = model(iterations=CATBOOST_TREES).fit(
                x.iloc[seen],
                v[seen],
                eval_set=(x.iloc[unseen], v[unseen]),
                early_stopping_rounds=40,
            )
            found = tree.predict(x.iloc[unseen])
            error = np.abs(y[unseen] - (exponential(found) if is_log else found)).mean()
            tried.append((error, Choice(max(tree.tree_count_, CATBOOST_FEWEST), is_log)))
        choice = min(tried, key=itemgetter(0))[1]
    fitted = model(iterations=choice.place).fit(x, np.log1p(y) if choice.is_log else y)
    found = fitted.predict(test)
    return Fitted(exponential(found) if choice.is_log else found, choice)


PEERS: dict[str, Peer] = {
    "training median": training_median,
    "ridge": ridge,
    "Huber": huber,
    "TF-IDF + Huber": text_huber,
    "boosting L2": boosting("squared_error"),
    "boosting L1": boosting("absolute_error"),
    "CatBoost MAE": catboost,
}
