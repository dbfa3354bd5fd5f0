"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pipelines import frames
from pipelines.config import Protocol, Recipe, Sampling
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation import evaluate, summary
from pipelines.evaluation.metrics import execution_accuracy, scored, value_of
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.voting import Rule
from pipelines.frames import DATA
from pipelines.protocols.base import at_once
from pipelines.protocols.base import build as build_protocol
from pipelines.recipes import digest
from pipelines.rollout.engine import EpisodeRequest, RolloutEngine, episode_seed
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.making import policy
from pipelines.rollout.user import simulated_user
from pipelines.sql.engine import Pair
from pipelines.sql.ves import r_ves
from pipelines.stages.answers import TIMING, Answers, Line, note_time
from pipelines.stages.context import Context, checkpoint_of
from pipelines.stages.inputs import examples, single_thread, write_lines
from pipelines.stages.reading import left_out
from pipelines.stages.selection import SELECTED, select
from pipelines.stages.shards import Run, Shards, asking
from pipelines.store import write_json
from pipelines.types import Example, StopReason, Trajectory, from_dict, read_lines, to_dict

RECORDS = "records.jsonl"
ONCE = "once"  # the greedy pass in which the agent must answer without looking
ORACLE, ENDPOINT = "oracle", "endpoint:"
SAMPLES_A_SEED = 10_000  # answers of another seed are other samples, not those of the log
FIRST_EPISODES = 100  # questions that may get malformed answers only before the others are not asked
EFFICIENCY = "timing.json"  # R-VES is made of wall-clock times: beside the results, not among them


def build(ctx: Context) -> None:
    """Write every trajectory (`data.parquet`), every record (`records.jsonl`), the summary and its figures."""
    questions = examples(ctx.inputs["test"], "test")
    name = next(name for name in ("grpo", "sft", "model") if name in ctx.inputs)
    if name == "model" and ctx.recipe.model.source == "tiny":
        # Random weights ramble to the token limit: one greedy pass says all that there is to say of them.
        settings = ctx.recipe.evaluation.model_copy(update={"samples": 0, "forced_single_turn": False})
        ctx = dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"evaluation": settings}))
    evaluate_questions(ctx, questions, checkpoint_of(ctx.inputs[name]), ctx.inputs.get("test_schema"))


def evaluate_questions(
    ctx: Context, questions: Sequence[Example], answerer: str, gold: Path | None, answers: Path | None = None
) -> None:
    """Evaluate any policy on any questions; finished shards survive a kill.

    Args:
        answerer: a checkpoint folder or hub name, or what `answering` says.
        gold: a finished gold-schema stage over these questions; None takes the gold SQL's own items.
        answers: a folder that keeps this policy's episodes, by pass and question; those there are not made again.
    """
    recipe = ctx.recipe
    shards = Shards(questions, recipe.rollout.shard, ctx.folder)
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    checkpoint = None if answerer == ORACLE or answerer.startswith(ENDPOINT) else answerer
    # An endpoint's rate and cap hold in one process: a second one would have its own.
    processes = 1 if answerer.startswith(ENDPOINT) else recipe.rollout.processes
    guard = MalformedGuard(shards)
    with asking(ctx, shards, checkpoint) as served:
        args = (served, answerer, ctx.responses, gold, answers)
        shards.run(start, args, processes, ctx.progress, enough=guard.is_triggered)
    if guard.is_triggered():
        guard.skip_the_rest(recipe, gold)
        ctx.progress.say(f"the first {FIRST_EPISODES} questions got malformed answers only: the others are not asked")
    rows = list(shards.rows())
    chosen: dict[str, float] = {}
    if recipe.evaluation.selector is not None and recipe.evaluation.samples:
        ctx.progress.begin("selection", 1, "panel")
        lines, chosen = select(ctx, recipe.evaluation.selector, questions, rows, gold)
        rows += lines
        ctx.progress.advance(1)
    own_rows = [row for row in rows if row["pass"] != ONCE]
    whole = [from_dict(Trajectory, row["trajectory"]) for row in own_rows]
    frames.write(ctx.folder / DATA, frames.to_frame(whole, extra=[{"pass": row["pass"]} for row in own_rows]))
    write_lines(ctx.folder / RECORDS, ({"pass": row["pass"], "record": row["record"]} for row in rows))
    evaluated = records(ctx.folder, "greedy", "sampled")
    settings = recipe.evaluation
    figures = summary.summarise(
        evaluated, recipe.headline, settings.ks, Rule.of(settings), recipe.seed, settings.metrics
    )
    figures = dataclasses.replace(figures, left_out=left_out(ctx.inputs["test"]))
    write_json(ctx.folder / "summary.json", to_dict(figures))
    chosen |= _accuracy("ex_selected", records(ctx.folder, SELECTED), recipe)
    ctx.metrics({**headline(figures), **figures.flat(), **_once(records(ctx.folder, ONCE), recipe), **chosen})
    reward = _r_ves(recipe, evaluated, questions) if recipe.evaluation.r_ves else None
    if reward is not None:
        write_json(ctx.folder / EFFICIENCY, {"r_ves": reward})


