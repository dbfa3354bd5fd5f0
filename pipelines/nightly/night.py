"""One night of retraining: new questions are curated and learned, and the challenger is compared with the champion."""

import contextlib
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from pipelines.core.errors import BoundaryError, DataError, RecipeError, warn_once
from pipelines.core.files import read_json
from pipelines.core.removal import remove_folder
from pipelines.core.store import Store
from pipelines.curation.leakage import SAME_QUESTION
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.record_files import read_records
from pipelines.nightly import inbox
from pipelines.nightly.ledger import NOBODY, Champion, ChampionChanged, Ledger
from pipelines.nightly.promotion import (
    HeldOutRecords,
    PromotionDecision,
    decide_promotion,
    question_drift,
    trained_on,
)
from pipelines.nightly.union import UnionPart, unite
from pipelines.recipe import recipes
from pipelines.recipe.config import Benchmark, Recipe, Source
from pipelines.stages import graph
from pipelines.stages.context import LEAKAGE, QUARANTINE, examples
from pipelines.stages.stage import StageResult, Step, kind_of

log = logging.getLogger(__name__)
Walk = Callable[[Recipe, Store, Sequence[Step], str], list[StageResult]]
CURATION = ("data", "test", "leakage", "synthesize", "filter", "gold_schema")
# Stages of curation that there are for each set of held-out questions, by what is curated.
BASE_FOR_EACH = ("test",)  # the recipe's own data: it may train on what a guard asks
BATCH_FOR_EACH = ("test", "leakage")
RETRAINING = ("filter", "gold_schema", "sft", "difficulty", "grpo")  # stages that are made on a union
Keys = Mapping[str, str]  # names of finished stages -> their keys
NOTHING_NEW: dict[str, Any] = {"decision": "nothing", "reason": "no new questions", "new": []}


@dataclass(frozen=True)
class NightContext:
    """A recipe, its store, and the two functions that make stages and check their contracts."""

    name: str  # the recipe's name as the user gave it; guards are laid over the same
    overrides: Sequence[str]
    recipe: Recipe
    store: Store
    walk: Walk  # makes stages: the plain run, or Prefect; its last argument is their role, in a word
    check: Callable[[StageResult, Recipe], object]  # raises DataError if the stage breaks its contract
    stages: list[StageResult] = field(default_factory=list)  # stages that were made or found so far

    @property
    def ledger(self) -> Ledger:
        """The ledger of the recipe's nights."""
        return Ledger(self.store, self.recipe.name)

    def make(self, recipe: Recipe, steps: Sequence[Step], role: str = "") -> dict[str, StageResult]:
        """Make steps and remember their stages; the role of the challenger, whose figures nights compare, is ""."""
        finished = self.walk(recipe, self.store, steps, role)
        self.stages.extend(finished)
        return {stage.name: stage for stage in finished}

    def check_finished(self, step: Step) -> None:
        """Check the contract of a step that is made already."""
        stage = StageResult(step.name, step.key, step.folder, {}, True)
        self.check(stage, self.recipe)


@dataclass(frozen=True)
class UntrainedModel:
    """A model that no night trained."""

    stage: str
    key: str


@dataclass(frozen=True)
class Challenger:
    """The checkpoint that a night trained."""

    stage: str
    key: str
    base: str  # key of the model that it started from
    learned: tuple[str, ...]  # names of the batches that it has learned, its champion's included
    start: str = ""  # key of the champion whose weights that model has; "" for the recipe's own


def night_title(recipe: Recipe, store: Store) -> str:
    """The recipe's name and the number of the night that begins."""
    lines = Ledger(store, recipe.name).lines()
    nights = sum(line["event"] == "night" for line in lines)
    return f"{recipe.name} night {nights + 1}"


def guards(name: str, overrides: Sequence[str], recipe: Recipe) -> dict[str, Recipe]:
    """The recipe, by its name and overrides, over the questions of each guard, without their gold schemas."""
    guards = {}
    for include in recipe.nightly.guards:
        guard = recipes.load(name, [*overrides, f"include={include}"])
        reason = _missing_questions(guard.benchmark)
        if reason:
            hint = "Run: sqltrain data add NAME PATH, and name local/NAME there."
            raise RecipeError(f"nightly.guards: {include}: {reason}", hint)
        stages = [stage for stage in guard.stages if stage != "gold_schema"]
        guards[include] = guard.model_copy(update={"stages": tuple(stages)})
    return guards


