"""The card of a dataset of demonstrations: sources, licences, counts, quality, costs, versions, on one page."""

from __future__ import annotations

import collections
import importlib.metadata
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pipelines.config import Recipe
from pipelines.curation import duplicates
from pipelines.curation.filtering import Selection
from pipelines.types import HARDNESS_LEVELS, Outcome

LICENCES = {  # of questions and databases, as their authors give them; a trained model's terms may differ
    "spider": "CC BY-SA 4.0 (Yu et al., 2018)",
    "bird": "CC BY-SA 4.0 (Li et al., 2023)",
    "miniature": "generated here; Apache-2.0",
    "jsonl": "the user's own; not known here",
}
UNKNOWN = "not noted here: see the terms under which it was downloaded"
VERSIONS = ("sqltrain", "sqlglot", "openai")
Rows = list[dict[str, Any]]


def acceptance(outcomes: Sequence[Outcome], selection: Selection, databases: Mapping[str, str]) -> dict[str, Rows]:
    """How many trajectories were made, were right, and are kept: by teacher, by hardness and by database.

    Args:
        databases: a question's database, by example id.
    """
    kept = {(one.example_id, one.sample) for one in selection.kept}
    keys: dict[str, Callable[[Outcome], str]] = {
        "teacher": lambda outcome: outcome.trajectory.policy,
        "hardness": lambda outcome: outcome.hardness,
        "database": lambda outcome: databases[outcome.example_id],
    }
    tables = {}
    for name, key in keys.items():
        rows: dict[str, collections.Counter[str]] = {}
        for outcome in outcomes:
            row = rows.setdefault(key(outcome), collections.Counter())
            row["made"] += 1
            row["right"] += outcome.correct and not outcome.broken
            row["kept"] += (outcome.example_id, outcome.trajectory.sample) in kept
        order = HARDNESS_LEVELS if name == "hardness" else sorted(rows)
        tables[name] = [{name: value, **rows[value]} for value in order if value in rows]
    return tables


def quality(outcomes: Sequence[Outcome], selection: Selection, databases: Mapping[str, str]) -> dict[str, Any]:
    """Acceptance, reasons, diversity and size of what is kept, as JSON values."""
    return {
        "acceptance": acceptance(outcomes, selection, databases),
        "left_out": selection.reasons,
        "diversity": duplicates.diversity(selection.kept, databases.__getitem__),
        "turns": _counts(len(one.turns) for one in selection.kept),
        "agent_chars": sum(len(turn.text) for one in selection.kept for turn in one.turns),
    }


def _counts(values: Iterable[int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(collections.Counter(values).items())}


def write(
    recipe: Recipe, facts: Mapping[str, Any], leakage: Mapping[str, Any], spent: Mapping[str, Mapping[str, float]]
) -> str:
    """The card as Markdown; the same inputs give the same bytes.

    Args:
        facts: what `quality` gave.
        leakage: what `leakage.report` gave.
        spent: answers, tokens and cost of each endpoint, as `costs.json` of the synthesis has them.
    """
    source = recipe.data.sft
    parts = [
        f"# Demonstrations of recipe {recipe.name}",
        f"Questions: {source.kind}, split {source.split}. Licence: {LICENCES.get(source.kind, UNKNOWN)}. "
        "What a hosted teacher says falls under its provider's terms.",
        f"Protocol {recipe.protocol.name}, prompt {recipe.protocol.prompt}, at most {recipe.protocol.max_turns} turns; "
        f"kept when right by `{recipe.execution.equality}` equality and well-formed in every turn. Seed {recipe.seed}.",
        *(_table(f"By {name}", rows) for name, rows in facts["acceptance"].items()),
        _table("Left out", [{"reason": reason, "trajectories": count} for reason, count in facts["left_out"].items()]),
        _table(
            "Diversity of what is kept", [{"measure": k, "value": f"{v:.4g}"} for k, v in facts["diversity"].items()]
        ),
        _leaks(leakage),
        _table(
            "What the answers cost, whichever run paid",
            [{"endpoint": name, **row} for name, row in sorted(spent.items())],
        ),
        "Versions: " + ", ".join(f"{name} {_version(name)}" for name in VERSIONS) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _leaks(leakage: Mapping[str, Any]) -> str:
    kinds = [
        {"kind": kind, "on any database": count, "on the same database": leakage["same_database"][kind]}
        for kind, count in leakage["any_database"].items()
    ]
    about = f"{leakage['train']} training questions against {leakage['held_out']} held-out ones"
    return _table(f"Leakage: {about}", kinds)


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(row[name]).replace("|", "\\|") for name in names) for row in rows]
    return f"## {title}\n\n" + "\n".join(f"| {line} |" for line in lines)


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
