"""The papers' tables as sweeps: every file makes real cells, every figure has one; docs/papers.md tells the truth."""

import re
import shlex
from pathlib import Path

import pytest

from flows import sweeping
from pipelines import paper_tables, recipes
from pipelines.errors import RecipeError
from pipelines.evaluation.measures import measure
from pipelines.report.sweep import BENCHMARK, ROW, SEED, Filled, table
from pipelines.store import Store

PAGE = Path(__file__).resolve().parents[2] / "docs" / "papers.md"
COUNTS = {  # tables and figures of each paper, counted in its text
    "SQL-Trail": (9, 10),
    "TRUST-SQL": (12, 7),
    "Reasoning-SQL": (6, 9),
    "SkyRL-SQL": (5, 6),
    "MTIR-SQL": (5, 5),
}
SMALL = [name for name in paper_tables.names() if paper_tables.load(name).miniature is not None]


@pytest.mark.parametrize(
    ("name", "miniature"), [*((name, False) for name in paper_tables.names()), *((name, True) for name in SMALL)]
)
def test_every_table_is_a_sweep_of_real_cells(name: str, miniature: bool, tmp_path: Path) -> None:
    source = paper_tables.load(name)
    seed = ["seed=4"] if source.claim is not None else []
    cells, empty = sweeping.of_paper(name, seed, None, miniature)
    *lines, _ = sweeping.outlook(cells, Store(tmp_path))
    assert not [line for line in lines if "cannot be made" in line]
    rows = {cell.values[ROW] for cell in cells}
    assert rows == set(source.form(miniature).rows)
    assert source.paper.startswith(tuple(COUNTS))
    if source.reported and not miniature:
        asked = {(cell.values[ROW], cell.values.get(BENCHMARK, _only_benchmark(source.axes))) for cell in cells}
        reported = {(row, benchmark) for row, each in source.reported.items() for benchmark in each}
        assert reported <= asked
    shown = table(empty_of(empty, [cell.values for cell in cells]))
    assert len(shown.rows) == len({sweeping.named({**cell.values, SEED: ""}) for cell in cells})


@pytest.mark.parametrize("name", paper_tables.names())
def test_the_command_in_a_files_head_is_its_own(name: str) -> None:
    text = (paper_tables.FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    shown = [shlex.split(line) for line in re.findall(r"^# (?:Command)? +(sqltrain .+)$", text, re.MULTILINE)]
    assert shown
    for command in shown:
        assert command[:3] == ["sqltrain", "sweep", name]
        recipes.load(paper_tables.load(name).recipe, [word for word in command[3:] if word != "--miniature"])


def empty_of(empty: sweeping.Sweep, values: list[dict[str, str]]) -> sweeping.Sweep:
    from dataclasses import replace

    return replace(empty, cells=tuple(Filled(each, error="not made") for each in values))


def _only_benchmark(axes: tuple[str, ...]) -> str:
    return next(word.partition("=")[2] for word in axes if word.startswith("benchmark="))


def test_figures_are_shares_in_percent_and_the_papers_are_the_ones_known_by_heart() -> None:
    for name in paper_tables.names():
        source = paper_tables.load(name)
        for row, benchmarks in source.reported.items():
            for figures in benchmarks.values():
                shares = [value for key, value in figures.items() if measure(key).kind == "percent"]
                assert all(2 < value < 100 for value in shares), (name, row)
    ours = paper_tables.load("sql_trail/table6").reported
    assert ours["all rewards"]["bird_dev"]["greedy"] == recipes.load("sql_trail").reported["bird_dev"] == 60.1
    curve = paper_tables.load("trust_sql/figure4").reported
    assert [each["bird_dev"]["greedy"] for each in curve.values()] == [58.7, 60.9, 64.0, 64.5, 54.2]


GOOD = {
    "paper": "SQL-Trail, table 0",
    "title": "t",
    "recipe": "miniature",
    "rows": {"a": ["variant=none"], "b": ["variant=no_turns"]},
    "baseline": "a",
    "measures": ["greedy"],
}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"baseline": "c"}, "there is no row 'c'"),
        ({"reported": {"c": {"x": {"greedy": 1}}}}, "there is no row 'c'"),
        ({"reported": {"a": {"x": {"turns": 1}}}}, "which no column shows"),
        ({"measures": ["ex"]}, "there is no measure 'ex'"),
        ({"rows": {"a": "variant=none"}}, "rows.a"),
        ({"row": {}}, "row: Extra inputs"),
        ({"miniature": {"recipe": "miniature", "rows": {"b": []}}}, "which is the baseline"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tmp_path: Path, change: dict[str, object], said: str) -> None:
    import json

    place = tmp_path / "t.yaml"
    place.write_text(json.dumps(GOOD))
    paper_tables.read(place)
    place.write_text(json.dumps(GOOD | change))
    with pytest.raises(RecipeError, match=said):
        paper_tables.read(place)


def test_a_table_that_is_not_there_is_named_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="Did you mean 'sql_trail/table6'"):
        paper_tables.load("sql_trail/tabel6")
    with pytest.raises(RecipeError, match="has no miniature"):
        paper_tables.load("sql_trail/table5").form(True)


def rows_of_the_page() -> dict[str, list[list[str]]]:
    """The cells of each row of docs/papers.md, by paper."""
    found: dict[str, list[list[str]]] = {}
    paper = ""
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            paper = line.removeprefix("## ").partition(" (")[0]
        elif line.startswith(("| table", "| figure")):
            found.setdefault(paper, []).append([cell.strip() for cell in line.strip("|").split(" | ")])
    return found


def test_the_page_has_every_table_and_figure_once_in_one_of_three_states() -> None:
    page = rows_of_the_page()
    assert list(page) == list(COUNTS)
    for paper, (tables, figures) in COUNTS.items():
        wanted = [*(f"table {at}" for at in range(1, tables + 1)), *(f"figure {at}" for at in range(1, figures + 1))]
        assert [row[0].partition(":")[0] for row in page[paper]] == wanted
        for what, state, how in page[paper]:
            assert state in ("made", "needs", "no"), what
            assert how
            assert "`sqltrain" in how or state == "no", what


def commands() -> list[list[str]]:
    return [shlex.split(each) for each in re.findall(r"`(sqltrain [^`]+)`", PAGE.read_text(encoding="utf-8"))]


def test_every_command_of_the_page_names_what_is_there() -> None:
    swept = set()
    for _, verb, *words in commands():
        if verb == "sweep":
            swept.add(words[0])
        elif verb in ("run", "evaluate"):
            skipped = {at + 1 for at, word in enumerate(words) if word.startswith("--")}
            overrides = [word for at, word in enumerate(words) if at not in skipped and not word.startswith("--")]
            recipes.load(overrides[0], overrides[1:])
        elif words:
            assert [verb, words[0]] == ["data", "add"]
            assert words[1:] == [] or (recipes.CONF / "data" / f"{words[1]}.yaml").is_file()
    assert swept == set(paper_tables.names()) - set(paper_tables.claims())  # each file is named, and no other


def test_the_page_promises_a_miniature_where_there_is_one() -> None:
    for rows in rows_of_the_page().values():
        for what, _, how in rows:
            named = set(re.findall(r"sweep (\S+/[a-z0-9]+)`", how))
            if "`--miniature`" in how:
                assert named & set(SMALL), what
            elif len(named) == 1 and "has its" not in how:
                assert not named & set(SMALL), what
