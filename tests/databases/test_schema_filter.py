"""The schema filter: what it chooses by hand, its budget, and where it stands in prompts."""

import sqlite3
from dataclasses import replace

import pytest

from pipelines.core.types import Database, Example, SchemaItems
from pipelines.databases.of_recipe import schemas, sql_engine, with_prompt_facts
from pipelines.databases.schema_filter import CHARS_PER_TOKEN, SchemaFilter, link_locally
from pipelines.protocols.base import build_protocol
from pipelines.recipe.recipes import load
from pipelines.sql.schema import Column, ForeignKey, Schema, Table, render

SCHOOL = Schema(
    (
        Table("Student", (Column("StuID", "INTEGER", True), Column("LName", "TEXT"), Column("Advisor", "INTEGER"))),
        Table("Faculty", (Column("FacID", "INTEGER", True), Column("Rank", "TEXT"), Column("Phone", "TEXT"))),
        Table("GradeConversion", (Column("lettergrade", "TEXT", True), Column("gradepoint", "FLOAT"))),
        Table(
            "Enrolled_in",
            (Column("StuID", "INTEGER"), Column("CID", "TEXT"), Column("Grade", "TEXT")),
            (ForeignKey("StuID", "Student", "StuID"), ForeignKey("CID", "Course", "CID")),
        ),
        Table("Course", (Column("CID", "TEXT", True), Column("CName", "TEXT"), Column("Credits", "INTEGER"))),
    )
)


@pytest.mark.parametrize(
    ("question", "mentioned", "items"),
    [
        ("the ranks of all faculty", (), {("faculty", "rank")}),  # word stems
        ("the highest grade point", (), {("gradeconversion", "gradepoint")}),  # two words are one name
        ("name of the course called ALGEBRA", (), {("course", "cname")}),  # a name's part in camel case
        ("who is LINDA", [("Student", "LName")], {("student", "lname")}),  # a stored value
    ],
)
def test_columns_that_a_question_names_come_first(question, mentioned, items):
    chosen = SchemaFilter(SCHOOL, False).choose(question, 40, mentioned)
    assert items <= chosen.columns
    assert len(chosen.tables) < len(SCHOOL.tables)


def test_what_is_chosen_beside_the_named_columns():
    # Student and Course have no key in common: Enrolled_in joins them, though the question does not name it
    chosen = SchemaFilter(SCHOOL, False).choose("students of the course with the most credits", 120)
    assert {"student", "course", "enrolled_in"} <= chosen.tables
    assert {("enrolled_in", "stuid"), ("enrolled_in", "cid")} <= chosen.columns
    assert SchemaFilter(SCHOOL, False).choose('" OR NEAR( * ^ -', 60).tables
    assert SchemaFilter(SCHOOL, False).choose("", 0) == SchemaItems(frozenset(), frozenset())
    asked = Example("ask", "ranks of faculty", Database("school", "sqlite", "school"), "")
    assert link_locally([asked], lambda _: SCHOOL, 1000, False, "fitted_schema") == [asked]
    (linked,) = link_locally([asked], lambda _: SCHOOL, 1000, False)
    assert linked.meta["linked_schema"]["tables"] == sorted(table.name.lower() for table in SCHOOL.tables)


@pytest.mark.parametrize("is_brief", [False, True])
@pytest.mark.parametrize("tokens", [10, 30, 60, 100, 200])
def test_the_chosen_part_stays_within_its_budget_and_fills_it(tokens, is_brief):
    columns = tuple(Column(f"Column {number}", "TEXT", number == 0, ("a b", "c")) for number in range(9))
    key = ForeignKey("Column 0", "table_0", "Column 0")
    schema = Schema(tuple(Table(f"table_{number}", columns, (key,) if number else ()) for number in range(9)))
    chosen = SchemaFilter(schema, is_brief).choose("column 3 of table 5", tokens)
    text = render(schema, "compact" if is_brief else "ddl", chosen)
    size = len(text.split()) if is_brief else len(text) / CHARS_PER_TOKEN
    assert size <= tokens
    assert size >= tokens / 2 or tokens < 60  # a table with its keys takes up to 40


def test_a_served_database_that_is_too_large_is_shown_in_part(tmp_path):
    """300 tables of 8 columns are some 20,000 tokens: the prompt shows what fits half of an episode, and says so."""
    place = tmp_path / "big.sqlite"
    with sqlite3.connect(place) as connection:
        for number in range(300):
            columns = ", ".join(f"field_{number}_{part} TEXT" for part in range(8))
            connection.execute(f"CREATE TABLE area_{number} (id INTEGER PRIMARY KEY, {columns})")
    recipe = load("sql_trail", ["evaluation.sampling.episode_tokens=4000"])
    schema, database = schemas(recipe), Database("big", "sqlite", str(place))
    asked = Example("ask", "how many rows of area 217 have a field 217 3?", database, "")
    gold = replace(asked, gold_sql="SELECT field_217_3 FROM area_217")
    fits = load("sql_trail", ["data.linker=fit", "data.linker_tokens=2000"])
    with sql_engine(recipe, 1) as sql:
        (shown,) = with_prompt_facts([asked], recipe, schema, sql, is_served=True)
        (whole,) = with_prompt_facts([asked], recipe, schema, sql)
        assert [shown.meta] == [each.meta for each in with_prompt_facts([gold], fits, schema, sql)]
    prompts = [
        "\n".join(text for _, text in build_protocol(recipe.protocol).prompt(one, schema(database), 5))
        for one in (shown, whole)
    ]
    assert "area_217" in prompts[0]
    assert "Only the tables and columns that the question may need are given." in prompts[0]
    assert len(prompts[0]) < 2000 * CHARS_PER_TOKEN + 6000  # the schema's part, and the instruction
    assert len(prompts[1]) > 60_000
    assert whole == asked
