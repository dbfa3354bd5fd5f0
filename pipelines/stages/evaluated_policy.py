"""The policy that an evaluation asks: a checkpoint, an endpoint, or the scripted oracle."""

from collections.abc import Callable
from pathlib import Path

from pipelines.databases.of_recipe import schemas
from pipelines.endpoints.client import endpoint
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.factories import policy
from pipelines.stages.answer_latency import BoughtTokens
from pipelines.stages.context import single_thread

ORACLE = "oracle"
ENDPOINT = "endpoint:"  # before the name of an endpoint
SAMPLES_A_SEED = 10_000  # answers of another seed are other samples, not those of the log


def evaluated_policy(name: str, recipe: Recipe, responses: Path) -> Policy:
    """The policy that is evaluated.

    Args:
        name: "oracle" for the scripted teacher without its mistakes, "endpoint:NAME" for an entry of
            `conf/local/endpoints.yaml`, anything else is a checkpoint folder or a hub name.
        responses: the folder of the logs of endpoints' answers.
    """
    if name == ORACLE:
        from pipelines.rollout.policies.oracle import OraclePolicy

        protocol = build_protocol(recipe.protocol)
        return OraclePolicy(protocol, 0.0, schemas(recipe))
    if name.startswith(ENDPOINT):
        from pipelines.teachers.policy import OpenAIPolicy

        entry_name = name.removeprefix(ENDPOINT)
        protocol = build_protocol(recipe.protocol)
        concurrency = recipe.synthesis.teacher.concurrency
        first_sample = recipe.seed * SAMPLES_A_SEED
        return OpenAIPolicy(endpoint(entry_name), entry_name, concurrency, responses, protocol, first_sample)
    single_thread()
    return policy(name, recipe)


def counter_of_tokens(model: Policy) -> Callable[[], BoughtTokens]:
    """A function that returns the tokens which an endpoint counted since its last call."""
    from pipelines.teachers.policy import OpenAIPolicy

    if not isinstance(model, OpenAIPolicy):
        return BoughtTokens

    def take() -> BoughtTokens:
        used = model.asker.take_used()
        bought_in = int(used.get("prompt_tokens", 0))
        bought_out = int(used.get("completion_tokens", 0))
        return BoughtTokens(bought_in, bought_out)

    return take
