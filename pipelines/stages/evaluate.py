"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

import dataclasses
import functools
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from pipelines.core import frames
from pipelines.core.errors import DataError
from pipelines.core.files import read_json_lines, read_lines, replacing, write_atomic, write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.registry import DIALECTS, EQUALITIES
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import (
    Example,
    ExecutionResult,
    ExecutionStatus,
    SchemaItems,
    StopReason,
    Trajectory,
    from_dict,
    read_jsonl,
    to_dict,
    write_jsonl,
)
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.environment.core import Environment, RolloutMode
from pipelines.evaluation import evaluate, summary
from pipelines.evaluation.metrics import execution_accuracy, unbroken, value_of
from pipelines.evaluation.record import EpisodeRecord, Mode
from pipelines.evaluation.voting import Rule, signature
from pipelines.protocols.base import build as build_protocol
from pipelines.protocols.base import single_turn
from pipelines.recipe.config import MERGE, ProtocolSection, Recipe, Sampling
from pipelines.recipe.recipes import digest
from pipelines.report.data import System
from pipelines.rollout.engine import Timing, episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.factories import policy
from pipelines.sql.engine import Pair, SqlEngine
from pipelines.sql.equalities.official import r_ves
from pipelines.stages.context import QUARANTINE, Context, checkpoint_of, examples, single_thread
from pipelines.stages.fingerprints import Digests
from pipelines.stages.shards import Run, Shards, policy_for_shards

RECORDS = "records.jsonl"
SINGLE_TURN = "once"  # the greedy pass in which the agent must answer without looking
SELECTED = "selected"  # the pass of the answers that were chosen
ORACLE, ENDPOINT = "oracle", "endpoint:"
SAMPLES_A_SEED = 10_000  # answers of another seed are other samples, not those of the log
FIRST_EPISODES = 100  # questions that may get malformed answers only before the others are not asked
EFFICIENCY = "timing.json"  # R-VES is made of wall-clock times: beside the results, not among them
TIMING = "timing.jsonl"
QUESTIONS = "questions.jsonl"  # beside the records of a prediction file, whose questions lie in no store
NOTHING = ExecutionResult(ExecutionStatus.ERROR, error="no final SQL", error_class="empty")
Line = dict[str, Any]  # {"pass": ..., "trajectory": ..., "record": ...}
_digests = Digests(None)  # of the databases of kept answers

# An evaluation's answers by question, kept so that none is made twice, and the time that they took.


class KeptAnswers:
    """The episodes of each question, in one file a question.

    Only questions and answers are kept, no verdicts: another equality, another vote, a mended gold query asks
    nothing again. A broken episode is no answer, so it is asked again. The folder is of one policy asked in one
    way, both in its name; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, question: Example) -> dict[int, Trajectory]:
        """A question's episodes by the number of their sample; {} if their file is damaged."""
        path = self._path(question)
        if path is None or not path.is_file():
            return {}
        try:
            trajectories = [from_dict(Trajectory, row) for row in json.loads(path.read_text(encoding="utf-8"))]
        except (DataError, RecursionError, TypeError, ValueError):
            return {}  # damaged, as by a disk that lost power: it is asked again, and written anew
        return {trajectory.sample: trajectory for trajectory in trajectories}

    def keep(self, question: Example, episodes: Mapping[int, Trajectory]) -> None:
        """Keep a question's episodes except the broken ones."""
        path = self._path(question)
        whole = [
            to_dict(trajectory)
            for _, trajectory in sorted(episodes.items())
            if trajectory.stop is not StopReason.BROKEN
        ]
        if path is not None and whole:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, json.dumps(whole, ensure_ascii=False))

    def _path(self, question: Example) -> Path | None:
        if self._folder is None:
            return None
        facts, path = to_dict(question), Path(question.database.location)
        # All of a question counts, its database by the bytes of its file instead of by its place.
        if not DIALECTS[question.database.engine].is_server and path.is_file():
            facts["database"]["location"] = _digests.of(path)
        return self._folder / f"{digest(facts)}.json"


