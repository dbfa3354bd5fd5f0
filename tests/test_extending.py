"""The parts of docs/how-to/parts.md work as a stranger's own: as files beside a recipe, and as an installed package."""

import csv
import dataclasses
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from pydantic import ValidationError

from pipelines.benchmarks import base
from pipelines.core import registry
from pipelines.core.errors import RecipeError
from pipelines.core.files import digest
from pipelines.core.registry import LOSSES, OPTIMIZERS, READERS, REWARDS, Registry, reader
from pipelines.core.store import Store
from pipelines.core.types import ActionKind, Database, Example, ExecutionStatus
from pipelines.curation.filtering import broken_rule
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.recipe.config import ProtocolSection, Source
from pipelines.report import writer
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies import factories
from pipelines.sql.dialects.dialect import engine_of_file
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.sql.schema import introspect
from pipelines.stages import graph, stage_keys
from pipelines.training import combinations
from pipelines.training.losses import TrackBatch
from tests.evaluation.evaluation_world import report_data
from tests.fakes import build_database

ROOT = Path(__file__).resolve().parent.parent
PARTS = dict(
    re.findall(
        r"```python title=(\S+)\n(.*?)```", (ROOT / "docs/how-to/parts.md").read_text(encoding="utf-8"), re.DOTALL
    )
)
RECIPE = """
include: [models/tiny, data/miniature, protocols/react]
plugins: [PLUGINS]
protocol: {name: polite, options: {reasoning_tag: think}}
data:
  test: [{kind: tabs, path: PATH, options: {database: shop.sqlite}}]
rewards:
  - {term: exec, weight: 5}
  - {term: my_short, weight: 0.5, options: {characters: 120}}
execution: {equality: cents}
evaluation: {equalities: [strict, cents], metrics: [empty]}
rollout: {policy: program, options: {sql: SELECT 2}}
filter: {drop: [star]}
grpo: {drop: [malformed, star], loss: my_reinforce}
sft: {optimizer: {kind: my_sgd, lr: 0.1, options: {momentum: 0.5}}}
"""
ASKING = {"difficulty", "grpo", "evaluate_model", "evaluate_sft", "evaluate_grpo"}  # stages that ask the policy


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("stranger")
    for name, text in PARTS.items():
        (tmp_path / name).write_text(text)
    build_database(tmp_path / "shop.sqlite", "CREATE TABLE item (name TEXT)")
    (tmp_path / "questions.tsv").write_text("id\tquestion\tsql\n1\thow many items\tSELECT count(*) FROM item\n")
    text = RECIPE.replace("PLUGINS", ", ".join(PARTS))
    (tmp_path / "mine.yaml").write_text(text.replace("PATH", str(tmp_path / "questions.tsv")))
    prompt = (ROOT / "conf/protocols/prompts/react_full.txt").read_text(encoding="utf-8")
    (tmp_path / "polite_full.txt").write_text(prompt)
    return tmp_path


def test_a_recipe_uses_the_reward_reader_and_protocol_of_its_plugins(folder, tmp_path):
    recipe = recipes.load(str(folder / "mine.yaml"))
    loaded = base.read(recipe.benchmark, 0, tmp_path / "stage")
    assert [example.gold_sql for example in loaded.examples] == ["SELECT count(*) FROM item"]
    polite = build_protocol(recipe.protocol)
    action = polite.parse("<think>hm</think>\n<sql>SELECT 1</sql>")
    assert action.kind is ActionKind.SQL
    assert polite.observe(action, None, 3).endswith("Please answer within 3 turns.")
    assert REWARDS["my_short"].pay.__doc__ == "1 if the final SQL has at most that many characters."


def test_grpo_refuses_the_policy_of_an_example(folder):
    recipe = recipes.load(str(folder / "mine.yaml"))
    with pytest.raises(RecipeError, match=r"rollout.policy=program cannot be sent the weights that GRPO trains"):
        combinations.refuse_unsupported(recipe)


@pytest.mark.parametrize("setting", ["clip_low=0.1", "clip_high=0.4", "level=sequence"])
def test_a_loss_without_an_importance_ratio_refuses_settings_of_the_ratio(folder, setting):
    on_vllm = recipes.load(str(folder / "mine.yaml"), [f"grpo.{setting}", "rollout={policy: vllm}"])
    with pytest.raises(RecipeError, match=rf"grpo\.{setting} does nothing for grpo\.loss=my_reinforce\. Leave it out"):
        combinations.refuse_unsupported(on_vllm)


