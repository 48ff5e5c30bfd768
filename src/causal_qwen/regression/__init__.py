"""Regression: texts and tables -> numbers with calibrated intervals.

In:   texts or a DataFrame, and target values; `causal_qwen.tables` reads them.
Out:  medians, intervals, quantiles and whole distributions.

The estimator and the stages of its methods:

    regressor      `CausalTextRegressor`, by scikit-learn's conventions
    settings       its arguments, checked, and their defaults
    inputs         X and y as users give them -> the columns, targets and texts of `fit`
    fit_sources    a frame and labels -> several sources and their chains
    fit_sentences  sentences and labels -> a chain per target, or a trained model
    predict_rows   X -> the distributions of all targets, some rows at a time
    csv_io         files -> a saved regressor -> predictions

Rows -> features:

    sentences      rows of a table -> sentences that end where the number would follow
    backbone       the language model that reads them, opened once and shared
    reading        texts of a regressor -> features, the model opened only when it is needed
    features       sentences -> the backbone's hidden state
    feature_cache  hidden states on disk, every row with a checksum; without torch
    workload       the time and memory that a large table needs, said before the work
    sources        rows -> features by scikit-learn's transformers: columns, words, trees
    source_choice  how each column is read, which sources there are, and splits of the rows

Features -> a distribution:

    head           features + values -> a robust linear head (U and Y), or a trained model
    ridge          a linear function, its penalty by leave-one-out; robust or not
    credibility    residuals of unseen rows -> the probability that each label is right
    experts        predictors of several sources, and the chain that weighs them
    source_model   all sources and experts of a table, for every target
    fitted         one number after `fit`: its chain, limits and calibration
    conformal      intervals with a coverage guarantee
    prediction     the distribution of one number

Questions to a fitted regressor:

    audit          labels -> how credible each is, the worst first
    whatif         an observed number -> the same individual's number in an edited row
    explanation    what every column and group of words adds to a prediction
    report         calibration, residuals and contributions as pictures and a page

Its directory:

    saved_regressor  a fitted regressor -> its directory, and back
    saved            the files of that directory, every field checked
    saved_sources    transformers and experts in these files; only known types are loaded
    checks           one sentence for a field that is wrong

Open `regressor` first: `fit` calls `inputs`, then `fit_sources` or `fit_sentences`; `predict` calls
`predict_rows`. These and `reading` are functions of a regressor.
"""