def _missing_questions(benchmark: Benchmark) -> str:
    """Why a benchmark's questions cannot be read; "" if they are there, or on a server."""
    if benchmark.kind == "miniature":
        return ""
    path = str(benchmark.path or "")
    if not path:
        return "no path to its questions"
    file = Path(path).expanduser()
    if "://" in path or file.exists():
        return ""
    return f"nothing is at {path}"


def _with_all_held_out(recipe: Recipe, guard_recipes: Iterable[Recipe]) -> Recipe:
    """The recipe with its guards' questions as further benchmarks, so that curation looks for them among new ones.

    Of its own further benchmarks, by which no night decides, those whose questions are not there are left out with a
    warning.
    """
    first, *others = recipe.data.test
    benchmarks = [first]
    for benchmark in others:
        why = _missing_questions(benchmark)
        if why:
            warn_once(log, "new questions may ask what benchmark %s asks: %s", benchmark.name, why)
        else:
            benchmarks.append(benchmark)
    for number, guard in enumerate(guard_recipes, 1):
        # Its own name may be that of one of the recipe's.
        benchmark = guard.benchmark.model_copy(update={"name": f"guard-{number}"})
        benchmarks.append(benchmark)
    data = recipe.data.model_copy(update={"test": tuple(benchmarks)})
    return recipe.model_copy(update={"data": data})


def run_night(context: NightContext, day: date | None = None) -> dict[str, Any]:
    """Run one night, or the replay of a day's files, and return its line of the ledger.

    Nothing is trained if the inbox holds nothing new; the replay of such a day leaves no line. A new batch that breaks
    a contract stops the night and is taken back: its rows are new again, so the mended and the good ones come with the
    next night. A batch on which an earlier night decided stops it too, and stays.
    """
    recipe = context.recipe
    guard_recipes = guards(context.name, context.overrides, recipe)  # a mistake in them should not cost a training
    all_held_out = _with_all_held_out(recipe, guard_recipes.values())
    ledger = context.ledger
    with ledger.locked():
        inbox.freeze_batch(recipe.nightly, ledger.batches, day)
        fresh = ledger.undecided()  # a later day's batch may be among them, if a replay was killed
        if not fresh and day is not None:
            return dict(NOTHING_NEW)
        if not fresh and ledger.incumbent(recipe.nightly.tier) is not None:
            return ledger.add("night", **NOTHING_NEW)
        base = _curate(context, all_held_out, "base", BASE_FOR_EACH)
        batches = {}
        for path in ledger.usable():
            is_fresh = path in fresh
            batches[path.name] = _admit(context, all_held_out, path, base, is_fresh)
        challenger = _train_challenger(context, base, batches)
        curated = (base, *batches.values())
        return conclude(context, challenger, curated, fresh)


def _train_challenger(context: NightContext, base: Keys, batches: Mapping[str, Keys]) -> Challenger:
    """Train the champion further, or the recipe's base anew on all batches."""
    recipe = context.recipe
    start = None
    start_key = ""
    if recipe.nightly.start == "champion":
        start = context.ledger.incumbent(recipe.nightly.tier)
    if start is not None:
        start_key = start.key
    united = _unite_batches(context, start, base, batches)
    training = _training_recipe(context, start, united["data"])
    steps = graph.plan(training, context.store, given=united)
    try:
        for step in steps:
            if step.name in united:
                context.check_finished(step)
    except DataError as error:
        undecided = context.ledger.undecided()
        if not undecided:
            raise
        raise _refuse_batches(context.ledger, undecided, error) from error
    finished = context.make(training, steps)
    training_stages = [name for name in graph.TRAINING if name in finished]
    last_stage = training_stages[-1]
    return Challenger(
        stage=last_stage,
        key=finished[last_stage].key,
        base=finished["model"].key,
        learned=tuple(batches),
        start=start_key,
    )


def _unite_batches(
    context: NightContext, start: Champion | None, base: Keys, batches: Mapping[str, Keys]
) -> dict[str, str]:
    """The union of the recipe's own stages and the batches': all are fresh to a base that is trained anew."""
    learned: Sequence[str] = ()
    replay = None
    if start is not None:
        learned = start.batches
        replay = context.recipe.nightly.replay
    parts = [UnionPart(base, fresh=start is None)]
    for name, keys in batches.items():
        is_fresh = name not in learned
        parts.append(UnionPart(keys, is_fresh))
    return unite(context.store, parts, replay, context.recipe.seed)


