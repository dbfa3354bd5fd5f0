"""A checkpoint as MLflow loads it: a folder with a signature, a card and a reference; weights come from the store.

`mlflow.pyfunc.load_model("models:/sqltrain-RECIPE@champion").predict(rows)` answers rows of `question` and `database`
(the path of an SQLite or DuckDB file) with SQL. It needs SQLTRAIN_STORE, a store that holds the stage that the
reference names.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.files import read_json, write_json
from pipelines.core.store import Store
from pipelines.core.types import Database, Example
from pipelines.recipe.config import Recipe
from pipelines.sql.dialects.dialect import engine_of_file
from pipelines.stages.stage import StageResult

CARD = "README.md"
REFERENCE = "checkpoint.json"


def write_folder(folder: Path, recipe: Recipe, result: StageResult, model_id: str) -> None:
    """Write `MLmodel`, the card and the reference."""
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, Schema

    resolved = recipe.model_dump(mode="json")
    reference = {"stage": result.name, "key": result.key, "recipe": resolved}
    write_json(folder / REFERENCE, reference)
    (folder / CARD).write_text(card(recipe, result), encoding="utf-8")
    question = ColSpec("string", "question")
    database = ColSpec("string", "database")
    sql = ColSpec("string", "sql")
    signature = ModelSignature(inputs=Schema([question, database]), outputs=Schema([sql]))
    model = Model(signature=signature, model_id=model_id)
    model.add_flavor("python_function", loader_module=__name__, data=REFERENCE, env=None)
    model.save(str(folder / "MLmodel"))


def card(recipe: Recipe, result: StageResult) -> str:
    """The model card of a checkpoint, for its users."""
    figures = sorted(result.metrics.items())
    numbers = "\n".join(f"| {name} | {value:.4g} |" for name, value in figures)
    title = recipe.title or "A multi-turn text-to-SQL agent."
    return (
        f"# {recipe.name}: checkpoint of {result.name}\n\n{title}\n\n"
        f"- base model: `{recipe.model.source}`\n- protocol: `{recipe.protocol.name}`, at most "
        f"{recipe.protocol.max_turns_eval} turns\n- seed: {recipe.seed}\n- weights: `{result.name}/{result.key}/model` "
        "of the store; they are not copied here\n\n"
        "Load it with `mlflow.pyfunc.load_model`, with SQLTRAIN_STORE set to a store that holds that stage.\n\n"
        f"| last figures of its training | |\n|---|---|\n{numbers}\n"
    )


@dataclass
class ServedAgent:
    """A checkpoint that answers questions with SQL; MLflow calls `predict`."""

    recipe: Recipe
    weights: Path

    def predict(self, rows: Any, params: dict[str, Any] | None = None) -> list[str]:
        """The SQL of each row's question, "" without an answer; `rows` is a pandas frame with the columns of inputs."""
        from pipelines.environment.core import Environment, RolloutMode
        from pipelines.rollout.episode import EpisodeRequest
        from pipelines.rollout.policies.factories import local_policy
        from pipelines.teachers.experts import linking

        questions = []
        for number, row in enumerate(rows.to_dict("records")):
            path = Path(str(row["database"])).expanduser().resolve()
            if not path.is_file():
                hint = "The column `database` holds paths of SQLite or DuckDB files."
                raise DataError(f"no such database: {path}", hint)
            engine = engine_of_file(path) or "sqlite"
            database = Database(path.stem, engine, str(path))
            question = Example(str(number), str(row["question"]), database, "")
            questions.append(question)
        recipe = self.recipe
        link = linking(recipe.data.linker)
        mode = RolloutMode.served(recipe)
        with Environment(recipe) as environment:
            questions = environment.prepare(questions, link, is_served=True)
            requests = [EpisodeRequest(question, 0, recipe.seed) for question in questions]
            policy = local_policy(str(self.weights), recipe)
            answers = environment.run(policy, requests, mode)
        return [answer.final_sql or "" for answer in answers]


def _load_pyfunc(path: str) -> ServedAgent:
    """MLflow's hook: the agent of a reference."""
    reference = read_json(Path(path))
    if not reference:
        reference = json.loads(Path(path, REFERENCE).read_text(encoding="utf-8"))
    root = Path(os.environ.get("SQLTRAIN_STORE") or "store")
    store = Store(root.expanduser())
    weights = store.folder(reference["stage"], reference["key"]) / "model"
    if not weights.is_dir():
        name = f"{reference['stage']}/{reference['key']}"
        raise DataError(f"{store.root} has no {name}", f"Set SQLTRAIN_STORE, or: sqltrain store pull URL {name}")
    recipe = Recipe.model_validate(reference["recipe"])
    return ServedAgent(recipe, weights)
