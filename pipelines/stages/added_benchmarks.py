"""Benchmarks that a user added: a download is checked, and `conf/local/NAME.yaml` lays it over any recipe."""

import dataclasses
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pipelines.benchmarks import downloads
from pipelines.benchmarks.downloads import BenchmarkDownload, Health
from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic, writing_to
from pipelines.core.types import plain, shortened
from pipelines.databases import card
from pipelines.recipe import recipes
from pipelines.recipe.config import Execution
from pipelines.recipe.yaml_files import yaml_text
from pipelines.sql.engine import Limits, SqlEngine

LINE_CHARS = 300
MARK = "# questions_sha256: "  # beginning of a line of conf/local/NAME.yaml


def add_benchmark(
    name: str,
    path: Path,
    say: Callable[[str], None],
    local: Path = recipes.LOCAL,
    called: str | None = None,
) -> dict[str, Any]:
    """Check a download and write `conf/local/SLOT.yaml`, which `include=local/SLOT` lays over any recipe.

    Args:
        name: a file of conf/data, or "own".
        called: the slot, and the benchmark's name in reports; None for `name`. Slots of one kind exist side by side.

    Returns:
        The findings as JSON values.
    """
    slot = called or name
    if not re.fullmatch(r"[\w-]+", slot):
        raise DataError(f"{slot!r} is no name for it", "A name has letters, digits, '_' and '-'.")
    _require_writable_folder(local)  # before the questions are checked, which may take long
    source, tree = downloads.download_source(name, path)
    if called is not None:
        for benchmark in tree["data"].get("test", []):
            benchmark["name"] = slot
    limits = Limits.of(Execution())
    hidden = card.hidden_names()
    with tempfile.TemporaryDirectory() as folder, SqlEngine(limits, hidden=hidden) as sql:
        health = downloads.examine_download(name, source, Path(folder), sql)
    published = downloads.BENCHMARKS[name]
    for line in _finding_lines(name, health, published):
        say(line)
    if not health.usable:
        raise DataError(f"none of the questions in {path} can run", published.hint)
    file = local / f"{slot}.yaml"
    before = _noted_digest(file)
    if before is not None and before != health.questions_sha256:
        say("the questions differ from those added before: the stages that read them will run again")
    head = f"# {name}, checked: {health.usable:,} of {health.rows:,} questions. Licence: {published.licence}.\n"
    marks = f"{MARK}{health.questions_sha256}\n# databases_sha256: {health.databases_sha256}\n"
    text = head + marks + yaml_text(tree)
    with writing_to(file):
        local.mkdir(parents=True, exist_ok=True)
        write_atomic(file, text)
    say(f"written to {file}; use it with: include=local/{slot}")
    added = {"name": name, "include": f"local/{slot}", "licence": published.licence}
    return {**added, **dataclasses.asdict(health)}


def _require_writable_folder(folder: Path) -> None:
    candidates = [folder, *folder.resolve().parents]
    nearest = next(path for path in candidates if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        raise DataError(f"{folder} cannot be written", "Run this in a folder of your own.")


def _finding_lines(name: str, health: Health, published: BenchmarkDownload) -> Iterator[str]:
    """Counts with the authors' own, then what is bad and where to get it."""
    yield f"{name}: {health.usable:,} of {health.checked:,} questions can run, over {health.databases:,} databases"
    counts = f"{health.rows:,} questions"
    if health.checked != health.rows:
        counts += f" ({health.checked:,} of them looked at)"
    if published.questions is not None:
        counts += f"; the whole benchmark has {published.questions:,}"
    yield counts
    if published.databases is not None and health.checked == health.rows:
        yield f"its authors count {published.databases:,} databases"
    for reason, number in health.bad.items():
        reason_in_words = reason.replace("_", " ")
        yield f"  {number:,} with {reason_in_words}"
    for example in health.shown:
        line = shortened(plain(example), LINE_CHARS)
        yield f"    {line}"
    is_short = published.questions is not None and health.rows < published.questions
    if published.get and (is_short or "missing_database" in health.bad):
        yield f"what is missing: {published.get}"
    yield f"licence: {published.licence}; it stays with the data, none of which is copied"
    yield f"questions sha256 {health.questions_sha256}"
    yield f"databases sha256 {health.databases_sha256 or 'not computed: more than 4 GiB'}"


def _noted_digest(file: Path) -> str | None:
    """The digest of the questions that were added before; None if there is no such file."""
    if not file.is_file():
        return None
    for line in file.read_text(encoding="utf-8").splitlines():
        if line.startswith(MARK):
            return line.removeprefix(MARK)
    return None


def benchmarks_override(listed: str, say: Callable[[str], None]) -> str:
    """The override that puts benchmarks in a recipe; those that were not added are named and left out.

    Args:
        listed: names with commas between, or one of `downloads.LISTS`.
    """
    names = downloads.LISTS.get(listed) or tuple(listed.split(","))
    added = [name for name in names if (recipes.LOCAL / f"{name}.yaml").is_file()]
    for name in names:
        if name not in added:
            say(f"no data of {name}, which is left out; get it, and run: sqltrain data add {name} PATH")
    if not added:
        wanted = ", ".join(names)
        raise DataError(f"none of {wanted} is on this machine", "Run: sqltrain data add NAME PATH")
    includes = ", ".join(f"local/{name}" for name in added)
    return f"data.test=[{includes}]"
