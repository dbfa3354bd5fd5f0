"""Stage 8: a model on the held-out questions: greedy, sampled, and forced to answer at once."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.core.errors import DataError
from pipelines.core.files import read_lines, sha256, write_atomic
from pipelines.core.registry import DIALECTS
from pipelines.core.types import Example, StopReason, Trajectory, from_dict, to_dict
from pipelines.recipe.recipes import digest

if TYPE_CHECKING:
    from pipelines.rollout.engine import Timing


from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pipelines.core.registry import EQUALITIES
from pipelines.core.types import ExecutionResult, ExecutionStatus
from pipelines.curation.gold_schema import gold_schemas
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.evaluation.record import EpisodeRecord
from pipelines.evaluation.voting import signature
from pipelines.recipe.config import MERGE
from pipelines.stages.context import Context

if TYPE_CHECKING:
    from pipelines.endpoints.asking import Asker


from collections import Counter

import polars as pl

from pipelines.core import frames
from pipelines.core.files import write_json, write_lines
from pipelines.core.frames import DATA
from pipelines.core.store import MANIFEST, Store
from pipelines.core.types import read_jsonl, write_jsonl
from pipelines.evaluation import evaluate, summary
from pipelines.evaluation.metrics import execution_accuracy, unbroken, value_of
from pipelines.evaluation.record import Mode
from pipelines.evaluation.voting import Rule
from pipelines.protocols.base import at_once
from pipelines.protocols.base import build as build_protocol
from pipelines.recipe.config import ProtocolSection, Recipe
from pipelines.recipe.section import Sampling
from pipelines.report.data import System
from pipelines.rollout.engine import RolloutEngine, episode_seed
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.base import Policy
from pipelines.rollout.policies.making import policy
from pipelines.rollout.user import simulated_user
from pipelines.sql.engine import Pair
from pipelines.sql.equalities.official import r_ves
from pipelines.stages.context import checkpoint_of, examples, single_thread
from pipelines.stages.shards import Run, Shards, asking

# An evaluation's answers by question, kept so that none is made twice, and where the time of making them went.

TIMING = "timing.jsonl"
Line = dict[str, Any]  # {"pass": ..., "trajectory": ..., "record": ...}


class Answers:
    """The episodes of each question, in one file a question.

    Only what was asked and answered is kept, no verdict on it: another equality, another vote, a mended gold query asks
    nothing again. A broken episode is no answer, so it is asked again.

    Args:
        folder: of one policy asked in one way: its name must tell both. None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder

    def of(self, question: Example) -> dict[int, Trajectory]:
        """A question's episodes by the number of their sample; {} where their file is damaged."""
        path = self._path(question)
        if path is None or not path.is_file():
            return {}
        try:
            trajectories = [from_dict(Trajectory, row) for row in json.loads(path.read_text(encoding="utf-8"))]
        except (DataError, RecursionError, TypeError, ValueError):
            return {}  # damaged, as by a disk that lost power: it is asked again, and written anew
        return {trajectory.sample: trajectory for trajectory in trajectories}

    def keep(self, question: Example, episodes: Mapping[int, Trajectory]) -> None:
        """Keep a question's episodes, but for the broken ones."""
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
        return None if self._folder is None else self._folder / f"{digest(_facts(question))}.json"


def _facts(question: Example) -> dict[str, Any]:
    """All of a question, with its database by the bytes of its file instead of by its place."""
    facts = to_dict(question)
    path = Path(question.database.location)
    if not DIALECTS[question.database.engine].is_server() and path.is_file():
        stat = path.stat()
        facts["database"]["location"] = _bytes(path, stat.st_size, stat.st_mtime_ns)
    return facts


@functools.lru_cache(4096)
def _bytes(path: Path, size: int, changed_ns: int) -> str:
    """The digest of a file's bytes, taken once as long as it does not change."""
    return sha256(path)


