"""Startup: Ctrl-C while the command line imports its packages exits with 130, without a traceback.

The first module of the package, without imports that take time. A process that only imports
causal_qwen keeps its own handler.
"""

import _signal  # type: ignore[import-not-found]  # what `signal` wraps: no import of enum
import os
import sys

PROGRAM = "causal-qwen"
MODULES = ("causal_qwen", "causal_qwen.cli")  # of `python -m`


def is_program() -> bool:
    """Whether this process runs the command line: the installed script, or `python -m`."""
    if sys.argv[:1] == ["-m"]:  # so while Python looks for the module
        return any(word.removeprefix("-m") in MODULES for word in sys.orig_argv)
    return os.path.basename(sys.argv[0] if sys.argv else "").startswith(PROGRAM)


def install() -> None:
    """Outside `main`, Ctrl-C ends the program at once: there is nothing to clean up."""
    if is_program() and _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
        _signal.signal(_signal.SIGINT, lambda *_: os._exit(130))


install()
