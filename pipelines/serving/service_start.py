"""The start of `sqltrain serve`: what its options open, from the database to the service that listens."""

import contextlib
import functools
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.store import Store
from pipelines.core.types import plain
from pipelines.databases import named
from pipelines.serving.access import Access, read_keys
from pipelines.serving.agent import Agent, QuestionBudget
from pipelines.serving.feedback import Feedback, prune_and_sync_feedback
from pipelines.serving.http_server import Service
from pipelines.serving.models import CurrentModel, only_champion
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
    keys = {}
    if request.keys:
        keys = read_keys(request.keys)
    access = Access(keys, request.per_minute, request.at_once)
    require_keys(request.host, access)
    require_bindable(request.host, request.port)
    store = request.store
    model_name = request.model or only_champion(store)
    served = CurrentModel(model_name, request.recipe, request.overrides, store)
    folder = store.root / "serve" / openable.database.id
    questions = folder / "questions.jsonl"
    append(questions, [])  # refused now, and not at the first question
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    recipe = served.model.recipe
    with openable.sql(recipe.execution, WORKERS, folder / "statements.jsonl") as sql:
        schema = openable.schema(sql, recipe.protocol.schema_values, recipe.protocol.schema_descriptions)
        budget = QuestionBudget(request.seconds, request.rows)
        agent = Agent(openable, sql, schema, lambda: served.model, budget)
        background: list[Callable[[], Awaitable[None]]] = [served.follow]
        feedback = None
        if request.feedback is not None:
            feedback = Feedback(request.feedback, request.keep_days)
            background.append(functools.partial(prune_and_sync_feedback, feedback, store.root))
        service = Service(agent, access, questions, feedback, background)
        _add_tool(service, say)
        host = request.host
        if ":" in host:  # an address of IPv6
            host = f"[{host}]"
        address = f"http://{host}:{request.port}"
        database = plain(openable.database.id)
        answering_model = plain(served.model.name)
        say(f"{database} answered by {answering_model}: {address} (stop with Ctrl-C)")
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
