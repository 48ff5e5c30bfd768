"""Which labels are wrong: rankings of the training rows, beside the mistakes that were made.

Precision at k: the share of truly wrong labels among the k most suspicious rows, where k is the
number of wrong labels; a random order has 20%. Every ranking has seen only the table itself.

    ours      `suspicious`
    Huber     the distance to the prediction of unseen rows, on columns and TF-IDF
    cleanlab  `CleanLearning` for regression with boosting of the absolute error

cleanlab needs `pip install '.[bench]'` in a clone. Rankings are kept in `--keep`.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _numbers_comparison import OURS, Rows, Task, new_regressor
from _numbers_peers import boosted, huber, tree_features
from _numbers_tables import ALL, MISTAKES, POOL, WRONG
from numpy.typing import NDArray
from sklearn.model_selection import KFold

from causal_qwen.terminal import counted

Order = NDArray[np.intp]
FOLDS = 5
TREES = 50


def by_huber(task: Task) -> Order:
    """The penalty is chosen once, on all rows: five choices are not worth their time."""
    frame = task.frame.iloc[task.whole]
    choice = huber(frame, task.given[task.whole], frame[:1]).choice
    return by_distance(task, lambda train, y, other: huber(train, y, other, choice).points)


def by_distance(task: Task, predict: Callable[..., Any]) -> Order:
    """Rows by the distance of their label to the prediction of a model that has not seen them."""
    frame, y = task.frame.iloc[task.whole], task.given[task.whole]
    distance = np.zeros(len(y))
    for seen, unseen in KFold(FOLDS, shuffle=True, random_state=task.seed).split(y):
        points = predict(frame.iloc[seen], y[seen], frame.iloc[unseen])
        distance[unseen] = np.abs(y[unseen] - points)
    return np.argsort(-distance, kind="stable")


def by_cleanlab(task: Task) -> Order:
    try:
        from cleanlab.regression.learn import CleanLearning
    except ModuleNotFoundError:
        raise ImportError(
            "The peer cleanlab is not installed: pip install '.[bench]' in a clone."
        ) from None
    frame, y = task.frame.iloc[task.whole], task.given[task.whole]
    x, _, places = tree_features(frame, frame[:1], is_ordinal=True)
    model = boosted("absolute_error", places).set_params(max_iter=TREES)  # fitted 80 times
    learner = CleanLearning(model, seed=task.seed)
    with warnings.catch_warnings():  # the uncertainty of a bootstrap sample without rows
        warnings.simplefilter("ignore", RuntimeWarning)
        quality = learner.find_label_issues(x, y)["label_quality"].to_numpy()
    return np.argsort(quality, kind="stable")


def by_ours(task: Task) -> Order:
    """As cross-validation saw the training rows."""
    table = task.table(task.whole, task.given).reset_index(drop=True)
    fitted = new_regressor(task).fit(table, ALL[task.name].target)
    return fitted.suspicious()["row"].to_numpy()


PEERS: dict[str, Callable[[Task], Order]] = {"Huber": by_huber, "cleanlab": by_cleanlab}
RANKINGS = {OURS: by_ours, **PEERS}


def precision(order: Order, is_wrong: NDArray[np.bool_]) -> float:
    """The share of wrong labels among the first `is_wrong.sum()` rows of `order`."""
    return float(is_wrong[order[: is_wrong.sum()]].sum() / is_wrong.sum())


def ranking(task: Task, method: str, keep: Path | None) -> Order:
    path = None
    if keep is not None:
        name = f"{task.condition}-{task.seed}-{method}-{task.fingerprint()}.npy"
        path = keep / "audit" / task.name / name
        if path.exists():
            return np.load(path)
    order = RANKINGS[method](task)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, order)
    return order


def audit(options: argparse.Namespace) -> Rows:
    methods = [*(PEERS if options.peers_only else RANKINGS)]
    found: Rows = []
    for name in options.tables:
        start = time.perf_counter()
        for kind in MISTAKES:
            for seed in range(options.seeds):
                task = Task.make(name, kind, seed, options.rows)
                for method in methods:
                    value = precision(
                        ranking(task, method, options.keep), task.is_wrong[task.whole]
                    )
                    found.append(
                        {"table": name, "mistake": kind, "seed": seed}
                        | {"method": method, "precision": value}
                    )
        mean = pd.DataFrame(found).query("table == @name").groupby("method")["precision"].mean()
        text = ", ".join(f"{method} {mean[method]:.2f}" for method in methods)
        print(f"audit of {name} ({time.perf_counter() - start:.0f} s): {text}", flush=True)
    return found


def page(found: Rows, most: int | None, markdown: Callable[..., list[str]]) -> list[str]:
    frame = pd.DataFrame(found)
    methods = list(dict.fromkeys(frame["method"]))
    mean = frame.groupby(["table", "mistake", "method"], sort=False)["precision"].mean()
    lines = [
        "## Wrong labels found",
        "",
        f"{WRONG:.0%} of the labels are wrong, of one kind or mixed: the share of them among as "
        f"many most suspicious rows (random: {WRONG:.2f}); "
        f"{frame['table'].nunique()} tables of at most {most or POOL:,} rows, "
        f"{counted(frame['seed'].nunique(), 'seed')}.",
        "",
    ]
    kinds = list(MISTAKES)
    overall = mean.groupby(["mistake", "method"]).mean()
    rows = [[m, *(f"{overall[kind, m]:.3f}" for kind in kinds)] for m in methods]
    if OURS in methods:
        best = mean.unstack("method").drop(columns=OURS).max(axis=1)
        ahead = (mean.unstack("method")[OURS] >= best).groupby("mistake").sum()
        rows.append(["ours first or tied", *(f"{ahead[kind]} tables" for kind in kinds)])
        others = overall.unstack("method")
        is_met = all((others[OURS] > others[m]).all() for m in PEERS)
        lines += [
            f"Ahead of both rankings, whatever the mistake: **{'met' if is_met else 'missed'}**.",
            "",
        ]
    lines += markdown(["ranking", *kinds], rows)
    titles = ["table", *(f"{kind}: {m}" for kind in kinds for m in methods)]
    rows = [
        [name, *(f"{mean[name, kind, m]:.2f}" for kind in kinds for m in methods)]
        for name in dict.fromkeys(frame["table"])
    ]
    return lines + markdown(titles, rows)[:-1]


def averages(found: Rows) -> Rows:
    keys = ["table", "mistake", "method"]
    mean = pd.DataFrame(found).groupby(keys, sort=False)["precision"].mean().reset_index()
    return mean.round(4).to_dict("records")
