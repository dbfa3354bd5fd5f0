"""The stage graph: the inputs, the key and the making of each stage.

A stage's key hashes its name and version, the slice of the recipe that it reads, the keys of the stages that it needs
and its inputs outside the recipe (`fingerprints.py`): the files that readers read, local weights, the prompt, the model
behind an endpoint's name, and the versions of the libraries that it declares. Raise a stage's version when its code
gives other results.

Each benchmark of `data.test` has stages of its own. Those of the first have the plain names (`evaluate_grpo`), those
of another its name behind a dot (`evaluate_grpo.spider_dk`). They see a recipe with that benchmark alone, so a key does
not depend on the place in the list: one more benchmark trains nothing again, and evaluates nothing again on the others.
"""

import contextlib
import os
import pkgutil
import shutil
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipelines.benchmarks.prompt_schema import FIT, LOCAL
from pipelines.core.errors import DataError, RecipeError
from pipelines.core.files import read_json, write_json
from pipelines.core.provenance import code_digest, facts, version
from pipelines.core.store import MARK, SHARDS, Store
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import Recipe, Source
from pipelines.recipe.plugins import dialect_code, plugin_code
from pipelines.recipe.recipes import digest
from pipelines.stages import prompt_fit
from pipelines.stages.context import Context, Progress, base_of
from pipelines.stages.fingerprints import cards, endpoint_fingerprints, fingerprint, prompt_digest, stage_at, weights
from pipelines.stages.stage_changes import nearest_changes

SAMPLING = ("protocol", "execution", "seed")
READING = ("data.max_bad_share", "data.linker", "data.values", "execution", "seed")
LEARNED = ("data.sft", "data.rl", "data.dev", "data.drop_empty", "data.cleaners")
ASKED = tuple(f"benchmark.{name}" for name in Source.model_fields)  # settings that decide a benchmark's questions
VERDICTS = ("evaluation", "benchmark.equality", "benchmark.equalities")
CODE = "code.json"  # in a work folder's shards: the digest of the code that began it
CACHED = "cached"  # why a stage need not run
_COUNTED: set[tuple[str, ...]] = set()  # recipes, and folders of questions, whose prompts this process has counted
BENCHMARK = ("test", "leakage", "test_schema")  # stages that no training reads: another benchmark trains nothing again
OF_POOLS = ("data", "gold_schema")  # stages that read the training pools, and are for training alone
LEARNING = {"synthesize", "filter", "sft", "difficulty", "grpo"}  # stages that learn, or make what is learned


@dataclass(frozen=True)
class Stage:
    """One stage."""

    name: str  # unique in a run; before its first dot, the kind of stage, which is the folder's name in the store.
    version: int
    reads: tuple[str, ...]  # dotted paths of the recipe that decide its result.
    needs: tuple[str, ...]  # stages whose folders it reads; those that the recipe leaves out are skipped.
    build: str  # the function that fills the work folder, as "module:function"; its module is imported when it runs.
    about: str
    # Libraries whose minor version decides its result. Those that only change rounding (torch, numpy) are recorded in
    # the manifest, not in the key: machines that share a store may have different ones.
    libraries: tuple[str, ...] = ()
    by_benchmark: bool = False  # whether each benchmark has one of its own.
    asks_policy: bool = False  # whether it makes rollouts with the recipe's policy, and not with a teacher.


STAGES = "pipelines.stages"
EVALUATED_MODELS = {"model": "before SFT", "sft": "after SFT", "grpo": "after GRPO"}  # evaluated models, and when