@dataclasses.dataclass(frozen=True)
class Latency:
    """The mean time of one episode; episodes overlap, so the seconds are no shares of the wall clock."""

    episodes: int
    # generate_s, sql_s: waiting for the policy, and for the database.
    generate_s: float
    sql_s: float
    # bought_in, bought_out: prompt and completion tokens that an endpoint counted; 0.0 if there was none.
    bought_in: float = 0.0
    bought_out: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from a question to its answer."""
        return self.generate_s + self.sql_s


def note_time(path: Path, name: str, episodes: int, timing: Timing, bought: tuple[int, int] = (0, 0)) -> None:
    """Add a line to a side file, which is not among the results of a stage; processes may share the file.

    `bought` are the prompt and completion tokens that an endpoint counted.
    """
    paid = dict(zip(("bought_in", "bought_out"), bought, strict=True))
    line = json.dumps({"pass": name, "episodes": episodes, **dataclasses.asdict(timing), **paid})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def latencies(folder: Path) -> Mapping[str, Latency]:
    """Mean latency by pass ("greedy", "sampled", "once"); {} if no time was noted."""
    rows = read_json_lines(folder / TIMING)
    latencies: dict[str, Latency] = {}
    for name in dict.fromkeys(row["pass"] for row in rows if "pass" in row):
        mine = [row for row in rows if row.get("pass") == name]
        episodes = sum(row["episodes"] for row in mine)
        if episodes:
            names = ("generate_s", "sql_s", "bought_in", "bought_out")
            latencies[name] = Latency(episodes, *(sum(row[key] for row in mine) / episodes for key in names))
    return latencies


# Candidate selection: the sample that an endpoint prefers to the others, pair by pair (Reasoning-SQL, A.4), or its
# merger of the two with most votes (CSC-SQL).


def select(
    ctx: Context, selector: str, questions: Sequence[Example], lines: Sequence[Line], gold: Path | None
) -> tuple[list[Line], dict[str, float]]:
    """One line a question, the chosen sample's own as a greedy episode, or that of the merged answer; and, for the
    metrics, the selector's liking for the first place and the cost of its answers.

    Args:
        selector: an endpoint's name, behind `MERGE` if it merges; its answers are kept, so that a killed evaluation
            asks nothing twice.
        lines: of all passes. Broken samples are no candidates, and a question with no other is left out.
        gold: the gold-schema stage that the lines were held against; None for the gold SQL's own items.
    """
    from pipelines.endpoints.asker import Asker
    from pipelines.teachers import experts

    by_id, schema = {question.id: question for question in questions}, schemas(ctx.recipe)
    samples: dict[str, list[Line]] = {}
    for line in lines:
        if line["pass"] == "sampled" and not line["record"]["broken"]:
            samples.setdefault(line["record"]["example_id"], []).append(line)
    same = functools.partial(signature, form=EQUALITIES[ctx.recipe.headline].form)
    asker = Asker.named(selector.removeprefix(MERGE), ctx.responses)
    with sql_engine(ctx.recipe) as sql:
        # Each different answer of a question is run once.
        wanted = {(name, line["record"]["final_sql"]) for name, group in samples.items() for line in group}
        ran = sorted((name, text) for name, text in wanted if text)
        returned = sql.execute_many([(by_id[name].database, text) for name, text in ran])
        results = dict.fromkeys(wanted, NOTHING) | dict(zip(ran, returned, strict=True))
        cases = [
            (
                by_id[name],
                [(line["record"]["final_sql"] or "", results[name, line["record"]["final_sql"]]) for line in group],
            )
            for name, group in samples.items()
        ]
        if selector.startswith(MERGE):  # a merged answer need not be one of the samples
            answers = experts.merge_answers(asker, cases, schema, same, sql.execute_many)
            trajectories = [
                evaluate.of_prediction(name, text or None, asker.name)
                for name, text in zip(samples, answers, strict=True)
            ]
            asked, equalities = {name: by_id[name] for name in samples}, ctx.recipe.equalities
            records = evaluate.evaluate(trajectories, asked, sql, schema, equalities, "greedy", gold_schemas(gold))
            merged = [
                {"pass": SELECTED, "trajectory": to_dict(trajectory), "record": to_dict(record)}
                for trajectory, record in zip(trajectories, records, strict=True)
            ]
            return merged, {f"selector_{name}": n for name, n in asker.take_used().items()}
    choices = experts.choose_answers(asker, cases, schema, same)
    chosen = []
    for group, choice in zip(samples.values(), choices, strict=True):
        record = from_dict(EpisodeRecord, group[choice.winner]["record"])
        greedy = dataclasses.replace(record, mode="greedy", sample=0, signature=None)
        trajectory = group[choice.winner]["trajectory"]
        chosen.append({"pass": SELECTED, "trajectory": trajectory, "record": to_dict(greedy)})
    first = sum(choice.first for choice in choices) / max(1, len(choices))
    return chosen, {"selector_first": first, **{f"selector_{name}": n for name, n in asker.take_used().items()}}


# The texts of a finished evaluation, found from its folder: its trajectories and the questions that they answer.


@dataclasses.dataclass(frozen=True)
class Texts:
    """The texts that records lack; both are () if they are not found."""

    trajectories: tuple[Trajectory, ...] = ()
    examples: tuple[Example, ...] = ()


def texts(folder: Path, passes: Sequence[str]) -> Texts:
    """The trajectories of some passes, in the order of the passes and of their records, and the test questions."""
    if not (folder / DATA).is_file():
        return Texts()
    frame = frames.read(folder / DATA)
    trajectories = [
        trajectory
        for name in passes
        for trajectory in frames.from_frame(frame.filter(pl.col("pass") == name), Trajectory)
    ]
    # The questions lie beside the records, or in the `test` stage that the manifest names, in the same store.
    if (folder / QUESTIONS).is_file():
        return Texts(tuple(trajectories), tuple(read_jsonl(folder / QUESTIONS, Example)))
    place = folder.resolve()
    store = Store(place.parent.parent)
    manifest = store.manifest(place.parent.name, place.name) if (place / MANIFEST).is_file() else {}
    key = manifest.get("test") or manifest.get("inputs", {}).get("test")
    test = store.folder("test", str(key))
    questions = examples(test, "test") if key and (test / DATA).is_file() else []
    return Texts(tuple(trajectories), tuple(questions))


def left_out(test: Path) -> dict[str, int]:
    """Questions that a finished `test` stage had to leave out, by the reason, the commonest first."""
    rows = [row for row in read_json_lines(test / QUARANTINE) if row["pool"] == "test" and row.get("chosen", True)]
    return dict(Counter(str(row["reason"]).replace("_", " ") for row in rows).most_common())


def answer_costs(timing: Mapping[str, Latency], r_ves: float | None) -> dict[str, float]:
    """The costs of an answer by name: seconds by pass, tokens that an endpoint counted, R-VES."""
    figures = {f"seconds ({name})": latency.total_s for name, latency in timing.items()}
    for name, latency in timing.items():
        if latency.bought_in or latency.bought_out:
            figures |= {f"tokens in ({name})": latency.bought_in, f"tokens out ({name})": latency.bought_out}
    return figures if r_ves is None else {**figures, "R-VES": r_ves}


def write_texts(folder: Path, questions: Sequence[Example], system: System) -> None:
    """Write the files of `texts` for a system of greedy answers that lies in no store."""
    frame = frames.to_frame(system.trajectories, extra=[{"pass": "greedy"}] * len(system.trajectories))
    frames.write(folder / DATA, frame)
    absolute = (
        dataclasses.replace(
            question,
            database=dataclasses.replace(question.database, location=str(Path(question.database.location).resolve())),
        )
        for question in questions
    )
    write_jsonl(folder / QUESTIONS, absolute)


def build(ctx: Context) -> None:
    """Write every trajectory (`data.parquet`), every record (`records.jsonl`), the summary and its figures."""
    questions = examples(ctx.inputs["test"], "test")
    name = next(name for name in ("grpo", "sft", "model") if name in ctx.inputs)
    if name == "model" and ctx.recipe.model.source == "tiny":
        # Random weights ramble to the token limit: one greedy pass is enough.
        settings = ctx.recipe.evaluation.model_copy(update={"samples": 0, "forced_single_turn": False})
        ctx = dataclasses.replace(ctx, recipe=ctx.recipe.model_copy(update={"evaluation": settings}))
    evaluate_questions(ctx, questions, checkpoint_of(ctx.inputs[name]), ctx.inputs.get("test_schema"))


def evaluate_questions(
    ctx: Context, questions: Sequence[Example], answerer: str, gold: Path | None, answers: Path | None = None
) -> None:
    """Evaluate any policy on any questions; finished shards survive a kill.

    Args:
        answerer: a checkpoint folder or hub name, or a name that `evaluated_policy` takes.
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
    with policy_for_shards(ctx, shards, checkpoint) as served:
        args = (served, answerer, ctx.responses, gold, answers)
        shards.run(make_evaluation_run, args, processes, ctx.progress, enough=guard.is_triggered)
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
    own_rows = [row for row in rows if row["pass"] != SINGLE_TURN]
    whole = [from_dict(Trajectory, row["trajectory"]) for row in own_rows]
    frames.write(ctx.folder / DATA, frames.to_frame(whole, extra=[{"pass": row["pass"]} for row in own_rows]))
    write_lines(ctx.folder / RECORDS, ({"pass": row["pass"], "record": row["record"]} for row in rows))
    made = [(row["pass"], from_dict(EpisodeRecord, row["record"])) for row in rows]
    evaluated, how = [record for name, record in made if name in ("greedy", "sampled")], recipe.evaluation
    figures = summary.summarise(evaluated, recipe.headline, how.ks, Rule.of(how), recipe.seed, how.metrics)
    figures = dataclasses.replace(figures, left_out=left_out(ctx.inputs["test"]))
    write_json(ctx.folder / "summary.json", to_dict(figures))
    chosen |= _accuracy("ex_selected", [record for name, record in made if name == SELECTED], recipe)
    single = [record for name, record in made if name == SINGLE_TURN]
    single_figures = _accuracy("ex_at_once", single, recipe)
    single_figures |= _accuracy("ex_at_once_probe", [record for record in single if record.needs_probe], recipe)
    ctx.metrics({**headline(figures), **figures.flat(), **single_figures, **chosen})
    # R-VES of the greedy answers to questions with a gold query, which an answer is timed against. Wall-clock times
    # differ with every run, so it goes to a side file.
    with_gold = {question.id: question for question in questions if question.gold_sql}
    greedy = [record for record in unbroken(evaluated) if record.mode == "greedy" and record.example_id in with_gold]
    if recipe.evaluation.r_ves and greedy:
        pairs = [Pair.of(with_gold[record.example_id], record.final_sql) for record in greedy]
        with sql_engine(recipe, workers=1) as sql:  # two queries at a time would time each other
            verdicts = sql.verdicts(pairs, ["r_ves"])
        write_json(ctx.folder / EFFICIENCY, {"r_ves": r_ves([verdict.scores["r_ves"] for verdict in verdicts])})


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
        """Write the shards after the first questions: each question is wrong, and was not asked."""
        policy = self._shards.read(0)[0]["trajectory"]["policy"]
        kit = (recipe, sql_engine(recipe, workers=1), schemas(recipe), gold_schemas(gold))
        for index in range(FIRST_EPISODES // self._shards.size, len(self._shards)):
            path, part = self._shards.path(index), self._shards.part(index)
            questions = [question for question in part if question.id not in self._first]
            rows = self._shards.read(index) if index in self._head else []
            lines = [row for row in rows if row["record"]["example_id"] in self._first]
            for evaluation in passes(recipe):
                name = evaluation.protocol.name
                skipped = [
                    Trajectory(question.id, n, policy, name, (), (), None, StopReason.UNASKED)
                    for question in questions
                    for n in range(evaluation.samples)
                ]
                lines += judged_lines(evaluation, questions, skipped, *kit)
            with replacing(path) as beside:
                write_lines(beside, lines)


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


def _accuracy(name: str, evaluated: Sequence[EpisodeRecord], recipe: Recipe) -> dict[str, float]:
    """EX with its bounds under these names; {} if there are no records."""
    estimate = execution_accuracy(unbroken(evaluated), recipe.headline, recipe.seed)
    if estimate is None:
        return {}
    return {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}


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

        entry = name.removeprefix(ENDPOINT)
        protocol = build_protocol(recipe.protocol)
        live, first = recipe.synthesis.teacher.concurrency, recipe.seed * SAMPLES_A_SEED
        return OpenAIPolicy(endpoint(entry), entry, live, responses, protocol, first)
    single_thread()
    return policy(name, recipe)


@dataclasses.dataclass(frozen=True)
class EvaluationPass:
    """One way of asking every question: its name in `records`, protocol, sampling, turn cap and number of samples."""

    name: str
    mode: Mode
    protocol: ProtocolSection
    sampling: Sampling
    max_turns: int
    samples: int


def passes(recipe: Recipe) -> list[EvaluationPass]:
    """A greedy pass, a sampled one and, if the recipe asks for it, one in which the agent must answer at once."""
    settings, protocol, turns = recipe.evaluation, recipe.protocol, recipe.protocol.max_turns_eval
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    evaluations = [EvaluationPass("greedy", "greedy", protocol, greedy, turns, 1)]
    if settings.samples:
        evaluations.append(EvaluationPass("sampled", "sampled", protocol, settings.sampling, turns, settings.samples))
    if settings.forced_single_turn:
        single, cap = single_turn(protocol)
        evaluations.append(EvaluationPass(SINGLE_TURN, "greedy", single, greedy, cap, 1))
    return evaluations


def judged_lines(
    evaluation: EvaluationPass,
    questions: Sequence[Example],
    done: Sequence[Trajectory],
    recipe: Recipe,
    sql: SqlEngine,
    schema: evaluate.Schemas,
    links: Mapping[str, SchemaItems] | None,
) -> list[Line]:
    """The lines of a pass's trajectories over some questions, with their verdicts, in order."""
    by_id = {question.id: question for question in questions}
    evaluated = evaluate.evaluate(done, by_id, sql, schema, recipe.equalities, evaluation.mode, links)
    return [
        {"pass": evaluation.name, "trajectory": to_dict(trajectory), "record": to_dict(record)}
        for trajectory, record in zip(done, evaluated, strict=True)
    ]


def make_evaluation_run(
    recipe: Recipe, answerer: str, responses: Path, gold: Path | None, answers: Path | None = None
) -> Run:
    """A process's own policy; its run writes one line an episode: the pass, the trajectory and its record."""
    from pipelines.teachers.policy import OpenAIPolicy

    environment = Environment(recipe, responses=responses)
    links = gold_schemas(gold)
    model = evaluated_policy(answerer, recipe, responses)

    def run(questions: Sequence[Any], path: Path) -> str:
        lines: list[Line] = []
        for evaluation in passes(recipe):
            # Answers are kept under the digest of the settings that decide them beside the policy and the question.
            settings = {name: getattr(evaluation, name).model_dump(mode="json") for name in ("protocol", "sampling")}
            key = digest({**settings, "max_turns": evaluation.max_turns})
            answers_kept = KeptAnswers(None if answers is None else answers / key)
            samples = {question.id: answers_kept.of(question) for question in questions}
            requests = [
                EpisodeRequest(question, sample, episode_seed(recipe.seed, question.id, sample))
                for question in questions
                for sample in range(evaluation.samples)
                if sample not in samples[question.id]
            ]
            if requests:
                mode = RolloutMode(evaluation.sampling, evaluation.max_turns, evaluation.protocol)
                engine = environment.engine(model, mode)
                made = engine.run(requests)
                used = model.asker.take_used() if isinstance(model, OpenAIPolicy) else {}
                bought = int(used.get("prompt_tokens", 0)), int(used.get("completion_tokens", 0))
                note_time(path.parent.parent / TIMING, evaluation.name, len(made), engine.timing, bought)
                for trajectory in made:
                    samples[trajectory.example_id][trajectory.sample] = trajectory
            for question in {request.example.id: request.example for request in requests}.values():
                answers_kept.keep(question, samples[question.id])
            done = [samples[question.id][sample] for question in questions for sample in range(evaluation.samples)]
            lines += judged_lines(evaluation, questions, done, recipe, environment.sql, environment.schema, links)
        write_lines(path, lines)
        right = [line["record"]["scores"][recipe.headline] for line in lines if line["pass"] == "greedy"]
        return f"greedy {100 * sum(right) / max(1, len(right)):.0f} %"

    return run
