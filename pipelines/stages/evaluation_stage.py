"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core import frames
from pipelines.core.files import replacing, write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.types import Example, SchemaItems, StopReason, Trajectory, from_dict, to_dict
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.environment.core import Environment, RolloutMode
from pipelines.evaluation import evaluate, summary
from pipelines.evaluation.error_analysis import Schemas
from pipelines.evaluation.metrics import execution_accuracy, unbroken, value_of
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.record_files import RECORDS, SELECTED, SINGLE_TURN, EvaluatedEpisode
from pipelines.evaluation.stats import Estimate
from pipelines.evaluation.voting import Rule
from pipelines.protocols.base import build_protocol, single_turn
from pipelines.recipe.config import ProtocolSection, Recipe, Sampling
from pipelines.recipe.recipes import digest
from pipelines.rollout.engine import episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.factories import policy
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.equalities.official import r_ves
from pipelines.stages.answer_latency import EFFICIENCY, TIMING, BoughtTokens, note_latency
from pipelines.stages.context import Context, checkpoint_of, examples, single_thread
from pipelines.stages.evaluation_texts import count_left_out
from pipelines.stages.kept_answers import KeptAnswers
from pipelines.stages.shards import Run, Shards, policy_for_shards

ORACLE, ENDPOINT = "oracle", "endpoint:"
SAMPLES_A_SEED = 10_000  # answers of another seed are other samples, not those of the log
FIRST_EPISODES = 100  # Skip the other questions if the answers to this many are all malformed.


@dataclasses.dataclass(frozen=True)
class EvaluationPass:
    """One way of asking every question: its name in `records`, protocol, sampling, turn cap and number of samples."""

    name: str
    mode: Mode
    protocol: ProtocolSection
    sampling: Sampling
    max_turns: int
    samples: int

    @property
    def answers_key(self) -> str:
        """A digest of the settings that decide an answer, beside the policy and the question."""
        settings = {
            "protocol": self.protocol.model_dump(mode="json"),
            "sampling": self.sampling.model_dump(mode="json"),
            "max_turns": self.max_turns,
        }
        return digest(settings)


def passes(recipe: Recipe) -> list[EvaluationPass]:
    """A greedy pass, a sampled one and, if the recipe asks for it, one in which the agent must answer at once."""
    settings = recipe.evaluation
    protocol = recipe.protocol
    turns = protocol.max_turns_eval
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    evaluation_passes = [EvaluationPass("greedy", "greedy", protocol, greedy, turns, samples=1)]
    if settings.samples:
        sampled = EvaluationPass("sampled", "sampled", protocol, settings.sampling, turns, settings.samples)
        evaluation_passes.append(sampled)
    if settings.forced_single_turn:
        at_once, cap = single_turn(protocol)
        evaluation_passes.append(EvaluationPass(SINGLE_TURN, "greedy", at_once, greedy, cap, samples=1))
    return evaluation_passes


def build(ctx: Context) -> None:
    """Write every trajectory (`data.parquet`), every record (`records.jsonl`), the summary and its figures."""
    questions = examples(ctx.inputs["test"], "test")
    stage = next(name for name in ("grpo", "sft", "model") if name in ctx.inputs)
    if stage == "model" and ctx.recipe.model.source == "tiny":
        # Random weights ramble to the token limit: one greedy pass is enough.
        settings = ctx.recipe.evaluation.model_copy(update={"samples": 0, "forced_single_turn": False})
        ctx = dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"evaluation": settings}))
    evaluate_questions(ctx, questions, checkpoint_of(ctx.inputs[stage]), ctx.inputs.get("test_schema"))


def evaluate_questions(
    ctx: Context, questions: Sequence[Example], answerer: str, gold: Path | None, answers: Path | None = None
) -> None:
    """Evaluate any policy on any questions; finished shards survive a kill.

    Args:
        answerer: a checkpoint folder or hub name, or a name that `evaluated_policy` takes.
        gold: a finished gold-schema stage over these questions; None takes the gold SQL's own items.
        answers: a folder that keeps this policy's episodes, by pass and question; those there are not made again.
    """
    ctx.progress.begin(ctx.stage, len(questions), "questions")
    episodes = _run_passes(ctx, questions, answerer, gold, answers)
    selector_figures: dict[str, float] = {}
    selector = ctx.recipe.evaluation.selector
    if selector is not None and ctx.recipe.evaluation.samples:
        from pipelines.stages.answer_selection import select_answers

        ctx.progress.begin("selection", 1, "panel")
        selected = select_answers(ctx, selector, questions, episodes, gold)
        episodes += selected.episodes
        selector_figures = selected.figures
        ctx.progress.advance(1)
    _write_episodes(ctx.folder, episodes)
    _write_figures(ctx, episodes, selector_figures)
    if ctx.recipe.evaluation.r_ves:
        _write_efficiency(ctx, questions, episodes)


