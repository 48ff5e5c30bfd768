"""The regressor beside peers, and heads on frozen features.

    python benchmarks/bench_numbers.py [--parts tables audit texts frozen] [--quick]

tables: the regressor beside seven peers on real tables, with and without wrong labels, as a user
would call them (`_numbers_comparison`). The peers include CatBoost: `pip install '.[bench]'`.
audit: which wrong labels are found, beside Huber's residuals and cleanlab (`_numbers_audit`).
texts: the time of `fit` on 5,000 texts of 20 words (`_numbers_texts`).
frozen: five real tables as sentences, read once by the embedded model (digits as text; features are
cached on disk). Training values are corrupted, 0 to 30% of them; all others are clean. Every head
is linear in the same features, with the same optimiser, penalties and folds (ours also chooses a
noise and fits its scale apart: see `_numbers_heads`); boosting uses the raw columns.

Errors are in units of the value; widths in interquartile ranges (IQR) of clean values. Rows that
were not trained on are split at random into halves, ten times, for calibration and coverage.
"""

from __future__ import annotations

import argparse
import json
import pickle
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import _numbers_audit as audit
import _numbers_comparison as comparison
import numpy as np
import torch
from _numbers_heads import GAUSSIAN, HEADS, L1, LEVELS, MSE, OURS, REFERENCES, Data, Prediction
from _numbers_tables import ALL, TABLES, Table, corrupt
from _numbers_texts import many_texts
from _results import RESULTS, page_path, save
from numpy.typing import NDArray

from causal_qwen.conversion.convert import default_model
from causal_qwen.conversion.opening import open_model
from causal_qwen.modeling.cauchy import Cauchy
from causal_qwen.modeling.value_space import ValueSpace, fit_field
from causal_qwen.paths import cache_directory
from causal_qwen.regression.conformal import Conformal
from causal_qwen.regression.feature_cache import CACHE_FILE
from causal_qwen.regression.features import features
from causal_qwen.regression.regressor import LENGTH, CausalTextRegressor

Array = NDArray[np.float64]
Results = list[dict[str, Any]]

CLEAN = ("clean", 0.0)
CORRUPTIONS = [(kind, share) for kind in ("symmetric", "one-sided") for share in (0.1, 0.2, 0.3)]
CONDITIONS = (CLEAN, *CORRUPTIONS)
KEYS = ("table", "kind", "share", "head")  # of a result
SPLITS, DRAWS = 10, 300
SPACE = "symlog"
NEAR = 1.05  # "within 5%"
COVERAGE_LIMIT, COVERAGE_ROWS = 0.03, 500
PARTS = ("tables", "audit", "texts", "frozen")
AUDIT_SEEDS = 3  # cleanlab fits 80 models to a table


# ---------------------------------------------------------------- data and metrics


def read_features(table: Table, frame: Any, path: Path | None = None) -> torch.Tensor:
    """As `CausalTextRegressor` reads them, and in its cache."""
    processor, model = open_model(path or default_model())
    cache, texts = cache_directory() / CACHE_FILE, table.sentences(frame)
    return torch.from_numpy(features(texts, model, processor, max_length=LENGTH, cache=cache))


def make_data(
    z: torch.Tensor, frame: Any, values: Array, training: Array, test: Array, seed: int
) -> tuple[Data, ValueSpace]:
    """`values` are those of the training rows."""
    space = ValueSpace(SPACE, *fit_field(values, SPACE))
    y = space.encode(torch.from_numpy(values))
    return Data(z[training], frame.iloc[training], y, z[test], frame.iloc[test], seed), space


def decode(space: ValueSpace, y: Any) -> Array:
    return space.clamped(torch.as_tensor(np.asarray(y))).numpy()


