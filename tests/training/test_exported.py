"""An exported model, loaded by the code of its own card with transformers alone, has the turns that it has here."""

import ast
import re
import shutil
from pathlib import Path
from typing import Any

from pipelines.core.types import Example, Trajectory
from pipelines.export import folder
from pipelines.export.cards import lineage_of
from pipelines.protocols.base import build
from pipelines.recipe.checkpoint import write_card
from pipelines.recipe.config import Recipe
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.making import local_policy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect


def greedy(model: Path, recipe: Recipe, examples: list[Example]) -> list[Trajectory]:
    """The agent's own episodes."""
    sampling = recipe.grpo.sampling.model_copy(update={"temperature": 0.0})
    with SqlEngine(Limits(timeout_s=20)) as sql:
        policy, protocol = local_policy(str(model), recipe), build(recipe.protocol)
        engine = RolloutEngine(policy, protocol, sql, sampling, 3, lambda database: introspect(database))
        return engine.run([EpisodeRequest(example, 0, 0) for example in examples])


def test_plain_transformers_gets_the_same_greedy_turns(
    tmp_path: Path, taught: Path, recipe: Recipe, examples: list[Example]
) -> None:
    asked = recipe.model_copy(
        update={"evaluation": recipe.evaluation.model_copy(update={"sampling": recipe.grpo.sampling})}
    )
    model, out = tmp_path / "model", tmp_path / "agent"
    shutil.copytree(taught, model)
    write_card(model, asked, "sft", {})
    folder.write(lineage_of(model), "hub-folder", out)
    files = [path for path in out.rglob("*") if path.is_file()]
    assert not any(str(tmp_path).encode() in path.read_bytes() for path in files)
    text = (out / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"````python\n(.*?)\n````", text, re.DOTALL)
    tree = ast.parse(code)
    assert {name.name for node in tree.body if isinstance(node, ast.Import) for name in node.names} == {"torch"}
    assert {node.module for node in tree.body if isinstance(node, ast.ImportFrom)} == {"transformers"}
    room: dict[str, Any] = {}
    exec(code.replace('FOLDER = "agent"', f"FOLDER = {str(out)!r}"), room)
    episodes = greedy(model, recipe, examples)
    assert sum(len(episode.turns) for episode in episodes) > len(episodes)  # they look before they answer
    for episode in episodes:
        messages = [{"role": role, "content": said} for role, said in episode.prompt]
        for turn in episode.turns:
            assert room["turn"](messages) == turn.text
            messages += [
                {"role": "assistant", "content": turn.text},
                {"role": "user", "content": str(turn.observation)},
            ]