def _run_passes(
    ctx: Context, questions: Sequence[Example], answerer: str, gold: Path | None, answers: Path | None
) -> list[EvaluatedEpisode]:
    """The episodes of all passes over the questions, shard by shard."""
    rollout = ctx.recipe.rollout
    shards = Shards(questions, rollout.shard, ctx.folder)
    checkpoint = None if answerer == ORACLE or answerer.startswith(ENDPOINT) else answerer
    # An endpoint's rate and cap hold in one process: a second one would have its own.
    processes = 1 if answerer.startswith(ENDPOINT) else rollout.processes
    guard = MalformedGuard(shards)
    with policy_for_shards(ctx, shards, checkpoint) as served:
        args = (served, answerer, ctx.responses, gold, answers)
        shards.run(make_evaluation_run, args, processes, ctx.progress, enough=guard.is_triggered)
    if guard.is_triggered():
        guard.skip_the_rest(ctx.recipe, gold)
        ctx.progress.say(f"the first {FIRST_EPISODES} questions got malformed answers only: the others are not asked")
    return [EvaluatedEpisode.from_row(row) for row in shards.rows()]


def _write_episodes(folder: Path, episodes: Sequence[EvaluatedEpisode]) -> None:
    """Write the trajectories of all passes but the single-turn one, and the records of all."""
    with_trajectory = [episode for episode in episodes if episode.pass_name != SINGLE_TURN]
    trajectories = [episode.trajectory for episode in with_trajectory]
    pass_names = [{"pass": episode.pass_name} for episode in with_trajectory]
    frames.write(folder / DATA, frames.to_frame(trajectories, extra=pass_names))
    write_lines(folder / RECORDS, (episode.record_row() for episode in episodes))


def _write_figures(ctx: Context, episodes: Sequence[EvaluatedEpisode], selector_figures: Mapping[str, float]) -> None:
    """Write `summary.json`, and the stage's metrics."""
    recipe = ctx.recipe
    settings = recipe.evaluation
    evaluated = _records_of(episodes, "greedy", "sampled")
    figures = summary.summarise(
        evaluated, recipe.headline, settings.ks, Rule.of(settings), recipe.seed, settings.metrics
    )
    figures = dataclasses.replace(figures, left_out=count_left_out(ctx.inputs["test"]))
    write_json(ctx.folder / "summary.json", to_dict(figures))
    at_once = _records_of(episodes, SINGLE_TURN)
    probing = [record for record in at_once if record.needs_probe]
    ctx.metrics(
        {
            **headline(figures),
            **figures.flat(),
            **_accuracy("ex_at_once", at_once, recipe),
            **_accuracy("ex_at_once_probe", probing, recipe),
            **selector_figures,
            **_accuracy("ex_selected", _records_of(episodes, SELECTED), recipe),
        }
    )


def _write_efficiency(ctx: Context, questions: Sequence[Example], episodes: Sequence[EvaluatedEpisode]) -> None:
    """Write R-VES of the greedy answers to questions with a gold query, which an answer is timed against.

    Wall-clock times differ with every run, so it goes to a side file. Without such an answer nothing is written.
    """
    with_gold = {question.id: question for question in questions if question.gold_sql}
    greedy = unbroken(_records_of(episodes, "greedy"))
    pairs = [
        Pair.of(with_gold[record.example_id], record.final_sql) for record in greedy if record.example_id in with_gold
    ]
    if not pairs:
        return
    with sql_engine(ctx.recipe, workers=1) as sql:  # two queries at a time would time each other
        verdicts = sql.verdicts(pairs, ["r_ves"])
    value = r_ves([verdict.scores["r_ves"] for verdict in verdicts])
    write_json(ctx.folder / EFFICIENCY, {"r_ves": value})