def test_a_workers_verdict_is_that_of_a_plugins_equality_on_a_plugins_dialect(folder):
    recipe = recipes.load(str(folder / "mine.yaml"))
    (folder / "shop.gpkg").write_bytes((folder / "shop.sqlite").read_bytes())
    places = Database("shop", "geopackage", str(folder / "shop.gpkg"))
    with SqlEngine(Limits.of(recipe.execution)) as sql:
        pairs = [Pair(places, "SELECT 1.001", predicted) for predicted in ("SELECT 1.002", "SELECT 1.02")]
        verdicts = sql.verdicts(pairs, ["strict", "cents"])
        (day,) = sql.execute_many([(places, "SELECT TODAY() = CURRENT_DATE")])
        (kept,) = sql.execute_many([(places, "DROP TABLE item")])
    assert [verdict.scores for verdict in verdicts] == [{"strict": 0.0, "cents": 1.0}, {"strict": 0.0, "cents": 0.0}]
    assert day.rows == ((1,),)
    assert kept.status is ExecutionStatus.REFUSED
    assert engine_of_file(folder / "shop.gpkg") == "geopackage"


def test_a_recipe_uses_the_policy_filter_rule_optimizer_and_loss_of_its_plugins(folder):
    recipe = recipes.load(str(folder / "mine.yaml"))
    program = factories.policy("no checkpoint", recipe)
    database = Database("shop", "sqlite", str(folder / "shop.sqlite"))
    protocol = build_protocol(ProtocolSection(prompt="brief", options={"reasoning_tag": "think"}))
    with SqlEngine(Limits.of(recipe.execution)) as sql:
        runner = RolloutEngine(program, protocol, sql, recipe.evaluation.sampling, 3, introspect)
        (made,) = runner.run([EpisodeRequest(Example("q", "how many?", database, "SELECT 1"), 0, 0)])
    assert made.final_sql == "SELECT 2"
    outcome = SimpleNamespace(trajectory=dataclasses.replace(made, final_sql="SELECT * FROM item"))
    assert broken_rule(outcome, recipe.filter.drop) == "star"
    assert broken_rule(outcome, ()) is None
    settings = recipe.sft.optimizer
    sgd = OPTIMIZERS[settings.kind].make(torch.nn.Linear(2, 2), settings, **settings.options)
    assert isinstance(sgd, torch.optim.SGD)
    assert (sgd.defaults["lr"], sgd.defaults["momentum"]) == (0.1, 0.5)
    logps, mask = torch.tensor([[-1.0, -2.0, -4.0]]), torch.tensor([[1, 1, 0]])
    track = TrackBatch(logps, torch.ones(1, 3), torch.tensor([[0.5]]), mask, 0.2, 0.2, mask.sum(), 3)
    assert LOSSES[recipe.grpo.loss].compute(track).item() == 0.75  # 0.5 * (1 + 2) / 2 tokens


def test_a_metric_that_is_declared_once_stands_in_summary_tables_page_and_csv(folder, tmp_path):
    recipe = recipes.load(str(folder / "mine.yaml"))
    data = dataclasses.replace(report_data(questions=12, samples=0), metrics=recipe.evaluation.metrics)
    rows = [system.records for system in data.systems]
    shares = [sum(record.n_rows == 0 for record in records) / len(records) for records in rows]
    assert [summary.flat()["empty"] for summary in data.summaries] == pytest.approx(shares)
    writer.write_all(data, tmp_path)
    assert 'title="answers whose result has no rows">no rows</th>' in (tmp_path / "report.html").read_text()
    assert "no rows" in (tmp_path / "tables" / "tables.md").read_text()
    with (tmp_path / "tables" / "behaviour.csv").open(encoding="utf-8") as file:
        assert [float(row["no rows"]) for row in csv.DictReader(file)] == pytest.approx(shares)
    assert "empty" not in report_data(questions=12, samples=0).summaries[0].flat()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("execution.equality=cent", r"execution.equality: there is no equality 'cent'. Did you mean 'cents'"),
        ("execution.equality=soft_f1", r"soft_f1 gives grades, and what decides must say yes or no"),
        ("execution.equality=spider2", r"spider2 compares with result files, which training has none of"),
        ("evaluation.equalities=[r_ves]", r"r_ves measures time, which differs with every run"),
        ("evaluation.metrics=[emty]", r"evaluation.metrics.0: there is no metric 'emty'. Did you mean 'empty'"),
        ("filter.drop=[stars]", r"filter.drop.0: there is no filter rule 'stars'. Did you mean 'star'"),
        ("grpo.drop=[malformd]", r"grpo.drop.0: there is no filter rule 'malformd'. Did you mean 'malformed'"),
        ("rollout.policy=programm", r"rollout.policy: there is no policy 'programm'. Did you mean 'program'"),
        ("rollout.options={sql: 3}", r"option 'sql' of policy 'program': Input should be a valid string"),
        (
            "grpo.loss=reinforc",
            r"grpo.loss: there is no loss 'reinforc'. Did you mean 'my_reinforce'\? There are: ",
        ),
        ("sft.optimizer.kind=my_sdg", r"sft.optimizer.kind: there is no optimizer 'my_sdg'. Did you mean 'my_sgd'"),
        ("sft.optimizer.options={momentum: much}", r"option 'momentum' of optimizer 'my_sgd': Input should be a valid"),
        ("grpo.optimizer.options={lr_rest: 1.0}", r"optimizer 'adamw' has no option 'lr_rest'. It has: none"),
        (
            "rewards.my_short.options.characters=many",
            r"rewards.1.options: option 'characters' of reward term 'my_short': Input should be a valid integer",
        ),
        ("data.test.0.options={}", r"option 'database' of reader 'tabs': Field required"),
    ],
)
def test_a_wrong_name_or_option_is_told_when_the_recipe_is_read(folder, override, message):
    with pytest.raises(RecipeError, match=message):
        recipes.load(str(folder / "mine.yaml"), [override])


