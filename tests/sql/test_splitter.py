"""Statements end where their own dialect says, and a quote that stays open is told."""

import pytest

from pipelines.sql.splitter import split_script, statement_texts


@pytest.mark.parametrize(
    ("engine", "script", "parts"),
    [
        ("sqlite", "SELECT 1; -- a;\nSELECT [a;b], `c;d`;", ["SELECT 1", "SELECT [a;b], `c;d`"]),
        ("sqlite", r"SELECT 'a\'; SELECT 'b';", [r"SELECT 'a\'", "SELECT 'b'"]),
        ("mysql", r"SELECT 'it\'s;'; SELECT 'a''\';';", [r"SELECT 'it\'s;'", r"SELECT 'a''\';'"]),
        ("mysql", "# a; b\nSELECT 1--1; -- c;\nSELECT 2", ["SELECT 1--1", "SELECT 2"]),
        ("postgres", "SELECT $$a;b$$, $x$;$$;$x$; SELECT E'\\';'", ["SELECT $$a;b$$, $x$;$$;$x$", "SELECT E'\\';'"]),
        ("postgres", "SELECT '\\'; /* a; /* b */ c; */ SELECT x$1$y;", ["SELECT '\\'", "SELECT x$1$y"]),
        ("duckdb", "SELECT ['a;', ']']; SELECT e'\\';'", ["SELECT ['a;', ']']", "SELECT e'\\';'"]),
        ("sqlite", "CREATE TRIGGER t BEGIN SELECT 1; SELECT 2; END; SELECT 3",
         ["CREATE TRIGGER t BEGIN SELECT 1; SELECT 2; END", "SELECT 3"]),
        ("another", "SELECT ';'; SELECT 2", ["SELECT ';'", "SELECT 2"]),
    ],
)  # fmt: skip
def test_a_statement_ends_where_its_dialect_says(engine, script, parts):
    assert statement_texts(script, engine) == parts


@pytest.mark.parametrize(
    ("engine", "open_text"),
    [("sqlite", "'a"), ("sqlite", "[a"), ("mysql", r"'a\'"), ("postgres", "$x$a$$"), ("duckdb", "/* /* a */")],
)
def test_an_open_quote_is_told_with_the_end_that_it_may_hide(engine, open_text):
    script = f"SELECT 1;\nSELECT {open_text};\nSELECT 2;\n"
    first, last = split_script(script, engine)
    assert (first.text, first.is_closed, first.inner_end) == ("SELECT 1", True, None)
    assert (last.is_closed, last.begin, last.end) == (False, 10, len(script))
    assert script[: last.inner_end] == f"SELECT 1;\nSELECT {open_text}"
