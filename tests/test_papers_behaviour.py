"""What the recipes of the papers do, beside their numbers: prompts, turns, budgets, formats."""

import json
from pathlib import Path
from types import SimpleNamespace

import polars as pl
import pytest
import torch

from pipelines.benchmarks import base
from pipelines.core.errors import RecipeError
from pipelines.core.registry import LOSSES
from pipelines.core.types import Action, ActionKind, Database, Example, ExecutionResult, ExecutionStatus, StopReason
from pipelines.curation.difficulty import ScoredQuestion
from pipelines.evaluation.record_files import SINGLE_TURN
from pipelines.protocols.base import build_protocol, single_turn
from pipelines.recipe import deviations, recipes
from pipelines.recipe.config import Grpo
from pipelines.recipe.yaml_files import read_yaml
from pipelines.rewards.panel import RUBRIC
from pipelines.rewards.terms import trust_exec
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.lexical import bigrams
from pipelines.sql.schema import introspect
from pipelines.stages import difficulty
from pipelines.stages.evaluation_passes import passes
from pipelines.stages.synthesize import TeacherEngines
from pipelines.teachers.experts import GradeSource
from pipelines.teachers.policy import teacher_policies
from pipelines.training import losses
from pipelines.training.advantages import estimate_advantages
from pipelines.training.samples import grpo_steps
from tests.fakes import build_database

PAPERS = ("sql_trail", "trust_sql", "reasoning_sql", "skyrl_sql", "mtir_sql")
SINGLE = (("sql_trail", "single_turn_rl"), ("skyrl_sql", "single_turn"), ("mtir_sql", "single_turn"))


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("databases") / "shop.sqlite"
    columns = ", ".join(f"a_rather_long_column_name_{number} TEXT" for number in range(40))
    build_database(
        path,
        f"CREATE TABLE stock (id INTEGER PRIMARY KEY, {columns}, the_last_column TEXT)",
        "INSERT INTO stock (id, the_last_column) VALUES (1, 'x')",
    )
    return Example("q1", "how many?", Database("shop", "sqlite", str(path)), "SELECT count(*) FROM stock")


@pytest.fixture(scope="module")
def schema(example):
    return introspect(example.database)


def load(name, *overrides):
    return recipes.load(name, overrides)


@pytest.mark.parametrize("name", [name for name in PAPERS if name != "skyrl_sql"])
def test_no_prompt_tells_how_many_turns_there_are(name, example, schema):
    """TRUST-SQL trains with 10 and evaluates with 15: the paper's prompts say nothing of either."""
    protocol = build_protocol(load(name).protocol)
    assert protocol.prompt(example, schema, 10) == protocol.prompt(example, schema, 15)


@pytest.mark.parametrize("variant", ["none", "qwen3_8b", "names_only"])
def test_skyrl_sqls_prompt_tells_how_many_turns_there_are(variant, example, schema):
    """Section 4: "the agent is told the total number of turns it has before it needs to commit"."""
    protocol = build_protocol(load("skyrl_sql", *([] if variant == "none" else [f"variant={variant}"])).protocol)
    assert "You have 5 turns." in protocol.prompt(example, schema, 5)[0][1]
    assert "You have 3 turns." in protocol.prompt(example, schema, 3)[0][1]


CONSIDERATIONS = ("analyse the question", "sum up", "new ideas", "check that", "mend", "use the database", "go back")


@pytest.mark.parametrize("variant", ["", "variant=qwen3_8b", "variant=names_only"])
def test_skyrl_sqls_prompt_has_all_seven_considerations(variant, tmp_path):
    """Appendix A names seven; D.1 and D.2 change other parts of the prompt."""
    prompt = system(tmp_path, "skyrl_sql", *([variant] if variant else []))
    (rule,) = [line for line in prompt.splitlines() if line.startswith("3. Before the final query")]
    assert [words for words in CONSIDERATIONS if words in rule] == list(CONSIDERATIONS)


def test_trust_sqls_prompt_asks_for_the_querys_optimisation(example, schema):
    """Appendix C.3: "Consider query optimization (indexes, joins, filters)"."""
    (system_text, *_) = build_protocol(load("trust_sql").protocol).prompt(example, schema, 10)
    generate = system_text[1].partition("generate_sql: ")[2].partition("confirm_answer: ")[0]
    assert all(word in generate for word in ("indexes", "joins", "filters"))


