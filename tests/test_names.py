"""Names: test files outside packages share one namespace, and values are named by nouns."""

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
# Each stood for dozens of different things. A noun says what the value is: records, pair, message, trajectories.
NO_NOUNS = frozenset(["found", "one", "each", "said", "told", "made", "held", "begun"])


def test_each_test_file_has_a_name_of_its_own() -> None:
    loose = [path.name for path in TESTS.rglob("test_*.py") if not (path.parent / "__init__.py").exists()]
    assert [name for name, count in Counter(loose).items() if count > 1] == []


def test_no_value_has_a_name_that_says_nothing_of_it() -> None:
    assert [place for folder in ("pipelines", "tasks", "flows") for place in _vague(ROOT / folder)] == []


def _vague(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            stored = isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            name = node.id if stored else node.arg if isinstance(node, ast.arg) else ""
            if name in NO_NOUNS:
                yield f"{path.relative_to(ROOT)}:{node.lineno}: {name}"
