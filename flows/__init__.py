"""Prefect flows and the command line: they call the stages and decide nothing about the science."""

from importlib.util import find_spec
from pathlib import Path

# The packages have common names: another program's, earlier on the path, would be imported in their place.
for _name in ("tasks", "pipelines"):
    _origin = getattr(find_spec(_name), "origin", None)
    if _origin != str(Path(__file__).parents[1] / _name / "__init__.py"):
        hint = "Look at PYTHONPATH, or use an environment of its own."
        raise SystemExit(f"error: sqltrain's package {_name!r} is hidden by {_origin}. {hint}")

import tasks as tasks  # noqa: E402  # switches telemetry off before anything imports Prefect
