"""Contracts of stages: Great Expectations suites over a stage's rows, thresholds from the recipe.

A contract is checked once, after its stage; `contract.json` beside the data keeps the verdict, so that a later run
reads it and need not import Great Expectations (some 3 CPU seconds). A breach names rows and reasons and stops the
run. An expectation that could not be evaluated is a failure of ours, never a verdict about the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import DataError, ResourceError, SqltrainError
from pipelines.core.files import read_json, write_atomic, write_json
from pipelines.recipe.config import Recipe
from pipelines.recipe.recipes import digest
from pipelines.stages.graph import StageResult
from tasks.checks import ROWS, Check, stage_checks

if TYPE_CHECKING:
    import polars as pl

ROWS_SHOWN = 20
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\|[]!`"})
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4}
.ok{color:#1a7f37}.bad{color:#b42318;font-weight:600}code{background:#f3f4f6;padding:0 .2rem}"""


def check(result: StageResult, recipe: Recipe) -> dict[str, Any] | None:
    """Check the contract of a finished stage and return the verdict; None for a stage without one."""
    if result.kind not in ROWS:
        return None
    checks = stage_checks(result.kind, recipe)
    terms = digest(
        [[item.says, item.expectation, item.column, dict(item.options), item.allowed, item.pools] for item in checks]
    )
    path = result.folder / "contract.json"
    verdict = read_verdict(path)
    if verdict.get("terms") != terms:
        verdict = {"stage": result.name, "terms": terms, **evaluate(ROWS[result.kind](result.folder), checks)}
        write_json(path, verdict)
        write_atomic(path.with_suffix(".html"), contract_html(verdict))
    if not verdict["passed"]:
        broken = [item for item in verdict["checks"] if not item["passed"]]
        first = broken[0]
        rows = ", ".join(f"{example['row']} ({example['value']})" for example in first["examples"][:3])
        more = f"; {len(broken) - 1} more checks are broken" if len(broken) > 1 else ""
        where = f" of pool {first['pool']}" if first["pool"] else ""
        raise DataError(
            f"the data of stage {verdict['stage']!r} breaks its contract: {first['says']} in {first['bad']} of "
            f"{first['rows']} rows{where} ({first['share']:.1%}, allowed {first['allowed']:.1%}): {rows}{more}",
            f"All of it is in {path.with_suffix('.html')}. {first['advice']}",
        )
    return verdict


def read_verdict(path: Path) -> dict[str, Any]:
    """The verdict of an earlier run; {} if there is none, or its file is damaged: then it is given anew."""
    try:
        verdict = read_json(path)
    except DataError:
        return {}
    return verdict if isinstance(verdict, dict) and "passed" in verdict and "checks" in verdict else {}


