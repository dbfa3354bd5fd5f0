"""One night of retraining: new questions are curated and learned, and the challenger is compared with the champion."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from pipelines.core.errors import BoundaryError, DataError, RecipeError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.nightly import inbox, store_gc
from pipelines.nightly.ledger import Champion, ChampionChanged, Ledger
from pipelines.nightly.promotion import HeldOutRecords, PromotionDecision, decide, drift, trained_on
from pipelines.nightly.union import UnionPart, unite
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.stages import graph
from pipelines.stages.context import LEAKAGE, QUARANTINE, examples
from pipelines.stages.evaluate import records

Walk = Callable[[Recipe, Store, Sequence[graph.Step], str], list[graph.StageResult]]
CURATION = ("data", "test", "leakage", "synthesize", "filter", "gold_schema")
TRAINING = ("sft", "grpo")
Keys = Mapping[str, str]  # of finished stages, by name


@dataclass(frozen=True)
class NightContext:
    """A recipe, its store, and the two functions that make stages and check their contracts."""

    name: str  # of the recipe, as the user names it with its overrides; guards are laid over the same
    overrides: Sequence[str]
    recipe: Recipe
    store: Store
    walk: Walk  # makes stages: the plain run, or Prefect; its last argument is their role, in a word
    check: Callable[[graph.StageResult, Recipe], object]  # raises DataError if the stage breaks its contract
    stages: list[graph.StageResult] = field(default_factory=list)

    def make(self, recipe: Recipe, steps: Sequence[graph.Step], role: str = "") -> dict[str, graph.StageResult]:
        """Make steps and remember their stages; the role of the challenger, whose figures nights compare, is ""."""
        finished = self.walk(recipe, self.store, steps, role)
        self.stages.extend(finished)
        return {stage.name: stage for stage in finished}


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
    learned: tuple[str, ...]  # names of the batches that it has seen, its champion's included
    start: str = ""  # key of the champion whose weights that model has; "" for the recipe's own


def title(recipe: Recipe, store: Store) -> str:
    """The recipe's name and the number of the night that begins."""
    nights = sum(row["event"] == "night" for row in Ledger(store, recipe.name).lines())
    return f"{recipe.name} night {nights + 1}"


def guards(name: str, overrides: Sequence[str], recipe: Recipe) -> dict[str, Recipe]:
    """The recipe, by its name and overrides, over the questions of each guard, without their gold schemas."""
    guards = {}
    for include in recipe.nightly.guards:
        guard = recipes.load(name, [*overrides, f"include={include}"])
        path = guard.benchmark.path
        exists = bool(path) and ("://" in str(path) or Path(str(path)).expanduser().exists())
        if guard.benchmark.kind != "miniature" and not exists:
            why = f"nothing is at {path}" if path else "no path to its questions"
            raise RecipeError(
                f"nightly.guards: {include}: {why}", "Run: sqltrain data add NAME PATH, and name local/NAME there."
            )
        stages = tuple(stage for stage in guard.stages if stage != "gold_schema")
        guards[include] = guard.model_copy(update={"stages": stages})
    return guards


def run_night(context: NightContext, day: date | None = None) -> dict[str, Any]:
    """Run one night, or the replay of a day's files, and return its line of the ledger; such a day without new rows
    leaves none.

    Nothing is trained if the inbox holds nothing new. A batch that breaks a contract stops the night and is taken back:
    its rows are new again, so the mended and the good ones come with the next night.
    """
    recipe, store = context.recipe, context.store
    guards(context.name, context.overrides, recipe)  # evaluated last: a mistake should not cost a training
    ledger = Ledger(store, recipe.name)
    with ledger.locked():
        inbox.collect(recipe.nightly, ledger.batches, day)
        fresh = ledger.undecided()  # of a replay that was killed, a later day's batch may be among them
        nothing: dict[str, Any] = {"decision": "nothing", "reason": "no new questions", "new": []}
        if not fresh and day is not None:
            return nothing
        standing = ledger.incumbent(recipe.nightly.tier)
        if standing is not None and not fresh:
            return ledger.add("night", **nothing)
        base = _curate(context, recipe, "base")
        batches = {path.name: _admit(context, ledger, path, base, path in fresh) for path in ledger.usable()}

        # The champion is trained further, or the recipe's base anew on all batches.
        start = ledger.incumbent(recipe.nightly.tier) if recipe.nightly.start == "champion" else None
        parts = [UnionPart(base, fresh=start is None)]
        parts += [UnionPart(keys, fresh=start is None or name not in start.batches) for name, keys in batches.items()]
        united = unite(store, parts, None if start is None else recipe.nightly.replay, recipe.seed)
        # The training stages alone, from the champion's weights if there is one.
        stages = tuple(name for name in recipe.stages if name in ("filter", "gold_schema", "sft", "difficulty", "grpo"))
        if not set(stages) & set(TRAINING):
            raise RecipeError(f"recipe {recipe.name} has neither sft nor grpo", "There is nothing to retrain.")
        n_sources = int(read_json(store.folder("data", united["data"]) / "metrics.json")["rl_sources"])
        # The union's rows are made already; only the number of their sources is read.
        rl = (Source(kind="jsonl"),) * n_sources
        changes: dict[str, Any] = {"stages": stages, "data": recipe.data.model_copy(update={"rl": rl})}
        if start is not None:
            weights = store.folder(start.stage, start.key) / "model"
            changes["model"] = recipe.model.model_copy(update={"source": str(weights)})
        if n_sources != len(recipe.data.rl):
            changes["difficulty"] = recipe.difficulty.model_copy(update={"explore_parts": ()})
        training = recipe.model_copy(update=changes)
        steps = graph.plan(training, store, given=united)
        try:
            for step in (step for step in steps if step.name in united):
                context.check(graph.StageResult(step.name, step.key, step.folder, {}, True), recipe)
        except DataError as error:
            raise _refuse(ledger, ledger.undecided(), error) from error
        finished = context.make(training, steps)
        last = [name for name in TRAINING if name in finished][-1]
        made = finished[last].key, finished["model"].key
        challenger = Challenger(last, *made, tuple(batches), start.key if start else "")
        return conclude(context, ledger, challenger, (base, *batches.values()), fresh)


