"""The parent's side: whatever becomes of the child, one plain error and no process left behind."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from pydantic import ValidationError

from pipelines.core.errors import DataError, ResourceError, StoppedError, TrainingError
from pipelines.core.types import write_jsonl
from pipelines.recipe.config import Hardware
from pipelines.training import child, launch
from pipelines.training.plan import Plan


@pytest.fixture
def plan(tmp_path, recipe, checkpoint, trajectories) -> Plan:
    write_jsonl(tmp_path / "t.jsonl", trajectories)
    return Plan(
        kind="sft", recipe=recipe, checkpoint_in=str(checkpoint), data=tmp_path / "t.jsonl", out=tmp_path / "run"
    )


def alive(word: str) -> list[str]:
    """Processes whose command line holds a word."""
    listing = subprocess.run(["ps", "-ewwo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if word in line and not line.startswith("Z")]


def pids() -> list[str]:
    """The processes that are no zombies."""
    listing = subprocess.run(["ps", "-eo", "stat=,pid="], capture_output=True, text=True, check=True).stdout
    return [line.split()[1] for line in listing.splitlines() if not line.startswith("Z")]


def nothing(event) -> None:
    pass


def test_a_users_mistake_in_the_child_is_the_parents_error(plan, tmp_path):
    missing = plan.model_copy(update={"data": tmp_path / "no.jsonl"})
    with pytest.raises(DataError, match=r"no such file.*no\.jsonl"):
        launch.train(missing, plan.out, nothing)


def test_every_process_of_a_run_says_why_it_fails(plan, tmp_path):
    """Under torchrun each process writes to the same output; only the first one tells how the run goes."""
    path = tmp_path / "plan.json"
    path.write_text(plan.model_copy(update={"data": tmp_path / "no.jsonl"}).model_dump_json())
    command = [sys.executable, "-m", "pipelines.training.child", str(path)]
    second = subprocess.run(command, env={**os.environ, "RANK": "1"}, capture_output=True, text=True, check=False)
    assert second.returncode == child.FAILED
    [event] = [json.loads(line) for line in second.stdout.splitlines()]
    assert (event["event"], event["kind"]) == ("error", "DataError")


def test_a_silent_child_is_stopped_with_all_that_it_started(plan):
    began = time.monotonic()
    with pytest.raises(TrainingError, match="said nothing for"):
        launch.train(plan, plan.out, nothing, silence_s=0.2)
    assert time.monotonic() - began < launch.GRACE_S + 5
    assert alive(str(plan.out)) == []


def test_the_error_of_a_failed_child_has_its_last_output(plan):
    broken = Hardware(threads=1, launch=(sys.executable, "-c", "import sys; sys.exit('the last words')"))
    recipe = plan.recipe.model_copy(update={"hardware": broken})
    with pytest.raises(TrainingError, match=r"exit code 1: the last words.*Run again"):
        launch.train(plan.model_copy(update={"recipe": recipe}), plan.out, nothing)


def test_a_killed_child_is_told_from_a_broken_one(plan):
    killed = Hardware(threads=1, launch=(sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    recipe = plan.recipe.model_copy(update={"hardware": killed})
    with pytest.raises(TrainingError, match=r"was killed .*micro_batch"):
        launch.train(plan.model_copy(update={"recipe": recipe}), plan.out, nothing)


def test_a_missing_python_is_a_resource_error(plan):
    recipe = plan.recipe.model_copy(update={"hardware": Hardware(python="/no/such/python")})
    with pytest.raises(ResourceError, match=r"no such Python.*hardware\.python"):
        launch.train(plan.model_copy(update={"recipe": recipe}), plan.out, nothing)


def test_a_launcher_is_looked_for_beside_the_childs_python(tmp_path, monkeypatch):
    for name in ("python", "torchrun"):
        (tmp_path / name).touch(0o755)
    monkeypatch.setenv("PATH", "")
    hardware = Hardware(python=str(tmp_path / "python"), launch=("torchrun", "--nproc-per-node=2"))
    assert launch.launcher(hardware) == [str(tmp_path / "torchrun"), "--nproc-per-node=2"]
    with pytest.raises(ResourceError, match=r"no such launcher.*deepspeed"):
        launch.launcher(hardware.model_copy(update={"launch": ("deepspeed",)}))


def test_so_many_processes_are_started_as_the_recipe_says(tmp_path):
    (tmp_path / "python").touch(0o755)
    python = str(tmp_path / "python")
    assert launch.launcher(Hardware(python=python)) == [python]
    own = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    assert launch.launcher(Hardware(python=python, processes=2)) == [python, *own, "--nproc-per-node=2"]
    assert launch.launcher(Hardware(python=python, processes="gpu")) == [python, *own, "--nproc-per-node=gpu"]
    with pytest.raises(ValidationError, match="set processes to 1"):
        Hardware(processes=2, launch=("torchrun",))


def test_an_error_in_the_parent_stops_the_child(plan):
    def fail(event):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch.train(plan, plan.out, fail)
    assert alive(str(plan.out)) == []


SLEEPER = (sys.executable, "-c", "import time; time.sleep(120)")  # a launcher that never looks at its parent


@pytest.mark.services  # seconds: CI has it, README's test command not
@pytest.mark.parametrize(("launcher", "written"), [((), "curves.jsonl"), (SLEEPER, "child.log")])
def test_the_child_dies_with_its_parent(plan, tmp_path, launcher, written):
    """Also when the parent is killed by kill -9 and cannot say goodbye; by itself it would go on for minutes."""
    changes = {
        "sft": plan.recipe.sft.model_copy(update={"epochs": 100_000, "save_steps": 100_000}),
        "hardware": Hardware(threads=1, launch=launcher),
    }
    plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update=changes)})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
                from pathlib import Path
                from pipelines.training import launch
                from pipelines.training.plan import Plan
                plan = Plan.model_validate_json(Path({str(tmp_path / "plan.json")!r}).read_text())
                launch.train(plan, plan.out, print)
            """),
        ],
        env={**os.environ, "PYTHONPATH": str(launch.ROOT)},
        stdout=subprocess.DEVNULL,
    )

    try:
        wait_for(lambda: (plan.out / written).is_file() and alive(f"child {plan.out}"), 120.0)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    wait_for(lambda: alive(str(plan.out)) == [])
    assert not (plan.out / "model").exists()


