"""The regressor beside peers.

    python benchmarks/bench_numbers.py [--parts tables audit texts] [--quick]

tables: the regressor beside seven peers on real tables, with and without wrong labels, as a user
would call them (`_numbers_comparison`). The peers include CatBoost: `pip install '.[bench]'`.
audit: which wrong labels are found, beside Huber's residuals and cleanlab (`_numbers_audit`).
texts: the time of `fit` on 5,000 texts of 20 words (`_numbers_texts`).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import _numbers_audit as audit
import _numbers_comparison as comparison
from _numbers_tables import ALL
from _numbers_texts import many_texts
from _results import RESULTS, page_path, save

PARTS = ("tables", "audit", "texts")
AUDIT_SEEDS = 3  # cleanlab fits 80 models to a table


def markdown(titles: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A table, and an empty line after it."""
    lines = [titles, ["---"] * len(titles), *rows]
    return [*(f"| {' | '.join(map(str, cells))} |" for cells in lines), ""]


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
    parts = {"tables": tables_part, "audit": audit_part, "texts": many_texts}
    options.tables = options.tables or list(comparison.QUICK_TABLES if options.quick else ALL)
    for part in options.parts:
        page, found = parts[part](options)
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


def tables_part(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    saved = options.record["tables"]["results"]["methods"] if options.saved_peers else None
    results = comparison.compare(options, saved)
    bars = [] if options.peers_only else comparison.bars(results)
    page = comparison.page(results, bars, options.rows, markdown)
    if saved is not None:
        page[3:3] = ["", "Peers are those of an earlier run with the same rows and seeds."]
    return page, {"methods": comparison.averages(results), "bars": bars}


def audit_part(options: argparse.Namespace) -> tuple[list[str], dict[str, Any]]:
    few = argparse.Namespace(**vars(options) | {"seeds": min(options.seeds, AUDIT_SEEDS)})
    results = audit.audit(few)
    return audit.page(results, options.rows, markdown), {"precision": audit.averages(results)}


if __name__ == "__main__":
    main()
