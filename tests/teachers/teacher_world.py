"""A miniature recipe with an endpoint as its teacher, and running it up to a stage."""

import json
import sqlite3

from pipelines.recipe import recipes
from pipelines.stages import graph, stage_making
from pipelines.stages.context import Silent

KEY = "sk-very-secret-0123456789"


def world(databases):
    """Overrides of the miniature: an endpoint as its teacher, and so many databases of 12 questions."""
    small = "{kind: miniature, split: SPLIT, options: {databases: 2, questions: 4}}"
    return [
        f"data.sft={{kind: miniature, split: train, options: {{databases: {databases}, questions: 12}}}}",
        f"data.rl=[{small.replace('SPLIT', 'train')}]",
        f"data.dev={small.replace('SPLIT', 'dev')}",
        f"data.test=[{small.replace('SPLIT', 'test')}]",
        "synthesis.teacher.kind=endpoint",
        "synthesis.teacher.endpoint=teacher",
    ]


def kept(store, endpoint="teacher"):
    """The answers in an endpoint's log, in order."""
    with sqlite3.connect(store / "responses" / f"{endpoint}.sqlite") as table:
        rows = table.execute("SELECT key, prompt_tokens, completion_tokens, answer FROM answers ORDER BY id").fetchall()
    names = ("key", "prompt_tokens", "completion_tokens")
    return [{**json.loads(row[3]), **dict(zip(names, row[:3], strict=True))} for row in rows]


def recipe_of(databases, *more):
    return recipes.load("miniature", [*world(databases), *more])


def make(recipe, store, until):
    steps = graph.plan(recipe, store, until)
    for step in steps:
        stage_making.execute(step, recipe, store, Silent(), steps)
    return steps[-1].folder
