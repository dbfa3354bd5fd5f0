"""Models behind HTTP: which ones the user has named, and asking them with the official client.

`conf/local/endpoints.yaml` (git-ignored) holds one entry an endpoint:

    my_teacher:
      base_url: https://api.example.com/v1
      model: big-model
      key_env: EXAMPLE_API_KEY    # the environment variable that holds the key; leave out for a server without one
"""

from __future__ import annotations

import asyncio
import difflib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

import pydantic

from pipelines.config import Positive, Section
from pipelines.errors import EndpointError, RecipeError, ResourceError, SqltrainError
from pipelines.recipes import CONF, read_yaml

ENDPOINTS = CONF / "local" / "endpoints.yaml"
EXAMPLE = "NAME: {base_url: https://.../v1, model: MODEL, key_env: VARIABLE}"
Answer = TypeVar("Answer")


class Endpoint(Section):
    """One model behind an OpenAI-compatible HTTP interface.

    Attributes:
        base_url: up to and with `/v1`.
        key_env: the environment variable that holds the key; null for a server that wants none.
        timeout_s: of one request, in seconds.
        retries: of one request, for broken connections, 408, 409, 429 and 5xx; with exponential back-off and jitter, or
            after what the server's Retry-After says.
        max_tokens_key: what the server calls the most tokens of an answer; newer OpenAI models want
            `max_completion_tokens`.
        omit: keys of a request's body that the server refuses ("seed", "stop", "temperature", "top_p").
        extra: further JSON of each request's body ({"reasoning_effort": "low"}).
    """

    base_url: str
    model: str
    key_env: str | None = None
    timeout_s: float = pydantic.Field(default=600.0, gt=0)
    retries: Positive = 8
    max_tokens_key: str = "max_tokens"
    omit: tuple[str, ...] = ()
    extra: dict[str, Any] = pydantic.Field(default_factory=dict)


def endpoint(name: str, path: Path = ENDPOINTS) -> Endpoint:
    """The endpoint of that name.

    Raises:
        RecipeError: there is no such entry, or it has an unknown or a missing key.
    """
    entries = read_yaml(path) if path.is_file() else {}
    if name not in entries:
        close = difflib.get_close_matches(name, list(entries), n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Add to {path}: {EXAMPLE.replace('NAME', name)}"
        raise RecipeError(f"there is no endpoint {name!r} in {path}", hint)
    try:
        return Endpoint.model_validate(entries[name])
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join([name, *map(str, first["loc"])])
        raise RecipeError(f"{path}: {where}: {first['msg']}", f"An entry looks like {EXAMPLE}") from None


class Connection:
    """The official asynchronous client of one endpoint; one client for each event loop that asks.

    Args:
        name: what errors call it.

    Raises:
        ResourceError: the environment variable that should hold the key is empty.
    """

    def __init__(self, endpoint: Endpoint, name: str) -> None:
        self.endpoint, self.name = endpoint, name
        self._key = os.environ.get(endpoint.key_env, "") if endpoint.key_env else "none"
        if not self._key:
            raise ResourceError(f"endpoint {name!r} has no key", f"Set the environment variable {endpoint.key_env}.")
        self._client: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def ask(self, send: Callable[[Any], Awaitable[Answer]]) -> Answer:
        """What `send` gets from the client (`openai.AsyncOpenAI`).

        Raises:
            RecipeError, ResourceError: the server refuses such requests; says what to change.
            EndpointError: no answer after all retries.
        """
        import openai

        if self._loop is not asyncio.get_running_loop():
            self._loop = asyncio.get_running_loop()
            self._client = openai.AsyncOpenAI(
                api_key=self._key,
                base_url=self.endpoint.base_url,
                timeout=self.endpoint.timeout_s,
                max_retries=self.endpoint.retries,
            )
        try:
            return await send(self._client)
        except openai.APIError as error:
            raise self._explain(error) from None

    async def close(self) -> None:
        """Close the running event loop's connections; the next request opens new ones."""
        if self._client is not None:
            await self._client.close()
        self._client = self._loop = None

    def _explain(self, error: Any) -> SqltrainError:
        """An error of the client as one of ours: what repeating cannot mend is the user's."""
        status, code = getattr(error, "status_code", None), error.code or ""
        said = " ".join(str(error.message).split())[:300]
        entry = f"Check the entry {self.name!r} of {ENDPOINTS.name}"
        if status in (401, 403):
            hint = f"Check the key in the environment variable {self.endpoint.key_env}."
            return ResourceError(f"endpoint {self.name!r} refused the key ({status})", hint)
        if code == "insufficient_quota":
            return ResourceError(f"endpoint {self.name!r} has no quota left: {said}", "Add credit, or name another.")
        if status == 404:
            return RecipeError(
                f"endpoint {self.name!r} knows no {self.endpoint.model!r} (404)", f"{entry}: url, model."
            )
        if code == "context_length_exceeded" or "maximum context length" in said:
            return EndpointError(f"the conversation is longer than the context of endpoint {self.name!r}")
        if status in (400, 422):
            hint = f"{entry}: max_tokens_key, omit, extra; and the recipe's sampling."
            return RecipeError(f"endpoint {self.name!r} refused the request ({status}): {said}", hint)
        where = f"at {self.endpoint.base_url}" if status is None else f"(HTTP {status})"
        return EndpointError(f"endpoint {self.name!r} {where} failed: {said}", "Is the server up?")
