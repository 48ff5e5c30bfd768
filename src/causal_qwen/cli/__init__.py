"""Command line: parse, call, show. Nothing is computed here.

Heavy imports stand inside the commands, so that `causal-qwen --help` answers at once.

    checks     what is refused before anything is loaded
    options    what more than one command takes
    models     a model's name -> its files, or the model itself
    speaking   demo, generate, chat, counterfactual
    numbers    fit, predict
    training   train, evaluate, report
    engine     np-generate, verify
    house      doctor, convert, app
    program    all of them in order, errors as one sentence
"""

from causal_qwen.cli.program import app, main

__all__ = ["app", "main"]
