"""Tables: files, frames and records as people have them -> one DataFrame, and the numbers to learn.

cells        one cell as it is written -> a number, an amount, a date or a text
frames       a table in memory -> one DataFrame; its rows as messages name them; kinds of columns
targets      the numbers to predict: names of columns, arrays, amounts as written
files        files by their extensions: read, and written with predictions
iris         the example table
"""