GRAPH: tuple[Stage, ...] = (
    Stage(
        name="data",
        version=6,
        reads=(*LEARNED, *READING),
        needs=(),
        build=f"{STAGES}.data:build_pools",
        about="read and check the questions",
        libraries=("sqlglot",),
    ),
    Stage(
        name="test",
        version=4,
        reads=(*ASKED, *READING),
        needs=(),
        build=f"{STAGES}.data:build_test",
        about="the held-out questions",
        libraries=("sqlglot",),
        by_benchmark=True,
    ),
    Stage(
        name="leakage",
        version=4,
        reads=(),
        needs=("data", "test"),
        build=f"{STAGES}.data:build_leakage",
        about="training questions that are held out, too",
        by_benchmark=True,
    ),
    Stage(
        name="synthesize",
        version=5,
        reads=("synthesis", *SAMPLING),
        needs=("data",),
        build=f"{STAGES}.synthesize:synthesize",
        about="teacher trajectories",
    ),
    Stage(
        name="filter",
        version=2,
        reads=("filter", *SAMPLING),
        needs=("data", "synthesize"),
        build=f"{STAGES}.filter_stage:filter_trajectories",
        about="keep the right",
    ),
    Stage(
        name="gold_schema",
        version=3,
        reads=("gold_schema",),
        needs=("data",),
        build=f"{STAGES}.gold_schema_stage:write_gold_schemas",
        about="schema consensus",
        libraries=("sqlglot",),
    ),
    Stage(
        name="test_schema",
        version=3,
        reads=("gold_schema",),
        needs=("test",),
        build=f"{STAGES}.gold_schema_stage:write_gold_schemas",
        about="the same, held out",
        libraries=("sqlglot",),
        by_benchmark=True,
    ),
    Stage(
        name="model",
        version=1,
        reads=("model", "protocol", "seed"),
        needs=("data", "filter"),
        build=f"{STAGES}.train:model",
        about="the base model",
    ),
    Stage(
        name="sft",
        version=2,
        reads=("sft", "seed"),
        needs=("filter", "model"),
        build=f"{STAGES}.train:sft",
        about="supervised fine-tuning",
        libraries=("trl",),
    ),
    Stage(
        name="difficulty",
        version=4,
        reads=("difficulty", *SAMPLING),
        needs=("data", "filter", "model", "sft"),
        build=f"{STAGES}.difficulty:score_difficulty",
        about="pass@G and S(q)",
        asks_policy=True,
    ),
    Stage(
        name="grpo",
        version=11,
        reads=("grpo", "rewards", *SAMPLING),
        needs=("data", "gold_schema", "model", "sft", "difficulty"),
        build=f"{STAGES}.train:grpo",
        about="multi-turn GRPO",
        libraries=("trl",),
        asks_policy=True,
    ),
    *(
        Stage(
            name=f"evaluate_{model}",
            version=13,
            reads=(*VERDICTS, *SAMPLING),
            needs=("test", "test_schema", model),
            build=f"{STAGES}.evaluation_stage:build",
            about=f"held-out EX {when}",
            by_benchmark=True,
            asks_policy=True,
        )
        for model, when in EVALUATED_MODELS.items()
    ),
    Stage(
        name="report",
        version=11,
        reads=("name", "title", "paper", "benchmark.name"),
        needs=(
            *("data", "test", "synthesize", "filter", "gold_schema", "sft", "difficulty", "grpo"),
            *("evaluate_model", "evaluate_sft", "evaluate_grpo"),
        ),
        build=f"{STAGES}.report:build_report",
        about="the HTML report",
        by_benchmark=True,
    ),
)


def kind_of(name: str) -> str:
    """The kind of a stage, which is its folder's name in the store: "evaluate_grpo" of "evaluate_grpo.spider_dk"."""
    return name.partition(".")[0]


def benchmark_of(name: str) -> str:
    """The benchmark that a stage is for, if it is not the first; "" for any other stage."""
    return name.partition(".")[2]


@dataclass(frozen=True)
class StagePlace:
    """The place of one run's stage in the store."""

    name: str
    key: str
    folder: Path

    @property
    def kind(self) -> str:
        """The stage's name in the store."""
        return kind_of(self.name)


@dataclass(frozen=True)
class Step(StagePlace):
    """One stage of one run."""

    cached: bool
    why: str  # why it must run, or "cached".
    needs: tuple[str, ...]  # names of the steps whose folders it reads.


