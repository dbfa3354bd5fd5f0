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
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from pipelines.benchmarks.base import Layout, Loaded, QuestionFile, source_folder
from pipelines.benchmarks.prompt_schema import natural_name_files
from pipelines.core.errors import DataError, warn_once
from pipelines.core.registry import reader
from pipelines.core.types import Example, history_field
from pipelines.recipe.config import Section, Source

log = logging.getLogger(__name__)
OTHERS = "train_others.json"
HINT = "Spider's layout is train.json, dev.json and database/<db_id>/<db_id>.sqlite"
KAGGLE = "kaggledbqa"
KAGGLE_ENDINGS = {"train": "_fewshot", "test": "_test", "dev": ""}  # ends of its question files, by split
KAGGLE_HINT = "KaggleDBQA's layout is examples/<db_id>_test.json and databases/<db_id>/<db_id>.sqlite"


@dataclasses.dataclass(frozen=True)
class Variant:
    """The published files of one variant."""

    # The question files of each split, all of which are read; `<split>.json` is asked for if none is there.
    files: Mapping[str, tuple[str, ...]]
    # Folders that may hold its files, relative to the path; the first that has some counts.
    folders: tuple[str, ...] = (".",)
    question: str = "question"  # the field that holds the question.


VARIANTS = {
    "spider": Variant(files={"train": ("train_spider.json", OTHERS), "dev": ("dev.json",), "test": ("test.json",)}),
    # Gan et al., 2021b: 535 questions that need domain knowledge
    "dk": Variant(files={"dev": ("Spider-DK.json",), "test": ("Spider-DK.json",)}, folders=(".", "Spider-DK")),
    # Gan et al., 2021a: schema words replaced by synonyms; its files bear Spider's own names
    "syn": Variant(
        files={"train": ("train_spider.json",), "dev": ("dev.json",), "test": ("dev.json",)},
        folders=("Spider-Syn/Spider-Syn", "Spider-Syn", "."),
        question="SpiderSynQuestion",
    ),
    # Deng et al., 2021: column names left out of the questions
    "realistic": Variant(
        files={"dev": ("spider-realistic.json",), "test": ("spider-realistic.json",)}, folders=(".", "spider-realistic")
    ),
    # Yu et al., 2019a and 2019b: questions in conversations
    "sparc": Variant(files={"train": ("train.json",), "dev": ("dev.json",)}, question="utterance"),
    "cosql": Variant(
        files={"train": ("cosql_train.json",), "dev": ("cosql_dev.json",)},
        folders=("sql_state_tracking", "."),
        question="utterance",
    ),
}
CONVERSATIONS = ("sparc", "cosql")


class SpiderOptions(Section):
    """The variant, and its parts."""

    # Spider itself, one of its robustness variants, or one of its conversations.
    variant: Literal["spider", "dk", "syn", "realistic", "sparc", "cosql"] = "spider"
    databases: str | None = None  # the folder of databases, relative to the path; null finds it.
    # whether train has the 1,659 questions of older benchmarks too (train_others.json), beside Spider's own 7,000.
    others: bool = True


def spider_files(source: Source) -> Iterator[Path]:
    """The question files, each database that they name in every folder where it may lie, and the natural names."""
    layout = _layout(source)
    natural_names = natural_name_files(source_folder(source))
    return itertools.chain(layout.paths(), natural_names)