def conclude(
    context: NightContext, ledger: Ledger, challenger: Challenger, curated: Sequence[Keys], fresh: Sequence[Path] = ()
) -> dict[str, Any]:
    """Compare a challenger with the champion, write the line of the ledger that decides, and return it.

    If the champion is rolled back before the line is written, the one before it is compared.

    Args:
        curated: keys of the stages that it learned from, which the store keeps.
        fresh: batches about which this decides.
    """
    while True:
        tier = context.recipe.nightly.tier
        champion = ledger.incumbent(tier)
        withdrawn = {row["from"] for row in ledger.lines() if row["event"] == "rollback"}
        withdrawn -= {champion.key} if champion else set()  # what one tier rolled back may stand in the other
        verdict = compare_with_champion(context, challenger, champion, withdrawn)
        with contextlib.suppress(ChampionChanged):
            return ledger.add(
                "night",
                standing=champion.key if champion else "",
                decision=verdict.decision,
                reason=verdict.reason,
                numbers=verdict.numbers,
                new=[path.name for path in fresh],
                rows=sum(len(read_json(path / inbox.ROWS)) for path in fresh),
                held_out=sum(len(inbox.held_out(path)) for path in fresh),
                challenger={"stage": challenger.stage, "key": challenger.key},
                champion=None if champion is None else {"stage": champion.stage, "key": champion.key},
                learned=challenger.learned,
                stages=sorted({item for keys in curated for item in keys.items()}),
                made=sorted(f"{stage.name}/{stage.key}" for stage in context.stages if not stage.cached),
                tier=tier,
            )


def _curate(context: NightContext, recipe: Recipe, role: str) -> Keys:
    """The keys of a recipe's curated stages, each checked against its contract; finished ones are not walked again."""
    steps = graph.plan(recipe, context.store, among=CURATION)
    if not all(step.cached for step in steps):
        return {name: stage.key for name, stage in context.make(recipe, steps, role).items()}
    for step in steps:
        context.check(graph.StageResult(step.name, step.key, step.folder, {}, True), recipe)
    return {step.name: step.key for step in steps}


def _admit(context: NightContext, ledger: Ledger, batch: Path, base: Keys, fresh: bool) -> Keys:
    """A batch's curated stages; rows of a fresh one that ask held-out questions are left out of it."""
    # The batch stands in place of the training pools; the held-out questions stay the recipe's.
    source = Source(kind="jsonl", path=str(batch / inbox.QUESTIONS))
    data = context.recipe.data.model_copy(update={"sft": source, "rl": (source,)})
    recipe = context.recipe.model_copy(update={"data": data})
    try:
        keys = _curate(context, recipe, "batch")
        folders = [context.store.folder("data", stages["data"]) for stages in (base, keys)]
        limit = recipe.contracts.max_drift
        distances = drift(*(examples(folder, "sft") for folder in folders)) if fresh else {}
        for name, value in distances.items():
            if value > limit:
                raise DataError(
                    f"the new questions' {name} lies {value:.2f} from what was learned (allowed {limit:.2f})",
                    "Look at the batch, or raise contracts.max_drift.",
                )
    except DataError as error:
        # A row that asks a held-out question of the same database leaves the batch, which is then curated again.
        steps = graph.plan(recipe, context.store, among=CURATION)
        if fresh:
            reports = [read_json(step.folder / LEAKAGE) for step in steps if step.name in ("data", "leakage")]
            leaks = [leak for report in reports for pool in report.values() for leak in pool["leaks"]]
            if inbox.leave_out(batch, {leak["train"]: leak["held_out"] for leak in leaks if leak["same_database"]}):
                return _admit(context, ledger, batch, base, fresh)
        places = (steps[0].folder, context.store.work(steps[0].kind, steps[0].key))
        bad = next((path for folder in places if (path := folder / QUARANTINE).is_file()), None)
        raise _refuse(ledger, [batch], error, bad) from error
    return keys