@pytest.mark.parametrize(("name", "variant"), SINGLE)
def test_one_turn_is_a_prompt_of_the_same_protocol(name, variant, example, schema):
    """Not the 12 rules of another paper, nor "1 turns", nor a tool that cannot be called."""
    many, one = load(name), load(name, f"variant={variant}")
    assert one.protocol.name == many.protocol.name
    assert (one.protocol.max_turns, one.protocol.max_turns_eval, one.protocol.forced_final) == (1, 1, False)
    text = "\n".join(text for _, text in build_protocol(one.protocol).prompt(example, schema, 1))
    assert not any(word in text for word in ("STRFTIME", "turns", "<sql>", "tool_call", "observation"))
    assert f"<{build_protocol(one.protocol).thought}>" in text


def test_reasoning_sql_reports_nothing_of_its_pipeline_and_mtir_sqls_baseline_is_plain_grpo():
    # Section 4.1: "execution accuracy as the reward signal": no filter, no format terms
    recipe = load("mtir_sql", "variant=single_turn")
    assert [(term.term, term.weight) for term in recipe.rewards] == [("exec", 1)]
    assert recipe.grpo.drop == ()
    # Reasoning-SQL's pipeline figures need its query fixing and its selector
    assert not [key for key in load("reasoning_sql").reported if "pipeline" in key]


@pytest.mark.parametrize("name", ["sql_trail", "skyrl_sql", "sqltrain"])
def test_an_answer_at_once_is_reasoned_and_counts(name, example):
    """Table 1 of SkyRL-SQL and table 2 of SQL-Trail: the prompt tells of one turn, and the turn is the agent's own."""
    single = next(each for each in passes(load(name)) if each.name == SINGLE_TURN)
    thought = build_protocol(single.protocol).thought
    said = f"<{thought}>one aggregate</{thought}>\n<solution>SELECT count(*) FROM stock</solution>"
    with SqlEngine(Limits(), workers=1) as sql:
        policy = ScriptedPolicy(lambda request: said)
        engine = RolloutEngine(
            policy, build_protocol(single.protocol), sql, single.sampling, single.max_turns, introspect
        )
        (made,) = engine.run([EpisodeRequest(example, 0, 0)])
    text = "\n".join(text for _, text in made.prompt)
    assert "one turn" in text
    assert not any(wrong in text for wrong in ("0 turns", "No turns", "<sql>"))
    assert (made.final_sql, made.stop, made.forced) == ("SELECT count(*) FROM stock", StopReason.SOLUTION, False)
    assert made.turns[0].action.reasoning == "one aggregate"


def test_where_the_schema_is_hidden_nobody_answers_at_once():
    with pytest.raises(RecipeError, match=r"phases has no prompt for one turn"):
        passes(load("trust_sql", "evaluation.forced_single_turn=true"))
    brief, turns = single_turn(load("mini_skyrl_sql").protocol)
    assert (brief.forced_final, turns) == (True, 0)  # a tiny model's answer is opened for it


@pytest.mark.parametrize("name", PAPERS)
def test_each_recipe_says_its_budgets(name):
    """Tokens a turn and an episode stand in the recipe's own file, wherever it samples."""
    tree = read_yaml(recipes.CONF / "recipes" / f"{name}.yaml")
    sampling = [tree["grpo"]["sampling"], tree["evaluation"]["sampling"]]
    sampling += [tree["difficulty"]["sampling"]] if "difficulty" in tree else []
    assert all("turn_tokens" in one for one in sampling)
    assert len({one["turn_tokens"] for one in sampling}) == 1
    if load(name).protocol.max_turns > 1:
        assert all("episode_tokens" in one for one in sampling)


def explored(name, sql):
    call = json.dumps({"name": "execute_sql_query", "arguments": {"sql": sql}})
    return f"<think>t</think><action>explore_schema</action><tool_call>{call}</tool_call>"


