"""Models behind HTTP: which ones the user has named, and sending them requests with the official client.

`conf/local/endpoints.yaml` (git-ignored) holds one entry an endpoint:

    my_teacher:
      base_url: https://api.example.com/v1
      model: big-model
      key_env: EXAMPLE_API_KEY    # the environment variable that holds the key; leave out for a server without one
"""

import asyncio
import difflib
import json
import logging
import os
import re
import sys
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import pydantic

from pipelines.core.errors import EndpointError, RecipeError, ResourceError, SqltrainError
from pipelines.endpoints.errors import ContextOverflow, ErrorInAnswer, Malformed, Refused, server_words, short_words
from pipelines.endpoints.limits import START_IT, Breaker, Pace, Rate, delay, retry_after
from pipelines.recipe.config import Positive, Section, Teacher
from pipelines.recipe.recipes import LOCAL
from pipelines.recipe.yaml_files import read_yaml

ENDPOINTS = LOCAL / "endpoints.yaml"
ENDPOINTS_VARIABLE = "SQLTRAIN_ENDPOINTS"  # names another file, for containers and workers
EXAMPLE = "NAME: {base_url: https://.../v1, model: MODEL, key_env: VARIABLE}"
RETRIED = frozenset({408, 409, 425, 429})
REACH_S = 10.0  # seconds for the one request before a run's first
GATEWAYS = (502, 503, 504)  # statuses of a server whose model is down
WARN_AFTER = 3  # failures in a row after which a line says what is waited for
SLICES = 20  # slices of a time-out, at whose ends the process looks at what has come
LAST_WAIT_S = 60.0  # wait for answers that are on their way when a run stops: they are paid for
NO_CONNECTION = "Connection error."  # the client's words for all that happens on the way; its cause says more
TRANSPORTS = ("httpx2", "httpx")  # what the official client sends with: one or the other, by its version
OVERFLOW = re.compile(
    r"context_length_exceeded|exceed_context_size|maximum context length|maximum model length|model's context length"
    r"|exceeds? (the )?(available )?context|(prompt|input) is too long|input token count .* exceeds"
    r"|maximum prompt length|prompt exceeds max length|exceeded model token limit|range of input length should be"
    r"|context length of only|tokens in the prompt cannot exceed|inputs.? tokens . .max_new_tokens. must be",
    re.IGNORECASE,
)  # words of OpenAI, vLLM, SGLang, llama.cpp and others
FILTERED = re.compile(
    r"content_?filter|data_?inspection_?failed|content_policy_violation|content management policy|content exists risk",
    re.IGNORECASE,
)  # a provider's refusal that comes as an HTTP error
NO_HOST = re.compile(r"[<>{}\"'`\\|^$*]")  # signs of a placeholder or a typing error
KEY_LIKE = re.compile(r"(sk|pk|hf|gsk|xai|r8)_\w*\d\w*|(?=\w*\d)(?=\w*[a-z])\w{16,}", re.ASCII)
Answer = TypeVar("Answer")
Send = Callable[[Any], Coroutine[Any, Any, Answer]]  # client -> the answer to one request
log = logging.getLogger(__name__)