def _refuse(ledger: Ledger, batches: Sequence[Path], error: DataError, bad: Path | None = None) -> DataError:
    """Take batches back and note it in the ledger; the error names the file of the bad rows."""
    rows = sum(len(read_json(path / inbox.ROWS)) for path in batches)
    folders = [ledger.take_back(path, bad) for path in batches]
    ledger.add("night", decision="refused", reason=str(error), new=[path.name for path in batches], rows=rows)
    where = f"The bad rows, with their reasons, are in {folders[0] / QUARANTINE}. " if bad and folders else ""
    return DataError(error.message, f"{error.hint} {where}All rows of the batch are new again.".strip())


def compare_with_champion(
    context: NightContext, challenger: Challenger, champion: Champion | None, withdrawn: set[str]
) -> PromotionDecision:
    """Evaluate the challenger on the frozen held-out questions and the guards, and decide."""
    recipe, store = context.recipe, context.store
    # Without a champion the base model is the opponent: a challenger must beat something.
    opponent = champion or UntrainedModel("model", challenger.base)

    def held(guard: Recipe, role: str) -> tuple[HeldOutRecords, int]:
        """The records of both on questions that the champion was not trained on, and the number of the others."""
        after = evaluated(context, guard, challenger, role)
        both = (evaluated(context, guard, opponent, f"champion {role}".strip()), after)
        seen: frozenset[str] = frozenset()
        if champion is not None:
            test = store.folder("test", store.manifest(after.name, after.key)["inputs"]["test"])
            seen = trained_on(store, (champion.stage, champion.key), (challenger.stage, challenger.key), test)
        old, new = ([row for row in records(side.folder, "greedy") if row.example_id not in seen] for side in both)
        return HeldOutRecords(old, new, guard.headline), len(seen)

    test, seen = held(recipe, "")
    by_guard = guards(context.name, context.overrides, recipe)
    guarded = {name: held(guard, name)[0] for name, guard in by_guard.items()}
    if not test.before:
        reason = f"the champion was trained on all {seen} questions that are held out now: nothing can be compared"
        return PromotionDecision("kept", f"{reason} (hold out others that it has not learned: data.test)", {})
    verdict = decide(test, guarded, recipe.nightly, recipe.seed)
    decision, reason, numbers = verdict.decision, verdict.reason, verdict.numbers
    if seen:
        reason = f"{reason}; {seen} that the champion was trained on do not count"
        numbers = {**numbers, "champion_trained_on": seen}
    if champion is None:
        reason = f"no champion yet, against the base model: {reason}"
        decision = "kept" if decision == "worse" else decision
    elif challenger.start in withdrawn:  # the batch is not to blame for the batches that its champion had learned
        decision, reason = "kept", f"it was trained from a champion that was rolled back; {reason}"
    elif decision == "promoted" and challenger.key in withdrawn:
        decision, reason = "kept", f"it was rolled back before; {reason}"
    return PromotionDecision(decision, reason, numbers)


def evaluated(
    context: NightContext, recipe: Recipe, who: Challenger | Champion | UntrainedModel, role: str
) -> graph.StageResult:
    """A checkpoint's evaluation on held-out questions; that of an earlier night is found in the store."""
    name = f"evaluate_{who.stage}"
    needed = ("gold_schema", who.stage)  # the base model is a stage of every recipe, which no recipe names
    alone = recipe.model_copy(update={"stages": (*(stage for stage in recipe.stages if stage in needed), "evaluate")})
    among = ("test", "test_schema", who.stage, name)
    steps = graph.plan(alone, context.store, name, {who.stage: who.key}, among)
    result = context.make(alone, steps, role)[name]
    greedy = records(result.folder, "greedy")
    broken = [record for record in greedy if record.broken]
    if len(broken) > recipe.contracts.max_broken * len(greedy):
        store_gc.remove(result.folder)
        raise BoundaryError(
            f"{len(broken)} of {len(greedy)} held-out questions of {recipe.benchmark.name} broke: {broken[0].failure}",
            "Nothing is decided. Mend the database or the endpoint; the next night asks these questions again.",
        )
    return result
