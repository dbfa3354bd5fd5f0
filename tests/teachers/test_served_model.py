"""A real served model, opt-in: `transformers serve` answers as teacher and as judge.

SQLTRAIN_SERVED_MODEL=store/grpo/KEY/model pytest -m services tests/teachers/test_served_model.py
"""

import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from teacher_world import kept, make, recipe_of

from pipelines.core.files import read_json
from pipelines.core.store import Store
from pipelines.databases.of_recipe import schemas, sql_engine
from pipelines.recipe.config import RewardTerm
from pipelines.rewards.outcome import make_outcomes
from pipelines.stages.context import examples, trajectories
from pipelines.teachers import experts

MODEL = os.environ.get("SQLTRAIN_SERVED_MODEL", "")
READY_S = 300
pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL, reason="SQLTRAIN_SERVED_MODEL names no checkpoint"),
]


@pytest.fixture
def endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The server of a copy of the checkpoint: "served", and "judge" with short answers, in the endpoints' file."""
    folder = tmp_path / "model"
    shutil.copytree(MODEL, folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--device", "cpu"]
    with open(tmp_path / "server.log", "wb") as log:
        server = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
    try:
        _wait(server, port, tmp_path / "server.log")
        path = tmp_path / "endpoints.yaml"
        entry = {"base_url": f"http://127.0.0.1:{port}/v1", "model": str(folder)}
        path.write_text(yaml.safe_dump({"served": entry, "judge": {**entry, "extra": {"max_tokens": 16}}}))
        monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))
        yield "served"
    finally:
        server.terminate()
        server.wait(30)


def _wait(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    for _ in range(READY_S):
        assert server.poll() is None, log.read_text()
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            return
        except urllib.error.HTTPError:
            return  # it answers
        except OSError:
            time.sleep(1)
    pytest.fail(log.read_text())


def test_a_served_model_teaches_and_judges(tmp_path: Path, endpoint: str) -> None:
    sampling = "{temperature: 0.0, turn_tokens: 72, episode_tokens: 512}"
    recipe = recipe_of(
        2,
        f"synthesis.teacher.endpoint={endpoint}",
        "synthesis.teacher.concurrency=2",
        f"synthesis.teacher.sampling={sampling}",
    )
    store = Store(tmp_path / "store")
    made = trajectories(make(recipe, store, "synthesize"))
    facts = read_json(make(recipe, store, "filter") / "quality.json")
    teacher = facts["acceptance"]["teacher"]
    print(teacher)
    assert [row["teacher"] for row in teacher] == [endpoint]
    assert sum(one.well_formed for one in made) > 0.8 * len(made)  # it has learned the protocol from our own tokens
    assert teacher[0]["right"] > 0

    cases = {one.id: one for one in examples(make(recipe, store, "data"), "sft")}
    with sql_engine(recipe) as sql:
        outcomes = make_outcomes(made, cases, sql, schemas(recipe), "strict", recipe.protocol.max_turns)
    wrong = [one for one in outcomes if not one.correct and one.trajectory.final_sql]
    grade = experts.GradeSource([RewardTerm(term="judge", options={"by": "judge"})], store.root / "responses")
    graded = grade(wrong, cases)
    # A model that has only learned SQL gives no grades; what it says is kept, and is no zero.
    assert all(one.broken == (one.judge is None) for one in graded)
    assert len(kept(store.root, "judge")) == len({(one.example_id, one.trajectory.final_sql) for one in wrong}) > 0