def measure(predicted: Prediction, space: ValueSpace, values: Array, seed: int) -> dict[str, Any]:
    """All metrics of one head on rows that it was not trained on."""
    error = values - decode(space, predicted.loc)
    iqr = float(np.subtract(*np.quantile(values, (0.75, 0.25))))
    y = space.encode(torch.from_numpy(values)).numpy()
    found: dict[str, Any] = {
        "mae": float(np.abs(error).mean()),
        "mdae": float(np.median(np.abs(error))),
        "r2": float(1 - (error**2).sum() / ((values - values.mean()) ** 2).sum()),
        "crps": space.spread * predicted.crps(y),
        "errors": np.abs(error),
    }
    rng = np.random.default_rng(seed)
    halves = [np.array_split(rng.permutation(len(y)), 2) for _ in range(SPLITS)]
    for place, level in enumerate(LEVELS, start=1):
        low, high = (decode(space, bound) for bound in predicted.central(place))
        found[f"coverage_{level}"] = float(((low <= values) & (values <= high)).mean())
        found[f"width_{level}"] = float(np.median(high - low) / iqr)
        inside, widths = [], []
        for calibration, test in halves:
            low, high = calibrated(predicted, y, calibration, test, place)
            inside.append(((low <= y[test]) & (y[test] <= high)).mean())
            widths.append(np.median(decode(space, high) - decode(space, low)) / iqr)
        found[f"conformal_coverage_{level}"] = float(np.mean(inside))
        found[f"conformal_width_{level}"] = float(np.mean(widths))
    return found


def calibrated(
    predicted: Prediction, y: Array, calibration: Array, test: Array, place: int
) -> tuple[Array, Array]:
    """Conformal intervals in the head's space: by scaled residuals, or around two quantiles."""
    level = LEVELS[place - 1]
    if predicted.scale is not None:
        loc, scale = predicted.loc, predicted.scale
        y_dist = Cauchy(torch.tensor(loc[calibration]), torch.tensor(scale[calibration]))
        margin = Conformal.fit(y_dist, y[calibration]).radius(level) * scale[test]
        return loc[test] - margin, loc[test] + margin
    low, high = predicted.central(place)
    outside = np.maximum(low - y, y - high)[calibration]
    ones = torch.ones(len(outside), dtype=torch.float64)
    shift = float(-outside.min())  # a score may be negative: shifted, it is a distance
    radius = Conformal.fit(Cauchy(0 * ones, ones), outside + shift).radius(level) - shift
    return low[test] - radius, high[test] + radius


# ---------------------------------------------------------------- frozen features


def frozen(options: argparse.Namespace) -> Results:
    results: Results = []
    for name in options.tables:
        kept = None if options.keep is None else options.keep / f"{name}.pickle"
        if kept is not None and kept.exists():
            results += pickle.loads(kept.read_bytes())
            continue
        found = frozen_table(name, options)
        results += found
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(pickle.dumps(found))
    return results


