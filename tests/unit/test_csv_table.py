"""CSV files: refused if a row is not as wide as the header, and given back as they were."""

from __future__ import annotations

import csv
import gzip
import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damaged_csv, random_csv
from _fuzz import seeds

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.regression.csv_io import read_csv  # noqa: E402
from causal_qwen.regression.table_files import read_table  # noqa: E402


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: str | bytes, name: str = "rows.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def refusal(path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises((ValueError, OSError)) as caught:
        read_csv(path)
    sentence = str(caught.value)
    assert path.name in sentence
    assert "\n" not in sentence
    return sentence


# --- widths


@pytest.mark.parametrize("rows", ["A,1,2\nB,1,870,3\nC,5,6\n", "A,1,2\nB,1,870,3"])
def test_a_row_with_an_unquoted_comma_is_refused_and_its_line_named(write: Any, rows: str) -> None:
    sentence = refusal(write(f"grade,price,size\n{rows}"))
    assert "line 3 has 4 cells and the header 3" in sentence
    assert "'B,1,870,3'" in sentence
    assert '"1,870"' in sentence  # the cure


def test_rows_that_are_all_one_cell_too_wide_are_refused(write: Any) -> None:
    """pandas takes their first column for an index."""
    assert "line 2 has 3 cells and the header 2" in refusal(write("grade,price\nA,1,870\nB,2,5\n"))


@pytest.mark.parametrize("row", ["B,1", "B", "B,1,2\nC,"])
def test_a_row_with_too_few_cells_is_refused_and_its_line_named(write: Any, row: str) -> None:
    line = 3 + row.count("\n")
    assert f"line {line} has" in refusal(write(f"grade,price,size\nA,1,2\n{row}\n"))


def test_lines_are_counted_as_editors_count_them(write: Any) -> None:
    path = write('note,price\n"two\nlines",1\n\nplain,2,3\n')
    assert "line 5 has 3 cells" in refusal(path)
    assert read_table(write('note,price\n"two\r\nlines",1\r\nplain,2\r\n')).lines == [2, 4]


