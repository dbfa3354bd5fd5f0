"""The parent's side: whatever becomes of the child, one plain error and no process left behind; and two machines."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest
import torch
from pydantic import ValidationError

from pipelines.core.errors import DataError, ResourceError, StoppedError, TrainingError, UserError
from pipelines.core.processes import free_port
from pipelines.core.types import write_jsonl
from pipelines.recipe.config import Hardware
from pipelines.training import child, join, launch
from pipelines.training.plan import Plan


@pytest.fixture
def plan(tmp_path, recipe, checkpoint, trajectories):
    data = tmp_path / "t.jsonl"
    write_jsonl(data, trajectories)
    return Plan(kind="sft", recipe=recipe, checkpoint_in=str(checkpoint), data=data, out=tmp_path / "run")


def alive(word):
    listing = subprocess.run(["ps", "-ewwo", "stat,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if word in line and not line.startswith("Z")]


def children(pid):
    listing = subprocess.run(["ps", "-eo", "ppid=,pid="], capture_output=True, text=True, check=True).stdout
    pairs = [line.split() for line in listing.splitlines()]
    own = [int(child) for parent, child in pairs if parent == str(pid)]
    return own + [below for child in own for below in children(child)]


def pids():
    listing = subprocess.run(["ps", "-eo", "stat=,pid="], capture_output=True, text=True, check=True).stdout
    return [line.split()[1] for line in listing.splitlines() if not line.startswith("Z")]


def nothing(event):
    pass


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.05)


@contextmanager
def killed(code, **options):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(launch.ROOT), str(options.get("cwd", ""))])}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, **options) as parent:
        try:
            yield
        finally:
            parent.kill()


def test_a_users_mistake_in_the_child_is_the_parents_error(plan, tmp_path):
    missing = plan.model_copy(update={"data": tmp_path / "no.jsonl"})
    with pytest.raises(DataError, match=r"no such file.*no\.jsonl"):
        launch.train_in_child(missing, plan.out, nothing)


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
        launch.train_in_child(plan, plan.out, nothing, silence_s=0.2)
    assert time.monotonic() - began < launch.GRACE_S + 5
    assert alive(str(plan.out)) == []


@pytest.mark.services  # seconds: CI has it, README's test command not
def test_a_run_that_was_paused_is_not_taken_for_a_silent_one(plan, tmp_path):
    """Ctrl-Z or a paused container stops parent and child for hours; going on, the child still needs some time."""
    speaks_late = "import sys, time; open('started', 'w'); [time.sleep(0.1) for _ in range(20)]; sys.exit('spoke')"
    hardware = Hardware(threads=1, launch=(sys.executable, "-c", speaks_late))
    plan = plan.model_copy(update={"recipe": plan.recipe.model_copy(update={"hardware": hardware})})
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    code = f"""
from pathlib import Path
from pipelines.training import launch
from pipelines.training.plan import Plan
launch.WAIT_S = 1.0
plan = Plan.model_validate_json(Path({str(tmp_path / "plan.json")!r}).read_text())
launch.train_in_child(plan, plan.out, print, silence_s=6.0)
"""
    command = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(launch.ROOT)}
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as parent:
        wait_for((tmp_path / "started").is_file)
        stopped = [parent.pid, *children(parent.pid)]
        for pid in stopped:
            os.kill(pid, signal.SIGSTOP)
        time.sleep(8.0)
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
        said = parent.communicate(timeout=60)[1]
    assert "exit code 1: spoke" in said


def python(code):
    return Hardware(threads=1, launch=(sys.executable, "-c", code))


@pytest.mark.parametrize(
    ("hardware", "kind", "said"),
    [
        (python("import sys; sys.exit('the last words')"), TrainingError, r"exit code 1: the last words.*Run again"),
        (python("import os; os.kill(os.getpid(), 9)"), TrainingError, r"was killed .*micro_batch"),
        (Hardware(python="/no/such/python"), ResourceError, r"no such Python.*hardware\.python"),
    ],
)
def test_a_child_that_ends_badly_is_one_error_with_what_became_of_it(plan, hardware, kind, said):
    recipe = plan.recipe.model_copy(update={"hardware": hardware})
    with pytest.raises(kind, match=said):
        launch.train_in_child(plan.model_copy(update={"recipe": recipe}), plan.out, nothing)


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
        launch.train_in_child(plan, plan.out, fail)
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
    code = f"""