@dataclass(frozen=True)
class StageResult(StagePlace):
    """A finished stage, its summary, and whether it was there before."""

    metrics: dict[str, float]
    cached: bool


def active(recipe: Recipe) -> list[Stage]:
    """The stages that a recipe runs, in order."""
    wanted = {"data", "model", *recipe.stages}
    if "evaluate" in wanted:
        wanted |= {f"evaluate_{name}" for name in EVALUATED_MODELS if name in wanted}
        wanted.add("test")
        if "gold_schema" in wanted:
            wanted.add("test_schema")
        if wanted & {"sft", "grpo"}:
            wanted.add("leakage")
    if "report" in wanted:
        wanted.add("test")
    if evaluates_without_pools(recipe):
        wanted -= set(OF_POOLS)
    return by_benchmark([stage for stage in GRAPH if stage.name in wanted], recipe)


def evaluates_without_pools(recipe: Recipe) -> bool:
    """Whether a recipe only evaluates a model that is there, and has a training pool without a path.

    It then reads no training pool. Pools that all have a path are read, and a tiny model learns its tokens from them.
    """
    if "evaluate" not in recipe.stages or LEARNING & set(recipe.stages) or recipe.model.source == "tiny":
        return False
    return any(pool.lacks_path for pool in recipe.data.pools.values())


def by_benchmark(stages: Sequence[Stage], recipe: Recipe) -> list[Stage]:
    """The stages, and behind each that every benchmark has, those of the benchmarks after the first."""
    copied = {stage.name for stage in GRAPH if stage.by_benchmark}
    others = [benchmark.name for benchmark in recipe.data.test[1:]]
    copies = []
    for stage in stages:
        copies.append(stage)
        if stage.by_benchmark:
            for benchmark in others:
                needs = tuple(f"{name}.{benchmark}" if name in copied else name for name in stage.needs)
                copies.append(replace(stage, name=f"{stage.name}.{benchmark}", needs=needs))
    return copies


def plan(
    recipe: Recipe,
    store: Store,
    until: str | None = None,
    given: Mapping[str, str] | None = None,
    among: Container[str] | None = None,
) -> list[Step]:
    """The steps of a run with their keys, in order, up to and including `until`.

    A run that ends before the first evaluation reads no benchmark.

    Args:
        until: a stage's name; that of a benchmark's stage without the benchmark is its stage of the last one.
        among: only these stages, which need no other; nothing is asked of the sources of others.
        given: keys of finished stages to go on from, by name, in place of the recipe's own.

    Raises:
        RecipeError: the recipe has no stage `until`.
    """
    code_digest()  # cached: this process runs the code that is there now, whatever is checked out later
    stages = active(recipe)
    if until is not None:
        stages = _stages_until(until, stages, recipe)
    if among is not None:
        stages = [stage for stage in stages if stage.name in among]
    keys: dict[str, str] = {}
    steps = []
    for stage in stages:
        if given is not None and stage.name in given:
            key = given[stage.name]
            keys[stage.name] = key
            steps.append(Step(stage.name, key, store.folder(kind_of(stage.name), key), True, CACHED, ()))
            continue
        # A key hashes the keys of the stages before it, so it is known before anything is made.
        needs = tuple(name for name in stage.needs if name in keys)
        about = deciding(stage, recipe, {name: keys[name] for name in needs}, store)
        key = digest(about)
        keys[stage.name] = key
        kind = kind_of(stage.name)
        why = _why(store, kind, key, about)
        steps.append(Step(stage.name, key, store.folder(kind, key), why == CACHED, why, needs))
    return steps


