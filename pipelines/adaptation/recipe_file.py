"""The recipe of an adaptation, as a file that a person reads and edits: `recipes/NAME.yaml` of the working folder."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines.adaptation.questions import AdaptationQuestions
from pipelines.adaptation.training_start import TrainingStart
from pipelines.benchmarks.splitting import Part
from pipelines.core.errors import DataError
from pipelines.core.files import write_atomic, writing_to
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe
from pipelines.recipe.yaml_files import yaml_text
from pipelines.stages.graph import TRAINING

FOLDER = Path("recipes")
INBOX = "feedback/inbox"  # folder of confirmed answers of `sqltrain serve --feedback feedback`
MANY_QUESTIONS = 1000  # questions to train on, from which on the most instructive are chosen by their difficulty
GPU_EPOCHS = 3  # passes over a few hundred questions
GPU_BATCH = 16  # questions of a step
TINY_SAMPLES = 2  # demonstrations of a question for the tiny model, which differ in their words and their mistakes
TINY_DEMONSTRATIONS = 5_000  # demonstrations that the tiny model must see before it speaks at all
TINY_MAX_EPOCHS = 40
TINY_GRPO_STEPS = 12
LAPTOP_DEMONSTRATIONS = 600  # demonstrations that a language model should see
LAPTOP_MAX_EPOCHS = 8
LAPTOP_SIZES: dict[str, Any] = {
    "grpo": {"questions_per_step": 8, "group": 8, "micro_batch": 64, "steps": 12, "drop_zero_variance": True},
    "evaluation": {"samples": 0, "ks": [1]},  # the untrained model writes to its budget: four samples take an hour
    "rollout": {"processes": 2, "slots": 32, "shard": 32},
    "hardware": {"micro_tokens": 1536},
}
USES: Mapping[Part, str] = {"train": "train on", "dev": "watch training by", "test": "measure by"}
HEAD = """\
# A model learns to answer questions about the database {name}.
#
# Model      {about}
# Command    sqltrain adapt {name}
#            sqltrain run {path}      the same stages, without the page and the promotion
# Questions  {questions}
# Made from  {made_from}: every key that this file does not set is theirs; `sqltrain show {path}` prints them all.
#            Edit what you like: `sqltrain adapt {name}` without options runs this file as it is.
"""


def recipe_path(name: str) -> Path:
    """The path of a database's recipe, in the working folder."""
    return FOLDER / f"{name}.yaml"


def recipe_values(name: str, start: TrainingStart, questions: AdaptationQuestions) -> dict[str, Any]:
    """The recipe's keys and values."""
    pools = {part: {**questions.source, "split": part} for part in questions.counts}
    data = {
        "sft": pools["train"],
        "rl": [pools["train"]],
        "dev": pools["dev"],
        "test": [{"name": name, **pools["test"]}],
        "drop_empty": True,  # any query without rows would be right for a question whose gold SQL gives none
    }
    n_questions = questions.counts["train"]
    sizes = {**_difficulty_sizes(start, n_questions), **_training_sizes(start, n_questions)}
    return {
        "name": name,
        "title": f"Questions about {name}",
        "include": list(start.includes),
        "data": data,
        **recipes.laid_over(sizes, start.settings),
        "nightly": {"inbox": INBOX},
    }


def _difficulty_sizes(start: TrainingStart, n_questions: int) -> dict[str, Any]:
    """All of many questions are scored by their difficulty; of few questions none is."""
    if n_questions >= MANY_QUESTIONS:
        return {"difficulty": {"candidates": None, "keep": None, "explore_parts": []}}
    shipped, *scales = start.includes
    _, _, name = shipped.partition("/")
    includes = [f"include={scale}" for scale in scales]
    recipe = recipes.load(name, includes)
    stages = [stage for stage in recipe.stages if stage != "difficulty"]
    return {"stages": stages}


def _training_sizes(start: TrainingStart, n_questions: int) -> dict[str, Any]:
    """The batches, and how often each question is shown."""
    if start.scale == "laptop":
        epochs = _epochs(LAPTOP_DEMONSTRATIONS, max(1, n_questions), LAPTOP_MAX_EPOCHS)
        sft = {"batch": 16, "micro_batch": 8, "group_by": "prefix", "epochs": epochs}
        return {**LAPTOP_SIZES, "filter": {"keep": None}, "sft": sft}
    if start.scale == "tiny":
        n_demonstrations = TINY_SAMPLES * n_questions
        epochs = _epochs(TINY_DEMONSTRATIONS, n_demonstrations, TINY_MAX_EPOCHS)
        return {
            "synthesis": {"samples": TINY_SAMPLES},
            "filter": {"per_example": TINY_SAMPLES},
            "sft": {"epochs": epochs},
            "grpo": {"steps": TINY_GRPO_STEPS, "drop_zero_variance": True},
        }
    sft = {"batch": GPU_BATCH, "micro_batch": 1, "epochs": GPU_EPOCHS}
    grpo = {
        "epochs": GPU_EPOCHS,
        "questions_per_step": min(GPU_BATCH, n_questions),
        "micro_batch": 1,
        "drop_zero_variance": True,
    }
    return {"sft": sft, "grpo": grpo}


def _epochs(target: int, available: int, maximum: int) -> int:
    """Passes over the available demonstrations that show about as many as wanted: 1 to `most`."""
    passes = round(target / available)
    return min(maximum, max(1, passes))


def write_recipe(
    name: str, values: Mapping[str, Any], start: TrainingStart, questions: AdaptationQuestions
) -> Path | None:
    """Write the recipe. One that is there and differs is kept as `NAME.yaml.old-1` and so on; that path is returned."""
    path = recipe_path(name)
    counts = [f"{count} to {USES[part]}" for part, count in questions.counts.items()]
    head = HEAD.format(
        name=name,
        about=start.about,
        path=path,
        questions=", ".join(counts),
        made_from=", ".join(start.includes),
    )
    copied_values = json.loads(json.dumps(values))  # YAML refers to a value that stands in two places
    text = head + yaml_text(copied_values)
    old_path = None
    with writing_to(path, "Run it in a folder of your own."):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_file() and path.read_bytes() != text.encode():
            old_path = _unused_old_path(path)
            path.rename(old_path)
        write_atomic(path, text)
    return old_path


def _unused_old_path(path: Path) -> Path:
    for number in itertools.count(1):
        old_path = path.with_suffix(f".yaml.old-{number}")
        if not old_path.exists():
            return old_path
    raise AssertionError


def last_training_stage(recipe: Recipe) -> str:
    """The name of the recipe's last training stage; a DataError if it has no training or no evaluation."""
    stages = [name for name in TRAINING if name in recipe.stages]
    if not stages or "evaluate" not in recipe.stages:
        hint = "To adapt it needs evaluate, and sft or grpo."
        raise DataError(f"recipe {recipe.name} lacks a stage", hint)
    return stages[-1]
