"""The stage graph: the inputs, the settings and the making of each stage, and the plan of a run.

A stage's key hashes its name and version, the slice of the recipe that it reads, the keys of the stages that it needs
and its inputs outside the recipe (`fingerprints.py`): the files that readers read, local weights, the prompt, the model
behind an endpoint's name, and the versions of the libraries that it declares. Raise a stage's version when its code
gives other results.

Each benchmark of `data.test` has stages of its own. Those of the first have the plain names (`evaluate_grpo`), those
of another its name behind a dot (`evaluate_grpo.spider_dk`). They see a recipe with that benchmark alone, so a key does
not depend on the place in the list: one more benchmark trains nothing again, and evaluates nothing again on the others.
"""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace

from pipelines.core.errors import RecipeError
from pipelines.core.files import digest
from pipelines.core.provenance import code_digest
from pipelines.core.store import Store
from pipelines.recipe.config import Recipe, Source
from pipelines.stages.stage import CACHED, Stage, Step, kind_of
from pipelines.stages.stage_changes import why_to_make
from pipelines.stages.stage_keys import deciding

SAMPLING = ("protocol", "execution", "seed")
READING = ("data.max_bad_share", "data.linker", "data.values", "execution", "seed")
LEARNED = ("data.sft", "data.rl", "data.dev", "data.drop_empty", "data.cleaners")
ASKED = tuple(f"benchmark.{name}" for name in Source.model_fields)  # settings that decide a benchmark's questions
VERDICTS = ("evaluation", "benchmark.equality", "benchmark.equalities")
BENCHMARK = ("test", "leakage", "test_schema")  # stages that no training reads: another benchmark trains nothing again
OF_POOLS = ("data", "gold_schema")  # stages that read the training pools, and are for training alone
LEARNING = {"synthesize", "filter", "sft", "difficulty", "grpo"}  # stages that learn, or make what is learned
STAGES = "pipelines.stages"
TRAINING = ("sft", "grpo")  # stages that make a checkpoint by training, in their order
EVALUATED_MODELS = {"model": "before SFT", "sft": "after SFT", "grpo": "after GRPO"}  # evaluated models, and when
EVALUATIONS = tuple(f"evaluate_{model}" for model in EVALUATED_MODELS)  # stages

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
        build=f"{STAGES}.leakage_stage:build_leakage",
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
            *EVALUATIONS,
        ),
        build=f"{STAGES}.report:build_report",
        about="the HTML report",
        by_benchmark=True,
    ),
)


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
    stages = [stage for stage in GRAPH if stage.name in wanted]
    return by_benchmark(stages, recipe)


def evaluates_without_pools(recipe: Recipe) -> bool:
    """Whether a recipe only evaluates a model that is there, and has a training pool without a path.

    It then reads no training pool. Pools that all have a path are read, and a tiny model learns its tokens from them.
    """
    learns = bool(LEARNING.intersection(recipe.stages)) or recipe.model.source == "tiny"
    if learns or "evaluate" not in recipe.stages:
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
                needs = [f"{name}.{benchmark}" if name in copied else name for name in stage.needs]
                copy = replace(stage, name=f"{stage.name}.{benchmark}", needs=tuple(needs))
                copies.append(copy)
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
            folder = store.folder(stage.kind, key)
            steps.append(Step(stage.name, key, folder, True, CACHED, ()))
            continue
        # A key hashes the keys of the stages before it, so it is known before anything is made.
        needs = tuple(name for name in stage.needs if name in keys)
        input_keys = {name: keys[name] for name in needs}
        about = deciding(stage, recipe, input_keys, store)
        key = digest(about)
        keys[stage.name] = key
        folder = store.folder(stage.kind, key)
        why = why_to_make(stage.kind, key, about, store)
        step = Step(stage.name, key, folder, why == CACHED, why, needs)
        steps.append(step)
    return steps


def _stages_until(until: str, stages: list[Stage], recipe: Recipe) -> list[Stage]:
    """The stages up to the last one that is asked for; without an evaluation among them no benchmark is read."""
    names = [stage.name for stage in stages]
    last = until
    if until == "evaluate":
        evaluations = [name for name in names if name.startswith("evaluate_")]
        if evaluations:
            last = kind_of(evaluations[-1])
    ends = []
    for index, name in enumerate(names):
        if last in (name, kind_of(name)):
            ends.append(index)
    if not ends and last in OF_POOLS and evaluates_without_pools(recipe):
        overrides = [f"{key}.path=..." for key, pool in recipe.data.pools.items() if pool.lacks_path]
        listed = " ".join(overrides)
        message = f"{recipe.name} trains nothing here and has no path to its pools"
        raise RecipeError(message, f"Set {listed}")
    if not ends:
        listed = ", ".join(names)
        raise RecipeError(f"this recipe has no stage {until!r}", f"Its stages: {listed}.")
    stages = stages[: ends[-1] + 1]
    if kind_of(last) in BENCHMARK:
        return stages
    without_benchmark = [stage for stage in stages if stage.kind not in BENCHMARK]
    for stage in without_benchmark:
        if "test" in map(kind_of, stage.needs):
            return stages
    return without_benchmark
