"""The Kubernetes files against the real prefect-kubernetes and the schema of the Kubernetes API, without a cluster."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

INFRA = Path(__file__).resolve().parents[2] / "infra"
API_VERSION = "1.33"
NEEDED = ("prefect_kubernetes", "kubernetes_validate")
VERBS = {"create": "create", "read": "get", "list": "list", "delete": "delete", "patch": "patch"}

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in NEEDED), reason="the extras `cluster` and `services`"
    ),
]
# In a process of its own: prefect-kubernetes imports an operator framework that warns.
MAKE_JOB = """
import asyncio, json, sys
from uuid import uuid4
from prefect.client.schemas.objects import FlowRun
from prefect_kubernetes.worker import KubernetesWorkerJobConfiguration as Configuration
template, values = json.load(sys.stdin)
configuration = asyncio.run(Configuration.from_template_and_values(template, values))
configuration.prepare_for_flow_run(FlowRun(flow_id=uuid4(), name="a-run"))
print(json.dumps(configuration.job_manifest))
"""


def make_job(values):
    template = yaml.safe_load((INFRA / "kubernetes" / "job-template.yaml").read_text(encoding="utf-8"))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MAKE_JOB],
        input=json.dumps([template, values]),
        env={**os.environ, "PREFECT_API_URL": "http://127.0.0.1:9/api"},  # asked for nothing: no block is referred to
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def hold_to_schema(manifest):
    import kubernetes_validate

    kubernetes_validate.validate(manifest, API_VERSION, strict=True)


def objects():
    yield from yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text(encoding="utf-8"))


def test_the_job_of_a_run_fits_the_schema_of_the_api():
    job = make_job({"env": {"PREFECT_API_URL": "http://prefect:4200/api"}, "gpus": 2})
    pod = job["spec"]["template"]["spec"]
    assert (pod.pop("parallelism"), pod.pop("completions")) == (1, 1)  # for prefect-kubernetes alone: see the template
    hold_to_schema(job)
    container = pod["containers"][0]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["PREFECT_API_URL"] == "http://prefect:4200/api"
    assert values["MLFLOW_TRACKING_URI"] == "http://mlflow:5000"
    assert values["SQLTRAIN_STORE"] == "/store"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2
    assert container["args"][0].endswith("prefect")
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert "value" not in next(entry for entry in container["env"] if entry["name"].endswith("PASSWORD"))


def test_the_worker_s_objects_fit_the_schema_and_a_misspelt_field_does_not():
    import kubernetes_validate

    manifests = list(objects())
    for manifest in manifests:
        hold_to_schema(manifest)
        with pytest.raises(kubernetes_validate.ValidationError):
            hold_to_schema({**manifest, "metdata": {}})
    kinds = ["Namespace", "ServiceAccount", "Role", "RoleBinding", "PersistentVolumeClaim", "Deployment"]
    assert [manifest["kind"] for manifest in manifests] == kinds


def test_each_job_of_the_job_set_fits_the_schema():
    jobs = yaml.safe_load((INFRA / "kubernetes" / "jobset.yaml").read_text(encoding="utf-8"))
    for job in jobs["spec"]["replicatedJobs"]:
        head = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": job["name"]}}
        hold_to_schema({**head, "spec": job["template"]["spec"]})
    assert [job["name"] for job in jobs["spec"]["replicatedJobs"]] == ["head", "others"]


def test_the_role_lets_the_worker_do_what_prefect_kubernetes_calls():
    """Calls about secrets are left out: the worker is given the name of one and makes none."""
    package = Path(str(importlib.util.find_spec("prefect_kubernetes").origin)).parent
    code = "".join((package / name).read_text(encoding="utf-8") for name in ("worker.py", "observer.py"))
    calls = set(re.findall(r"\.(create|read|list|delete|patch)_namespaced_(job|pod|pod_log)\(", code))
    assert ("create", "job") in calls
    resources = {"job": "jobs", "pod": "pods", "pod_log": "pods/log"}
    needed = {(resources[what], VERBS[verb]) for verb, what in calls}
    needed |= {
        (resource, verb) for resource in ("jobs", "pods") for verb in ("list", "watch")
    }  # what its operator does
    role = next(found for found in objects() if found["kind"] == "Role")
    granted = {(resource, verb) for rule in role["rules"] for resource in rule["resources"] for verb in rule["verbs"]}
    assert needed <= granted


def test_the_worker_watches_its_own_namespace_and_reads_its_key_from_a_secret():
    worker = next(found for found in objects() if found["kind"] == "Deployment")
    entries = {entry["name"]: entry for entry in worker["spec"]["template"]["spec"]["containers"][0]["env"]}
    code = "import prefect_kubernetes.settings as s; k = s.KubernetesSettings(); print(sorted(k.observer.namespaces), "
    code += "k.worker.api_auth_string_secret_name, k.worker.api_auth_string_secret_key)"
    values = {name: entry["value"] for name, entry in entries.items() if "value" in entry}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=values,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    secret = entries["PREFECT_API_AUTH_STRING"]["valueFrom"]["secretKeyRef"]
    assert done.stdout.strip() == f"['{worker['metadata']['namespace']}'] {secret['name']} {secret['key']}"
