"""Which settings of `grpo` go together: each that would do nothing, or something else than it says, is refused."""

from collections.abc import Iterator

from pipelines.core.errors import RecipeError
from pipelines.core.registry import LOSSES, POLICIES, RATIO_SETTINGS, REWARDS
from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.protocols import knowledge
from pipelines.protocols.base import Protocol, build_protocol
from pipelines.recipe.config import Recipe
from pipelines.rollout.policies.factories import IN_PROCESS

SCHEMA = "schema"  # the track up to the proposed schema
ANSWER = "SELECT 1"
PROPOSAL = knowledge.proposal(["t"], {})


def refuse_unsupported(recipe: Recipe) -> None:
    """Refuse the recipe's `grpo` section if its settings do not go together; nothing heavy is imported.

    Raises:
        RecipeError: the first combination that is refused.
    """
    refusals = [
        *_refused_advantages(recipe),
        *_refused_samplers(recipe),
        *_refused_losses(recipe),
        *_refused_rewards(recipe),
    ]
    if refusals:
        problem, hint = refusals[0]
        raise RecipeError(problem, hint)


Refusals = Iterator[tuple[str, str]]  # problems, each with what to do


def _refused_advantages(recipe: Recipe) -> Refusals:
    """Settings under which rewards or groups say nothing."""
    grpo = recipe.grpo
    uses_batch = grpo.baseline == "batch"
    leaves_out = grpo.drop_zero_variance or grpo.resample
    if uses_batch and grpo.scale == "group":
        yield (
            "grpo.baseline=batch learns from groups of equal rewards, whose own deviation, grpo.scale=group, is 0",
            "Set grpo.scale=batch (REINFORCE++) or grpo.scale=none.",
        )
    pays_schema_track = any(term.track == SCHEMA and term.weight for term in recipe.rewards)
    if grpo.lambda_schema and not pays_schema_track:
        yield (
            "grpo.lambda_schema is set, but no reward term pays the schema track",
            "Set track: schema and a weight other than 0, or grpo.lambda_schema=0.",
        )
    if grpo.sampling.temperature == 0:
        yield (
            "grpo.sampling.temperature=0 draws the same episode for a whole group, whose rewards are then all equal",
            "Set a temperature above 0, such as 1.",
        )
    if grpo.credit == "turn":
        yield from _refused_turn_credit(recipe)
    if grpo.order != "shuffled" and "difficulty" not in recipe.stages:
        yield (
            f"grpo.order={grpo.order} takes the questions as the difficulty stage ranks them, and there is none",
            "Add difficulty to stages, or set grpo.order=shuffled.",
        )
    if uses_batch and leaves_out:
        yield (
            "grpo.baseline=batch learns from groups of equal rewards, too",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        )


def _refused_turn_credit(recipe: Recipe) -> Refusals:
    """Settings that `grpo.credit=turn` does not go with."""
    grpo = recipe.grpo
    if (grpo.baseline, grpo.scale, grpo.level) != ("others", "none", "token"):
        yield (
            "grpo.credit=turn holds each turn against the group's other episodes, and divides by nothing",
            "Set grpo.baseline=others grpo.scale=none grpo.level=token.",
        )
    if grpo.drop_zero_variance or grpo.resample:
        yield (
            "groups of equal rewards may still have been paid for other turns, from which grpo.credit=turn learns",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        )
    if not any(REWARDS[term.term].by_turn and term.track == "full" for term in recipe.rewards):
        yield (
            "grpo.credit=turn needs a reward term that is paid by turn; all of the recipe's are paid at the end",
            "Add one under rewards:, such as turn_faults, or set grpo.credit=episode.",
        )


