"""A real Prefect server and worker, started by the very commands of infra/README.md."""

import base64
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import pytest

from pipelines.core.processes import free_port

WORKERS = "work_pools/cpu/workers/filter"
ROOT = Path(__file__).resolve().parents[2]
# The whole chain in seconds: nothing is learned, everything is done.
SMALL_DATA = [
    "data.sft.options={databases: 4, questions: 8}",
    "data.rl=[{kind: miniature, options: {databases: 2, questions: 8, first: 4}}]",
    "data.dev.options={databases: 2, questions: 4}",
    "data.test.0.options={databases: 2, questions: 4}",
]
SMALL = [
    *SMALL_DATA,
    "model.tiny={width: 32, layers: 1, heads: 2, ffn: 64}",
    "protocol.max_turns=2",
    "protocol.max_turns_eval=2",
    "difficulty={group: 2, candidates: 4, keep: 4, explore: 4, sampling: {turn_tokens: 16, episode_tokens: 512}}",
    "contracts.min_solved=0",
    "grpo.steps=2",
    "grpo.group=2",
    "grpo.questions_per_step=2",
    "grpo.drop_zero_variance=false",
    "grpo.sampling={turn_tokens: 16, episode_tokens: 512}",
    "evaluation={samples: 2, ks: [1, 2], sampling: {turn_tokens: 16, episode_tokens: 512}}",
    "rollout.processes=1",
    "hardware.processes=1",
]


def readme_blocks():
    text = (ROOT / "infra" / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"^```sh (\S+)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))


def wait_for(true, seconds, what):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = true()
        if found:
            return found
        time.sleep(0.3)
    raise AssertionError(f"not within {seconds:.0f} s: {what}")


def processes(*words):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if line and all(word in line for word in words):
                found.append(int(entry.name))
    return found


@dataclass
class Site:
    """One machine as infra/README.md sets it up, on a port and in folders of its own."""

    folder: Path
    port: int
    environment: dict[str, str]
    running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def store(self):
        return Path(self.environment["SQLTRAIN_STORE"])

    @property
    def credentials(self):
        return base64.b64encode(self.environment["PREFECT_API_AUTH_STRING"].encode()).decode()

    def block(self, name):
        return readme_blocks()[name].replace("4200", str(self.port))

    def start(self, name, mlflow_port=5000):
        with (self.folder / f"{name}.log").open("ab") as log:
            command = ["bash", "-c", f"exec {self.block(name).replace('5000', str(mlflow_port))}"]
            return subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def up(self, name):
        """Start the server or the worker for the tests that follow, and wait until it answers."""
        self.running[name] = self.start(name)
        if name == "server":
            wait_for(self.healthy, 300, "the Prefect server is up")
        else:
            begun = time.time()
            heard = lambda: [one["last_heartbeat_time"] or "1970-01-01T00Z" for one in self.api(WORKERS, {})]  # noqa: E731
            listens = lambda: any(datetime.fromisoformat(text).timestamp() > begun for text in heard())  # noqa: E731
            wait_for(listens, 120, "the worker has said that it listens")

    def kill(self, name):
        """kill -9 of what `up` started: the worker alone, so that its flow may go on; the server with its children."""
        if name == "server":
            os.killpg(self.running[name].pid, signal.SIGKILL)
        else:
            self.running[name].kill()
        self.running[name].wait()

    def begin(self, command):
        return subprocess.Popen(command, cwd=ROOT, env=self.environment)

    def run(self, command, timeout=600):
        return subprocess.run(
            ["bash", "-c", command], cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=timeout
        )

    def deployment_run(self, name, overrides, *options, **parameters):
        command = ["prefect", "deployment", "run", name, *options]
        for key, value in {"overrides": overrides, **parameters}.items():
            command += ["--param", f"{key}={json.dumps(value)}"]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, timeout=900, check=False
        )

    def api(self, path, body=None):
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/api/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "Authorization": f"Basic {self.credentials}"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)

    def newest_run(self, flow=None, parent=None):
        """The flow run that was asked for last, of a flow or by another run; {} when there is none."""
        query = {"sort": "EXPECTED_START_TIME_DESC", "limit": 50}
        if flow is not None:
            query["flows"] = {"name": {"any_": [flow]}}
        if parent is not None:
            query["flow_runs"] = {"parent_flow_run_id": {"any_": [parent]}}
        runs = self.api("flow_runs/filter", query)
        return next((run for run in runs if not run["auto_scheduled"]), {})  # cron's next nights are there already

    def healthy(self):
        try:
            return bool(self.api("health"))
        except OSError:
            return False


def end(process, sign=signal.SIGTERM):
    for attempt in (sign, signal.SIGKILL):
        try:
            os.killpg(process.pid, attempt)
        except ProcessLookupError:
            break
        try:
            process.wait(20)
            break
        except subprocess.TimeoutExpired:
            continue


def new_site(folder):
    """The environment block of the page on a free port, with a store and a Prefect home in `folder`; nothing runs."""
    port = free_port()
    blocks = readme_blocks()
    block = f"{blocks['key']}\n{blocks['environment']}".replace("4200", str(port))
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    base = {**outside, "PATH": path, "PREFECT_HOME": str(folder / "prefect"), "OMP_NUM_THREADS": "1"}
    shown = subprocess.run(["bash", "-c", f"{block}\nenv -0"], cwd=ROOT, env=base, capture_output=True, check=True)
    pairs = (item.partition("=") for item in shown.stdout.decode().split("\0") if item)
    environment = {key: value for key, _, value in pairs}
    often = {"PREFECT_WORKER_QUERY_SECONDS": "2"}  # a worker looks for runs: by default every ten seconds
    return Site(folder, port, {**environment, **often, "SQLTRAIN_STORE": str(folder / "store")})


@contextmanager
def running(site):
    try:
        site.up("server")
        for name in ("pools", "deploy"):
            done = site.run(site.block(name))
            assert done.returncode == 0, done.stdout + done.stderr
        site.up("worker")
        yield site
    finally:
        for process in reversed(site.running.values()):
            end(process)


@pytest.fixture(scope="session")
def site(tmp_path_factory):
    with running(new_site(tmp_path_factory.mktemp("site"))) as started:
        yield started
