"""The `sqltrain` command: a table of commands, whose modules are imported when one of them is called."""

import errno
import importlib
import inspect
import io
import re
import signal
import sys
import textwrap
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from pipelines.core.errors import SqltrainError

INTERRUPTED = 130
OPS_LIBRARIES = frozenset({"fastapi", "great_expectations", "mlflow", "prefect"})
FILE_ERRORS = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
    | {errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


# The commands by their module below `flows.commands` and their panel of the help, with their line there.
PANELS = {
    ("train", "Train"): {
        "run": "Run a recipe: every stage that the store lacks, then a table of the figures.",
        "stages": "List a recipe's stages: key, whether the store has it, and its figures, or why not.",
        "adapt": "Teach a model one database: write recipes/NAME.yaml, run it, and say whether its model may serve.",
        "watch": "Watch a run train: rewards by term, accuracy, entropy, turns, format errors, where the "
        "time goes, alarms.",
        "plan": "Say what training takes of each GPU: GiB by use, for 1 to 8 of them.",
        "sweep": "Make the cells of a table, each common stage once, and the table that they fill, with a "
        "page of their curves.",
    },
    ("train", "Recipes"): {
        "show": "Print the resolved recipe as YAML: includes, variant and overrides applied.",
        "recipes": "List the recipes and their variants.",
        "check": "Check that every recipe loads, and that the gold SQL of one (the miniature by default) "
        "earns the full reward.",
    },
    ("use", "Use"): {
        "connect": "Read a database and write its card, databases/NAME.yaml: the schema and notes that the agent sees.",
        "ask": "Ask a trained model about a database and watch its turns.",
        "serve": "Serve the agent of a database: a chat page, and OpenAI's protocol for any client.",
        "export": "Write a trained model as others take it, with a filled card: weights, tokenizer, prompt, "
        "protocol, figures.",
        "mcp": "Serve the sandboxed SQL tool to any MCP client, and the agent beside it.",
        "environment": "Episodes for other trainers.",
        "feedback": "Questions and verdicts of the users of `sqltrain serve`.",
    },
    ("evaluate", "Evaluate"): {
        "evaluate": "Evaluate a recipe's checkpoints, any checkpoint folder, an endpoint or the oracle, on the "
        "held-out questions.",
        "compare": "Compare evaluations question by question: which flipped, and whether the difference is "
        "more than chance.",
        "report": "Write the HTML report of a finished run and say where it is.",
        "score": "Score a prediction file under several equalities in one pass.",
    },
    ("data", "Data and teachers"): {
        "invent": "Make questions with gold SQL for a database that has none.",
        "review": "Look through questions in a browser, one by one: accept, mend or reject each, by keyboard.",
        "data": "Benchmarks on this machine.",
    },
    ("operate", "Operate"): {
        "nightly": "Run one night: take new questions, train a challenger, promote it only if it is better.",
        "init": "Write the files of a deployment into a folder: Prefect, automations, compose, Kubernetes, images.",
        "status": "Show what runs, what the last night decided, and held-out accuracy over the nights.",
        "champion": "The checkpoint that nightly retraining promoted.",
        "store": "What a store holds, and what of it may go.",
    },
}
COMMANDS = {name: module for (module, _), lines in PANELS.items() for name in lines}


class LazyGroup(TyperGroup):
    """The group of all commands: `--help` prints the table alone, and a call imports the module of its command."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        for (_, panel), lines in PANELS.items():
            for name, line in lines.items():
                self.add_command(TyperCommand(name, help=line, rich_help_panel=panel))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is called, and its arguments."""
        name, _, rest = super().resolve_command(ctx, args)
        command = None
        if name is not None:
            command = load_command(name)
        return name, command, rest


def load_command(name: str) -> Any:
    """A command or group of the table, from its module."""
    module = importlib.import_module(f"flows.commands.{COMMANDS[name]}")
    command = get_command(module.app).commands[name]  # type: ignore[attr-defined]
    subcommands = getattr(command, "commands", {})
    for documented in (command, *subcommands.values()):
        documented.help = terminal_help(documented.help or "")
    return command


def terminal_help(text: str) -> str:
    """A help text for a terminal.

    A paragraph is one line, which a terminal wraps. A long example ends its lines with a backslash, and keeps an option
    and its value on one line.
    """
    paragraphs = re.sub(r"(?<=\S)\n(?=\S)", " ", inspect.cleandoc(text))
    joined_options = re.sub(r"(?<= )(--\S+) (?=[^-\s])", r"\1\0", paragraphs)
    wrapper = textwrap.TextWrapper(74, subsequent_indent="      ", break_long_words=False, break_on_hyphens=False)

    def broken_example(match: re.Match[str]) -> str:
        return " \\\n".join(wrapper.wrap(match[0]))

    examples = re.sub("^ *sqltrain .{60,}$", broken_example, joined_options, flags=re.M)
    return examples.replace("\0", " ")


def every_command() -> dict[str, Any]:
    """All commands by name; groups have `commands` of their own."""
    return {name: load_command(name) for name in COMMANDS}


app = typer.Typer(
    name="sqltrain",
    cls=LazyGroup,
    help="Post-train open-weight language models into multi-turn text-to-SQL agents.",
    epilog="Start with: sqltrain run miniature",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"sqltrain {version('sqltrain')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """The options that hold for every command."""


def main() -> None:
    """Run the command; a person sees one plain line for a mistake, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another for it
    try:
        code = app(standalone_mode=False)  # the code of a `typer.Exit`, which an interrupt becomes too
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except Exception as error:
        if hasattr(error, "show"):  # typer's usage errors
            error.show()
            sys.exit(2)
        line = user_error(error)
        if line is None:
            raise
        from pipelines.core.types import plain

        print(f"error: {plain(line)}", file=sys.stderr)
        code = 1
        if isinstance(error, SqltrainError):
            code = error.exit_code
        sys.exit(code)
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it would end the end with a traceback
        print("stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(code or 0)


def user_error(error: Exception) -> str | None:
    """The line for an error that a user can mend; None for a bug."""
    if isinstance(error, SqltrainError):
        return str(error)
    if isinstance(error, ModuleNotFoundError) and error.name in OPS_LIBRARIES:
        return f"{error.name} is not installed. Run: pip install 'sqltrain[ops]'"
    if isinstance(error, OSError) and error.errno in FILE_ERRORS:
        return f"cannot use {error.filename or 'a file'}: {error.strerror}"
    # Prefect raises it when it is imported, for a malformed address or number.
    if isinstance(error, ValueError) and getattr(error, "title", None) == "Settings":
        details: list[dict[str, Any]] = getattr(error, "errors", list)()
        reasons = "; ".join(detail["msg"] for detail in details)  # without the values: one is a key
        return f"Prefect's settings cannot be read: {reasons}. Look at the variables PREFECT_..."
    # pathlib raises it for ~nobody/x, and for a link that leads to itself.
    if isinstance(error, RuntimeError) and str(error).startswith(("Could not determine home", "Symlink loop")):
        return str(error)
    return None


if __name__ == "__main__":
    main()
