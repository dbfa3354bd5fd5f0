"""The files of infra/ that cannot be run here: each parses, and what it refers to is there."""

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from jsonschema import Draft202012Validator

from pipelines.recipe import recipes
from tests.fakes import succeeded
from tests.services.conftest import wait_for

ROOT = Path(__file__).resolve().parents[2]
INFRA = ROOT / "infra"
DOCKERFILES = sorted((INFRA / "images").glob("*.Dockerfile"))
INSTRUCTIONS = {"FROM", "ARG", "ENV", "WORKDIR", "RUN", "COPY", "USER", "ENTRYPOINT", "CMD"}


def load(name):
    return yaml.safe_load((INFRA / name).read_text(encoding="utf-8"))


@pytest.mark.parametrize("deployment", load("prefect.yaml")["deployments"], ids=lambda one: one["entrypoint"])
def test_a_deployment_names_a_flow_and_parameters_that_its_form_takes(deployment):
    from prefect import Flow
    from prefect.utilities.callables import parameter_schema

    module, _, name = deployment["entrypoint"].rpartition(".")
    flow = getattr(importlib.import_module(module), name)
    assert isinstance(flow, Flow)
    schema = parameter_schema(flow.fn).model_dump()
    if "internal" in deployment.get("tags", []):
        schema.pop("required")  # another flow starts it and gives them all
    Draft202012Validator({**schema, "additionalProperties": False}).validate(deployment.get("parameters", {}))
    assert deployment["work_pool"]["name"] in ("cpu", "gpu")


def test_deployments_have_names_of_their_own_and_hold_no_lease():
    assert [one["entrypoint"] for one in load("prefect.yaml")["deployments"] if "concurrency_limit" in one] == []
    names = [(one["entrypoint"], one["name"]) for one in load("prefect.yaml")["deployments"]]
    assert len(set(names)) == len(names)


def test_no_deployment_makes_a_schedule_active_that_a_person_paused():
    """Prefect finds a schedule again by its slug, and leaves `active` alone if the file does not say it."""
    schedules = [schedule for one in load("prefect.yaml")["deployments"] for schedule in one.get("schedules", [])]
    assert schedules
    assert [(bool(schedule.get("slug")), "active" in schedule) for schedule in schedules] == [
        (True, False) for _ in schedules
    ]


def test_the_page_makes_every_pool_and_names_every_file_and_deployment():
    page = (INFRA / "README.md").read_text(encoding="utf-8")
    for deployment in load("prefect.yaml")["deployments"]:
        flow = deployment["entrypoint"].rpartition(".")[2]
        assert f"`{flow}/{deployment['name']}`" in page
        assert f"work-pool create {deployment['work_pool']['name']} " in page
    names = re.findall(r"`([\w./*]+)`.* \|.*\|", page.partition("## Files")[2])
    assert names
    for name in names:
        assert list(INFRA.glob(name.rstrip("/"))), name


