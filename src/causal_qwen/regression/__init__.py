"""Regression: texts and tables -> numbers with calibrated intervals.

regressor      `CausalTextRegressor`, by scikit-learn's conventions: fit, predict, save, load
csv_io, saving files -> a saved regressor -> predictions; the file of a fitted regressor

sentences      rows of a table -> sentences that end where the number would follow
backbone       the language model that reads them, opened once and shared
features       sentences -> the backbone's hidden state, kept on disk
sources        rows -> features by scikit-learn's transformers: columns, words, trees

head           features + values -> a robust linear head and the causal chain (U and Y)
credibility    residuals of unseen rows -> the probability that each label is right
experts        predictors of several sources, and the chain that weighs them
source_model   all sources and experts of a table, for every target
conformal      one number after `fit`: its limits, and intervals with a coverage guarantee
prediction     the distribution of one number

audit          labels -> how credible each is, the worst first
whatif         an observed number -> the same individual's number in an edited row
explanation    what every column and group of words adds to a prediction
report         calibration, residuals and contributions as pictures and a page
"""