def _training_recipe(context: NightContext, start: Champion | None, data_key: str) -> Recipe:
    """The recipe's training stages alone, on a union's data, from the champion's weights if there is one."""
    recipe = context.recipe
    stages = tuple(name for name in recipe.stages if name in RETRAINING)
    if set(stages).isdisjoint(graph.TRAINING):
        raise RecipeError(f"recipe {recipe.name} has neither sft nor grpo", "There is nothing to retrain.")
    union_folder = context.store.folder("data", data_key)
    metrics = read_json(union_folder / "metrics.json")
    n_sources = int(metrics["rl_sources"])
    # The union's rows are made already; only the number of their sources is read.
    rl = (Source(kind="jsonl"),) * n_sources
    data = recipe.data.model_copy(update={"rl": rl})
    model = recipe.model
    if start is not None:
        weights = context.store.folder(start.stage, start.key) / "model"
        model = model.model_copy(update={"source": str(weights)})
    difficulty = recipe.difficulty
    # A champion's RL questions are of new batches alone, and these may be as many as the recipe's sources.
    has_own_sources = start is None and n_sources == len(recipe.data.rl)
    if not has_own_sources:
        difficulty = difficulty.model_copy(update={"explore_parts": ()})
    changes = {"stages": stages, "data": data, "model": model, "difficulty": difficulty}
    return recipe.model_copy(update=changes)


def conclude(
    context: NightContext, challenger: Challenger, curated: Sequence[Keys], fresh: Sequence[Path] = ()
) -> dict[str, Any]:
    """Compare a challenger with the champion, write the line of the ledger that decides, and return it.

    If the champion is rolled back before the line is written, the one before it is compared.

    Args:
        curated: keys of the stages that it learned from, which the store keeps.
        fresh: batches about which this decides.
    """
    ledger = context.ledger
    tier = context.recipe.nightly.tier
    names_of_fresh = [path.name for path in fresh]
    curated_stages: set[tuple[str, str]] = set()
    for keys in curated:
        for name, key in keys.items():
            curated_stages.add((kind_of(name), key))
    challenger_named = {"stage": challenger.stage, "key": challenger.key}
    while True:
        champion = ledger.incumbent(tier)
        withdrawn = ledger.withdrawn()
        champion_named = None
        standing = NOBODY
        if champion is not None:
            withdrawn.discard(champion.key)  # a checkpoint that one tier rolled back may stand in the other
            champion_named = {"stage": champion.stage, "key": champion.key}
            standing = champion.key
        verdict = compare_with_champion(context, challenger, champion, withdrawn)
        made_stages = []
        for stage in context.stages:
            if not stage.cached:
                made_stages.append(f"{stage.name}/{stage.key}")
        with contextlib.suppress(ChampionChanged):
            return ledger.add(
                "night",
                standing=standing,
                decision=verdict.decision,
                reason=verdict.reason,
                numbers=verdict.numbers,
                new=names_of_fresh,
                rows=_n_rows(fresh),
                held_out=_n_held_out(fresh),
                challenger=challenger_named,
                champion=champion_named,
                learned=challenger.learned,
                stages=sorted(curated_stages),
                made=sorted(made_stages),
                tier=tier,
            )


def _n_held_out(batches: Sequence[Path]) -> int:
    """How many rows of batches ask held-out questions."""
    count = 0
    for batch in batches:
        count += len(inbox.held_out_rows(batch))
    return count


def _n_rows(batches: Sequence[Path]) -> int:
    """How many rows batches took, those that ask held-out questions included."""
    count = 0
    for batch in batches:
        digests = read_json(batch / inbox.ROWS)
        count += len(digests)
    return count


def _curation_steps(context: NightContext, recipe: Recipe, for_each: Collection[str]) -> list[Step]:
    """The steps of a recipe's curated stages.

    Args:
        for_each: kinds of stages that each of its benchmarks has; the others are for the first alone.
    """
    among = set(CURATION)
    for stage in graph.active(recipe):
        if stage.kind in for_each:
            among.add(stage.name)
    return graph.plan(recipe, context.store, among=among)


