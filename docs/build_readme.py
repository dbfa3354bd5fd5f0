"""Puts the real output of `sqltrain run miniature` into README.md: `python docs/build_readme.py STORE`.

The run is taken from the store (or made), so the text is what a second run prints; the seconds are those of the first.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
BEGIN, END = "<!-- run: begin -->\n", "<!-- run: end -->"


def output(store: str) -> str:
    """What the command prints, with this machine's store path shortened to `store`."""
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", f"store={store}"]
    environment = {**os.environ, "COLUMNS": "118"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=environment)
    return re.sub(re.escape(str(Path(store).resolve())), "store", done.stdout).rstrip()


def main() -> None:
    """Rewrite the part of README between the markers."""
    text = README.read_text(encoding="utf-8")
    head, _, rest = text.partition(BEGIN)
    block = f"```\n{output(sys.argv[1])}\n```\n"
    README.write_text(head + BEGIN + block + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