def _stages_until(until: str, stages: list[Stage], recipe: Recipe) -> list[Stage]:
    """The stages up to the last one that is asked for; without an evaluation among them no benchmark is read."""
    names = [stage.name for stage in stages]
    last = until
    if until == "evaluate":
        evaluations = [name for name in names if name.startswith("evaluate_")]
        if evaluations:
            last = kind_of(evaluations[-1])
    ends = [index for index, name in enumerate(names) if last in (name, kind_of(name))]
    if not ends and last in OF_POOLS and evaluates_without_pools(recipe):
        without_path = [f"{key}.path=..." for key, pool in recipe.data.pools.items() if pool.lacks_path]
        message = f"{recipe.name} trains nothing here and has no path to its pools"
        raise RecipeError(message, f"Set {' '.join(without_path)}")
    if not ends:
        raise RecipeError(f"this recipe has no stage {until!r}", f"Its stages: {', '.join(names)}.")
    stages = stages[: ends[-1] + 1]
    if kind_of(last) in BENCHMARK:
        return stages
    without_benchmark = [stage for stage in stages if kind_of(stage.name) not in BENCHMARK]
    reads_benchmark = any("test" in map(kind_of, stage.needs) for stage in without_benchmark)
    return stages if reads_benchmark else without_benchmark


def _why(store: Store, kind: str, key: str, about: Mapping[str, Any]) -> str:
    """Why a stage must run; `CACHED` if it need not."""
    if store.has(kind, key):
        damage = store.damage(kind, key, whole=False)
        return f"damaged: {damage[0]}" if damage else CACHED
    work = store.work(kind, key)
    if work.is_dir():
        return f"was interrupted: {'resumes' if can_resume(work) else 'the code has changed, begins anew'}"
    return nearest_changes(store.root / kind, about) or "not made yet"