def test_a_tables_definition_is_shown_whole(example):
    """TRUST-SQL explores by `SELECT sql FROM sqlite_master`: a cut definition hides columns."""
    protocol = build_protocol(load("trust_sql").protocol)
    with SqlEngine(Limits(), workers=1) as sql:
        (result,) = sql.execute_many([(example.database, "SELECT sql FROM sqlite_master")], 30)
    shown = protocol.observe(protocol.parse(explored("trust_sql", "SELECT 1")), result, 9)
    assert len(str(result.rows[0][0])) > 1000
    assert "the_last_column" in shown


@pytest.mark.parametrize("name", ["sql_trail", "trust_sql", "skyrl_sql", "mtir_sql"])
def test_observations_are_cut_by_rows_alone(name):
    """Each paper bounds rows (50, 30, 50, 10), and neither a cell nor all of an observation."""
    limit = {"sql_trail": 50, "trust_sql": 30, "skyrl_sql": 50, "mtir_sql": 10}[name]
    long = "x" * 3000
    result = ExecutionResult(ExecutionStatus.OK, ("name",), tuple((long,) for _ in range(60)))
    shown = speaking(name).observe(LOOK, result, 4)
    assert shown.count(long) == limit
    cut = speaking(name, "protocol.cell_chars=200", "protocol.observation_chars=8000").observe(LOOK, result, 4)
    assert (long not in cut, len(cut) < 9000) == (True, True)


@pytest.mark.parametrize(
    "sql", ["SELECT count(*) FROM stock", "SELECT a FROM t GROUP BY a", "SELECT * FROM t JOIN u ON t.a = u.a"]
)
def test_exploring_runs_any_sql_unless_the_recipe_forbids_it(sql):
    action = build_protocol(load("trust_sql").protocol).parse(explored("trust_sql", sql))
    assert (action.kind, action.content, action.format_error) == (ActionKind.EXPLORE, sql, None)
    strict = build_protocol(load("trust_sql", "protocol.options.probes_only=true").protocol)
    assert strict.parse(explored("trust_sql", sql)).format_error == "not_a_probe"


THINKING = "<think>First <sql> would look, </sql> then <solution>: an <observation> tells.</think>\n"


def test_what_a_model_thinks_is_not_parsed():
    protocol = build_protocol(load("skyrl_sql", "variant=qwen3_8b").protocol)
    action = protocol.parse(THINKING + "<sql>SELECT 1</sql>")
    assert (action.kind, action.content, action.format_error) == (ActionKind.SQL, "SELECT 1", None)
    assert protocol.parse("<think>a <|im_start|>user</think><sql>SELECT 1</sql>").format_error == "forged_role"
    assert protocol.parse("<think>never closed <sql>SELECT 1</sql>").format_error == "unclosed_tag"
    trail = build_protocol(load("sql_trail").protocol)  # its reasoning is a block of the protocol, which `</sql>` ends
    assert trail.parse("<reasoning>a <sql>b</reasoning><sql>SELECT 1</sql>").format_error == "nested_tag"


FORMATS = {
    "sql_trail": "<reasoning>r</reasoning> so: <sql>SELECT 1</sql>",
    "skyrl_sql": "I begin. <think>r</think> so: <sql>SELECT 1</sql>",
    "trust_sql": "<think>r</think>\nNow <tool_call>"
    + json.dumps({"name": "execute_sql_query", "arguments": {"sql": "SELECT 1"}})
    + "</tool_call> <action>explore_schema</action>",
    "reasoning_sql": "<reasoning>r</reasoning> so: <answer>SELECT 1</answer>",
}


@pytest.mark.parametrize("name", FORMATS)
def test_the_papers_formats_look_at_tags_alone(name):
    """SkyRL-SQL 4.1, SQL-Trail A.4, TRUST-SQL C.2, Reasoning-SQL 3.2: none of them speaks of text outside the tags."""
    assert build_protocol(load(name).protocol).parse(FORMATS[name]).format_error is None
    assert build_protocol(load(name, "protocol.format=strict").protocol).parse(FORMATS[name]).format_error is not None


def rows(count):
    return ExecutionResult(ExecutionStatus.OK, ("name", "age"), tuple(("ann", n) for n in range(count)))


