"""The passes of an evaluation: greedy, sampled, and forced to answer at once."""

from dataclasses import dataclass

from pipelines.core.files import digest
from pipelines.evaluation.record import Mode
from pipelines.evaluation.record_files import SINGLE_TURN
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import ProtocolSection, Recipe, Sampling


@dataclass(frozen=True)
class EvaluationPass:
    """One way of asking every question: its name in `records`, protocol, sampling, turn cap and number of samples."""

    name: str
    mode: Mode
    protocol: ProtocolSection
    sampling: Sampling
    max_turns: int
    samples: int

    @property
    def answers_key(self) -> str:
        """A digest of the settings that decide an answer, beside the policy and the question."""
        settings = {
            "protocol": self.protocol.model_dump(mode="json"),
            "sampling": self.sampling.model_dump(mode="json"),
            "max_turns": self.max_turns,
        }
        return digest(settings)


def passes(recipe: Recipe) -> list[EvaluationPass]:
    """A greedy pass, a sampled one and, if the recipe asks for it, one in which the agent must answer at once."""
    settings = recipe.evaluation
    protocol = recipe.protocol
    turns = protocol.max_turns_eval
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    evaluation_passes = [EvaluationPass("greedy", "greedy", protocol, greedy, turns, samples=1)]
    if settings.samples:
        sampled = EvaluationPass("sampled", "sampled", protocol, settings.sampling, turns, settings.samples)
        evaluation_passes.append(sampled)
    if settings.forced_single_turn:
        at_once, cap = single_turn(protocol)
        single = EvaluationPass(SINGLE_TURN, "greedy", at_once, greedy, cap, samples=1)
        evaluation_passes.append(single)
    return evaluation_passes
