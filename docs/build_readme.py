"""Puts the real output of a first `sqltrain run miniature` into README.md: `python docs/build_readme.py`.

It takes fifteen minutes, in a store made for it: the text and the seconds are what a newcomer sees.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BAR = re.compile(r"  \w+: ")
README = ROOT / "README.md"
BEGIN, END = "<!-- run: begin -->\n", "<!-- run: end -->"


def output(store: Path) -> str:
    """What the command prints, without the lines that a terminal shows as bars; the store's path becomes `store`."""
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", f"--store={store}"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if not BAR.match(line)]
    return "\n".join(line.rstrip().replace(str(store), "store") for line in lines)


def main() -> None:
    """Rewrite the part of README between the markers."""
    with tempfile.TemporaryDirectory() as folder:
        block = f"```\n{output(Path(folder).resolve() / 'store')}\n```\n"
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    README.write_text(head + BEGIN + block + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