def _refused_samplers(recipe: Recipe) -> Refusals:
    """Settings that do not go with the policy that samples."""
    grpo = recipe.grpo
    policy = recipe.rollout.policy
    is_served = policy != IN_PROCESS
    is_ahead = grpo.staleness > 0 and not is_served
    is_corrected = grpo.importance_cap is not None and (is_served or is_ahead)
    if not is_corrected and (grpo.bounds is not None or grpo.importance_level == "sequence"):
        corrector = "importance_level" if grpo.bounds is None else "bounds"
        yield (
            f"grpo.{corrector} corrects for a sampler that is not the policy, and here nothing is corrected",
            "It acts with grpo.staleness or a served policy, and with a grpo.importance_cap.",
        )
    top_p = grpo.sampling.top_p
    if is_corrected and is_ahead and top_p < 1.0:
        yield (
            f"grpo.sampling.top_p={top_p} is not in the log-probabilities by which grpo.staleness corrects",
            "Set grpo.sampling.top_p=1, or grpo.importance_cap=null to correct nothing.",
        )
    if is_served and POLICIES[policy].send_weights is None:
        yield (
            f"rollout.policy={policy} cannot be sent the weights that GRPO trains",
            "Register it with send_weights=..., or leave rollout.policy to evaluation.",
        )
    if is_ahead and recipe.hardware.deepspeed:
        yield (
            "grpo.staleness samples ahead in a process of its own, with a copy of the weights that DeepSpeed cuts up",
            "Set rollout.policy=vllm, or leave hardware.deepspeed out.",
        )
    if grpo.partial == "carry" and not (is_served and grpo.staleness):
        yield (
            "grpo.partial=carry is for episodes on their way while servers get new weights, and here there are none",
            "Set rollout.policy=vllm and grpo.staleness, or grpo.partial=wait.",
        )
    if grpo.partial == "wait" and is_served and grpo.staleness > 1:
        yield (
            f"with grpo.staleness={grpo.staleness} servers would never be without episodes between two generations",
            "Set grpo.partial=carry, or grpo.staleness=1.",
        )


def _refused_losses(recipe: Recipe) -> Refusals:
    """Settings under which a loss would be another one, or that do nothing for it."""
    loss = recipe.grpo.loss
    for name in RATIO_SETTINGS:
        value = getattr(recipe.grpo, name)
        default = type(recipe.grpo).model_fields[name].default
        if name not in LOSSES[loss].settings and value != default:
            yield (
                f"grpo.{name}={value} does nothing for grpo.loss={loss}",
                f"Leave it out, set grpo.{name}={default}, its default, or take a loss that it changes.",
            )
    if recipe.hardware.micro_tokens is not None and LOSSES[loss].by_micro_batch:
        yield (
            f"hardware.micro_tokens cuts micro-batches that grpo.loss={loss} averages over",
            "Lower grpo.micro_batch instead.",
        )


def _refused_rewards(recipe: Recipe) -> Refusals:
    """Reward terms that no episode of the protocol can earn: training would go on without them."""
    grpo = recipe.grpo
    protocol = build_protocol(recipe.protocol)
    if grpo.lambda_schema and not _has_schema_track(protocol):
        yield (
            f"grpo.lambda_schema={grpo.lambda_schema} weighs a schema track, and no turn of the protocol "
            f"{protocol.name} proposes a schema",
            "Set grpo.lambda_schema=0, or give the protocol its proposal (protocol.options).",
        )
    weighed = []
    for term in recipe.rewards:
        is_track_trained = term.track != SCHEMA or grpo.lambda_schema
        if term.weight and is_track_trained:
            weighed.append(term)
    if any(term.term == "trust_schema" for term in weighed) and not _has(protocol, ActionKind.PROPOSE):
        yield (
            f"reward term trust_schema pays a proposed schema, and the protocol {protocol.name} has no turn for one",
            "Set rewards.trust_schema.weight=0, or give the protocol its proposal (protocol.options).",
        )
    for term in weighed:
        if term.term != "trust_format":
            continue
        phases = term.options.get("phases", tuple(knowledge.PHASES))
        missing = [phase for phase in phases if not _has(protocol, knowledge.PHASES[phase])]
        if missing:
            yield (
                f"reward term trust_format asks for phases that the protocol {protocol.name} has not: "
                f"{', '.join(missing)}",
                "Set rewards.trust_format.options.phases to those that it has, or rewards.trust_format.weight=0.",
            )


def _has_schema_track(protocol: Protocol) -> bool:
    """Whether an episode that proposes a schema and answers has a schema track."""
    proposes = Turn("", Action(ActionKind.PROPOSE, PROPOSAL))
    answers = Turn("", Action(ActionKind.SOLUTION, ANSWER))
    episode = Trajectory("", 0, "", protocol.name, (), (proposes, answers), ANSWER, StopReason.SOLUTION)
    return SCHEMA in protocol.track_turns(episode)


def _has(protocol: Protocol, kind: ActionKind) -> bool:
    """Whether the protocol has words for an action, if not for this one's content."""
    content = PROPOSAL if kind is ActionKind.PROPOSE else ANSWER
    try:
        return bool(protocol.blocks(Action(kind, content)))
    except ValueError:
        return True
