"""Tables: files, frames and records as people have them -> one DataFrame, and the numbers to learn.

In:   a CSV, parquet, Excel or JSON file; a frame of pandas, polars or pyarrow, or an array.
Out:  a DataFrame with the kind of each column; target values as float64; the same table written
      back with its predictions.

    cells        one cell as it is written -> a number, an amount, a date or a text
    frames       a table in memory -> one DataFrame; its rows as messages name them; the kind of
                 each column
    targets      the numbers to predict: names of columns, arrays, amounts as written
    files        files by their extensions: read whole or in blocks, written with predictions
    iris         the example table

Open `files` for a file and `frames` for a table in memory. Nothing here knows a model.
"""
