"""The table of a recipe's deviations from its paper."""

from pipelines.recipe import deviations
from pipelines.recipe.config import Recipe
from pipelines.report.formats import ReportTable, TableColumn


def deviations_table(recipe: Recipe) -> ReportTable:
    """The deviations from the recipe's paper that acted in this run; no rows for a recipe without a paper."""
    heads = ("in the paper", "kind", "the paper", "here", "setting")
    columns = tuple(map(TableColumn, heads))
    rows = []
    for deviation in deviations.acting(recipe):
        setting = " ".join(deviation.setting) or None
        row = (deviation.where, deviation.kind, deviation.paper, deviation.ours, setting)
        rows.append(row)
    title = f"Deviations from the paper: {recipe.paper}"
    note = "The setting does it the paper's way, or in another way where the paper is silent."
    return ReportTable("deviations", title, columns, tuple(rows), note)
