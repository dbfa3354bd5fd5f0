"""A clock that jumps: no wait and no duration is measured by the wall clock, which only labels and ages need."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Where the wall clock is read, and what for.
LABELS = {
    "pipelines/serving/http_server.py": "the moment that OpenAI's protocol wants in an answer",
    "flows/commands/operate.py": "how long ago a run began, by the moment that it wrote for other processes",
    "pipelines/nightly/store_gc.py": "the moment that a claim began; the age of files, which have no other clock",
    "pipelines/serving/feedback.py": "the day of a question, which says when it is deleted",
    "pipelines/stages/keys.py": "the age of a file: one that has just been written is read again",
    "pipelines/endpoints/limits.py": "an HTTP header that names a moment",
    "tasks/run.py": "the moment that MLflow shows beside a number",
}
WALL = {("time", "time"), ("time", "time_ns"), ("datetime", "now"), ("datetime", "utcnow"), ("date", "today")}


def readers(folder: str) -> set[str]:
    """The files that read the wall clock."""
    found = set()
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and (node.value.id, node.attr) in WALL
            ):
                found.add(str(path.relative_to(ROOT)))
    return found


def test_the_wall_clock_is_read_only_where_a_moment_is_meant() -> None:
    assert set().union(*map(readers, ("flows", "tasks", "pipelines"))) == set(LABELS)
