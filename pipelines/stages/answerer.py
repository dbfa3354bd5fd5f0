"""The policy that a command evaluates: what it is called, what distinguishes it, and what its answers cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import RecipeError
from pipelines.core.types import Example
from pipelines.endpoints.client import Endpoint, endpoint
from pipelines.recipe.config import Recipe
from pipelines.rollout.gguf_model import is_gguf
from pipelines.stages.answer_latency import Latency
from pipelines.stages.evaluated_policy import ENDPOINT, ORACLE
from pipelines.stages.fingerprints import ANSWER_FIELDS, folder_digest


@dataclass(frozen=True)
class Answerer:
    """The policy that is evaluated."""

    policy: str  # name or folder that `evaluated_policy` takes
    name: str  # name for people
    identity: Mapping[str, object]  # facts that distinguish it from any other, for the keys
    note: str = ""  # the identity in a few words, for the report
    entry: Endpoint | None = None  # the endpoint's entry, with its price

    def price(self, latency: Latency) -> str:
        """The price of one answer; "" if the endpoint's entry has no price."""
        assert self.entry is not None
        if not self.entry.price_in and not self.entry.price_out:
            return ""
        price = self.entry.price(latency.bought_in, latency.bought_out)
        return f"{price:.5f}"

    def require_playable(self, questions: Sequence[Example]) -> None:
        """Refuse the oracle for questions without gold SQL."""
        if self.policy != ORACLE:
            return
        without_gold = sum(not question.gold_sql for question in questions)
        if without_gold:
            raise RecipeError(
                f"the oracle plays gold SQL, and {without_gold} of {len(questions)} questions have none",
                "Evaluate a checkpoint (--model FOLDER) or an endpoint on them.",
            )


def named_answerer(policy: str) -> Answerer:
    """The answerer "oracle" or "endpoint:NAME"."""
    if not policy.startswith(ENDPOINT):
        return Answerer(policy, policy, {"policy": policy})
    entry = endpoint(policy.removeprefix(ENDPOINT))
    deciding_fields = {"base_url", *ANSWER_FIELDS}
    identity = {"endpoint": entry.model_dump(mode="json", include=deciding_fields)}
    return Answerer(policy, policy, identity, entry.model, entry)


def checkpoint_answerer(model: str, folder: Path, recipe: Recipe) -> Answerer:
    """The answerer of a checkpoint.

    Args:
        model: the name that the user gave: a folder or a GGUF file.
        folder: the plain checkpoint folder of that model.
    """
    name = folder.name
    if is_gguf(model):
        name = Path(model).stem
    digest = folder_digest(folder)
    identity = {
        "digest": digest,
        "dtype": recipe.model.compute_dtype,
        "decoder": recipe.rollout.policy,
    }
    policy = str(folder.resolve())
    return Answerer(policy, name, identity, note=f"checkpoint {digest}")
