"""The recipe of an adaptation, as a file that a person reads and edits: `recipes/NAME.yaml` of the working folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipelines import recipes
from pipelines.adaptation.models import Start
from pipelines.adaptation.questions import Questions
from pipelines.config import Recipe
from pipelines.errors import DataError
from pipelines.store import write_atomic
from pipelines.yaml_files import yaml_text

FOLDER = Path("recipes")
INBOX = "feedback/inbox"  # where `sqltrain serve --feedback feedback` puts what people confirm
MANY = 1000  # questions to train on, from which on those that teach most are chosen by their difficulty
LARGE_EPOCHS, LARGE_BATCH = 3, 16  # passes over a few hundred questions, and questions of a step
SAMPLES = 2  # demonstrations of a question for the tiny model, which differ in their words and their mistakes
SHOWN, MOST_EPOCHS = 5_000, 40  # demonstrations that it must see before it speaks at all, and how often each of them
SMALL_STEPS = 12  # of its GRPO
HEAD = """\
# A model learns to answer questions about the database {name}.
#
# Model      {about}
# Command    sqltrain adapt {name}
#            sqltrain run {place}      the same stages, without the page and the promotion
# Questions  {questions}
# Made from  {made_from}: every key that this file does not set is theirs; `sqltrain show {place}` prints them all.
#            Edit what you like: `sqltrain adapt {name}` without options runs this file as it is.
"""


def place(name: str) -> Path:
    """Where the recipe of that database lies, in the working folder."""
    return FOLDER / f"{name}.yaml"


def tree(name: str, start: Start, questions: Questions) -> dict[str, Any]:
    """The recipe's keys and values."""
    pool = {part: {**questions.source, "split": part} for part in questions.counts}
    data = {"sft": pool["train"], "rl": [pool["train"]], "dev": pool["dev"], "test": [{"name": name, **pool["test"]}]}
    settings = recipes.laid_over(_sizes(start, questions.counts["train"]), start.settings)
    return {
        "name": name,
        "title": f"Questions about {name}",
        "include": [*start.includes],
        "data": data,
        **settings,
        "nightly": {"inbox": INBOX},
    }


def _sizes(start: Start, trained: int) -> dict[str, Any]:
    """How often so many questions are shown, and how many of them a step asks."""
    name, *scales = start.includes
    shipped = recipes.load(name.partition("/")[2], [f"include={scale}" for scale in scales])
    stages = [stage for stage in shipped.stages if stage != "difficulty"]
    chosen: dict[str, Any] = {"difficulty": {"candidates": None, "keep": None, "explore_parts": []}}
    sizes = chosen if trained >= MANY else {"stages": stages}
    if start.is_small:
        sizes |= {"synthesis": {"samples": SAMPLES}, "filter": {"per_example": SAMPLES}}
        epochs = min(MOST_EPOCHS, max(1, round(SHOWN / (SAMPLES * trained))))
        return {**sizes, "sft": {"epochs": epochs}, "grpo": {"steps": SMALL_STEPS, "drop_zero_variance": True}}
    sft = {"batch": LARGE_BATCH, "micro_batch": 1, "epochs": LARGE_EPOCHS}
    grpo = {"epochs": LARGE_EPOCHS, "questions_per_step": min(LARGE_BATCH, trained), "micro_batch": 1}
    return {**sizes, "sft": sft, "grpo": {**grpo, "drop_zero_variance": True}}


def write(name: str, values: Mapping[str, Any], start: Start, questions: Questions) -> Path | None:
    """Write the recipe. One that is there and differs is kept as `NAME.yaml.old-1` and so on; that path is returned."""
    where = place(name)
    counts = ", ".join(f"{count} to {_USES[part]}" for part, count in questions.counts.items())
    head = HEAD.format(name=name, about=start.about, place=where, questions=counts, made_from=", ".join(start.includes))
    values = json.loads(json.dumps(values))  # no part is the same as another one, or YAML would refer to it
    text = head + yaml_text(values)
    try:
        where.parent.mkdir(parents=True, exist_ok=True)
        before = where.read_text(encoding="utf-8") if where.is_file() else text
        old = None
        if before != text:
            number = next(n for n in itertools.count(1) if not where.with_suffix(f".yaml.old-{n}").exists())
            old = where.with_suffix(f".yaml.old-{number}")
            write_atomic(old, before)
        write_atomic(where, text)
    except OSError as error:
        raise DataError(f"{where} cannot be written: {error.strerror}", "Run it in a folder of your own.") from None
    return old


_USES = {"train": "train on", "dev": "watch training by", "test": "measure by"}


def trained(recipe: Recipe) -> str:
    """The name of the recipe's last training stage; a DataError if it trains or evaluates nothing."""
    last = [name for name in ("sft", "grpo") if name in recipe.stages]
    if not last or "evaluate" not in recipe.stages:
        raise DataError(f"recipe {recipe.name} lacks a stage", "To adapt it needs evaluate, and sft or grpo.")
    return last[-1]
