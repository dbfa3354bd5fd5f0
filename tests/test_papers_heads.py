"""What the heads of the papers' recipes say, run: a sentence that is not so fails here."""

import json
from pathlib import Path

import pytest
import torch

from pipelines.core.types import Action, ActionKind, Database, Example, ExecutionResult, ExecutionStatus
from pipelines.protocols.base import Protocol, build
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.rewards.panel import RUBRIC
from pipelines.sql.schema import introspect
from pipelines.training import losses
from pipelines.training.losses import estimate
from tests.fakes import build_database

FAILED = ExecutionResult(ExecutionStatus.ERROR, error="no such column: age", error_class="no_such_column")
LOOK = Action(ActionKind.SQL, "SELECT age FROM stock", "r")
ROLE = "You are an expert in text-to-SQL."


def load(name: str, *overrides: str) -> Recipe:
    return recipes.load(name, overrides)


def speaking(name: str, *overrides: str) -> Protocol:
    return build(load(name, *overrides).protocol)


def system(folder: Path, name: str, *overrides: str) -> str:
    path = folder / "shop.sqlite"
    build_database(path, "CREATE TABLE IF NOT EXISTS stock (id INTEGER PRIMARY KEY)")
    asked = Example("q1", "how many?", Database("shop", "sqlite", str(path)), "SELECT count(*) FROM stock")
    return "\n".join(text for _, text in speaking(name, *overrides).prompt(asked, introspect(asked.database), 5))


def test_a_failed_query_shows_its_message_and_only_an_unreadable_action_the_fixed_sentence() -> None:
    """SQL-Trail, figure 9 against line 20 of algorithm 1."""
    protocol = speaking("sql_trail")
    shown = protocol.observe(LOOK, FAILED, 9)
    assert "no such column: age" in shown
    assert shown.count("You have 9 turns left to complete the task.") == 1
    unread = protocol.observe(protocol.parse("<reasoning>r</reasoning> what now?"), None, 9)
    assert "not valid. Think again" in unread
    assert "not valid" not in shown


def test_skyrl_sqls_agent_is_told_the_turns_left_after_a_look_and_mtir_sqls_never() -> None:
    assert "You have 4 turns left" in speaking("skyrl_sql").observe(LOOK, FAILED, 4)
    call = json.dumps({"name": "execute_sql_query", "arguments": {"sql": LOOK.content}})
    mtir = speaking("mtir_sql")
    observed = mtir.observe(mtir.parse(f"<think>t</think>\n<tool_call>\n{call}\n</tool_call>"), FAILED, 4)
    assert "4" not in observed
    assert "turn" not in observed


def test_a_thinking_model_s_prompt_lacks_what_speaks_of_thinking_and_nothing_else(tmp_path: Path) -> None:
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


def test_the_variant_rloo_takes_the_mean_of_the_groups_others_off() -> None:
    recipe = load("mtir_sql", "variant=rloo").grpo
    group = recipe.group
    rewards = torch.tensor([1.2, -0.8, 0.0, -0.1, 1.2])
    others = (rewards.sum() - rewards) / (group - 1)
    advantages = estimate(rewards, group, recipe.baseline, recipe.scale)
    assert torch.allclose(advantages, rewards - others)


