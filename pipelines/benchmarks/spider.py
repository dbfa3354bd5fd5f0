"""Reads Spider (Yu et al., 2018), its variants, SParC, CoSQL and KaggleDBQA (Lee et al., 2021) from their layouts.

    <path>/train_spider.json + train_others.json, or train.json    question, query, db_id
    <path>/dev.json, <path>/test.json                              the same
    <path>/database/<db_id>/<db_id>.sqlite                         (for test, test_database/ where it exists)

A variant's files may lie in the path itself or in their own repository's folder beside Spider's databases: Spider-DK
brings three databases and asks of Spider's too, Spider-Syn and Spider-Realistic bring none.

A schema comes from the database itself, so that the prompt shows what the SQL will meet; of `tables.json` only the
natural names are read, if a recipe asks for descriptions (`prompt_schema.py`).

SParC (Yu et al., 2019a: train.json, dev.json) and CoSQL (Yu et al., 2019b: sql_state_tracking/cosql_train.json,
cosql_dev.json) have conversations: database_id, and a list `interaction` of utterance and query. A question's history
is the utterances before it with their gold SQL, at evaluation too, so each is judged alone.

KaggleDBQA, with the same rows:

    <path>/examples/<db_id>.json, <db_id>_fewshot.json, <db_id>_test.json    split "dev" (all), "train", "test"
    <path>/databases/<db_id>/<db_id>.sqlite                                  (or database/)
"""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, source_folder
from pipelines.benchmarks.prompt_schema import tables_of
from pipelines.core.errors import DataError
from pipelines.core.registry import reader
from pipelines.core.types import Example, history_field
from pipelines.recipe.config import Section, Source

OTHERS = "train_others.json"
HINT = "Spider's layout is train.json, dev.json and database/<db_id>/<db_id>.sqlite"
KAGGLE, KAGGLE_ENDINGS = "kaggledbqa", {"train": "_fewshot", "test": "_test", "dev": ""}
KAGGLE_HINT = "KaggleDBQA's layout is examples/<db_id>_test.json and databases/<db_id>/<db_id>.sqlite"


@dataclasses.dataclass(frozen=True)
class Variant:
    """The published files of one variant."""

    # a split's question files, all of them; where none is there, `<split>.json` is asked for.
    files: Mapping[str, tuple[str, ...]]
    folders: tuple[str, ...] = (".",)  # where, relative to the path, its files may lie; the first that has them counts.
    question: str = "question"  # the field that holds the question.


VARIANTS = {
    "spider": Variant({"train": ("train_spider.json", OTHERS), "dev": ("dev.json",), "test": ("test.json",)}),
    # Gan et al., 2021b: 535 questions that need domain knowledge
    "dk": Variant(dict.fromkeys(("dev", "test"), ("Spider-DK.json",)), (".", "Spider-DK")),
    # Gan et al., 2021a: schema words replaced by synonyms; its files bear Spider's own names
    "syn": Variant(
        {"train": ("train_spider.json",), **dict.fromkeys(("dev", "test"), ("dev.json",))},
        ("Spider-Syn/Spider-Syn", "Spider-Syn", "."),
        "SpiderSynQuestion",
    ),
    # Deng et al., 2021: column names left out of the questions
    "realistic": Variant(dict.fromkeys(("dev", "test"), ("spider-realistic.json",)), (".", "spider-realistic")),
    # Yu et al., 2019a and 2019b: questions in conversations
    "sparc": Variant({"train": ("train.json",), "dev": ("dev.json",)}, question="utterance"),
    "cosql": Variant(
        {"train": ("cosql_train.json",), "dev": ("cosql_dev.json",)}, ("sql_state_tracking", "."), "utterance"
    ),
}
CONVERSATIONS = ("sparc", "cosql")


class SpiderOptions(Section):
    """The variant, and the parts of it."""

    # Spider itself, one of its robustness variants, or one of its conversations.
    variant: Literal["spider", "dk", "syn", "realistic", "sparc", "cosql"] = "spider"
    databases: str | None = None  # the folder of databases, relative to the path; null finds it.
    # whether train has the 1,659 questions of older benchmarks too (train_others.json), beside Spider's own 7,000.
    others: bool = True


def spider_files(source: Source) -> Iterator[Path]:
    """The question files, each database that they name in every folder where it may lie, and the natural names."""
    return itertools.chain(_layout(source).paths(), tables_of(source_folder(source)))


@reader("spider", options=SpiderOptions, files=spider_files)
def read_spider(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split."""

    def finish(example: Example, row: Any) -> Example:
        meta = {**example.meta, "interaction": example.id.rpartition("_")[0], "history": history_field(row)}
        return dataclasses.replace(example, meta=meta)

    layout = _layout(source)
    return layout.read(source, root) if layout.turns is None else layout.read(source, root, finish)


def turns(entry: Any) -> Iterator[Any]:
    """The rows of a conversation, each with those before it as history; an entry that is none stays as it is."""
    rows = entry.get("interaction") if isinstance(entry, dict) else None
    history: list[list[str]] = []
    for row in rows if isinstance(rows, list) else ():
        yield {**row, "db_id": entry.get("database_id"), "history": [*history]} if isinstance(row, dict) else row
        history += [[str(row.get(name) or "") for name in ("utterance", "query")]] if isinstance(row, dict) else []
    if not isinstance(rows, list):
        yield entry


@reader(KAGGLE, options=Section, files=spider_files)
def read_kaggle(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, by database in the order of their names."""
    return _layout(source).read(source, root)


def _layout(source: Source) -> Layout:
    folder, split = source_folder(source), source.split
    if source.kind == KAGGLE:
        ending, parts = KAGGLE_ENDINGS[split], tuple(filter(None, KAGGLE_ENDINGS.values()))
        paths = sorted((folder / "examples").glob(f"*{ending}.json"))
        chosen = [path for path in paths if ending or not path.stem.endswith(parts)]
        if not chosen:
            raise DataError(f"no questions of split {split} under {folder / 'examples'}", KAGGLE_HINT)
        files = [QuestionFile(path, path.name, path.stem) for path in chosen]
        places = (folder / "databases", folder / "database")
        home = next((place for place in places if place.is_dir()), places[0])
        return Layout(KAGGLE, KAGGLE_HINT, files, lambda id: [home / id / f"{id}.sqlite"])
    options = SpiderOptions.model_validate(source.options)
    variant = VARIANTS[options.variant]
    names = [name for name in variant.files.get(split, ()) if options.others or name != OTHERS]
    found = ([path for name in names if (path := folder / home / name).is_file()] for home in variant.folders)
    own = options.variant == "spider" or not names
    paths = next(filter(None, found), [folder / (f"{split}.json" if own else names[0])])
    # Folders of databases, the likeliest first.
    homes = list(dict.fromkeys((folder / "database", paths[0].parent / "database")))
    if options.databases:
        homes = [folder / options.databases]
    elif options.variant == "spider" and split == "test" and (folder / "test_database").is_dir():
        homes = [folder / "test_database"]
    return Layout(
        "spider" if options.variant == "spider" else f"spider_{options.variant}",
        HINT,
        [QuestionFile(path, path.name, path.stem) for path in paths],
        lambda id: [home / id / f"{id}.sqlite" for home in homes],
        question=variant.question,
        main_folder="database",
        turns=turns if options.variant in CONVERSATIONS else None,
    )
