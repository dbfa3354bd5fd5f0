"""One night of retraining, whoever walks its stages: new questions are curated, learned, and the outcome evaluated."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipelines.core.errors import BoundaryError, DataError, RecipeError
from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.nightly import inbox, store_gc
from pipelines.nightly.ledger import Champion, Ledger, Moved
from pipelines.nightly.promotion import Held, PromotionDecision, decide, drift, trained_on
from pipelines.nightly.union import UnionPart, sources, unite
from pipelines.recipe import recipes
from pipelines.recipe.config import Recipe, Source
from pipelines.stages import graph
from pipelines.stages.context import LEAKAGE, examples
from pipelines.stages.evaluate import records

Walk = Callable[[Recipe, Store, Sequence[graph.Step], str], list[graph.StageResult]]
CURATION = ("data", "test", "leakage", "synthesize", "filter", "gold_schema")
TRAINING = ("sft", "grpo")
Keys = Mapping[str, str]


@dataclass(frozen=True)
class NightContext:
    """What a night works on."""

    name: str  # of the recipe, as the user names it with its overrides; guards are laid over the same
    overrides: Sequence[str]
    recipe: Recipe
    store: Store
    walk: Walk  # makes stages: the plain run, or Prefect; its last argument says what for, in a word
    stages: list[graph.StageResult] = field(default_factory=list)

    def make(self, recipe: Recipe, steps: Sequence[graph.Step], role: str = "") -> dict[str, graph.StageResult]:
        """Make steps, and remember their stages for the ledger.

        Args:
            role: what they are made for; "" for the challenger, whose figures one compares over the nights.
        """
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
    """What a night trained."""

    stage: str
    key: str
    base: str  # key of the model that it started from
    learned: tuple[str, ...]  # names of the batches that it has seen, its champion's included
    start: str = ""  # key of the champion whose weights that model has; "" for the recipe's own


def title(recipe: Recipe, store: Store) -> str:
    """A name that tells this night from the others of its recipe."""
    nights = sum(row["event"] == "night" for row in Ledger(store, recipe.name).lines())
    return f"{recipe.name} night {nights + 1}"


def guards(name: str, overrides: Sequence[str], recipe: Recipe) -> dict[str, Recipe]:
    """The recipe over the questions of each of its `nightly.guards`, which are not asked for their gold schemas.

    Args:
        name, overrides: the recipe as the user names it.
    """
    guards = {}
    for include in recipe.nightly.guards:
        guard = recipes.load(name, [*overrides, f"include={include}"])
        path = guard.benchmark.path
        there = bool(path) and ("://" in str(path) or Path(str(path)).expanduser().exists())
        if guard.benchmark.kind != "miniature" and not there:
            why = f"nothing is at {path}" if path else "no path to its questions"
            raise RecipeError(
                f"nightly.guards: {include}: {why}", "Run: sqltrain data add NAME PATH, and name local/NAME there."
            )
        guards[include] = guard.model_copy(
            update={"stages": tuple(stage for stage in guard.stages if stage != "gold_schema")}
        )
    return guards


def night(name: str, overrides: Sequence[str], recipe: Recipe, store: Store, walk: Walk) -> dict[str, Any]:
    """Run one night and return its line of the ledger.

    Nothing is trained when the inbox holds nothing new. A batch that breaks a contract stops the night and is taken
    back: its rows are new again, so what was mended and what was good come with the next night.
    """
    guards(name, overrides, recipe)  # they are asked last: a word that is wrong should not cost a training
    site = NightContext(name, overrides, recipe, store, walk)
    ledger = Ledger(store, recipe.name)
    with ledger.locked():
        inbox.collect(recipe.nightly, ledger.batches)
        fresh = ledger.undecided()
        if ledger.champion() is not None and not fresh:
            return ledger.add("night", decision="nothing", reason="no new questions", new=[])
        base = _curate(site, recipe, "base")
        parts = {path.name: _admit(site, ledger, path, base, path in fresh) for path in ledger.usable()}
        challenger = _train(site, ledger, base, parts)
        return conclude(site, ledger, challenger, (base, *parts.values()), fresh)


def conclude(
    site: NightContext, ledger: Ledger, challenger: Challenger, curated: Sequence[Keys], fresh: Sequence[Path] = ()
) -> dict[str, Any]:
    """Hold a challenger against the champion, write the line of the ledger that says who serves, and return it.

    A champion that is rolled back before the line is written decides nothing: the one before it is compared.

    Args:
        curated: keys of the stages that it learned from, which the store keeps.
        fresh: batches about which this decides.
    """
    while True:
        champion = ledger.champion()
        verdict = _decided(site, challenger, champion, ledger.withdrawn())
        with contextlib.suppress(Moved):
            return ledger.add(
                "night",
                standing=champion.key if champion else "",
                decision=verdict.decision,
                reason=verdict.reason,
                numbers=verdict.numbers,
                new=[path.name for path in fresh],
                rows=sum(inbox.size(path) for path in fresh),
                held_out=sum(inbox.left_out(path) for path in fresh),
                challenger={"stage": challenger.stage, "key": challenger.key},
                champion=None if champion is None else {"stage": champion.stage, "key": champion.key},
                learned=challenger.learned,
                stages=sorted({item for keys in curated for item in keys.items()}),
                made=sorted(f"{stage.name}/{stage.key}" for stage in site.stages if not stage.cached),
            )


def _curate(site: NightContext, recipe: Recipe, role: str) -> Keys:
    """The keys of a part's curated stages, each held to its contract; what is finished is not walked again."""
    steps = _curated(site, recipe)
    if not all(step.cached for step in steps):
        return {name: stage.key for name, stage in site.make(recipe, steps, role).items()}
    from tasks import contracts

    for step in steps:
        contracts.check(_found(step), recipe)
    return {step.name: step.key for step in steps}


