"""The card of a dataset of demonstrations: sources, licences, counts, quality, costs, versions, on one page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from pipelines.core.provenance import version
from pipelines.core.types import HARDNESS_LEVELS
from pipelines.recipe.config import Recipe

LICENCES = {  # of questions and databases, as their authors give them; a trained model's terms may differ
    "spider": "CC BY-SA 4.0 (Yu et al., 2018)",
    "bird": "CC BY-SA 4.0 (Li et al., 2023)",
    "miniature": "generated here; Apache-2.0",
    "jsonl": "the user's own; not known here",
}
UNKNOWN = "not noted here: see the terms under which it was downloaded"
VERSIONS = ("sqltrain", "sqlglot", "openai")


def quality(selected: pl.DataFrame, distinct_2: float) -> dict[str, Any]:
    """Acceptance, reasons, diversity and size of the trajectories of a `filtering.select`, as JSON values."""
    # Numbers of trajectories that were made, were right, and are kept.
    acceptance = {}
    for name, column in (("teacher", "policy"), ("hardness", "hardness"), ("database", "database")):
        counted = selected.group_by(pl.col(column).cast(pl.String)).agg(
            made=pl.len(), right=pl.col("right").sum(), kept=pl.col("reason").is_null().sum()
        )
        rows = {row[0]: dict(zip(("made", "right", "kept"), row[1:], strict=True)) for row in counted.iter_rows()}
        order = HARDNESS_LEVELS if name == "hardness" else sorted(rows)
        acceptance[name] = [{name: value, **rows[value]} for value in order if value in rows]
    reasons = selected["reason"].drop_nulls().cast(pl.String).value_counts()
    kept = selected.filter(pl.col("reason").is_null())
    diversity: dict[str, float] = {}
    if not kept.is_empty():
        shares = kept["plan"].value_counts()["count"] / len(kept)
        diversity = {
            "near_duplicates": (len(kept) - kept["signature"].n_unique()) / len(kept),  # share of repetitions
            "plans": float(kept["plan"].n_unique()),
            "sql_shapes": float(kept["shape"].n_unique()),
            "plan_entropy": math.fsum(share * math.log2(1 / share) for share in shares),  # bits
            "distinct_2": distinct_2,
        }
    turns = kept["turns"].value_counts().sort("turns")
    return {
        "acceptance": acceptance,
        "left_out": dict(sorted(reasons.iter_rows(), key=lambda row: (-row[1], row[0]))),  # the most frequent first
        "diversity": diversity,
        "turns": {str(value): count for value, count in turns.iter_rows()},
        "agent_chars": kept["agent_chars"].cast(pl.Int64).sum(),
    }


def write(
    recipe: Recipe, facts: Mapping[str, Any], leakage: Mapping[str, Any], spent: Mapping[str, Mapping[str, float]]
) -> str:
    """The card as Markdown; the same inputs give the same bytes.

    Args:
        facts, leakage: of `quality` and of `leakage.report`.
        spent: answers, tokens and cost of each endpoint, as in `costs.json` of the synthesis.
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
        _table(
            f"Leakage: {leakage['train']} training questions against {leakage['held_out']} held-out ones",
            [
                {"kind": kind, "on any database": count, "on the same database": leakage["same_database"][kind]}
                for kind, count in leakage["any_database"].items()
            ],
        ),
        _table(
            "What the answers cost, whichever run paid",
            [{"endpoint": name, **row} for name, row in sorted(spent.items())],
        ),
        "Versions: " + ", ".join(f"{name} {version(name) or 'not installed'}" for name in VERSIONS) + ".",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    lines = [" | ".join(names), " | ".join("---" for _ in names)]
    lines += [" | ".join(str(row[name]).replace("|", "\\|") for name in names) for row in rows]
    return f"## {title}\n\n" + "\n".join(f"| {line} |" for line in lines)