def test_compose_refers_to_what_there_is():
    compose = load("compose.yaml")
    services = compose["services"]
    for name, service in services.items():
        assert "image" in service, name
        if "build" in service:
            assert (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert set(service.get("depends_on", {})) <= set(services)
        for mount in service.get("volumes", []):
            source = mount.split(":")[0]
            if source.startswith(".."):  # the owner's, of this machine
                assert f"/{source[3:]}/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()
            else:
                assert (INFRA / source).is_file() if source.startswith(".") else source in compose["volumes"], mount
        waited_for = [
            other for other, how in service.get("depends_on", {}).items() if how["condition"].endswith("healthy")
        ]
        assert all("healthcheck" in services[other] for other in waited_for)


def test_where_flows_run_a_form_may_set_the_python_of_the_image_and_inbox_and_keys_are_there():
    nightly = next(one for one in load("prefect.yaml")["deployments"] if one["name"] == "nightly")
    home = "/srv/sqltrain"
    job = load("kubernetes/job-template.yaml")["job_configuration"]["job_manifest"]["spec"]["template"]["spec"]
    (container,) = job["containers"]
    allowed = {entry["name"]: entry.get("value") for entry in container["env"]}["SQLTRAIN_FORM_KEYS"]
    assert allowed == "hardware.python=/opt/gpu/bin/python"
    assert "-m venv /opt/gpu" in (INFRA / "images" / "gpu.Dockerfile").read_text(encoding="utf-8")
    needed = {f"{home}/{nightly['parameters']['inbox']}", f"{home}/conf/local", "/store"}
    assert needed <= {mount["mountPath"] for mount in container["volumeMounts"]}
    assert container["envFrom"] == [{"secretRef": {"name": "sqltrain-endpoints", "optional": True}}]
    services = load("compose.yaml")["services"]
    for worker in (services["cpu-worker"], services["gpu-worker"]):
        assert needed == {mount.split(":")[1] for mount in worker["volumes"]}
        assert worker["env_file"] == [{"path": "../endpoints.env", "required": False}]
        assert worker["environment"]["SQLTRAIN_FORM_KEYS"] == allowed
        assert "--with-healthcheck" in worker["command"]
    assert {name for name, service in services.items() if "healthcheck" not in service} == {"vllm"}
    objects = yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text(encoding="utf-8"))
    (pod,) = (one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment")
    assert pod["containers"][0]["livenessProbe"]["httpGet"] == {"path": "/health", "port": 8080}
    assert "--with-healthcheck" in pod["containers"][0]["args"]


def test_the_images_see_what_they_copy_and_nothing_else():
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    found = [rest for path in DOCKERFILES for word, rest in instructions(path) if word == "COPY"]
    copied = {source for rest in found for source in shlex.split(rest)[:-1]}
    assert copied
    assert lines[1] == "*"
    assert {line[1:] for line in lines if line.startswith("!")} == copied
    assert "conf/local" in lines


def test_no_file_holds_a_secret():
    values = [
        (path, value)
        for path in INFRA.rglob("*.y*ml")
        for value in re.findall(r"^\s*\w*PASSWORD: *(.*)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert values
    for path, value in values:
        assert value.startswith("${"), path


@pytest.mark.skipif(shutil.which("docker") is None, reason="no docker")
def test_compose_parses_by_its_own_tool(monkeypatch):
    if subprocess.run(["docker", "compose", "version"], capture_output=True).returncode != 0:
        pytest.skip("docker has no compose plugin here")
    monkeypatch.setenv("POSTGRES_PASSWORD", "x")
    command = ["docker", "compose", "-f", str(INFRA / "compose.yaml"), "config", "--services"]
    services = succeeded(subprocess.run(command, capture_output=True, text=True)).stdout.split()
    named = yaml.safe_load((INFRA / "compose.yaml").read_text(encoding="utf-8"))["services"]
    assert set() < set(services) <= named.keys()


def instructions(path):
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.lstrip().startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            yield word, rest.strip()


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_a_dockerfile_parses_and_copies_what_there_is(path):
    found = list(instructions(path))
    assert found[0][0] == "FROM"
    assert {word for word, _ in found} <= INSTRUCTIONS
    assert [rest for word, rest in found if word == "USER"] == ["sqltrain"]
    for word, rest in found:
        if word == "COPY":
            *sources, _ = shlex.split(rest)
            assert all((ROOT / source).exists() for source in sources), rest
        if word == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode == 0, rest


def test_what_init_writes_builds_images_of_the_wheel_and_nothing_is_written_over(tmp_path, sqltrain):
    home = tmp_path / "d"
    out = sqltrain.ok("init", str(home))
    assert out.splitlines()[-1].startswith(f"next: cd {home} && export SQLTRAIN_HOME=$PWD && python infra/deploy.py")
    (home / "sqltrain-1-py3-none-any.whl").touch()
    for path in DOCKERFILES:
        for word, rest in instructions(home / "infra" / "images" / path.name):
            assert not (word == "RUN" and ("-e " in rest or "constraints" in rest)), rest
            if word == "COPY":
                assert all(list(home.glob(source)) for source in shlex.split(rest)[:-1]), rest
            if word == "RUN":
                succeeded(subprocess.run(["bash", "-n", "-c", rest], capture_output=True, text=True))
    for path in INFRA.rglob("*.y*ml"):
        assert (home / path.relative_to(ROOT)).read_bytes() == path.read_bytes()
    code, _, err = sqltrain("init", str(home))
    assert (code, "infra is there already. Nothing was written" in err) == (2, True)


def test_the_job_template_s_variables_are_all_defined_and_used():
    template = load("kubernetes/job-template.yaml")
    used = set(re.findall(r"{{ (\w+) }}", yaml.safe_dump(template["job_configuration"])))
    assert used == set(template["variables"]["properties"]) | {"command", "labels"}
    Draft202012Validator.check_schema(template["variables"])
    manifest = template["job_configuration"]["job_manifest"]
    assert (manifest["apiVersion"], manifest["kind"]) == ("batch/v1", "Job")
    pod = manifest["spec"]["template"]["spec"]
    mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in pod["volumes"]}


def test_kubernetes_objects_are_named_and_refer_to_one_another():
    objects = list(yaml.safe_load_all((INFRA / "kubernetes" / "worker.yaml").read_text(encoding="utf-8")))
    names = {(one["kind"], one["metadata"]["name"]) for one in objects}
    assert len(names) == len(objects)
    assert all({"apiVersion", "kind", "metadata"} <= set(one) for one in objects)
    assert ("Role", next(one for one in objects if one["kind"] == "RoleBinding")["roleRef"]["name"]) in names
    deployment = next(one for one in objects if one["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    assert ("ServiceAccount", pod["spec"]["serviceAccountName"]) in names
    assert deployment["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    claim = load("kubernetes/job-template.yaml")["variables"]["properties"]["store_claim"]["default"]
    assert ("PersistentVolumeClaim", claim) in names


def test_the_job_set_s_machines_meet_where_the_head_is():
    """The fields are those of JobSet's reference; a pod's name there is SET-JOB-REPLICA-INDEX.SET."""
    jobs = load("kubernetes/jobset.yaml")
    assert (jobs["apiVersion"], jobs["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert set(jobs["spec"]) == {"successPolicy", "failurePolicy", "replicatedJobs"}
    head, others = jobs["spec"]["replicatedJobs"]
    assert jobs["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": [head["name"]]}
    command, *overrides = container_of(head)["args"]
    assert command == "run"
    recipe = recipes.load(overrides[0], [word for word in overrides[1:] if not word.startswith("--store=")])
    store, *launcher = container_of(others)["args"]
    assert launcher == list(recipe.hardware.launch)
    assert f"--store={store}" in overrides
    assert f"--rdzv-endpoint={jobs['metadata']['name']}-{head['name']}-0-0.{jobs['metadata']['name']}:29500" in launcher
    pods = sum(job["replicas"] * job["template"]["spec"]["parallelism"] for job in (head, others))
    assert f"--nnodes={pods}" in launcher
    assert importlib.util.find_spec(container_of(others)["command"][2]) is not None


def container_of(job):
    return job["template"]["spec"]["template"]["spec"]["containers"][0]


def test_the_slurm_script_starts_one_launcher_a_machine_and_is_queued_again_when_it_is_stopped(tmp_path):
    """With stand-ins for Slurm's commands, and for a run that ends when it is asked to."""
    stubs = {
        "scontrol": 'if [ "$1" = show ]; then echo node1; echo node2; else echo "$*" >> calls; fi',
        "sqltrain": 'printf "%s\\n" "$@" > arguments; trap "exit 1" TERM; touch begun; while :; do sleep 0.05; done',
    }
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "8", "SLURM_JOB_ID": "7"}
    own = {"RECIPE": "sql_trail", "STORE": "/shared/store", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(INFRA / "slurm" / "train.sbatch"), "seed=1"]
    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, **slurm, **own}) as script:
        wait_for((tmp_path / "begun").exists, 30, "the training begins")
        script.terminate()
        assert script.wait(30) == 1
    assert (tmp_path / "calls").read_text() == "requeue 7\n"
    run, name, store, *overrides = (tmp_path / "arguments").read_text().splitlines()
    assert (run, name, store) == ("run", "sql_trail", "--store=/shared/store")
    recipe = recipes.load(name, overrides)
    assert recipe.seed == 1
    assert recipe.hardware.launch == (
        *("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", "/opt/gpu/bin/torchrun", "--nnodes=2"),
        *("--nproc-per-node=8", "--rdzv-backend=c10d", "--rdzv-endpoint=node1:29500", "--rdzv-id=7"),
    )


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="no kubectl")
def test_kubernetes_objects_parse_by_kubectl(tmp_path):
    shutil.copy(INFRA / "kubernetes" / "worker.yaml", tmp_path)
    (tmp_path / "kustomization.yaml").write_text("resources: [worker.yaml]\n")
    done = succeeded(subprocess.run(["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True))
    assert len(list(yaml.safe_load_all(done.stdout))) == 6


def test_the_workflow_names_what_there_is_and_its_smoke_run_fits_the_recipe():
    workflow = load("github/retrain.yml")
    triggers = workflow[True]  # YAML 1.1 reads the key `on` so; GitHub does not
    assert {"push", "pull_request", "workflow_dispatch"} == set(triggers)
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    deployments = {
        f"{one['entrypoint'].rpartition('.')[2]}/{one['name']}" for one in load("prefect.yaml")["deployments"]
    }
    for name, job in workflow["jobs"].items():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job), name
        assert job.get("needs", "tests") in workflow["jobs"]
        for step in job["steps"]:
            assert ("uses" in step) != ("run" in step)
            script = step.get("run", "")
            assert subprocess.run(["bash", "-n", "-c", script], capture_output=True).returncode == 0, script
            assert set(re.findall(r"\bmake (\w+)", script)) <= targets
            assert set(re.findall(r"(?:deployment run|--deployment) (\S+)", script)) <= deployments
    script = next(step["run"] for step in workflow["jobs"]["smoke"]["steps"] if step.get("name") == "retrain")
    overrides = yaml.safe_load(re.search(r"'overrides=(\[.*\])'", script)[1])
    assert recipes.load("miniature", overrides).grpo.steps == 4


def test_a_tag_with_a_heading_in_the_change_log_is_published_without_a_kept_token():
    workflow = load("github/publish.yml")
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert workflow["jobs"]["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in str(workflow)
    heading, *others = [step["run"] for step in workflow["jobs"]["build"]["steps"] if "run" in step]
    succeeded(subprocess.run(["bash", "-n", "-c", "\n".join(others)], capture_output=True, text=True))
    release = {**os.environ, "GITHUB_REF_NAME": "v0.1.0"}
    succeeded(subprocess.run(["bash", "-c", heading], cwd=ROOT, env=release, capture_output=True, text=True))


def test_ci_runs_the_tests_that_share_a_server_in_one_lane():
    names = re.search(r"^SHARING = .*,([\w ]+)\)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "tests" / "services").glob("test_*.py")}
    sharing = {stem for stem, text in texts.items() if re.search(r"\(.*\bsite\b.*\):$", text, re.MULTILINE)}
    sharing -= {stem for stem, text in texts.items() if "new_site(" in text}
    assert {f"test_{name}" for name in names[1].split()} == sharing


@pytest.mark.parametrize(("failing", "line"), [("services-server", "server"), ("conformance", "other"), ("", "")])
def test_ci_says_which_step_failed(tmp_path, failing, line):
    make = tmp_path / "make"
    make.write_text(f'#!/bin/sh\necho "ran $1"\n[ "$1" != "{failing}" ]\n')
    make.chmod(0o755)
    (tmp_path / "id").write_text("#!/bin/sh\necho 1000\n")
    (tmp_path / "id").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    done = subprocess.run([str(ROOT / ".ci" / "run")], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == (1 if failing else 0), done.stdout
    assert all(f"ran {target}" in done.stdout for target in ("test", "services-setup", "lint", "services-server"))
    assert ("services-rest" in done.stdout) == (failing != "conformance")
    if failing:
        assert re.search(rf"^{line} \| == FAILED: ", done.stdout, re.MULTILINE)
        assert re.search(rf'^== FAILED after \d+s: see the line "FAILED:" of {line}$', done.stdout, re.MULTILINE)


def test_the_switch_for_json_logs_makes_each_line_an_object():
    page = (INFRA / "README.md").read_text(encoding="utf-8")
    block = re.search(r"^```sh json-logs\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    code = "from prefect.logging.configuration import setup_logging; import logging; setup_logging(); "
    code += "[logging.getLogger(f'prefect.{n}').error('a line') for n in ('server', 'flow_runs', 'task_runs')]"
    python = f"{sys.executable} -W ignore -c {shlex.quote(code)}"
    command = f"{block[1]}\nexport PREFECT_LOGGING_TO_API_ENABLED=false\n{python}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=120, check=True)
    lines = [json.loads(line) for line in (done.stdout + done.stderr).splitlines() if line]
    assert ["a line" in line.values() for line in lines] == [True] * 3
