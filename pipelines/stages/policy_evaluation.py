"""The evaluation of a given policy: a checkpoint, an endpoint or the oracle answers a benchmark, with a report of it.

Each has a key in the store, as a stage does. Its answers are kept apart, by policy and by the way of asking, so that
another judgement, or a run after a kill, asks no question twice.
"""

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.core.claims import claimed
from pipelines.core.errors import RecipeError
from pipelines.core.files import read_json
from pipelines.core.removal import remove_folder
from pipelines.core.store import Store
from pipelines.core.types import Example, from_dict
from pipelines.endpoints.client import Endpoint, endpoint
from pipelines.evaluation.record_files import SINGLE_TURN, read_records
from pipelines.evaluation.summary import Summary
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import Recipe
from pipelines.recipe.plugins import plugin_code
from pipelines.recipe.recipes import digest
from pipelines.report import writer
from pipelines.report.formats import Cell, ReportTable, TableColumn
from pipelines.rollout.gguf_model import is_gguf
from pipelines.stages import graph
from pipelines.stages.answer_latency import EFFICIENCY, Latency, read_latencies
from pipelines.stages.context import Context, Progress, examples
from pipelines.stages.evaluation_stage import ENDPOINT, ORACLE, evaluate_questions, passes
from pipelines.stages.fingerprints import cards, endpoint_fingerprints, folder_digest, prompt_digest
from pipelines.stages.report import of_systems, systems_of

ANSWERS = "answers"  # folder of the store: each question's episodes, by policy and by the way of asking
EVALUATIONS = "evaluations"  # folder of the store: finished evaluations, by key
VERSIONS = {stage.name: stage.version for stage in graph.GRAPH}
LIMITS = ("timeout_s", "max_rows", "max_bytes", "memory_mb")
ASKING = ("protocol", "seed", *(f"execution.{name}" for name in LIMITS))  # sections of a recipe that decide an answer
ANSWER_FIELDS = {"base_url", "model", "omit", "extra", "system", "reasoning"}  # fields of an entry that decide answers


@dataclass(frozen=True)
class Answerer:
    """The policy that is evaluated."""

    policy: str  # name or folder that `evaluated_policy` takes
    name: str  # name for people
    identity: Mapping[str, object]  # facts that distinguish it from any other, for the keys
    note: str = ""  # the identity in a few words, for the report
    entry: Endpoint | None = None  # the endpoint's entry, with its price

    def price(self, latency: Latency) -> str:
        """The price of one answer; "" if the endpoint's entry has no price."""
        assert self.entry is not None
        if not self.entry.price_in and not self.entry.price_out:
            return ""
        price = (latency.bought_in * self.entry.price_in + latency.bought_out * self.entry.price_out) / 1e6
        return f"{price:.5f}"


def named_answerer(policy: str) -> Answerer:
    """The answerer "oracle" or "endpoint:NAME"."""
    if not policy.startswith(ENDPOINT):
        return Answerer(policy, policy, {"policy": policy})
    entry = endpoint(policy.removeprefix(ENDPOINT))
    identity = {"endpoint": entry.model_dump(mode="json", include=ANSWER_FIELDS)}
    return Answerer(policy, policy, identity, entry.model, entry)


def checkpoint_answerer(model: str, folder: Path, recipe: Recipe) -> Answerer:
    """The answerer of a checkpoint.

    Args:
        model: the name that the user gave: a folder or a GGUF file.
        folder: the plain checkpoint folder of that model.
    """
    name = Path(model).stem if is_gguf(model) else folder.name
    identity = {
        "digest": folder_digest(folder),
        "dtype": recipe.model.compute_dtype,
        "decoder": recipe.rollout.policy,
    }
    return Answerer(str(folder.resolve()), name, identity, f"checkpoint {identity['digest']}")


