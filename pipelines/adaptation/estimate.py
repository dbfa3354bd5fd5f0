"""The work of an adaptation, counted from its recipe before anything is made, and the cost of its teachers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from pipelines.benchmarks.splitting import Part
from pipelines.recipe.config import Recipe
from pipelines.stages.graph import GRAPH, Step, kind_of
from pipelines.stages.keys import asked

Counts = Mapping[Part, int]


@dataclass(frozen=True)
class Work:
    """What a stage does at most: so many of something, or 0 of what is not counted."""

    number: int
    what: str


def estimate(recipe: Recipe, counts: Counts, steps: Sequence[Step]) -> dict[str, Work]:
    """The work of the stages that are to do, by name and in order."""
    works = {}
    for step in steps:
        if not step.cached and kind_of(step.name) in WORK:
            works[step.name] = WORK[kind_of(step.name)](recipe, counts)
        elif not step.cached:  # it reads files, or starts a library, and makes no episodes
            works[step.name] = Work(0, next(stage.about for stage in GRAPH if stage.name == kind_of(step.name)))
    return works


def _synthesize(recipe: Recipe, counts: Counts) -> Work:
    names = [teacher.endpoint or "an endpoint" for teacher in recipe.synthesis.teachers if teacher.kind == "endpoint"]
    teacher = ", ".join(names) or "the scripted oracle, which reads the gold SQL"
    return Work(_shown(recipe, counts), f"demonstrations by {teacher}")


def _sft(recipe: Recipe, counts: Counts) -> Work:
    steps = math.ceil(_shown(recipe, counts) / recipe.sft.batch) * recipe.sft.epochs
    return Work(math.ceil(steps), f"steps of {recipe.sft.batch} demonstrations")


def _difficulty(recipe: Recipe, counts: Counts) -> Work:
    return Work(counts["train"] * recipe.difficulty.group, "episodes of training questions")


def _grpo(recipe: Recipe, counts: Counts) -> Work:
    questions, epochs = recipe.grpo.questions_per_step, recipe.grpo.epochs
    steps = recipe.grpo.steps if epochs is None else math.ceil(epochs * counts["train"] / questions)
    return Work(steps * questions * recipe.grpo.group, f"episodes, in {steps:,} steps")


def _evaluate(recipe: Recipe, counts: Counts) -> Work:
    episodes = 1 + recipe.evaluation.samples + recipe.evaluation.forced_single_turn
    return Work(counts["test"] * episodes, f"episodes of {counts['test']:,} held-out questions")


def _shown(recipe: Recipe, counts: Counts) -> int:
    return counts["train"] * recipe.synthesis.samples


WORK: dict[str, Callable[[Recipe, Counts], Work]] = {
    "synthesize": _synthesize,
    "sft": _sft,
    "difficulty": _difficulty,
    "grpo": _grpo,
    "evaluate_model": _evaluate,
    "evaluate_sft": _evaluate,
    "evaluate_grpo": _evaluate,
}


def price(recipe: Recipe, counts: Counts) -> str:
    """What the teachers behind endpoints cost, roughly, in a line; the length of conversations is not known yet."""
    from pipelines.endpoints.client import endpoint

    lines = []
    for teacher in recipe.synthesis.teachers:
        if teacher.kind == "endpoint" and teacher.endpoint:
            entry = endpoint(teacher.endpoint)
            tokens, turns = teacher.sampling.episode_tokens, recipe.protocol.max_turns + recipe.protocol.forced_final
            episodes = _shown(recipe, counts) * (1 + recipe.synthesis.rationalise)
            sum_of_all = episodes * tokens * (turns * entry.price_in + entry.price_out) / 1e6  # read again at each turn
            words = f"some {sum_of_all:,.2f} {entry.currency} if each conversation grows to {tokens:,} tokens"
            cost = words if sum_of_all else "its entry has no price"
            lines.append(f"{teacher.endpoint}: {cost}")
    others = {name for stage in recipe.stages if stage != "synthesize" for name in asked(recipe, stage) if name}
    lines += [f"{name}: is asked too, at a cost that is not estimated" for name in sorted(others)]
    return "; ".join(lines) or "no endpoint is asked, so nothing is paid"
