"""Seeds of the fuzz tests: few and fixed by default; `make fuzz` gives many, fixed and fresh.

FUZZ        set: as many cases as a fuzz test names for `make fuzz`
FUZZ_SEED   the first seed; a failure is repeated with the same one
"""

from __future__ import annotations

import os
from collections import Counter
from typing import Any

IS_ON = bool(os.environ.get("FUZZ"))
FIRST = int(os.environ.get("FUZZ_SEED", "0"))


def seeds(few: int, many: int) -> range:
    """Seeds of the default tier, or of `make fuzz`."""
    return range(FIRST, FIRST + (many if IS_ON else few))


def summary(reports: dict[str, list[Any]]) -> list[str]:
    """A table of fuzz tests: cases and failures; a test that tries many records how many."""
    cases: Counter[str] = Counter()
    failures: Counter[str] = Counter()
    for outcome in ("passed", "failed"):
        for report in reports.get(outcome, []):
            if report.when == "call" and "fuzz" in report.keywords:
                name = report.nodeid.split("::")[-1].split("[")[0].removeprefix("test_")
                cases[name] += dict(report.user_properties).get("cases", 1)
                failures[name] += outcome == "failed"
    rows = [f"{count:>9,}  {failures[name]:>8}  {name}" for name, count in cases.items()]
    total = f"{sum(cases.values()):>9,}  {sum(failures.values()):>8}  in all"
    return ["    cases  failures  law", *rows, total]
