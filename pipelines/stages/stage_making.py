"""The making of one stage: its damaged inputs first, then the function that fills its work folder."""

import pkgutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pipelines.core.errors import DataError
from pipelines.core.files import digest, read_json
from pipelines.core.provenance import facts
from pipelines.core.store import MARK, Store
from pipelines.recipe.config import Recipe
from pipelines.stages import graph
from pipelines.stages.context import Context, Progress, base_of
from pipelines.stages.fingerprints import stage_at
from pipelines.stages.prompt_fit import note_unfit_prompts
from pipelines.stages.stage import StageResult, Step, seen_by
from pipelines.stages.stage_keys import deciding
from pipelines.stages.unfinished_work import begin_or_resume


def execute(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> StageResult:
    """Make one step unless the store has it; damaged stages that it needs are set aside and made again first."""
    store.set_aside(step.kind, step.key, False, progress.say)
    if store.has(step.kind, step.key):
        store.note_use(step.kind, step.key)
        return _stage_result(step, step.folder, cached=True)
    stage = next(stage for stage in graph.GRAPH if stage.name == step.kind)
    needs = [other for other in steps if other.name in step.needs]
    keys = {other.name: other.key for other in needs}
    about = deciding(replace(stage, name=step.name), recipe, keys, store)
    if digest(about) != step.key:
        raise _lost_stage(step.kind, step.key)
    for other in needs:
        _restore(other, recipe, store, progress, steps)
    if stage.asks_policy or stage.name == "synthesize":
        question_steps = [other for other in steps if other.kind in ("data", "test")]
        folders = {other.name: other.folder for other in question_steps}
        note_unfit_prompts(recipe, folders, progress.say)
    has_mark = (store.root / MARK).is_file()
    if not has_mark and store.made():
        progress.say(f"the store {store.root} is of an older version: its stages have other keys and are made again")

    def build(folder: Path) -> None:
        begin_or_resume(folder, step.name, progress.say)
        inputs = {other.kind: other.folder for other in needs}
        build_stage = pkgutil.resolve_name(stage.build)
        seen_recipe = seen_by(step.name, recipe)
        build_stage(Context(step.name, seen_recipe, folder, inputs, progress))

    def say_waiting() -> None:
        progress.say(f"{step.name}: another run is making it; waiting")

    manifest = about | {"made_by": facts()}
    folder = store.make(step.kind, step.key, build, manifest, say_waiting)
    return _stage_result(step, folder, cached=False)


def _stage_result(step: Step, folder: Path, cached: bool) -> StageResult:
    metrics = read_json(folder / "metrics.json")
    return StageResult(step.name, step.key, folder, metrics, cached)


def _restore(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> None:
    """Make a needed step again if it is damaged or gone."""
    store.set_aside(step.kind, step.key, True, progress.say)
    if not store.has(step.kind, step.key):
        execute(step, recipe, store, progress, steps)
    if step.kind != "model":
        return
    # It may refer to the weights of another run's checkpoint.
    base = base_of(step.folder) or ""
    stage = stage_at(base, store)
    if stage is None:
        return
    store.set_aside(*stage, True, progress.say)
    if not store.has(*stage):
        raise _lost_stage(*stage)


def _lost_stage(stage: str, key: str) -> DataError:
    return DataError(
        f"{stage}/{key} is damaged or gone, and this run does not make it",
        "Run what made it again (a night puts its parts together anew); for a champion: sqltrain champion rollback.",
    )
