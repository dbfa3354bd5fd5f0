"""The benchmarks of `sqltrain data add`: the content of a whole download, its address, and a check.

A user's own questions are checked in the same way, under the name `own`. A recipe's view of a benchmark stands in
`conf/data/<name>.yaml`; its authors' figures stand in `conf/downloads.yaml`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.benchmarks import base, livesqlbench, synsql
from pipelines.core.errors import DataError
from pipelines.core.registry import DIALECTS
from pipelines.core.rows import kind_of
from pipelines.core.types import Example
from pipelines.recipe.config import Benchmark as HeldOut
from pipelines.recipe.config import Source
from pipelines.recipe.recipes import CONF
from pipelines.recipe.yaml_files import read_yaml

if TYPE_CHECKING:
    from pipelines.sql.engine import SqlEngine

SAMPLE = 2000  # questions of SynSQL whose gold is run
SHOWN = 3  # examples of each kind of bad row
MOST_BYTES = 4 << 30  # bytes of databases that are hashed; more of them together are not


@dataclasses.dataclass(frozen=True)
class BenchmarkDownload:
    """The content of a whole download."""

    questions: int | None  # rows; None if the authors do not say.
    databases: int | None  # different databases that they ask; None if the authors do not say.
    licence: str  # the licence in a few words.
    get: str  # its address, and what must be put where; "" for a user's own questions.

    @property
    def hint(self) -> str:
        """The hint beside a download that cannot be read."""
        if self.get:
            return f"Get it from {self.get}"
        return OWN


OWN = (
    'Each line of the file is {"question": "...", "database": "FILE.sqlite", "sql": "SELECT ..."}; of a CSV file, '
    "the first line names these columns"
)


def _read_downloads() -> dict[str, BenchmarkDownload]:
    """The benchmarks of `conf/downloads.yaml`, by name."""
    downloads = {}
    for name, row in read_yaml(CONF / "downloads.yaml").items():
        get = row["get"].format(by_mail=livesqlbench.HINT)
        downloads[name] = BenchmarkDownload(row["questions"], row["databases"], row["licence"], get)
    return downloads


BENCHMARKS = _read_downloads()

LISTS: Mapping[str, tuple[str, ...]] = {  # tables of benchmarks that the field reports together
    "omnisql": (  # Li et al., 2025 (arXiv 2503.02240): nine columns
        *("spider_dev", "spider_test", "bird_dev", "spider2_lite", "sciencebenchmark", "ehrsql"),
        *("spider_dk", "spider_syn", "spider_realistic"),
    )
}


@dataclasses.dataclass(frozen=True)
class Health:
    """The content of a download that was checked."""

    rows: int  # questions in its files.
    checked: int  # questions that were looked at: all, or a seeded sample.
    usable: int  # questions with a database and a gold SQL that runs.
    databases: int  # different databases behind the usable questions.
    bad: Mapping[str, int]  # rows by the reason that they cannot be used.
    shown: tuple[str, ...]  # a few bad rows for each reason, in a line each.
    questions_sha256: str  # digest of the read rows (id, question, evidence, database, gold), whatever file has them.
    databases_sha256: str | None  # digest of the database files; None if they are too many bytes to hash.


def download_source(name: str, path: Path) -> tuple[Source, dict[str, Any]]:
    """A benchmark's source with its path, and the configuration that lays it over a recipe."""
    if name not in BENCHMARKS:
        known = ", ".join(BENCHMARKS)
        raise DataError(f"there is no benchmark {name!r}", f"There are: {known}.")
    tree = read_yaml(CONF / "data" / f"{name}.yaml")
    pools: list[dict[str, Any]] = []
    for value in tree["data"].values():
        if isinstance(value, list):
            pools += value
        else:
            pools.append(value)
    for pool in pools:
        pool["path"] = str(path.expanduser().resolve())
        if pool["kind"] == "jsonl":
            pool["kind"] = kind_of(path)
    source_type = HeldOut if "test" in tree["data"] else Source
    return source_type.model_validate(pools[0]), tree


def examine_download(name: str, source: Source, root: Path, sql: SqlEngine) -> Health:
    """Read a download, look for its databases and run every gold SQL; `root` is a folder for links to the databases."""
    benchmark = BENCHMARKS[name]
    try:
        loaded, total = _read_download(source, root)
    except DataError as error:
        hint = f"{error.hint}. {benchmark.hint}".lstrip(". ")
        raise DataError(error.message, hint) from None
    good, broken = base.check_gold(loaded.examples, sql, root)
    rejected = [*loaded.quarantine, *broken]
    bad = Counter(row.reason for row in rejected)
    shown: list[str] = []
    for reason in bad:
        rows = [row for row in rejected if row.reason == reason]
        for row in rows[:SHOWN]:
            shown.append(f"{row.row}: {row.reason}: {row.detail}")
    databases = {example.database.id for example in good}
    return Health(
        rows=total,
        checked=len(loaded.examples) + len(loaded.quarantine),
        usable=len(good),
        databases=len(databases),
        bad=dict(bad.most_common()),
        shown=tuple(shown),
        questions_sha256=_questions_sha256(loaded.examples),
        databases_sha256=_databases_sha256(loaded.examples, root),
    )


def _read_download(source: Source, root: Path) -> tuple[base.Questions, int]:
    """The questions of a download, or a sample of SynSQL's, and the number of its rows."""
    if source.kind == "synsql":
        sample_source = source.model_copy(update={"count": SAMPLE})
        sample = base.read(sample_source, 0, root)
        file = Path(str(source.path)) / "data.json"
        n_rows = sum(1 for _ in synsql.stream(file))
        return sample, n_rows
    whole_source = source.model_copy(update={"count": None})
    loaded = base.read(whole_source, 0, root)
    return loaded, len(loaded.examples) + len(loaded.quarantine)


def _questions_sha256(examples: Sequence[Example]) -> str:
    content = hashlib.sha256()
    for example in examples:
        fields = (example.id, example.question, example.evidence, example.database.id, example.gold_sql, "\n")
        text = "\0".join(fields)
        content.update(text.encode())
    return content.hexdigest()


def _databases_sha256(examples: Sequence[Example], root: Path) -> str | None:
    """A digest of the database files behind some examples; None if they are too many bytes to hash."""
    files: set[tuple[str, Path]] = set()
    for example in examples:
        database = example.database
        if not DIALECTS[database.engine].is_server:
            files.add((database.id, root / database.location))
    sizes = [path.stat().st_size for _, path in files]
    if sum(sizes) > MOST_BYTES:
        return None
    content = hashlib.sha256()
    for id, path in sorted(files):
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        content.update(f"{id} {digest}\n".encode())
    return content.hexdigest()
