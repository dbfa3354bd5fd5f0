"""The policy behind vLLM servers: completions of token ids, with the ids and log-probabilities that were sampled.

The servers run in an environment of their own (`vllm serve MODEL`) and keep a conversation's keys and
values in their prefix cache; an episode stays with one server for that. The same seed gives the same tokens only as far
as the server's batches round alike: vLLM does not promise it.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipelines.core.errors import EndpointError, ResourceError
from pipelines.endpoints.client import Connection, Endpoint
from pipelines.endpoints.errors import ContextOverflow
from pipelines.protocols.blocks import StopStrings, truncate_at_stop
from pipelines.rollout.checkpoint_files import tokenizer_of
from pipelines.rollout.codec import ChatCodec
from pipelines.rollout.policies.base import Completion, Policy, Request
from pipelines.rollout.policies.served_weights import Probe, adapter_step, served_names

LIVE_PER_SERVER = 256  # vLLM's own default of sequences in a batch
CONNECT_S = 10.0
FAILOVER_S = 10.0  # seconds of failures after which a server is left for another
RESTART_S = 600.0  # seconds of failures after which the only server, which may be starting again, ends the run
MOST_STOPS = 4  # stop strings that a server takes; at others the turn is truncated here
OWN_KEYS = {
    "return_token_ids": True,
    "skip_special_tokens": False,  # a protocol's tag may be one, and stop strings are sought in the text
    "spaces_between_special_tokens": False,
    # The checkpoint's generation_config.json would decide these: Qwen's cuts at 20 tokens and punishes repetition.
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}

log = logging.getLogger(__name__)


class VllmPolicy(Policy):
    """Asks vLLM servers for each turn; an episode goes to the one that has the fewest."""

    name = "vllm"
    longest_first = True

    def __init__(
        self,
        servers: Sequence[str],  # base URLs, up to and with `/v1`
        checkpoint: str | Path,  # a folder or a hub name with the servers' tokenizer
        # The probe of the checkpoint that they must hold; None if they may hold any.
        probe: Callable[[], Probe] | None = None,
        # Whether servers get new weights while they sample, and report which sampled each token
        # (`/inference/v1/generate`).
        carries: bool = False,
        adapters: bool = False,  # whether they may be sent low-rank adapters alone, the newest asked for by name
        revision: str | None = None,  # the commit of a hub checkpoint; None for its newest
    ) -> None:
        if not servers:
            raise ResourceError("rollout.policy is vllm, but no server is named", "Set rollout.servers=[URL, ...].")
        commit = revision
        if Path(checkpoint).is_dir():
            commit = None
        tokenizer = tokenizer_of(str(checkpoint), revision=commit)
        self.codec: ChatCodec = ChatCodec(tokenizer)
        self.live = LIVE_PER_SERVER * len(servers)
        has_others = len(servers) > 1
        retries = 2 if has_others else 12
        patience_s = FAILOVER_S if has_others else RESTART_S
        self._connections: dict[str, Connection] = {}
        contexts = []
        for url in servers:
            model = _first_model(url)
            entry = Endpoint(base_url=url, model=model.id, retries=retries, patience_s=patience_s)
            self._connections[url] = Connection(entry, url)
            contexts.append(getattr(model, "max_model_len", None))
        self.context = min(filter(None, contexts), default=None)
        self._models = {url: connection.endpoint.model for url, connection in self._connections.items()}
        self._servers_up = list(servers)  # servers that have not failed
        self._probe = probe
        # Whether log-probabilities are those of the distribution that tokens were drawn from.
        self._tells_sampling_logprobs = False
        self._adapters = adapters
        self._servers_with_weights = list(servers)  # servers that have the weights
        self._carries = carries
        self._followed = False  # whether weights under training are sent to the servers
        self._versions: dict[str, list[int]] = {}
        self._server_of: dict[str, str] = {}
        self._stops: dict[tuple[str, ...], StopStrings] = {}
        end_ids = (self.codec.end_id, self.codec.tokenizer.eos_token_id)
        self._end_ids = frozenset(index for index in end_ids if index is not None)

    def open(self, session: str) -> None:
        has = Counter(self._server_of.values())
        self._server_of[session] = min(self._servers_up, key=lambda url: has[url])

    def release(self, session: str) -> None:
        self._server_of.pop(session, None)

    async def generate(self, request: Request) -> Completion:
        """One agent turn. A server that fails is left for the others, for the rest of the run."""
        while True:
            url = self._server_of[request.session]
            try:
                choice = await self._ask(url, request)
            except ContextOverflow:
                raise
            except (EndpointError, ResourceError):
                if self._servers_up == [url]:
                    raise
                self._leave(url)
                self.open(request.session)
            else:
                return self._completion(url, request, choice)

    def _completion(self, url: str, request: Request, choice: Any) -> Completion:
        """A server's choice as the turn of a request.

        Token ids are those that were sampled; the text is decoded here, as the in-process policy does it.
        """
        ids = getattr(choice, "token_ids", None)
        if not ids:
            raise ResourceError("the server returns no token ids", "It must be vLLM 0.22 or newer.")
        if request.stop not in self._stops:
            self._stops[request.stop] = StopStrings(self.codec.tokenizer, request.stop, self.codec.decode)
        end = _end_of_turn(ids, self._stops[request.stop])
        if self._carries and self._followed:
            self._versions.setdefault(request.session, []).extend(choice.versions[:end])
        spoken = ids[:end]
        if spoken[-1] in self._end_ids:
            spoken = spoken[:-1]
        text = truncate_at_stop(self.codec.decode(spoken), request.stop)
        # A server's log-probabilities are before temperature by default, not those of the distribution it drew from.
        is_comparable = self._tells_sampling_logprobs or request.sampling.temperature in (0.0, 1.0)
        answer_logprobs: Sequence[float] = ()
        if choice.logprobs:
            answer_logprobs = choice.logprobs.token_logprobs or ()
        # Each log-probability is taken for the token of its place; a server that was seen to tell them must go on.
        if len(answer_logprobs) != len(ids) and (answer_logprobs or self._tells_sampling_logprobs):
            raise EndpointError(f"{url} gave {len(answer_logprobs)} log-probabilities for {len(ids)} tokens")
        logprobs: tuple[float, ...] = ()
        if is_comparable:
            logprobs = tuple(answer_logprobs[:end])
        if end == len(ids) and choice.finish_reason == "length":
            return Completion(text, tuple(ids), logprobs, "length")
        return Completion(text, tuple(ids[:end]), logprobs, "stop")

    async def _ask(self, url: str, request: Request) -> Any:
        """A server's choice. By vLLM's own interface, if weights change meanwhile: it reports each token's version."""
        sampling: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "seed": (request.seed * 2654435761 + request.turn) % 2**31,
            "stop": list(request.stop)[:MOST_STOPS],
            "logprobs": 1,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
        }
        if self._carries and self._followed:
            return await self._ask_with_versions(url, request, sampling)
        prompt = list(request.token_ids)
        body: dict[str, Any] = {"model": self._models[url], "prompt": prompt, **sampling, "extra_body": OWN_KEYS}
        answer = await self._connections[url].ask(lambda client: client.completions.create(**body))
        return answer.choices[0]

    async def _ask_with_versions(self, url: str, request: Request, sampling: dict[str, Any]) -> Any:
        """A server's choice by vLLM's own interface, with the step of the weights that sampled each token."""
        connection = self._connections[url]
        model = self._models[url]
        own_keys = {name: value for name, value in OWN_KEYS.items() if name != "return_token_ids"}
        parameters = sampling | own_keys
        body = {"model": model, "token_ids": list(request.token_ids), "sampling_params": parameters}
        server = connection.endpoint.base_url.removesuffix("/v1")
        address = f"{server}/inference/v1/generate"
        try:
            answer = await connection.ask(lambda client: client.post(address, cast_to=object, body=body))
        except ResourceError as error:
            hint = "Start it with --enable-scale-out, or set grpo.partial=wait."
            raise ResourceError(f"{address} tells no versions of tokens ({error.message})", hint) from None
        choice = answer["choices"][0]
        ids = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        versions = [-1] * len(ids)
        for span in choice.get("weight_versions") or ():
            start = span["start"]
            end = span["end"]
            version = adapter_step(model)
            if span["version"].isdecimal():
                version = int(span["version"])
            versions[start:end] = [version] * (end - start)
        logprobs = SimpleNamespace(token_logprobs=[token["logprob"] for token in content])
        finish = choice["finish_reason"]
        return SimpleNamespace(token_ids=ids, logprobs=logprobs, finish_reason=finish, versions=versions)

    def follow_weights(self, places: Sequence[str] | None = None) -> None:
        self._probe = None
        self._followed = True
        if places is None:
            return
        self._servers_with_weights = self._servers_up = list(places)
        if self._adapters:
            for url in places:
                self._models[url] = max(served_names(url), key=adapter_step)

    def take_versions(self) -> dict[str, list[int]]:
        taken = self._versions
        self._versions = {}
        return taken

    async def check(self) -> None:
        """Hold each server against the probe; a failed one is left."""
        if self._probe is None:
            return
        probe = self._probe()
        for url in list(self._servers_up):
            try:
                # (T + 1,) log-probabilities of the probe's ids, and of one that the server adds.
                connection = self._connections[url]
                body: dict[str, Any] = {"model": connection.endpoint.model, "prompt": list(probe.ids), "max_tokens": 1}
                body |= {"echo": True, "logprobs": 1, "temperature": 0.0}
                answer = await connection.ask(lambda client: client.completions.create(**body))  # noqa: B023  awaited here
                told = answer.choices[0].logprobs
            except EndpointError:
                if self._servers_up == [url]:
                    raise
                self._leave(url)
                continue
            logprobs: list[float | None] = []
            if told and told.token_logprobs:
                logprobs += told.token_logprobs
            probe.check(url, logprobs)

    async def close(self) -> None:
        """Close the connections; servers that failed are tried again by the next run, if they have the weights."""
        for connection in self._connections.values():
            await connection.close()
        self._servers_up = list(self._servers_with_weights)

    def _leave(self, url: str) -> None:
        if url in self._servers_up:
            log.warning("vLLM server %s failed: going on with %d others", url, len(self._servers_up) - 1)
            self._servers_up.remove(url)

    def has_sampling_logprobs(self) -> bool:
        """Whether every server tells log-probabilities after temperature and top-p, which weights must be made of.

        They do with `--logprobs-mode processed_logprobs`; it is seen by a nucleus of one token, which is then certain.
        From then on log-probabilities are taken at any temperature.
        """
        import openai

        sampling: dict[str, Any] = {"max_tokens": 1, "temperature": 1.0, "top_p": 1e-6, "logprobs": 1}
        for url, connection in self._connections.items():
            body: dict[str, Any] = {"model": connection.endpoint.model, "prompt": [1], **sampling}
            try:
                with _client(url) as client:
                    answer = client.completions.create(**body, extra_body=OWN_KEYS)
                told = answer.choices[0].logprobs
            except openai.APIError as error:
                problem = f"the vLLM server at {url} failed ({type(error).__name__})"
                raise EndpointError(problem, "Is it running?") from None
            self._tells_sampling_logprobs = bool(told and told.token_logprobs and told.token_logprobs[0] == 0.0)
            if not self._tells_sampling_logprobs:
                break
        return self._tells_sampling_logprobs


def _client(url: str) -> Any:
    """A client for a single request before a run, which asks once more if it fails."""
    import openai

    return openai.OpenAI(base_url=url, api_key="none", timeout=CONNECT_S, max_retries=1)


def _first_model(url: str) -> Any:
    """The first model that a server lists, which is the one that it was started with."""
    import openai

    try:
        with _client(url) as client:
            listed = client.models.list().data
    except openai.APIError as error:
        hint = "Start it: vllm serve MODEL; then name its address with /v1 in rollout.servers."
        raise EndpointError(f"no vLLM server answers at {url} ({type(error).__name__})", hint) from None
    if not listed:
        raise ResourceError(f"the server at {url} serves no model")
    return listed[0]


def _end_of_turn(ids: Sequence[int], stops: StopStrings) -> int:
    """The number of a turn's ids up to and with the one that completes a stop string; all if none does."""
    for count in range(1, len(ids)):
        if stops.ended(ids[:count]):
            return count
    return len(ids)
