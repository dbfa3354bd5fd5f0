"""A few hundred random cases of `benchmarks/fuzz.py`, the same on every machine; a person runs half a million."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz", ROOT / "benchmarks" / "fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("engine", ["sqlite", "duckdb"])
def test_random_cases_find_nothing(fuzz: Any, tmp_path: Path, engine: str) -> None:
    assert fuzz.hunt(fuzz.make_database(tmp_path, engine), 600, 0) == []


def test_the_reference_tells_what_strict_says_of_itself(fuzz: Any) -> None:
    assert fuzz.same_bag([(1, "a"), (None, b"x")], [(None, b"x"), (1.0, "a")])
    assert not fuzz.same_bag([(1,)], [(1,), (1,)])
    assert not fuzz.same_cell(2**53, 2**53 + 1)
    assert fuzz.same_cell(0.1 + 0.2, 0.3)
    assert not fuzz.same_cell(1.0, 1.000001)
    assert not fuzz.same_cell(1, "1")


def test_the_fuzzer_reports_an_equality_that_is_too_lax(
    fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Were `strict` what it once was, the hunt would say so."""
    monkeypatch.setattr(fuzz, "EQUALITIES", dict.fromkeys(("strict", "bird"), fuzz.EQUALITIES["bird"]))
    assert fuzz.hunt(fuzz.make_database(tmp_path, "sqlite"), 900, 0)