class Endpoint(Section):
    """One model behind an OpenAI-compatible HTTP interface."""

    base_url: str  # up to and with `/v1`; without a user name or a password.
    model: str
    key_env: str | None = None  # the environment variable that holds the key; null for a server that wants none.
    # seconds for one request from its first byte to its last, in which this process was running.
    timeout_s: float = pydantic.Field(default=600.0, gt=0)
    # times that one request is sent again after a broken connection, a cut or malformed answer, 408, 409, 429 or 5xx;
    # with exponential back-off and jitter, or after what the server's Retry-After says.
    retries: Positive = 8
    # requests in flight at once for a judge, cleaner, linker, extractor, selector or `invent`; a teacher has
    # `synthesis.teacher.concurrency`.
    concurrency: Positive = 16
    patience_s: float = pydantic.Field(default=300.0, gt=0)  # seconds without any answer after which the run stops.
    # requests_per_minute, tokens_per_minute: never exceeded; null for no limit.
    requests_per_minute: Positive | None = None
    tokens_per_minute: Positive | None = None
    # price_in, price_out: prices of a million tokens of prompt and of answer, in `currency`.
    price_in: float = pydantic.Field(default=0.0, ge=0)
    price_out: float = pydantic.Field(default=0.0, ge=0)
    currency: str = "USD"
    # cap_tokens, cap_cost: a run stops before the endpoint's answers in this store have used more; no store keeps what
    # `ask`, `serve` and `mcp` ask, so there a process has this much for itself.
    cap_tokens: Positive | None = None
    cap_cost: float | None = pydantic.Field(default=None, gt=0)
    # the server's name for the most tokens of an answer; newer OpenAI models want `max_completion_tokens`.
    max_tokens_key: str = "max_tokens"
    # keys of a request's body that the server refuses ("seed", "stop", "temperature", "top_p").
    omit: tuple[str, ...] = ()
    # further JSON of each request's body ({"reasoning_effort": "low"}).
    extra: dict[str, Any] = pydantic.Field(default_factory=dict)
    # "merge" puts the system message into the first user message, for templates that refuse the role.
    system: Literal["keep", "merge"] = "keep"
    # "keep" makes a thinking model's reasoning field the turn's reasoning block where it has none; "drop" leaves it
    # out.
    reasoning: Literal["keep", "drop"] = "keep"
    stream: bool = False  # read the answer as it is written, for servers that cut silent connections.

    def price(self, tokens_in: float, tokens_out: float) -> float:
        """The price of so many tokens of prompts and of answers, in `currency`."""
        return (tokens_in * self.price_in + tokens_out * self.price_out) / 1e6

    @pydantic.model_validator(mode="after")
    def _priced(self) -> Self:
        if self.cap_cost is not None and not (self.price_in or self.price_out):
            raise RecipeError("cap_cost bounds nothing without a price", "Set price_in and price_out, or cap_tokens.")
        return self

    @pydantic.field_validator("base_url")
    @classmethod
    def _plain_url(cls, url: str) -> str:
        """Refused without being quoted: it may hold a password."""
        has_blank = any(sign.isspace() for sign in url)
        if has_blank or not url.isprintable():
            raise RecipeError("its base_url holds a blank or a sign that cannot be seen", "Write it without blanks.")
        no_address = RecipeError("its base_url is no address", "It looks like https://api.example.com:443/v1.")
        try:
            parts = urllib.parse.urlsplit(url)
            is_web = parts.scheme in ("http", "https")
            has_host = is_web and bool(parts.hostname) and parts.port != 0
        except ValueError:  # the port is no number
            raise no_address from None
        if "@" in parts.netloc or parts.query:
            hint = "Put the secret into an environment variable and name it in key_env."
            raise RecipeError("its base_url holds a user name, a password or a query", hint)
        if not has_host or parts.fragment or NO_HOST.search(parts.netloc):
            raise no_address
        if parts.path.rstrip("/").endswith(("/completions", "/responses", "/models")):
            hint = "End it with the part before: requests go to /chat/completions below it."
            raise RecipeError("its base_url is the address of one request, not of the interface", hint)
        return url

    @pydantic.field_validator("model")
    @classmethod
    def _named(cls, model: str) -> str:
        if not model or model != model.strip():
            raise RecipeError("its model is empty, or has a blank at an end", "Write the name that the server lists.")
        return model

    @pydantic.field_validator("key_env")
    @classmethod
    def _variable(cls, name: str | None) -> str | None:
        """Refused without being quoted: people paste the key itself."""
        if name is None or name in os.environ:
            return name
        is_name = re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII) is not None
        if not is_name or KEY_LIKE.fullmatch(name):
            hint = "Write the NAME of the environment variable that holds the key, and set that."
            raise RecipeError("its key_env is not the name of an environment variable that is set", hint)
        return name


def endpoints_path() -> Path:
    """The file that SQLTRAIN_ENDPOINTS names, or `conf/local/endpoints.yaml` of the working folder or the checkout."""
    named = os.environ.get(ENDPOINTS_VARIABLE)
    if named:
        return Path(named)
    in_working_folder = Path("conf", "local", ENDPOINTS.name)
    if ENDPOINTS.is_file() and not in_working_folder.is_file():
        return ENDPOINTS
    return in_working_folder


