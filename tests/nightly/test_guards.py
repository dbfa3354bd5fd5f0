"""What `nightly.guards` names is looked for before a night takes a question or trains."""

from pathlib import Path
from typing import Any

import pytest

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.nightly import night
from pipelines.nightly.ledger import Ledger
from pipelines.recipe import recipes
from tests.nightly import farms


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overrides of a night with one new question; two guards are added, and the questions of one are gone."""
    local = tmp_path / "conf" / "local"
    local.mkdir(parents=True)
    monkeypatch.setattr(recipes, "LOCAL", local)
    base = farms.questions(tmp_path / "base", "base.jsonl", farms.named("b", 2), [0, 1])
    for name, path in (("farms", base), ("moved", tmp_path / "moved.jsonl")):
        source = f"data: {{test: [{{name: {name}, kind: jsonl, split: test, path: {path}}}]}}\n"
        (local / f"{name}.yaml").write_text(source)
    farms.questions(tmp_path / "inbox", "new.jsonl", farms.named("n", 1), [0])
    return farms.overrides(tmp_path, base)


@pytest.mark.parametrize(
    ("guard", "said"),
    [
        ("local/spider_dj", "spider_dj"),
        ("data/spider_dk", "nightly.guards: data/spider_dk: no path to its questions"),
        ("local/moved", r"nightly.guards: local/moved: nothing is at .*moved\.jsonl"),
    ],
)
def test_a_guard_that_cannot_be_asked_stops_a_night_before_it_begins(
    tmp_path: Path, words: list[str], guard: str, said: str
) -> None:
    words = [*words, f"nightly.guards=[local/farms, {guard}]"]
    store = Store(tmp_path / "store")

    def walk(*_: Any) -> Any:
        pytest.fail("a stage was made")

    with pytest.raises(RecipeError, match=said):
        night.run_night(night.NightContext("miniature", words, recipes.load("miniature", words), store, walk, walk))
    assert Ledger(store, "miniature").usable() == []  # its questions wait for the next night


def test_a_guard_is_the_recipe_over_other_questions(words: list[str]) -> None:
    for name, benchmark in (("local/farms", "farms"), ("data/miniature", "miniature_test")):
        given = [*words, f"nightly.guards=[{name}]"]
        (guard,) = night.guards("miniature", given, recipes.load("miniature", given)).values()
        assert guard.benchmark.name == benchmark
        assert "gold_schema" not in guard.stages