# --- other formats


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("grade;price\nA;1,5\nB;2,5\n", "separated by semicolons"),
        ('"grade";"price"\n"A";"1,5"\n', "separated by semicolons"),
        ("id;price, net\n1;3,5\n", "separated by semicolons"),
        ("grade\tprice\nA\t1\n", "separated by tabs"),
        ("grade|price\nA|1\n", "separated by vertical bars"),
        ("grade,price\nA,1\n".encode("utf-16"), "UTF-8"),
        ("grade,price\nA,1\n".encode("utf-16-le"), "NUL byte"),
        (b"grade,price\nA,1\nJos\xe9,2\n", "line 3 is not UTF-8"),
        (b"grade,price\nA,1\nB\0,2\n", "line 3 has a NUL byte"),
        (b"PK\x03\x04\x14\0\0\0", "NUL byte"),
        ("grade,price\nA,1\nB,2\nC,\"3\n", "line 4 is not CSV"),
        ("grade,price\nA,1\n\"B\"b,2\n", "line 3 is not CSV"),
        ("grade,price,grade\nA,1,B\n", "two columns 'grade'"),
        ("", "empty"),
        ("\n\n", "empty"),
        ("grade,price\n", "no rows"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_comma_separated_table_is_refused_in_one_sentence(
    write: Any, content: str | bytes, message: str
) -> None:
    assert message in refusal(write(content))


def test_semicolons_inside_cells_are_no_separators(write: Any) -> None:
    frame = read_csv(write('note,price\na; b; c,1\n"d; e",2\n'))
    assert frame["note"].tolist() == ["a; b; c", "d; e"]
    assert read_csv(write('"a;b"\n1\n2\n')).columns.tolist() == ["a;b"]


def test_a_byte_order_mark_is_no_part_of_the_first_name(write: Any) -> None:
    table = read_table(write("\ufeffgrade,price\nA,1\n"))
    assert list(table.columns) == ["grade", "price"]
    assert table.header == "\ufeffgrade,price\n"


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_is_read_and_kept(write: Any, end: str) -> None:
    table = read_table(write(f"grade,price{end}A,1{end}B,2"))
    assert table.columns == {"grade": ["A", "B"], "price": ["1", "2"]}
    assert table.records == [f"A,1{end}", "B,2"]


def test_compressed_files_are_read_and_damaged_ones_refused(write: Any) -> None:
    packed = gzip.compress(b"grade,price\nA,1\n" * 1)
    assert read_csv(write(packed, "rows.csv.gz"))["price"].tolist() == [1]
    assert "decompressed" in refusal(write(packed[:-9], "cut.csv.gz"))
    assert "decompressed" in refusal(write(b"grade,price\nA,1\n", "plain.csv.gz"))


# --- values


def test_columns_of_one_kind_are_typed_as_pandas_types_them(write: Any) -> None:
    content = 'a,b,c,d,e,f\n7,1.10,,True,,x\n"8"," 2",,False,,""\n9,-3e2,0,True,,y\n'
    path = write(content)
    pd.testing.assert_frame_equal(read_csv(path), pd.read_csv(path))


def test_cells_stay_available_as_they_are_written(write: Any) -> None:
    table = read_table(write('a,b\n007,"1,870"\n1.10,NA\n,"say ""hi"""\n'))
    assert table.columns == {"a": ["007", "1.10", ""], "b": ["1,870", "NA", 'say "hi"']}


def test_an_unnamed_column_has_the_name_that_pandas_gives_it(write: Any) -> None:
    path = write(",price\n0,5\n1,6\n")
    assert read_csv(path).columns.tolist() == pd.read_csv(path).columns.tolist()


def test_empty_lines_between_rows_are_skipped_with_a_warning(write: Any) -> None:
    with pytest.warns(UserWarning, match=r"rows\.csv: lines 3 and 5 skipped"):
        table = read_table(write("a,b\n1,2\n\n3,4\n  \n5,6\n\n\n"))
    assert table.columns["a"] == ["1", "3", "5"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(read_table(write("a,b\n1,2\n\n\n"))) == 1  # after the last row


def test_an_empty_line_of_a_single_column_is_an_empty_cell(write: Any) -> None:
    assert read_table(write("text\nfirst\n\nthird\n\n")).columns["text"] == ["first", "", "third"]


@pytest.mark.parametrize("cell", ["1,870", "5 kg", "True", "1_000", "0x1A", "NA", "", "１２"])
def test_a_cell_that_is_no_plain_number_is_none(write: Any, cell: str) -> None:
    table = read_table(write(f'price\n"{cell}"\n 12 \n-3.5e2\n'))
    np.testing.assert_array_equal(table.numbers("price"), [np.nan, 12, -350])


def test_a_cell_has_the_same_value_beside_any_other_row(write: Any) -> None:
    row = '007,1.10,red,"1,46",True,12345678901234567890'
    names = "code,carat,colour,price,is_new,id"
    alone = read_table(write(f"{names}\n{row}\n")).frame()
    beside = read_table(write(f"{names}\n{row}\nabc,big,5,7,maybe,1\n")).frame()
    expected = ["007", 1.1, "red", "1,46", True, "12345678901234567890"]
    assert alone.iloc[0].tolist() == beside.iloc[0].tolist() == expected


def test_a_name_that_is_read_as_missing_is_shown(write: Any) -> None:
    table = read_table(write("colour,price\nred,1\nNA,2\n,3\n"))
    with pytest.warns(UserWarning, match=r"1 cell is read as missing: .*line 3: colour 'NA'"):
        frame = table.frame()
    assert frame["colour"].isna().tolist() == [False, True, True]


# --- many files


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:.*read as missing")
@pytest.mark.parametrize("seed", seeds(40, 400))
def test_a_valid_file_is_read_exactly(seed: int, write: Any) -> None:
    content, columns = random_csv(seed)
    table = read_table(write(content))
    assert table.columns == columns
    body = "".join([table.header, *table.records]).encode()
    assert content.startswith(body)
    assert content[len(body) :].strip() == b""  # empty lines after the last row
    assert [len(column) for column in table.frame().to_dict("list").values()] == [
        len(column) for column in columns.values()
    ]


@pytest.mark.fuzz
@pytest.mark.filterwarnings("ignore:.*read as missing")
@pytest.mark.parametrize("seed", seeds(80, 600))
@pytest.mark.filterwarnings("ignore:.*skipped, being empty")
def test_a_damaged_file_is_read_as_it_is_written_or_refused(seed: int, write: Any) -> None:
    path = write(damaged_csv(seed))
    try:
        table = read_table(path)
    except (ValueError, OSError) as error:
        table, sentence = None, str(error)
    if table is None:
        assert path.name in sentence
        assert "\n" not in sentence
        return
    text = path.read_bytes().decode("utf-8-sig")
    rows = [row for row in csv.reader(io.StringIO(text, newline=""), strict=True) if row]
    width = len(table.columns)
    assert all(len(row) == width for row in rows if "".join(row).strip() or width > 1)
    if width > 1:
        whole = [row for row in rows if len(row) == width]
        cells = [list(row) for row in zip(*table.columns.values(), strict=True)]
        assert cells == whole[1:]
    table.frame()
