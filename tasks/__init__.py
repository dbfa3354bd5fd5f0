"""Thin Prefect tasks, one per stage; the only room that knows MLflow and Great Expectations.

No library that is used here may report to its makers: each reads its switch when it is first imported.
"""

import os

QUIET = {
    "DO_NOT_TRACK": "1",
    "GX_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
}
os.environ.update(QUIET)
