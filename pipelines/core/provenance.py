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
    *("accelerate", "deepspeed", "duckdb", "numpy", "peft", "polars", "psycopg", "sqlglot", "tokenizers", "torch"),
    *("transformers", "trl"),
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
    git: dict[str, str] = {}
    for command in ("rev-parse HEAD", "status --porcelain --untracked-files=no") if (ROOT / ".git").exists() else ():
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            words = ["git", "-C", str(ROOT), *command.split()]
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=20, check=True, stdin=subprocess.DEVNULL
            )
            git[command.partition(" ")[0]] = done.stdout.strip()
    commit = git.get("rev-parse")
    # The processor's model and the best of `INSTRUCTIONS` that it has; "" if the system gives neither.
    fields: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for line in PROCESSOR.read_text(encoding="utf-8", errors="replace").splitlines():
            name, _, value = line.partition(":")
            fields.setdefault(name.strip().lower(), value.strip())
    flags = fields.get("flags", fields.get("features", "")).split()
    best = next((name for name in INSTRUCTIONS if name in flags), None)
    lines = [line for path in sorted(GPUS.glob("*/information")) for line in path.read_text().splitlines()]
    gpus = [line.partition(":")[2].strip() for line in lines if line.startswith("Model")]  # by NVIDIA's driver
    return {
        "commit": commit,
        "changed": None if commit is None else bool(git.get("status")),
        "python": platform.python_version(),
        "libraries": {
            "sqlite": sqlite3.sqlite_version,
            **{name: installed for name in LIBRARIES if (installed := version(name)) is not None},
        },
        "machine": {
            "system": platform.platform(),
            "processors": os.cpu_count(),
            "processor": ", ".join(filter(None, (fields.get("model name"), best))),
            "gpus": gpus,
        },
    }


@functools.cache
def code_digest() -> str:
    """A digest of the bytes of the package's Python files; only such code resumes a stage that was interrupted."""
    code = hashlib.sha256()
    for path in sorted((ROOT / "pipelines").rglob("*.py")):
        code.update(f"{path.relative_to(ROOT)} {path.stat().st_size}\n".encode() + path.read_bytes())
    return code.hexdigest()


def as_tags(made_by: Mapping[str, Any]) -> dict[str, str]:
    """The `facts`, or a manifest's `made_by`, as short texts: commit, python, libraries, machine."""
    commit, machine = made_by.get("commit"), made_by.get("machine", {})
    gpus = Counter(machine.get("gpus", []))
    devices = "".join(f", {count} x {name}" for name, count in gpus.items())
    kind = f" ({machine['processor']})" if machine.get("processor") else ""
    texts = {
        "commit": commit and f"{commit}{' with changes' if made_by.get('changed') else ''}",
        "python": made_by.get("python"),
        "libraries": ", ".join(f"{name} {number}" for name, number in made_by.get("libraries", {}).items()),
        "machine": machine and f"{machine.get('system')}, {machine.get('processors')} processors{kind}{devices}",
    }
    return {name: text for name, text in texts.items() if text}


def version(library: str) -> str | None:
    """The installed version of a library; None if it is not installed."""
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None