@reader("spider", options=SpiderOptions, files=spider_files)
def read_spider(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split."""
    _warn_of_missing_files(source)
    layout = _layout(source)
    if layout.turns is None:
        return layout.read(source, root)
    return layout.read(source, root, _with_conversation)


def _warn_of_missing_files(source: Source) -> None:
    """Say which of the several files of a split are missing, so that their questions are not read."""
    folder = source_folder(source)
    options = SpiderOptions.model_validate(source.options)
    names = _file_names(source.split, options)
    existing_names = [path.name for path in _question_files(folder, source.split, options)]
    missing = [name for name in names if name not in existing_names]
    if missing and existing_names[0] in names:
        hint = ""
        if missing[0] == OTHERS:
            hint = " (options.others=false asks for no other)"
        message = "%s has no %s: the questions of split %s are those of %s alone%s"
        warn_once(log, message, folder, missing[0], source.split, existing_names[0], hint)


def _with_conversation(example: Example, row: Any) -> Example:
    """The example with its conversation and its history in `meta`."""
    interaction, _, _ = example.id.rpartition("_")
    history = history_field(row)
    n_questions = row.get("interaction_questions", 1)
    return example.with_meta(interaction=interaction, interaction_questions=n_questions, history=history)


def conversation_rows(entry: Any) -> Iterator[Any]:
    """The rows of a conversation, each with those before it as history, and the number of those that have SQL.

    An entry that is no conversation stays as it is.
    """
    if not isinstance(entry, dict) or not isinstance(entry.get("interaction"), list):
        yield entry
        return
    rows = entry["interaction"]
    n_questions = sum(isinstance(row, dict) and bool(row.get("query")) for row in rows)
    history: list[list[str]] = []
    for row in rows:
        if not isinstance(row, dict):
            yield row
            continue
        of_conversation = {
            "db_id": entry.get("database_id"),
            "history": list(history),
            "interaction_questions": n_questions,
        }
        yield row | of_conversation
        question = str(row.get("utterance") or "")
        sql = str(row.get("query") or "")
        history.append([question, sql])


@reader(KAGGLE, options=Section, files=spider_files)
def read_kaggle(source: Source, seed: int, root: Path) -> Loaded:
    """The questions of a split, by database in the order of their names."""
    return _layout(source).read(source, root)


def _layout(source: Source) -> Layout:
    if source.kind == KAGGLE:
        return _kaggle_layout(source)
    return _spider_layout(source)


def _kaggle_layout(source: Source) -> Layout:
    folder = source_folder(source)
    questions = folder / "examples"
    ending = KAGGLE_ENDINGS[source.split]
    endings_of_other_splits = tuple(filter(None, KAGGLE_ENDINGS.values()))
    files = []
    paths = sorted(questions.glob(f"*{ending}.json"))
    for path in paths:
        if ending or not path.stem.endswith(endings_of_other_splits):
            file = QuestionFile(path, path.name, path.stem)
            files.append(file)
    if not files:
        raise DataError(f"no questions of split {source.split} under {questions}", KAGGLE_HINT)
    home = folder / "databases"
    if not home.is_dir() and (folder / "database").is_dir():
        home = folder / "database"

    def database(id: str) -> list[Path]:
        return [home / id / f"{id}.sqlite"]

    return Layout(KAGGLE, KAGGLE_HINT, files, database)


def _spider_layout(source: Source) -> Layout:
    folder = source_folder(source)
    options = SpiderOptions.model_validate(source.options)
    paths = _question_files(folder, source.split, options)
    is_plain_spider = options.variant == "spider"
    name = "spider"
    if not is_plain_spider:
        name = f"spider_{options.variant}"
    test_home = folder / "test_database"
    if options.databases:
        homes = [folder / options.databases]
    elif is_plain_spider and source.split == "test" and test_home.is_dir():
        homes = [test_home]
    else:
        likeliest_first = (folder / "database", paths[0].parent / "database")
        homes = list(dict.fromkeys(likeliest_first))

    def databases(id: str) -> list[Path]:
        return [home / id / f"{id}.sqlite" for home in homes]

    return Layout(
        name=name,
        hint=HINT,
        files=[QuestionFile(path, path.name, path.stem) for path in paths],
        databases=databases,
        question=VARIANTS[options.variant].question,
        main_folder="database",
        turns=conversation_rows if options.variant in CONVERSATIONS else None,
    )


def _question_files(folder: Path, split: str, options: SpiderOptions) -> list[Path]:
    """The files of a variant's split in the first folder that has some; else the one that is asked for."""
    variant = VARIANTS[options.variant]
    names = _file_names(split, options)
    for home in variant.folders:
        paths = [folder / home / name for name in names]
        existing = [path for path in paths if path.is_file()]
        if existing:
            return existing
    if options.variant == "spider" or not names:
        return [folder / f"{split}.json"]
    return [folder / names[0]]


def _file_names(split: str, options: SpiderOptions) -> list[str]:
    """The names of the question files of a variant's split that the options ask for."""
    names = VARIANTS[options.variant].files.get(split, ())
    return [name for name in names if options.others or name != OTHERS]
