"""Sections of a page that benchmarks write, between `<!-- NAME: begin -->` and `<!-- NAME: end -->`."""

from pathlib import Path


def write_section(page: Path, name: str, text: str) -> None:
    """Replace a section of a page; a page without its markers gets it at its end."""
    begin = f"<!-- {name}: begin -->"
    end = f"<!-- {name}: end -->"
    head, found, rest = page.read_text(encoding="utf-8").partition(begin)
    if found:
        tail = rest.partition(end)[2]
    else:
        head = f"{head.rstrip()}\n\n"
        tail = "\n"
    page.write_text(f"{head}{begin}\n{text}\n{end}{tail}", encoding="utf-8")
