"""Which settings of `grpo` go together: each that would do nothing, or something else than it says, is refused."""

from pipelines.core.errors import RecipeError
from pipelines.core.registry import LOSSES, POLICIES, REWARDS
from pipelines.core.types import Action, ActionKind, StopReason, Trajectory, Turn
from pipelines.protocols import knowledge
from pipelines.protocols.base import Protocol, build
from pipelines.recipe.config import Recipe

IN_PROCESS = "transformers"  # the policy that is the network under training itself
SCHEMA = "schema"  # the track up to the proposed schema
ANSWER, PROPOSAL = "SELECT 1", knowledge.proposal(["t"], {})


def check(recipe: Recipe) -> None:
    """Look at the recipe's `grpo` section; nothing heavy is imported."""
    grpo, hardware, rewards, policy = recipe.grpo, recipe.hardware, recipe.rewards, recipe.rollout.policy
    protocol = build(recipe.protocol)
    by_turn, batch = grpo.credit == "turn", grpo.baseline == "batch"
    leaves_out = grpo.drop_zero_variance or grpo.resample
    served = policy != IN_PROCESS
    ahead = bool(grpo.staleness) and not served
    is_corrected = grpo.importance_cap is not None and (served or ahead)
    is_paid_by_turn = any(REWARDS[term.term].by_turn and term.track == "full" for term in rewards)
    top_p, corrector = grpo.sampling.top_p, "bounds" if grpo.bounds is not None else "importance_level"
    # An episode that proposes a schema and answers has a schema track, if the protocol has one.
    turns = (Turn("", Action(ActionKind.PROPOSE, PROPOSAL)), Turn("", Action(ActionKind.SOLUTION, ANSWER)))
    proposing = Trajectory("", 0, "", protocol.name, (), turns, ANSWER, StopReason.SOLUTION)
    # Reward terms that no episode of the protocol can earn: training would go on without them.
    weighed = [term for term in rewards if term.weight and (term.track != SCHEMA or grpo.lambda_schema)]
    phases = [term.options.get("phases", tuple(knowledge.PHASES)) for term in weighed if term.term == "trust_format"]
    missing = [[phase for phase in of if not _has(protocol, knowledge.PHASES[phase])] for of in phases]
    refused = (
        (
            batch and grpo.scale == "group",
            "grpo.baseline=batch learns from groups of equal rewards, whose own deviation, grpo.scale=group, is 0",
            "Set grpo.scale=batch (REINFORCE++) or grpo.scale=none.",
        ),
        (
            grpo.lambda_schema and not any(term.track == SCHEMA and term.weight for term in rewards),
            "grpo.lambda_schema is set, but no reward term pays the schema track",
            "Set track: schema and a weight other than 0, or grpo.lambda_schema=0.",
        ),
        (
            grpo.sampling.temperature == 0,
            "grpo.sampling.temperature=0 draws the same episode for a whole group, whose rewards are then all equal",
            "Set a temperature above 0, such as 1.",
        ),
        (
            by_turn and (grpo.baseline, grpo.scale, grpo.level) != ("others", "none", "token"),
            "grpo.credit=turn holds each turn against the group's other episodes, and divides by nothing",
            "Set grpo.baseline=others grpo.scale=none grpo.level=token.",
        ),
        (
            by_turn and leaves_out,
            "groups of equal rewards may still have been paid for other turns, from which grpo.credit=turn learns",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        ),
        (
            by_turn and not is_paid_by_turn,
            "grpo.credit=turn needs a reward term that is paid by turn; all of the recipe's are paid at the end",
            "Add one under rewards:, such as turn_faults, or set grpo.credit=episode.",
        ),
        (
            grpo.order != "shuffled" and "difficulty" not in recipe.stages,
            f"grpo.order={grpo.order} takes the questions as the difficulty stage ranks them, and there is none",
            "Add difficulty to stages, or set grpo.order=shuffled.",
        ),
        (
            batch and leaves_out,
            "grpo.baseline=batch learns from groups of equal rewards, too",
            "Set grpo.drop_zero_variance=false grpo.resample=0, which would leave them out.",
        ),
        (
            not is_corrected and (grpo.bounds is not None or grpo.importance_level == "sequence"),
            f"grpo.{corrector} corrects for a sampler that is not the policy, and here nothing is corrected",
            "It acts with grpo.staleness or a served policy, and with a grpo.importance_cap.",
        ),
        (
            is_corrected and ahead and top_p < 1.0,
            f"grpo.sampling.top_p={top_p} is not in the log-probabilities by which grpo.staleness corrects",
            "Set grpo.sampling.top_p=1, or grpo.importance_cap=null to correct nothing.",
        ),
        (
            served and POLICIES[policy].send_weights is None,
            f"rollout.policy={policy} cannot be sent the weights that GRPO trains",
            "Register it with send_weights=..., or leave rollout.policy to evaluation.",
        ),
        (
            ahead and hardware.deepspeed,
            "grpo.staleness samples ahead in a process of its own, with a copy of the weights that DeepSpeed cuts up",
            "Set rollout.policy=vllm, or leave hardware.deepspeed out.",
        ),
        (
            grpo.partial == "carry" and not (served and grpo.staleness),
            "grpo.partial=carry is for episodes on their way while servers get new weights, and here there are none",
            "Set rollout.policy=vllm and grpo.staleness, or grpo.partial=wait.",
        ),
        (
            grpo.partial == "wait" and served and grpo.staleness > 1,
            f"with grpo.staleness={grpo.staleness} servers would never be without episodes between two generations",
            "Set grpo.partial=carry, or grpo.staleness=1.",
        ),
        (
            hardware.micro_tokens is not None and LOSSES[grpo.loss].by_micro_batch,
            f"hardware.micro_tokens cuts micro-batches that grpo.loss={grpo.loss} averages over",
            "Lower grpo.micro_batch instead.",
        ),
        (
            grpo.lambda_schema and SCHEMA not in protocol.track_turns(proposing),
            f"grpo.lambda_schema={grpo.lambda_schema} weighs a schema track, and no turn of the protocol "
            f"{protocol.name} proposes a schema",
            "Set grpo.lambda_schema=0, or give the protocol its proposal (protocol.options).",
        ),
        (
            any(term.term == "trust_schema" for term in weighed) and not _has(protocol, ActionKind.PROPOSE),
            f"reward term trust_schema pays a proposed schema, and the protocol {protocol.name} has no turn for one",
            "Set rewards.trust_schema.weight=0, or give the protocol its proposal (protocol.options).",
        ),
        (
            any(missing),
            f"reward term trust_format asks for phases that the protocol {protocol.name} has not: "
            f"{', '.join(next(filter(None, missing), ()))}",
            "Set rewards.trust_format.options.phases to those that it has, or rewards.trust_format.weight=0.",
        ),
    )
    for is_refused, problem, hint in refused:
        if is_refused:
            raise RecipeError(problem, hint)


def _has(protocol: Protocol, kind: ActionKind) -> bool:
    """Whether the protocol has words for an action, if not for this one's content."""
    try:
        return bool(protocol.blocks(Action(kind, PROPOSAL if kind is ActionKind.PROPOSE else ANSWER)))
    except ValueError:
        return True