def _curate(context: NightContext, recipe: Recipe, role: str, for_each: Collection[str]) -> Keys:
    """The keys of a recipe's curated stages, each checked against its contract; finished ones are not walked again."""
    steps = _curation_steps(context, recipe, for_each)
    if not all(step.cached for step in steps):
        finished = context.make(recipe, steps, role)
        return {name: stage.key for name, stage in finished.items()}
    for step in steps:
        context.check_finished(step)
    return {step.name: step.key for step in steps}


def _admit(context: NightContext, all_held_out: Recipe, batch: Path, base: Keys, is_fresh: bool) -> Keys:
    """A batch's curated stages; rows that ask held-out questions are taken out of it first.

    Args:
        all_held_out: the recipe with all benchmarks whose questions are looked for.

    Raises:
        DataError: the batch cannot be used. A fresh one is taken back; one that a champion may have learned stays.
    """
    # The batch stands in place of the training pools; the held-out questions stay the recipe's.
    questions = batch / inbox.QUESTIONS
    source = Source(kind="jsonl", path=str(questions))
    data = all_held_out.data.model_copy(update={"sft": source, "rl": (source,)})
    recipe = all_held_out.model_copy(update={"data": data})
    try:
        keys = _curate(context, recipe, "batch", BATCH_FOR_EACH)
        if is_fresh:
            _check_drift(context, base, keys)
    except DataError as error:
        steps = _curation_steps(context, recipe, BATCH_FOR_EACH)
        repeats = _held_out_repeats(steps)
        if inbox.set_held_out_aside(batch, repeats):
            return _admit(context, all_held_out, batch, base, is_fresh)
        if not is_fresh:
            problem = f"the batch {batch.name}, on which an earlier night decided, cannot be used any more"
            hint = f"If its databases were moved, put them back; to go on without it, remove {batch}"
            raise DataError(f"{problem}: {error.message}", f"{error.hint} {hint}".strip()) from error
        bad_rows = _quarantine(context.store, steps[0])
        raise _refuse_batches(context.ledger, [batch], error, bad_rows) from error
    return keys


def _check_drift(context: NightContext, base: Keys, batch: Keys) -> None:
    """Raise DataError if a batch's questions lie too far from those that were learned."""
    learned_folder = context.store.folder("data", base["data"])
    learned = examples(learned_folder, "sft")
    fresh_folder = context.store.folder("data", batch["data"])
    fresh = examples(fresh_folder, "sft")
    limit = context.recipe.contracts.max_drift
    drift = question_drift(learned, fresh)
    for name, value in drift.items():
        if value > limit:
            raise DataError(
                f"the new questions' {name} lies {value:.2f} from what was learned (allowed {limit:.2f})",
                "Look at the batch, or raise contracts.max_drift.",
            )


def _held_out_repeats(steps: Sequence[Step]) -> dict[str, str]:
    """Rows of a batch that ask a held-out question of the same database: id -> the held-out question's."""
    repeats = {}
    for step in steps:
        if step.kind not in ("data", "leakage"):
            continue
        report = read_json(step.folder / LEAKAGE)
        for pool in report.values():
            for leak in pool["leaks"]:
                if leak["same_database"] and leak["kind"] in SAME_QUESTION:
                    repeats[leak["train"]] = leak["held_out"]
    return repeats


def _quarantine(store: Store, data_step: Step) -> Path | None:
    """The file of a batch's bad rows, in the finished data stage or in the one that failed."""
    work = store.work(data_step.kind, data_step.key)
    for folder in (data_step.folder, work):
        file = folder / QUARANTINE
        if file.is_file():
            return file
    return None


def _refuse_batches(
    ledger: Ledger, batches: Sequence[Path], error: DataError, bad_rows: Path | None = None
) -> DataError:
    """Take batches back and note it in the ledger; the error names the file of the bad rows."""
    n_rows = _n_rows(batches)
    names = [path.name for path in batches]
    folders = [ledger.take_back(path, bad_rows) for path in batches]
    ledger.add("night", decision="refused", reason=str(error), new=names, rows=n_rows)
    hints = [error.hint]
    if bad_rows is not None and folders:
        file = folders[0] / QUARANTINE
        hints.append(f"The bad rows, with their reasons, are in {file}.")
    hints.append("All rows of the batch are new again.")
    hint = " ".join(hints).strip()
    return DataError(error.message, hint)