def test_the_rows_of_sql_trails_table_4():
    def shown(*overrides):
        protocol = build_protocol(load("sql_trail", *overrides).protocol)
        return protocol.observe(protocol.parse("<reasoning>r</reasoning><sql>SELECT 1</sql>"), rows(1), 3)

    assert "name | age\nann | 0\n(1 row)" in shown("variant=no_selection")
    assert "name" not in shown("variant=no_headers")
    assert "ann | 0\n(1 row)" in shown("variant=no_headers")
    bare = load("sql_trail", "variant=schemaless").protocol
    assert (bare.schema_view, bare.options["headers"]) == ("hidden", False)


def test_no_prompt_promises_column_names_or_a_schema_that_the_variant_does_not_show(tmp_path):
    """SQL-Trail, table 4; SkyRL-SQL, D.1, whose prompt loses the schema in its first words and its example, too."""
    for variant in ("no_headers", "schemaless", "names_only"):
        name, headers = ("skyrl_sql", 1) if variant == "names_only" else ("sql_trail", 0)
        prompt = system(tmp_path, name, f"variant={variant}")
        assert prompt.count("\nMAX(price)\n18.5") == prompt.count("as a table with column names") == headers
        assert ("You get a database schema" in prompt) == ("CREATE TABLE" in prompt) == (variant == "no_headers")


@pytest.mark.parametrize("variant", ["shots_act", "shots_divide", "shots_plan", "shots_own", "star_sft"])
def test_reasoning_sqls_other_prompts_can_be_put(variant, example, schema):
    ((_, text),) = build_protocol(load("reasoning_sql", f"variant={variant}").protocol).prompt(example, schema, 1)
    assert text.count("<answer>") == (1 if variant == "star_sft" else 3)
    assert "the_last_column" in text


def test_what_needs_an_endpoint_is_refused_without_one(tmp_path, monkeypatch):
    """The program's grade is no judge's, and the oracle no teacher of reasoning."""
    monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(tmp_path / "none.yaml"))
    with pytest.raises(RecipeError, match="no endpoint 'judge'"):
        GradeSource(load("reasoning_sql", "variant=judge_only").rewards, tmp_path)
    star = load("reasoning_sql", "variant=star_sft")
    with pytest.raises(RecipeError, match="an endpoint without a name"):
        teacher_policies([star.synthesis.teacher], build_protocol(star.protocol), tmp_path, introspect, pytest.fail)


def test_epochs_are_counted_in_the_questions_that_are_left():
    assert grpo_steps(load("reasoning_sql").grpo, 8026) == 753
    assert grpo_steps(load("trust_sql").grpo, 11_642) == 1092
    assert grpo_steps(Grpo(epochs=0.5, questions_per_step=16, updates_per_rollout=2), 100) == 8
    assert grpo_steps(Grpo(steps=7), 100) == 7
    mtir, skyrl = load("mtir_sql").grpo, load("skyrl_sql")
    assert grpo_steps(mtir, 8659 + 9428) == 283  # one epoch of what is left: 18,087 / 64
    assert grpo_steps(mtir, 16_000) == 250
    epochs = skyrl.grpo.steps * skyrl.grpo.questions_per_step / sum(one.count or 0 for one in skyrl.data.rl)
    assert 13.5 < epochs < 14  # section 5: "approximately 14 epochs"


def test_every_teacher_of_a_mix_can_answer_everything(example, tmp_path):
    """TRUST-SQL, A.2: three models annotate; a mix by shares would give each a third."""
    two = "synthesis={samples: 2, every: true, mix: [{kind: oracle}, {kind: oracle, error_rate: 1.0}]}"
    made = TeacherEngines(load("miniature", two), tmp_path).answer([example])
    assert [trajectory.sample for trajectory in made] == [0, 1, 2, 3]
    one = TeacherEngines(load("miniature", two.replace("every: true", "every: false")), tmp_path).answer([example])
    assert len(one) == 2
    mix = "synthesis.mix=[{kind: endpoint, endpoint: a}, {kind: endpoint, endpoint: b, sampling: {turn_tokens: 9}}]"
    alike, own = (teacher.sampling for teacher in load("trust_sql", mix).synthesis.teachers)
    # A.2: "a maximum output length of 2,048 tokens per response"; the temperature is the recipe's 0.7
    assert (alike.turn_tokens, alike.temperature, own.turn_tokens, own.temperature) == (2048, 0.7, 9, 0.7)


