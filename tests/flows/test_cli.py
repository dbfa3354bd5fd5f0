"""The command line as its user meets it: one plain line for a mistake, exit code 2, nothing half-written."""

import inspect
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from typing import get_args

import pydantic
import pytest

from flows import cli
from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph, stage_keys
from tasks import contracts
from tests.fakes import build_database

ROOT = recipes.CONF.parent


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "minature"], "there is no recipe 'minature'. Did you mean 'miniature'?"),
        (["run", "miniature", "grpo.grup=3"], "unknown key 'grpo.grup'. Did you mean 'grpo.group'?"),
        (
            ["show", "sql_trail", "rewards.exce.weight=1"],
            "there is no item 'exce' in that list. Its items: exec, turns",
        ),
        (["run", "miniature", "grpo.group=many"], "grpo.group: Input should be a valid integer"),
        (["run", "miniature", "variant=tall"], "has no variant 'tall'"),
        (["run", "miniature", "--until", "sfd"], "has no stage 'sfd'. Its stages: data"),
        (
            ["run", "miniature", "data.test.0.kind=jsonl", "data.test.0.path=/none.jsonl"],
            "no such file or folder: /none.jsonl",
        ),
        (["run", "miniature", "data.test.0.kind=spider", "data.test.0.path=/none"], "no such file or folder: /none"),
        (["ask", "how many ?", "--database", "/none.sqlite"], "no such database: /none.sqlite"),
        (["ask", " ", "--database", "/none.sqlite"], "there is no question. As in: sqltrain ask"),
        (
            ["evaluate", "miniature", "--model", "oracle", "data.test=[{kind: jsonl, path: /dev/null}]"],
            "pool test: no row of the jsonl source can be used. Every bad row",
        ),
        (["evaluate", "miniature", "--model", "/none"], "no model in /none"),
        (["watch", "miniature"], "no training of recipe miniature has begun. Run it first: sqltrain run, with"),
        (["watch", "miniature", "stages=[data]"], "recipe miniature trains nothing. Its stages: data."),
        (["report", "miniature"], "recipe miniature is not finished: data, test, leakage, synthesize"),
        (["report", "miniature", "stages=[data]"], "miniature end without a report. Add report to `stages`"),
        (["run", "miniature", "--store="], "--store names no folder"),
        (["store", "ls"], "no store at"),
        (["status"], "no store at"),
        (["check", "store=/tmp"], "Name one before overrides: sqltrain check miniature store=/tmp"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_is_one_plain_line(arguments, message, tmp_path, monkeypatch, sqltrain):
    monkeypatch.setenv("SQLTRAIN_STORE", str(tmp_path / "store"))
    err = sqltrain.refused(*arguments)
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.rglob("manifest.json"))


@pytest.mark.parametrize("arguments", [["runn"], ["run"], ["run", "miniature", "--unti", "data"]])
def test_a_wrong_call_shows_its_usage(arguments, sqltrain):
    assert "Usage:" in sqltrain.refused(*arguments)


def test_stages_says_why_and_json_is_the_last_line(tmp_path, sqltrain):
    out = sqltrain.ok("stages", "miniature", f"--store={tmp_path}", "--json")
    stages = json.loads(out.splitlines()[-1])["stages"]
    assert [stage["name"] for stage in stages][:4] == ["data", "test", "leakage", "synthesize"]
    assert all(not stage["cached"] and stage["why"] == "not made yet" for stage in stages)


def test_stages_answers_where_the_store_cannot_be_written(tmp_path, sqltrain):
    """Of a recipe with files, whose digests a store remembers. Nobody may make a folder in /sys, root included."""
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE item (id)")
    questions = tmp_path / "questions.jsonl"
    questions.write_text('{"question": "How many?", "database": "shop.sqlite", "sql": "SELECT count(*) FROM item"}\n')
    for path in tmp_path.iterdir():
        os.utime(path, (1e9, 1e9))  # a file that has just changed is not remembered
    own = f"data.test=[{{kind: jsonl, path: {questions}}}]"
    code, out, err = sqltrain("stages", "miniature", own, "--store=/sys/store", "--json")
    assert (code, err) == (0, "")
    assert json.loads(out.splitlines()[-1])["stages"][1]["why"] == "not made yet"


