"""The papers' tables as sweeps: every file makes real cells, every figure has one, and the page lists them."""

import dataclasses
import json
import re
import shlex
from pathlib import Path

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.evaluation.measures import measure
from pipelines.recipe import recipes
from pipelines.sweeps import paper_tables, sweep_plan
from pipelines.sweeps.sweep_table import BENCHMARK, ROW, SEED, FinishedCell, table

PAGES = sorted((Path(__file__).resolve().parents[2] / "docs" / "reference" / "papers").glob("*.md"))
COUNTS = {  # tables and figures of each paper, counted in its text
    "SQL-Trail": (9, 10),
    "TRUST-SQL": (12, 7),
    "Reasoning-SQL": (6, 9),
    "SkyRL-SQL": (5, 6),
    "MTIR-SQL": (5, 5),
}
SMALL = [name for name in paper_tables.table_names() if paper_tables.load_table(name).miniature is not None]


@pytest.mark.parametrize(
    ("name", "miniature"), [*((name, False) for name in paper_tables.table_names()), *((name, True) for name in SMALL)]
)
def test_every_table_is_a_sweep_of_real_cells(name, miniature, tmp_path):
    source = paper_tables.load_table(name)
    seed = ["seed=4"] if source.claim is not None else []
    cells, empty = sweep_plan.cells_of_paper_table(name, seed, None, miniature)
    *lines, _ = sweep_plan.forecast(cells, Store(tmp_path))
    assert not [line for line in lines if "cannot be made" in line]
    assert {cell.values[ROW] for cell in cells} == set(source.form(miniature).rows)
    assert source.paper.startswith(tuple(COUNTS))
    if source.reported and not miniature:
        only = next(word.partition("=")[2] for word in source.axes if word.startswith("benchmark="))
        asked = {(cell.values[ROW], cell.values.get(BENCHMARK, only)) for cell in cells}
        assert {(row, benchmark) for row, each in source.reported.items() for benchmark in each} <= asked
    failed = tuple(FinishedCell(cell.values, error="not made") for cell in cells)
    shown = table(dataclasses.replace(empty, cells=failed))
    assert len(shown.rows) == len({sweep_plan.cell_title({**cell.values, SEED: ""}) for cell in cells})


@pytest.mark.parametrize("name", paper_tables.table_names())
def test_the_command_in_a_files_head_is_its_own(name):
    shown = commands_in(paper_tables.FOLDER / f"{name}.yaml")
    assert shown
    for command in shown:
        assert command[:3] == ["sqltrain", "sweep", name]
        words = [word for word in command[3:] if word != "--miniature"]
        assert sweep_plan.cells_of_paper_table(name, words, None, "--miniature" in command)[0]


def commands_in(path):
    """The commands of a file's head, each as its words; one goes on after a backslash."""
    text = path.read_text(encoding="utf-8").replace("\\\n#", "")
    return [shlex.split(line) for line in re.findall(r"^# (?:Command)? +(sqltrain .+)$", text, re.MULTILINE)]


def keys(words):
    return {word.partition("=")[0] for word in words}


@pytest.mark.parametrize("name", [name for name in paper_tables.table_names() if not name.startswith("claims/")])
def test_a_tables_command_names_what_its_recipes_does(name):
    """As printed before, the commands trained a 7B model on the scripted teacher's demonstrations, on one process."""
    source = paper_tables.load_table(name)
    cells = sweep_plan.cells_of_paper_table(name, [], None, False)[0]
    given = keys(commands_in(paper_tables.FOLDER / f"{name}.yaml")[0][3:])
    trained = any({"sft", "grpo"} & set(cell.recipe.stages) for cell in cells)
    wanted = keys(commands_in(recipes.CONF / "recipes" / f"{source.recipe}.yaml")[0][3:])
    wanted = {key for key in wanted if not key.startswith("data.test")}  # the table's axis names the benchmarks
    if not trained:
        wanted &= {"hardware.device", "rollout.policy", "rollout.servers"}
    if len({cell.recipe.model.source for cell in cells}) > 1:
        wanted = wanted - {"rollout.servers"} | {"rollout.python"}  # a run starts servers of each size
    assert wanted <= given
    if trained and source.recipe == "trust_sql":
        assert {"synthesis.mix", "synthesis.every"} <= given
    if trained and source.recipe == "reasoning_sql":
        assert {"rewards.judge.options.by", "data.linker", "data.cleaners", "variant"} <= given


