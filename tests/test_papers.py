"""The five papers' numbers, copied here from the papers by hand, against the recipes and the page made from them."""

from pathlib import Path

import pytest

from pipelines.protocols.base import build, read_prompt
from pipelines.recipe import recipes
from pipelines.rewards.panel import Rubric
from tests.fakes import load_script

DOCS = Path(__file__).resolve().parent.parent / "docs"
BY_SECTION = {
    "sql_trail": {
        "protocol": {"observation_rows": 50, "max_turns": 10, "max_turns_eval": 10, "forced_final": True},
        "data.sft": {"count": 3000},
        "filter": {"keep": 1000, "priority": ["medium", "hard"]},
        "sft": {"batch": 128, "epochs": 2},
        "sft.optimizer": {
            "lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.01, "warmup_ratio": 0.1, "clip": 1.0,
            "schedule": "cosine",
        },
        "difficulty": {"group": 6, "candidates": 2800, "keep": 700, "explore": 327, "explore_parts": [127, 100, 100]},
        "grpo": {
            "group": 6, "questions_per_step": 128, "steps": 108, "clip_low": 0.2, "clip_high": 0.28,
            "beta": 0, "scale": "group", "level": "token",
        },
        "grpo.sampling": {"temperature": 1.0, "top_p": 0.99},
        "grpo.optimizer": {"lr": 1e-6},
        "evaluation": {"samples": 8},
    },
    "trust_sql": {
        "protocol": {
            "schema_view": "hidden", "observation_rows": 30, "max_turns": 10, "max_turns_eval": 15,
            "forced_final": False,
        },
        "data.sft": {"count": 9217},
        "data.sft.options": {"complexity": ["Moderate", "Complex", "Highly Complex"]},
        "synthesis.teacher.sampling": {"turn_tokens": 2048},
        "difficulty.sampling": {"turn_tokens": 2048},
        "grpo.sampling": {"turn_tokens": 2048},
        "evaluation.sampling": {"turn_tokens": 2048, "temperature": 0.8},
        "filter": {"keep": None, "per_example": None},
        "sft": {"batch": 256, "epochs": 2},
        "sft.optimizer": {"lr": 1e-5},
        "difficulty": {"group": 8, "max_pass": 6 / 8, "keep": None},
        "grpo": {"group": 8, "questions_per_step": 32, "epochs": 3, "lambda_schema": 0.25, "scale": "group"},
        "grpo.optimizer": {"lr": 1e-6},
    },
    "reasoning_sql": {
        "protocol": {"max_turns": 1, "max_turns_eval": 1},
        "sft": {"batch": 32, "epochs": 3},
        "sft.optimizer": {"lr": 1e-5, "schedule": "cosine"},
        "grpo": {"group": 6, "questions_per_step": 32, "epochs": 3, "scale": "none"},
        "grpo.optimizer": {"lr": 1e-6, "schedule": "constant", "warmup_ratio": 0.001},
        "evaluation.sampling": {"temperature": 0.5},
    },
    "skyrl_sql": {
        "protocol": {"observation_rows": 50, "max_turns": 5, "max_turns_eval": 5},
        "data.rl.0": {"count": 540},
        "data.rl.1": {"count": 113},
        "grpo": {"group": 5, "questions_per_step": 256, "steps": 35},
        "grpo.sampling": {"temperature": 0.6, "top_p": 0.95, "turn_tokens": 3000, "episode_tokens": 29000},
        "grpo.optimizer": {"lr": 1e-6},
    },
    "mtir_sql": {
        "protocol": {"observation_rows": 10, "max_turns": 6, "max_turns_eval": 6, "format": "strict"},
        "data": {"drop_empty": True},
        "grpo": {"group": 5, "questions_per_step": 64, "beta": 0, "drop": ["malformed", "no_answer"]},
        "grpo.sampling": {"temperature": 0.6, "turn_tokens": 8192, "episode_tokens": 8192},
        "grpo.optimizer": {"lr": 1e-6},
    },
}  # fmt: skip
NUMBERS = {
    name: {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
    for name, sections in BY_SECTION.items()
}
WEIGHTS = {
    "sql_trail": {"exec": 5, "turns": 2, "schema": 1, "bigram": 1, "syntax": 1, "format": 1},
    "trust_sql": {"trust_exec": 1, "trust_format": 1, "trust_schema": 1},
    "reasoning_sql": {"exec": 3, "judge": 2, "syntax": 1, "schema": 1, "bigram": 1, "format": 1},
    "skyrl_sql": {"skyrl": 1},
    "mtir_sql": {"mtir_format": 1, "mtir_exec": 1, "mtir_result": 1},
}
OPTIONS = {
    "turns": {"easy": 2, "medium": 3},
    "trust_exec": {"right": 1.0, "runs": 0.2, "fails": 0.0},
    "trust_format": {"value": 0.1},
    "trust_schema": {"match": "exact", "coupled": True},
    "judge": {"by": "static", "scale": 2.0},
    "skyrl": {"malformed": -1.0, "wrong": 0.0, "right": 1.0},
    "mtir_format": {"value": 0.1},
    "mtir_exec": {"value": 0.1},
    "mtir_result": {"value": 1.0},
}
VARIANTS = {
    ("sql_trail", "3b"): {"model.source": "Qwen/Qwen2.5-Coder-3B-Instruct"},
    ("sql_trail", "14b"): {"model.source": "Qwen/Qwen2.5-Coder-14B-Instruct"},
    ("sql_trail", "no_bigram"): {"rewards.bigram.weight": 0},
    ("trust_sql", "8b"): {"model.source": "Qwen/Qwen3-8B", "sft.optimizer.lr": 1.5e-6, "grpo.optimizer.lr": 8e-7},
    ("trust_sql", "lambda_0125"): {"grpo.lambda_schema": 0.125},
    ("trust_sql", "lambda_0375"): {"grpo.lambda_schema": 0.375},
    ("trust_sql", "naive"): {
        "grpo.lambda_schema": 0,
        "rewards.trust_schema.track": "full",
        "rewards.trust_schema.weight": 0.25,
    },
    ("trust_sql", "uncoupled"): {"rewards.trust_schema.options": {"match": "exact", "coupled": False}},
    ("trust_sql", "dense"): {"rewards.trust_schema.options": {"match": "dense", "coupled": True}},
    ("trust_sql", "ec"): {"protocol.options": {"phases": ["explore", "confirm"]}},
    ("trust_sql", "egc"): {"protocol.options": {"phases": ["explore", "generate", "confirm"]}},
    ("trust_sql", "prefill"): {"protocol.schema_view": "prefill"},
    ("skyrl_sql", "names_only"): {"protocol.schema_view": "names"},
    ("skyrl_sql", "qwen3_8b"): {
        "model.source": "Qwen/Qwen3-8B",
        "protocol.reasoning": False,
        "grpo.sampling.turn_tokens": 8192,
        "evaluation.sampling.turn_tokens": 8192,
        "evaluation.sampling.temperature": 0.6,  # table 5; the other models are asked greedily
        "evaluation.samples": 8,
    },
    ("mtir_sql", "turns_3"): {"protocol.max_turns": 4, "protocol.max_turns_eval": 4},
    ("mtir_sql", "format_03"): {"grpo.drop": [], "rewards.mtir_format.options.value": 0.3},
    ("mtir_sql", "grpo"): {"grpo.drop": [], "grpo.beta": 0},
    ("mtir_sql", "grpo_kl"): {"grpo.beta": 0.04},
    ("mtir_sql", "single_turn"): {"grpo.beta": 0},
    ("mtir_sql", "reinforce_pp"): {"grpo.drop": [], "grpo.baseline": "batch", "grpo.scale": "batch"},
    ("reasoning_sql", "star_sft"): {"synthesis.rationalise": True, "protocol.prompt": "divide"},
}


def at(tree, key):
    for part in key.split("."):
        if isinstance(tree, list):
            tree = tree[int(part)] if part.isdigit() else next(item for item in tree if item["term"] == part)
        else:
            tree = tree[part]
    return tree


@pytest.mark.parametrize("name", NUMBERS)
def test_each_recipe_carries_its_papers_numbers(name):
    tree = recipes.load(name).model_dump(mode="json")
    assert {key: at(tree, key) for key in NUMBERS[name]} == NUMBERS[name]
    assert {term["term"]: term["weight"] for term in tree["rewards"]} == WEIGHTS[name]
    assert all(term["options"] == OPTIONS.get(term["term"], {}) for term in tree["rewards"])


@pytest.mark.parametrize(("name", "variant"), VARIANTS)
def test_the_papers_ablations_are_variants(name, variant):
    tree = recipes.load(name, [f"variant={variant}"]).model_dump(mode="json")
    expected = VARIANTS[name, variant]
    assert {key: at(tree, key) for key in expected} == expected


@pytest.mark.parametrize("name", recipes.recipe_names())
def test_every_recipe_and_variant_can_speak_and_pay(name):
    for variant in (None, *recipes.variants(name)):
        recipe = recipes.load(name, [f"variant={variant}"] if variant else [])
        assert recipe.name == name
        assert read_prompt(build(recipe.protocol).prompt_file)["user"].is_valid()
        if "grpo" in recipe.stages:
            assert Rubric(recipe.rewards).terms


@pytest.mark.parametrize("name", NUMBERS)
def test_each_recipe_opens_with_paper_command_and_deviations(name):
    head = (recipes.CONF / "recipes" / f"{name}.yaml").read_text(encoding="utf-8").partition("\ntitle:")[0]
    assert all(line.startswith("#") for line in head.splitlines())
    assert all(f"\n# {word}" in head for word in ("Paper  ", "Command  ", "Deviates  "))
    assert "equation" in head or name == "skyrl_sql"  # SkyRL-SQL's only formula has no number
    assert f"sqltrain run {name}" in head


BUILDER = load_script(DOCS / "build_recipes.py")


def test_the_page_is_what_the_recipes_say():
    assert (DOCS / "recipes.md").read_text(encoding="utf-8") == BUILDER.page(), "run: python docs/build_recipes.py"


def test_the_page_maps_every_number_to_its_key():
    shown = {key for rows in BUILDER.FACTS.values() for _, key in rows}
    for name, numbers in NUMBERS.items():
        missing = [key for key in numbers if not any(key == one or key.startswith(f"{one}.") for one in shown)]
        assert not missing, name