def _curated(site: NightContext, recipe: Recipe) -> list[graph.Step]:
    return graph.plan(recipe, site.store, among=CURATION)


def _admit(site: NightContext, ledger: Ledger, batch: Path, base: Keys, fresh: bool) -> Keys:
    """A batch's curated stages; rows of a fresh one that ask what is held out are left out of it."""
    recipe = _recipe_of(site.recipe, batch)
    try:
        keys = _curate(site, recipe, "batch")
        if fresh:
            _hold_drift(site, keys, base)
    except DataError as error:
        if fresh and inbox.leave_out(batch, _repeats(site, recipe)):
            return _admit(site, ledger, batch, base, fresh)
        raise _refused(site, ledger, recipe, [batch], error) from error
    return keys


def _repeats(site: NightContext, recipe: Recipe) -> dict[str, str]:
    """Rows that ask a held-out question of the same database, each with that question."""
    reports = [read_json(step.folder / LEAKAGE) for step in _curated(site, recipe) if step.name in ("data", "leakage")]
    leaks = [leak for report in reports for pool in report.values() for leak in pool["leaks"]]
    return {leak["train"]: leak["held_out"] for leak in leaks if leak["same_database"]}


def _refused(
    site: NightContext, ledger: Ledger, recipe: Recipe | None, batches: Sequence[Path], error: DataError
) -> DataError:
    """Take batches back, note it, and say where the rows are that the data stage set aside, with their reasons.

    Args:
        recipe: whose data stage read the batch; None where it is not one batch that is refused.
    """
    steps = [] if recipe is None else _curated(site, recipe)[:1]
    places = [folder for step in steps for folder in (step.folder, site.store.work(step.kind, step.key))]
    bad = next((path for folder in places if (path := folder / inbox.QUARANTINE).is_file()), None)
    rows, folders = sum(map(inbox.size, batches)), [ledger.take_back(path, bad) for path in batches]
    ledger.add("night", decision="refused", reason=str(error), new=[path.name for path in batches], rows=rows)
    where = f"The bad rows, with their reasons, are in {folders[0] / inbox.QUARANTINE}. " if bad and folders else ""
    return DataError(error.message, f"{error.hint} {where}All rows of the batch are new again.".strip())


def _recipe_of(recipe: Recipe, batch: Path) -> Recipe:
    """The recipe with a batch in place of its training pools, and the same held-out ones."""
    source = Source(kind="jsonl", path=str(batch / inbox.QUESTIONS))
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"sft": source, "rl": (source,)})})


def _hold_drift(site: NightContext, keys: Keys, base: Keys) -> None:
    learned, fresh = (examples(site.store.folder("data", stages["data"]), "sft") for stages in (base, keys))
    limit = site.recipe.contracts.max_drift
    for what, value in drift(learned, fresh).items():
        if value > limit:
            raise DataError(
                f"the new questions' {what} lies {value:.2f} from what was learned (allowed {limit:.2f})",
                "Look at the batch, or raise contracts.max_drift.",
            )


def _train(site: NightContext, ledger: Ledger, base: Keys, batches: Mapping[str, Keys]) -> Challenger:
    """Train a challenger: the champion further, or the recipe's base anew on all that there is."""
    recipe, store = site.recipe, site.store
    start = ledger.champion() if recipe.nightly.start == "champion" else None
    parts = [UnionPart(base, fresh=start is None)]
    parts += [UnionPart(keys, fresh=start is None or name not in start.batches) for name, keys in batches.items()]
    united = unite(store, parts, None if start is None else recipe.nightly.replay, recipe.seed)
    trained = _challenging(recipe, store, start, sources(store, united["data"]))
    steps = graph.plan(trained, store, given=united)
    from tasks import contracts

    try:
        for step in steps:
            if step.name in united:
                contracts.check(_found(step), recipe)
    except DataError as error:
        raise _refused(site, ledger, None, ledger.undecided(), error) from error
    finished = site.make(trained, steps)
    last = [name for name in TRAINING if name in finished][-1]
    return Challenger(last, finished[last].key, finished["model"].key, tuple(batches), start.key if start else "")


