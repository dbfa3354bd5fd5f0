"""Contracts on real frames: each broken row is named with its reason, and a check that raises is no verdict."""

import dataclasses
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import polars as pl
import pytest
from markdown_it import MarkdownIt

from pipelines.core import frames
from pipelines.core.errors import DataError, SqltrainError
from pipelines.core.types import Database, Example
from pipelines.recipe.config import Contracts, Recipe
from pipelines.stages.leakage_stage import note_leakage
from pipelines.stages.stage import StageResult
from tasks import contracts
from tasks.checks import Check
from tasks.contracts import contract_html, contract_markdown
from tasks.events import night_markdown, report_markdown
from tests.tasks.conftest import trajectory


def example(name, question, **changes):
    database = Database("farms", "sqlite", "databases/farms.sqlite")
    made = Example(name, question, database, "SELECT count(*) FROM farm", hardness="easy", source="toy")
    return dataclasses.replace(made, **changes)


def data_stage(folder, pools, quarantine=None):
    rows = [(pool, one) for pool, examples in pools.items() for one in examples]
    frame = frames.to_frame([one for _, one in rows], extra=[{"pool": pool} for pool, _ in rows])
    frames.write(folder / "data.parquet", frame)
    (folder / "quarantine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in quarantine or []))
    note_leakage(folder)
    return StageResult("data", "k", folder, {}, False)


POOLS = {
    "sft": [example("q1", "how many farms ?"), example("q2", "which farms ?")],
    "test": [example("q3", "how large is the largest farm ?")],
}


def broken(verdict):
    return {item["says"]: item["examples"] for item in verdict["checks"] if not item["passed"]}


def read(folder):
    return json.loads((folder / "contract.json").read_text())


@pytest.mark.parametrize("text", ['{"checks": [', "", "\0\0", "[]", "{}"])
def test_a_damaged_verdict_is_given_anew(tmp_path, recipe, text):
    stage = data_stage(tmp_path, POOLS)
    verdict = contracts.check(stage, recipe)
    (tmp_path / "contract.json").write_text(text)
    assert contracts.check(stage, recipe) == verdict == read(tmp_path)


def test_good_questions_pass_their_contract_and_the_verdict_is_kept(tmp_path, recipe, monkeypatch):
    result = data_stage(tmp_path, POOLS)
    verdict = contracts.check(result, recipe)
    assert verdict["passed"]
    assert verdict["rows"] == 3
    assert verdict == read(tmp_path)
    page = (tmp_path / "contract.html").read_text()
    assert "http" not in page
    assert "src=" not in page
    monkeypatch.setattr(contracts, "evaluate", lambda *args: pytest.fail("was evaluated again"))
    assert contracts.check(result, recipe) == verdict
    assert contracts.check(StageResult("sft", "k", tmp_path, {}, False), recipe) is None


@pytest.mark.parametrize(
    ("pool", "bad", "says", "row"),
    [
        ("sft", example("q9", "  "), "the question is blank", "sft/q9"),
        ("sft", example("q9", "why ?", gold_sql="\n"), "the gold SQL is blank", "sft/q9"),
        ("sft", example("q1", "why ?"), "its name is taken", "sft/q1"),
        ("test", example("q9", "How many farms ?"), "a training pool asks this held-out question too", "test/q9"),
        ("sft", example("q9", "which FARMS ?"), "its pool asks the same of that database before", "sft/q9"),
    ],
)
def test_a_breach_names_rows_and_reasons(tmp_path, recipe, pool, bad, says, row):
    pools = {**POOLS, pool: [*POOLS[pool], bad]}
    with pytest.raises(DataError) as caught:
        contracts.check(data_stage(tmp_path, pools), recipe)
    assert says in str(caught.value)
    assert row in str(caught.value)
    assert row in [found["row"] for found in broken(read(tmp_path))[says]]
    assert f"| {says} | {row} |" in contract_markdown(read(tmp_path))


def test_accepted_results_stand_for_a_gold_query_in_the_test_pool_alone(tmp_path, recipe):
    judged = example("q9", "why ?", gold_sql="", meta={"gold_results": {"results": [[["n"], ["1"]]]}})
    tested, trained = tmp_path / "tested", tmp_path / "trained"
    tested.mkdir()
    trained.mkdir()
    assert contracts.check(data_stage(tested, {**POOLS, "test": [judged]}), recipe)["passed"]
    with pytest.raises(DataError, match=r"the gold SQL is blank in 1 of 4 rows .*: rl/q9"):
        contracts.check(data_stage(trained, {**POOLS, "rl": [judged]}), recipe)


def test_rows_set_aside_count_against_the_threshold_with_their_reason(tmp_path, recipe):
    set_aside = [{"pool": "sft", "row": "dev.json[12]", "reason": "bad_gold", "detail": "no such column: x"}]
    with pytest.raises(
        DataError, match=r"1 of 3 rows of pool sft \(33.3%, allowed 5.0%\): sft/dev.json\[12\] \(bad_gold: no such"
    ):
        contracts.check(data_stage(tmp_path, POOLS, set_aside), recipe)
    tolerant = recipe.model_copy(update={"data": recipe.data.model_copy(update={"max_bad_share": 0.34})})
    assert contracts.check(data_stage(tmp_path, POOLS, set_aside), tolerant)["passed"]


def test_a_threshold_of_the_recipe_is_the_threshold(tmp_path):
    pools = {"sft": [*POOLS["sft"], example("q9", "which farms ?")], "test": POOLS["test"]}
    result = data_stage(tmp_path, pools)  # one repeated question in the pool's three rows
    with pytest.raises(DataError, match=r"raise contracts\.max_duplicates"):
        contracts.check(result, Recipe(name="toy", contracts=Contracts(max_duplicates=0.3)))
    assert contracts.check(result, Recipe(name="toy", contracts=Contracts(max_duplicates=0.34)))


def test_a_check_that_raises_is_our_failure_and_no_verdict_about_the_data():
    frame = pl.DataFrame({"row": ["a"], "n": [1]})
    checks = [Check("no such column", "ExpectColumnValuesToBeNull", "absent", {})]
    with pytest.raises(SqltrainError, match="could not be evaluated") as caught:
        contracts.evaluate(frame, checks)
    assert not isinstance(caught.value, DataError)
    frame = pl.DataFrame({"row": [f"r{number}" for number in range(100)], "n": [1] * 100})
    verdict = contracts.evaluate(frame, [Check("n is small", "ExpectColumnValuesToBeBetween", "n", {"min_value": 2})])
    assert verdict["checks"][0]["bad"] == 100
    assert [found["row"] for found in verdict["checks"][0]["examples"]] == [f"r{number}" for number in range(20)]


def test_teacher_trajectories_hold_or_name_what_broke(tmp_path, recipe):
    made = [trajectory("q1"), trajectory("q2", token_ids=(1, 2, 3), agent_mask=(0, 1)), trajectory("q3")]
    frames.write(tmp_path / "data.parquet", frames.to_frame(made))
    with pytest.raises(DataError, match=r"its mask is not as long as its tokens in 1 of 3 rows .* q2#0 \(3 / 2\)"):
        contracts.check(StageResult("synthesize", "k", tmp_path, {}, False), recipe)


def test_too_few_accepted_trajectories_stop_the_run(tmp_path):
    frames.write(tmp_path / "data.parquet", frames.to_frame([trajectory("q1")]))
    reasons = {"q2": "wrong_result", "q3": "wrong_result", "q4": "format_no_action", "q5": "over_keep"}
    left_out = [{"example_id": name, "sample": 0, "reason": why, "detail": "-"} for name, why in reasons.items()]
    (tmp_path / "quarantine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in left_out))
    result = StageResult("filter", "k", tmp_path, {}, False)
    with pytest.raises(DataError, match=r"the filter rejected it in 3 of 5 rows .* q2#0 \(wrong_result: -\)"):
        contracts.check(result, Recipe(name="toy", contracts=Contracts(min_accepted=0.5)))
    assert contracts.check(result, Recipe(name="toy", contracts=Contracts(min_accepted=0.4)))


HOSTILE = "<script>alert(1)</script> | **bold** \n row"


def test_hostile_text_stays_text_in_both_summaries():
    frame = pl.DataFrame({"row": [HOSTILE], "n": [HOSTILE]})
    verdict = contracts.evaluate(frame, [Check(HOSTILE, "ExpectColumnValuesToBeNull", "n", {})])
    verdict["stage"] = HOSTILE
    tags = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)
    parser.feed(contract_html(verdict))
    assert "script" not in tags
    # head, blank line, table head, rule, one check; blank line, table head, rule, one row
    assert contract_markdown(verdict).count("\n") == 8
    assert "<script>" not in contract_markdown(verdict)


def test_great_expectations_is_not_loaded_before_a_contract_is_checked():
    heavy = "('great_expectations', 'mlflow', 'pandas', 'prefect')"
    code = f"import tasks.run, tasks.checks, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_share_is_held_in_each_pool_and_not_diluted_over_all(tmp_path, recipe):
    """13 of 100 repeated questions in one pool are 13 %, however many rows the others have."""
    sft = [example(f"s{n}", f"question {n if n < 87 else 0} ?") for n in range(100)]
    rest = {pool: [example(f"{pool}{n}", f"{pool} {n} ?") for n in range(100)] for pool in ("rl", "dev", "test")}
    with pytest.raises(DataError, match=r"in 13 of 100 rows of pool sft \(13.0%, allowed 5.0%\)"):
        contracts.check(data_stage(tmp_path, {"sft": sft, **rest}), recipe)


def test_a_leak_is_what_the_stage_found_and_no_second_definition(tmp_path, recipe):
    """Other case, fillers and punctuation: `pipelines/curation/leakage.py` takes it for the same question."""
    pools = {"sft": [example("q1", "Please list all the Farms!")], "test": [example("q2", "list farms")]}
    with pytest.raises(DataError, match="a training pool asks this held-out question too in 1 of 1 rows of pool test"):
        contracts.check(data_stage(tmp_path, pools), recipe)


def test_grpo_does_not_begin_where_no_question_is_ever_solved(tmp_path, recipe):
    scored = pl.DataFrame({"example_id": ["q1", "q2"], "samples": [8, 8], "right": [0, 0]})
    frames.write(tmp_path / "data.parquet", scored)
    result = StageResult("difficulty", "k", tmp_path, {}, False)
    with pytest.raises(DataError, match=r"no sample of the policy was right in 2 of 2 rows .*GRPO would learn nothing"):
        contracts.check(result, recipe)
    frames.write(tmp_path / "data.parquet", scored.with_columns(right=pl.Series([0, 1])))
    (tmp_path / "contract.json").unlink()
    assert contracts.check(result, recipe)


def test_the_text_of_a_question_is_no_markup_in_the_artifact():
    """Neither an image, which would tell its server who looks at the page, nor a link, a tag or code."""
    live = ["![a](http://x.test)", "[click](http://x.test)", "<img src=http://x.test>", "`a` \\[b](http://x.test)"]
    shown = {"row": "Spider's", "value": " | ".join(live)}
    check = {"says": live[3], "pool": live[2], "passed": False, "bad": 1, "rows": 4, "share": 0.25, "allowed": 0.0}
    verdict = {"stage": live[0], "rows": 4, "passed": False, "checks": [{**check, "examples": [shown]}]}
    assert "| Spider's |" in contract_markdown(verdict)
    page = MarkdownIt().enable("table").render(contract_markdown(verdict))
    page += MarkdownIt().enable("table").render(night_markdown({"decision": "kept", "reason": live[0], "new": []}))
    assert page.count("<table>") == 2
    assert not [tag for tag in ("<img", "<a", "<code") if tag in page]


def test_the_report_s_artifact_links_to_what_a_browser_opens():
    page = Path("/store/report/k/report.html")
    shown = report_markdown(page, "http://mlflow:5000/#/experiments/1/runs/abc", "")
    assert "(http://mlflow:5000/#/experiments/1/runs/abc/artifacts/report.html)" in shown
    assert "file://" not in shown + report_markdown(page, "", "")
    assert str(page) in report_markdown(page, "", "")
