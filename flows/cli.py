"""The `sqltrain` command."""

import errno
import io
import signal
import sys
from typing import Annotated

import typer

from flows.commands import data, evaluation, operations, recipes, training, use
from pipelines.core.errors import SqltrainError

app = typer.Typer(
    name="sqltrain",
    help="Post-train open-weight language models into multi-turn text-to-SQL agents.",
    epilog="Start with: sqltrain run miniature",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

INTERRUPTED = 130


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"sqltrain {version('sqltrain')}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """What holds for every command."""


for part in (training, recipes, use, evaluation, data, operations):
    part.register(app)


OF_OPS = frozenset({"fastapi", "great_expectations", "mlflow", "prefect"})
OF_FILES = frozenset(
    {errno.EACCES, errno.EDQUOT, errno.EFBIG, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT}
    | {errno.ENOSPC, errno.ENOTDIR, errno.EPERM, errno.EROFS}
)


def main() -> None:
    """Run the command; a person sees one plain line for a mistake, never a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character shows another for it
    try:
        code = app(standalone_mode=False)  # the code of a `typer.Exit`, which an interrupt becomes too
    except (typer.Abort, KeyboardInterrupt):
        code = INTERRUPTED
    except SqltrainError as error:
        from pipelines.report.terminal import plain

        print(f"error: {plain(str(error))}", file=sys.stderr)
        sys.exit(error.exit_code)
    except Exception as error:
        sys.exit(_usage(error))
    if code == INTERRUPTED:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # pressed again, it would end the end with a traceback
        print("stopped; the same command goes on from here", file=sys.stderr)
    sys.exit(code or 0)


def _usage(error: Exception) -> int:
    """Exit code of a command-line mistake; anything else is our own bug and keeps its traceback."""
    show = getattr(error, "show", None)  # typer's and click's usage errors
    if show is not None:
        show()
        return 2
    line = _mistake(error)
    if line is None:
        raise error
    from pipelines.report.terminal import plain

    print(f"error: {plain(line)}", file=sys.stderr)
    return 1


def _mistake(error: Exception) -> str | None:
    """What a user can mend of an error that no command has put in words; None where it is our own bug."""
    if isinstance(error, ModuleNotFoundError) and error.name in OF_OPS:
        return f"{error.name} is not installed. Run: pip install 'sqltrain[ops]'"
    if isinstance(error, OSError) and error.errno in OF_FILES:
        return f"cannot use {error.filename or 'a file'}: {error.strerror}"
    # Prefect's, when it is imported: an address that is none, a number that is text
    if isinstance(error, ValueError) and getattr(error, "title", None) == "Settings":
        why = "; ".join(part["msg"] for part in getattr(error, "errors", list)())  # without the values: one is a key
        return f"Prefect's settings cannot be read: {why}. Look at the variables PREFECT_..."
    # pathlib's, for ~nobody/x and for a link that leads to itself
    if isinstance(error, RuntimeError) and str(error).startswith(("Could not determine home", "Symlink loop")):
        return str(error)
    return None


if __name__ == "__main__":
    main()
