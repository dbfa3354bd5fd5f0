"""The origin of a stage: commit, versions of libraries, machine. It is in manifests and in MLflow, and in no key."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import platform
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = (
    "accelerate",
    "deepspeed",
    "duckdb",
    "numpy",
    "peft",
    "polars",
    "psycopg",
    "sqlglot",
    "tokenizers",
    "torch",
    "transformers",
    "trl",
)
GPUS = Path("/proc/driver/nvidia/gpus")
PROCESSOR = Path("/proc/cpuinfo")
# Instructions by which PyTorch chooses its kernels, the best first: kernels add up in orders of their own.
INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "avx512f", "avx2", "sve", "asimd")


@functools.cache
def facts() -> dict[str, Any]:
    """The commit (null outside a checkout), whether its files were changed, versions and machine, as JSON values.

    No host name and no user name: a store may be pushed to where others read it.
    """
    commit = _git("rev-parse HEAD")
    is_changed = None
    if commit is not None:
        is_changed = bool(_git("status --porcelain --untracked-files=no"))
    libraries = {"sqlite": sqlite3.sqlite_version}
    for name in LIBRARIES:
        installed = version(name)
        if installed is not None:
            libraries[name] = installed
    return {
        "commit": commit,
        "changed": is_changed,
        "python": platform.python_version(),
        "libraries": libraries,
        "machine": {
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "processor": _processor(),
            "gpus": _gpus(),
        },
    }


def _git(arguments: str) -> str | None:
    """The output of a git command in the checkout; None outside a checkout, or if git fails."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), *arguments.split()]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """The processor's model and the best of `INSTRUCTIONS` that it has; "" if the system gives neither."""
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        text = PROCESSOR.read_text(encoding="utf-8", errors="replace")
        for line in text.splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    best = next((name for name in INSTRUCTIONS if name in flags), None)
    model = fields.get("model name")
    return ", ".join(filter(None, (model, best)))


def _gpus() -> list[str]:
    """The models of NVIDIA's GPUs, by their driver."""
    models = []
    for path in sorted(GPUS.glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model"):
                models.append(line.partition(":")[2].strip())
    return models


@functools.cache
def code_digest() -> str:
    """A digest of the bytes of the package's Python files; only such code resumes a stage that was interrupted."""
    code = hashlib.sha256()
    for path in sorted((ROOT / "pipelines").rglob("*.py")):
        name = path.relative_to(ROOT)
        size = path.stat().st_size
        head = f"{name} {size}\n"
        code.update(head.encode() + path.read_bytes())
    return code.hexdigest()


def as_tags(made_by: Mapping[str, Any]) -> dict[str, str]:
    """The `facts`, or a manifest's `made_by`, as short texts: commit, python, libraries, machine."""
    libraries = made_by.get("libraries", {})
    texts: dict[str, Any] = {
        "commit": made_by.get("commit"),
        "python": made_by.get("python"),
        "libraries": ", ".join(f"{name} {number}" for name, number in libraries.items()),
        "machine": _machine_text(made_by.get("machine", {})),
    }
    if texts["commit"] and made_by.get("changed"):
        texts["commit"] += " with changes"
    return {name: text for name, text in texts.items() if text}


def _machine_text(machine: Mapping[str, Any]) -> str:
    """A machine on one line: its system, processors and GPUs; "" if it is not known."""
    if not machine:
        return ""
    text = f"{machine.get('system')}, {machine.get('processors')} processors"
    if machine.get("processor"):
        text += f" ({machine['processor']})"
    for name, count in Counter(machine.get("gpus", [])).items():
        text += f", {count} x {name}"
    return text


def version(library: str) -> str | None:
    """The installed version of a library; None if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
