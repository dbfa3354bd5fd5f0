"""The card of a dataset of demonstrations: sources, licences, counts, quality, costs, versions, on one page."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from pipelines.core.provenance import version
from pipelines.core.types import HARDNESS_LEVELS
from pipelines.recipe.config import Recipe
from pipelines.report.formats import markdown_row

# Licences of questions and databases, as their authors give them; a trained model's terms may differ.
LICENCES = {
    "spider": "CC BY-SA 4.0 (Yu et al., 2018)",
    "bird": "CC BY-SA 4.0 (Li et al., 2023)",
    "miniature": "generated here; Apache-2.0",
    "jsonl": "the user's own; not known here",
}
UNKNOWN = "not noted here: see the terms under which it was downloaded"
VERSIONS = ("sqltrain", "sqlglot", "openai")
Row = dict[str, Any]  # a line of a table of the card: head of a column -> its cell
Spending = Mapping[str, Mapping[str, float]]  # answers, tokens and cost by endpoint


def quality(selected: pl.DataFrame, distinct_2: float) -> dict[str, Any]:
    """Acceptance, reasons, diversity and size of trajectories after `select_demonstrations`, as JSON values."""
    is_kept = pl.col("reason").is_null()
    kept = selected.filter(is_kept)
    counts_by_turns = kept["turns"].value_counts()
    trajectories_by_turns = {}
    for n_turns, count in counts_by_turns.sort("turns").iter_rows():
        trajectories_by_turns[str(n_turns)] = count
    agent_chars = kept["agent_chars"].cast(pl.Int64)  # 32 bits are too few for the sum
    return {
        "acceptance": {
            "teacher": _acceptance(selected, "teacher", "policy"),
            "hardness": _acceptance(selected, "hardness", "hardness", HARDNESS_LEVELS),
            "database": _acceptance(selected, "database", "database"),
        },
        "left_out": _left_out(selected),
        "diversity": _diversity(kept, distinct_2),
        "turns": trajectories_by_turns,
        "agent_chars": agent_chars.sum(),
    }


def _left_out(selected: pl.DataFrame) -> dict[str, int]:
    """Numbers of left-out trajectories by reason, the most frequent first."""
    reasons = selected["reason"].drop_nulls().cast(pl.String)
    counts = reasons.value_counts(name="count")
    by_frequency = counts.sort("count", "reason", descending=[True, False])
    return dict(by_frequency.iter_rows())


def _acceptance(selected: pl.DataFrame, title: str, column: str, order: Sequence[str] = ()) -> list[Row]:
    """Numbers of trajectories that were made, were right, and are kept, for each value of a column.

    Args:
        title: the head of the values' column.
        order: the values in the order of the rows; () to sort them.
    """
    n_right = pl.col("right").sum()
    n_kept = pl.col("reason").is_null().sum()
    value_as_text = pl.col(column).cast(pl.String)
    by_value = selected.group_by(value_as_text)
    counts = by_value.agg(made=pl.len(), right=n_right, kept=n_kept)
    rows = {}
    for value, made, right, kept in counts.iter_rows():
        rows[value] = {title: value, "made": made, "right": right, "kept": kept}
    values = order or sorted(rows)
    return [rows[value] for value in values if value in rows]


def _diversity(kept: pl.DataFrame, distinct_2: float) -> dict[str, float]:
    """Measures of how different the kept trajectories are; {} if there are none."""
    if kept.is_empty():
        return {}
    n_kept = len(kept)
    n_repetitions = n_kept - kept["signature"].n_unique()
    n_plans = kept["plan"].n_unique()
    n_shapes = kept["shape"].n_unique()
    counts_of_plans = kept["plan"].value_counts()["count"]
    shares_of_plans = counts_of_plans / n_kept
    bits_of_plans = [share * math.log2(1 / share) for share in shares_of_plans]
    return {
        "near_duplicates": n_repetitions / n_kept,  # share of repetitions
        "plans": float(n_plans),
        "sql_shapes": float(n_shapes),
        "plan_entropy": math.fsum(bits_of_plans),
        "distinct_2": distinct_2,
    }


def card_text(recipe: Recipe, figures: Mapping[str, Any], leakage: Mapping[str, Any], spent: Spending) -> str:
    """The card as Markdown; the same inputs give the same bytes.

    Args:
        figures: the result of `quality`.
        leakage: the result of `leakage.leakage_report`.
        spent: answers, tokens and cost of each endpoint, as in `costs.json` of the synthesis.
    """
    source = recipe.data.sft
    licence = LICENCES.get(source.kind, UNKNOWN)
    protocol = recipe.protocol
    paragraphs = [
        f"# Demonstrations of recipe {recipe.name}",
        f"Questions: {source.kind}, split {source.split}. Licence: {licence}. "
        "What a hosted teacher says falls under its provider's terms.",
        f"Protocol {protocol.name}, prompt {protocol.prompt}, at most {protocol.max_turns} turns; "
        f"kept when {_kept_when(recipe)}. Seed {recipe.seed}.",
    ]
    for name, rows in figures["acceptance"].items():
        paragraphs.append(_markdown_table(f"By {name}", rows))
    left_out = []
    for reason, count in figures["left_out"].items():
        left_out.append({"reason": reason, "trajectories": count})
    paragraphs.append(_markdown_table("Left out", left_out))
    diversity = []
    for measure, value in figures["diversity"].items():
        diversity.append({"measure": measure, "value": f"{value:.4g}"})
    paragraphs.append(_markdown_table("Diversity of what is kept", diversity))
    leaks_title = f"Leakage: {leakage['train']} training questions against {leakage['held_out']} held-out ones"
    paragraphs.append(_markdown_table(leaks_title, _leak_rows(leakage)))
    costs = []
    for name, cost in sorted(spent.items()):
        costs.append({"endpoint": name, **cost})
    paragraphs.append(_markdown_table("What the answers cost, whichever run paid", costs))
    versions = []
    for name in VERSIONS:
        number = version(name) or "not installed"
        versions.append(f"{name} {number}")
    listed = ", ".join(versions)
    paragraphs.append(f"Versions: {listed}.")
    return "\n\n".join(filter(None, paragraphs)) + "\n"


def _kept_when(recipe: Recipe) -> str:
    """What a trajectory must be to be kept, before the bounds of the selection."""
    settings = recipe.filter
    conditions = [f"right by `{recipe.execution.equality}` equality"]
    if settings.well_formed:
        conditions.append("well-formed in every turn")
    text = " and ".join(conditions)
    if settings.drop:
        rules = ", ".join(f"`{rule}`" for rule in settings.drop)
        text += f", unless a filter rule matches: {rules}"
    return text


def _leak_rows(leakage: Mapping[str, Any]) -> list[Row]:
    """The lines of the table of leaks: one for each kind."""
    rows = []
    for kind, count in leakage["any_database"].items():
        on_same = leakage["same_database"][kind]
        rows.append({"kind": kind, "on any database": count, "on the same database": on_same})
    return rows


def _markdown_table(title: str, rows: Sequence[Row]) -> str:
    """A headed table; "" if it has no rows."""
    if not rows:
        return ""
    heads = list(rows[0])
    rules = ["---"] * len(heads)
    lines = [markdown_row(heads), markdown_row(rules)]
    for row in rows:
        cells = [str(row[head]) for head in heads]
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(markdown_row(escaped))
    table = "\n".join(lines)
    return f"## {title}\n\n{table}"
