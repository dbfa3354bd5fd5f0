"""The stage graph: what each stage reads and needs, its key, and how it is made.

A stage's key hashes its name and version, the slice of the recipe that it reads, the keys of the stages that it needs
and, for `data`, the bytes of the user's files. Raise a stage's version when its code gives other results.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.config import Recipe
from pipelines.errors import RecipeError
from pipelines.recipes import digest
from pipelines.registry import plugin_code
from pipelines.stages.context import Context, Progress
from pipelines.stages.sources import fingerprint, prompt_digest
from pipelines.store import Store, read_json

SAMPLING = ("protocol", "execution", "seed")


@dataclass(frozen=True)
class Stage:
    """One stage.

    Attributes:
        reads: dotted paths of the recipe that decide its result.
        needs: stages whose folders it reads; those that the recipe leaves out are skipped.
        build: "module:function" that fills the work folder, imported only when it runs.
    """

    name: str
    version: int
    reads: tuple[str, ...]
    needs: tuple[str, ...]
    build: str
    about: str


GRAPH: tuple[Stage, ...] = (
    Stage("data", 2, ("data", "execution", "seed"), (), "data:build", "read and check the questions"),
    Stage("synthesize", 1, ("synthesis", *SAMPLING), ("data",), "synthesize:build", "teacher trajectories"),
    Stage("filter", 2, ("filter", *SAMPLING), ("data", "synthesize"), "curate:filter_trajectories", "keep the right"),
    Stage("gold_schema", 1, ("gold_schema",), ("data",), "curate:gold_schema", "consensus of schema extractors"),
    Stage("model", 1, ("model", "protocol", "seed"), ("data", "filter"), "train:model", "the base model"),
    Stage("sft", 1, ("sft", "seed"), ("filter", "model"), "train:sft", "supervised fine-tuning"),
    Stage("difficulty", 1, ("difficulty", *SAMPLING), ("data", "model", "sft"), "difficulty:build", "pass@G and S(q)"),
    Stage(
        "grpo",
        2,
        ("grpo", "rewards", *SAMPLING),
        ("data", "gold_schema", "model", "sft", "difficulty"),
        "train:grpo",
        "multi-turn GRPO",
    ),
    *(
        Stage(
            f"evaluate_{name}",
            4,
            ("evaluation", *SAMPLING),
            ("data", "gold_schema", name),
            "evaluate:build",
            f"held-out EX {when}",
        )
        for name, when in (("model", "before SFT"), ("sft", "after SFT"), ("grpo", "after GRPO"))
    ),
    Stage(
        "report",
        3,
        ("name", "title"),
        (
            *("data", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo"),
            *("evaluate_model", "evaluate_sft", "evaluate_grpo"),
        ),
        "report:build",
        "the HTML report",
    ),
)


@dataclass(frozen=True)
class Step:
    """One stage of one run.

    Attributes:
        why: why it must run, or that it is there.
        needs: names of the steps whose folders it reads.
    """

    name: str
    key: str
    folder: Path
    cached: bool
    why: str
    needs: tuple[str, ...]


@dataclass(frozen=True)
class StageResult:
    """A finished stage: where it is, its summary, and whether it was there before."""

    name: str
    key: str
    folder: Path
    metrics: dict[str, float]
    cached: bool


def active(recipe: Recipe) -> list[Stage]:
    """The stages that a recipe runs, in order."""
    wanted = {"data", "model", *recipe.stages}
    if "evaluate" in wanted:
        wanted |= {f"evaluate_{name}" for name in ("model", "sft", "grpo") if name in wanted}
    return [stage for stage in GRAPH if stage.name in wanted]


def plan(recipe: Recipe, store: Store, until: str | None = None, given: Mapping[str, str] | None = None) -> list[Step]:
    """The steps of a run with their keys, in order, up to and including `until`.

    Args:
        given: keys of finished stages to go on from, by name, in place of the recipe's own.

    Raises:
        RecipeError: `until` is not a stage of this recipe.
    """
    stages = _upto(active(recipe), until)
    keys: dict[str, str] = {}
    steps = []
    for stage in stages:
        if given is not None and stage.name in given:
            keys[stage.name] = key = given[stage.name]
            steps.append(Step(stage.name, key, store.folder(stage.name, key), True, "there", ()))
            continue
        needs = tuple(name for name in stage.needs if name in keys)
        about = _about(stage, recipe, {name: keys[name] for name in needs}, store)
        keys[stage.name] = key = digest(about)
        cached = store.has(stage.name, key)
        why = "there" if cached else _why(stage, about, store)
        steps.append(Step(stage.name, key, store.folder(stage.name, key), cached, why, needs))
    return steps


def execute(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> StageResult:
    """Make one step unless the store has it; its needs must be there already."""
    stage = next(stage for stage in GRAPH if stage.name == step.name)
    folders = {other.name: other.folder for other in steps if other.name in step.needs}
    keys = {other.name: other.key for other in steps if other.name in step.needs}
    if store.has(step.name, step.key):
        return StageResult(step.name, step.key, step.folder, read_json(step.folder / "metrics.json"), True)

    def build(folder: Path) -> None:
        module, _, function = stage.build.partition(":")
        make = getattr(importlib.import_module(f"pipelines.stages.{module}"), function)
        make(Context(step.name, recipe, folder, folders, progress))

    about = _about(stage, recipe, keys, store)
    folder = store.make(
        step.name, step.key, build, about, lambda: progress.say(f"{step.name}: another run is making it; waiting")
    )
    return StageResult(step.name, step.key, folder, read_json(folder / "metrics.json"), False)


def _upto(stages: list[Stage], until: str | None) -> list[Stage]:
    if until is None:
        return stages
    names = [stage.name for stage in stages]
    last = "evaluate_grpo" if until == "evaluate" and "evaluate_grpo" in names else until
    if last not in names:
        raise RecipeError(f"this recipe has no stage {until!r}", f"Its stages: {', '.join(names)}.")
    return stages[: names.index(last) + 1]


def _about(stage: Stage, recipe: Recipe, inputs: dict[str, str], store: Store) -> dict[str, Any]:
    """All that decides a stage's result; the manifest keeps it and the key is its digest."""
    about: dict[str, Any] = {
        "stage": stage.name,
        "version": stage.version,
        "recipe": recipe.slice(*stage.reads),
        "inputs": inputs,
    }
    if "protocol" in stage.reads:
        about["prompt"] = prompt_digest(recipe.protocol)
    code = plugin_code(about["recipe"])
    if code:
        about["plugins"] = code
    if stage.name == "data":
        about["files"] = fingerprint(recipe.data, store.root)
    return about


def _why(stage: Stage, about: dict[str, Any], store: Store) -> str:
    """Why a stage must run: what differs from the newest one of its kind."""
    if (store.work(stage.name, digest(about))).is_dir():
        return "was interrupted: resumes"
    manifests = sorted((store.root / stage.name).glob("[!.]*/manifest.json"), key=lambda path: path.stat().st_mtime)
    if not manifests:
        return "not made yet"
    old = json.loads(manifests[-1].read_text(encoding="utf-8"))
    changed = [path for path, value in about["recipe"].items() if old.get("recipe", {}).get(path) != value]
    changed += [
        f"{name} (its input)" for name, key in about["inputs"].items() if old.get("inputs", {}).get(name) != key
    ]
    if old.get("version") != about["version"]:
        changed.append("the stage's code")
    for name, words in (
        ("files", "the source files"),
        ("prompt", "the prompt's text"),
        ("plugins", "a plug-in's code"),
    ):
        if old.get(name) != about.get(name):
            changed.append(words)
    return f"changed: {', '.join(changed)}" if changed else "not made yet"
