"""Contracts of stages: Great Expectations suites over a stage's rows, thresholds from the recipe.

A contract is checked once, after its stage; `contract.json` beside the data keeps the verdict, so that a later run
reads it and need not import Great Expectations (some 3 CPU seconds). A breach names rows and reasons and stops the
run. An expectation that could not be evaluated is a failure of ours, never a verdict about the data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import DataError, ResourceError, SqltrainError
from pipelines.core.files import read_json, write_atomic, write_json
from pipelines.recipe.config import Recipe
from pipelines.recipe.recipes import digest
from pipelines.stages.graph import StageResult
from tasks.checks import CONTRACTS, Check

if TYPE_CHECKING:
    import polars as pl

ROWS_SHOWN = 20


def check(result: StageResult, recipe: Recipe) -> dict[str, Any] | None:
    """Hold a finished stage to its contract and return the verdict; None for a stage without one."""
    contract = CONTRACTS.get(result.kind)
    if contract is None:
        return None
    checks = contract.checks(recipe)
    terms = digest(
        [[item.says, item.expectation, item.column, dict(item.options), item.allowed, item.pools] for item in checks]
    )
    path = result.folder / "contract.json"
    verdict = kept(path)
    if verdict.get("terms") != terms:
        verdict = {"stage": result.name, "terms": terms, **evaluate(contract.rows(result.folder), checks)}
        _publish(path, verdict)
    if not verdict["passed"]:
        raise _breach(verdict, path)
    return verdict


def kept(path: Path) -> dict[str, Any]:
    """The verdict of an earlier run; {} where there is none, or its file is damaged: then it is given anew."""
    try:
        verdict = read_json(path)
    except DataError:
        return {}
    return verdict if isinstance(verdict, dict) and "passed" in verdict and "checks" in verdict else {}


def evaluate(frame: pl.DataFrame, checks: Sequence[Check]) -> dict[str, Any]:
    """The verdict of a suite over rows: counts, shares, and the first rows that break each expectation."""
    parts = [(item, pool) for item in checks for pool in _pools(item, frame)]
    outcomes = _validate(frame, parts)
    verdicts = [_verdict(item, pool, outcome) for (item, pool), outcome in zip(parts, outcomes, strict=True)]
    return {"rows": frame.height, "passed": all(item["passed"] for item in verdicts), "checks": verdicts}


def _pools(item: Check, frame: pl.DataFrame) -> list[str]:
    """The pools that a check holds for, each by itself; [""] where it holds for all rows together."""
    if not item.pools:
        return [""]
    there = set(frame["pool"].unique())
    return [pool for pool in item.pools if pool in there]


def _validate(frame: pl.DataFrame, parts: Sequence[tuple[Check, str]]) -> list[Any]:
    """Great Expectations' result of each check, in order; its context lives in memory and leaves nothing behind."""
    import logging
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # pandas' and marshmallow's deprecations inside Great Expectations
        try:
            import great_expectations as gx
        except ImportError:
            raise ResourceError(
                "contracts cannot be checked: great-expectations is not installed", "pip install 'sqltrain[ops]'"
            ) from None
        logging.getLogger("great_expectations.data_context.types.base").setLevel(logging.WARNING)
        context = gx.get_context(mode="ephemeral")
        context.variables.progress_bars = {"globally": False}
        asset = context.data_sources.add_pandas("stage").add_dataframe_asset("rows")
        batch = asset.add_batch_definition_whole_dataframe("all").get_batch({"dataframe": frame.to_pandas()})
        suite = gx.ExpectationSuite(
            name="contract",
            expectations=[
                _expectation(gx.expectations, item, pool, number) for number, (item, pool) in enumerate(parts)
            ],
        )
        layout = {
            "result_format": "SUMMARY",
            "unexpected_index_column_names": ["row"],
            "partial_unexpected_count": ROWS_SHOWN,
        }
        outcome = batch.validate(suite, result_format=layout)
    return sorted(outcome.results, key=lambda result: int(result.expectation_config.meta["number"]))


def _expectation(library: Any, item: Check, pool: str, number: int) -> Any:
    options: dict[str, Any] = {} if "column_A" in item.options else {"column": item.column}
    if pool:
        options |= {"row_condition": f'pool=="{pool}"', "condition_parser": "pandas"}
    kind = getattr(library, item.expectation)
    return kind(**options, **item.options, mostly=1.0 - item.allowed, meta={"number": number})


def _verdict(item: Check, pool: str, outcome: Any) -> dict[str, Any]:
    """One check's verdict as JSON values."""
    raised = _exception(outcome.exception_info)
    if raised:
        raise SqltrainError(f"the contract {item.says!r} could not be evaluated: {raised}")
    facts = outcome.result
    bad, total = int(facts.get("unexpected_count", 0)), int(facts.get("element_count", 0))
    return {
        "says": item.says,
        "pool": pool,
        "rows": total,
        "column": item.column,
        "passed": bool(outcome.success),
        "bad": bad,
        "share": round(bad / total, 6) if total else 0.0,
        "allowed": item.allowed,
        "advice": item.advice,
        "examples": [
            {"row": str(row["row"]), "value": _value(row, item)}
            for row in facts.get("partial_unexpected_index_list") or []
        ],
    }


def _value(row: Mapping[str, Any], item: Check) -> str:
    values = [str(value) for name, value in row.items() if name != "row"]
    return " / ".join(values)[:200]


def _exception(info: Mapping[str, Any]) -> str:
    """The message of an expectation that raised (Great Expectations has two shapes for it), else ""."""
    shapes = [info] if "raised_exception" in info else list(info.values())
    raised = [str(shape.get("exception_message")) for shape in shapes if shape.get("raised_exception")]
    return " ".join(raised[0].split())[:300] if raised else ""


def _publish(path: Path, verdict: Mapping[str, Any]) -> None:
    """The verdict for machines, and for people: one page that needs no network."""
    from tasks.summary import contract_html

    write_json(path, verdict)
    write_atomic(path.with_suffix(".html"), contract_html(verdict))


def _breach(verdict: Mapping[str, Any], path: Path) -> DataError:
    broken = [item for item in verdict["checks"] if not item["passed"]]
    first = broken[0]
    rows = ", ".join(f"{example['row']} ({example['value']})" for example in first["examples"][:3])
    more = f"; {len(broken) - 1} more checks are broken" if len(broken) > 1 else ""
    where = f" of pool {first['pool']}" if first["pool"] else ""
    return DataError(
        f"the data of stage {verdict['stage']!r} breaks its contract: {first['says']} in {first['bad']} of "
        f"{first['rows']} rows{where} ({first['share']:.1%}, allowed {first['allowed']:.1%}): {rows}{more}",
        f"All of it is in {path.with_suffix('.html')}. {first['advice']}",
    )