def _records_of(episodes: Sequence[EvaluatedEpisode], *pass_names: str) -> list[EpisodeRecord]:
    return [episode.record for episode in episodes if episode.pass_name in pass_names]


def _accuracy(name: str, evaluated: Sequence[EpisodeRecord], recipe: Recipe) -> dict[str, float]:
    """EX with its bounds under these names; {} if there are no records."""
    estimate = execution_accuracy(unbroken(evaluated), recipe.headline, recipe.seed)
    return _bounded(name, estimate)


def _bounded(name: str, estimate: Estimate | None) -> dict[str, float]:
    """A figure with the bounds of its interval; {} if there is none."""
    if estimate is None:
        return {}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


def headline(figures: summary.Summary) -> dict[str, float]:
    """The few numbers of the end-of-run table, by the recipe's equality, each with its interval."""
    values = _bounded("ex", figures.ex.get(figures.equality))
    values |= _bounded("ex_sampled", figures.sampled)
    if figures.points:
        last = figures.points[-1]
        values["k"] = last.k
        values["majority"] = last.majority_at.value
        values["pass_at_k"] = last.pass_at.value
    for name, metric in (("turns", "turns"), ("tokens", "tokens_out")):
        value = value_of(figures.measured.get(metric))
        if value is not None:
            values[name] = value
    return values