class MalformedGuard:
    """Stops asking a model whose answers to the first `FIRST_EPISODES` questions of an evaluation are all malformed.

    Exactly those count as asked, whatever the size of the shards and the number of processes; what was asked beyond is
    left out.
    """

    def __init__(self, shards: Shards[Example]) -> None:
        self._shards = shards
        self._head = range(min(len(shards), -(-FIRST_EPISODES // shards.size)))  # shards that hold the first questions
        self._first = {example.id for example in shards.items[:FIRST_EPISODES]}

    def is_triggered(self) -> bool:
        """Whether every episode of the first questions is malformed, and no answer ran. False until all are there."""
        if len(self._shards.items) <= FIRST_EPISODES or not all(self._shards.path(at).exists() for at in self._head):
            return False
        rows = (row["record"] for index in self._head for row in self._shards.read(index))
        first_records = [from_dict(EpisodeRecord, row) for row in rows if row["example_id"] in self._first]
        return all(not record.well_formed and not record.executable and not record.broken for record in first_records)

    def skip_the_rest(self, recipe: Recipe, gold: Path | None) -> None:
        """Write what follows the first questions: each question is wrong, and was not asked."""
        policy = self._shards.read(0)[0]["trajectory"]["policy"]
        evaluated = _evaluating(recipe, gold)
        for index in range(FIRST_EPISODES // self._shards.size, len(self._shards)):
            path, part = self._shards.path(index), self._shards.part(index)
            questions = [question for question in part if question.id not in self._first]
            rows = self._shards.read(index) if index in self._head else []
            lines = [row for row in rows if row["record"]["example_id"] in self._first]
            for evaluation in passes(recipe):
                skipped = [
                    _unasked(question, n, policy, evaluation)
                    for question in questions
                    for n in range(evaluation.samples)
                ]
                lines += evaluated(evaluation, questions, skipped)
            beside = path.with_name(f"{path.name}.part-rest")  # whole or absent
            write_lines(beside, lines)
            beside.replace(path)


def _unasked(question: Example, sample: int, policy: str, evaluation: Pass) -> Trajectory:
    return Trajectory(question.id, sample, policy, evaluation.protocol.name, (), (), None, StopReason.UNASKED)


def _r_ves(recipe: Recipe, evaluated: Sequence[EpisodeRecord], questions: Sequence[Example]) -> float | None:
    """R-VES of the greedy answers, timed once there are verdicts; they are right where BIRD's equality says so.

    Only of questions with a gold query, which is what an answer is timed against; None where none was answered. It goes
    to a side file and is no part of a dataset: wall-clock times differ with every run.
    """
    with_gold = {question.id: question for question in questions if question.gold_sql}
    greedy = [record for record in scored(evaluated) if record.mode == "greedy" and record.example_id in with_gold]
    if not greedy:
        return None
    examples = [with_gold[record.example_id] for record in greedy]
    pairs = [
        Pair(example.database, example.gold_sql, record.final_sql)
        for example, record in zip(examples, greedy, strict=True)
    ]
    with sql_engine(recipe, workers=1) as sql:  # two queries at a time would time each other
        verdicts = sql.verdicts(pairs, ["r_ves"])
    return r_ves([verdict.scores["r_ves"] for verdict in verdicts])


def records(folder: Path, *passes: str) -> list[EpisodeRecord]:
    """The evaluation records of a finished stage, of these passes ("greedy", "sampled", "once")."""
    rows = (row for _, row in read_lines(folder / RECORDS))
    return [from_dict(EpisodeRecord, row["record"]) for row in rows if row["pass"] in passes]


def headline(figures: summary.Summary) -> dict[str, float]:
    """The few numbers of the end-of-run table, by the recipe's equality, intervals beside them."""
    values: dict[str, float] = {}
    for name, estimate in (("ex", figures.ex.get(figures.equality)), ("ex_sampled", figures.sampled)):
        if estimate is not None:
            values |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
    if figures.points:
        last = figures.points[-1]
        values |= {"k": last.k, "majority": last.majority_at.value, "pass_at_k": last.pass_at.value}
    for name, metric in (("turns", "turns"), ("tokens", "tokens_out")):
        value = value_of(figures.measured.get(metric))
        if value is not None:
            values[name] = value
    return values


def _once(forced: list[EpisodeRecord], recipe: Recipe) -> dict[str, float]:
    """EX of the same model forced to answer without looking, and on the questions that need a look."""
    probing = [record for record in forced if record.needs_probe]
    return {**_accuracy("ex_at_once", forced, recipe), **_accuracy("ex_at_once_probe", probing, recipe)}


def _accuracy(name: str, evaluated: Sequence[EpisodeRecord], recipe: Recipe) -> dict[str, float]:
    """EX with its bounds under these names; {} where there are no records."""
    estimate = execution_accuracy(scored(evaluated), recipe.headline, recipe.seed)
    return (
        {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        if estimate is not None
        else {}
    )


def answering(name: str, recipe: Recipe, responses: Path) -> Policy:
    """The policy that is evaluated.

    Args:
        name: "oracle" for the scripted teacher without its mistakes, "endpoint:NAME" for an entry of
            `conf/local/endpoints.yaml`, anything else is a checkpoint folder or a hub name.
        responses: the folder of the logs of endpoints' answers.

    Raises:
        RecipeError: there is no such endpoint.
        DataError: there is no such model.
    """
    if name == ORACLE:
        from pipelines.rollout.policies.oracle import OraclePolicy

        return OraclePolicy(build_protocol(recipe.protocol), 0.0, schemas(recipe))
    if name.startswith(ENDPOINT):
        from pipelines.endpoints.client import endpoint
        from pipelines.teachers.policy import OpenAIPolicy

        entry = name.removeprefix(ENDPOINT)
        protocol = build_protocol(recipe.protocol)
        live, first = recipe.synthesis.teacher.concurrency, recipe.seed * SAMPLES_A_SEED
        return OpenAIPolicy(endpoint(entry), entry, live, responses, protocol, first)
    single_thread()
    return policy(name, recipe)


def _counted(model: Policy) -> tuple[int, int]:
    """Prompt and completion tokens of an endpoint's answers since the last call, whichever run bought them."""
    from pipelines.teachers.policy import OpenAIPolicy

    if not isinstance(model, OpenAIPolicy):
        return 0, 0
    used = model.asker.take_used()
    return int(used["prompt_tokens"]), int(used["completion_tokens"])


@dataclasses.dataclass(frozen=True)
class Pass:
    """One way of asking every question: what `records` calls it, how it speaks and samples, its turn cap, how often."""

    name: str
    mode: Mode
    protocol: Protocol
    sampling: Sampling
    max_turns: int
    samples: int

    @property
    def key(self) -> str:
        """What an answer depends on beside the policy and the question; not how many answers there are."""
        values = {name: getattr(self, name).model_dump(mode="json") for name in ("protocol", "sampling")}
        return digest({**values, "max_turns": self.max_turns})


def passes(recipe: Recipe) -> list[Pass]:
    """A greedy pass, a sampled one and, where the recipe says so, one in which the agent must answer at once.

    Raises:
        RecipeError: the recipe asks for the latter, and its protocol cannot answer at once.
    """
    settings, protocol, turns = recipe.evaluation, recipe.protocol, recipe.protocol.max_turns_eval
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    evaluations = [Pass("greedy", "greedy", protocol, greedy, turns, 1)]
    if settings.samples:
        evaluations.append(Pass("sampled", "sampled", protocol, settings.sampling, turns, settings.samples))
    if settings.forced_single_turn:
        single, cap = at_once(protocol)
        evaluations.append(Pass(ONCE, "greedy", single, greedy, cap, 1))
    return evaluations


def _evaluating(recipe: Recipe, gold: Path | None) -> Callable[[Pass, Sequence[Example], list[Trajectory]], list[Line]]:
    """What makes lines of the trajectories of a pass over these questions, in order."""
    sql, schema, links = sql_engine(recipe, workers=1), schemas(recipe), gold_schemas(gold)

    def lines(evaluation: Pass, questions: Sequence[Example], done: list[Trajectory]) -> list[Line]:
        by_id = {question.id: question for question in questions}
        evaluated = evaluate.evaluate(done, by_id, sql, schema, recipe.equalities, evaluation.mode, links)
        return [
            {"pass": evaluation.name, "trajectory": to_dict(trajectory), "record": to_dict(record)}
            for trajectory, record in zip(done, evaluated, strict=True)
        ]

    return lines


def start(recipe: Recipe, answerer: str, responses: Path, gold: Path | None, answers: Path | None = None) -> Run:
    """A process's own policy; its run writes one line an episode: the pass, the trajectory and its record."""
    sql, schema = sql_engine(recipe, workers=1), schemas(recipe)
    model, evaluated = answering(answerer, recipe, responses), _evaluating(recipe, gold)
    user = simulated_user(build_protocol(recipe.protocol), responses)

    def ask(evaluation: Pass, requests: Sequence[EpisodeRequest], timing: Path) -> list[Trajectory]:
        engine = RolloutEngine(
            model, build_protocol(evaluation.protocol), sql, evaluation.sampling, evaluation.max_turns, schema, user
        )
        done = engine.run(requests)
        note_time(timing, evaluation.name, len(done), engine.timing, _counted(model))
        return done

    def answer(evaluation: Pass, questions: Sequence[Example], timing: Path) -> list[Line]:
        answers_kept = Answers(None if answers is None else answers / evaluation.key)
        samples = {question.id: answers_kept.of(question) for question in questions}
        requests = [
            EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
            for question in questions
            for sample in range(evaluation.samples)
            if sample not in samples[question.id]
        ]
        for trajectory in ask(evaluation, requests, timing) if requests else []:
            samples[trajectory.example_id][trajectory.sample] = trajectory
        for question in {request.example.id: request.example for request in requests}.values():
            answers_kept.keep(question, samples[question.id])
        done = [samples[question.id][sample] for question in questions for sample in range(evaluation.samples)]
        return evaluated(evaluation, questions, done)

    def run(questions: Sequence[Any], path: Path) -> str:
        timing = path.parent.parent / TIMING
        lines = [line for evaluation in passes(recipe) for line in answer(evaluation, questions, timing)]
        write_lines(path, lines)
        right = [line["record"]["scores"][recipe.headline] for line in lines if line["pass"] == "greedy"]
        return f"greedy {100 * sum(right) / max(1, len(right)):.0f} %"

    return run
