"""The most that an evaluation asks of a policy: calls, tokens and their price."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pipelines.endpoints.client import Endpoint
from pipelines.recipe.config import Recipe
from pipelines.stages.evaluation_passes import passes


@dataclass(frozen=True)
class CallEstimate:
    """The most that an evaluation can ask; answers that are kept are not asked again.

    Each turn sends the conversation again; a conversation ends at its budget of tokens.
    """

    questions: int
    episodes: Mapping[str, int]  # numbers of episodes, keyed by pass
    calls: int
    tokens_in: int
    tokens_out: int
    entry: Endpoint | None  # the endpoint that sells the tokens; None for a policy without a price

    @property
    def cost(self) -> float:
        """The price of all tokens, in the entry's currency; 0.0 without a price."""
        if self.entry is None:
            return 0.0
        return self.entry.price(self.tokens_in, self.tokens_out)

    def figures(self) -> dict[str, float]:
        """The numbers by name, for scripts."""
        figures: dict[str, float] = {"questions": self.questions, "calls": self.calls}
        if self.entry is not None:
            figures["tokens_in"] = self.tokens_in
            figures["tokens_out"] = self.tokens_out
            figures["cost"] = self.cost
        return figures

    def lines(self, benchmark: str) -> list[str]:
        """The numbers for a person."""
        episodes = ", ".join(f"{number:,} {name}" for name, number in self.episodes.items())
        lines = [f"{benchmark}: {self.questions:,} questions ({episodes}), at most {self.calls:,} calls"]
        if self.entry is not None:
            price = "its entry has no price"
            if self.cost:
                price = f"{self.cost:,.2f} {self.entry.currency}"
            tokens = f"at most {self.tokens_in:,} tokens in and {self.tokens_out:,} out"
            lines.append(f"{tokens}: {price}; what is answered already is not asked again")
        return lines


def estimate_calls(
    recipe: Recipe, n_questions: int, entry: Endpoint | None, say: Callable[[str], None]
) -> CallEstimate:
    """The most that an evaluation of so many questions of the recipe's first benchmark asks; it is said, too."""
    episodes: dict[str, int] = {}
    calls = 0
    tokens_in = 0
    tokens_out = 0
    for evaluation_pass in passes(recipe):
        count = n_questions * evaluation_pass.samples
        budget = evaluation_pass.sampling.episode_tokens
        episodes[evaluation_pass.name] = count
        calls += count * evaluation_pass.max_turns
        tokens_in += count * evaluation_pass.max_turns * budget
        tokens_out += count * budget
    estimate = CallEstimate(n_questions, episodes, calls, tokens_in, tokens_out, entry)
    for line in estimate.lines(recipe.benchmark.name):
        say(line)
    return estimate