def test_spiders_own_training_questions_are_7000(tmp_path, example):
    (tmp_path / "database" / "shop").mkdir(parents=True)
    (tmp_path / "database" / "shop" / "shop.sqlite").write_bytes(Path(example.database.location).read_bytes())
    for name, count in (("train_spider", 3), ("train_others", 2)):
        asked = [{"question": f"{name} {n}", "query": "SELECT 1", "db_id": "shop"} for n in range(count)]
        (tmp_path / f"{name}.json").write_text(json.dumps(asked))

    def count(options):
        source = load("sql_trail", f"data.sft={{kind: spider, path: '{tmp_path}', options: {options}}}").data.sft
        return len(base.read(source, 0, tmp_path).examples)

    assert (count("{}"), count("{others: false}")) == (5, 3)
    trail = load("sql_trail").data
    assert not trail.sft.options["others"]
    assert not trail.rl[1].options["others"]
    assert load("mtir_sql").data.rl[0].options.get("others", True)


def test_failures_are_taken_of_what_sft_was_trained_on(tmp_path):
    """SQL-Trail, A.6: "127 questions from the original SFT training set": of the 1,000, not of the 3,000."""
    asked = [("a", "sft", 0), ("b", "sft", 0), ("c", "sft", 0), ("d", "rl", 0), ("e", "rl", 1)]
    for name, frame in (
        ("data", pl.DataFrame(asked, ["id", "pool", "part"], orient="row")),
        ("filter", pl.DataFrame({"example_id": ["b"]})),
    ):
        (tmp_path / name).mkdir()
        frame.write_parquet(tmp_path / name / "data.parquet")
    recipe = load("sql_trail")
    context = lambda **inputs: SimpleNamespace(recipe=recipe, inputs=inputs)  # noqa: E731
    with_sft = difficulty._candidates(context(data=tmp_path / "data", filter=tmp_path / "filter"))
    assert [pool["id"].to_list() for pool in with_sft] == [["b"], ["d"], ["e"]]
    assert difficulty._candidates(context(data=tmp_path / "data"))[0].rows() == [("a", 0), ("b", 1), ("c", 2)]
    assert ScoredQuestion("b", 6, 0).score == 1.0


