"""A deployment started from here, on its own work pool, and waited for."""

import time
from collections.abc import Callable
from typing import Any

from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.deployments import run_deployment
from prefect.states import Cancelling, Failed

from pipelines.core.errors import BoundaryError, DataError
from tasks.events import Pulse
from tasks.prefect_server import retry_until_reachable

POLL_S = 5.0
REFUSED = "Refused"  # name of the final state of a run that refused its data


def refused(error: DataError) -> State[Any]:
    """The final state of a run for `run_elsewhere`, which raises a DataError of it, and no BoundaryError."""
    return Failed(name=REFUSED, message=str(error))


def run_elsewhere(deployment: str, parameters: dict[str, Any], say: Callable[[str], None]) -> State[Any]:
    """Run a deployment ("flow/deployment") and return its final state; a server that is away meanwhile is waited for.

    As a part of a flow run it is cancelled when that one is cancelled or fails.

    Raises:
        DataError: it ended as `refused`.
        BoundaryError: it ended otherwise than completed.
    """
    run: Any = retry_until_reachable(
        lambda: run_deployment(deployment, parameters=parameters, timeout=0), f"the start of {deployment}", say
    )
    say(f"{deployment} runs as {run.name}, flow run {run.id}")
    pulse = Pulse()
    with get_client(sync_client=True) as client:
        try:
            while True:
                pulse.beat()  # the progress of that run is in its own events
                state = retry_until_reachable(
                    lambda: client.read_flow_run(run.id).state, f"the end of {deployment}", say
                )
                if state is not None and state.is_final():
                    break
                time.sleep(POLL_S)
        except BaseException:
            state = None
            if runtime.flow_run.id:
                state = client.read_flow_run(run.id).state
            if state is not None and not state.is_final():
                client.set_flow_run_state(run.id, Cancelling(message="its parent run ended"))
            raise
    hint = f"See its flow run {run.id}."
    if state.name == REFUSED:
        raise DataError(str(state.message), hint)
    if not state.is_completed():
        raise BoundaryError(f"{deployment} ended as {state.name}: {state.message}", hint)
    return state