def endpoints(path: Path) -> dict[str, Any]:
    """The entries of a file of endpoints, unchecked, by their names; {} without such a file."""
    if not path.is_file():
        return {}
    return read_yaml(path)


def endpoint(name: str, path: Path | None = None) -> Endpoint:
    """The endpoint of that name, from a file, by default `endpoints_path()`."""
    path = path or endpoints_path()
    entries = endpoints(path)
    if name not in entries:
        close = difflib.get_close_matches(name, list(entries), n=1)
        if close:
            hint = f"Did you mean {close[0]!r}?"
        else:
            example = EXAMPLE.replace("NAME", name)
            hint = f"Add to {path}: {example}"
        raise RecipeError(f"there is no endpoint {name!r} in {path}", hint)
    try:
        return Endpoint.model_validate(entries[name])
    except RecipeError as error:
        raise RecipeError(f"{path}: {name}: {error.message}", error.hint) from None
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise RecipeError(f"{path}: {where}: {first['msg']}", f"An entry looks like {EXAMPLE}") from None


def teacher_endpoint(teacher: Teacher) -> str:
    """The endpoint that a teacher section names."""
    if teacher.endpoint is None:
        raise RecipeError("the recipe's teacher is an endpoint without a name", "Set synthesis.teacher.endpoint=NAME.")
    return teacher.endpoint