def test_a_reader_without_a_model_of_options_takes_none(monkeypatch):
    monkeypatch.setattr(READERS, "_entries", {name: READERS.entry(name) for name in READERS})

    @reader("bare")
    def read_nothing(source, seed, root):
        return base.Loaded([], [])

    assert Source(kind="bare", options={}).options == {}
    with pytest.raises(ValidationError, match=r"reader 'bare' has no option 'path'\. It has: none"):
        Source(kind="bare", options={"path": "here"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("my_parts.py", {"grpo"}),
        ("my_reader.py", {"test"}),
        ("my_equality.py", {"data", "test", "synthesize", "filter", *ASKING}),
        ("my_dialect.py", {"data", "test", "synthesize", "filter", *ASKING}),
        ("my_metric.py", {"evaluate_model", "evaluate_sft", "evaluate_grpo"}),
        ("my_policy.py", ASKING),
        ("my_rule.py", {"filter", "grpo"}),
        ("my_optimizer.py", {"sft"}),
        ("my_loss.py", {"grpo"}),
        ("my_protocol.py", {"synthesize", "filter", "model", *ASKING}),
    ],
)
def test_a_plugins_code_decides_the_stages_that_use_it(folder, name, expected):
    """What a stage's key is made of, without the keys of the stages before it."""

    def facts():
        recipe, store = recipes.load(str(folder / "mine.yaml")), Store(folder / "store")
        return {stage.name: digest(stage_keys.deciding(stage, recipe, {}, store)) for stage in graph.active(recipe)}

    before = facts()
    (folder / name).write_text(PARTS[name] + "# changed\n")
    after = facts()
    (folder / name).write_text(PARTS[name])
    changed = {stage for stage in before if before[stage] != after[stage]}
    assert facts() == before
    assert changed == expected


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("1 / 0", r"the plug-in .* cannot be imported: ZeroDivisionError: division by zero"),
        ("def f(:", r"cannot be imported: SyntaxError"),
        (
            "from pipelines.core.registry import reward\n@reward('exec')\ndef mine(outcome): return 1.0",
            r"reward term 'exec' is registered twice: by pipelines.rewards.terms and by sqltrain_plugin_",
        ),
    ],
)
def test_a_plugin_that_cannot_be_used_is_the_users_mistake(folder, code, message):
    assert "exec" in REWARDS
    (folder / "broken.py").write_text(code)
    with pytest.raises(RecipeError, match=message):
        recipes.load("miniature", [f"plugins=[{folder / 'broken.py'}]"])


def test_a_plugin_that_is_missing_is_the_users_mistake(tmp_path):
    for name in (tmp_path / "none.py", "no_such_module"):
        with pytest.raises(RecipeError, match=r"the plug-in .* cannot be imported"):
            recipes.load("miniature", [f"plugins=[{name}]"])


