"""Several teachers in one dataset: which of them answers a question's sample, by shares, whatever runs beside it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelines.config import Teacher
from pipelines.protocols.base import Protocol
from pipelines.rollout.policies.base import Policy
from pipelines.sql.schema import Schema
from pipelines.types import Database

Schemas = Callable[[Database], Schema]  # as prompts show them


def pick(shares: Sequence[float], name: str) -> int:
    """An index with a chance proportional to its share, decided by the name alone.

    Args:
        shares: positive; they need not add up to 1.
    """
    draw = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") / 2**64 * sum(shares)
    for index, share in enumerate(shares):
        draw -= share
        if draw < 0:
            return index
    return len(shares) - 1


def teacher_policies(
    teachers: Sequence[Teacher], protocol: Protocol, responses: Path, schemas: Schemas, own: Callable[[], Policy]
) -> list[Policy]:
    """The policies of a mix, in order; entries that name the same endpoint share its asker.

    Args:
        own: makes the recipe's own policy.

    Raises:
        RecipeError: see `teacher_policy`.
    """
    from pipelines.teachers.policy import OpenAIPolicy

    policies = [
        own() if teacher.kind == "policy" else teacher_policy(teacher, protocol, responses, schemas)
        for teacher in teachers
    ]
    first: dict[str, OpenAIPolicy] = {}
    for policy in policies:
        if isinstance(policy, OpenAIPolicy) and first.setdefault(policy.name, policy) is not policy:
            policy.share(first[policy.name].asker)
    return policies


def teacher_policy(teacher: Teacher, protocol: Protocol, responses: Path, schemas: Schemas) -> Policy:
    """The policy of a teacher that is not the recipe's own: the scripted oracle, or an endpoint with its answers' log.

    Raises:
        RecipeError: an endpoint without a name, or one that `conf/local/endpoints.yaml` does not have.
    """
    if teacher.kind == "oracle":
        from pipelines.rollout.policies.oracle import OraclePolicy

        return OraclePolicy(protocol, teacher.error_rate, schemas, teacher.guesses)
    from pipelines.teachers.policy import OpenAIPolicy

    return OpenAIPolicy.named(teacher, responses, protocol)
