"""Local: without `--url`, a server in this process on a free port, and a regressor that it fits:
the petal length of an iris, given its other measurements."""

from __future__ import annotations

import secrets
import threading
from pathlib import Path

from causal_qwen.app.served import IRISES
from causal_qwen.conversion.convert import default_model
from causal_qwen.engines.torch import TorchEngine
from causal_qwen.regression.regressor import CausalTextRegressor, OpenModel
from causal_qwen.serving.app import make_app
from causal_qwen.serving.connections import address_of, bind, make_server
from causal_qwen.serving.service import Service
from causal_qwen.tables.iris import iris_table

HOST = "127.0.0.1"
CLOSE_SECONDS = 2  # for running requests to end
IRIS_TEMPLATE = (
    "An iris {species} has sepals {sepal length} cm long and {sepal width} cm wide, and petals "
    "{petal width} cm wide. The petal length in cm is"
)
ROWS = 90


class LocalServer:
    def __init__(self, model: str, device: str) -> None:
        path = model or str(default_model(lambda step: print(f"{step} ...", flush=True)))
        backend = TorchEngine.open(path, device)
        regressors = {IRISES: lambda: fit_irises(OpenModel(backend.processor, backend.model))}
        self.service = Service(backend, Path(path).name, regressors=regressors)
        self.key = secrets.token_urlsafe()

    def __enter__(self) -> LocalServer:
        bound = bind(HOST, 0)
        self.url = address_of(HOST, bound)
        self._server = make_server(make_app(self.service, key=self.key), CLOSE_SECONDS)
        self._thread = threading.Thread(target=self._server.run, args=([bound],), name="server")
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self.service.close()


def fit_irises(opened: OpenModel) -> CausalTextRegressor:
    """A regressor of Fisher's irises as sentences; its features are cached on disk."""
    frame = iris_table()[:ROWS]
    texts = [IRIS_TEMPLATE.format(**row) for row in frame.to_dict("records")]
    regressor = CausalTextRegressor(model=opened, sources=["model"], verbose=False)
    return regressor.fit(texts, frame["petal length"].to_numpy())
