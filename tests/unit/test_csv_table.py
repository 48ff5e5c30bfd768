"""CSV files: read as they are written, refused if a row is not as wide as the header."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from _damage_tables import damaged_csv, random_csv
from _fuzz import seeds

pd = pytest.importorskip("pandas")
pytest.importorskip("sklearn")

from causal_qwen.tables.files import read_table  # noqa: E402


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: str | bytes, name: str = "rows.csv") -> Path:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return write


def read_frame(path: Path) -> Any:
    return read_table(path).frame().reset_index(drop=True)


def cells(table: Any) -> dict[str, list[str]]:
    """As they are written."""
    found: dict[str, list[str]] = table.cells.to_dict("list")
    return found


def refusal(path: Path) -> str:
    """The one sentence with which a file is refused."""
    with pytest.raises((ValueError, OSError)) as caught:
        read_frame(path)
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


@pytest.mark.parametrize("row", ["B,1", "B", "B,1,2\nC,"])
def test_a_row_with_too_few_cells_is_refused_and_its_line_named(write: Any, row: str) -> None:
    line = 3 + row.count("\n")
    assert f"line {line} has" in refusal(write(f"grade,price,size\nA,1,2\n{row}\n"))


def test_lines_are_counted_as_editors_count_them(write: Any) -> None:
    path = write('note,price\n"two\nlines",1\n\nplain,2,3\n')
    assert "line 5 has 3 cells" in refusal(path)
    assert read_table(
        write('note,price\n"two\r\nlines",1\r\nplain,2\r\n')
    ).cells.index.tolist() == [2, 4]


# --- other formats


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"grade,price\nA,1\nJos\xe9,2\n", "is not UTF-8"),
        ("grade;price\nA;1\nB;2;3\n", "quote a cell that contains the separator"),
        ("grade,price\nA,1\nB,2\nC,\"3\n", "line 4 is not CSV"),
        ("grade,price\nA,1\n\"B\"b,2\n", "line 3 is not CSV"),
        ("grade,price,grade\nA,1,B\n", "two columns 'grade'"),
        ("", "empty"),
        ("\n\n", "empty"),
        ("grade,price\n", "no rows"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_table_is_refused_in_one_sentence(
    write: Any, content: str | bytes, message: str
) -> None:
    assert message in refusal(write(content))


@pytest.mark.parametrize("mark", [";", "\t", "|", ","])
@pytest.mark.parametrize("quoted", [True, False])
def test_the_separator_is_found(write: Any, mark: str, quoted: bool) -> None:
    rows = [["grade", "price", "note"], ["A", "1", "x y"], ["B", "2", ""]]
    written = [[f'"{cell}"' if quoted else cell for cell in row] for row in rows]
    table = read_table(write("\n".join(map(mark.join, written))))
    assert table.separator == mark
    assert list(table.cells) == rows[0]
    assert table.cells["note"].tolist() == ["x y", ""]


def test_another_encoding_is_named_by_the_user_after_an_error_that_names_it(write: Any) -> None:
    path = write("nom,prix\nJosé,1\n".encode("cp1252"))
    assert "--set encoding=cp1252" in refusal(path)
    assert read_table(path, encoding="cp1252").cells["nom"].tolist() == ["José"]
    wide = write("名称;价格\n戒指;1\n".encode("utf-16"), "wide.csv")
    assert "is not UTF-8; name its encoding" in refusal(wide)
    assert list(read_table(wide, encoding="utf-16").cells) == ["名称", "价格"]
    with pytest.raises(ValueError, match="unknown encoding: latin-99"):
        read_table(path, encoding="latin-99")
    assert list(read_table(write("nom\nx\n".encode("utf-8-sig"))).cells) == ["nom"]


# --- decimal commas


def test_a_file_with_semicolons_has_decimal_commas(write: Any) -> None:
    table = read_table(write("a;b;c;d\n1,5;1.234,50 €;007;1.500\n-0,25;12 €;x, y;3\n"))
    assert table.decimal == ","
    frame = table.frame()
    assert frame["a"].tolist() == [1.5, -0.25]
    assert frame["b"].tolist() == ["1234.50 €", "12 €"]
    assert frame["c"].tolist() == ["007", "x, y"]
    assert frame["d"].tolist() == [1500, 3]
    assert table.cells["a"].tolist() == ["1,5", "-0,25"]
    with pytest.warns(UserWarning, match=r"b: 2 cells such as '1\.234,50 €' .* \(1234\.5\)"):
        np.testing.assert_array_equal(table.numbers("b"), [1234.5, 12])


@pytest.mark.parametrize(
    ("content", "decimal", "value"),
    [
        ("a;b\n1,234;x\n", ",", 1.234),  # as spreadsheets write it
        ("a;b\n1,234;0.5\n", ".", "1,234"),
        ("a;b\n1,234;0,5\n", ",", 1.234),
        ("a\tb\n1,234\t5\n", ".", "1,234"),
        ("a\tb\n1,234\t0,5\n", ",", 1.234),
        ('a,b\n"1,5",x\n', ".", "1,5"),
    ],
)
def test_certain_cells_decide_the_decimal_mark(
    write: Any, content: str, decimal: str, value: Any
) -> None:
    table = read_table(write(content))
    assert table.decimal == decimal
    assert table.frame()["a"].tolist() == [value]


def test_the_decimal_mark_can_be_named(write: Any) -> None:
    path = write("a;b\n1,5;1.5\n")
    frame = read_table(path, decimal=",").frame()
    assert frame.iloc[0].tolist() == [1.5, "1.5"]
    frame = read_table(path, decimal=".").frame()
    assert frame.iloc[0].tolist() == ["1,5", 1.5]
    with pytest.raises(ValueError, match="decimal 'x'"):
        read_table(path, decimal="x")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a;b\r\n1,5;x\r\n", "a;b;p;q r\n1,5;x;0,5;inf\n"),
        ("a|b\n x|1.50", "a|b|p|q r\n x|1.50|0.5|inf\n"),
        ("a\tb\nx\t1\n", "a\tb\tp\tq r\nx\t1\t0.5\tinf\n"),
        ('\ufeffa,b\n"x,y",007\n', 'a,b,p,q r\n"x,y",007,0.5,inf\n'),
    ],
)
def test_predicted_cells_are_appended_as_the_file_is_written(
    write: Any, content: str, expected: str
) -> None:
    predicted = {"p": np.array([0.5]), "q r": np.array([np.inf])}
    table = read_table(write(content))
    table = replace(table, cells=table.cells.assign(**predicted))
    assert table.csv().decode() == expected


# --- cells and lines


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_every_line_end_is_read(write: Any, end: str) -> None:
    table = read_table(write(f"grade,price{end}A,1{end}B,2"))
    assert cells(table) == {"grade": ["A", "B"], "price": ["1", "2"]}


# --- values


@pytest.mark.parametrize("cell", ["1,870", "$1,870", "1,870 €"])
def test_an_amount_is_a_number_and_a_warning_shows_it(write: Any, cell: str) -> None:
    table = read_table(write(f'price\n"{cell}"\n 12 \n007\n'))
    with pytest.warns(UserWarning, match=r"price: 1 cell .*1,870.* \(1870\)"):
        np.testing.assert_array_equal(table.numbers("price"), [1870, 12, 7])


# --- many files


@pytest.mark.fuzz
def test_a_valid_file_is_read_exactly(write: Any, record_property: Any) -> None:
    cases = seeds(40, 400)
    record_property("cases", len(cases))
    for seed in cases:
        content, columns = random_csv(seed)
        table = read_table(write(content))
        assert cells(table) == columns
        assert [len(column) for column in table.frame().to_dict("list").values()] == [
            len(column) for column in columns.values()
        ]


@pytest.mark.fuzz
def test_a_damaged_file_is_read_as_it_is_written_or_refused(
    write: Any, record_property: Any
) -> None:
    cases = seeds(80, 600)
    record_property("cases", len(cases))
    for seed in cases:
        path = write(damaged_csv(seed))
        try:
            table = read_table(path)
        except (ValueError, OSError) as error:
            table, sentence = None, str(error)
        if table is None:
            assert path.name in sentence
            assert "\n" not in sentence
            continue
        text = path.read_bytes().decode().removeprefix("\ufeff")
        lines = io.StringIO(text, newline="")
        rows = [row for row in csv.reader(lines, delimiter=table.separator, strict=True) if row]
        width = len(table.cells.columns)
        if width > 1:  # a line of nothing but white space is skipped, with a warning
            rows = [row for row in rows if len(row) > 1 or row[0].strip()]
        assert all(len(row) == width for row in rows if "".join(row).strip() or width > 1)
        if width > 1:
            whole = [row for row in rows if len(row) == width]
            assert table.cells.to_numpy().tolist() == whole[1:]
        table.frame()
