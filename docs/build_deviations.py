"""Writes docs/reference/deviations.md from conf/deviations: `python docs/build_deviations.py`."""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed copy

from pipelines.recipe import deviations
from pipelines.recipe.deviations import PAPERS, Deviation

PAGE = Path(__file__).resolve().parent / "reference" / "deviations.md"
INTRO = """# Where recipes deviate from their papers

This page is written by `python docs/build_deviations.py` from `conf/deviations/`; a test compares the two, resolves
each setting, and looks for the test that each point names there. `sqltrain show RECIPE --deviations` prints the
points that act in a run, and the run's report lists them.

A setting restores the paper's way, takes the other reading, or, if the paper is silent, another value. Fill in
words in capitals. The kinds:
"""


def page() -> str:
    """The whole page."""
    kinds = [f"- **{kind}**: {about}." for kind, about in deviations.KINDS.items()]
    parts = [
        INTRO,
        *kinds,
        "",
        "## What several papers share",
        "",
        *_table(deviations.read_deviations(deviations.SHARED), True),
    ]
    for name, title in PAPERS.items():
        parts += ["", f"## {title} (`conf/recipes/{name}.yaml`)", "", *_table(deviations.read_deviations(name), False)]
    return "\n".join(parts) + "\n"


def _table(rows: Sequence[Deviation], shared: bool) -> Iterator[str]:
    yield "| where | the paper | here | kind | setting |" + (" papers |" if shared else "")
    yield "|---|---|---|---|---|" + ("---|" if shared else "")
    for each in rows:
        settings = "<br>".join(f"`{setting}`" for setting in each.setting) or "–"
        cells = [*map(_prose, (each.where, each.paper, each.ours)), each.kind, settings]
        if shared:
            cells.append(", ".join(PAPERS[name] for name in each.papers) or "all")
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _prose(text: str) -> str:
    """A text in which a protocol's tag is no tag of HTML."""
    return text.replace("<", "&lt;")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
