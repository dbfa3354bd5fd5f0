"""Test files outside packages share one namespace: each needs a name of its own."""

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).resolve().parent


def test_each_test_file_has_a_name_of_its_own() -> None:
    loose = [path.name for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert [name for name, count in Counter(loose).items() if count > 1] == []