def execute(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> StageResult:
    """Make one step unless the store has it; damaged stages that it needs are set aside and made again first."""
    needs = [other for other in steps if other.name in step.needs]
    store.set_aside(step.kind, step.key, False, progress.say)
    if store.has(step.kind, step.key):
        with contextlib.suppress(OSError):  # a store that cannot be written
            os.utime(step.folder)  # the time of its last use, by which gc goes
        return StageResult(step.name, step.key, step.folder, read_json(step.folder / "metrics.json"), True)
    stage = next(stage for stage in GRAPH if stage.name == step.kind)
    keys = {other.name: other.key for other in needs}
    about = deciding(replace(stage, name=step.name), recipe, keys, store)
    if digest(about) != step.key:
        raise _gone(step.kind, step.key)
    for other in needs:
        _restore(other, recipe, store, progress, steps)
    if stage.asks_policy or stage.name == "synthesize":
        _note_unfit_prompts(recipe, progress, steps)
    if not (store.root / MARK).is_file() and store.made():
        progress.say(f"the store {store.root} is of an older version: its stages have other keys and are made again")

    def build(folder: Path) -> None:
        # An unchanged version promises the same results, but not that old shards and checkpoints can be used.
        if not can_resume(folder):
            progress.say(f"{step.name}: the code has changed since it was interrupted; begins anew")
            _empty(folder)
        (folder / SHARDS).mkdir(exist_ok=True)
        write_json(folder / SHARDS / CODE, code_digest())
        folders = {other.kind: other.folder for other in needs}
        build_stage = pkgutil.resolve_name(stage.build)
        build_stage(Context(step.name, seen_by(step.name, recipe), folder, folders, progress))

    line = f"{step.name}: another run is making it; waiting"
    folder = store.make(step.kind, step.key, build, about | {"made_by": facts()}, lambda: progress.say(line))
    return StageResult(step.name, step.key, folder, read_json(folder / "metrics.json"), False)


def _restore(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> None:
    """Make a needed step again if it is damaged or gone."""
    store.set_aside(step.kind, step.key, True, progress.say)
    if not store.has(step.kind, step.key):
        execute(step, recipe, store, progress, steps)
    if step.kind == "model":
        # It may refer to the weights of another run's checkpoint.
        base = stage_at(base_of(step.folder) or "", store)
        if base is not None:
            store.set_aside(*base, True, progress.say)
            if not store.has(*base):
                raise _gone(*base)


def _note_unfit_prompts(recipe: Recipe, progress: Progress, steps: Sequence[Step]) -> None:
    """Count, once in a process, the questions whose prompts have no room for an answer."""
    folders = {step.name: step.folder for step in steps if step.kind in ("data", "test") and step.folder.is_dir()}
    key = (recipe.model_dump_json(), *map(str, folders.values()))
    if key not in _COUNTED:
        for line in prompt_fit.require_fit(recipe, folders):
            progress.say(f"note: {line}")
    _COUNTED.add(key)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def can_resume(work: Path) -> bool:
    """Whether a work folder is empty or was begun by the code of today, in every byte."""
    return not any(work.iterdir()) or read_json(work / SHARDS / CODE) == code_digest()


def _gone(stage: str, key: str) -> DataError:
    return DataError(
        f"{stage}/{key} is damaged or gone, and this run does not make it",
        "Run what made it again (a night puts its parts together anew); for a champion: sqltrain champion rollback.",
    )


def seen_by(name: str, recipe: Recipe) -> Recipe:
    """The recipe that a stage sees: its own benchmark is the only one."""
    return recipe.on(benchmark_of(name))


def deciding(stage: Stage, recipe: Recipe, inputs: dict[str, str], store: Store) -> dict[str, Any]:
    """Everything that decides a stage's result; the manifest keeps it and the key is its digest.

    Args:
        inputs: the keys of the stages that it needs, by their names.
    """
    recipe = seen_by(stage.name, recipe)
    kind = kind_of(stage.name)
    about: dict[str, Any] = {
        "stage": kind,
        "version": stage.version,
        "recipe": recipe.slice(*stage.reads),
        "inputs": {kind_of(name): key for name, key in inputs.items()},
    }
    if "protocol" in stage.reads:
        about["prompt"] = prompt_digest(recipe.protocol)
    if "evaluation" in stage.reads and recipe.evaluation.forced_single_turn:
        about["prompt_at_once"] = prompt_digest(single_turn(recipe.protocol)[0])
    about |= _deciding_plugins(stage, recipe, about["recipe"])
    if kind in ("data", "test"):  # all other stages read databases that these name, and have their keys in theirs
        if recipe.data.linker in (LOCAL, FIT):
            about["recipe"] |= recipe.slice("data.linker_tokens", "protocol.prompt")
        data = recipe.data
        sources = (data.sft, *data.rl, data.dev) if kind == "data" else data.test
        about["sources"] = fingerprint(sources, store.root)
        described = cards(sources, store.root)
        if described:
            about["cards"] = described
    teaches_itself = kind == "synthesize" and any(teacher.kind == "policy" for teacher in recipe.synthesis.teachers)
    if teaches_itself:
        about["recipe"] |= recipe.slice("model")
    if kind == "model" or teaches_itself:
        about["weights"] = weights(recipe.model.source, store)
    endpoints_asked = endpoint_fingerprints(recipe, kind)
    if endpoints_asked:
        about["endpoints"] = endpoints_asked
    if stage.libraries:
        about["libraries"] = {name: _minor_version(name) for name in stage.libraries}
    return about


def _deciding_plugins(stage: Stage, recipe: Recipe, values: Mapping[str, Any]) -> dict[str, Any]:
    """The code of the plug-ins that a stage uses, and the policy's settings if the policy is a plug-in.

    A policy of ours only carries out the sampling that the recipe states; that of a plug-in depends on its code.
    """
    policy = recipe.slice("rollout.policy") if stage.asks_policy else {}
    code = plugin_code({**values, **policy})
    if "execution" in stage.reads:
        code |= dialect_code(recipe.plugins)
    found: dict[str, Any] = {}
    if code:
        found["plugins"] = code
    if f"policy {recipe.rollout.policy}" in code:
        found["policy"] = recipe.slice("rollout.policy", "rollout.options")
    return found


def _minor_version(library: str) -> str | None:
    """The first two numbers of an installed library's version, for a patch mends errors; None if it is missing."""
    number = version(library)
    if not number:
        return number
    return ".".join(number.split(".")[:2])