@dataclasses.dataclass(frozen=True)
class Latency:
    """What one episode took on average; episodes overlap, so the seconds are no shares of the wall clock."""

    episodes: int
    # generate_s, sql_s: waiting for the policy, and for the database.
    generate_s: float
    sql_s: float
    # bought_in, bought_out: prompt and completion tokens that an endpoint counted; 0.0 where there was none.
    bought_in: float = 0.0
    bought_out: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds from a question to its answer."""
        return self.generate_s + self.sql_s


def note_time(path: Path, name: str, episodes: int, timing: Timing, bought: tuple[int, int] = (0, 0)) -> None:
    """Add a line to a side file, which is no part of what a stage made; processes may share the file.

    Args:
        bought: prompt and completion tokens that an endpoint counted.
    """
    paid = dict(zip(("bought_in", "bought_out"), bought, strict=True))
    line = json.dumps({"pass": name, "episodes": episodes, **dataclasses.asdict(timing), **paid})
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")


def latencies(folder: Path) -> Mapping[str, Latency]:
    """Mean latency by pass ("greedy", "sampled", "once"); {} where no time was noted."""
    path = folder / TIMING
    rows = [row for _, row in read_lines(path)] if path.is_file() else []
    latencies: dict[str, Latency] = {}
    for name in dict.fromkeys(row["pass"] for row in rows if "pass" in row):
        mine = [row for row in rows if row.get("pass") == name]
        episodes = sum(row["episodes"] for row in mine)
        if episodes:
            names = ("generate_s", "sql_s", "bought_in", "bought_out")
            latencies[name] = Latency(episodes, *(sum(row[key] for row in mine) / episodes for key in names))
    return latencies


# Candidate selection: the sample that an endpoint prefers to the others, pair by pair (Reasoning-SQL, A.4), or what
# it makes of the two with most votes (CSC-SQL).

SELECTED = "selected"  # the pass of the answers that were chosen
NOTHING = ExecutionResult(ExecutionStatus.ERROR, error="no final SQL", error_class="empty")


def select(
    ctx: Context, selector: str, questions: Sequence[Example], lines: Sequence[Line], gold: Path | None
) -> tuple[list[Line], dict[str, float]]:
    """One line a question, the chosen sample's own as a greedy episode, or that of the merged answer; and, for the
    metrics, the selector's liking for the first place and what its answers cost.

    Args:
        selector: an endpoint's name, behind `MERGE` where it merges; what it said is kept, so that a killed evaluation
            asks nothing twice.
        lines: of all passes. Broken samples are no candidates, and a question with no other is left out.
        gold: the gold-schema stage that the lines were held against; None for the gold SQL's own items.
    """
    from pipelines.endpoints.asking import Asker
    from pipelines.teachers.experts import choose

    by_id = {question.id: question for question in questions}
    samples: dict[str, list[Line]] = {}
    for line in lines:
        if line["pass"] == "sampled" and not line["record"]["broken"]:
            samples.setdefault(line["record"]["example_id"], []).append(line)
    results = _results(ctx, by_id, samples)
    cases = [
        (
            by_id[name],
            [(line["record"]["final_sql"] or "", results[name, line["record"]["final_sql"]]) for line in group],
        )
        for name, group in samples.items()
    ]
    form = EQUALITIES[ctx.recipe.headline].form
    asker = Asker.named(selector.removeprefix(MERGE), ctx.responses)
    if selector.startswith(MERGE):
        merged = _merged(ctx, asker, cases, lambda result: signature(result, form), gold)
        return merged, {f"selector_{name}": n for name, n in asker.take_used().items()}
    choices = choose(asker, cases, schemas(ctx.recipe), lambda result: signature(result, form))
    chosen = [_chosen(group[choice.winner]) for group, choice in zip(samples.values(), choices, strict=True)]
    first = sum(choice.first for choice in choices) / max(1, len(choices))
    return chosen, {"selector_first": first, **{f"selector_{name}": n for name, n in asker.take_used().items()}}


def _merged(
    ctx: Context,
    asker: Asker,
    cases: Sequence[tuple[Example, Sequence[tuple[str, ExecutionResult]]]],
    same: Callable[[ExecutionResult], str | None],
    gold: Path | None,
) -> list[Line]:
    """A line for the merged answer of each question, which need not be one of its samples."""
    from pipelines.evaluation.evaluate import evaluate, of_prediction
    from pipelines.teachers.experts import merge

    schema, questions = schemas(ctx.recipe), {question.id: question for question, _ in cases}
    with sql_engine(ctx.recipe) as sql:
        answers = merge(asker, cases, schema, same, sql.execute_many)
        trajectories = [
            of_prediction(name, text or None, asker.name) for name, text in zip(questions, answers, strict=True)
        ]
        links = gold_schemas(gold)
        records = evaluate(trajectories, questions, sql, schema, ctx.recipe.equalities, "greedy", links)
    return [
        {"pass": SELECTED, "trajectory": to_dict(trajectory), "record": to_dict(record)}
        for trajectory, record in zip(trajectories, records, strict=True)
    ]


def _results(
    ctx: Context, by_id: dict[str, Example], samples: dict[str, list[Line]]
) -> dict[tuple[str, str | None], ExecutionResult]:
    """What each different answer returns, by (question, SQL)."""
    wanted = {(name, line["record"]["final_sql"]) for name, group in samples.items() for line in group}
    ran = sorted((name, text) for name, text in wanted if text)
    with sql_engine(ctx.recipe) as sql:
        results = sql.execute_many([(by_id[name].database, text) for name, text in ran])
    return dict.fromkeys(wanted, NOTHING) | dict(zip(ran, results, strict=True))


def _chosen(line: Line) -> Line:
    record = dataclasses.replace(from_dict(EpisodeRecord, line["record"]), mode="greedy", sample=0, signature=None)
    return {"pass": SELECTED, "trajectory": line["trajectory"], "record": to_dict(record)}


# The texts of a finished evaluation, found from its folder: its trajectories and the questions that they answer.

QUESTIONS = "questions.jsonl"  # beside the records of a prediction file, whose questions lie in no store


@dataclasses.dataclass(frozen=True)
class Texts:
    """What records alone don't hold; both are () where nothing leads to it."""

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
    return Texts(tuple(trajectories), tuple(_examples(folder)))


