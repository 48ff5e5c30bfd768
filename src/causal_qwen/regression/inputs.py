"""Inputs: X and y as users give them -> the rows of a regressor, as `fit` has seen them.

    known_table     X      -> a DataFrame if it has columns, else texts
    known_frame     table  -> the columns of `fit`; texts are one column
    known_targets   y      -> the targets of `fit`, in its order
    to_sentences    table  -> a sentence per row, for the language model alone
    source_texts    frame  -> the text columns, for the language model beside other sources

A regressor of texts has no columns: its `columns_` is None.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from sklearn.utils.validation import check_is_fitted

from causal_qwen.regression import sentences
from causal_qwen.regression.sentences import (
    UNKNOWN,
    ask_for,
    join_sentences,
    read_texts,
    text_names,
)
from causal_qwen.tables.frames import is_tabular, require_pandas, to_frame
from causal_qwen.tables.rows import TEXT, is_table, require_columns
from causal_qwen.tables.targets import read_targets
from causal_qwen.terminal import counted

if TYPE_CHECKING:
    from causal_qwen.regression.regressor import CausalTextRegressor

Array = NDArray[np.float64]


def as_table(X: Any) -> Any:
    """A DataFrame, if X has columns; texts as they are."""
    return to_frame(X) if is_tabular(X) else X


def known_table(regressor: CausalTextRegressor, X: Any) -> Any:
    """`as_table`; the columns of an array have no names, so they are counted."""
    check_is_fitted(regressor, "targets_")
    if regressor.columns_ is not None and _is_row(X):
        X = require_pandas().DataFrame([dict(X)])
    table = as_table(X)
    if regressor.columns_ is None or not (isinstance(X, np.ndarray) and is_table(table)):
        return table
    has_target = any(name in table.columns for name in regressor.targets_)
    if len(table.columns) != regressor.n_features_in_ and not has_target:
        raise ValueError(
            f"X has {len(table.columns)} features, but {type(regressor).__name__} is expecting "
            f"{regressor.n_features_in_} features as input."
        )
    return table


def _is_row(X: Any) -> bool:
    """Whether X is one row of a table: a Series, or a dict of values that are no columns."""
    if isinstance(X, dict):
        return all(np.ndim(value) == 0 for value in X.values())
    return hasattr(X, "index") and getattr(X, "ndim", 2) == 1


def known_frame(regressor: CausalTextRegressor, X: Any) -> Any:
    """The columns that were seen in fit; texts are one column. Those that only name rows may be
    missing."""
    if regressor.columns_ is None:
        return require_pandas().DataFrame({TEXT: read_texts(X)})
    if not is_table(X):
        raise ValueError("X is not a table; give one with the columns seen in fit.")
    needed = regressor.columns_
    if regressor.source_ is not None:
        schema = regressor.source_.table.schema
        used = {*schema.numbers, *schema.categories, *schema.texts}
        needed = [name for name in needed if name in used]
    require_columns(X, needed)
    return X.reindex(columns=regressor.columns_)


def frame_to_input(regressor: CausalTextRegressor, frame: Any) -> Any:
    """A `known_frame` in the form that `predict` takes: of a regressor of texts, the texts."""
    return frame[TEXT].tolist() if regressor.columns_ is None else frame


def known_targets(regressor: CausalTextRegressor, X: Any, y: Any) -> dict[str, Array]:
    """The values of the targets of `fit`, in its order: by their names, or by their places if
    no name is that of a target."""
    values, _ = read_targets(X, y)
    known = regressor.targets_
    names = ", ".join(known)
    if len(values) != len(known):
        raise ValueError(f"y has {counted(len(values), 'target')}; give those of fit: {names}.")
    if values.keys() == known.keys():
        return {name: values[name] for name in known}
    if len(values) > 1 and values.keys() & known.keys():
        raise ValueError(f"y has {', '.join(values)}; give the targets of fit: {names}.")
    return dict(zip(known, values.values(), strict=True))


def take_rows(X: Any, is_taken: NDArray[np.bool_]) -> Any:
    if is_table(X):
        return X[is_taken]
    return [text for text, taken in zip(read_texts(X), is_taken, strict=True) if taken]


# ---------------------------------------------------------------- columns


def choose_columns(
    regressor: CausalTextRegressor, X: Any, targets: Sequence[str]
) -> list[Any] | None:
    """The columns to learn from, None for texts; those without any value are dropped."""
    texts = text_names(regressor.text)
    if not is_table(X):
        if regressor.template is not None or regressor.text is not None:
            raise ValueError("template and text are for tables, and X holds texts; drop them.")
        return None
    columns = sentences.used_columns(X, template=regressor.template, without=targets)
    if regressor.columns is not None:
        require_columns(X, regressor.columns)
        wanted = {*regressor.columns, *texts}
        columns = [column for column in columns if column in wanted]
    require_columns(X, texts)
    if not len(X):
        return columns
    empty = sentences.empty_columns(X, columns)
    if empty_texts := [column for column in empty if column in texts]:
        raise ValueError(f"the text column {empty_texts[0]!r} is empty; name a column with values.")
    if empty:
        names = ", ".join(map(repr, empty))
        what = "without values"
        columns_are = counted(len(empty), f"column {what} is", f"columns {what} are")
        warnings.warn(f"{columns_are} dropped: {names}.", stacklevel=3)
    kept = [column for column in columns if column not in empty or regressor.template is not None]
    if not kept:
        raise ValueError("the table has no column with values beside its targets.")
    return kept


def name_features(regressor: CausalTextRegressor) -> None:
    """Set scikit-learn's own attributes; texts are one feature without a name."""
    columns = regressor.columns_
    regressor.__dict__.pop("feature_names_in_", None)
    regressor.n_features_in_ = 1 if columns is None else len(columns)
    if columns is not None:
        regressor.feature_names_in_ = np.array(columns, dtype=object)


