"""The servers of a stage's policy, which run while the stage makes rollouts."""

import contextlib
from collections.abc import Iterator

from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.factories import serving
from pipelines.stages.context import Context


@contextlib.contextmanager
def serve_policy(ctx: Context, checkpoint: str | None, is_needed: bool) -> Iterator[Recipe]:
    """Serve the policy of a checkpoint; it gives the recipe with the servers' addresses.

    Args:
        checkpoint: None if something else answers.
        is_needed: whether rollouts are still to be made; if not, no server is started.
    """
    if checkpoint is None or not is_needed:
        yield ctx.recipe
        return
    with serving(checkpoint, ctx.recipe, ctx.folder, ctx.progress.say) as served:
        yield served.recipe