def test_show_prints_a_recipe_that_can_be_run_again(tmp_path, sqltrain):
    _, out, _ = sqltrain("show", "miniature", "grpo.steps=7", "rewards.turns.weight=0")
    path = tmp_path / "mine.yaml"
    path.write_text(out)
    assert sqltrain.ok("show", str(path)) == out
    assert "steps: 7" in out


def test_an_interrupted_run_says_so_and_fails(tmp_path):
    """As Ctrl-C does: a script must not go on as if the run had ended. Pressed again as long as it is not heard."""
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", f"--store={tmp_path / 'store'}"]
    run = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 180
        while not list(tmp_path.glob("store/data/.work-*")):
            assert time.monotonic() < until
            time.sleep(0.05)
        for _ in range(20):
            run.send_signal(signal.SIGINT)
            try:
                _, err = run.communicate(timeout=10)
                break
            except subprocess.TimeoutExpired:
                continue
    finally:
        run.kill()
    assert run.returncode == 130
    assert "stopped; the same command goes on from here" in err
    assert "Traceback" not in err


def test_a_terminal_that_lacks_a_character_shows_another(tmp_path):
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", "--until", "data", f"--store={tmp_path}"]
    done = subprocess.run(
        [*command, *(f"data.{pool}.options={{databases: 1, questions: 4}}" for pool in ("sft", "dev")), "data.rl=[]"],
        cwd=ROOT, env={**os.environ, "PYTHONIOENCODING": "latin-1"}, capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"Traceback" not in done.stderr


def test_the_version_is_printed(sqltrain):
    assert sqltrain.ok("--version") == f"sqltrain {metadata.version('sqltrain')}\n"


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (PermissionError(13, "Permission denied", "/data/x"), "error: cannot use /data/x: Permission denied"),
        (OSError(36, "File name too long", "x" * 3), "error: cannot use xxx: File name too long"),
        (RuntimeError("Could not determine home directory."), "error: Could not determine home directory."),
        (
            ModuleNotFoundError("No module named 'prefect'", name="prefect"),
            "error: prefect is not installed. Run: pip ",
        ),
    ],
)
def test_an_error_that_the_user_can_mend_is_one_line_wherever_it_comes_from(monkeypatch, error, line, sqltrain):
    def fail(*arguments, **options):
        raise error

    monkeypatch.setattr("flows.cli.app", fail)
    code, _, err = sqltrain("recipes")
    assert (code, err.count("\n")) == (1, 1)
    assert err.startswith(line)


def test_an_error_of_our_own_keeps_its_traceback(monkeypatch, sqltrain):
    def fail(*arguments, **options):
        raise KeyError("ours")

    monkeypatch.setattr("flows.cli.app", fail)
    with pytest.raises(KeyError, match="ours"):
        sqltrain("recipes")


def test_a_setting_of_prefect_that_cannot_be_read_is_one_line_without_its_values():
    class Settings(pydantic.BaseModel):
        key: str
        port: int

    with pytest.raises(pydantic.ValidationError) as error:
        Settings.model_validate({"key": "s3cret", "port": "s3cret"})
    line = cli.user_error(error.value)
    assert line.startswith("Prefect's settings cannot be read: Input should be a valid integer")
    assert "s3cret" not in line


def test_the_table_of_commands_has_the_first_sentence_of_each_ones_help():
    known = {name: line for lines in cli.PANELS.values() for name, line in lines.items()}
    helps = {name: inspect.cleandoc(command.help).partition("\n\n")[0] for name, command in cli.every_command().items()}
    assert known == {name: help.replace("\n", " ") for name, help in helps.items()}