def frozen_table(name: str, options: argparse.Namespace) -> Results:
    results: Results = []
    heads = HEADS if options.quick else HEADS | REFERENCES
    table = TABLES[name]
    frame, values = table.read(options.rows)
    z = read_features(table, frame, options.model)
    rows = min(table.train, len(frame) // 2)
    for kind, share in CONDITIONS[:3:2] if options.quick else CONDITIONS:
        start = time.perf_counter()
        for seed in range(options.seeds):
            rng = np.random.default_rng((seed, int(100 * share), len(kind)))
            order = np.random.default_rng(seed).permutation(len(frame))
            training, test = order[:rows], order[rows:]
            corrupted = corrupt(values[training], kind, share, rng)
            data, space = make_data(z, frame, corrupted, training, test, seed)
            for head, fit in heads.items():
                key = dict(zip(KEYS, (name, kind, share, head), strict=True))
                found = measure(fit(data), space, values[test], seed)
                results.append(key | {"seed": seed, "rows": len(test)} | found)
        shown = ", ".join(f"{h} {pooled(results, name, kind, share, h):.4g}" for h in heads)
        print(f"{name} {kind} {share} ({time.perf_counter() - start:.0f} s): {shown}", flush=True)
    return results


def select(results: Results, *key: Any) -> Results:
    return [r for r in results if tuple(r[name] for name in KEYS) == key]


def pooled(
    results: Results, table: str, kind: str, share: float, head: str, metric: str = "mdae"
) -> float:
    return float(np.mean([r[metric] for r in select(results, table, kind, share, head)]))


def unique(results: Results, *names: str) -> list[Any]:
    """The distinct values (or tuples of values) of these fields, in order."""
    found = dict.fromkeys(tuple(r[name] for name in names) for r in results)
    return [key[0] if len(names) == 1 else key for key in found]


def ratio(results: Results, table: str, kind: str, share: float, other: str) -> tuple[float, ...]:
    """MdAE of ours over another's, pooled over seeds; 95% by bootstrap of seeds and rows."""
    pair = [
        [r["errors"] for r in select(results, table, kind, share, head)] for head in (OURS, other)
    ]
    sizes = [len(errors) for errors in pair[0]]
    rng = np.random.default_rng(0)

    def of_rows(rows: list[tuple[int, Any]]) -> float:
        ours, theirs = (
            np.median(np.concatenate([errors[seed][some] for seed, some in rows]))
            for errors in pair
        )
        return float(ours / theirs)

    whole = of_rows([(seed, slice(None)) for seed in range(len(sizes))])
    draws = []
    for _ in range(DRAWS):
        seeds = rng.integers(len(sizes), size=len(sizes)).tolist()
        draws.append(of_rows([(s, rng.integers(sizes[s], size=sizes[s])) for s in seeds]))
    return whole, *np.quantile(draws, (0.025, 0.975)).tolist()


def check(results: Results) -> Results:
    """Every bar, for every table and condition."""
    bars = []
    for table in unique(results, "table"):
        for kind, share in unique(results, "kind", "share"):
            where = {"table": table, "kind": kind, "share": share}
            limits = {GAUSSIAN: NEAR} if share == 0 else {MSE: 1.0, GAUSSIAN: 1.0, L1: NEAR}
            for other, limit in limits.items():
                value, low, high = ratio(results, table, kind, share, other)
                bars.append(
                    {**where, "bar": f"MdAE / {other}", "value": value, "low": low, "high": high}
                    | {"limit": limit, "is_met": value < limit if limit == 1.0 else value <= limit}
                )
            if select(results, table, kind, share, OURS)[0]["rows"] // 2 < COVERAGE_ROWS:
                continue
            for level in LEVELS:
                metric = f"conformal_coverage_{level}"
                off = pooled(results, table, kind, share, OURS, metric) - level
                bars.append(
                    {**where, "bar": f"coverage {level}", "value": off, "low": None, "high": None}
                    | {"limit": COVERAGE_LIMIT, "is_met": abs(off) <= COVERAGE_LIMIT}
                )
    return bars


# ---------------------------------------------------------------- beyond the data, and other units


def extrapolation(options: argparse.Namespace) -> Results:
    """Trained below the 80th percentile, tested above it."""
    found = []
    for name in options.tables:
        table = TABLES[name]
        frame, values = table.read(options.rows)
        z = read_features(table, frame, options.model)
        is_low = values <= np.quantile(values, 0.8)
        training, test = np.flatnonzero(is_low)[: table.train], np.flatnonzero(~is_low)
        data, space = make_data(z, frame, values[training], training, test, 0)
        iqr = float(np.subtract(*np.quantile(values, (0.75, 0.25))))
        for head in (OURS, MSE, GAUSSIAN, L1, "boosting L2 (raw)"):
            scores = measure((HEADS | REFERENCES)[head](data), space, values[test], 0)
            metrics = {key: scores[key] for key in ("mdae", "mae", "coverage_0.9")}
            found.append({"table": name, "head": head, **metrics, "iqr": iqr})
    return found


def unit_change(options: argparse.Namespace) -> Results:
    """The error before and after all values are given in thousandths, in the old unit."""
    found = []
    for name in options.tables:
        table = TABLES[name]
        frame, values = table.read(options.rows)
        rows = min(table.train, len(frame) // 2)
        scores = []
        for factor in (1.0, 1000.0):
            regressor = CausalTextRegressor(model=options.model, units=table.units)
            regressor.fit(frame[:rows], {table.target: factor * values[:rows]})
            error = np.abs(regressor.predict(frame[rows:])[:, 0] - factor * values[rows:])
            scores.append(float(np.median(error)) / factor)
        found.append({"table": name, "before": scores[0], "after": scores[1]})
    return found


# ---------------------------------------------------------------- the page


def markdown(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table, and an empty line after it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]


def frozen_page(results: Results, bars: Results, beyond: Results, units: Results) -> list[str]:
    tables, heads = unique(results, "table"), unique(results, "head")
    conditions = unique(results, "kind", "share")
    met = sum(bar["is_met"] for bar in bars)
    lines = [
        "## Heads on frozen features",
        "",
        f"{len(tables)} tables, {len(unique(results, 'seed'))} seeds (each its own split and "
        f"corruption), values in {SPACE} space for every head. **{met} of {len(bars)} bars are "
        "met** (by estimate; intervals are given). Ours also chooses one of four noises by "
        "cross-validation and fits its scale to unseen rows; these choices were developed on the "
        "first 500 rows of diamonds and concrete, which are among the rows here.",
        "",
        "### Median absolute error",
        "",
    ]
    titles = [kind if not share else f"{kind} {share:.0%}" for kind, share in conditions]
    for table in tables:
        rows = [
            [head, *(f"{pooled(results, table, *c, head):.4g}" for c in conditions)]
            for head in heads
        ]
        lines += [f"**{table}**", "", *markdown(["head", *titles], rows)]
    lines += metrics_page(results)
    lines += ["### Bars", ""]
    titles = ["table", "corruption", "bar", "value (95%)", "limit", "met"]
    lines += markdown(titles, map(bar_cells, bars))
    lines += ["### Beyond the training values", ""]
    lines += ["Trained below the 80th percentile, tested above it; errors in IQR.", ""]
    lines += markdown(
        ["table", "head", "MdAE / IQR", "raw 90% coverage"],
        [
            (r["table"], r["head"], f"{r['mdae'] / r['iqr']:.3f}", f"{r['coverage_0.9']:.2f}")
            for r in beyond
        ],
    )
    lines += ["### Another unit (x 1000)", ""]
    rows = [[r["table"], f"{r['before']:.4g}", f"{r['after']:.4g}"] for r in units]
    return [*lines, *markdown(["table", "MdAE", "MdAE / 1000 after"], rows)[:-1]]


def bar_cells(bar: dict[str, Any]) -> list[Any]:
    if bar["low"] is None:
        value = f"{bar['value']:+.3f}"
    else:
        value = f"{bar['value']:.3f} ({bar['low']:.3f} to {bar['high']:.3f})"
    condition, met = f"{bar['kind']} {bar['share']:.0%}", "yes" if bar["is_met"] else "**no**"
    return [bar["table"], condition, bar["bar"], value, bar["limit"], met]


def metrics_page(results: Results) -> list[str]:
    """MAE, R2, CRPS and calibration, clean and at the worst symmetric corruption."""
    lines = []
    conditions = unique(results, "kind", "share")
    worst = max((c for c in conditions if c[0] != "one-sided"), key=lambda c: c[1])
    titles = [f"{what} {level:.0%}" for what in ("raw", "conformal") for level in LEVELS]
    for kind, share in dict.fromkeys((conditions[0], worst)):
        rows = []
        for table, head in unique(results, "table", "head"):
            get = partial(pooled, results, table, kind, share, head)
            cells = [f"{get(metric):.4g}" for metric in ("mae", "r2", "crps")]
            cells += [
                f"{100 * (get(f'{prefix}coverage_{level}') - level):+.1f} "
                f"({get(f'{prefix}width_{level}'):.2f})"
                for prefix in ("", "conformal_")
                for level in LEVELS
            ]
            rows.append([table, head, *cells])
        lines += [f"### All metrics, {kind} {share:.0%}", ""]
        lines += ["Coverage error in points (and median width / IQR), raw then conformal.", ""]
        lines += markdown(["table", "head", "MAE", "R²", "CRPS (symlog)", *titles], rows)
    return lines


def plot(results: Results, output: Path) -> list[str]:
    """MdAE by corruption, every table; raw and calibrated coverage of ours."""
    from matplotlib.figure import Figure

    tables = unique(results, "table")
    shares = sorted({r["share"] for r in results if r["kind"] != "one-sided"})
    figure = Figure(figsize=(3.2 * len(tables), 6), layout="constrained")
    axes = figure.subplots(2, len(tables), squeeze=False)
    for column, table in enumerate(tables):
        for head in HEADS:
            kinds = ["symmetric" if share else "clean" for share in shares]
            line = [pooled(results, table, k, s, head) for k, s in zip(kinds, shares, strict=True)]
            width = 2.5 if head == OURS else 1.0
            axes[0, column].plot(shares, line, marker=".", label=head, linewidth=width)
        axes[0, column].set(title=table, yscale="log", xlabel="share corrupted")
        for prefix, name in (("", "raw"), ("conformal_", "calibrated")):
            found = [pooled(results, table, *CLEAN, OURS, f"{prefix}coverage_{x}") for x in LEVELS]
            axes[1, column].plot(LEVELS, found, marker="o", label=name)
        axes[1, column].plot([0.5, 1], [0.5, 1], color="grey", linewidth=0.8)
        axes[1, column].set(xlabel="level", ylabel="coverage" if column == 0 else None)
    axes[0, 0].set_ylabel("median absolute error")
    for row in axes:
        row[0].legend(fontsize="x-small")
    path = output.with_suffix(".png")
    figure.savefig(path, dpi=110)
    return ["", f"![median absolute error by corruption, and coverage]({path.name})", ""]


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--tables", nargs="+", choices=list(ALL), help="All that a part has.")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=None, help="Rows of a table; 2,000 at most.")
    parser.add_argument("--keep", type=Path, help="Directory of finished tables, not run again.")
    parser.add_argument(
        "--finished", action="store_true", help="tables: only the seeds of which --keep has all."
    )
    parser.add_argument("--peers-only", action="store_true", help="tables and audit without ours.")
    parser.add_argument(
        "--saved-peers", action="store_true", help="tables: peers as on the page, ours anew."
    )
    parser.add_argument("--quick", action="store_true", help="Smoke test of some minutes.")
    parser.add_argument("--model", type=Path, default=None, help="Instead of the embedded one.")
    parser.add_argument("--output", type=page_path("numbers"), default=RESULTS / "numbers.md")
    return parser


def main() -> None:
    parser = arguments()
    options = parser.parse_args()
    if options.finished and options.keep is None:
        parser.error("--finished needs --keep, the directory of what is finished")
    if options.quick:
        options.seeds, options.rows = min(options.seeds, 2), options.rows or 300
    saved = options.output.with_suffix(".json")
    record = json.loads(saved.read_text(encoding="utf-8")) if saved.exists() else {}
    if options.saved_peers and "tables" not in record:
        parser.error(f"--saved-peers needs a page with peers; {saved} has none")
    options.record = record
    parts = {"tables": tables_part, "audit": audit_part, "frozen": frozen_part}
    parts |= {"texts": many_texts}
    for part in options.parts:
        page, found = parts[part](with_tables(options, part))
        record[part] = {"page": page, "results": found}
        lines = [
            "# Numbers: error and calibration",
            "",
            "`python benchmarks/bench_numbers.py`: 14 real tables of at most 600 rows, 5 seeds. "
            "*mixed*: 20% of the labels of training and calibration rows are wrong. The best peer "
            "of a table is chosen on its test rows. *whole*: ours calibrates itself on 80% of the "
            "rows; *trusted*: calibrated on 20% with clean labels.",
            "",
        ]
        for name in PARTS:  # the pages of other parts are kept
            lines += [*record[name]["page"], ""] if name in record else []
        save(lines, record, options.output)


def with_tables(options: argparse.Namespace, part: str) -> argparse.Namespace:
    """The options with the tables of a part where none were named."""
    every: Iterable[str] = TABLES
    if part in ("tables", "audit"):
        every = comparison.QUICK_TABLES if options.quick else ALL
    return argparse.Namespace(**vars(options) | {"tables": options.tables or list(every)})


def tables_part(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    saved = options.record["tables"]["results"]["methods"] if options.saved_peers else None
    results = comparison.compare(options, saved)
    bars = [] if options.peers_only else comparison.bars(results)
    page = comparison.page(results, bars, options.rows, markdown)
    if saved is not None:
        page[3:3] = ["", "Peers are those of an earlier run with the same rows and seeds."]
    return page, {"methods": comparison.averages(results), "bars": bars}


def audit_part(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    options.seeds = min(options.seeds, AUDIT_SEEDS)
    results = audit.audit(options)
    return audit.page(results, options.rows, markdown), {"precision": audit.averages(results)}


def frozen_part(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    results = frozen(options)
    bars = check(results)
    beyond, units = extrapolation(options), unit_change(options)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    page = [*plot(results, options.output), *frozen_page(results, bars, beyond, units)]
    metrics = [n for n, v in results[0].items() if n not in KEYS and isinstance(v, float)]
    rows = [
        dict(zip(KEYS, key, strict=True))
        | {metric: float(f"{pooled(results, *key, metric):.4g}") for metric in metrics}
        for key in unique(results, *KEYS)
    ]
    found = {"heads": rows, "bars": bars, "extrapolation": beyond, "unit_change": units}
    return page, found


if __name__ == "__main__":
    main()
