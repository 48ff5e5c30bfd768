"""Program: the commands in the order of the help page, and errors in one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any

import typer
from typer import Option

from causal_qwen._version import __version__
from causal_qwen.cli import ask, generation, regression, serving, setup, training
from causal_qwen.cli.signals import ExitOnSignals
from causal_qwen.terminal import escape_unencodable

NAME = "causal-qwen"
COMMANDS: dict[str, Callable[..., None]] = {
    "demo": generation.demo,
    "doctor": setup.doctor,
    "convert": setup.convert,
    "export": setup.export,
    "generate": generation.generate,
    "chat": generation.chat,
    "counterfactual": generation.counterfactual,
    "ask": ask.ask,
    "fit": regression.fit,
    "predict": regression.predict,
    "audit": regression.audit,
    "what-if": regression.what_if,
    "train": training.train,
    "evaluate": training.evaluate,
    "report": training.report,
    "verify": setup.verify,
    "quantize": setup.quantize,
    "app": setup.playground,
    "serve": serving.serve,
}


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"{NAME} {__version__}")
        raise typer.Exit


def options(
    version: Annotated[
        bool, Option("--version", help="Show the version.", is_eager=True, callback=_version)
    ] = False,
    debug: Annotated[bool, Option("--debug", help="Show an error's traceback.")] = False,
) -> None:
    """`main` removes --debug; it is declared here for the help page."""


def make_app(names: Iterable[str]) -> typer.Typer:
    """The program with some of its commands: Typer prepares the options of all that it has."""
    made = typer.Typer(
        name=NAME,
        help="A language model that decides like an individual.",
        epilog="Begin with: causal-qwen demo",
        no_args_is_help=True,
        add_completion=True,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
    )
    for name in names:
        made.command(name)(COMMANDS[name])
    made.callback()(options)
    return made


app = make_app(COMMANDS)


def main() -> None:
    """The entry point. Exits with 1 on errors, 2 on wrong options, 130 or 143 on a signal."""
    escape_unencodable()
    arguments = renamed([word for word in sys.argv[1:] if word != "--debug"])
    with ExitOnSignals() as signals:
        try:
            is_named = bool(arguments) and arguments[0] in COMMANDS
            program = make_app(arguments[:1]) if is_named else app
            code = program(args=arguments or ["--help"], prog_name=NAME, standalone_mode=False)
        except KeyboardInterrupt:
            code = 130
        except Exception as error:
            if signals.received is not None:  # of an import that a signal has cut short
                sys.exit(signals.code)
            if "--debug" in sys.argv:
                raise
            typer.secho(f"{NAME}: {_sentence(error)}", fg="red", err=True)
            sys.exit(getattr(error, "exit_code", 1))
        sys.exit(code)


def renamed(arguments: list[str]) -> list[str]:
    """`np-generate [MODEL] PROMPT` of version 0.3 as `generate`."""
    if arguments[:1] != ["np-generate"]:
        return arguments
    rest = arguments[1:]
    if len(rest) > 1 and not any(word.startswith("-") for word in rest[:2]):
        rest = ["--model", *rest]
    return ["generate", "--engine", "numpy", "--watch", *rest]


def _sentence(error: Any) -> str:
    if hasattr(error, "format_message"):  # of typer: an unknown or wrong option
        where = "" if error.ctx is None else f" ({error.ctx.command_path} --help)"
        message = error.format_message().replace("Value error, ", "")
        return f"{' '.join(message.split())}{where}"
    if isinstance(error, ModuleNotFoundError) and error.name is not None:
        from causal_qwen.cli.doctor import cure

        return cure(error.name.partition(".")[0])
    if isinstance(error, OSError) and error.strerror and error.filename:
        return f"{error.filename}: {error.strerror}"
    words = " ".join(str(error).split())
    if isinstance(error, ValueError | OSError | ImportError | ArithmeticError) and words:
        return words
    return f"{type(error).__name__}: {words} (--debug shows the traceback)"