def compare_with_champion(
    context: NightContext, challenger: Challenger, champion: Champion | None, withdrawn: set[str]
) -> PromotionDecision:
    """Evaluate the challenger on the frozen held-out questions and the guards, and decide."""
    recipe = context.recipe
    test, n_seen = _held_out_records(context, recipe, challenger, champion, "")
    guarded = {}
    guard_recipes = guards(context.name, context.overrides, recipe)
    for name, guard in guard_recipes.items():
        guarded[name], _ = _held_out_records(context, guard, challenger, champion, name)
    if not test.before:
        reason = f"the champion was trained on all {n_seen} questions that are held out now: nothing can be compared"
        return PromotionDecision("kept", f"{reason} (hold out others that it has not learned: data.test)", {})
    verdict = decide_promotion(test, guarded, recipe.nightly, recipe.seed)
    decision = verdict.decision
    reason = verdict.reason
    numbers = verdict.numbers
    if n_seen:
        reason = f"{reason}; {n_seen} that the champion was trained on do not count"
        numbers = {**numbers, "champion_trained_on": n_seen}
    if champion is None:
        reason = f"no champion yet, against the base model: {reason}"
        if decision == "worse":
            decision = "kept"
    elif challenger.start in withdrawn:  # the batch is not to blame for the batches that its champion had learned
        decision = "kept"
        reason = f"it was trained from a champion that was rolled back; {reason}"
    elif decision == "promoted" and challenger.key in withdrawn:
        decision = "kept"
        reason = f"it was rolled back before; {reason}"
    return PromotionDecision(decision, reason, numbers)


def _held_out_records(
    context: NightContext, recipe: Recipe, challenger: Challenger, champion: Champion | None, role: str
) -> tuple[HeldOutRecords, int]:
    """The records of both on questions that the champion was not trained on, and the number of the others.

    Without a champion the base model is the opponent: a challenger must beat something.
    """
    opponent = champion or UntrainedModel("model", challenger.base)
    after = evaluated(context, recipe, challenger, role)
    before = evaluated(context, recipe, opponent, f"champion {role}".strip())
    seen = seen_by_opponent(context, challenger, opponent, after)
    old = unseen_records(read_records(before.folder, "greedy"), seen)
    new = unseen_records(read_records(after.folder, "greedy"), seen)
    return HeldOutRecords(old, new, recipe.headline), len(seen)


def seen_by_opponent(
    context: NightContext, challenger: Challenger, opponent: Champion | UntrainedModel, evaluation: StageResult
) -> frozenset[str]:
    """The ids of held-out questions that a champion was trained on and the challenger was not; none of a base model.

    Args:
        evaluation: the challenger's evaluation, on those questions.
    """
    if isinstance(opponent, UntrainedModel):
        return frozenset()
    manifest = context.store.manifest(evaluation.name, evaluation.key)
    test_key = manifest["inputs"]["test"]
    test = context.store.folder("test", test_key)
    standing = (opponent.stage, opponent.key)
    other = (challenger.stage, challenger.key)
    return trained_on(context.store, standing, other, test)


def unseen_records(records: Sequence[EpisodeRecord], seen: Collection[str]) -> list[EpisodeRecord]:
    """Records, but for those of questions that were seen in training, by their ids."""
    return [record for record in records if record.example_id not in seen]


def evaluated(
    context: NightContext, recipe: Recipe, checkpoint: Challenger | Champion | UntrainedModel, role: str
) -> StageResult:
    """A checkpoint's evaluation on held-out questions; that of an earlier night is found in the store."""
    name = f"evaluate_{checkpoint.stage}"
    stages = [stage for stage in recipe.stages if stage in ("gold_schema", checkpoint.stage)]
    evaluation_recipe = recipe.model_copy(update={"stages": (*stages, "evaluate")})
    among = ("test", "test_schema", checkpoint.stage, name)
    given = {checkpoint.stage: checkpoint.key}
    steps = graph.plan(evaluation_recipe, context.store, name, given, among)
    finished = context.make(evaluation_recipe, steps, role)
    result = finished[name]
    greedy = read_records(result.folder, "greedy")
    broken = [record for record in greedy if record.broken]
    if len(broken) > recipe.contracts.max_broken * len(greedy):
        remove_folder(result.folder)
        questions = f"{len(broken)} of {len(greedy)} held-out questions of {recipe.benchmark.name}"
        raise BoundaryError(
            f"{questions} broke: {broken[0].failure}",
            "Nothing is decided. Mend the database or the endpoint; the next night asks these questions again.",
        )
    return result
