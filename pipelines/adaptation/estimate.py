"""The work of an adaptation, counted from its recipe before anything is made, and the cost of its teachers."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipelines.benchmarks.splitting import Part
from pipelines.recipe.config import Recipe
from pipelines.stages.fingerprints import asked_endpoints
from pipelines.stages.graph import GRAPH, Step, kind_of

Counts = Mapping[Part, int]


@dataclass(frozen=True)
class Work:
    """The work of a stage at most: a number of units, or 0 if it is not counted."""

    number: int
    what: str


def estimate(recipe: Recipe, counts: Counts, steps: Sequence[Step]) -> dict[str, Work]:
    """The work of the stages that are to do, by name and in order."""
    names = [teacher.endpoint or "an endpoint" for teacher in recipe.synthesis.teachers if teacher.kind == "endpoint"]
    teacher = ", ".join(names) or "the scripted oracle, which reads the gold SQL"
    shown = counts["train"] * recipe.synthesis.samples
    sft_steps = math.ceil(math.ceil(shown / recipe.sft.batch) * recipe.sft.epochs)
    questions, epochs = recipe.grpo.questions_per_step, recipe.grpo.epochs
    grpo_steps = recipe.grpo.steps if epochs is None else math.ceil(epochs * counts["train"] / questions)
    asked_each = 1 + recipe.evaluation.samples + recipe.evaluation.forced_single_turn
    evaluated = Work(counts["test"] * asked_each, f"episodes of {counts['test']:,} held-out questions")
    works = {
        "synthesize": Work(shown, f"demonstrations by {teacher}"),
        "sft": Work(sft_steps, f"steps of {recipe.sft.batch} demonstrations"),
        "difficulty": Work(counts["train"] * recipe.difficulty.group, "episodes of training questions"),
        "grpo": Work(grpo_steps * questions * recipe.grpo.group, f"episodes, in {grpo_steps:,} steps"),
        **dict.fromkeys(("evaluate_model", "evaluate_sft", "evaluate_grpo"), evaluated),
    }
    # Other stages read files, or start a library, and make no episodes.
    about = {stage.name: Work(0, stage.about) for stage in GRAPH}
    return {step.name: {**about, **works}[kind_of(step.name)] for step in steps if not step.cached}


def price(recipe: Recipe, counts: Counts) -> str:
    """The rough cost of the teachers behind endpoints, in a line; the length of conversations is not known yet."""
    from pipelines.endpoints.client import endpoint

    lines = []
    for teacher in recipe.synthesis.teachers:
        if teacher.kind == "endpoint" and teacher.endpoint:
            entry = endpoint(teacher.endpoint)
            tokens, turns = teacher.sampling.episode_tokens, recipe.protocol.max_turns + recipe.protocol.forced_final
            episodes = counts["train"] * recipe.synthesis.samples * (1 + recipe.synthesis.rationalise)
            sum_of_all = episodes * tokens * (turns * entry.price_in + entry.price_out) / 1e6  # read again at each turn
            words = f"some {sum_of_all:,.2f} {entry.currency} if each conversation grows to {tokens:,} tokens"
            lines.append(f"{teacher.endpoint}: {words if sum_of_all else 'its entry has no price'}")
    others = {
        name for stage in recipe.stages if stage != "synthesize" for name in asked_endpoints(recipe, stage) if name
    }
    lines += [f"{name}: is asked too, at a cost that is not estimated" for name in sorted(others)]
    return "; ".join(lines) or "no endpoint is asked, so nothing is paid"
