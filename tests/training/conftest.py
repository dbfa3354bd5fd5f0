"""A world of one database and a tiny untrained model: enough for every part of training to be real."""

import json
import os
import subprocess
import sys
from pathlib import Path

import filelock
import pytest

from pipelines.core.types import Action, ActionKind, Example, StopReason, Trajectory, Turn, write_jsonl
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Grpo, Hardware, Model, Optimizer, Recipe, RewardTerm, Sampling, Sft, TinyModel
from pipelines.recipe.config import ProtocolSection as ProtocolConfig
from pipelines.sql.schema import introspect
from pipelines.training.model import make_tiny
from tests.fakes import build_database

ROOT = Path(__file__).resolve().parents[2]
SIZES = TinyModel(width=32, layers=2, heads=2, ffn=64, vocabulary=400, context=512)
QUESTIONS = {
    "how many singers": "SELECT count(*) FROM singer",
    "names of singers": "SELECT name FROM singer",
    "ages of singers": "SELECT age FROM singer",
    "oldest age": "SELECT max(age) FROM singer",
    "youngest age": "SELECT min(age) FROM singer",
    "singers from France": "SELECT name FROM singer WHERE country = 'FRA'",
}


@pytest.fixture(scope="session")
def database(tmp_path_factory):
    script = """
    CREATE TABLE singer (singer_id INTEGER PRIMARY KEY, name TEXT, country TEXT, age INTEGER);
    INSERT INTO singer VALUES (1, 'Ann', 'FRA', 31), (2, 'Bo', 'USA', 52), (3, 'Cy', 'FRA', 25);
    """
    return build_database(tmp_path_factory.mktemp("databases") / "concerts.sqlite", script)


@pytest.fixture(scope="session")
def examples(database):
    return [
        Example(f"q{index}", question, database, sql, hardness="easy")
        for index, (question, sql) in enumerate(QUESTIONS.items())
    ]


@pytest.fixture(scope="session")
def recipe():
    """On-policy GRPO on the tiny world, 3 steps of 2 questions; tests change what they look at."""
    return Recipe(
        name="tiny",
        model=Model(tiny=SIZES),
        protocol=ProtocolConfig(prompt="brief", max_turns=3, reasoning=False),
        sft=Sft(
            batch=6,
            micro_batch=3,
            epochs=4,
            save_steps=2,
            optimizer=Optimizer(kind="muon", lr=0.02, options={"lr_rest": 3e-3}),
        ),
        rewards=(RewardTerm(term="exec", weight=1.0), RewardTerm(term="format", weight=1.0)),
        grpo=Grpo(
            group=4,
            questions_per_step=2,
            steps=3,
            micro_batch=4,
            save_steps=1,
            sampling=Sampling(turn_tokens=24, episode_tokens=200),
            optimizer=Optimizer(lr=1e-3, schedule="constant", warmup_ratio=0.0),
        ),
        hardware=Hardware(threads=1),
    )


@pytest.fixture(scope="session")
def trajectories(examples, recipe):
    """A demonstration of each question: a look at the table, then the gold SQL."""
    protocol = build_protocol(recipe.protocol)
    schema = introspect(examples[0].database)
    look, peek = "SELECT name FROM singer", "<observation> name Ann Bo Cy 2 left</observation>"
    return [
        Trajectory(
            example_id=example.id,
            sample=0,
            policy="oracle",
            protocol="react",
            prompt=protocol.prompt(example, schema, 3),
            turns=(
                Turn(protocol.write(Action(ActionKind.SQL, look)), Action(ActionKind.SQL, look), peek),
                Turn(
                    protocol.write(Action(ActionKind.SOLUTION, example.gold_sql)),
                    Action(ActionKind.SOLUTION, example.gold_sql),
                ),
            ),
            final_sql=example.gold_sql,
            stop=StopReason.SOLUTION,
        )
        for example in examples
    ]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory, trajectories, recipe):
    """A tiny model that has learned nothing, with a tokenizer of the demonstrations."""
    corpus = [text for one in trajectories for _, text in one.prompt]
    corpus += [turn.text for one in trajectories for turn in one.turns]
    out = tmp_path_factory.mktemp("model") / "model"
    make_tiny(recipe.model, corpus * 20, build_protocol(recipe.protocol).tags, out, seed=0)
    return out


@pytest.fixture(scope="session")
def taught(tmp_path_factory, trajectories, recipe, checkpoint):
    """The same model after a little SFT: it speaks the protocol, and is right often enough that rewards differ."""
    import torch

    from pipelines.training import sft
    from pipelines.training.plan import Plan

    torch.set_num_threads(1)
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    out = base / "taught"
    with filelock.FileLock(base / "taught.lock"):  # of several processes of tests, one trains for all
        if not (out / "finished").is_file():
            out.mkdir(exist_ok=True)
            section = recipe.sft.model_copy(update={"epochs": 150, "save_steps": 1000})
            changed = recipe.model_copy(update={"sft": section})
            plan = Plan(kind="sft", recipe=changed, checkpoint_in=str(checkpoint), data=out / "unused", out=out)
            sft.train(plan, trajectories, lambda event: None)
            (out / "finished").touch()
    return out / "model"


@pytest.fixture
def plan(tmp_path, recipe, examples, trajectories, checkpoint, taught, monkeypatch):
    """A function that plans SFT of the untaught model or GRPO of the taught one; `changes` are of that section."""
    from pipelines.training.plan import Plan

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_jsonl(tmp_path / "grpo.jsonl", examples)
    write_jsonl(tmp_path / "sft.jsonl", trajectories)

    def make(kind, name="run", start=None, sections=None, **changes):
        section = getattr(recipe, kind).model_copy(update=changes)
        out = tmp_path / name
        out.mkdir(exist_ok=True)
        return Plan(
            kind=kind,
            recipe=recipe.model_copy(update={kind: section, **(sections or {})}),
            checkpoint_in=str(start or (checkpoint if kind == "sft" else taught)),
            data=tmp_path / f"{kind}.jsonl",
            out=out,
        )

    return make


@pytest.fixture(scope="session")
def train():
    """A function that trains in this process; with `die_at`, it dies as that step is told, as by kill -9."""
    import torch

    from pipelines.training import grpo, samples, sft

    def run(plan, emit=lambda event: None, die_at=None):
        def told(event):
            if event["event"] == "step" and event["step"] == die_at:
                raise RuntimeError("killed")
            emit(event)

        torch.set_num_threads(1)
        module, of = (sft, Trajectory) if plan.kind == "sft" else (grpo, Example)
        return module.train(plan, samples.read_plan_data(plan.data, of), told)

    return run


@pytest.fixture(scope="session")
def curves():
    return lambda plan: [json.loads(line) for line in (plan.out / "curves.jsonl").read_text().splitlines()]


@pytest.fixture(scope="session")
def ranks():
    """A function that runs a plan in several processes over gloo (see ranks.py), and gives what became of each."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    command = [sys.executable, str(Path(__file__).parent / "ranks.py")]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as process:
        assert process.stdout.readline() == "ready\n"

        def run(plan, count=2, timeout_s=90.0, kill_at=None, signs=None):
            plan.out.mkdir(exist_ok=True)
            path = plan.out / "plan.json"
            path.write_text(plan.model_dump_json(), encoding="utf-8")
            request = {"plan": str(path), "count": count, "timeout_s": timeout_s, "kill_at": kill_at}
            request["signs"] = {str(rank): sign for rank, sign in (signs or {}).items()}
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
            return json.loads(process.stdout.readline())

        yield run
        process.stdin.close()