TAUGHT = [name for name in paper_tables.table_names() if paper_tables.load_table(name).recipe == "trust_sql"]


@pytest.mark.parametrize("name", [name for name in TAUGHT if name != "trust_sql/figure3"])
def test_each_of_trust_sqls_teachers_is_asked_as_often_as_its_table_6_needs(name):
    """43,803 right trajectories of 5,575 questions are 7.86 each: three samples cannot give them, eight can."""
    words = commands_in(paper_tables.FOLDER / f"{name}.yaml")[0][3:]
    taught = [cell.recipe for cell in sweep_plan.cells_of_paper_table(name, words, None, False)[0]]
    taught = [recipe.synthesis for recipe in taught if "synthesize" in recipe.stages]
    assert {(len(each.teachers), each.every, each.samples) for each in taught} == {(3, True, 8)}
    assert 43_803 / 5_575 < 8


def test_mtir_sqls_sft_baseline_is_cross_entropy_on_gold_sql_in_one_turn():
    """Section 4.1: Qwen2.5-Coder-7B-Instruct, "identical training procedures", no feedback; no table has its figure."""
    row = "direct output, SFT of Qwen2.5-Coder-7B"
    recipe = recipe_of("mtir_sql/table4", row)
    assert recipe.model.source == "Qwen/Qwen2.5-Coder-7B-Instruct"
    assert ("sft" in recipe.stages, "grpo" in recipe.stages) == (True, False)
    assert (recipe.sft.batch, recipe.sft.optimizer.lr) == (64, 1e-6)
    assert (recipe.protocol.max_turns, recipe.protocol.max_turns_eval, recipe.protocol.reasoning) == (1, 1, False)
    assert [teacher.error_rate for teacher in recipe.synthesis.teachers] == [0.0]
    prompt = (recipes.CONF / "protocols" / "prompts" / "tool_call_answer.txt").read_text(encoding="utf-8")
    assert "/no_think" not in prompt  # Qwen3's switch means nothing to Qwen2.5
    assert row not in paper_tables.load_table("mtir_sql/table4").reported


def test_trust_sqls_run_evaluates_the_benchmark_of_its_headline_first():
    """Its own command evaluated Spider's test set alone; 64.9 is of BIRD dev."""
    recipe = recipes.load("trust_sql")
    assert [(each.kind, each.split) for each in recipe.data.test] == [("bird", "dev"), ("spider", "test")]
    assert {"data.test.0.path", "data.test.1.path"} <= keys(commands_in(recipes.CONF / "recipes" / "trust_sql.yaml")[0])


def recipe_of(name, row, miniature=False):
    """The recipe that a row's checkpoint is evaluated by."""
    cells, *_ = sweep_plan.cells_of_paper_table(name, [], None, miniature)
    cell = next(cell for cell in cells if cell.values[ROW] == row)
    return recipes.load(cell.source, [*cell.overrides, *cell.asked])


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("reasoning_sql/table1", "Qwen2.5-Coder-7B"),
        *(("reasoning_sql/table2", row) for row in ("3B", "7B", "14B")),
        *(("reasoning_sql/table5", row) for row in ("7B", "14B")),
    ],
)
def test_reasoning_sqls_base_models_answer_without_reasoning(name, row):
    """Tables 1, 2 and 5, "Thinking": a cross for each base model and each SFT model."""
    for recipe in (recipe_of(name, row), recipe_of(name, "SFT" if name.endswith("1") else f"{row} SFT")):
        assert (recipe.protocol.prompt, recipe.protocol.reasoning) == ("direct", False)
    assert recipe_of(name, row).stages == ("data", "gold_schema", "evaluate", "report")
    small = paper_tables.load_table(name).miniature
    if small is not None and row in small.rows:
        assert not recipe_of(name, row, miniature=True).protocol.reasoning


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("mtir_sql/figure3", "GRPO"),
        ("mtir_sql/table4", "multi-turn, GRPO"),
        ("mtir_sql/table4", "standard reasoning, GRPO"),
    ],
)
def test_mtir_sqls_grpo_figures_belong_to_grpo_with_a_kl_term(name, row):
    """Section 3.1: "Unlike standard GRPO, we remove the KL divergence constraint": 60.3 and 58.9 have the term."""
    recipe = recipe_of(name, row)
    assert recipe.grpo.beta > 0
    assert recipe.grpo.drop == ()
    assert paper_tables.load_table(name).reported[row]["bird_dev"]["greedy"] in (60.3, 58.9)
    assert "GRPO without KL" not in paper_tables.load_table("mtir_sql/figure3").reported


