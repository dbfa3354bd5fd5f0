"""`sqltrain data add`: check a downloaded benchmark, and note where it is for recipes to include."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelines.benchmarks import downloads
from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic
from pipelines.databases import card
from pipelines.recipe import recipes
from pipelines.recipe.config import Execution
from pipelines.recipe.recipes import LOCAL
from pipelines.recipe.yaml_files import yaml_text
from pipelines.report.terminal import plain
from pipelines.sql.engine import Limits, SqlEngine

LINE_CHARS = 300


def add(
    name: str, path: Path, say: Callable[[str], None], local: Path = LOCAL, called: str | None = None
) -> dict[str, Any]:
    """Check a download and write `conf/local/<slot>.yaml`, which `include=local/<slot>` lays over any recipe.

    Args:
        called: the slot, and the benchmark's name in reports; by default `name`. Slots of one kind lie side by side.

    Returns what was found, as JSON values.
    """
    slot = called or name
    if not re.fullmatch(r"[\w-]+", slot):
        raise DataError(f"{slot!r} is no name for it", "A name has letters, digits, '_' and '-'.")
    _require_writable(local)  # before the questions are checked, which may take long
    source, tree = downloads.source_of(name, path)
    for benchmark in tree["data"].get("test", []) if called is not None else []:
        benchmark["name"] = slot
    with tempfile.TemporaryDirectory() as folder, SqlEngine(Limits.of(Execution()), hidden=card.hidden()) as sql:
        health = downloads.examine(name, source, Path(folder), sql)
    published = downloads.BENCHMARKS[name]
    for line in lines(name, published, health):
        say(line)
    if not health.usable:
        raise DataError(f"none of the questions in {path} can run", published.hint)
    place = local / f"{slot}.yaml"
    before = _noted(place)
    if before is not None and before != health.questions_sha256:
        say("the questions differ from those added before: the stages that read them will run again")
    head = f"# {name}, checked: {health.usable:,} of {health.rows:,} questions. Licence: {published.licence}.\n"
    marks = f"# questions_sha256: {health.questions_sha256}\n# databases_sha256: {health.databases_sha256}\n"
    try:
        local.mkdir(parents=True, exist_ok=True)
        write_atomic(place, head + marks + yaml_text(tree))
    except OSError as error:
        raise DataError(f"{place} cannot be written: {error.strerror}") from None
    say(f"written to {place}; use it with: include=local/{slot}")
    return {"name": name, "include": f"local/{slot}", "licence": published.licence, **dataclasses.asdict(health)}


def _require_writable(folder: Path) -> None:
    """Raises DataError where a folder is not there and cannot be made, or may not be written."""
    nearest = next(place for place in (folder, *folder.resolve().parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise DataError(f"{folder} cannot be written", "Run this in a folder of your own.")


def chosen(listed: str, say: Callable[[str], None]) -> str:
    """The override that puts these benchmarks in a recipe; those that were not added are named and left out.

    Args:
        listed: names with commas between them, or one of `benchmarks.LISTS`.
    """
    names = downloads.LISTS.get(listed) or tuple(listed.split(","))
    here = [name for name in names if (recipes.LOCAL / f"{name}.yaml").is_file()]
    for name in names:
        if name not in here:
            say(f"no data of {name}, which is left out; get it, and run: sqltrain data add {name} PATH")
    if not here:
        raise DataError(f"none of {', '.join(names)} is on this machine", "Run: sqltrain data add NAME PATH")
    return f"data.test=[{', '.join(f'local/{name}' for name in here)}]"


def lines(name: str, benchmark: downloads.BenchmarkDownload, health: downloads.Health) -> list[str]:
    """What was found, for a person: counts against the authors' own, then what is bad and where to get it."""
    part = f" ({health.checked:,} of them looked at)" if health.checked != health.rows else ""
    lines = [f"{name}: {health.usable:,} of {health.checked:,} questions can run, over {health.databases:,} databases"]
    whole = f"; the whole benchmark has {benchmark.questions:,}" if benchmark.questions is not None else ""
    lines.append(f"{health.rows:,} questions{part}{whole}")
    if benchmark.databases is not None and health.checked == health.rows:
        lines.append(f"its authors count {benchmark.databases:,} databases")
    lines += [f"  {number:,} with {reason.replace('_', ' ')}" for reason, number in health.bad.items()]
    lines += [f"    {_short(line)}" for line in health.shown]
    short = benchmark.questions is not None and health.rows < benchmark.questions
    if benchmark.get and (short or "missing_database" in health.bad):
        lines.append(f"what is missing: {benchmark.get}")
    lines.append(f"licence: {benchmark.licence}; it stays with the data, none of which is copied")
    lines.append(f"questions sha256 {health.questions_sha256}")
    return [*lines, f"databases sha256 {health.databases_sha256 or 'not computed: more than 4 GiB'}"]


def _short(line: str) -> str:
    """A line of a benchmark's own text, as a terminal shows it."""
    text = plain(line)
    return text if len(text) <= LINE_CHARS else f"{text[: LINE_CHARS - 1]}…"


def _noted(place: Path) -> str | None:
    """The questions' digest of an earlier check."""
    if not place.is_file():
        return None
    mark = "# questions_sha256: "
    names = [
        line.removeprefix(mark) for line in place.read_text(encoding="utf-8").splitlines() if line.startswith(mark)
    ]
    return names[0] if names else None
