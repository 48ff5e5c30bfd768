"""The regressor beside its peers: real tables, clean and with a fifth of the labels wrong.

A seed splits a table's rows 60/20/20: training, calibration, test. Test labels are always clean.
Labels of training and calibration rows are corrupted alike (`mistake`). Three ways to use them:

    whole    fitted to both, 80% of the rows. The regressor calibrates itself; peers give points
    split    fitted to the training rows, intervals by split conformal on the calibration rows
    trusted  as split, but the labels of the calibration rows are clean

A peer's interval is its point +- a conformal quantile of absolute residuals, its distribution the
point + the quantiles of residuals. The regressor is called through its public interface alone.
The continuous ranked probability score (CRPS) is twice the mean pinball loss of 19 quantiles, of
every method. Seconds are those of the processor: `fit` with all choices, and `predict`.

The best peer of a table is the one with the lowest mean over seeds on the test rows: no user could
choose it so well. Results are kept in `--keep` by table, corruption, seed, method and data, so that
a stopped run goes on where it was; delete that directory after a change of a method.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from _numbers_peers import PEERS
from _numbers_tables import ALL, POOL, WRONG, mistake
from _results import interval
from numpy.typing import NDArray

from causal_qwen import CausalTextRegressor

Array = NDArray[np.float64]
Rows = list[dict[str, Any]]

OURS = "ours"
CLEAN, MIXED = "clean", "mixed"
CONDITIONS = (CLEAN, MIXED)
WHOLE, SPLIT, TRUSTED = "whole", "split", "trusted"
LEVEL = 0.9
PROBABILITIES = np.arange(1, 20) / 20
QUICK_TABLES = ("cpus", "mariokart")
KEYS = ["table", "condition", "variant", "method"]  # of a result, beside its seed
COVERAGE_LIMIT = 0.03


# ---------------------------------------------------------------- one task


@dataclass(frozen=True)
class Task:
    """A table, split and corrupted by a seed. `given` are the labels that a user would have."""

    name: str
    condition: str
    seed: int
    frame: Any
    values: Array
    given: Array
    is_wrong: NDArray[np.bool_]
    train: NDArray[np.intp]
    calibration: NDArray[np.intp]
    test: NDArray[np.intp]

    @classmethod
    def make(cls, name: str, condition: str, seed: int, rows: int | None = None) -> Task:
        frame, values = ALL[name].read(rows)
        order = np.random.default_rng(seed).permutation(len(values))
        parts = np.split(order, [int(0.6 * len(order)), int(0.8 * len(order))])
        given, is_wrong = values.copy(), np.zeros(len(values), bool)
        for part in parts[:2] if condition != CLEAN else ():
            given[part], is_wrong[part] = mistake(values[part], condition, seed)
        return cls(name, condition, seed, frame, values, given, is_wrong, *parts)

    @property
    def whole(self) -> NDArray[np.intp]:
        return np.concatenate([self.train, self.calibration])

    def table(self, rows: NDArray[np.intp], labels: Array) -> Any:
        """The rows with the target as a last column."""
        return self.frame.iloc[rows].assign(**{ALL[self.name].target: labels[rows]})

    def key(self, **more: Any) -> dict[str, Any]:
        where = {"table": self.name, "condition": self.condition, "seed": self.seed}
        return where | {"is_text_first": ALL[self.name].is_text_first} | more

    def fingerprint(self) -> str:
        """Of all that a peer sees."""
        hashed = pd.util.hash_pandas_object(self.frame.astype(str)).to_numpy()
        parts = (hashed, self.given, self.train, self.calibration)
        return hashlib.sha256(b"".join(part.tobytes() for part in parts)).hexdigest()[:12]


def point_metrics(points: Array, truth: Array) -> dict[str, float]:
    error = np.abs(truth - points)
    return {"mdae": float(np.median(error)), "mae": float(error.mean())}


def interval_metrics(quantiles: Array, low: Array, high: Array, truth: Array) -> dict[str, float]:
    """`quantiles` at PROBABILITIES, (N, 19); the bounds of the interval of LEVEL, (N,)."""
    error = truth[:, None] - quantiles
    pinball = np.maximum(PROBABILITIES * error, (PROBABILITIES - 1) * error)
    return {
        "crps": float(2 * pinball.mean()),
        "coverage": float(((low <= truth) & (truth <= high)).mean()),
        "width": float(np.median(high - low)),
    }


def conformal_radius(residuals: Array, level: float = LEVEL) -> float:
    """The ceil((n + 1) level)-th smallest absolute residual; infinite if there are too few."""
    place = int(np.ceil((len(residuals) + 1) * level))
    return float(np.sort(np.abs(residuals))[place - 1]) if place <= len(residuals) else np.inf


# ---------------------------------------------------------------- peers


def peer_path(task: Task, peer: str, keep: Path) -> Path:
    name = f"{task.condition}-{task.seed}-{peer.replace(' ', '_')}-{task.fingerprint()}.npz"
    return keep / "peers" / task.name / name


def peer_points(task: Task, peer: str, keep: Path | None) -> dict[str, Array]:
    """Points for calibration and test rows, those of the fit to 80%, and the seconds of a row."""
    path = None if keep is None else peer_path(task, peer, keep)
    if path is not None and path.exists():
        with np.load(path) as found:
            return dict(found)
    others = task.frame.iloc[np.concatenate([task.calibration, task.test])]
    start = time.process_time()
    points, choice = PEERS[peer](task.frame.iloc[task.train], task.given[task.train], others)
    seconds = time.process_time() - start
    whole, test = task.frame.iloc[task.whole], task.frame.iloc[task.test]
    found = {
        "calibration": points[: len(task.calibration)],
        "test": points[len(task.calibration) :],
        "whole": PEERS[peer](whole, task.given[task.whole], test, choice).points,
        "seconds": np.array(seconds / len(task.train)),
    }
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")  # a stopped run leaves no half of a file
        with part.open("wb") as file:
            np.savez(file, **found)
        part.replace(path)
    return found


def measure_peer(task: Task, peer: str, keep: Path | None) -> Iterator[dict[str, Any]]:
    found = peer_points(task, peer, keep)
    truth, key = task.values[task.test], task.key(method=peer)
    times = {"seconds": float(found["seconds"])}
    yield key | {"variant": WHOLE} | point_metrics(found["whole"], truth) | times
    points = found["test"]
    for variant, labels in variants(task):
        residuals = labels[task.calibration] - found["calibration"]
        quantiles = points[:, None] + np.quantile(residuals, PROBABILITIES)
        radius = conformal_radius(residuals)
        bounds = interval_metrics(quantiles, points - radius, points + radius, truth)
        yield key | {"variant": variant} | point_metrics(points, truth) | bounds | times


def variants(task: Task) -> list[tuple[str, Array]]:
    """Ways to calibrate on rows of their own, with the labels."""
    trusted = [(TRUSTED, task.values)] if task.condition != CLEAN else []
    return [(SPLIT, task.given), *trusted]


# ---------------------------------------------------------------- ours


def new_regressor(task: Task, **options: Any) -> Any:
    return CausalTextRegressor(verbose=False, random_state=task.seed, **options)


def ours_path(task: Task, keep: Path) -> Path:
    return keep / OURS / task.name / f"{task.condition}-{task.seed}-{task.fingerprint()}.json"


def kept_ours(task: Task, keep: Path | None) -> Rows:
    """`measure_ours`, or what an earlier run has kept of it."""
    if keep is None:
        return list(measure_ours(task))
    if not (path := ours_path(task, keep)).exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps(list(measure_ours(task))), encoding="utf-8")
        part.replace(path)
    rows: Rows = json.loads(path.read_text(encoding="utf-8"))
    return rows


def measure_ours(task: Task) -> Iterator[dict[str, Any]]:
    """The first seed of a clean table reads every text anew: only its seconds are reported."""
    target, is_timed = ALL[task.name].target, task.condition == CLEAN and task.seed == 0
    start = time.process_time()
    options = {"cache": False} if is_timed else {}
    regressor = new_regressor(task, **options).fit(task.table(task.whole, task.given), target)
    row = task.key(method=OURS, variant=WHOLE) | read_ours(task, regressor)
    if is_timed:
        row["seconds"] = (time.process_time() - start) / len(task.whole)
    yield row
    if task.condition == CLEAN:  # its calibration by cross-validation is measured above
        return
    fitted = new_regressor(task).fit(task.table(task.train, task.given), target)
    for variant, labels in variants(task):
        fitted.calibrate(task.table(task.calibration, labels), target)
        yield task.key(method=OURS, variant=variant) | read_ours(task, fitted)


def read_ours(task: Task, regressor: Any) -> dict[str, float]:
    frame, truth = task.frame.iloc[task.test], task.values[task.test]
    points = np.asarray(regressor.predict(frame)).reshape(-1)
    low, high = (np.asarray(b).reshape(-1) for b in regressor.predict_interval(frame, level=LEVEL))
    quantiles = np.asarray(regressor.predict_quantiles(frame, PROBABILITIES.tolist()))
    quantiles = quantiles.reshape(len(truth), -1)
    return point_metrics(points, truth) | interval_metrics(quantiles, low, high, truth)


# ---------------------------------------------------------------- all tasks


def compare(options: argparse.Namespace, saved: Rows | None = None) -> Rows:
    """All tasks; with `--finished`, of every table the seeds that earlier runs completed.

    `saved` are means of an earlier run with the same seeds and rows: its peers are not run again.
    """
    found: Rows = [
        row | {"seed": 0, "is_text_first": ALL[row["table"]].is_text_first}
        for row in saved or ()
        if row["method"] != OURS and row["table"] in options.tables
    ]
    for name in options.tables:
        seeds: Sequence[int] = range(options.seeds)
        if options.finished:
            seeds = [seed for seed in seeds if is_finished(name, seed, options)]
        for condition in CONDITIONS if seeds else ():
            start = time.perf_counter()
            for seed in seeds:
                task = Task.make(name, condition, seed, options.rows)
                for peer in PEERS if saved is None else ():
                    found += measure_peer(task, peer, options.keep)
                found += [] if options.peers_only else kept_ours(task, options.keep)
            shown = means(found, "mdae", condition, WHOLE).loc[name]
            text = ", ".join(f"{method} {value:.4g}" for method, value in shown.items())
            print(f"{name} {condition} ({time.perf_counter() - start:.0f} s): {text}", flush=True)
    return found


def is_finished(name: str, seed: int, options: argparse.Namespace) -> bool:
    tasks = (Task.make(name, condition, seed, options.rows) for condition in CONDITIONS)
    return all(
        ours_path(task, options.keep).exists()
        and all(peer_path(task, peer, options.keep).exists() for peer in PEERS)
        for task in tasks
    )


def means(found: Rows, metric: str, condition: str, variant: str) -> Any:
    """The mean over seeds: tables x methods, in their order."""
    frame = pd.DataFrame(found).query("condition == @condition and variant == @variant")
    mean = frame.pivot_table(index="table", columns="method", values=metric, sort=False)
    return mean[[m for m in (OURS, *PEERS) if m in mean]]


# ---------------------------------------------------------------- summary


@dataclass(frozen=True)
class Ratio:
    """Ours over the best peer, per table."""

    values: Any  # a Series by table

    @property
    def geometric(self) -> list[float]:
        """[geometric mean, low, high], 95% by bootstrap of tables."""
        return [float(np.exp(x)) for x in interval(np.log(self.values.to_numpy()))]

    def worst(self) -> tuple[str, float]:
        return str(self.values.idxmax()), float(self.values.max())

    def of(self, tables: list[str]) -> Ratio:
        return Ratio(self.values[[t for t in self.values.index if t in tables]])


def ratio(
    found: Rows, metric: str, condition: str, variant: str, peers_variant: str | None = None
) -> Ratio:
    """Of `variant` of ours and of the peers (or of `peers_variant` of the peers).

    A peer whose intervals cover less than LEVEL - COVERAGE_LIMIT does not count for a width.
    """
    peers = means(found, metric, condition, peers_variant or variant).drop(
        columns=OURS, errors="ignore"
    )
    if metric == "width":
        covered = means(found, "coverage", condition, peers_variant or variant)[peers.columns]
        peers = peers.where(covered >= LEVEL - COVERAGE_LIMIT)
    return Ratio((means(found, metric, condition, variant)[OURS] / peers.min(axis=1)).dropna())


def bars(found: Rows) -> Rows:
    """Every bar: what, value, limit, whether it is met."""
    text_first = sorted({row["table"] for row in found if row["is_text_first"]})
    rows: Rows = []

    def add(bar: str, value: float, limit: float, detail: str = "", is_met: Any = None) -> None:
        met = value <= limit if is_met is None else is_met
        rows.append({"bar": bar, "value": value, "detail": detail, "limit": limit, "is_met": met})

    def add_geometric(bar: str, ratios: Ratio, limit: float) -> None:
        value, low, high = ratios.geometric
        add(bar, value, limit, f"{low:.2f} to {high:.2f}, {len(ratios.values)} tables")

    for condition, limit in ((CLEAN, 1.05), (MIXED, 0.97)):
        errors = ratio(found, "mdae", condition, WHOLE)
        add_geometric(f"{condition}: MdAE / best peer's", errors, limit)
        table, worst = errors.worst()
        add(f"{condition}: worst table", worst, 1.25, table)
        words = errors.of(text_first)
        if len(words.values):
            add_geometric(f"{condition}: MdAE / best peer's, text first", words, 1.0)
        ways = [(WHOLE, SPLIT)] + ([(TRUSTED, TRUSTED)] if condition != CLEAN else [])
        for ours, peers in ways:
            name = f"{condition}, {ours}"
            scores = ratio(found, "crps", condition, ours, peers)
            add_geometric(f"{name}: CRPS / best peer's", scores, 1.0)
            covered = means(found, "coverage", condition, ours)[OURS]
            off = float(covered.mean() - LEVEL)
            detail = f"{covered.min():.2f} ({covered.idxmin()}) to {covered.max():.2f}"
            met = abs(off) <= COVERAGE_LIMIT
            add(f"{name}: coverage - {LEVEL:.2f}", off, COVERAGE_LIMIT, detail, met)
            widths = ratio(found, "width", condition, ours, peers)
            add_geometric(f"{name}: width / best peer's", widths, 1.1)
    return rows


# ---------------------------------------------------------------- page

Markdown = Callable[..., list[str]]


def error_table(found: Rows, condition: str, markdown: Markdown, variant: str = WHOLE) -> list[str]:
    """Median absolute errors; the best peer is bold, and ours where it is no worse."""
    errors = means(found, "mdae", condition, variant)
    is_words = {row["table"]: row["is_text_first"] for row in found}
    rows = []
    for table, values in errors.iterrows():
        least = values.drop(OURS, errors="ignore").min()
        cells = [f"**{v:.4g}**" if v <= least else f"{v:.4g}" for v in values]
        last = [f"{values[OURS] / least:.2f}"] if OURS in values else [values.idxmin()]
        rows.append([f"{table} (text)" if is_words[table] else table, *cells, *last])
    title = "ours / best" if OURS in errors else "best"
    return markdown(["table", *errors.columns, title], rows)


def interval_table(found: Rows, condition: str, variant: str, markdown: Markdown) -> list[str]:
    """CRPS and width relative to the best method of each table, and coverage: over tables.

    The first row is ours as a user would have it: fitted to all rows, calibrated by itself.
    """
    crps, width, coverage = (
        means(found, metric, condition, variant) for metric in ("crps", "width", "coverage")
    )
    for metric, of_tables in (("crps", crps), ("width", width), ("coverage", coverage)):
        itself = means(found, metric, condition, WHOLE)
        if OURS in itself:
            of_tables.insert(0, f"{OURS}, {WHOLE}", itself[OURS])
    rows = []
    for method in crps:
        relative = [m[method] / m.min(axis=1) for m in (crps, width)]
        cells = [f"{np.exp(np.log(r).mean()):.2f}" for r in relative]
        covered = coverage[method]
        cells += [f"{covered.mean():.3f}", f"{covered.min():.2f} to {covered.max():.2f}"]
        rows.append([method, *cells])
    titles = ["method", "CRPS / lowest", "width / narrowest", "coverage", "of tables"]
    return markdown(titles, rows)


def time_table(found: Rows, markdown: Markdown) -> list[str]:
    seconds = means(found, "seconds", CLEAN, WHOLE) * 1000
    rows = [[m, f"{seconds[m].median():.2f}", f"{seconds[m].max():.2f}"] for m in seconds]
    return markdown(["method", "median table", "slowest table"], rows)


def page(found: Rows, checked: Rows, rows: int | None, markdown: Markdown) -> list[str]:
    tables = list(dict.fromkeys(row["table"] for row in found))
    counts = pd.DataFrame(found).groupby("table")["seed"].nunique()
    seeds = " to ".join(str(n) for n in dict.fromkeys((counts.min(), counts.max())))
    lines = [
        "## Beside peers",
        "",
        f"{len(tables)} real tables of at most {rows or POOL:,} rows, {seeds} seeds, rows split "
        "60/20/20. "
        f"In *mixed*, {WRONG:.0%} of the labels of training and calibration rows are wrong: a "
        "third tenfold, a third with the other sign, a third another row's. Test labels are clean. "
        "The best peer of a table is chosen on its test rows, which no user could do. "
        "*whole*: every method is fitted to 80% of the rows, and the regressor calibrates itself; "
        "*split*: fitted to 60%, calibrated on 20% with the same mistakes; *trusted*: calibrated "
        "on 20% with clean labels. Bars on intervals compare *whole* of ours with *split* of the "
        "peers.",
        "",
    ]
    if checked:
        met = sum(bar["is_met"] for bar in checked)
        lines += [f"**{met} of {len(checked)} bars are met.**", ""]
        cells = [
            (
                b["bar"],
                f"{b['value']:.3f}",
                b["detail"],
                b["limit"],
                "met" if b["is_met"] else "**missed**",
            )
            for b in checked
        ]
        lines += markdown(["bar", "value", "95% or range", "limit", ""], cells)
    for condition in CONDITIONS:
        lines += [f"### Median absolute error, {condition}", ""]
        lines += error_table(found, condition, markdown)
    lines += [f"Fitted to 60% ({MIXED}):", "", *error_table(found, MIXED, markdown, SPLIT)]
    for condition in CONDITIONS:
        ways = (SPLIT,) if condition == CLEAN else (SPLIT, TRUSTED)
        for variant in ways:
            lines += [f"### Intervals of 90%, {condition}, {variant}", ""]
            lines += interval_table(found, condition, variant, markdown)
    lines += ["### Processor time, milliseconds per row of fit and predict", ""]
    return lines + time_table(found, markdown)[:-1]


def averages(found: Rows) -> Rows:
    """The mean over seeds of every result, four digits: what is kept as JSON."""
    frame = pd.DataFrame(found).groupby(KEYS, sort=False, dropna=False)
    mean = frame.mean(numeric_only=True).drop(columns=["seed", "is_text_first"]).reset_index()
    return [
        {k: float(f"{v:.4g}") if isinstance(v, float) else v for k, v in row.items() if v == v}
        for row in mean.to_dict("records")
    ]