from pathlib import Path
from pipelines.training import launch
from pipelines.training.plan import Plan
plan = Plan.model_validate_json(Path({str(tmp_path / "plan.json")!r}).read_text())
launch.train_in_child(plan, plan.out, print)
"""
    with killed(code, stdout=subprocess.DEVNULL):
        wait_for(lambda: (plan.out / written).is_file() and alive(f"child {plan.out}"), 120.0)
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
    started = tmp_path / "started"
    with killed(SPAWNS, cwd=tmp_path):
        wait_for(lambda: started.is_file() and started.read_text() in pids())
    wait_for(lambda: started.read_text() not in pids(), 5.0)


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
    with killed(starts):
        wait_for(lambda: started.is_file() and started.read_text() in pids())
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
        launch.train_in_child(plan, plan.out, on_event)
    last = json.loads((plan.out / "curves.jsonl").read_text().splitlines()[-1])["step"]
    assert (plan.out / "checkpoints" / f"checkpoint-{last}" / "whole").is_file()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def cpu_memory_error():
    """What PyTorch raises for more memory than any machine has."""
    with pytest.raises(RuntimeError) as raised:
        torch.empty(1 << 46, dtype=torch.uint8)
    return raised.value


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried"), TrainingError, "Lower sft.micro_batch"),
        (cpu_memory_error(), TrainingError, "Lower sft.micro_batch"),
        (MemoryError(), TrainingError, "Lower sft.micro_batch"),
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
    assert child._named(ValueError("x"), plan) is None


def test_the_plan_that_was_written_last_is_joined(tmp_path):
    assert join.newest(tmp_path) is None
    for number, name in enumerate(("sft", "grpo")):
        folder = tmp_path / name / ".work-key"
        folder.mkdir(parents=True)
        (folder / "plan.json").touch()
        os.utime(folder / "plan.json", ns=(number, number))
    assert join.newest(tmp_path) == (tmp_path / "grpo" / ".work-key" / "plan.json", 1)
    with pytest.raises(UserError, match="--rdzv-backend"):
        join.main([str(tmp_path)])


@pytest.mark.slow
def test_a_second_machine_trains_with_the_first(tmp_path, recipe, examples, taught, monkeypatch):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    write_jsonl(tmp_path / "examples.jsonl", examples)
    torchrun = (sys.executable, "-m", "torch.distributed.run")

    def trained(name, launcher):
        out = tmp_path / name / "grpo" / ".work-key"
        made = recipe.model_copy(update={"hardware": Hardware(device="cpu", threads=1, launch=launcher)})
        plan = Plan(kind="grpo", recipe=made, checkpoint_in=str(taught), data=tmp_path / "examples.jsonl", out=out)
        launch.train_in_child(plan, out, lambda event: None)
        return [json.loads(line) for line in (out / "curves.jsonl").read_text().splitlines()]

    meeting = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--rdzv-backend=c10d", "--rdzv-id=test"]
    launcher = (*torchrun, "--nnodes=2", "--nproc-per-node=1", *meeting)
    (tmp_path / "two").mkdir()
    command = [sys.executable, "-m", "pipelines.training.join", str(tmp_path / "two"), *launcher]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(launch.ROOT)}, start_new_session=True) as other:
        try:
            two = trained("two", launcher)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(other.pid, signal.SIGKILL)
    one = trained("one", (*torchrun, "--nproc-per-node=2", "--standalone"))
    assert [line["loss"] for line in two] == pytest.approx([line["loss"] for line in one], abs=1e-5)
    assert [line["tokens"] for line in two] == [line["tokens"] for line in one]
