"""vLLM servers that a stage starts for itself: real processes, their health, their deaths, and who gets which GPU."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from pipelines.core.errors import ResourceError
from pipelines.recipe import recipes
from pipelines.rollout.policies import replicas
from pipelines.rollout.policies.factories import serving
from pipelines.rollout.policies.replicas import layout

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Where the stand-ins keep notes; no GPU is seen, and the looks at servers follow one another quickly."""
    monkeypatch.setenv("STAND_IN_HOME", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(replicas, "POLL_S", 0.02)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-S", str(STAND_IN)])} "$@"\n')
    python.chmod(0o755)
    return tmp_path


@pytest.fixture
def recipe(home):
    def make(*changes):
        own = ["rollout.policy=vllm", f"rollout.python={home / 'python'}", "hardware.device=auto"]
        return recipes.load("miniature", [*own, *changes])

    return make


def notes(home, name="started"):
    path = home / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def until(condition, seconds=20.0):
    """Wait for something that must come; the bound is only for a test that fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def well(url):
    try:
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=5):
            return True
    except OSError:
        return False


def test_a_policy_of_vllm_alone_is_enough(home, recipe):
    """No server is named: one is started with the stage's checkpoint, is sent it, and ends with the stage."""
    lines = []
    with serving("some/checkpoint", recipe("rollout.arguments=[--max-model-len=512]"), home, lines.append) as served:
        [url] = served.recipe.rollout.servers
        [started] = notes(home)
        assert started["--model"] == "some/checkpoint"
        assert (started["--served-model-name"], started["--max-model-len"]) == ("policy", "512")
        assert well(url)
        assert [path for _, path, _ in notes(home, "asked")] == ["/collective_rpc", "/reset_prefix_cache"]
    assert lines == ["starting 1 vLLM server of some/checkpoint"]
    assert not alive(started["pid"])
    assert not alive(started["engine"])
    assert not list(home.glob("vllm-*.log"))


@pytest.mark.parametrize(("trains", "rank"), [(True, "16"), (False, None)])
def test_servers_of_a_run_with_adapters_have_room_for_them(home, recipe, trains, rank):
    """Rank 12 takes the room of 16. Where nothing is trained, whole models are served."""
    longer = "evaluation.sampling.episode_tokens=700"
    with serving("m", recipe("model.lora={rank: 12, alpha: 24}", longer), home, print, newest=home if trains else None):
        [started] = notes(home)
    assert started.get("--max-lora-rank") == rank
    assert started["--max-model-len"] == "700"  # of the recipe's longest episode


def test_servers_of_ones_own_are_left_alone(home, recipe):
    made = recipe("rollout.servers=[http://127.0.0.1:9/v1]")
    with serving("some/checkpoint", made, home, print, newest=home / "served") as served:
        assert served.recipe == made
    assert notes(home) == []


def test_a_server_that_dies_is_started_again_with_the_weights_that_it_was_last_sent(home, recipe):
    """Killed with its engine or alone, it leaves nothing behind and comes back at the same address."""
    newest, lines = home / "served", []
    newest.mkdir()
    (newest / "config.json").touch()
    made = recipe("rollout.replicas=2")
    with serving("first", made, home, lines.append, newest) as served:
        urls = served.recipe.rollout.servers
        before = notes(home)
        assert [note["--model"] for note in before] == ["first", "first"]
        os.kill(before[0]["pid"], signal.SIGKILL)
        until(lambda: len(notes(home)) == 3 and all(map(well, urls)))
        again = notes(home)[2]
        assert again["--model"] == str(newest)
        assert again["--port"] == next(note["--port"] for note in before if note["pid"] == before[0]["pid"])
        until(lambda: not alive(before[0]["engine"]))
        assert alive(before[1]["engine"])
    assert [("died" in line) for line in lines] == [False, True]


def test_servers_end_with_a_run_that_is_killed(home):
    code = (
        "import time; from pathlib import Path; from pipelines.recipe import recipes;"
        "from pipelines.rollout.policies.factories import serving\n"
        f"made = recipes.load('miniature', ['rollout.policy=vllm', 'rollout.python={home / 'python'}'])\n"
        f"with serving('m', made, Path({str(home)!r}), print): print('up', flush=True); time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        until(lambda: run.stdout is not None and run.stdout.readline() == "up\n")
        run.kill()
    [note] = notes(home)
    until(lambda: not alive(note["pid"]) and not alive(note["engine"]))


def test_a_server_that_does_not_start_says_why_in_one_line(home, recipe):
    (home / "broken").touch()
    expected = pytest.raises(ResourceError, match=r"did not start: ValueError: no room .*vllm-0\.log")
    with expected as caught, serving("m", recipe(), home, print):
        pass
    assert "\n" not in str(caught.value)


def test_where_there_is_no_vllm_the_setting_is_named(recipe, home, monkeypatch):
    for made in (recipe("rollout.python=null"), recipe("rollout.python=/no/python")):
        monkeypatch.setenv("PATH", "/nowhere")
        with (
            pytest.raises(ResourceError, match=r"rollout\.python .* rollout\.servers"),
            serving("m", made, home, print),
        ):
            pass


@pytest.mark.parametrize(
    ("count", "changes", "trains", "serving_gpus", "training"),
    [
        (8, [], False, "0 1 2 3 4 5 6 7", None),
        (8, [], True, "4 5 6 7", "0 1 2 3"),
        (8, ["rollout.tensor_parallel=2"], True, "4,5 6,7", "0 1 2 3"),
        (8, ["rollout.tensor_parallel=2", "rollout.replicas=3"], True, "2,3 4,5 6,7", "0 1"),
        (8, ["rollout.tensor_parallel=4"], False, "0,1,2,3 4,5,6,7", None),
        (3, [], True, "2", "0 1"),
        (2, [], True, "1", "0"),
        (1, [], True, "0", "0"),
    ],
)
def test_gpus_are_divided_among_servers_and_training(recipe, count, changes, trains, serving_gpus, training):
    divided = layout(recipe(*changes), [str(number) for number in range(count)], trains)
    assert divided.serving == tuple(tuple(group.split(",")) for group in serving_gpus.split())
    assert divided.training == (None if training is None else tuple(training.split()))
    assert divided.shared is (count == 1)


@pytest.mark.parametrize(("count", "change"), [(2, "rollout.replicas=2"), (4, "rollout.tensor_parallel=4")])
def test_what_leaves_no_gpu_to_training_is_refused(recipe, count, change):
    with pytest.raises(ResourceError, match=r"too few for .* and training"):
        layout(recipe(change), ["0"] * count, trains=True)


def test_gpus_are_those_that_cuda_shows_or_the_driver_lists(home, monkeypatch):
    tool = home / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    assert replicas.visible_gpus() == ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 5")
    assert replicas.visible_gpus() == ("2", "5")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert replicas.visible_gpus() == ("0", "1")
