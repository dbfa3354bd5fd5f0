"""What a person reads of a policy's finished evaluation: its remarks, its latency and its cost."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipelines.core.files import read_json
from pipelines.endpoints.client import Endpoint
from pipelines.evaluation.record import EpisodeRecord
from pipelines.recipe.config import Recipe
from pipelines.report import writer
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.stages.answer_latency import EFFICIENCY, Latency, read_latencies
from pipelines.stages.answerer import Answerer


def cost_table(answerer: Answerer, entry: Endpoint, latencies: Mapping[str, Latency]) -> ReportTable:
    """The latency and the cost of an answer by pass; no other table of a report depends on wall-clock time."""
    titles = ("latency, s", "SQL, s", "tokens in", "tokens out", f"cost, {entry.currency}")
    columns = (
        TableColumn("answers"),
        TableColumn("number", "count"),
        *(TableColumn(title, "text") for title in titles),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, latency in latencies.items():
        row = (
            name,
            latency.episodes,
            f"{latency.total_s:,.2f}",
            f"{latency.sql_s:,.2f}",
            f"{latency.bought_in:,.0f}",
            f"{latency.bought_out:,.0f}",
            answerer.price(latency),
        )
        rows.append(row)
    note = "Means of an answer, of what this run asked."
    return ReportTable("cost", "Cost and latency", columns, tuple(rows), note)


def result_lines(
    folder: Path,
    recipe: Recipe,
    answerer: Answerer,
    metrics: Mapping[str, float],
    records: Sequence[EpisodeRecord],
) -> list[str]:
    """Remarks on a finished evaluation, its latency and cost, and the report's place.

    Args:
        records: the greedy and the sampled ones.
    """
    lines = _malformed_warning(records, recipe, answerer)
    lines += _selection_line(recipe, metrics)
    latencies = read_latencies(folder)
    efficiency = read_json(folder / EFFICIENCY)
    if efficiency:
        lines.append(f"R-VES  {efficiency['r_ves']:.1f}")
    for name, latency in latencies.items():
        lines.append(f"latency ({name})  {latency.total_s:.2f} s a question, {latency.sql_s:.2f} s of it in SQL")
        if answerer.entry is not None:
            price = answerer.price(latency)
            cost = "its entry has no price"
            if price:
                cost = f"{price} {answerer.entry.currency} a question"
            tokens = f"{latency.bought_in:,.0f} tokens in, {latency.bought_out:,.0f} out"
            lines.append(f"cost ({name})  {cost}: {tokens}")
    lines.append(f"report  {folder / writer.PAGE}")
    return lines


def _malformed_warning(records: Sequence[EpisodeRecord], recipe: Recipe, answerer: Answerer) -> list[str]:
    """A line if no answer was well-formed or ran."""
    unbroken = [record for record in records if not record.broken]
    some_well_formed = any(record.well_formed or record.executable for record in unbroken)
    if not unbroken or some_well_formed:
        return []
    protocol = f"{recipe.protocol.name} (prompt {recipe.protocol.prompt})"
    return [f"warning: every answer was malformed: does {answerer.name} speak the protocol {protocol} ?"]


def _selection_line(recipe: Recipe, metrics: Mapping[str, float]) -> list[str]:
    """A line on the answers that an endpoint selected, whose figure the table of the vote lacks."""
    if "ex_selected" not in metrics:
        return []
    value = 100 * metrics["ex_selected"]
    low = 100 * metrics["ex_selected_low"]
    high = 100 * metrics["ex_selected_high"]
    line = f"selected by {recipe.evaluation.selector}  {value:.1f} [{low:.1f}, {high:.1f}]"
    if "selector_first" in metrics:  # an endpoint that merges has none
        line += f"; {metrics['selector_first']:.0%} of its answers chose the query shown first"
    return [line]