class Connection:
    """The official asynchronous client of one endpoint, which errors call `name`; one for each event loop."""

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.endpoint = endpoint
        self.name = name
        self._key = "none"
        if endpoint.key_env:
            self._key = os.environ.get(endpoint.key_env, "").strip()
        if not self._key:
            raise ResourceError(f"endpoint {name!r} has no key", f"Set the environment variable {endpoint.key_env}.")
        can_be_sent = self._key.isascii() and self._key.isprintable()
        if not can_be_sent:
            hint = f"Set the environment variable {endpoint.key_env} again: it holds more than the key."
            raise ResourceError(f"the key of endpoint {name!r} has characters that no header can carry", hint)
        requests = Rate(endpoint.requests_per_minute)
        tokens = Rate(endpoint.tokens_per_minute)
        self.pace = Pace(requests, tokens)
        self._breaker = Breaker(name, endpoint.patience_s)
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_way: set[asyncio.Task[Any]] = set()
        self._left: set[asyncio.Task[Any]] = set()  # requests on their way whose asker has gone

    async def reach(self) -> None:
        """Ask the server once for its models, which costs nothing."""
        import openai

        try:
            # The content does not matter: a server may list no models, and answer.
            request = self._open().get("/models", cast_to=str)
            await within(request, min(REACH_S, self.endpoint.timeout_s))
        except (openai.APIError, TimeoutError) as error:
            status = status_of(error)
            if status == 401:
                raise self._explain(error) from None
            is_away = isinstance(error, TimeoutError) or "Connect" in type(error.__cause__).__name__
            if is_away or status in GATEWAYS:
                words = short_words(self._words(error)).rstrip(".")
                problem = f"endpoint {self.name!r} at {self.endpoint.base_url} does not answer: {words}"
                raise ResourceError(problem, f"Start it, or mend its entry in {ENDPOINTS.name}.") from None

    async def ask(self, send: Send[Answer], tokens: int = 0) -> Answer:
        """The answer that `send` gets from the client (`openai.AsyncOpenAI`), and keeps where it is to be kept.

        Cancelled, it sends nothing more; a request that is on its way goes on until `close`. It may use so many tokens,
        for the endpoint's limit per minute.
        """
        attempt = 0  # failures of this request while the endpoint was up
        while True:
            await self._breaker.admit()
            await self.pace.admit(tokens)
            try:
                answer = await self._send(send)
            except Exception as error:
                if not _is_boundary_error(error):  # an error of ours, or of a program, is the caller's
                    raise
                asked_wait_s = self._note_failure(error)
                if attempt >= self.endpoint.retries and not self._breaker.open:
                    raise self._explain(error) from None
                self.pace.tokens.level += tokens
                wait_s = delay(attempt, asked_wait_s)
                if not self._breaker.open:  # an endpoint that is down does not use up a request's own attempts
                    attempt += 1
                await asyncio.sleep(wait_s)
            else:
                self._breaker.worked()
                return answer

    async def _send(self, send: Send[Answer]) -> Answer:
        """One request, which goes on if its asker is cancelled."""
        sending = send(self._open())
        request = asyncio.create_task(within(sending, self.endpoint.timeout_s))
        self._on_way.add(request)
        request.add_done_callback(self._on_way.discard)
        request.add_done_callback(self._left.discard)
        try:
            return await asyncio.shield(request)
        except asyncio.CancelledError:
            if not request.done():
                self._left.add(request)
            raise

    def _note_failure(self, error: Any) -> float | None:
        """Tell breaker and pace of a failed request, and return the seconds that the server asks to wait, or None.

        Raises:
            SqltrainError: what repeating the request cannot mend.
        """
        import openai

        status = status_of(error)
        explained = self._explain(error)
        # Some servers send an overflow or a refusal as a 500, or with an answer of status 200.
        if not _is_passing(error) or isinstance(explained, ContextOverflow | Refused):
            self._breaker.worked()
            raise explained from None
        wait_s = None
        if isinstance(error, openai.APIStatusError):
            wait_s = retry_after(error.response.headers)
        patience_s = self.endpoint.patience_s
        if status == 429:
            self._breaker.worked()  # the server lives, and is busy
            pause_s = min(wait_s or 0.0, patience_s)
            self.pace.held_until = max(self.pace.held_until, time.monotonic() + pause_s)
        else:
            self._breaker.failed(*self._failure(error, status))
            if self._breaker.failures == WARN_AFTER:
                log.warning("%s; it is asked again, for %g s at most", explained.message, patience_s)
        if wait_s is not None and wait_s > patience_s:
            problem = f"endpoint {self.name!r} wants {wait_s:.0f} s without requests ({status})"
            raise ResourceError(problem, "Run again later: nothing that was answered is asked again.") from None
        return wait_s

    async def close(self) -> None:
        """Close the running event loop's connections, once the requests on their way have come.

        A request that another asker waits for is waited for; one that nobody waits for, for a minute. The next request
        opens new connections.
        """
        client = self._client
        self._client = None
        self._loop = None
        on_way = set(self._on_way)
        without_asker = on_way & self._left
        if without_asker:
            _, late = await asyncio.wait(without_asker, timeout=LAST_WAIT_S)
            for request in late:
                request.cancel()
        await asyncio.gather(*on_way, return_exceptions=True)
        if client is not None:
            await client.close()

    def _open(self) -> Any:
        """The client of the running event loop."""
        if self._loop is not asyncio.get_running_loop():
            import openai

            self._loop = asyncio.get_running_loop()
            url = self.endpoint.base_url
            # `within` bounds the request in place of a time-out here.
            self._client = openai.AsyncOpenAI(api_key=self._key, base_url=url, timeout=None, max_retries=0)
        return self._client

    def _explain(self, error: Any) -> SqltrainError:
        """An error of the client as one of ours: what repeating cannot mend is the user's."""
        status = status_of(error)
        code = getattr(error, "code", None) or ""
        words = self._words(error)
        message = short_words(words)
        entry = f"Check the entry {self.name!r} of {ENDPOINTS.name}"
        about = f"{code} {getattr(error, 'type', None) or ''} {words}"
        is_in_answer = isinstance(error, ErrorInAnswer)
        may_be_filtered = status in (400, 403, 422) or is_in_answer
        if may_be_filtered and FILTERED.search(about):
            return Refused(f"the provider of endpoint {self.name!r} refused the conversation: {message}")
        if status in (401, 403):
            variable = self.endpoint.key_env
            hint = f"{entry}: name in key_env the environment variable that holds a key."
            if variable:
                hint = f"Check the key in the environment variable {variable}."
            return ResourceError(f"endpoint {self.name!r} refused the key ({status}): {message}", hint)
        if code == "insufficient_quota" or status == 402:
            return ResourceError(f"endpoint {self.name!r} has no quota left: {message}", "Add credit, or name another.")
        if status == 404:
            problem = f"endpoint {self.name!r} knows no {self.endpoint.model!r} (404): {message}"
            return RecipeError(problem, f"{entry}: base_url, model.")
        may_be_overflow = status in (400, 413, 422, 500) or is_in_answer
        if may_be_overflow and OVERFLOW.search(about):
            return ContextOverflow(f"the conversation is longer than the context of endpoint {self.name!r}")
        if 400 <= (status or 0) < 500 and status not in RETRIED:
            knobs = "system: merge" if "system" in message.lower() else "max_tokens_key, omit, extra"
            hint = f"{entry}: {knobs}; and the recipe's sampling."
            return RecipeError(f"endpoint {self.name!r} refused the request ({status}): {message}", hint)
        if isinstance(error, Malformed):
            problem = self._without_key(short_words(str(error)))
            return EndpointError(f"endpoint {self.name!r} answers, but {problem}", f"{entry}: base_url, model.")
        where = f"at {self.endpoint.base_url}" if status is None else f"(HTTP {status})"
        return EndpointError(f"endpoint {self.name!r} {where} failed: {message}", "Is the server up?")

    def _failure(self, error: Any, status: int | None) -> tuple[str, str]:
        """What the breaker says if this failure is the last one: the problem, and its remedy."""
        if isinstance(error, Malformed):
            problem = self._without_key(short_words(str(error)))
            hint = f"Check base_url and model of the entry {self.name!r} in {ENDPOINTS.name}, then the server's log."
            return f"answers, but {problem}", hint
        message = short_words(self._words(error))
        if status is not None:
            message = f"HTTP {status}: {message}"
        return f"is down ({message})", START_IT

    def _words(self, error: Any) -> str:
        """The server's own words, or the client's if the server said nothing; a key that they repeat is left out."""
        if isinstance(error, ErrorInAnswer):
            return self._without_key(error.words)
        response = getattr(error, "response", None)
        message = getattr(error, "message", "")
        cause = str(error.__cause__ or "")
        words = ""
        if response is not None and response.is_stream_consumed:
            body = response.text.strip()
            if body not in ("", "{}", "[]", "null"):
                words = server_words(body)
        if message == NO_CONNECTION and cause:
            words = f"{NO_CONNECTION.rstrip('.')}: {' '.join(cause.split())}"
        elif not words:
            words = " ".join(str(message or error or type(error).__name__).split())
        return self._without_key(words)

    def _without_key(self, text: str) -> str:
        if not self.endpoint.key_env:
            return text
        return text.replace(self._key, "***")