@dataclass(frozen=True)
class CallEstimate:
    """The most that an evaluation can ask; answers that are kept are not asked again.

    Each turn sends the conversation again; a conversation ends at its budget of tokens.
    """

    questions: int
    episodes: Mapping[str, int]  # numbers of episodes, keyed by pass
    calls: int
    tokens_in: int
    tokens_out: int
    entry: Endpoint | None  # the endpoint that sells the tokens; None for a policy without a price

    @property
    def cost(self) -> float:
        """The price of all tokens, in the entry's currency; 0.0 without a price."""
        if self.entry is None:
            return 0.0
        return (self.tokens_in * self.entry.price_in + self.tokens_out * self.entry.price_out) / 1e6

    def figures(self) -> dict[str, float]:
        """The numbers by name, for scripts."""
        figures: dict[str, float] = {"questions": self.questions, "calls": self.calls}
        if self.entry is not None:
            figures |= {"tokens_in": self.tokens_in, "tokens_out": self.tokens_out, "cost": self.cost}
        return figures

    def lines(self, benchmark: str) -> list[str]:
        """The numbers for a person."""
        episodes = ", ".join(f"{number:,} {name}" for name, number in self.episodes.items())
        lines = [f"{benchmark}: {self.questions:,} questions ({episodes}), at most {self.calls:,} calls"]
        if self.entry is not None:
            price = f"{self.cost:,.2f} {self.entry.currency}" if self.cost else "its entry has no price"
            tokens = f"at most {self.tokens_in:,} tokens in and {self.tokens_out:,} out"
            lines.append(f"{tokens}: {price}; what is answered already is not asked again")
        return lines


def estimate_calls(recipe: Recipe, n_questions: int, entry: Endpoint | None) -> CallEstimate:
    """The most that an evaluation of so many questions asks."""
    episodes: dict[str, int] = {}
    calls = 0
    tokens_in = 0
    tokens_out = 0
    for evaluation_pass in passes(recipe):
        count = n_questions * evaluation_pass.samples
        budget = evaluation_pass.sampling.episode_tokens
        episodes[evaluation_pass.name] = count
        calls += count * evaluation_pass.max_turns
        tokens_in += count * evaluation_pass.max_turns * budget
        tokens_out += count * budget
    return CallEstimate(n_questions, episodes, calls, tokens_in, tokens_out, entry)


@dataclass(frozen=True)
class EvaluatedBenchmark:
    """The evaluation of a policy on one benchmark."""

    benchmark: str
    result: graph.StageResult
    summary: Summary
    lines: tuple[str, ...]  # remarks, latency, cost and the report's place, for a person


def estimate_benchmarks(
    recipe: Recipe, store: Store, answerer: Answerer, progress: Progress
) -> dict[str, CallEstimate]:
    """The most that an evaluation asks on each benchmark of the recipe; only questions are read."""
    estimates = {}
    for single in _single_benchmarks(recipe):
        with _held_out_questions(single, store, answerer, progress) as held_out:
            estimates[single.benchmark.name] = held_out.estimate
    return estimates


def evaluate_benchmarks(
    recipe: Recipe, store: Store, answerer: Answerer, progress: Progress
) -> list[EvaluatedBenchmark]:
    """Evaluate a policy on every benchmark of the recipe, and write a report of each."""
    evaluated = []
    for number, single in enumerate(_single_benchmarks(recipe)):
        folder = evaluate_benchmark(single, store, answerer, progress)
        title = f"evaluate {answerer.name}"
        if number:
            title += f" on {single.benchmark.name}"
        metrics = read_json(folder / "metrics.json")
        evaluated.append(
            EvaluatedBenchmark(
                benchmark=single.benchmark.name,
                result=graph.StageResult(title, folder.name, folder, metrics, False),
                summary=from_dict(Summary, read_json(folder / "summary.json")),
                lines=tuple(_result_lines(folder, single, answerer, metrics)),
            )
        )
    return evaluated


def _single_benchmarks(recipe: Recipe) -> list[Recipe]:
    """The recipe with each of its benchmarks alone."""
    return [recipe.on(benchmark.name) for benchmark in recipe.data.test]


def evaluate_benchmark(recipe: Recipe, store: Store, answerer: Answerer, progress: Progress) -> Path:
    """The folder of a policy's evaluation on the recipe's first benchmark; it is made unless the store has it.

    An evaluation with broken episodes is made again, which asks only for those.
    """
    answers_about = _answers_about(recipe, store, answerer)
    with _held_out_questions(recipe, store, answerer, progress) as held_out:
        evaluation = PolicyEvaluation(
            recipe, store, answerer, progress, held_out, store.root / ANSWERS / digest(answers_about)
        )
        about = {**answers_about, **_evaluation_about(recipe, answerer, held_out)}
        key = digest(about)
        waiting = functools.partial(progress.say, "another run makes this evaluation; waiting")
        if _has_broken(store, key):
            with store.locked(EVALUATIONS, key, waiting):
                if _has_broken(store, key):  # the run that this one waited for may have made it again
                    remove_folder(store.folder(EVALUATIONS, key))
        return store.make(EVALUATIONS, key, evaluation.build, about, waiting)