def test_a_breach_stops_the_second_run_as_it_did_the_first(tmp_path, monkeypatch, sqltrain):
    """One file is training and test, and its last row's gold, which fails, holds a U+2028: that is set aside."""
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE t (a)")
    golds = ["SELECT a FROM t", "SELECT count(*) FROM t", "SELECT nope, '\u2028' FROM t"]
    rows = [{"question": f"what is {gold}", "sql": gold, "database": "shop.sqlite"} for gold in golds]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"kind": "jsonl", "path": str(tmp_path / "own.jsonl")}
    pools = {"sft": source, "rl": [source], "dev": source, "test": [source]}
    recipe = {"include": ["recipes/miniature"], "data": {**pools, "max_bad_share": 0.5}}
    (tmp_path / "mine.yaml").write_text(json.dumps({**recipe, "contracts": {"max_duplicates": 1}}))
    run = ("run", str(tmp_path / "mine.yaml"), f"--store={tmp_path / 'store'}", "--until", "data")
    first = sqltrain.refused(*run)
    assert "a training pool asks this held-out question too in 2 of 3 rows of pool dev" in first
    assert "\n" not in first.strip()
    with monkeypatch.context() as patch:
        patch.setattr(contracts, "evaluate", lambda *args: pytest.fail("the kept verdict was not read"))
        code, _, second = sqltrain(*run)
    assert (code, second) == (2, first)
    sqltrain.ok(*run, "contracts.max_leaked=1")


CAUSES = {
    "rewards.0.weight=7": ("grpo", "changed: rewards."),
    "grpo.steps=3": ("grpo", "changed: grpo.steps (60 -> 3)"),
    "seed=3": ("data", "changed: seed (0 -> 3)"),
    "sft.epochs=1": ("sft", "changed: sft.epochs"),
}


@pytest.fixture
def store(tmp_path):
    """Every stage of the miniature, finished and empty."""
    made, recipe = Store(tmp_path / "store"), recipes.load("miniature")
    for step in graph.plan(recipe, made):
        stage = next(stage for stage in graph.GRAPH if stage.name == step.kind)
        inputs = {other.name: other.key for other in graph.plan(recipe, made) if other.name in step.needs}
        made.make(
            step.kind, step.key, lambda folder: None, stage_keys.deciding(stage, recipe, inputs, made), lambda: None
        )
    return made


def test_the_cause_is_printed(store, sqltrain):
    where = f"--store={store.root}"
    code, out, _ = sqltrain("stages", "miniature", where)
    assert (code, "changed" in out) == (0, False)
    for override, (stage, cause) in CAUSES.items():
        code, out, _ = sqltrain("stages", "miniature", override, where)
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [stage]]
        assert code == 0
        assert cause in line, override


GPU_PAGE = ROOT / "docs" / "how-to" / "gpus.md"


def test_the_plan_of_a_recipe_has_a_row_for_each_stage_and_number_of_gpus(sqltrain):
    out = sqltrain.ok("plan", "sql_trail", "hardware.deepspeed=zero3", "--json")
    rows = json.loads(out.splitlines()[-1])["memory"]
    assert [(row["stage"], row["gpus"], row["way"]) for row in rows] == [
        (stage, gpus, "zero3") for stage in ("sft", "grpo") for gpus in (1, 2, 4, 8)
    ]
    assert rows[3]["weights"] == pytest.approx(2 * 7_615_616_512 / 8 / 2**30, abs=0.01)


def test_the_ways_that_fit_have_their_most_rows(sqltrain):
    how = ("grpo.sampling.episode_tokens=8192", "rollout.slots=16", "--sizes", "--json")
    lines = json.loads(sqltrain.ok("plan", "sql_trail", *how).splitlines()[-1])["sizes"]
    assert "\n".join(line for line in lines if line.startswith("|")) in GPU_PAGE.read_text(encoding="utf-8")
    assert any(line.startswith("| Qwen2.5-Coder-0.5B-Instruct | full 8, lora 16, qlora 16 |") for line in lines)
    seven = next(line for line in lines if "Coder-7B" in line)
    assert "full" not in seven
    assert seven.split(" | ")[1:3] == ["qlora 4", "lora 8, qlora 8"]


