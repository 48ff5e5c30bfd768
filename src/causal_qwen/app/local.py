"""Local: without `--url`, a server in this process on a free port, and regressors that it opens.

The number head of a freshly converted model is random, so the tab of numbers begins with a
`CausalTextRegressor` that is fitted on a real table: the petal length of an iris, given its other
measurements. Directories of `causal-qwen fit` are opened beside it.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

from causal_qwen.conversion.convert import default_model
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
from causal_qwen.regression.sentences import to_sentences
from causal_qwen.serving.analyses import open_regressor
from causal_qwen.serving.app import make_app
from causal_qwen.serving.connections import address_of, bind, make_server
from causal_qwen.serving.service import Service
from causal_qwen.tables.cells import is_missing
from causal_qwen.tables.iris import iris_table

HOST = "127.0.0.1"
CLOSE_SECONDS = 2  # seconds for running requests to end
IRISES = "petal length of an iris, in cm"
IRIS_COLUMNS = ["species", "sepal length", "sepal width", "petal width"]
IRIS_TEMPLATE = (
    "An iris {species} has sepals {sepal length} cm long and {sepal width} cm wide, and petals "
    "{petal width} cm wide. The petal length in cm is"
)
FIT_ROWS, CALIBRATION_ROWS = 60, 30


class Opened(NamedTuple):
    """A regressor of this process: its name on the server, a note and a text to begin with."""

    name: str  # "" is the model's own head
    note: str
    example: str = ""


class LocalServer:
    IRISES = IRISES  # a name for the page, which does not import this module

    def __init__(self, model: str, device: str, individuals: Path) -> None:
        path = model or str(default_model(lambda step: print(f"{step} ...", flush=True)))
        self.backend = TorchEngine.open(path, device)
        self.service = Service(self.backend, Path(path).name, individuals)
        self.key = secrets.token_urlsafe()
        self._irises: Opened | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> LocalServer:
        bound = bind(HOST, 0)
        self.url = address_of(HOST, bound)
        app = make_app(self.service, key=self.key)
        self._server = make_server(app, CLOSE_SECONDS)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), name="server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.service.close()

    def open(self, name: str) -> Opened:
        """The irises, the model's own head (""), or a directory of `causal-qwen fit`."""
        if name == IRISES:
            return self._open_irises()
        if name:
            return self._open_directory(name)
        if self.backend.model.config.encode_numbers != "value":
            raise ValueError(
                "This model was not trained on values, so its number head is random; train one "
                "with causal-qwen train --numbers value."
            )
        return Opened("", "The model's own number head: uncalibrated Cauchy intervals.")

    def _open_directory(self, path: str) -> Opened:
        """Read anew."""
        self.service.regressors[path] = Path(path).expanduser()
        self.service.opened.pop(path, None)
        try:
            regressor = open_regressor(self.service, path)
        except (OSError, ValueError):
            del self.service.regressors[path]
            raise
        target = next(iter(regressor.targets_.values()))
        kind = "uncalibrated Cauchy" if target.conformal is None else "calibrated"
        note = f"{path}: {kind} intervals."
        if regressor.columns_ is None:
            return Opened(path, note)
        if regressor.source_ is None:  # asked with sentences
            unknown = DataFrame([dict.fromkeys(regressor.columns_)])
            return Opened(path, note, regressor.sentences(unknown)[0])
        lines = write_lines(regressor.baseline_, regressor.columns_)
        return Opened(path, f"{note} A line for every column.", lines)

    def _open_irises(self) -> Opened:
        """Fitted once for all visitors; its features are cached on disk."""
        with self._lock:
            if self._irises is None:
                regressor, self._irises = fit_irises(
                    OpenModel(self.backend.processor, self.backend.model)
                )
                self.service.opened[IRISES] = regressor
                self.service.regressors[IRISES] = Path(IRISES)  # of no directory: it is open
        return self._irises


def fit_irises(opened: OpenModel) -> tuple[CausalTextRegressor, Opened]:
    """A regressor of Fisher's irises as sentences, and its error on rows that calibrate it."""
    frame = iris_table()[: FIT_ROWS + CALIBRATION_ROWS]
    texts = to_sentences(frame, IRIS_COLUMNS, template=IRIS_TEMPLATE)
    lengths = frame["petal length"].to_numpy()
    regressor = CausalTextRegressor(
        model=opened, sources=["model"], verbose=False, question="", value_space="symlog"
    )
    regressor.fit(texts[:FIT_ROWS], lengths[:FIT_ROWS])
    regressor.calibrate(texts[FIT_ROWS:], lengths[FIT_ROWS:])
    error = np.median(np.abs(regressor.predict(texts[FIT_ROWS:]) - lengths[FIT_ROWS:]))
    note = (
        f"Fitted on {FIT_ROWS} irises; intervals calibrated on {CALIBRATION_ROWS} others, where "
        f"the median error is {error:.2f} cm."
    )
    return regressor, Opened(IRISES, note, texts[0])


def write_lines(row: Any, columns: Sequence[str]) -> str:
    """A table of one row as lines, "carat = 0.9"; nothing after the sign where a cell is empty."""
    cells = {name: " ".join(str(row[name].iloc[0]).split()) for name in columns}
    return "\n".join(
        f"{name} = {'' if is_missing(cell) else cell}".rstrip() for name, cell in cells.items()
    )