def _challenging(recipe: Recipe, store: Store, champion: Champion | None, rl_sources: int) -> Recipe:
    """The recipe of the training stages alone, from the champion's weights where it has one."""
    stages = tuple(name for name in recipe.stages if name in ("filter", "gold_schema", "sft", "difficulty", "grpo"))
    if not set(stages) & set(TRAINING):
        raise RecipeError(f"recipe {recipe.name} has neither sft nor grpo", "There is nothing to retrain.")
    changes: dict[str, Any] = {"stages": stages}
    source = Source(kind="jsonl")  # the union's rows are there already; only how many sources they are of is asked
    changes["data"] = recipe.data.model_copy(update={"rl": (source,) * rl_sources})
    if champion is not None:
        weights = store.folder(champion.stage, champion.key) / "model"
        changes["model"] = recipe.model.model_copy(update={"source": str(weights)})
    if rl_sources != len(recipe.data.rl):
        changes["difficulty"] = recipe.difficulty.model_copy(update={"explore_parts": ()})
    return recipe.model_copy(update=changes)


def _found(step: graph.Step) -> graph.StageResult:
    return graph.StageResult(step.name, step.key, step.folder, {}, True)


def _decided(
    site: NightContext, challenger: Challenger, champion: Champion | None, withdrawn: set[str]
) -> PromotionDecision:
    """Evaluate the challenger on the frozen held-out questions and the guards, and decide."""
    recipe = site.recipe
    # Before the first champion, the model that training began with has its place: who beats nothing is none.
    before = champion or UntrainedModel("model", challenger.base)

    def held(part: Recipe, role: str) -> tuple[Held, int]:
        """The records of both on the questions that the champion was not trained on, and how many others there are."""
        after = evaluated(site, part, challenger, role)
        both = (evaluated(site, part, before, f"champion {role}".strip()), after)
        seen = _seen(site.store, champion, challenger, after) if champion is not None else frozenset()
        old, new = ([row for row in records(side.folder, "greedy") if row.example_id not in seen] for side in both)
        return Held(old, new, part.headline), len(seen)

    test, seen = held(recipe, "")
    guarded = {name: held(guard, name)[0] for name, guard in guards(site.name, site.overrides, recipe).items()}
    if not test.before:
        reason = f"the champion was trained on all {seen} questions that are held out now: nothing can be compared"
        return PromotionDecision("kept", f"{reason} (hold out others that it has not learned: data.test)", {})
    verdict = decide(test, guarded, recipe.nightly, recipe.seed)
    if seen:
        reason = f"{verdict.reason}; {seen} that the champion was trained on do not count"
        verdict = PromotionDecision(verdict.decision, reason, {**verdict.numbers, "champion_trained_on": seen})
    if champion is None:
        reason = f"no champion yet, against the base model: {verdict.reason}"
        return PromotionDecision("kept" if verdict.decision == "worse" else verdict.decision, reason, verdict.numbers)
    if challenger.start in withdrawn:  # nor is the batch to blame for what its champion had learned
        reason = f"it was trained from a champion that was rolled back; {verdict.reason}"
        return PromotionDecision("kept", reason, verdict.numbers)
    if verdict.decision == "promoted" and challenger.key in withdrawn:
        return PromotionDecision("kept", f"it was rolled back before; {verdict.reason}", verdict.numbers)
    return verdict


def _seen(store: Store, champion: Champion, challenger: Challenger, after: graph.StageResult) -> frozenset[str]:
    """The questions of the challenger's evaluation that only the champion was trained on, by their ids."""
    test = store.folder("test", store.manifest(after.name, after.key)["inputs"]["test"])
    return trained_on(store, (champion.stage, champion.key), (challenger.stage, challenger.key), test)


def evaluated(
    site: NightContext, recipe: Recipe, who: Challenger | Champion | UntrainedModel, role: str
) -> graph.StageResult:
    """A checkpoint's evaluation on held-out questions; that of an earlier night is there."""
    name = f"evaluate_{who.stage}"
    needed = ("gold_schema", who.stage)  # the base model is a stage of every recipe, which no recipe names
    alone = recipe.model_copy(update={"stages": (*(stage for stage in recipe.stages if stage in needed), "evaluate")})
    among = ("test", "test_schema", who.stage, name)
    steps = graph.plan(alone, site.store, name, {who.stage: who.key}, among)
    result = site.make(alone, steps, role)[name]
    greedy = records(result.folder, "greedy")
    broken = [record for record in greedy if record.broken]
    if len(broken) > recipe.contracts.max_broken * len(greedy):
        store_gc.remove(result.folder)
        raise BoundaryError(
            f"{len(broken)} of {len(greedy)} held-out questions of {recipe.benchmark.name} broke: {broken[0].failure}",
            "Nothing is decided. Mend the database or the endpoint; the next night asks these questions again.",
        )
    return result
