"""Regression: texts and tables -> numbers with calibrated intervals.

regressor      `CausalTextRegressor`, by scikit-learn's conventions: fit, predict, save, load
csv_io, saving files -> a fitted regressor; its own file

backbone       the language model that reads texts, opened once and shared
features       texts -> the backbone's hidden states, kept on disk
sources        rows -> features by scikit-learn's transformers: columns, words, trees

head           residuals of experts -> the scale of U, and the causal chain (U and Y)
credibility    residuals of unseen rows -> the probability that each label is right
experts        predictors of several sources, and the chain that weighs them
source_model   all sources and experts of a table, for every target
conformal      one number after `fit`: its limits, and intervals with a coverage guarantee
prediction     the distribution of one number

audit          labels -> how credible each is, the worst first
whatif         an observed number -> the same individual's number in an edited row
explanation    what every column and group of words adds to a prediction
report         calibration, residuals and contributions on a page
"""
