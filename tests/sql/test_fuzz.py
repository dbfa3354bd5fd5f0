"""A few hundred random cases of `benchmarks/fuzz.py`, the same on every machine; a person runs half a million."""

from pathlib import Path
from typing import Any

import pytest

from tests.fakes import load_script

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def fuzz() -> Any:
    return load_script(ROOT / "benchmarks" / "fuzz.py")


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


def test_the_fuzzer_reports_a_lax_equality(fuzz: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzz, "EQUALITIES", dict.fromkeys(("strict", "bird"), fuzz.EQUALITIES["bird"]))
    assert fuzz.hunt(fuzz.make_database(tmp_path, "sqlite"), 900, 0)