class MalformedGuard:
    """Stops asking a model whose answers to the first `FIRST_EPISODES` questions of an evaluation are all malformed.

    Exactly those count as asked, whatever the size of the shards and the number of processes; what was asked beyond is
    left out.
    """

    def __init__(self, shards: Shards[Example]) -> None:
        self._shards = shards
        first_shards = -(-FIRST_EPISODES // shards.size)
        self._head = range(min(len(shards), first_shards))  # shards that hold the first questions
        self._first = {example.id for example in shards.items[:FIRST_EPISODES]}

    def is_triggered(self) -> bool:
        """Whether every episode of the first questions is malformed, and no answer ran. False until all are there."""
        if len(self._shards.items) <= FIRST_EPISODES:
            return False
        if not all(self._shards.path(index).exists() for index in self._head):
            return False
        for index in self._head:
            for row in self._shards.read(index):
                if row["record"]["example_id"] not in self._first:
                    continue
                record = from_dict(EpisodeRecord, row["record"])
                if record.well_formed or record.executable or record.broken:
                    return False
        return True

    def skip_the_rest(self, recipe: Recipe, gold: Path | None) -> None:
        """Write the shards after the first questions: each question is wrong, and was not asked."""
        policy_name = self._shards.read(0)[0]["trajectory"]["policy"]
        judge = Judge(recipe, sql_engine(recipe, workers=1), schemas(recipe), gold_schemas(gold))
        for index in range(FIRST_EPISODES // self._shards.size, len(self._shards)):
            rows = []
            if index in self._head:
                rows = [row for row in self._shards.read(index) if row["record"]["example_id"] in self._first]
            questions = [question for question in self._shards.part(index) if question.id not in self._first]
            for evaluation_pass in passes(recipe):
                unasked = _unasked_trajectories(evaluation_pass, questions, policy_name)
                rows += [episode.shard_row() for episode in judge(evaluation_pass, questions, unasked)]
            with replacing(self._shards.path(index)) as new_file:
                write_lines(new_file, rows)


def _unasked_trajectories(
    evaluation_pass: EvaluationPass, questions: Sequence[Example], policy_name: str
) -> list[Trajectory]:
    protocol = evaluation_pass.protocol.name
    return [
        Trajectory(question.id, sample, policy_name, protocol, (), (), None, StopReason.UNASKED)
        for question in questions
        for sample in range(evaluation_pass.samples)
    ]


@dataclasses.dataclass(frozen=True)
class Judge:
    """Judges the trajectories of a pass."""

    recipe: Recipe
    sql: SqlEngine
    schema: Schemas
    gold_schemas: Mapping[str, SchemaItems] | None

    def __call__(
        self, evaluation_pass: EvaluationPass, questions: Sequence[Example], trajectories: Sequence[Trajectory]
    ) -> list[EvaluatedEpisode]:
        """The trajectories over some questions with their records, in order."""
        by_id = {question.id: question for question in questions}
        records = evaluate.evaluate(
            trajectories,
            by_id,
            self.sql,
            self.schema,
            self.recipe.equalities,
            evaluation_pass.mode,
            self.gold_schemas,
        )
        return [
            EvaluatedEpisode(evaluation_pass.name, trajectory, record)
            for trajectory, record in zip(trajectories, records, strict=True)
        ]


def evaluated_policy(name: str, recipe: Recipe, responses: Path) -> Policy:
    """The policy that is evaluated.

    Args:
        name: "oracle" for the scripted teacher without its mistakes, "endpoint:NAME" for an entry of
            `conf/local/endpoints.yaml`, anything else is a checkpoint folder or a hub name.
        responses: the folder of the logs of endpoints' answers.
    """
    if name == ORACLE:
        from pipelines.rollout.policies.oracle import OraclePolicy

        return OraclePolicy(build_protocol(recipe.protocol), 0.0, schemas(recipe))
    if name.startswith(ENDPOINT):
        from pipelines.endpoints.client import endpoint
        from pipelines.teachers.policy import OpenAIPolicy

        entry_name = name.removeprefix(ENDPOINT)
        protocol = build_protocol(recipe.protocol)
        concurrency = recipe.synthesis.teacher.concurrency
        first_sample = recipe.seed * SAMPLES_A_SEED
        return OpenAIPolicy(endpoint(entry_name), entry_name, concurrency, responses, protocol, first_sample)
    single_thread()
    return policy(name, recipe)


def make_evaluation_run(
    recipe: Recipe, answerer: str, responses: Path, gold: Path | None, answers: Path | None = None
) -> Run:
    """A process's own policy; its run writes one line an episode: the pass, the trajectory and its record."""
    environment = Environment(recipe, responses=responses)
    judge = Judge(recipe, environment.sql, environment.schema, gold_schemas(gold))
    model = evaluated_policy(answerer, recipe, responses)
    take_bought = _counter_of_tokens(model)

    def play(requests: Sequence[EpisodeRequest], evaluation_pass: EvaluationPass, timing: Path) -> list[Trajectory]:
        """Run episodes, and note their latency."""
        mode = RolloutMode(evaluation_pass.sampling, evaluation_pass.max_turns, evaluation_pass.protocol)
        engine = environment.engine(model, mode)
        trajectories = engine.run(requests)
        note_latency(timing, evaluation_pass.name, len(trajectories), engine.timing, take_bought())
        return trajectories

    def answer(questions: Sequence[Example], evaluation_pass: EvaluationPass, timing: Path) -> list[Trajectory]:
        """The trajectories of a pass, kept or new, in the order of questions and samples."""
        kept = KeptAnswers(None if answers is None else answers / evaluation_pass.answers_key)
        by_question = {question.id: kept.read(question) for question in questions}
        requests = []
        for question in questions:
            for sample in range(evaluation_pass.samples):
                if sample not in by_question[question.id]:
                    seed = episode_seed(recipe.seed, question.id, sample)
                    requests.append(EpisodeRequest(question, sample, seed))
        if requests:
            for trajectory in play(requests, evaluation_pass, timing):
                by_question[trajectory.example_id][trajectory.sample] = trajectory
        for question in {request.example.id: request.example for request in requests}.values():
            kept.write(question, by_question[question.id])
        return [by_question[question.id][sample] for question in questions for sample in range(evaluation_pass.samples)]

    def run(questions: Sequence[Any], path: Path) -> str:
        timing = path.parent.parent / TIMING
        episodes: list[EvaluatedEpisode] = []
        for evaluation_pass in passes(recipe):
            trajectories = answer(questions, evaluation_pass, timing)
            episodes += judge(evaluation_pass, questions, trajectories)
        write_lines(path, (episode.shard_row() for episode in episodes))
        scores = [record.score(recipe.headline) for record in _records_of(episodes, "greedy")]
        return f"greedy {100 * sum(scores) / max(1, len(scores)):.0f} %"

    return run


def _counter_of_tokens(model: Policy) -> Callable[[], BoughtTokens]:
    """A function that returns the tokens which an endpoint counted since its last call."""
    from pipelines.teachers.policy import OpenAIPolicy

    if not isinstance(model, OpenAIPolicy):
        return BoughtTokens

    def take() -> BoughtTokens:
        used = model.asker.take_used()
        return BoughtTokens(int(used.get("prompt_tokens", 0)), int(used.get("completion_tokens", 0)))

    return take
