"""The code behind each stage's version: a change that nobody has looked at fails here."""

import ast
from pathlib import Path

import pytest

from pipelines.stages import versions


def test_every_change_of_code_that_a_stage_reaches_is_noted() -> None:
    found = versions.changed()
    assert not found, (
        f"changed: {found}. Raise the version of each stage in pipelines/stages/graph.py that gives other results "
        "now, then note the change: python -m pipelines.stages.versions --refresh"
    )


def paid_for_wrong_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the reward for a right answer were paid for a wrong one."""
    name, read = "pipelines.rewards.terms", versions.tree.__wrapped__
    source = versions.modules()[name].read_text()
    assert source.count("return float(outcome.correct)") == 1
    bent = ast.parse(source.replace("return float(outcome.correct)", "return float(not outcome.correct)"))
    monkeypatch.setattr(versions, "tree", lambda module: bent if module == name else read(module))


def test_a_reward_that_pays_for_wrong_answers_is_not_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    paid_for_wrong_answers(monkeypatch)
    (name,) = versions.changed()
    stages = versions.changed()[name]
    assert name == "pipelines.rewards.terms"
    assert "grpo" in stages
    assert not {"data", "synthesize", "gold_schema"} & set(stages)


def test_a_refresh_says_of_each_stage_whether_it_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "versions.txt").write_bytes(versions.NOTES.read_bytes())
    monkeypatch.setattr(versions, "NOTES", tmp_path / "versions.txt")
    paid_for_wrong_answers(monkeypatch)
    old = next(stage.version for stage in versions.GRAPH if stage.name == "sft")
    notes = (tmp_path / "versions.txt").read_text().replace(f"stage sft {old}\n", f"stage sft {old - 1}\n")
    (tmp_path / "versions.txt").write_text(notes)
    said = versions.refresh()
    assert f"sft: version {old - 1} -> {old}, it is made again" in said
    assert any(line.startswith("grpo: version ") and line.endswith("kept, its results are the same") for line in said)
    assert versions.changed() == {}


@pytest.mark.parametrize(
    ("code", "same"),
    [
        ("def pay(right):\n    return (1.0 if right\n            else 0.0)  # paid", True),
        (
            '"""Pay."""\ndef pay(right: bool) -> float:\n    """What is paid."""\n    return 1.0 if right else 0.0\n',
            True,
        ),
        ("def pay(right):\n    return 0.0 if right else 1.0", False),
        ("def pay(right, least=0.0):\n    return 1.0 if right else 0.0", False),
        ("def pay(right):\n    'paid' and 1\n    return 1.0 if right else 0.0", False),
    ],
)
def test_comments_docstrings_layout_and_annotations_do_not_count(code: str, same: bool) -> None:
    first = list(versions._code(ast.parse("def pay(right):\n    return 1.0 if right else 0.0")))
    assert (list(versions._code(ast.parse(code))) == first) is same


def test_a_closure_follows_imports_anywhere_child_processes_and_registries() -> None:
    grpo = versions.closure("grpo")
    assert {"pipelines.training.child", "pipelines.training.grpo", "pipelines.rewards.terms"} <= grpo
    assert {
        "pipelines.benchmarks.spider",
        "pipelines.sql.sandbox.worker",
        "pipelines.protocols.one_action",
    } <= versions.closure("data") | grpo
    assert not any(name.startswith("pipelines.training") for name in versions.closure("data"))
