"""Prefect flows and the command line: they call the stages and decide nothing about the science."""

import tasks as tasks  # switches telemetry off before anything imports Prefect
