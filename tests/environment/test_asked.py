"""What a client of a server may ask for: the recipe's questions, and rows whose database lies in the given folder."""

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelines.core.errors import DataError, UserError
from pipelines.core.types import Example
from pipelines.environment.core import Environment, asked_question, example_of, row_of

SMALL = ("data.rl=[{kind: miniature, split: train, options: {databases: 2, questions: 3}}]",)


@pytest.fixture(scope="module")
def environment() -> Iterator[Environment]:
    with Environment("skyrl_sql", SMALL) as made:
        yield made


def test_a_question_is_asked_by_its_pool_and_index(environment: Environment) -> None:
    pool = environment.questions("rl")
    assert len(pool) == 6
    question = asked_question({"pool": "rl", "index": 5}, environment.questions, None)
    assert question.id == pool[5].id
    session = environment.reset(question)
    assert session.step(f"<think>a</think>\n<solution>{question.gold_sql}</solution>").reward == 1.0
    for wrong in ({"pool": "rl", "index": 6}, {"pool": "rl", "index": -1}, {"pool": "none"}, {"pool": 3}):
        with pytest.raises(DataError):
            asked_question(wrong, environment.questions, None)


def test_a_clients_row_names_only_files_of_the_folder(
    environment: Environment, questions: list[Example], tmp_path: Path
) -> None:
    folder = tmp_path / "databases"
    folder.mkdir()
    shutil.copy(questions[0].database.location, folder / "shop.sqlite")
    shutil.copy(questions[0].database.location, tmp_path / "secret.sqlite")
    (folder / "link.sqlite").symlink_to(tmp_path / "secret.sqlite")
    row = {"question": questions[0].question, "sql": questions[0].gold_sql}
    found = asked_question({**row, "database": "shop.sqlite"}, environment.questions, folder)
    assert found.database.location == str(folder / "shop.sqlite")
    (folder / "ring.sqlite").symlink_to(folder / "ring.sqlite")
    outside = ("../secret.sqlite", str(tmp_path / "secret.sqlite"), "link.sqlite", "none.sqlite", "postgresql://h/d", 3)
    for database in (*outside, "a\0b", "x" * 300, "ring.sqlite", "half \ud800.sqlite"):
        with pytest.raises(DataError):
            asked_question({**row, "database": database}, environment.questions, folder)
    with pytest.raises(DataError):
        asked_question({**row_of(questions[0]), "database": "shop.sqlite"}, environment.questions, folder)
    with pytest.raises(DataError, match="takes no rows"):
        asked_question({**row, "database": "shop.sqlite"}, environment.questions, None)


def test_a_row_carries_a_whole_example(questions: list[Example]) -> None:
    assert example_of(row_of(questions[0])) == questions[0]
    for wrong in ("", "[]", "{}", '{"id": 3}', "[" * 100_000):
        with pytest.raises(DataError):
            example_of({"record": wrong})


def test_environment_serve_names_the_extra_if_openenv_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from flows.commands.use import serve_environment

    monkeypatch.setitem(sys.modules, "openenv", None)
    monkeypatch.delitem(sys.modules, "pipelines.environment.openenv", raising=False)
    with pytest.raises(UserError, match=r"openenv.* is not installed") as error:
        serve_environment("skyrl_sql")
    assert "sqltrain[openenv]" in str(error.value)
