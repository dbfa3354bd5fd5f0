"""A deployment started from within a flow, on its own work pool, and waited for."""

from __future__ import annotations

import time
from typing import Any
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.deployments import run_deployment
from prefect.logging import get_run_logger
from prefect.states import Cancelling

from pipelines.errors import BoundaryError
from tasks.lineage import Pulse
from tasks.patience import patiently

POLL_S = 5.0


def run_elsewhere(deployment: str, parameters: dict[str, Any]) -> None:
    """Run a deployment as a part of this flow run; when this run is cancelled or fails, so is that one.

    Args:
        deployment: "flow/deployment".

    Raises:
        BoundaryError: it did not complete.
    """
    log = get_run_logger()
    run: Any = patiently(
        lambda: run_deployment(deployment, parameters=parameters, timeout=0), f"the start of {deployment}", log.warning
    )
    log.info("%s runs as %s", deployment, run.name)
    with get_client(sync_client=True) as client:
        try:
            _wait(client, deployment, run.id)
        except BaseException:
            state = client.read_flow_run(run.id).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(run.id, Cancelling(message="its parent run ended"))
            raise


def _wait(client: SyncPrefectClient, deployment: str, run_id: UUID) -> None:
    say, pulse = get_run_logger().warning, Pulse()
    while True:
        pulse.beat()  # that run tells of itself whether it gets on
        state = patiently(lambda: client.read_flow_run(run_id).state, f"the end of {deployment}", say)
        if state is not None and state.is_final():
            break
        time.sleep(POLL_S)
    if not state.is_completed():
        raise BoundaryError(f"{deployment} ended as {state.name}: {state.message}", f"See its flow run {run_id}.")
