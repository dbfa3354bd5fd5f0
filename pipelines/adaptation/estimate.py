"""The work of an adaptation, counted from its recipe before anything is made, and the cost of its teachers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipelines.adaptation.questions import Counts
from pipelines.endpoints.client import endpoint
from pipelines.recipe.config import Recipe, Teacher
from pipelines.stages.asked_endpoints import asked_endpoints
from pipelines.stages.graph import EVALUATIONS, GRAPH
from pipelines.stages.stage import Step, kind_of

ORACLE = "the scripted oracle, which reads the gold SQL"


@dataclass(frozen=True)
class Work:
    """The work of a stage at most: a number of units, or 0 if it is not counted."""

    number: int
    what: str


def estimate(recipe: Recipe, counts: Counts, steps: Sequence[Step]) -> dict[str, Work]:
    """The work of the stages that are to do, by name and in order."""
    # Stages without a count read files, or start a library, and make no episodes.
    works = {stage.name: Work(0, stage.about) for stage in GRAPH}
    works["synthesize"] = _synthesis_work(recipe, counts)
    works["sft"] = _sft_work(recipe, counts)
    n_difficulty_episodes = counts["train"] * recipe.difficulty.group
    works["difficulty"] = Work(n_difficulty_episodes, "episodes of training questions")
    works["grpo"] = _grpo_work(recipe, counts)
    for stage in EVALUATIONS:
        works[stage] = _evaluation_work(recipe, counts)
    works_to_do = {}
    for step in steps:
        if not step.cached:
            kind = kind_of(step.name)
            works_to_do[step.name] = works[kind]
    return works_to_do


def _n_demonstrations(recipe: Recipe, counts: Counts) -> int:
    return counts["train"] * recipe.synthesis.samples


def _synthesis_work(recipe: Recipe, counts: Counts) -> Work:
    endpoints = []
    for teacher in recipe.synthesis.teachers:
        if teacher.kind == "endpoint":
            endpoints.append(teacher.endpoint or "an endpoint")
    teachers = ", ".join(endpoints) or ORACLE
    return Work(_n_demonstrations(recipe, counts), f"demonstrations by {teachers}")


def _sft_work(recipe: Recipe, counts: Counts) -> Work:
    n_demonstrations = _n_demonstrations(recipe, counts)
    steps_an_epoch = math.ceil(n_demonstrations / recipe.sft.batch)
    steps = math.ceil(steps_an_epoch * recipe.sft.epochs)
    return Work(steps, f"steps of {recipe.sft.batch} demonstrations")


def _grpo_work(recipe: Recipe, counts: Counts) -> Work:
    questions = recipe.grpo.questions_per_step
    steps = recipe.grpo.steps
    if recipe.grpo.epochs is not None:
        steps = math.ceil(recipe.grpo.epochs * counts["train"] / questions)
    n_episodes = steps * questions * recipe.grpo.group
    return Work(n_episodes, f"episodes, in {steps:,} steps")


def _evaluation_work(recipe: Recipe, counts: Counts) -> Work:
    n_questions = counts["test"]
    episodes_a_question = 1 + recipe.evaluation.samples + recipe.evaluation.forced_single_turn
    return Work(n_questions * episodes_a_question, f"episodes of {n_questions:,} held-out questions")


def price(recipe: Recipe, counts: Counts) -> str:
    """The rough cost of the teachers behind endpoints, in a line; the length of conversations is not known yet."""
    lines = []
    for teacher in recipe.synthesis.teachers:
        if teacher.kind == "endpoint" and teacher.endpoint:
            line = _teacher_price(recipe, teacher, teacher.endpoint, counts)
            lines.append(line)
    other_endpoints: set[str] = set()
    for stage in recipe.stages:
        if stage != "synthesize":
            other_endpoints.update(name for name in asked_endpoints(recipe, stage) if name)
    for name in sorted(other_endpoints):
        lines.append(f"{name}: is asked too, at a cost that is not estimated")
    return "; ".join(lines) or "no endpoint is asked, so nothing is paid"


def _teacher_price(recipe: Recipe, teacher: Teacher, name: str, counts: Counts) -> str:
    entry = endpoint(name)
    tokens = teacher.sampling.episode_tokens
    turns = recipe.protocol.max_turns + recipe.protocol.forced_final
    attempts = 1 + recipe.synthesis.rationalise
    episodes = _n_demonstrations(recipe, counts) * attempts
    price_a_token = turns * entry.price_in + entry.price_out  # each turn reads the conversation again
    total = episodes * tokens * price_a_token / 1e6
    if not total:
        return f"{name}: its entry has no price"
    return f"{name}: some {total:,.2f} {entry.currency} if each conversation grows to {tokens:,} tokens"
