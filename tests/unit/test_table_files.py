"""Parquet, Excel and JSON files: read with their types, written with predictions beside them."""

from __future__ import annotations

import datetime
import gzip
import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damage_bytes

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.tables.files import (  # noqa: E402
    Table,
    read_records,
    read_table,
    write_table,
)

PREDICTED = {"price_predicted": np.array([1.5, 2.5]), "price_high": np.array([np.inf, 3.0])}
COLUMNS = {"code": ["007", "NA"], "carat": [0.5, 2.0], "price": ["$1,200", "900"]}


def parquet() -> Any:
    return pytest.importorskip("pyarrow.parquet", reason="the test writes a parquet file")


def excel() -> Any:
    return pytest.importorskip("openpyxl", reason="the test writes an Excel file")


def read_frame(path: Path) -> Any:
    return read_table(path).frame().reset_index(drop=True)


def beside(table: Table, **columns: Any) -> Table:
    return replace(table, cells=table.cells.assign(**columns))


def made(path: Path) -> Path:
    """A file of COLUMNS, of the kind that its extension says."""
    if path.suffix == ".parquet":
        import pyarrow

        parquet().write_table(pyarrow.table(COLUMNS), path)
    elif path.suffix == ".xlsx":
        book = excel().Workbook()
        for row in (list(COLUMNS), *zip(*COLUMNS.values(), strict=True)):
            book.active.append(list(row))
        book.save(path)
    else:
        rows = [dict(zip(COLUMNS, row, strict=True)) for row in zip(*COLUMNS.values(), strict=True)]
        texts = [json.dumps(row) for row in rows]
        path.write_text(f"[{','.join(texts)}]" if path.suffix == ".json" else "\n".join(texts))
    return path


NAMES = ["rows.parquet", "rows.xlsx", "rows.jsonl", "rows.json"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("other", [*NAMES, "rows.csv", "rows.csv.gz"])
def test_predictions_are_written_in_the_kind_of_the_output(
    name: str, other: str, tmp_path: Path
) -> None:
    if "parquet" in name + other:
        parquet()
    if "xlsx" in other:
        excel()
    table = beside(read_table(made(tmp_path / name)), **PREDICTED)
    place = tmp_path / "partial"
    write_table(table, place, tmp_path / f"out-{other}")
    written = place.rename(tmp_path / f"out-{other}")
    if other == "rows.csv.gz":
        assert gzip.decompress(written.read_bytes()).startswith(b"code,carat,price,")
    frame = read_table(written).frame().reset_index(drop=True)
    assert frame.columns.tolist() == [*COLUMNS, *PREDICTED]
    assert frame["carat"].tolist() == [0.5, 2.0]
    assert frame["price"].tolist()[0] == "$1,200"
    assert frame["price_predicted"].tolist() == [1.5, 2.5]
    high = pd.to_numeric(frame["price_high"]).tolist()
    assert high[1] == 3.0
    assert np.isnan(high[0]) if "json" in other else high[0] == np.inf


def test_lists_and_dates_of_parquet_are_read_as_one_text_and_as_dates(tmp_path: Path) -> None:
    pq = parquet()
    import pyarrow as pa

    columns = {
        "when": pa.array([datetime.date(2024, 5, 1), None]),
        "tags": pa.array([["red", "blue"], []]),
    }
    pq.write_table(pa.table(columns), tmp_path / "rows.parquet")
    table = read_table(tmp_path / "rows.parquet")
    assert table.frame()["tags"].tolist() == ["red, blue", ""]
    assert table.records()[0]["when"] == "2024-05-01"
    records = list(read_records(tmp_path / "rows.parquet"))
    assert records[0] == (0, {"when": datetime.date(2024, 5, 1), "tags": ["red", "blue"]})


def test_objects_of_json_are_kept_as_they_are(tmp_path: Path) -> None:
    text = '{"b": 7, "a": ["caf\\u00e9"]}\n\n{ "a":"x" , "c":null }\n'
    (tmp_path / "rows.jsonl").write_text(text)
    table = beside(read_table(tmp_path / "rows.jsonl"), p=np.array([1.5, np.inf]))
    assert table.cells.index.tolist() == [1, 3]
    assert table.records() == [
        {"b": 7, "a": ["café"], "c": None, "p": 1.5},
        {"b": None, "a": "x", "c": None, "p": None},
    ]
    assert list(read_records(tmp_path / "rows.jsonl")) == [
        (1, {"b": 7, "a": ["café"]}),
        (3, {"a": "x", "c": None}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.jsonl", '{"a": 1}\n{"a": }\n', "line 2 is no JSON object"),
        ("rows.jsonl", '{"a": 1}\n[1]\n', "line 2 is no JSON object"),
        ("rows.jsonl", "\n", "no rows"),
        ("rows.json", '{"a": 1}', "list of objects"),
        ("rows.json", "[1, 2]", "list of objects"),
        ("rows.json", "[]", "no rows"),
        ("rows.parquet", "no parquet", "cannot be read as parquet"),
        ("rows.xlsx", "no sheet", "cannot be read as Excel"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    name: str, content: str, message: str, tmp_path: Path
) -> None:
    if name.endswith("parquet"):
        parquet()
    if name.endswith("xlsx"):
        excel()
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_frame(tmp_path / name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", [*NAMES, "rows.csv.gz"])
def test_a_file_with_damaged_bytes_is_named_or_read(name: str, tmp_path: Path) -> None:
    """Whatever its reader raises: zip, XML, Arrow and JSON have many kinds of errors."""
    if name.endswith("gz"):
        content = gzip.compress(b"code,carat\n" + b"007,0.5\nNA,2.0\n" * 50)
    else:
        content = made(tmp_path / name).read_bytes()
    refused = 0
    for seed in range(40):
        (tmp_path / name).write_bytes(damage_bytes(content, seed))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                read_table(tmp_path / name).frame()
            except ValueError as error:
                refused += 1
                message = str(error)
                named = name in message and "\n" not in message
            else:
                named = True
        assert named, (seed, message)
    assert refused > 10


def test_an_index_of_pandas_is_a_column_and_empty_cells_of_a_sheet_are_missing(
    tmp_path: Path,
) -> None:
    frame = pd.DataFrame({"shop": ["a", "b"], "price": [1.5, 2.5]}).set_index("shop")
    parquet()
    frame.to_parquet(tmp_path / "rows.parquet")
    assert list(read_table(tmp_path / "rows.parquet").cells) == ["price", "shop"]
    excel()
    given = pd.DataFrame({"code": ["007", "NA", None], "n": [1, None, 3], "x": [0.5, 1.5, 2.5]})
    given["when"] = pd.to_datetime(["2024-05-01", "2024-05-02", None])
    given.to_excel(tmp_path / "rows.xlsx", index=False)
    found = read_frame(tmp_path / "rows.xlsx")
    assert found["code"].tolist()[:2] == ["007", "NA"]
    assert found.isna().sum().to_dict() == {"code": 1, "n": 1, "x": 0, "when": 1}
    assert found["n"].dtype == found["x"].dtype == np.float64
    assert str(found["when"].dtype).startswith("datetime64")
