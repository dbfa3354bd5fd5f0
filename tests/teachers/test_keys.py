"""A key is used and is nowhere else: not in the store, its MLflow database, the report, the logs, or an error."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from teacher_server import TeacherServer
from teacher_world import KEY, recipe_of, world

from pipelines.core.store import Store

ROOT = Path(__file__).resolve().parents[2]
SHORT = (
    "data.cleaners=[other]",
    "data.linker=other",
    "gold_schema.extractors=[other]",
    "rewards=[{term: exec}, {term: judge, options: {by: other}}]",
    "model.tiny={width: 32, layers: 1, heads: 2, ffn: 64}",
    "sft.epochs=0.2",
    "difficulty={group: 2, candidates: 4, keep: 4, explore: 4, sampling: {turn_tokens: 16, episode_tokens: 512}}",
    "grpo.steps=1",
    "grpo.group=2",
    "grpo.drop_zero_variance=false",
    "grpo.questions_per_step=2",
    "grpo.sampling={turn_tokens: 16, episode_tokens: 512}",
    "evaluation={samples: 1, ks: [1], sampling: {turn_tokens: 16, episode_tokens: 512}}",
    "rollout.processes=1",
    "hardware.processes=1",
)


def expert(messages: list[dict[str, str]]) -> str:
    """A judge's grade, and what any other expert cannot read."""
    return "1.0" if "You grade" in messages[0]["content"] else "I cannot say."


def run(command: list[str]) -> "subprocess.CompletedProcess[str]":
    """The command line with the client's own log at its most talkative."""
    env = {**os.environ, "OPENAI_LOG": "debug"}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *command], cwd=ROOT, env=env, text=True, capture_output=True
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_after_a_whole_run_the_key_is_nowhere(
    tmp_path: Path, servers: Callable[..., TeacherServer], replies: Any, name_endpoint: Any
) -> None:
    store = Store(tmp_path / "store")
    teacher, other = servers(replies(recipe_of(1), Store(tmp_path / "world"))), servers(expert)
    name_endpoint(teacher, other)
    done = run(["run", "miniature", *world(1), *SHORT, f"--store={store.root}"])
    assert done.returncode == 0, done.stderr[-3000:]
    for server in (teacher, other):
        assert f"authorization: bearer {KEY}".encode() in server.headers[0].lower()  # it was used
    files = [path for path in store.root.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"mlflow.db", "report.html", "card.md", "teacher.sqlite", "other.sqlite"} <= names
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    assert KEY not in done.stdout + done.stderr


@pytest.mark.slow
def test_an_error_does_not_say_the_key_though_the_server_does(tmp_path: Path, servers: Any, name_endpoint: Any) -> None:
    def refuse(messages: list[dict[str, str]]) -> str:
        raise ValueError(f"bad request with the key {KEY}")  # the server answers 400 with this

    name_endpoint(servers(refuse))
    done = run(["run", "miniature", *world(1), f"--store={tmp_path / 'store'}", "--until", "synthesize"])
    assert done.returncode == 2
    assert "bad request with the key ***" in done.stderr
    assert KEY not in done.stdout + done.stderr
    files = [path for path in (tmp_path / "store").rglob("*") if path.is_file()]
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
