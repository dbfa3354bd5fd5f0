"""The pinned versions can be installed: resolved from the package index for the images' Pythons, nothing downloaded."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "infra" / "images"
GPU_LOCK = IMAGES / "gpu.lock"

pytestmark = [
    pytest.mark.services,
    pytest.mark.skipif(importlib.util.find_spec("uv") is None, reason="uv is not installed (the extra `services`)"),
]


def pins(text):
    found = {}
    for name, version in re.findall(r"^([\w.-]+)==([\w.+!-]+)", text, re.MULTILINE):
        found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), set()).add(version)
    return found


def resolve(constraints, extras, python):
    """What an installation with some extras would install on Linux; skips without a package index."""
    command = [
        sys.executable,
        "-m",
        "uv",
        "pip",
        "compile",
        "pyproject.toml",
        "--quiet",
        "--no-annotate",
        "--no-header",
    ]
    command += ["--constraints", str(constraints), "--python-version", python]
    command += ["--python-platform", "x86_64-manylinux_2_31"]
    for extra in extras.split(","):
        command += ["--extra", extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    if done.returncode and re.search(r"failed to fetch|error sending request|dns error|timed out", done.stderr, re.I):
        pytest.skip(f"no package index can be reached: {done.stderr.splitlines()[0]}")
    assert done.returncode == 0, done.stderr
    return pins(done.stdout)


@pytest.mark.parametrize("python", ["3.11.9", "3.12.3"])
def test_the_gpu_worker_s_environment_resolves_to_its_lock(python):
    resolved, locked = resolve(GPU_LOCK, "gpu", python), pins(GPU_LOCK.read_text(encoding="utf-8"))
    assert {"vllm", "deepspeed", "torch", "trl", "numpy"} <= set(resolved)
    assert {name for name, versions in resolved.items() if not versions <= locked.get(name, set())} == set()


def test_the_environment_of_the_flows_resolves_to_the_constraints_on_the_gpu_image():
    """On the other image's Python, 3.11, the tests themselves run with these versions."""
    constraints = ROOT / "constraints.txt"
    resolved = resolve(constraints, "ops,cluster,traces", "3.12.3")
    locked = pins(constraints.read_text(encoding="utf-8"))
    unpinned = {name for name in resolved if name not in locked and not name.startswith(("nvidia-", "cuda-"))}
    assert unpinned <= {"triton", "setuptools"}  # the CUDA build of torch asks for them, the tested one does not


def test_the_images_match_the_lock():
    locked = pins(GPU_LOCK.read_text(encoding="utf-8"))
    dockerfile = (IMAGES / "gpu.Dockerfile").read_text(encoding="utf-8")
    cuda = re.search(r"^FROM nvidia/cuda:(\d+\.\d+)", dockerfile, re.MULTILINE)
    assert {version.rsplit(".", 2)[0] for version in locked["cuda-toolkit"]} == {cuda[1]}
    compose = yaml.safe_load((ROOT / "infra" / "compose.yaml").read_text(encoding="utf-8"))
    assert {f"vllm/vllm-openai:v{version}" for version in locked["vllm"]} == {compose["services"]["vllm"]["image"]}
