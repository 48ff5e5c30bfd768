"""Regression: texts and tables -> numbers with calibrated intervals.

In:   texts or a DataFrame, and target values; `causal_qwen.tables` reads them.
Out:  medians, intervals, quantiles and whole distributions.

The estimator:

    regressor      `CausalTextRegressor`, by scikit-learn's conventions: fit, predict, save, load
    csv_io         files -> a saved regressor -> predictions
    saving         the file of a fitted regressor; only known types are loaded

Rows -> features:

    sentences      rows of a table -> sentences that end where the number would follow
    backbone       the language model that reads them, opened once and shared
    features       sentences -> the backbone's hidden state
    feature_cache  hidden states on disk, every row with a checksum; without torch
    sources        rows -> features by scikit-learn's transformers: columns, words, trees; which
                   sources a table has, splits of the rows, a typical row

Features -> a distribution:

    head           features + values -> a robust linear head and the causal chain (U and Y)
    credibility    residuals of unseen rows -> the probability that each label is right
    experts        predictors of several sources (ridge regression, robust or not; trees), and
                   the chain that weighs them
    source_model   all sources and experts of a table, for every target
    conformal      one number after `fit`: its limits, and intervals with a coverage guarantee
    prediction     the distribution of one number

Questions to a fitted regressor:

    audit          labels -> how credible each is, the worst first
    whatif         an observed number -> the same individual's number in an edited row
    explanation    what every column and group of words adds to a prediction
    report         calibration, residuals and contributions as pictures and a page

Open `regressor` first: `fit` and `predict` are methods of one class.
"""
