"""Command line: parse, call, show.

In:   words typed in a shell.
Out:  results on stdout (text, tables, or JSON with --json); progress and errors on stderr.

    program     all commands in the order of the help page; errors in one sentence
    signals     Ctrl-C and SIGTERM -> an exit code, no traceback
    options     options that several commands share, and their checks
    generation  the commands demo, generate, chat, counterfactual
    ask         ask: a panel answers a question, or every question of a file
    regression  fit, predict, audit, what-if, cache
    training    train, evaluate, report
    serving     serve
    setup       doctor, convert, export, app, quantize, verify
    demo        what `demo` shows
    chat        `Conversation`: several turns with one individual, of a model here or of a server
    live_view   a text in a terminal as it grows
    batch       a file of prompts -> a file of texts
    doctor      what `doctor` examines, and the cure for a missing module

Open `program` first. Commands import torch and other large packages inside their functions, so
that `causal-qwen --help` is fast.
"""

import os
import signal


def main() -> None:
    """The entry point. Ctrl-C while the program is imported exits with 130, too."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    from causal_qwen.cli.program import main as run

    run()