def gradient(recipe: Recipe, logps: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Of a recipe's loss by each token's log-probability, where the policy is the one that sampled."""
    grpo, given = recipe.grpo, logps.clone().requires_grad_()
    ratio = losses.ratios(given, logps, mask, grpo.level)
    each = losses.per_token(grpo.loss, ratio, given, advantages, grpo.clip_low, grpo.clip_high)
    losses.averaged(grpo.loss, each, mask, items=mask.sum(), longest=4, parts=1, share=1.0).backward()  # type: ignore[no-untyped-call]
    assert given.grad is not None
    return given.grad


def test_at_ratio_one_the_sum_over_tokens_is_equation_2_up_to_a_factor_and_no_bound_acts() -> None:
    """SQL-Trail, equation 2: the mean over episodes of a ratio of whole sequences times the advantage."""
    mask = torch.tensor([[1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 1.0, 1.0], [1.0, 1.0, 0.0, 0.0]])
    logps, advantages = torch.tensor([[-0.3, -1.0, -0.2, -2.0]] * 3), torch.tensor([[1.0], [-0.5], [0.25]])
    given = logps.clone().requires_grad_()
    whole = ((given - logps) * mask).sum(-1, keepdim=True).exp()
    objective = torch.min(whole * advantages, whole.clamp(1 - 0.2, 1 + 0.28) * advantages).mean()
    objective.backward()  # type: ignore[no-untyped-call]
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
def test_trust_sqls_turn_is_stricter_than_appendix_c_2(action: str, content: str, error: str | None) -> None:
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
def test_a_fence_inside_the_answer_stays_where_the_papers_do_not_speak_of_it(name: str, turn: str) -> None:
    action = speaking(name).parse(turn.format("```sql\nSELECT 1\n```"))
    assert (action.content, action.format_error) == ("```sql\nSELECT 1\n```", None)


def test_reasoning_sqls_format_asks_for_both_tags_in_either_order(tmp_path: Path) -> None:
    """3.2. Its prompts for SFT and STaR have <answer> around the query, too."""
    parse = speaking("reasoning_sql").parse
    assert parse("<answer>SELECT 1</answer><reasoning>r</reasoning>").format_error is None
    assert parse("<answer>SELECT 1</answer>").format_error is not None
    for variant in ("sft_gold", "star_sft"):
        assert "<answer>" in system(tmp_path, "reasoning_sql", f"variant={variant}")
    assert load("reasoning_sql").grpo.sampling.episode_tokens == 8192


def test_observations_are_cut_as_the_heads_say() -> None:
    """By rows, by cells and as a whole; TRUST-SQL's cells hold a table's definition."""
    bounds = {name: load(name).protocol for name in ("sql_trail", "skyrl_sql", "mtir_sql", "trust_sql")}
    cut = {name: (one.observation_rows, one.cell_chars, one.observation_chars) for name, one in bounds.items()}
    assert cut["sql_trail"] == cut["skyrl_sql"] == (50, 200, 8000)
    assert cut["mtir_sql"] == (10, 200, 8000)
    assert cut["trust_sql"] == (30, 4000, 16_000)


def test_the_optimiser_of_rl_is_what_each_head_says() -> None:
    for name in ("sql_trail", "trust_sql", "reasoning_sql", "skyrl_sql", "mtir_sql"):
        one = load(name).grpo.optimizer
        assert (one.kind, one.betas, one.weight_decay, one.clip, one.schedule) == (
            "adamw",
            (0.9, 0.95),
            0.01,
            1.0,
            "constant",
        )
        head = (recipes.CONF / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").partition("\ntitle:")[0]
        assert "betas 0.9 and 0.95, decay 0.01" in " ".join(head.replace("#", " ").split())


def test_mtir_sqls_direct_answer_is_not_thought_of(tmp_path: Path) -> None:
    """Table 4: Qwen3's own switch ends the prompt, and no block of reasoning is asked for."""
    prompt = system(tmp_path, "mtir_sql", "variant=direct")
    assert prompt.rstrip().endswith("/no_think")
    assert "<think>" not in prompt
    answer = "<think>\n\n</think>\n\n<answer>\n```sql\nSELECT 1\n```\n</answer>"
    assert speaking("mtir_sql", "variant=direct").parse(answer).format_error is None


def test_revisql_and_the_judge_have_what_their_authors_tell() -> None:
    # Reasoning-SQL, A.3: two of its twelve rules were in no line of the prompt
    for rule in ("first be grouped", "INNER JOIN", "STRFTIME"):
        assert rule in RUBRIC
    one = load("revisql")
    assert one.model.lora is not None
    assert (one.model.lora.rank, one.grpo.group, one.grpo.questions_per_step) == (32, 16, 64)
    assert (one.grpo.optimizer.lr, one.protocol.max_turns, one.grpo.sampling.turn_tokens) == (5e-5, 5, 3000)
