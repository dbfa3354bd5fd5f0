"""Puts the real output of a first `sqltrain run miniature` into the first tutorial, and its table into README.md.

python docs/build_readme.py    # eight minutes on two fast cores, in a store made for it
"""

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BAR = re.compile(r"  \w+: ")
PAGES = (ROOT / "docs" / "tutorials" / "first-run.md", ROOT / "README.md")
TABLE = "Held-out execution accuracy"
BEGIN, END = "<!-- run: begin -->\n", "<!-- run: end -->"


def output(store: Path) -> str:
    """What the command prints, without the lines that a terminal shows as bars; the store's path becomes `store`."""
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", f"--store={store}"]
    environment = {**os.environ, "COLUMNS": "80"}
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT, env=environment)
    lines = [line for line in done.stdout.splitlines() if not BAR.match(line)]
    return "\n".join(line.rstrip().replace(str(store), "store") for line in lines)


def main() -> None:
    """Rewrite the part of each page between the markers."""
    with tempfile.TemporaryDirectory() as folder:
        whole = output(Path(folder).resolve() / "store")
    table = TABLE + whole.partition(TABLE)[2].partition("\nreport ")[0]
    table = "\n".join(line for line in table.splitlines() if not line.startswith("not asked"))
    for page, block in zip(PAGES, (whole, table), strict=True):
        head, _, rest = page.read_text(encoding="utf-8").partition(BEGIN)
        page.write_text(f"{head}{BEGIN}```\n{block}\n```\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