def _answers_about(recipe: Recipe, store: Store, answerer: Answerer) -> dict[str, object]:
    """All that decides an answer, beside the question."""
    asking = recipe.slice(*ASKING)
    code = plugin_code(asking | recipe.slice("rollout.policy"))
    has_plugin_policy = f"policy {recipe.rollout.policy}" in code
    protocols = [recipe.protocol]
    with contextlib.suppress(RecipeError):  # a protocol without a form that asks for an answer in one turn
        protocols.append(single_turn(recipe.protocol)[0])
    return {
        "policy": answerer.identity,
        "recipe": asking,
        "prompts": [prompt_digest(protocol) for protocol in protocols],
        "version": VERSIONS["evaluate_model"],
        "plugins": code,
        "options": recipe.rollout.options if has_plugin_policy else {},
        "user": endpoint_fingerprints(_without_selector(recipe), "evaluate_model"),
        "cards": cards(recipe.data.test[:1], store.root),
    }


def _without_selector(recipe: Recipe) -> Recipe:
    evaluation = recipe.evaluation.model_copy(update={"selector": None})
    return recipe.model_copy(update={"evaluation": evaluation})


@dataclass(frozen=True)
class HeldOutQuestions:
    """The questions of a benchmark, from finished stages, and the most that they ask."""

    test: graph.StageResult
    test_schema: graph.StageResult | None
    questions: Sequence[Example]
    estimate: CallEstimate


@contextlib.contextmanager
def _held_out_questions(
    recipe: Recipe, store: Store, answerer: Answerer, progress: Progress
) -> Iterator[HeldOutQuestions]:
    """The questions of the recipe's first benchmark, whose stages are claimed for the time of the block.

    No training questions are needed. The estimate of the calls is printed.
    """
    with_evaluation = recipe.model_copy(update={"stages": (*recipe.stages, "evaluate")})
    steps = graph.plan(with_evaluation, store, among=("test", "test_schema"))
    names = [(step.kind, step.key) for step in steps]
    with claimed(store, names, {"recipe": recipe.name}):
        results = {step.name: graph.execute(step, recipe, store, progress, steps) for step in steps}
        test = results["test"]
        questions = examples(test.folder, "test")
        _require_playable(answerer, questions)
        estimate = estimate_calls(recipe, len(questions), answerer.entry)
        for line in estimate.lines(recipe.benchmark.name):
            progress.say(line)
        yield HeldOutQuestions(test, results.get("test_schema"), questions, estimate)


def _require_playable(answerer: Answerer, questions: Sequence[Example]) -> None:
    """Refuse the oracle for questions without gold SQL."""
    if answerer.policy != ORACLE:
        return
    without_gold = sum(not question.gold_sql for question in questions)
    if without_gold:
        raise RecipeError(
            f"the oracle plays gold SQL, and {without_gold} of {len(questions)} questions have none",
            "Evaluate a checkpoint (--model FOLDER) or an endpoint on them.",
        )


def _evaluation_about(recipe: Recipe, answerer: Answerer, held_out: HeldOutQuestions) -> dict[str, Any]:
    """All that decides an evaluation, beside its answers; another report asks no endpoint again."""
    judging = recipe.slice(*graph.VERDICTS, "benchmark.name", "execution", "gold_schema", "stages")
    return {
        "name": answerer.name,
        "evaluation": judging,
        "code": plugin_code(judging),
        "report": VERSIONS["report"],
        "endpoints": endpoint_fingerprints(recipe, "evaluate_model"),
        "test": held_out.test.key,
        "test_schema": None if held_out.test_schema is None else held_out.test_schema.key,
    }


def _has_broken(store: Store, key: str) -> bool:
    """Whether the store has an evaluation in which an episode broke."""
    if not store.has(EVALUATIONS, key):
        return False
    records = read_records(store.folder(EVALUATIONS, key), "greedy", "sampled", SINGLE_TURN)
    return any(record.broken for record in records)