def status_of(error: Any) -> int | None:
    """The HTTP status of a failed request; None if no answer came, or one that could not be read."""
    status = getattr(error, "status_code", None)
    if isinstance(status, int) and status >= 400:
        return status
    return None


def _broken_errors() -> tuple[type[BaseException], ...]:
    """Errors of a request without a readable answer."""
    import openai

    imported = [name for name in TRANSPORTS if name in sys.modules]
    transports = [sys.modules[name].HTTPError for name in imported]  # raised while a body is read
    return (
        openai.APIConnectionError,
        openai.APIResponseValidationError,
        TimeoutError,
        Malformed,
        json.JSONDecodeError,
        UnicodeDecodeError,
        *transports,
    )


def _is_boundary_error(error: Exception) -> bool:
    """Whether the server, or the way to it, made an error."""
    import openai

    return isinstance(error, (openai.APIError, *_broken_errors()))


def _is_passing(error: Any) -> bool:
    """Whether the same request may succeed later."""
    status = status_of(error)
    if status == 402 or getattr(error, "code", None) == "insufficient_quota":
        return False
    if status is None:
        return isinstance(error, _broken_errors())
    return status in RETRIED or status >= 500


async def within(request: Awaitable[Answer], seconds: float) -> Answer:
    """A request's result within so many seconds in which this process was running.

    The time is counted in slices, each as long as it was to be and not as long as it took: a process that was starved
    or suspended looks at what has come before it gives up, for what has come is paid for.
    """
    task = asyncio.ensure_future(request)
    try:
        for _ in range(SLICES):
            await asyncio.wait({task}, timeout=seconds / SLICES)
            if task.done():
                return task.result()
        raise TimeoutError
    finally:
        if not task.done():
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