def test_mtir_sqls_format_rows_are_held_against_training_without_the_filter():
    against = paper_tables.load_table("mtir_sql/table5").against
    base = recipe_of("mtir_sql/table5", "w/o the filter")
    for row in ("w/o R_format", "R_format 0.2", "R_format 0.3"):
        recipe = recipe_of("mtir_sql/table5", row)
        assert against[row] == "w/o the filter"
        assert recipe.grpo == base.grpo
        assert [term.term for term in recipe.rewards] == [term.term for term in base.rewards]


def test_each_figure_of_single_pass_rl_has_one_table():
    """SQL-Trail: 56.3 is of RL from the base model without the turn reward; the paper does not say what 62.1 is of."""
    recipe = recipe_of("sql_trail/table2", "single-turn RL")
    assert "sft" not in recipe.stages
    assert [term.weight for term in recipe.rewards if term.term == "turns"] == [0]
    assert paper_tables.load_table("sql_trail/table2").reported["single-turn RL"]["bird_dev"]["majority"] == 56.3
    table8 = paper_tables.load_table("sql_trail/table8")
    assert not [row for row in table8.reported if "RL, single" in row]
    assert any("62.1" in row for row in table8.absent)


@pytest.mark.parametrize("name", ["reasoning_sql", "mtir_sql", "arctic_sql", "csc_sql", "revisql"])
def test_a_benchmarks_figures_have_one_equality_in_runs_and_sweeps(name):
    """A run of these recipes reported strict figures on BIRD, and a sweep BIRD's own."""
    recipe = recipes.load(name, [])
    assert (recipe.headline, recipe.execution.equality) == ("bird", "strict")
    swept = {recipes.load(name, [f"include=data/{file}"]).headline for file in ("bird_dev", "bird_mini_dev")}
    assert swept == {"bird"}
    assert recipes.load(name, ["data.test.0.equality=strict"]).headline == "strict"
    assert recipes.load(name, ["include=data/spider_dev"]).headline == "strict"


CURVED = {
    "trust_sql": ("figure4", "figure5", "figure6"),
    "mtir_sql": ("figure3", "figure4", "table5"),
    "sql_trail": ("figure8",),
}


