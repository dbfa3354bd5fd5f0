"""The evaluation of a given policy: a checkpoint, an endpoint or the oracle answers a benchmark, with a report of it.

Each has a key in the store, as a stage does. Its answers are kept apart, by policy and by the way of asking, so that
another judgement, or a run after a kill, asks no question twice.
"""

import dataclasses
import functools
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.files import digest, read_json
from pipelines.core.removal import remove_folder
from pipelines.core.store import Store
from pipelines.core.types import Example, from_dict
from pipelines.evaluation.record_files import SINGLE_TURN, read_records
from pipelines.evaluation.summary import Summary
from pipelines.recipe.config import Recipe
from pipelines.report import writer
from pipelines.stages.answer_latency import read_latencies
from pipelines.stages.answerer import Answerer
from pipelines.stages.call_estimate import CallEstimate
from pipelines.stages.context import Context, Progress
from pipelines.stages.evaluation_gate import unscored_line
from pipelines.stages.evaluation_keys import evaluation_facts, without_selector
from pipelines.stages.evaluation_lines import cost_table, result_lines
from pipelines.stages.held_out_questions import HeldOutQuestions, held_out_questions
from pipelines.stages.question_evaluation import evaluate_questions
from pipelines.stages.report_systems import ReportedEvaluation, report_of
from pipelines.stages.stage import StageResult
from pipelines.stages.unfinished_work import begin_or_resume

ANSWERS = "answers"  # folder of the store: each question's episodes, by policy and by the way of asking
EVALUATIONS = "evaluations"  # folder of the store: finished evaluations, by key


@dataclass(frozen=True)
class EvaluatedBenchmark:
    """The evaluation of a policy on one benchmark."""

    benchmark: str
    result: StageResult
    summary: Summary
    lines: tuple[str, ...]  # remarks, latency, cost and the report's place, for a person
    unscored: str  # a line if nothing could be scored; else ""


def estimate_benchmarks(
    recipe: Recipe, store: Store, answerer: Answerer, progress: Progress
) -> dict[str, CallEstimate]:
    """The most that an evaluation asks on each benchmark of the recipe; only questions are read."""
    estimates = {}
    for single in _single_benchmarks(recipe):
        with held_out_questions(single, store, answerer, progress) as held_out:
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
        values = read_json(folder / "summary.json")
        records = read_records(folder, "greedy", "sampled")
        lines = result_lines(folder, single, answerer, metrics, records)
        benchmark = EvaluatedBenchmark(
            benchmark=single.benchmark.name,
            result=StageResult(title, folder.name, folder, metrics, cached=False),
            summary=from_dict(Summary, values),
            lines=tuple(lines),
            unscored=unscored_line(title, records),
        )
        evaluated.append(benchmark)
    return evaluated


def _single_benchmarks(recipe: Recipe) -> list[Recipe]:
    """The recipe with each of its benchmarks alone."""
    return [recipe.on(benchmark.name) for benchmark in recipe.data.test]


def evaluate_benchmark(recipe: Recipe, store: Store, answerer: Answerer, progress: Progress) -> Path:
    """The folder of a policy's evaluation on the recipe's first benchmark; it is made unless the store has it.

    An evaluation with broken episodes is made again, which asks only for those.
    """
    facts = evaluation_facts(recipe, store, answerer)
    answers = store.root / ANSWERS / digest(facts.answers)
    with held_out_questions(recipe, store, answerer, progress) as held_out:
        about = {**facts.answers, **facts.verdicts, **held_out.keys}
        key = digest(about)
        waiting = functools.partial(progress.say, "another run makes this evaluation; waiting")
        if _has_broken(store, key):
            with store.locked(EVALUATIONS, key, waiting):
                if _has_broken(store, key):  # the run that this one waited for may have made it again
                    remove_folder(store.folder(EVALUATIONS, key))
        evaluation = PolicyEvaluation(recipe, store, answerer, progress, held_out, answers)
        return store.make(EVALUATIONS, key, evaluation.build, about, waiting)


def _has_broken(store: Store, key: str) -> bool:
    """Whether the store has an evaluation in which an episode broke."""
    if not store.has(EVALUATIONS, key):
        return False
    folder = store.folder(EVALUATIONS, key)
    records = read_records(folder, "greedy", "sampled", SINGLE_TURN)
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
        begin_or_resume(folder, "evaluate", self.progress.say)
        if self.answerer.entry is not None:
            self._ask_first_question()
        self._evaluate("evaluate", self.recipe, folder, self.held_out.questions)
        evaluation = ReportedEvaluation(folder, self.answerer.name, note=self.answerer.note)
        report = report_of(self.recipe, [evaluation], self.held_out.test.folder)
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
            recipe = without_selector(self.recipe)
            first_question = self.held_out.questions[:1]
            self._evaluate("first question", recipe, Path(first), first_question)

    def _evaluate(self, title: str, recipe: Recipe, folder: Path, questions: Sequence[Example]) -> None:
        inputs = {"test": self.held_out.test.folder}
        context = Context(title, recipe, folder, inputs, self.progress)
        gold: Path | None = None
        if self.held_out.test_schema is not None:
            gold = self.held_out.test_schema.folder
        evaluate_questions(context, questions, self.answerer.policy, gold, self.answers)