# ---------------------------------------------------------------- texts


def describe_rows(regressor: CausalTextRegressor, X: Any, targets: Sequence[str]) -> list[str]:
    """The sentence of every row; for several sources any text, "" where a row has no value."""
    if regressor.reads_sentences():
        return to_sentences(regressor, X, targets)
    if regressor.columns_ is None:
        return read_texts(X)
    has_value = known_frame(regressor, X).notna().any(axis=1)
    return ["row" if has else "" for has in has_value]


def to_sentences(regressor: CausalTextRegressor, X: Any, targets: Sequence[str]) -> list[str]:
    """A sentence for every row, which ends with the question."""
    question = regressor.question
    if question is None:
        is_asked = regressor.template or _asks_each(regressor)
        question = "" if is_asked else ask_for(targets)
    if regressor.columns_ is None:
        texts = read_texts(X)
        return [join_sentences(text, question) if text.strip() else "" for text in texts]
    if not is_table(X):
        raise ValueError("X is not a DataFrame; give one with the columns seen in fit.")
    return sentences.to_sentences(
        X,
        regressor.columns_,
        template=regressor.template,
        text=text_names(regressor.text),
        units=regressor.units,
        question=question,
    )


def ask_target(regressor: CausalTextRegressor, texts: list[str], name: str) -> list[str]:
    """The sentences with the question for one target, if one model predicts several."""
    if not _asks_each(regressor):
        return texts
    return [join_sentences(text, ask_for([name])) for text in texts]


def _asks_each(regressor: CausalTextRegressor) -> bool:
    """Whether one model predicts several targets, distinguished by the question."""
    return regressor.backbone != "frozen" and not regressor.is_single_


def source_texts(regressor: CausalTextRegressor, frame: Any) -> list[str]:
    """The text columns of every row, which the language model reads beside other sources."""
    columns = regressor.text_columns_
    if regressor.columns_ is None:
        texts: list[str] = frame[TEXT].tolist()
        return texts
    is_text = columns if columns != regressor.columns_ else ()
    made = sentences.to_sentences(frame, columns, text=is_text, units=regressor.units)
    return [text or UNKNOWN for text in made]
