"""The stage graph: the inputs, the key and the making of each stage.

A stage's key hashes its name and version, the slice of the recipe that it reads, the keys of the stages that it needs
and its inputs outside the recipe (`keys.py`): the files that readers read, local weights, the prompt, the model behind
an endpoint's name, and the versions of the libraries that it declares. Raise a stage's version when its code gives
other results.

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
from pipelines.stages.keys import cards, endpoints, fingerprint, nearest_changes, prompt_digest, stage_at, weights

SAMPLING = ("protocol", "execution", "seed")
READING = ("data.max_bad_share", "data.linker", "data.values", "execution", "seed")
LEARNED = ("data.sft", "data.rl", "data.dev", "data.drop_empty", "data.cleaners")
ASKED = tuple(f"benchmark.{name}" for name in Source.model_fields)  # what decides a benchmark's questions
VERDICTS = ("evaluation", "benchmark.equality", "benchmark.equalities")
CODE = "code.json"  # in a work folder's shards: the digest of the code that began it
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
    # those whose minor version decides its result. Libraries that only change rounding (torch, numpy) are recorded in
    # the manifest, not in the key: machines that share a store may have different ones.
    libraries: tuple[str, ...] = ()
    by_benchmark: bool = False  # whether each benchmark has one of its own.
    # whether it makes rollouts with the recipe's policy, and not with a teacher.
    asks_policy: bool = False


STAGES = "pipelines.stages"
EVALUATED_MODELS = {"model": "before SFT", "sft": "after SFT", "grpo": "after GRPO"}  # evaluated models, and when

GRAPH: tuple[Stage, ...] = (
    Stage(
        name="data",
        version=6,
        reads=(*LEARNED, *READING),
        needs=(),
        build=f"{STAGES}.data:build",
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
        build=f"{STAGES}.synthesize:build",
        about="teacher trajectories",
    ),
    Stage(
        name="filter",
        version=2,
        reads=("filter", *SAMPLING),
        needs=("data", "synthesize"),
        build=f"{STAGES}.curate:filter_trajectories",
        about="keep the right",
    ),
    Stage(
        name="gold_schema",
        version=3,
        reads=("gold_schema",),
        needs=("data",),
        build=f"{STAGES}.curate:gold_schema",
        about="schema consensus",
        libraries=("sqlglot",),
    ),
    Stage(
        name="test_schema",
        version=3,
        reads=("gold_schema",),
        needs=("test",),
        build=f"{STAGES}.curate:gold_schema",
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
        build=f"{STAGES}.difficulty:build",
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
            build=f"{STAGES}.evaluate:build",
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
        build=f"{STAGES}.report:build",
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
        """What the store calls it."""
        return kind_of(self.name)


@dataclass(frozen=True)
class Step(StagePlace):
    """One stage of one run."""

    cached: bool
    why: str  # why it must run, or that it is there.
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
        wanted |= {f"evaluate_{name}" for name in ("model", "sft", "grpo") if name in wanted}
        wanted |= {"test"} | ({"test_schema"} if "gold_schema" in wanted else set())
        wanted |= {"leakage"} if wanted & {"sft", "grpo"} else set()
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
    own = {stage.name for stage in GRAPH if stage.by_benchmark}
    others = [benchmark.name for benchmark in recipe.data.test[1:]]
    copies = []
    for stage in stages:
        copies.append(stage)
        for benchmark in others if stage.by_benchmark else ():
            needs = tuple(f"{name}.{benchmark}" if name in own else name for name in stage.needs)
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
    """
    code_digest()  # cached: this process runs the code that is there now, whatever is checked out later
    stages = active(recipe)
    # The stages up to the last one that is asked for; without an evaluation among them no benchmark is read.
    if until is not None:
        names = [stage.name for stage in stages]
        last = "evaluate_grpo" if until == "evaluate" and "evaluate_grpo" in names else until
        ends = [place for place, name in enumerate(names) if last in (name, kind_of(name))]
        if not ends and last in OF_POOLS and evaluates_without_pools(recipe):
            bare = [f"{key}.path=..." for key, pool in recipe.data.pools.items() if pool.lacks_path]
            message = f"{recipe.name} trains nothing here and has no path to its pools"
            raise RecipeError(message, f"Set {' '.join(bare)}")
        if not ends:
            raise RecipeError(f"this recipe has no stage {until!r}", f"Its stages: {', '.join(names)}.")
        stages = stages[: ends[-1] + 1]
        trains = [stage for stage in stages if kind_of(stage.name) not in BENCHMARK]
        if kind_of(last) not in BENCHMARK and not any("test" in map(kind_of, stage.needs) for stage in trains):
            stages = trains
    if among is not None:
        stages = [stage for stage in stages if stage.name in among]
    keys: dict[str, str] = {}
    steps = []
    for stage in stages:
        if given is not None and stage.name in given:
            keys[stage.name] = key = given[stage.name]
            steps.append(Step(stage.name, key, store.folder(kind_of(stage.name), key), True, "cached", ()))
            continue
        # A key hashes the keys of the stages before it, so it is known before anything is made.
        needs = tuple(name for name in stage.needs if name in keys)
        about = deciding(stage, recipe, {name: keys[name] for name in needs}, store)
        keys[stage.name] = key = digest(about)
        kind = kind_of(stage.name)
        wrong = store.damage(kind, key, whole=False) if store.has(kind, key) else []
        cached = store.has(kind, key) and not wrong
        if cached:
            why = "cached"
        elif wrong:
            why = f"damaged: {wrong[0]}"
        elif (work := store.work(kind, key)).is_dir():
            why = f"was interrupted: {'resumes' if can_resume(work) else 'the code has changed, begins anew'}"
        else:
            why = nearest_changes(store.root / kind, about) or "not made yet"
        steps.append(Step(stage.name, key, store.folder(kind, key), cached, why, needs))
    return steps