SLOW_TARGET = """
import multiprocessing, pathlib, os, time
if multiprocessing.current_process().name != "MainProcess":
    pathlib.Path("started").write_text(str(os.getpid()))
    time.sleep(60)
def serve(): pass
"""
SPAWNS = """
import multiprocessing, time, slow_target
from pipelines.core.processes import DiesWithParent
multiprocessing.get_context("spawn").Process(target=DiesWithParent(slow_target.serve)).start()
time.sleep(60)
"""


def test_a_spawned_process_dies_with_its_parent_while_it_still_imports(tmp_path):
    (tmp_path / "slow_target.py").write_text(SLOW_TARGET)
    path = os.pathsep.join([str(launch.ROOT), str(tmp_path)])
    parent = subprocess.Popen([sys.executable, "-c", SPAWNS], cwd=tmp_path, env={**os.environ, "PYTHONPATH": path})
    try:
        wait_for(lambda: (tmp_path / "started").is_file() and (tmp_path / "started").read_text())
        assert (tmp_path / "started").read_text() in pids()
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: (tmp_path / "started").read_text() not in pids(), 5.0)


@pytest.mark.parametrize("whole_session", [False, True])
def test_a_command_ends_with_its_parent_and_so_does_what_its_session_started(tmp_path, whole_session):
    started = tmp_path / "started"
    writes = f"import os, time; open({str(started)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    engine = [sys.executable, "-c", writes]
    server = [sys.executable, "-c", f"import subprocess, time; subprocess.Popen({engine!r}); time.sleep(60)"]
    starts = f"""
import subprocess, time
from pipelines.core.processes import parent_bound_prefix
subprocess.Popen([*parent_bound_prefix({whole_session}), *{server if whole_session else engine!r}])
time.sleep(60)
"""
    parent = subprocess.Popen([sys.executable, "-c", starts], env={**os.environ, "PYTHONPATH": str(launch.ROOT)})
    try:
        wait_for(lambda: started.is_file() and started.read_text() in pids())
    finally:
        parent.kill()
        parent.wait()
    wait_for(lambda: started.read_text() not in pids(), 5.0)


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_a_run_that_is_sent_sigterm_ends_its_step_and_keeps_it(plan):
    """What a machine that is taken away sends first; sent again, it would end us at once."""
    long = plan.recipe.sft.model_copy(update={"epochs": 100_000, "save_steps": 100_000})
    plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"sft": long})})

    def on_event(event):
        if event["event"] == "step" and event["step"] == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(StoppedError, match=r"asked to stop, and did so after step \d+\. Run again"):
        launch.train(plan, plan.out, on_event)
    last = json.loads((plan.out / "curves.jsonl").read_text().splitlines()[-1])["step"]
    assert (plan.out / "checkpoints" / f"checkpoint-{last}" / "whole").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def wait_for(condition, seconds=20.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), TrainingError, "Lower sft.micro_batch"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried"), TrainingError, "Lower sft.micro_batch"),
        (OSError(28, "No space left on device"), ResourceError, "Free some space"),
    ],
)
def test_an_out_of_memory_error_names_the_setting_to_lower(plan, error, kind, words):
    named = child._named(error, plan)
    assert isinstance(named, kind)
    assert words in str(named)


def test_a_process_that_is_lost_is_told_in_one_line(plan):
    """What gloo raises in a process that waits for another, and what NCCL's watchdog writes before it ends one."""
    error = RuntimeError("[/gloo/pair.cc:553] Connection closed by peer [127.0.0.1]:43210\nmore")
    assert "was lost, or the others waited 1800 s for it: [/gloo" in str(child._named(error, plan))
    line = (
        "[rank0]:[E1122 ProcessGroupNCCL.cpp:616] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(...)"
    )
    dead = launch._death(-signal.SIGABRT, {"tail": [line, "RuntimeError: terminated"]}, plan)
    assert "was lost" in str(dead)
    assert "hardware.timeout_s" in dead.hint


def test_other_errors_are_not_guessed_at(plan):
    assert child._named(ValueError("x"), plan) is None
