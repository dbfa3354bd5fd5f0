"""`sqltrain serve`: the agent of one database, over HTTP."""

import asyncio
import contextlib
import functools
import importlib.util
import ipaddress
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flows import terminal
from pipelines.core.errors import UserError
from pipelines.core.store import Store
from pipelines.databases import named
from pipelines.nightly.ledger import ledgers
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, read_keys
from pipelines.serving.agent import Agent, QuestionBudget
from pipelines.serving.feedback import Feedback
from pipelines.serving.http_server import Service
from pipelines.serving.models import CHAMPION, KINDS, Served

WORKERS = 4  # processes that run SQL
TEND_S = 60.0  # between two looks at old feedback and new verdicts
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """How it serves; see the command's help."""

    policy: str | None
    recipe: str
    host: str
    port: int
    keys: Path | None
    feedback: Path | None
    keep_days: int
    budget: QuestionBudget
    per_minute: int
    at_once: int


def serve(database: str, options: Options, overrides: Sequence[str], store: Store) -> None:
    """Serve until stopped."""
    import uvicorn

    where = named.find(database)
    access = Access(read_keys(options.keys) if options.keys else {}, options.per_minute, options.at_once)
    check_address(options.host, access)
    check_place(options.host, options.port)
    served = Served(options.policy or _champion(store), options.recipe, overrides, store)
    folder = store.root / "serve" / where.database.id
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with where.sql(served().recipe.execution, WORKERS, folder / "statements.jsonl") as sql:
        shown = served().recipe.protocol
        schema = where.schema(sql, shown.schema_values, shown.schema_descriptions)
        agent = Agent(where, sql, schema, served, options.budget)
        feedback = None if options.feedback is None else Feedback(options.feedback, options.keep_days)
        beside: list[Callable[[], Awaitable[None]]] = [served.follow]
        if feedback is not None:
            beside.append(functools.partial(tend, feedback, store.root))
        service = Service(agent, access, folder / "questions.jsonl", feedback, beside)
        add_mcp(service)
        address = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{options.port}"
        terminal.say(f"{plain(where.database.id)} answered by {plain(served().name)}: {address} (stop with Ctrl-C)")
        terminal.say(f"OpenAI's protocol: {address}/v1    audit log: {folder / 'questions.jsonl'}")
        uvicorn.run(
            service.app(), host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5
        )


def add_mcp(service: Service) -> None:
    """Let MCP clients in, where the extra that speaks to them is installed."""
    with contextlib.suppress(ImportError):
        from pipelines.serving.mcp_server import McpEndpoint

        service.mcp = McpEndpoint(service)


async def tend(feedback: Feedback, store: Path) -> None:
    """Remove feedback whose days are over, and tell MLflow of verdicts where the store is tracked, until cancelled."""
    while True:
        try:
            feedback.prune()
            if is_tracked(store) and feedback.has_news():
                await _tell_mlflow(feedback.folder, store)
        except Exception as error:  # of MLflow's library, too: the next round must come
            log.warning("feedback was not tended: %s", error or type(error).__name__)
        await asyncio.sleep(TEND_S)


def is_tracked(store: Path) -> bool:
    """Whether MLflow records what happens on a store: it is installed, and has a server or a file there."""
    place = os.environ.get("MLFLOW_TRACKING_URI") or (store / "mlflow.db").is_file()
    return bool(place) and importlib.util.find_spec("mlflow") is not None


async def _tell_mlflow(folder: Path, store: Path) -> None:
    """In a process of its own: MLflow takes seconds to import, and memory that this one never gets back."""
    command = [sys.executable, "-m", "tasks.episodes", str(folder), str(store)]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        _, output = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    if process.returncode:
        lines = output.decode(errors="replace").splitlines() or ["no reason"]
        log.warning("MLflow was not told of verdicts, and will be: %s", plain(lines[-1]))


def check_address(host: str, access: Access) -> None:
    """Refuse to be reached from other machines without a key."""
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if access.is_open and not is_local:
        raise UserError(f"{host} can be reached from other machines", "Pass --keys FILE with a line USER: KEY each.")


def check_place(host: str, port: int) -> None:
    """Refuse an address that this machine cannot listen at, before anything is loaded and announced."""
    reason = ""
    try:
        for family, kind, protocol, _, place in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as door:
                    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    door.bind(place)
                return
            except OSError as error:
                reason = reason or error.strerror or str(error)
    except (OSError, UnicodeError) as error:  # a name that is none, such as one of 100 letters
        reason = getattr(error, "strerror", None) or "no such host"
    raise UserError(f"cannot listen at {plain(host)}, port {port}: {reason}", "Pass another --host or --port.")


def _champion(store: Store) -> str:
    names = [name for name, ledger in ledgers(store).items() if ledger.champion() is not None]
    if len(names) != 1:
        reason = f"{len(names)} recipes have a champion" if names else "no recipe has a champion"
        raise UserError(f"{reason} in {store.root}", f"Pass --policy with {KINDS}.")
    return CHAMPION + names[0]
