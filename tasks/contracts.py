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
from pipelines.core.files import digest, read_json, write_atomic, write_json
from pipelines.recipe.config import Recipe
from pipelines.stages.stage import StageResult
from tasks.checks import ROWS, Check, stage_checks

if TYPE_CHECKING:
    import polars as pl

ROWS_SHOWN = 20
_MARKDOWN = str.maketrans({letter: f"\\{letter}" for letter in "\\|[]!`"})
_STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}
table{border-collapse:collapse;width:100%}td,th{text-align:left;padding:.3rem .6rem;border-bottom:1px solid #d8dee4}
.ok{color:#1a7f37}.bad{color:#b42318;font-weight:600}code{background:#f3f4f6;padding:0 .2rem}"""


def check(result: StageResult, recipe: Recipe) -> dict[str, Any] | None:
    """Check the contract of a finished stage and return the verdict; None for a stage without one.

    Raises:
        DataError: the stage breaks its contract.
    """
    if result.kind not in ROWS:
        return None
    path = result.folder / "contract.json"
    verdict = read_verdict(path)
    checks = stage_checks(result.kind, recipe)
    terms = digest(list(map(_terms, checks)))
    if verdict.get("terms") != terms:
        rows = ROWS[result.kind](result.folder)
        verdict = {"stage": result.name, "terms": terms, **evaluate(rows, checks)}
        page = contract_html(verdict)
        write_json(path, verdict)
        write_atomic(path.with_suffix(".html"), page)
    if not verdict["passed"]:
        raise _breach(verdict, path.with_suffix(".html"))
    return verdict


def _terms(item: Check) -> list[Any]:
    """What decides a check's verdict."""
    return [item.says, item.expectation, item.column, dict(item.options), item.allowed, item.pools]


def _breach(verdict: Mapping[str, Any], page: Path) -> DataError:
    """The error of a broken contract: its first broken check, with the first rows that break it."""
    broken = [item for item in verdict["checks"] if not item["passed"]]
    first = broken[0]
    in_pool = f" of pool {first['pool']}" if first["pool"] else ""
    count = f"{first['bad']} of {first['rows']} rows{in_pool}"
    shares = f"{first['share']:.1%}, allowed {first['allowed']:.1%}"
    examples = [f"{example['row']} ({example['value']})" for example in first["examples"][:3]]
    listed = ", ".join(examples)
    message = f"the data of stage {verdict['stage']!r} breaks its contract: "
    message += f"{first['says']} in {count} ({shares}): {listed}"
    if len(broken) > 1:
        message += f"; {len(broken) - 1} more checks are broken"
    return DataError(message, f"All of it is in {page}. {first['advice']}")


def read_verdict(path: Path) -> dict[str, Any]:
    """The verdict of an earlier run; {} if there is none, or its file is damaged: then it is given anew."""
    try:
        verdict = read_json(path)
    except DataError:
        return {}
    if isinstance(verdict, dict) and "passed" in verdict and "checks" in verdict:
        return verdict
    return {}


def evaluate(frame: pl.DataFrame, checks: Sequence[Check]) -> dict[str, Any]:
    """The verdict of a suite over rows: counts, shares, and the first rows that break each expectation."""
    import logging
    import warnings

    checks_by_pool = _checks_by_pool(frame, checks)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas' and marshmallow's deprecations inside Great Expectations
        try:
            import great_expectations as gx
        except ImportError:
            message = "contracts cannot be checked: great-expectations is not installed"
            raise ResourceError(message, "pip install 'sqltrain[ops]'") from None
        logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
        context = gx.get_context(mode="ephemeral")  # it lives in memory and leaves nothing behind
        context.variables.progress_bars = {"globally": False}
        asset = context.data_sources.add_pandas("stage").add_dataframe_asset("rows")
        whole_frame = asset.add_batch_definition_whole_dataframe("all")
        batch = whole_frame.get_batch({"dataframe": frame.to_pandas()})
        expectations = []
        for number, (item, pool) in enumerate(checks_by_pool):
            options = dict(item.options)
            if "column_A" not in options:
                options["column"] = item.column
            if pool:
                options["row_condition"] = f'pool=="{pool}"'
                options["condition_parser"] = "pandas"
            kind = getattr(gx.expectations, item.expectation)
            mostly = 1.0 - item.allowed
            expectation = kind(**options, mostly=mostly, meta={"number": number})
            expectations.append(expectation)
        layout = {
            "result_format": "SUMMARY",
            "unexpected_index_column_names": ["row"],
            "partial_unexpected_count": ROWS_SHOWN,
        }
        suite = gx.ExpectationSuite(name="contract", expectations=expectations)
        results = batch.validate(suite, result_format=layout).results
    outcomes = {int(outcome.expectation_config.meta["number"]): outcome for outcome in results}
    verdicts = []
    for number in sorted(outcomes):
        item, pool = checks_by_pool[number]
        verdicts.append(_check_verdict(item, pool, outcomes[number]))
    passed = all(verdict["passed"] for verdict in verdicts)
    return {"rows": frame.height, "passed": passed, "checks": verdicts}


def _checks_by_pool(frame: pl.DataFrame, checks: Sequence[Check]) -> list[tuple[Check, str]]:
    """Each check with each of its pools that has rows; "" stands for all rows together."""
    pools: set[str] = set()
    if any(item.pools for item in checks):
        pools = set(frame["pool"].unique())
    pairs = []
    for item in checks:
        if not item.pools:
            pairs.append((item, ""))
        pairs += [(item, pool) for pool in item.pools if pool in pools]
    return pairs


def _check_verdict(item: Check, pool: str, outcome: Any) -> dict[str, Any]:
    """The verdict of one check over one pool.

    Raises:
        SqltrainError: it could not be evaluated.
    """
    info = outcome.exception_info
    exceptions = [info] if "raised_exception" in info else list(info.values())  # its two forms
    raised = []
    for exception in exceptions:
        if exception.get("raised_exception"):
            message = exception.get("exception_message")
            raised.append(str(message))
    counts = outcome.result
    if raised or "element_count" not in counts:
        words = " ".join(raised).split()
        message = " ".join(words)[:300] or "it counted no rows"
        raise SqltrainError(f"the contract {item.says!r} could not be evaluated: {message}")
    n_bad = int(counts.get("unexpected_count") or 0)
    n_rows = int(counts["element_count"])
    examples = []
    for row in counts.get("partial_unexpected_index_list") or []:
        values = [str(value) for name, value in row.items() if name != "row"]
        value = " / ".join(values)[:200]
        examples.append({"row": str(row["row"]), "value": value})
    share = 0.0
    if n_rows:
        share = round(n_bad / n_rows, 6)
    return {
        "says": item.says,
        "pool": pool,
        "rows": n_rows,
        "column": item.column,
        "passed": bool(outcome.success),
        "bad": n_bad,
        "share": share,
        "allowed": item.allowed,
        "advice": item.advice,
        "examples": examples,
    }


def contract_html(verdict: Mapping[str, Any]) -> str:
    """A contract's verdict as one page that needs nothing else; every value is escaped."""
    checks = []
    rows = []
    for item in verdict["checks"]:
        state = "held" if item["passed"] else "broken"
        class_ = "ok" if item["passed"] else "bad"
        pool = escape(item["pool"] or "all")
        says = escape(item["says"])
        checks.append(
            f"<tr><td class={class_}>{state}</td><td>{pool}</td><td>{says}</td>"
            f"<td>{item['bad']} of {item['rows']}</td><td>{item['share']:.2%}</td><td>{item['allowed']:.2%}</td></tr>"
        )
        for example in item["examples"]:
            row = escape(example["row"])
            value = escape(example["value"])
            rows.append(f"<tr><td>{says}</td><td><code>{row}</code></td><td>{value}</td></tr>")
    stage = escape(verdict["stage"])
    state = "held" if verdict["passed"] else "broken"
    title = f"Contract of stage {stage}: {state}"
    check_rows = "".join(checks)
    rows_table = ""
    if rows:
        bad_rows = "".join(rows)
        rows_table = f"<h2>Rows</h2><table><tr><th>what</th><th>row</th><th>value</th></tr>{bad_rows}</table>"
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><p>{verdict['rows']} rows.</p>"
        "<table><tr><th></th><th>pool</th><th>a row is wrong when</th><th>rows</th>"
        f"<th>share</th><th>allowed</th></tr>{check_rows}</table>{rows_table}</html>\n"
    )


def contract_markdown(verdict: Mapping[str, Any]) -> str:
    """A contract's verdict as Markdown."""
    state = "held" if verdict["passed"] else "**BROKEN**"
    stage = markdown_cell(verdict["stage"])
    lines = [
        f"Contract of **{stage}**: {state}, {verdict['rows']} rows\n",
        "| | pool | a row is wrong when | rows | share | allowed |",
        "|---|---|---|---|---|---|",
    ]
    rows = []
    for item in verdict["checks"]:
        mark = "ok" if item["passed"] else "**broken**"
        pool = markdown_cell(item["pool"] or "all")
        says = markdown_cell(item["says"])
        lines.append(
            f"| {mark} | {pool} | {says} | {item['bad']} of {item['rows']} "
            f"| {item['share']:.2%} | {item['allowed']:.2%} |"
        )
        for example in item["examples"]:
            row = markdown_cell(example["row"])
            value = markdown_cell(example["value"])
            rows.append(f"| {says} | {row} | {value} |")
    if rows:
        lines += ["", "| what | row | value |", "|---|---|---|", *rows]
    return "\n".join(lines)


def markdown_cell(text: str) -> str:
    """Text that cannot end its table cell or start markup: no image is loaded, and no link or tag is made."""
    line = " ".join(text.split())
    return escape(line, quote=False).translate(_MARKDOWN)