@pytest.mark.parametrize("name", [*PAPERS, "sqltrain"])
def test_the_command_of_a_7b_run_names_what_it_runs_on(name):
    head = (recipes.CONF / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").partition("\ntitle:")[0]
    command = head.partition("# Command ")[2].partition("# Deviates")[0]
    for word in ("hardware.device=cuda", "hardware.processes=", "rollout.policy=vllm", "rollout.servers="):
        assert word in command
    assert load(name).hardware.device == "auto"


FAILED = ExecutionResult(ExecutionStatus.ERROR, error="no such column: age", error_class="no_such_column")
LOOK = Action(ActionKind.SQL, "SELECT age FROM stock", "r")
ROLE = "You are an expert in text-to-SQL."


def speaking(name, *overrides):
    return build_protocol(load(name, *overrides).protocol)


def system(folder, name, *overrides):
    path = folder / "shop.sqlite"
    build_database(path, "CREATE TABLE IF NOT EXISTS stock (id INTEGER PRIMARY KEY)")
    asked = Example("q1", "how many?", Database("shop", "sqlite", str(path)), "SELECT count(*) FROM stock")
    return "\n".join(text for _, text in speaking(name, *overrides).prompt(asked, introspect(asked.database), 5))


def test_a_failed_query_shows_its_message_and_only_an_unreadable_action_the_fixed_sentence():
    """SQL-Trail, figure 9 against line 20 of algorithm 1."""
    protocol = speaking("sql_trail")
    shown = protocol.observe(LOOK, FAILED, 9)
    assert "no such column: age" in shown
    assert shown.count("You have 9 turns left to complete the task.") == 1
    unread = protocol.observe(protocol.parse("<reasoning>r</reasoning> what now?"), None, 9)
    assert "not valid. Think again" in unread
    assert "not valid" not in shown


def test_skyrl_sqls_agent_is_told_the_turns_left_after_a_look_and_mtir_sqls_never():
    assert "You have 4 turns left" in speaking("skyrl_sql").observe(LOOK, FAILED, 4)
    call = json.dumps({"name": "execute_sql_query", "arguments": {"sql": LOOK.content}})
    mtir = speaking("mtir_sql")
    observed = mtir.observe(mtir.parse(f"<think>t</think>\n<tool_call>\n{call}\n</tool_call>"), FAILED, 4)
    assert "4" not in observed
    assert "turn" not in observed


def test_a_thinking_model_s_prompt_lacks_what_speaks_of_thinking_and_nothing_else(tmp_path):
    """SkyRL-SQL, D.2: the role and the rules stay."""
    many, one = (f"variant={name}" for name in ("qwen3_8b", "single_turn"))
    asked, thinking = system(tmp_path, "skyrl_sql"), system(tmp_path, "skyrl_sql", many)
    once = system(tmp_path, "skyrl_sql", many, one, "protocol.prompt=single_bare")
    for prompt in (asked, thinking, once):
        assert prompt.startswith(ROLE)
        assert "Select exactly what the question asks for" in prompt
    assert "<think>" in asked
    assert "<think>" not in thinking + once
    rules = [line for line in asked.splitlines() if line.startswith(("1.", "2.")) and "<think>" not in line][:2]
    assert set(rules) <= set(thinking.splitlines())


def test_the_variant_rloo_takes_the_mean_of_the_groups_others_off():
    recipe = load("mtir_sql", "variant=rloo").grpo
    group = recipe.group
    rewards = torch.tensor([1.2, -0.8, 0.0, -0.1, 1.2])
    others = (rewards.sum() - rewards) / (group - 1)
    assert torch.allclose(estimate_advantages(rewards, group, recipe.baseline, recipe.scale), rewards - others)


def gradient(recipe, logps, advantages, mask):
    """Of a recipe's loss by each token's log-probability, where the policy is the one that sampled."""
    grpo, given = recipe.grpo, logps.clone().requires_grad_()
    ratio = losses.ratios(given, logps, mask, grpo.level)
    bounds = {"clip_low": grpo.clip_low, "clip_high": grpo.clip_high}
    sizes = {"generation_tokens": mask.sum(), "longest_episode": 4}
    LOSSES[grpo.loss].compute(losses.TrackBatch(given, ratio, advantages, mask, **bounds, **sizes)).backward()
    assert given.grad is not None
    return given.grad


def test_at_ratio_one_the_sum_over_tokens_is_equation_2_up_to_a_factor_and_no_bound_acts():
    """SQL-Trail, equation 2: the mean over episodes of a ratio of whole sequences times the advantage."""
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    logps, advantages = torch.tensor([[-0.3, -1.0, -0.2, -2.0]] * 3), torch.tensor([[1.0], [-0.5], [0.25]])
    given = logps.clone().requires_grad_()
    whole = ((given - logps) * mask).sum(-1, keepdim=True).exp()
    torch.min(whole * advantages, whole.clamp(1 - 0.2, 1 + 0.28) * advantages).mean().backward()
    assert given.grad is not None
    ours = gradient(load("sql_trail"), logps, advantages, mask)
    assert torch.allclose(-ours * mask.sum() / len(mask), given.grad)
    unbound = load("sql_trail", "grpo.clip_low=0.01", "grpo.clip_high=0.01")
    assert torch.equal(gradient(unbound, logps, advantages, mask), ours)


@pytest.mark.parametrize(
    ("action", "content", "error"),
    [
        ("confirm_answer", "<answer>SELECT 1</answer>", None),
        ("confirm_answer", "<answer>SELECT 1</answer><schema>{}</schema>", "two_contents"),
        ("explore_schema", "<tool_call>SELECT 1</tool_call>", "bad_json"),
        ("propose_schema", '<schema>{"stock": null}</schema>', "bad_schema"),
    ],
)
def test_trust_sqls_turn_is_stricter_than_appendix_c_2(action, content, error):
    turn = f"<action>{action}</action>{content}"
    assert speaking("trust_sql").parse(f"<think>t</think>{turn}").format_error == error
    assert speaking("trust_sql").parse(f"<think></think>{turn}").format_error is not None


@pytest.mark.parametrize(
    ("name", "turn"),
    [
        ("sql_trail", "<reasoning>r</reasoning><solution>{}</solution>"),
        ("skyrl_sql", "<think>r</think><solution>{}</solution>"),
        ("trust_sql", "<think>r</think><action>confirm_answer</action><answer>{}</answer>"),
    ],
)
def test_a_fence_inside_the_answer_stays_where_the_papers_do_not_speak_of_it(name, turn):
    action = speaking(name).parse(turn.format("```sql\nSELECT 1\n```"))
    assert (action.content, action.format_error) == ("```sql\nSELECT 1\n```", None)


def test_reasoning_sqls_format_asks_for_both_tags_in_either_order(tmp_path):
    """3.2. Its prompts for SFT and STaR have <answer> around the query, too."""
    parse = speaking("reasoning_sql").parse
    assert parse("<answer>SELECT 1</answer><reasoning>r</reasoning>").format_error is None
    assert parse("<answer>SELECT 1</answer>").format_error is not None
    for variant in ("sft_gold", "star_sft"):
        assert "<answer>" in system(tmp_path, "reasoning_sql", f"variant={variant}")


def test_the_optimiser_of_rl_is_what_is_told_of_it():
    expected = ("adamw", (0.9, 0.95), 0.01, 1.0, "constant")
    for name in PAPERS:
        one = load(name).grpo.optimizer
        assert (one.kind, one.betas, one.weight_decay, one.clip, one.schedule) == expected
        assert any("betas 0.9 and 0.95, decay 0.01" in each.ours for each in deviations.of_paper(name))


def test_formats_rewards_and_bounds_are_what_is_told_of_them():
    assert load("mtir_sql").execution.timeout_s == 30
    assert speaking("sql_trail").parse("<reasoning>r</reasoning>").format_error == "no_action"
    assert speaking("sql_trail").parse("<sql>SELECT 1</sql>").format_error == "missing_reasoning"
    answer = "<think>t</think>\n<answer>\n```sql\nSELECT 1\n```\n</answer> so"
    assert speaking("mtir_sql").parse(answer).format_error == "text_outside_tags"
    assert trust_exec(SimpleNamespace(correct=False, executable=True)) == 0.2
    assert bigrams("SELECT Name FROM T") == {("select", "name"), ("name", "from"), ("from", "t")}


def test_questions_with_empty_golds_stay_unless_the_paper_leaves_them_out():
    """MTIR-SQL, 4.1: gold SQL without rows "would fail to provide valid reward signals"; no other paper says so."""
    assert {name: load(name).data.drop_empty for name in PAPERS} == {name: name == "mtir_sql" for name in PAPERS}


def test_no_recipe_of_ours_pays_an_empty_answer_for_an_empty_gold():
    """What follows a paper is as the paper is; the golds of the generated world all have rows."""
    of_papers = {*PAPERS, "arctic_sql", "csc_sql", "revisql"}
    for name in recipes.recipe_names():
        recipe = load(name)
        sources = [recipe.data.sft, *recipe.data.rl]
        is_generated = all(source.kind in ("miniature", "mini_interact") for source in sources if source)
        leaves_out = recipe.data.drop_empty or recipe.execution.equality == "strict_nonempty"
        assert name in of_papers or is_generated or leaves_out, name


def test_mtir_sqls_direct_answer_is_not_thought_of(tmp_path):
    """Table 4: Qwen3's own switch ends the prompt, and no block of reasoning is asked for."""
    prompt = system(tmp_path, "mtir_sql", "variant=direct")
    assert prompt.rstrip().endswith("/no_think")
    assert "<think>" not in prompt
    answer = "<think>\n\n</think>\n\n<answer>\n```sql\nSELECT 1\n```\n</answer>"
    assert speaking("mtir_sql", "variant=direct").parse(answer).format_error is None


def test_revisql_and_the_judge_have_what_their_authors_tell():
    # Reasoning-SQL, A.3: two of its twelve rules were in no line of the prompt
    for rule in ("first be grouped", "INNER JOIN", "STRFTIME"):
        assert rule in RUBRIC
    one = load("revisql")
    assert (one.model.lora.rank, one.grpo.group, one.grpo.questions_per_step) == (32, 16, 64)
    assert (one.grpo.optimizer.lr, one.protocol.max_turns, one.grpo.sampling.turn_tokens) == (5e-5, 5, 3000)
