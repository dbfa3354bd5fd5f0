"""Settings of `grpo` that contradict one another are refused before the first stage."""

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph, preflight
from pipelines.training import combinations


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["grpo.baseline=batch", "grpo.drop_zero_variance=false"], r"deviation, grpo.scale=group, is 0"),
        (["grpo.baseline=batch", "grpo.scale=batch"], "drop_zero_variance=false"),
        (["grpo.sampling.temperature=0"], "the same episode for a whole group"),
        (["grpo.importance_level=sequence"], "importance_level corrects"),
        (["grpo.credit=turn", "grpo.drop_zero_variance=false"], "grpo.baseline=others grpo.scale=none"),
        (["variant=turn_credit", "grpo.drop_zero_variance=true"], "other turns"),
        (["variant=turn_credit", "grpo.level=sequence"], "level=token"),
        (["variant=turn_credit", "rewards=[{term: exec}]"], "such as turn_faults"),
        (
            ["grpo.order=hard_first", "stages=[data, synthesize, filter, sft, grpo]"],
            "as the difficulty stage ranks them",
        ),
        (["grpo.lambda_schema=0.25"], "no reward term pays the schema track"),
        (["grpo.lambda_schema=0.25", "rewards=[{term: exec}, {term: format, weight: 0, track: schema}]"], "no reward"),
        (["rewards=[{term: trust_format}]"], r"react has not: explore, propose, generate\."),
        (["grpo.staleness=1", "hardware.deepspeed=zero2"], "a copy of the weights that DeepSpeed cuts up"),
        (["hardware.micro_tokens=4096", "grpo.loss=bnpo"], "that grpo.loss=bnpo averages over"),
        (
            ["grpo.loss=cispo", "grpo.clip_low=0.1"],
            r"grpo.clip_low=0.1 does nothing for grpo.loss=cispo.*=0.2, its",
        ),
    ],
)
def test_what_contradicts_itself_is_refused(overrides, words):
    with pytest.raises(RecipeError, match=words):
        combinations.refuse_unsupported(recipes.load("miniature", overrides))


@pytest.mark.parametrize(
    ("overrides", "one_more", "words"),
    [
        (
            ["grpo.baseline=batch", "grpo.scale=batch", "grpo.drop_zero_variance=false"],
            "grpo.resample=1",
            "learns from groups of equal rewards, too",
        ),
        (["grpo.baseline=others", "grpo.scale=none"], "grpo.credit=turn", "other turns"),
        (
            ["grpo.staleness=1", "grpo.bounds=[0.5, 2]", "grpo.importance_level=sequence"],
            "grpo.importance_cap=null",
            "bounds corrects",
        ),
        (
            ["grpo.staleness=1", "grpo.sampling.top_p=0.99", "grpo.importance_cap=null"],
            "grpo.importance_cap=2",
            "top_p=0.99 is not in the log-probabilities",
        ),
        (
            ["rollout.policy=vllm", "grpo.bounds=[0.5, 2]", "grpo.sampling.top_p=0.99"],
            "rollout.policy=transformers",
            "bounds corrects",
        ),
        (
            ["rewards=[{term: exec}, {term: trust_schema}]", "protocol.options.scout=true"],
            "protocol.options.scout=false",
            "react has no turn for one",
        ),
        (
            ["rewards=[{term: exec}, {term: trust_schema, weight: 0}, {term: trust_format, weight: 0}]"],
            "rewards.trust_format.weight=1",
            "react has not: explore",
        ),
        # whose track weighs nothing
        (["rewards=[{term: exec}, {term: trust_schema, track: schema}]"], "grpo.lambda_schema=0.25", "react proposes"),
        (
            ["rewards=[{term: trust_format, options: {phases: [confirm]}}]"],
            "rewards.trust_format.options.phases=[explore]",
            r"react has not: explore\.",
        ),
    ],
)
def test_what_goes_together_is_not_and_with_one_setting_more_it_is(overrides, one_more, words):
    combinations.refuse_unsupported(recipes.load("miniature", overrides))
    with pytest.raises(RecipeError, match=words):
        combinations.refuse_unsupported(recipes.load("miniature", [*overrides, one_more]))


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["variant=egc", "grpo.lambda_schema=0.25"], "no turn of the protocol phases proposes"),
        (["variant=egc", "rewards.trust_schema.track=full"], "phases has no turn for one"),
        (["protocol.options.phases=[explore, propose, confirm]"], r"phases has not: generate\."),
    ],
)
def test_phases_that_the_protocol_lacks_earn_nothing(overrides, words):
    with pytest.raises(RecipeError, match=words):
        combinations.refuse_unsupported(recipes.load("trust_sql", overrides))


def test_every_recipe_and_variant_goes_together(tmp_path):
    for name in recipes.recipe_names():
        for variant in ("", *recipes.variants(name)):
            combinations.refuse_unsupported(recipes.load(name, [f"variant={variant}"] if variant else []))
    recipe = recipes.load("miniature", ["grpo.bounds=[0.5, 2]"])
    with pytest.raises(RecipeError, match=r"grpo\.bounds"):
        preflight.check_run(recipe, graph.plan(recipe, Store(tmp_path)))
