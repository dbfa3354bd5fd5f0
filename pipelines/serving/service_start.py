"""The start of `sqltrain serve`: what its options open, from the database to the service that listens."""

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import UserError
from pipelines.core.store import Store
from pipelines.databases import named
from pipelines.nightly.ledger import ledgers
from pipelines.report.console_text import plain
from pipelines.serving.access import Access, read_keys
from pipelines.serving.agent import Agent, QuestionBudget
from pipelines.serving.feedback import Feedback
from pipelines.serving.http_server import Service, prune_and_sync_feedback
from pipelines.serving.models import CHAMPION, KINDS, CurrentModel
from pipelines.serving.web import require_bindable, require_keys
from pipelines.sql.audit import append

WORKERS = 4  # processes that run SQL


@dataclass(frozen=True)
class ServeRequest:
    """The options of `sqltrain serve`; None for an option that was not passed."""

    database: str
    model: str | None
    recipe: str  # gives an endpoint or a script its protocol
    overrides: Sequence[str]
    store: Store
    host: str
    port: int
    keys: Path | None  # a file of API keys
    feedback: Path | None  # folder of questions and verdicts
    keep_days: int
    seconds: float  # seconds that one question may take
    rows: int  # rows of one answer, at most
    per_minute: int  # questions of a user in a minute
    at_once: int  # questions of a user at a time


@contextlib.contextmanager
def open_service(request: ServeRequest, say: Callable[[str], None]) -> Iterator[Service]:
    """The service of a database's agent while its SQL workers run.

    Args:
        say: takes the lines about what is served, and where.
    """
    openable = named.find(request.database)
    access = Access(read_keys(request.keys) if request.keys else {}, request.per_minute, request.at_once)
    require_keys(request.host, access)
    require_bindable(request.host, request.port)
    store = request.store
    served = CurrentModel(request.model or only_champion(store), request.recipe, request.overrides, store)
    folder = store.root / "serve" / openable.database.id
    questions = folder / "questions.jsonl"
    append(questions, [])  # refused now, and not at the first question
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    with openable.sql(served.model.recipe.execution, WORKERS, folder / "statements.jsonl") as sql:
        protocol = served.model.recipe.protocol
        schema = openable.schema(sql, protocol.schema_values, protocol.schema_descriptions)
        agent = Agent(openable, sql, schema, lambda: served.model, QuestionBudget(request.seconds, request.rows))
        kept_feedback = None if request.feedback is None else Feedback(request.feedback, request.keep_days)
        background: list[Callable[[], Awaitable[None]]] = [served.follow]
        if kept_feedback is not None:
            background.append(functools.partial(prune_and_sync_feedback, kept_feedback, store.root))
        service = Service(agent, access, questions, kept_feedback, background)
        _add_tool(service, say)
        host = f"[{request.host}]" if ":" in request.host else request.host
        address = f"http://{host}:{request.port}"
        say(f"{plain(openable.database.id)} answered by {plain(served.model.name)}: {address} (stop with Ctrl-C)")
        say(f"OpenAI's protocol: {address}/v1    audit log: {questions}")
        yield service


def _add_tool(service: Service, say: Callable[[str], None]) -> None:
    """Serve the SQL tool at /mcp, too, if its library is installed."""
    try:
        from pipelines.serving.mcp_server import add_mcp
    except ImportError as error:
        say(f"/mcp is not served: {error.name} is not installed (pip install 'sqltrain[mcp]')")
    else:
        add_mcp(service)


def only_champion(store: Store) -> str:
    """The name of the store's champion, which answers if no model is passed; an error unless there is exactly one."""
    names = [name for name, ledger in ledgers(store).items() if ledger.champion() is not None]
    if len(names) != 1:
        reason = f"{len(names)} recipes have a champion" if names else "no recipe has a champion"
        raise UserError(f"{reason} in {store.root}", f"Pass --model with {KINDS}.")
    return CHAMPION + names[0]
