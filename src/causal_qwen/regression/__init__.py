"""Regression: texts and tables -> numbers with calibrated intervals.

In:   texts or a DataFrame, and target values.
Out:  medians, intervals, quantiles and whole distributions.

    sentences   rows of a table -> sentences that end where the number would follow; input checks
    cells       one cell of a table as it is written -> a number, an amount, a date or a text
    frames      the tables that people have -> one DataFrame; the kind of each column
    targets     the numbers to predict: names of columns, arrays, amounts as written
    rows        columns and rows, as messages name them
    backbone    the model that reads them, opened once and shared
    features    sentences -> the backbone's hidden state
    feature_cache  hidden states on disk, every row with a checksum; without torch
    workload    the time and memory that a large table needs, said before the work
    head        features + values -> a robust linear head (U and Y), or training of a whole model
    sources     rows -> features by scikit-learn's transformers: columns, words, trees
    ridge       a linear function, its penalty by leave-one-out; robust or not
    credibility residuals of unseen rows -> the probability that each label is right
    experts     predictors of several sources, and the chain that weighs them
    source_model  all sources and experts of a table, for every target
    source_choice  how each column is read, which sources there are, and splits of the rows
    conformal   intervals with a coverage guarantee
    fitted      one number after `fit`: its chain, limits and calibration
    prediction  the distribution of one number
    settings    the arguments of a regressor, checked, and their defaults
    inputs      X and y as users give them -> the columns, targets and texts of `fit`
    reading     texts of a regressor -> features of its language model, opened when it is needed
    fit_sources    a frame and labels -> several sources and their chains
    fit_sentences  sentences and labels -> a chain per target, or a trained model
    predict_rows   X -> the distributions of all targets, some rows at a time
    regressor   `CausalTextRegressor`: all of the above, by scikit-learn's conventions
    audit       labels -> how credible each is, the worst first
    whatif      an observed number -> the same individual's number in an edited row
    explanation what every column and group of words adds to a prediction
    report      calibration, residuals and contributions as pictures and a page
    saved_regressor  a fitted regressor -> its directory, and back
    saved       the files of a saved regressor, every field checked
    saved_sources  transformers and experts in these files; only known types are loaded
    checks      one sentence for a field that is wrong
    csv_dialect the encoding, separator and decimal mark of a CSV file
    csv_table   a CSV file: its cells as they are written, and the values that the model reads
    table_files CSV, parquet, Excel and JSON files, by their extensions
    csv_io      files -> a saved regressor -> predictions
    iris        the example table

Open `regressor` first: `fit` calls `inputs`, then `fit_sources` or `fit_sentences`; `predict` calls
`predict_rows`. These and `reading` are functions of a regressor: the stages of its methods.
"""