@pytest.mark.parametrize("name", [f"{paper}/{name}" for paper, names in CURVED.items() for name in names])
def test_curves_of_accuracy_are_of_held_out_questions(name):
    """The papers measure a dev set while they train; `ex` is of the training rollouts."""
    source = paper_tables.load_table(name)
    assert "ex_held_out" in source.curves
    assert "ex" not in source.curves
    cells = sweep_plan.cells_of_paper_table(name, [], None, False)[0]
    assert {cell.recipe.grpo.held_out for cell in cells} == {512}
    small = sweep_plan.cells_of_paper_table(name, [], None, True)[0]
    assert {cell.recipe.grpo.steps // cell.recipe.grpo.held_out_steps for cell in small} == {4}


@pytest.mark.parametrize(
    ("name", "row", "asked"),
    [
        ("trust_sql/table2", "TRUST-SQL-4B, prefilled", ("protocol.schema_view", "prefill")),
        ("trust_sql/table10", "TRUST-SQL-8B, prefilled", ("protocol.schema_view", "prefill")),
        ("trust_sql/figure6", "8 turns, asked in 12", ("protocol.max_turns_eval", 12)),
        ("skyrl_sql/table1", "trained on one turn, asked in many", ("protocol.prompt", "steps")),
        ("skyrl_sql/table4", "SkyRL-SQL-7B, names", ("protocol.schema_view", "names")),
        ("reasoning_sql/table1", "Qwen2.5-Coder-7B; correct schema", ("data.linker", "gold")),
        ("reasoning_sql/table2", "14B SFT; correct schema", ("protocol.schema_view", "filtered")),
    ],
)
def test_a_row_that_is_asked_once_more_trains_as_its_own_row_does(name, row, asked):
    cells = {cell.values[ROW]: cell for cell in sweep_plan.cells_of_paper_table(name, [], None, False)[0]}
    own = row.replace("prefilled", "unknown").replace(", names", ", schema").partition("; ")[0].partition(", asked")[0]
    assert cells[row].recipe == cells[own].recipe  # nothing is trained for it
    section, key = asked[0].split(".")
    assert getattr(getattr(recipe_of(name, row), section), key) == asked[1]
    assert getattr(getattr(cells[row].recipe, section), key) != asked[1]


def test_figures_are_shares_in_percent_and_the_papers_are_the_ones_known_by_heart():
    for name in paper_tables.table_names():
        source = paper_tables.load_table(name)
        for row, benchmarks in source.reported.items():
            for figures in benchmarks.values():
                shares = [value for key, value in figures.items() if measure(key).kind == "percent"]
                assert all(2 < value < 100 for value in shares), (name, row)
    ours = paper_tables.load_table("sql_trail/table6").reported
    assert ours["all rewards"]["bird_dev"]["greedy"] == recipes.load("sql_trail").reported["bird_dev"] == 60.1
    curve = paper_tables.load_table("trust_sql/figure4").reported
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
        ({"against": {"a": "c"}}, "there is no row 'c'"),
        ({"miniature": {"recipe": "miniature", "rows": {"b": []}}}, "which is the baseline"),
    ],
)
def test_a_wrong_file_is_named_with_its_fault(tmp_path, change, said):
    place = tmp_path / "t.yaml"
    place.write_text(json.dumps(GOOD))
    paper_tables.read_table_file(place)
    place.write_text(json.dumps(GOOD | change))
    with pytest.raises(RecipeError, match=said):
        paper_tables.read_table_file(place)


def title_of(page):
    return page.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")


def rows_of(page):
    """The cells of each row of a paper's page that names a table or a figure."""
    lines = page.read_text(encoding="utf-8").splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in lines
        if line.startswith(("| table", "| figure"))
    ]


def left_out(page):
    """The tables and figures that a paper's page says are not made."""
    _, _, text = page.read_text(encoding="utf-8").partition("\nNot made:\n")
    named = [line.partition(":")[0] for line in text.splitlines() if line.startswith("- ")]
    return re.findall(r"(?:table|figure) \d+", " ".join(named))


def test_the_pages_have_every_table_and_figure_once():
    assert {title_of(page) for page in PAGES} == set(COUNTS)
    for page in PAGES:
        tables, figures = COUNTS[title_of(page)]
        wanted = [*(f"table {at}" for at in range(1, tables + 1)), *(f"figure {at}" for at in range(1, figures + 1))]
        found = [row[0].partition(":")[0] for row in rows_of(page)]
        assert sorted([*found, *left_out(page)]) == sorted(wanted)
        for what, state, how in rows_of(page):
            assert state in ("made", "needs"), what
            assert "`sqltrain" in how, what


def commands():
    texts = [page.read_text(encoding="utf-8").partition("## Tables and figures")[2] for page in PAGES]
    return [shlex.split(each) for text in texts for each in re.findall(r"`(sqltrain [^`]+)`", text)]


def test_every_command_of_the_pages_names_what_is_there():
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
    assert swept == set(paper_tables.table_names()) - set(
        paper_tables.claim_tables()
    )  # each file is named, and no other


def test_the_pages_promise_a_miniature_where_there_is_one():
    for page in PAGES:
        for what, _, how in rows_of(page):
            named = set(re.findall(r"sweep (\S+/[a-z0-9]+)`", how))
            if "`--miniature`" in how:
                assert named & set(SMALL), what
            elif len(named) == 1 and "has its" not in how:
                assert not named & set(SMALL), what
