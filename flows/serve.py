"""`sqltrain serve`: the agent of one database, over HTTP."""

from __future__ import annotations

import ipaddress
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flows import screen
from flows.serving import Service
from pipelines.databases import named
from pipelines.errors import UserError
from pipelines.nightly.ledger import ledgers
from pipelines.report.terminal import plain
from pipelines.serving.access import Access, read_keys
from pipelines.serving.agent import Agent, Budget
from pipelines.serving.feedback import Feedback
from pipelines.serving.models import CHAMPION, KINDS, Served
from pipelines.store import Store

WORKERS = 4  # processes that run SQL


@dataclass(frozen=True)
class Options:
    """How it serves; see the command's help."""

    policy: str | None
    recipe: str
    host: str
    port: int
    keys: Path | None
    feedback: Path | None
    budget: Budget
    per_minute: int
    at_once: int


def serve(database: str, options: Options, overrides: Sequence[str], store: Store) -> None:
    """Serve until stopped.

    Raises:
        UserError: there is no such database, model or key file; or anybody could reach it without a key.
    """
    import uvicorn

    where = named.find(database)
    access = Access(read_keys(options.keys) if options.keys else {}, options.per_minute, options.at_once)
    check_address(options.host, access)
    served = Served(options.policy or _champion(store), options.recipe, overrides, store)
    folder = store.root / "serve" / where.database.id
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with where.sql(served().recipe.execution, WORKERS, folder / "statements.jsonl") as sql:
        agent = Agent(where, sql, where.schema(sql), served, options.budget)
        feedback = None if options.feedback is None else Feedback(options.feedback, where.address)
        service = Service(agent, access, folder / "questions.jsonl", feedback, served.follow)
        address = f"http://{f'[{options.host}]' if ':' in options.host else options.host}:{options.port}"
        screen.say(f"{plain(where.database.id)} answered by {plain(served().name)}: {address} (stop with Ctrl-C)")
        screen.say(f"OpenAI's protocol: {address}/v1    audit log: {folder / 'questions.jsonl'}")
        uvicorn.run(
            service.app(), host=options.host, port=options.port, log_level="warning", timeout_graceful_shutdown=5
        )


def check_address(host: str, access: Access) -> None:
    """Refuse to be reached from other machines without a key.

    Raises:
        UserError: anybody could ask.
    """
    try:
        is_local = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = host == "localhost"
    if access.is_open and not is_local:
        raise UserError(f"{host} can be reached from other machines", "Pass --keys FILE with a line USER: KEY each.")


def _champion(store: Store) -> str:
    found = [name for name, ledger in ledgers(store).items() if ledger.champion() is not None]
    if len(found) != 1:
        said = f"{len(found)} recipes have a champion" if found else "no recipe has a champion"
        raise UserError(f"{said} in {store.root}", f"Pass --policy with {KINDS}.")
    return CHAMPION + found[0]
