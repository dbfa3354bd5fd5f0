"""MLflow's server with the options of the compose file answers workers by its name there, and nobody without a key."""

import base64
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from pipelines.core.processes import free_port
from tests.services.conftest import ROOT, end, wait_for

pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("flask_wtf") is None, reason="the extra `cluster`"),
]
PASSWORD = "a-long-password"
SEARCH = "api/2.0/mlflow/experiments/search?max_results=1"


def composed(folder, port):
    """The command and the variables of the service, with files of this test for its database and its volume."""
    service = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8"))["services"]["mlflow"]
    words = shlex.split(re.sub(r"\$\{[^}]*\}", "secret", service["command"]))
    words[words.index("--backend-store-uri") + 1] = f"sqlite:///{folder / 'mlflow.db'}"
    words[words.index("--port") + 1], words[words.index("--host") + 1] = str(port), "127.0.0.1"
    ini = ROOT / service["environment"]["MLFLOW_AUTH_CONFIG_PATH"].removeprefix("/srv/sqltrain/")
    (folder / "auth.ini").write_text(ini.read_text(encoding="utf-8").replace("/store", str(folder)), encoding="utf-8")
    variables = {"MLFLOW_AUTH_CONFIG_PATH": str(folder / "auth.ini"), "MLFLOW_AUTH_ADMIN_PASSWORD": PASSWORD}
    variables["MLFLOW_FLASK_SERVER_SECRET_KEY"] = "secret"
    assert set(variables) == set(service["environment"])
    few = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # one process starts sooner than four and a queue
    return [*(word.replace("/store", str(folder)) for word in words), "--workers", "1"], {**variables, **few}


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    folder, number = tmp_path_factory.mktemp("mlflow"), free_port()
    command, variables = composed(folder, number)
    outside = {key: value for key, value in os.environ.items() if not key.startswith("MLFLOW_")}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(
            command,
            cwd=folder,
            env={**outside, **variables, "PATH": path},
            stdout=log,
            stderr=log,
            start_new_session=True,
        )

    def up():
        assert server.poll() is None, (folder / "log").read_text()
        return status(number, "health") == 200

    try:
        wait_for(up, 180, "MLflow's server is up")
        yield number
    finally:
        end(server)


def status(port, path, **headers):
    """What the server answers; 0 when there is none yet."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"Host": "mlflow:5000", **headers})
        with urllib.request.urlopen(request, timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def basic(password):
    return "Basic " + base64.b64encode(f"admin:{password}".encode()).decode()


def test_a_worker_with_the_password_is_answered_under_the_servers_name_alone(port):
    assert status(port, SEARCH, Authorization=basic(PASSWORD)) == 200
    assert status(port, SEARCH, Authorization=basic(PASSWORD), Host="evil.example") == 403
    assert status(port, SEARCH) == 401
    assert status(port, SEARCH, Authorization=basic("guess")) == 401
