"""Two-LLM data cleaning (Reasoning-SQL, 4.1): a training pair is dropped when two models both call it bad."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pipelines.endpoints.asking import Asker
from pipelines.sql.schema import Schema
from pipelines.teachers import prompts
from pipelines.types import Database, Example


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the two models said of one pair.

    Attributes:
        bad: each one's verdict, in their order; None where it gave none.
        reasons: each one's sentence.
    """

    example: Example
    bad: tuple[bool | None, ...]
    reasons: tuple[str, ...]

    @property
    def dropped(self) -> bool:
        """Whether all of them call it bad: a model that gives no verdict keeps the pair."""
        return all(verdict is True for verdict in self.bad)


def check(askers: Sequence[Asker], examples: Sequence[Example], schemas: Callable[[Database], Schema]) -> list[Checked]:
    """Ask each model about each pair, in order."""
    cases = [
        prompts.conversation(
            prompts.CLEAN,
            prompts.about(schemas(example.database), example.question, example.evidence, SQL=example.gold_sql),
        )
        for example in examples
    ]
    columns = [[_verdict(answer.text if answer else None) for answer in asker.ask_all(cases)] for asker in askers]
    return [
        Checked(example, tuple(bad for bad, _ in answers), tuple(reason for _, reason in answers))
        for example, *answers in zip(examples, *columns, strict=True)
    ]


def agreement(checked: Sequence[Checked]) -> dict[str, float]:
    """How often the first two models agree on the pairs that both judged, beyond chance (Cohen's kappa), and how many
    pairs all of them call bad; a lone one agrees with nobody.
    """
    both = [
        (bool(case.bad[0]), bool(case.bad[1])) for case in checked if len(case.bad) > 1 and None not in case.bad[:2]
    ]
    return {
        "judged": float(len(both)),
        "dropped": float(sum(case.dropped for case in checked)),
        "agreement": sum(a == b for a, b in both) / max(1, len(both)),
        "kappa": kappa(both),
    }


def kappa(pairs: Sequence[tuple[bool, bool]]) -> float:
    """Cohen's kappa of two raters' yes and no: (observed - expected) / (1 - expected); 1.0 where both are constant
    and agree.
    """
    if not pairs:
        return 0.0
    n = len(pairs)
    observed = sum(a == b for a, b in pairs) / n
    yes_a, yes_b = sum(a for a, _ in pairs) / n, sum(b for _, b in pairs) / n
    expected = yes_a * yes_b + (1 - yes_a) * (1 - yes_b)
    return 1.0 if expected == 1.0 else (observed - expected) / (1 - expected)


def _verdict(text: str | None) -> tuple[bool | None, str]:
    value = prompts.read_object(text) or {}
    verdict = value.get("verdict")
    reason = " ".join(str(value.get("reason", "")).split())[:300]
    return ({"good": False, "bad": True}.get(verdict) if isinstance(verdict, str) else None), reason
