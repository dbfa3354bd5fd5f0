"""`sqltrain stages` says what changed since the nearest finished stage, and names it."""

from pathlib import Path

import pytest
from command_line import sqltrain

from pipelines.core.store import Store
from pipelines.recipe import recipes
from pipelines.stages import graph

CAUSES = {
    "rewards.0.weight=7": ("grpo", "changed: rewards."),
    "grpo.steps=3": ("grpo", "changed: grpo.steps (60 -> 3)"),
    "seed=3": ("data", "changed: seed (0 -> 3)"),
    "sft.epochs=1": ("sft", "changed: sft.epochs"),
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Every stage of the miniature, finished and empty."""
    made, recipe = Store(tmp_path / "store"), recipes.load("miniature")
    for step in graph.plan(recipe, made):
        stage = next(stage for stage in graph.GRAPH if stage.name == step.kind)
        inputs = {other.name: other.key for other in graph.plan(recipe, made) if other.name in step.needs}
        made.make(step.kind, step.key, lambda folder: None, graph.deciding(stage, recipe, inputs, made), lambda: None)
    return made


def test_the_cause_is_printed(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = f"--store={store.root}"
    code, out, _ = sqltrain(monkeypatch, capsys, "stages", "miniature", where)
    assert (code, "changed" in out) == (0, False)
    for override, (stage, cause) in CAUSES.items():
        code, out, _ = sqltrain(monkeypatch, capsys, "stages", "miniature", override, where)
        (line,) = [line for line in out.splitlines() if line.split()[:1] == [stage]]
        assert code == 0
        assert cause in line, override
