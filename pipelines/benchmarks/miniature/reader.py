"""Reads the miniature world: draws the databases of a split, builds their files, and asks its questions."""

import random
import sqlite3
from pathlib import Path

from pipelines.benchmarks.base import Loaded, read_options
from pipelines.benchmarks.miniature import questions, world
from pipelines.core.registry import reader
from pipelines.core.types import Database, Example
from pipelines.recipe.config import Source
from pipelines.recipe.section import Count, Positive, Section

FOLDER = Path("databases") / "miniature"


class MiniatureOptions(Section):
    """How much of the world a source takes."""

    databases: Positive = 40  # how many databases.
    questions: Positive = 12  # how many questions a database.
    first: Count = 0  # index of the first database, so that two sources of one split need not share any.


@reader("miniature", options=MiniatureOptions)
def read(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split; their databases are built under `root/databases/miniature`."""
    options = read_options(MiniatureOptions, source)
    folder = root / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    examples: list[Example] = []
    for index in range(options.first, options.first + options.databases):
        database = world.draw(source.split, index, seed)
        path = folder / f"{database.id}.sqlite"
        world.build(database, path)
        examples += _ask(database, path, source, seed, options.questions)
    return Loaded(examples, [])


def _ask(drawn: world.MiniDatabase, path: Path, source: Source, seed: int, count: int) -> list[Example]:
    rng = random.Random(f"{seed}/questions/{drawn.id}")
    connection = sqlite3.connect(f"file:{path}?mode=ro&immutable=1", uri=True)
    made_questions = questions.ask(drawn, connection, source.split, count, rng)
    connection.close()
    database = Database(drawn.id, "sqlite", str(FOLDER / path.name))
    return [
        Example(
            id=f"{drawn.id}_{number}",
            question=drawn_question.question,
            database=database,
            gold_sql=drawn_question.sql,
            hardness=drawn_question.family.hardness,
            source="miniature",
            meta={"domain": drawn.domain, **drawn_question.meta},
        )
        for number, drawn_question in enumerate(made_questions)
    ]