@dataclass(frozen=True)
class PolicyEvaluation:
    """The making of one evaluation."""

    recipe: Recipe
    store: Store
    answerer: Answerer
    progress: Progress
    held_out: HeldOutQuestions
    answers: Path  # folder of this policy's kept answers

    def build(self, folder: Path) -> None:
        """Fill the work folder: the files of an evaluation stage, and the report."""
        if self.answerer.entry is not None:
            self._ask_first_question()
        self._evaluate("evaluate", self.recipe, folder, self.held_out.questions)
        systems = tuple(systems_of(folder, self.answerer.name, note=self.answerer.note))
        report = of_systems(self.recipe, systems, self.held_out.test.folder)
        latencies = read_latencies(folder)
        if self.answerer.entry is not None and latencies:
            table = cost_table(self.answerer, self.answerer.entry, latencies)
            report = dataclasses.replace(report, tables=(*report.tables, table))
        writer.write_all(report, folder)

    def _ask_first_question(self) -> None:
        """Evaluate one question: an endpoint that does not answer as it should costs no more."""
        folder = self.store.root / ANSWERS
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix=".first-") as first:
            recipe = _without_selector(self.recipe)
            self._evaluate("first question", recipe, Path(first), self.held_out.questions[:1])

    def _evaluate(self, title: str, recipe: Recipe, folder: Path, questions: Sequence[Example]) -> None:
        schema = self.held_out.test_schema
        context = Context(title, recipe, folder, {"test": self.held_out.test.folder}, self.progress)
        gold = None if schema is None else schema.folder
        evaluate_questions(context, questions, self.answerer.policy, gold, self.answers)


def cost_table(answerer: Answerer, entry: Endpoint, latencies: Mapping[str, Latency]) -> ReportTable:
    """The latency and the cost of an answer by pass; no other table of a report depends on wall-clock time."""
    titles = ("latency, s", "SQL, s", "tokens in", "tokens out", f"cost, {entry.currency}")
    columns = (
        TableColumn("answers"),
        TableColumn("number", "count"),
        *(TableColumn(title, "text") for title in titles),
    )
    rows: list[tuple[Cell, ...]] = []
    for name, latency in latencies.items():
        row = (
            name,
            latency.episodes,
            f"{latency.total_s:,.2f}",
            f"{latency.sql_s:,.2f}",
            f"{latency.bought_in:,.0f}",
            f"{latency.bought_out:,.0f}",
            answerer.price(latency),
        )
        rows.append(row)
    note = "Means of an answer, of what this run asked."
    return ReportTable("cost", "Cost and latency", columns, tuple(rows), note)


def _result_lines(folder: Path, recipe: Recipe, answerer: Answerer, metrics: Mapping[str, float]) -> list[str]:
    """Remarks on a finished evaluation, its latency and cost, and the report's place."""
    lines = [*_malformed_warning(folder, recipe, answerer), *_selection_line(recipe, metrics)]
    efficiency = read_json(folder / EFFICIENCY)
    if efficiency:
        lines.append(f"R-VES  {efficiency['r_ves']:.1f}")
    for name, latency in read_latencies(folder).items():
        lines.append(f"latency ({name})  {latency.total_s:.2f} s a question, {latency.sql_s:.2f} s of it in SQL")
        if answerer.entry is not None:
            price = answerer.price(latency)
            cost = f"{price} {answerer.entry.currency} a question" if price else "its entry has no price"
            tokens = f"{latency.bought_in:,.0f} tokens in, {latency.bought_out:,.0f} out"
            lines.append(f"cost ({name})  {cost}: {tokens}")
    lines.append(f"report  {folder / writer.PAGE}")
    return lines


def _malformed_warning(folder: Path, recipe: Recipe, answerer: Answerer) -> list[str]:
    """A line if no answer was well-formed or ran."""
    unbroken = [record for record in read_records(folder, "greedy", "sampled") if not record.broken]
    if not unbroken or any(record.well_formed or record.executable for record in unbroken):
        return []
    protocol = f"{recipe.protocol.name} (prompt {recipe.protocol.prompt})"
    return [f"warning: every answer was malformed: does {answerer.name} speak the protocol {protocol} ?"]


def _selection_line(recipe: Recipe, metrics: Mapping[str, float]) -> list[str]:
    """A line on the answers that an endpoint selected, whose figure the table of the vote lacks."""
    if "ex_selected" not in metrics:
        return []
    value = 100 * metrics["ex_selected"]
    low = 100 * metrics["ex_selected_low"]
    high = 100 * metrics["ex_selected_high"]
    line = f"selected by {recipe.evaluation.selector}  {value:.1f} [{low:.1f}, {high:.1f}]"
    if "selector_first" in metrics:  # an endpoint that merges has none
        line += f"; {metrics['selector_first']:.0%} of its answers chose the query shown first"
    return [line]