def test_a_second_thread_waits_until_all_parts_are_imported(tmp_path, monkeypatch):
    kinds: Registry[object] = Registry("kind", "sqltrain.kinds", "slow_home", ())
    gate = ModuleType("slow_gate")
    gate.begun, gate.open, gate.kinds = threading.Event(), threading.Event(), kinds  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "slow_gate", gate)
    monkeypatch.syspath_prepend(tmp_path)
    # The module looks up a part itself, as ours do: its own thread must not wait for itself.
    code = "import slow_gate\nslow_gate.begun.set()\nassert slow_gate.open.wait(60)\nslow_gate.kinds('part')(int)\n"
    (tmp_path / "slow_home.py").write_text(f"{code}assert 'part' in slow_gate.kinds\n")
    with ThreadPoolExecutor() as pool:
        first = pool.submit(kinds.__getitem__, "part")
        assert gate.begun.wait(60)
        second = pool.submit(kinds.__getitem__, "part")
        with pytest.raises(TimeoutError):
            second.result(0.2)
        gate.open.set()
        assert (first.result(), second.result()) == (int, int)


def test_an_installed_plugin_that_cannot_be_imported_is_told_at_every_look_up(tmp_path, monkeypatch):
    """A process that goes on after the first error must not run without the plug-in."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "plain_home.py").touch()
    (tmp_path / "half_installed.py").write_text("1 / 0")
    points = metadata.EntryPoints([metadata.EntryPoint("mine", "half_installed", "sqltrain.kinds")])
    monkeypatch.setattr(registry, "_entry_points", lambda: points)
    kinds: Registry[object] = Registry("kind", "sqltrain.kinds", "plain_home", ())
    for _ in range(2):
        with pytest.raises(RecipeError, match=r"the plug-in 'half_installed' of sqltrain\.kinds cannot be imported"):
            kinds.entry("part")


GROUPS = {
    "rewards": "my_parts",
    "readers": "my_reader",
    "protocols": "my_protocol",
    "dialects": "my_dialect",
    "equalities": "my_equality",
    "metrics": "my_metric",
    "policies": "my_policy",
    "filter_rules": "my_rule",
    "optimizers": "my_optimizer",
    "losses": "my_loss",
}
INSTALLED = """
import sys
sys.path[:0] = [SITE, ROOT]
from pipelines.recipe import recipes
from pipelines.recipe.plugins import dialect_code, plugin_code
from pipelines.sql.engine import Limits, Pair, SqlEngine
from pipelines.core.types import Database
recipe = recipes.load(RECIPE)
read = ("rewards", "data", "benchmark", "protocol", "execution", "evaluation", "rollout", "filter", "grpo", "sft")
print(sorted(plugin_code(recipe.slice(*read))), list(dialect_code(recipe.plugins)))
with SqlEngine(Limits.of(recipe.execution)) as sql:
    places = Database("shop", "geopackage", DATABASE)
    (verdict,) = sql.verdicts([Pair(places, "SELECT 1.001, TODAY()", "SELECT 1.002, TODAY()")], ["cents"])
print(verdict.scores)
"""


def test_an_installed_package_needs_no_line_in_a_recipe(folder):
    """The package lies on the path with the metadata that pip writes; another process finds it."""
    package, facts = folder / "site" / "stranger", folder / "site" / "stranger-1.0.dist-info"
    for path in (package, facts):
        path.mkdir(parents=True)
    (package / "__init__.py").touch()
    for name, text in PARTS.items():
        (package / name).write_text(text)
    (package / "polite_full.txt").write_text((folder / "polite_full.txt").read_text())
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: stranger\nVersion: 1.0\n")
    entries = [f"[sqltrain.{group}]\nmine = stranger.{module}\n" for group, module in GROUPS.items()]
    (facts / "entry_points.txt").write_text("\n".join(entries))
    recipe = folder / "installed.yaml"
    recipe.write_text(re.sub("plugins:.*\n", "", (folder / "mine.yaml").read_text()))
    (folder / "shop.gpkg").write_bytes((folder / "shop.sqlite").read_bytes())
    script = INSTALLED
    values = {"SITE": folder / "site", "ROOT": ROOT, "RECIPE": recipe, "DATABASE": folder / "shop.gpkg"}
    for name, value in values.items():
        script = script.replace(name, repr(str(value)))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    parts = ["equality cents", "filter rule star", "loss my_reinforce", "metric empty", "optimizer my_sgd"]
    expected = [*parts, "policy program", "protocol polite", "reader tabs", "reward term my_short"]
    assert done.stdout == f"{expected} ['SQL dialect geopackage']\n{{'cents': 1.0}}\n", done.stderr