def left_out(test: Path) -> dict[str, int]:
    """Questions that a finished `test` stage had to leave out, by the reason, the commonest first."""
    path = test / "quarantine.jsonl"
    rows = [row for _, row in read_lines(path)] if path.is_file() else []
    return dict(Counter(str(row["reason"]).replace("_", " ") for row in rows if row["pool"] == "test").most_common())


def taken(timing: Mapping[str, Latency], r_ves: float | None) -> dict[str, float]:
    """What an answer took, by name: seconds by pass, tokens that an endpoint counted, R-VES."""
    figures = {f"seconds ({name})": latency.total_s for name, latency in timing.items()}
    for name, latency in timing.items():
        if latency.bought_in or latency.bought_out:
            figures |= {f"tokens in ({name})": latency.bought_in, f"tokens out ({name})": latency.bought_out}
    return figures if r_ves is None else {**figures, "R-VES": r_ves}


def keep(folder: Path, questions: Sequence[Example], system: System) -> None:
    """Write what `texts` reads of a system of greedy answers that lies in no store."""
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


def _examples(folder: Path) -> list[Example]:
    """Questions beside the records, or those of the `test` stage that the manifest names, in the same store."""
    if (folder / QUESTIONS).is_file():
        return list(read_jsonl(folder / QUESTIONS, Example))
    place = folder.resolve()
    store = Store(place.parent.parent)
    manifest = store.manifest(place.parent.name, place.name) if (place / MANIFEST).is_file() else {}
    key = manifest.get("test") or manifest.get("inputs", {}).get("test")
    test = store.folder("test", str(key))
    return examples(test, "test") if key and (test / DATA).is_file() else []


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


def _unasked(question: Example, sample: int, policy: str, evaluation: EvaluationPass) -> Trajectory:
    return Trajectory(question.id, sample, policy, evaluation.protocol.name, (), (), None, StopReason.UNASKED)


def _r_ves(recipe: Recipe, evaluated: Sequence[EpisodeRecord], questions: Sequence[Example]) -> float | None:
    """R-VES of the greedy answers, timed once there are verdicts; they are right where BIRD's equality says so.

    Only of questions with a gold query, which is what an answer is timed against; None where none was answered. It goes
    to a side file and is no part of a dataset: wall-clock times differ with every run.
    """
    with_gold = {question.id: question for question in questions if question.gold_sql}
    greedy = [record for record in unbroken(evaluated) if record.mode == "greedy" and record.example_id in with_gold]
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
    estimate = execution_accuracy(unbroken(evaluated), recipe.headline, recipe.seed)
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
class EvaluationPass:
    """One way of asking every question: what `records` calls it, how it speaks and samples, its turn cap, how often."""

    name: str
    mode: Mode
    protocol: ProtocolSection
    sampling: Sampling
    max_turns: int
    samples: int

    @property
    def key(self) -> str:
        """What an answer depends on beside the policy and the question; not how many answers there are."""
        values = {name: getattr(self, name).model_dump(mode="json") for name in ("protocol", "sampling")}
        return digest({**values, "max_turns": self.max_turns})


def passes(recipe: Recipe) -> list[EvaluationPass]:
    """A greedy pass, a sampled one and, where the recipe says so, one in which the agent must answer at once."""
    settings, protocol, turns = recipe.evaluation, recipe.protocol, recipe.protocol.max_turns_eval
    greedy = settings.sampling.model_copy(update={"temperature": 0.0})
    evaluations = [EvaluationPass("greedy", "greedy", protocol, greedy, turns, 1)]
    if settings.samples:
        evaluations.append(EvaluationPass("sampled", "sampled", protocol, settings.sampling, turns, settings.samples))
    if settings.forced_single_turn:
        single, cap = at_once(protocol)
        evaluations.append(EvaluationPass(ONCE, "greedy", single, greedy, cap, 1))
    return evaluations


def _evaluating(
    recipe: Recipe, gold: Path | None
) -> Callable[[EvaluationPass, Sequence[Example], list[Trajectory]], list[Line]]:
    """What makes lines of the trajectories of a pass over these questions, in order."""
    sql, schema, links = sql_engine(recipe, workers=1), schemas(recipe), gold_schemas(gold)

    def lines(evaluation: EvaluationPass, questions: Sequence[Example], done: list[Trajectory]) -> list[Line]:
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

    def ask(evaluation: EvaluationPass, requests: Sequence[EpisodeRequest], timing: Path) -> list[Trajectory]:
        engine = RolloutEngine(
            model, build_protocol(evaluation.protocol), sql, evaluation.sampling, evaluation.max_turns, schema, user
        )
        done = engine.run(requests)
        note_time(timing, evaluation.name, len(done), engine.timing, _counted(model))
        return done

    def answer(evaluation: EvaluationPass, questions: Sequence[Example], timing: Path) -> list[Line]:
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