def leaves(group, path=""):
    for name, command in group.items():
        whole = f"{path} {name}".strip()
        yield from leaves(command.commands, whole) if hasattr(command, "commands") else [(whole, command)]


COMMANDS = dict(leaves(cli.every_command()))
NUMERIC = {
    f"{name} {option.name}": option.type_descriptor.parameter_info
    for name, command in COMMANDS.items()
    for option in command.params
    if {int, float} & {kind := option.type_descriptor.annotation, *get_args(kind)}
}


@pytest.mark.parametrize("name", NUMERIC)
def test_every_numeric_option_has_two_bounds(name):
    """Without a largest value "nan" is compared with the smallest alone, and infinity is a number."""
    assert {"score timeout", "watch every", "store gc days"} <= NUMERIC.keys()
    assert 0 <= NUMERIC[name].min < NUMERIC[name].max < math.inf


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command, sqltrain):
    out = sqltrain.ok(*command.split(), "--help")
    assert "Usage:" in out
    assert command == "recipes" or f"sqltrain {command}" in out.partition("Example")[2]
    help = COMMANDS[command].help  # at 80 columns an example is not broken, and a text is broken by the terminal alone
    assert not [line for line in help.splitlines() if line.strip().startswith("sqltrain") and len(line) > 76]
    assert not re.search(r"(?<=\S)\n(?=\S)", help)
    assert not re.search(r"(?<! \\)\n +--", help)  # an example that goes on says so


def test_every_command_names_a_store_a_model_and_a_database_by_the_same_option():
    takes = {name for name, command in COMMANDS.items() if any("--store" in one.opts for one in command.params)}
    changes = {
        name for name, command in COMMANDS.items() if {one.name for one in command.params} & {"overrides", "axes"}
    }
    assert changes - takes == {"review", "environment serve"}  # they use no store
    assert takes - changes == {"mcp", "status", *(name for name in COMMANDS if name.startswith("store "))}
    options = {word for command in COMMANDS.values() for one in command.params for word in one.opts}
    assert not options & {"--policy", "--endpoint", "--teacher", "--databases"}  # they are --model and --database
    texts = [text for one in COMMANDS.values() for text in (one.help, *(getattr(p, "help", "") for p in one.params))]
    assert not [text for text in texts if "store=" in (text or "")]


@pytest.mark.parametrize("value", [".nan", ".inf", "-.inf"])
@pytest.mark.parametrize("key", ["execution.timeout_s", "data.max_bad_share", "grpo.beta", "rewards.0.weight"])
def test_no_number_of_a_recipe_is_infinite_or_none_at_all(key, value):
    override = key.replace("rewards.0", "rewards.exec")
    with pytest.raises(RecipeError, match=f"{key}.*finite number"):
        recipes.load("miniature", [f"{override}={value}"])


ONE_OF = [f"data.{pool}.options={{databases: 1, questions: 3}}" for pool in ("sft", "dev")]
RECIPE = [*ONE_OF, "data.rl=[]", "rollout.processes=1", "stages=[data, synthesize, filter]"]


@pytest.mark.slow
def test_each_stage_is_made_once(tmp_path):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_")}
    command = [sys.executable, "-m", "flows.cli", "run", "miniature", *RECIPE, "--until", "filter"]
    command += [f"--store={tmp_path}/store"]
    runs = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for _ in range(2)
    ]
    texts = [run.communicate()[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], texts
    assert not any("Traceback" in text for text in texts)
    made = re.findall(r"^✓ (\S+) +\S+ +[\d.]+ s", "".join(texts), re.MULTILINE)
    cached = re.findall(r"^✓ (\S+) +\S+ +cached", "".join(texts), re.MULTILINE)
    assert sorted([*made, *cached]) == sorted(2 * ["data", "synthesize", "filter"])
    assert len(list((tmp_path / "store").glob("*/*/manifest.json"))) == 3