def execute(step: Step, recipe: Recipe, store: Store, progress: Progress, steps: Sequence[Step]) -> StageResult:
    """Make one step unless the store has it; damaged stages that it needs are set aside and made again first."""
    needs = [other for other in steps if other.name in step.needs]
    folders, keys = {other.kind: other.folder for other in needs}, {other.name: other.key for other in needs}
    store.set_aside(step.kind, step.key, False, progress.say)
    if store.has(step.kind, step.key):
        with contextlib.suppress(OSError):  # a store that cannot be written
            os.utime(step.folder)  # the time of its last use, by which gc goes
        return StageResult(step.name, step.key, step.folder, read_json(step.folder / "metrics.json"), True)
    stage = next(stage for stage in GRAPH if stage.name == step.kind)
    about = deciding(replace(stage, name=step.name), recipe, keys, store)
    if digest(about) != step.key:
        raise _gone(step.kind, step.key)
    for other in needs:
        store.set_aside(other.kind, other.key, True, progress.say)
        if not store.has(other.kind, other.key):
            execute(other, recipe, store, progress, steps)
        if other.kind == "model":
            # It may refer to the weights of another run's checkpoint.
            base = stage_at(base_of(other.folder) or "", store)
            if base is not None:
                store.set_aside(*base, True, progress.say)
                if not store.has(*base):
                    raise _gone(*base)

    if stage.asks_policy or stage.name == "synthesize":
        read = {other.name: other.folder for other in steps if other.kind in ("data", "test") and other.folder.is_dir()}
        key = (recipe.model_dump_json(), *map(str, read.values()))
        for line in () if key in _COUNTED else prompt_fit.check(recipe, read):
            progress.say(f"note: {line}")
        _COUNTED.add(key)
    if not (store.root / MARK).is_file() and store.made():
        progress.say(f"the store {store.root} is of an older version: its stages have other keys and are made again")

    def build(folder: Path) -> None:
        # An unchanged version promises the same results, but not that old shards and checkpoints can be used.
        if not can_resume(folder):
            progress.say(f"{step.name}: the code has changed since it was interrupted; begins anew")
            for path in folder.iterdir():
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        (folder / SHARDS).mkdir(exist_ok=True)
        write_json(folder / SHARDS / CODE, code_digest())
        build_stage = pkgutil.resolve_name(stage.build)
        build_stage(Context(step.name, seen_by(step.name, recipe), folder, folders, progress))

    line = f"{step.name}: another run is making it; waiting"
    folder = store.make(step.kind, step.key, build, about | {"made_by": facts()}, lambda: progress.say(line))
    return StageResult(step.name, step.key, folder, read_json(folder / "metrics.json"), False)


def can_resume(work: Path) -> bool:
    """Whether a work folder is empty or was begun by the code of today, in every byte."""
    return not any(work.iterdir()) or read_json(work / SHARDS / CODE) == code_digest()


def _gone(stage: str, key: str) -> DataError:
    return DataError(
        f"{stage}/{key} is damaged or gone, and this run does not make it",
        "Run what made it again (a night puts its parts together anew); for a champion: sqltrain champion rollback.",
    )


def seen_by(name: str, recipe: Recipe) -> Recipe:
    """The recipe that a stage sees: of the benchmarks, its own alone."""
    return recipe.on(benchmark_of(name))


def deciding(stage: Stage, recipe: Recipe, inputs: dict[str, str], store: Store) -> dict[str, Any]:
    """All that decides a stage's result; the manifest keeps it and the key is its digest. `inputs` are the keys of the
    stages that it needs, by their names.
    """
    recipe, kind = seen_by(stage.name, recipe), kind_of(stage.name)
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
    # A policy of ours only carries out the sampling that the recipe states; that of a plug-in depends on its code.
    code = plugin_code(about["recipe"] | (recipe.slice("rollout.policy") if stage.asks_policy else {}))
    code |= dialect_code(recipe.plugins) if "execution" in stage.reads else {}
    if code:
        about["plugins"] = code
    if f"policy {recipe.rollout.policy}" in code:
        about["policy"] = recipe.slice("rollout.policy", "rollout.options")
    data = recipe.data
    if kind in ("data", "test") and data.linker in (LOCAL, FIT):
        about["recipe"] |= recipe.slice("data.linker_tokens", "protocol.prompt")
    if kind in ("data", "test"):  # all other stages read databases that these name, and have their keys in theirs
        sources = (data.sft, *data.rl, data.dev) if kind == "data" else data.test
        about["sources"] = fingerprint(sources, store.root)
        described = cards(sources, store.root)
        about |= {"cards": described} if described else {}
    own = kind == "synthesize" and "policy" in {teacher.kind for teacher in recipe.synthesis.teachers}
    if own:
        about["recipe"] |= recipe.slice("model")
    if kind == "model" or own:
        about["weights"] = weights(recipe.model.source, store)
    endpoints_asked = endpoints(recipe, kind)
    if endpoints_asked:
        about["endpoints"] = dict(endpoints_asked)
    if stage.libraries:
        # The first two numbers of each version: a patch mends what was wrong.
        versions = {name: version(name) for name in stage.libraries}
        about["libraries"] = {name: number and ".".join(number.split(".")[:2]) for name, number in versions.items()}
    return about