def evaluate(frame: pl.DataFrame, checks: Sequence[Check]) -> dict[str, Any]:
    """The verdict of a suite over rows: counts, shares, and the first rows that break each expectation."""
    import logging
    import warnings

    # A check with pools holds for each of them by itself; "" stands for all rows together.
    pools = set(frame["pool"].unique()) if any(item.pools for item in checks) else set()
    parts = [(item, pool) for item in checks for pool in item.pools or ("",) if not item.pools or pool in pools]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas' and marshmallow's deprecations inside Great Expectations
        try:
            import great_expectations as gx
        except ImportError:
            raise ResourceError(
                "contracts cannot be checked: great-expectations is not installed", "pip install 'sqltrain[ops]'"
            ) from None
        logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
        context = gx.get_context(mode="ephemeral")  # it lives in memory and leaves nothing behind
        context.variables.progress_bars = {"globally": False}
        asset = context.data_sources.add_pandas("stage").add_dataframe_asset("rows")
        batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame.to_pandas()})
        expectations = []
        for number, (item, pool) in enumerate(parts):
            options: dict[str, Any] = {} if "column_A" in item.options else {"column": item.column}
            if pool:
                options |= {"row_condition": f'pool=="{pool}"', "condition_parser": "pandas"}
            kind = getattr(gx.expectations, item.expectation)
            mostly = 1.0 - item.allowed
            expectations.append(kind(**options, **item.options, mostly=mostly, meta={"number": number}))
        layout = {
            "result_format": "SUMMARY",
            "unexpected_index_column_names": ["row"],
            "partial_unexpected_count": ROWS_SHOWN,
        }
        suite = gx.ExpectationSuite(name="contract", expectations=expectations)
        results = batch.validate(suite, result_format=layout).results
    verdicts = []
    for outcome in sorted(results, key=lambda one: int(one.expectation_config.meta["number"])):
        item, pool = parts[int(outcome.expectation_config.meta["number"])]
        # Great Expectations has two shapes for an expectation that raised.
        info = outcome.exception_info
        shapes = [info] if "raised_exception" in info else list(info.values())
        raised = [str(shape.get("exception_message")) for shape in shapes if shape.get("raised_exception")]
        counts = outcome.result
        if raised or "element_count" not in counts:
            message = " ".join(" ".join(raised).split())[:300] or "it counted no rows"
            raise SqltrainError(f"the contract {item.says!r} could not be evaluated: {message}")
        bad, total = int(counts.get("unexpected_count") or 0), int(counts["element_count"])
        examples = []
        for row in counts.get("partial_unexpected_index_list") or []:
            values = [str(value) for name, value in row.items() if name != "row"]
            examples.append({"row": str(row["row"]), "value": " / ".join(values)[:200]})
        verdicts.append(
            {
                "says": item.says,
                "pool": pool,
                "rows": total,
                "column": item.column,
                "passed": bool(outcome.success),
                "bad": bad,
                "share": round(bad / total, 6) if total else 0.0,
                "allowed": item.allowed,
                "advice": item.advice,
                "examples": examples,
            }
        )
    return {"rows": frame.height, "passed": all(item["passed"] for item in verdicts), "checks": verdicts}


def contract_html(verdict: Mapping[str, Any]) -> str:
    """A contract's verdict as one page that needs nothing else; every value is escaped."""
    lines = [
        "<tr><td class={}>{}</td><td>{}</td><td>{}</td><td>{} of {}</td><td>{:.2%}</td><td>{:.2%}</td></tr>".format(
            "ok" if item["passed"] else "bad",
            "held" if item["passed"] else "broken",
            escape(item["pool"] or "all"),
            escape(item["says"]),
            item["bad"],
            item["rows"],
            item["share"],
            item["allowed"],
        )
        for item in verdict["checks"]
    ]
    rows_html = [
        f"<tr><td>{escape(item['says'])}</td><td><code>{escape(example['row'])}</code></td>"
        f"<td>{escape(example['value'])}</td></tr>"
        for item in verdict["checks"]
        for example in item["examples"]
    ]
    title = f"Contract of stage {escape(verdict['stage'])}: {'held' if verdict['passed'] else 'broken'}"
    rows = f"<h2>Rows</h2><table><tr><th>what</th><th>row</th><th>value</th></tr>{''.join(rows_html)}</table>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{verdict['rows']} rows.</p>"
        "<table><tr><th></th><th>pool</th><th>a row is wrong when</th><th>rows</th>"
        f"<th>share</th><th>allowed</th></tr>{''.join(lines)}</table>{rows if rows_html else ''}</html>\n"
    )


def contract_markdown(verdict: Mapping[str, Any]) -> str:
    how, cell = "held" if verdict["passed"] else "**BROKEN**", markdown_cell
    head = f"Contract of **{cell(verdict['stage'])}**: {how}, {verdict['rows']} rows\n"
    lines = [
        f"| {'ok' if item['passed'] else '**broken**'} | {cell(item['pool'] or 'all')} | {cell(item['says'])} "
        f"| {item['bad']} of {item['rows']} | {item['share']:.2%} | {item['allowed']:.2%} |"
        for item in verdict["checks"]
    ]
    rows = [
        f"| {cell(item['says'])} | {cell(example['row'])} | {cell(example['value'])} |"
        for item in verdict["checks"]
        for example in item["examples"]
    ]
    detail_lines = ["", "| what | row | value |", "|---|---|---|", *rows] if rows else []
    table = ["| | pool | a row is wrong when | rows | share | allowed |", "|---|---|---|---|---|---|", *lines]
    return "\n".join([head, *table, *detail_lines])


def markdown_cell(text: str) -> str:
    """Text that cannot end its table cell or start markup: no image is loaded, and no link or tag is made."""
    return escape(" ".join(text.split()), quote=False).translate(_MARKDOWN)
