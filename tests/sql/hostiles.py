"""The hostile statements of `hostile/*.txt`, one a line, each with the class of outcome that must hold.

A line is "class | statement". What a text file cannot show stands as its code point (<U+FEFF>); {folder} is where the
database lies, {secret} a file in it that nobody may read. A line that starts with "#" names the attacks that follow.
"""

import re
from pathlib import Path
from typing import NamedTuple

from pipelines.core.types import ExecutionStatus

OK, ERROR, REFUSED = ExecutionStatus.OK, ExecutionStatus.ERROR, ExecutionStatus.REFUSED
ALLOWED = {
    "refused": frozenset((REFUSED,)),
    "error": frozenset((ERROR, REFUSED)),  # which of both may hang on the engine's version: it does not run
    "limit": frozenset((ExecutionStatus.LIMIT, ExecutionStatus.TIMEOUT, ERROR)),  # ERROR: too deep for the parser
    "harmless": frozenset((OK, ERROR)),  # plain SQL: it is not refused, and changes nothing
}
FOLDER = Path(__file__).parent / "hostile"
ENGINES = ("sqlite", "duckdb", "postgres", "mysql")
_LINE = re.compile(r"(\w+) \| (.*)")
_CODE_POINT = re.compile(r"<U\+([0-9A-F]{4,6})>")


class Hostile(NamedTuple):
    outcome: str
    sql: str


def hostile(engine, folder=FOLDER):
    lines = (FOLDER / f"{engine}.txt").read_text(encoding="utf-8").split("\n")
    return [_hostile(line, folder) for line in lines if line and not line.startswith("#")]


def _hostile(line, folder):
    parts = _LINE.fullmatch(line)
    assert parts is not None, line
    sql = parts[2].replace("{folder}", str(folder)).replace("{secret}", str(folder / "secret.csv"))
    return Hostile(parts[1], _CODE_POINT.sub(lambda code: chr(int(code[1], 16)), sql))
