"""The card of a dataset of demonstrations: sources, licences, counts, quality, costs, versions, on one page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from pipelines.core.provenance import version
from pipelines.core.types import HARDNESS_LEVELS
from pipelines.recipe.config import Recipe

# Licences of questions and databases, as their authors give them; a trained model's terms may differ.
LICENCES = {
    "spider": "CC BY-SA 4.0 (Yu et al., 2018)",
    "bird": "CC BY-SA 4.0 (Li et al., 2023)",
    "miniature": "generated here; Apache-2.0",
    "jsonl": "the user's own; not known here",
}
UNKNOWN = "not noted here: see the terms under which it was downloaded"
VERSIONS = ("sqltrain", "sqlglot", "openai")


def quality(selected: pl.DataFrame, distinct_2: float) -> dict[str, Any]:
    """Acceptance, reasons, diversity and size of trajectories after `select_demonstrations`, as JSON values."""
    kept = selected.filter(pl.col("reason").is_null())
    turns = kept["turns"].value_counts().sort("turns")
    return {
        "acceptance": {
            "teacher": _acceptance(selected, "teacher", "policy"),
            "hardness": _acceptance(selected, "hardness", "hardness", HARDNESS_LEVELS),
            "database": _acceptance(selected, "database", "database"),
        },
        "left_out": _left_out(selected),
        "diversity": _diversity(kept, distinct_2),
        "turns": {str(value): count for value, count in turns.iter_rows()},
        "agent_chars": kept["agent_chars"].cast(pl.Int64).sum(),
    }


def _left_out(selected: pl.DataFrame) -> dict[str, int]:
    """Numbers of left-out trajectories by reason, the most frequent first."""
    reasons = selected["reason"].drop_nulls().cast(pl.String)
    counts = dict(reasons.value_counts().iter_rows())
    by_frequency = sorted(counts, key=lambda reason: (-counts[reason], reason))
    return {reason: counts[reason] for reason in by_frequency}


def _acceptance(
    selected: pl.DataFrame, title: str, column: str, order: Sequence[str] | None = None
) -> list[dict[str, Any]]:
    """Numbers of trajectories that were made, were right, and are kept, for each value of a column."""
    by_value = selected.group_by(pl.col(column).cast(pl.String))
    is_kept = pl.col("reason").is_null()
    counts = by_value.agg(made=pl.len(), right=pl.col("right").sum(), kept=is_kept.sum())
    rows = {}
    for value, made, right, kept in counts.iter_rows():
        rows[value] = {title: value, "made": made, "right": right, "kept": kept}
    values = order or sorted(rows)
    return [rows[value] for value in values if value in rows]


def _diversity(kept: pl.DataFrame, distinct_2: float) -> dict[str, float]:
    """Measures of how different the kept trajectories are; {} if there are none."""
    if kept.is_empty():
        return {}
    n_repetitions = len(kept) - kept["signature"].n_unique()
    shares = kept["plan"].value_counts()["count"] / len(kept)
    bits = [share * math.log2(1 / share) for share in shares]
    return {
        "near_duplicates": n_repetitions / len(kept),  # share of repetitions
        "plans": float(kept["plan"].n_unique()),
        "sql_shapes": float(kept["shape"].n_unique()),
        "plan_entropy": math.fsum(bits),
        "distinct_2": distinct_2,
    }


def card_text(
    recipe: Recipe, figures: Mapping[str, Any], leakage: Mapping[str, Any], spent: Mapping[str, Mapping[str, float]]
) -> str:
    """The card as Markdown; the same inputs give the same bytes.

    Args:
        figures: the result of `quality`.
        leakage: the result of `leakage.leakage_report`.
        spent: answers, tokens and cost of each endpoint, as in `costs.json` of the synthesis.
    """
    source = recipe.data.sft
    paragraphs = [
        f"# Demonstrations of recipe {recipe.name}",
        f"Questions: {source.kind}, split {source.split}. Licence: {LICENCES.get(source.kind, UNKNOWN)}. "
        "What a hosted teacher says falls under its provider's terms.",
        f"Protocol {recipe.protocol.name}, prompt {recipe.protocol.prompt}, at most {recipe.protocol.max_turns} turns; "
        f"kept when right by `{recipe.execution.equality}` equality and well-formed in every turn. Seed {recipe.seed}.",
    ]
    for name, rows in figures["acceptance"].items():
        paragraphs.append(_markdown_table(f"By {name}", rows))
    left_out = [{"reason": reason, "trajectories": count} for reason, count in figures["left_out"].items()]
    paragraphs.append(_markdown_table("Left out", left_out))
    diversity = [{"measure": name, "value": f"{value:.4g}"} for name, value in figures["diversity"].items()]
    paragraphs.append(_markdown_table("Diversity of what is kept", diversity))
    leaks_title = f"Leakage: {leakage['train']} training questions against {leakage['held_out']} held-out ones"
    paragraphs.append(_markdown_table(leaks_title, _leak_rows(leakage)))
    costs = [{"endpoint": name, **row} for name, row in sorted(spent.items())]
    paragraphs.append(_markdown_table("What the answers cost, whichever run paid", costs))
    versions = [f"{name} {version(name) or 'not installed'}" for name in VERSIONS]
    paragraphs.append(f"Versions: {', '.join(versions)}.")
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _leak_rows(leakage: Mapping[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for kind, count in leakage["any_database"].items():
        on_same = leakage["same_database"][kind]
        rows.append({"kind": kind, "on any database": count, "on the same database": on_same})
    return rows


def _markdown_table(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    names = list(rows[0])
    table = [names, ["---"] * len(names)]
    for row in rows:
        table.append([str(row[name]).replace("|", "\\|") for name in names])
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    return f"## {title}\n\n" + "\n".join(lines)
