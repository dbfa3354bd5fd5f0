"""Leakage: training questions that the benchmark asks too, by three measures."""

from pipelines.curation import leakage
from pipelines.types import Database, Example


def ask(id: str, question: str, sql: str, database: str = "d") -> Example:
    return Example(id, question, Database(database, "sqlite", ""), sql)


HELD_OUT = [
    ask("h1", "How many singers are there?", "SELECT count(*) FROM singer"),
    ask("h2", "Show the names of all clubs in Köln.", "SELECT name FROM club WHERE city = 'Köln'"),
]


def test_each_kind_is_found_once_and_the_strictest_wins() -> None:
    train = [
        ask("a", "How many singers are there? ", "SELECT count(*) FROM singer"),
        ask("b", "names of clubs in koln", "SELECT 1"),
        ask("c", "Which clubs play in Bonn?", "select T1.name from club as T1 where T1.city = 'Bonn'"),
        ask("d", "How many clubs?", "SELECT count(*) FROM club"),
    ]
    found = leakage.leaks(train, HELD_OUT)
    assert [(one.kind, one.train, one.held_out) for one in found] == [
        ("exact", "a", "h1"),
        ("normalised", "b", "h2"),
        ("sql", "c", "h2"),
    ]


def test_the_same_words_about_another_database_are_told_apart() -> None:
    found = leakage.report([ask("a", "How many singers are there?", "SELECT count(*) FROM singer", "e")], HELD_OUT)
    assert found["any_database"] == {"exact": 1, "normalised": 0, "sql": 0}
    assert found["same_database"] == {"exact": 0, "normalised": 0, "sql": 0}
    assert found["shared_databases"] == []


def test_questions_of_fillers_alone_are_not_all_alike() -> None:
    assert (
        leakage.leaks([ask("a", "Show me all", "SELECT a FROM t")], [ask("h", "What is it of", "SELECT b FROM u")])
        == []
    )
