"""Asking one endpoint: look into the log, stay within budget and pace, send, keep the answer, hand it on."""

import asyncio
import contextlib
import dataclasses
import hashlib
import itertools
import json
import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import BoundaryError, EndpointError, RecipeError, ResourceError, SqltrainError
from pipelines.core.messages import without_system
from pipelines.core.types import Message
from pipelines.endpoints import answers
from pipelines.endpoints.answers import Answer
from pipelines.endpoints.client import Connection, Endpoint, endpoint
from pipelines.endpoints.errors import ContextOverflow, Refused, UnreadableAnswer
from pipelines.endpoints.log import ResponseLog, Spent
from pipelines.recipe.config import Sampling

MOST_STOPS = 4  # stop strings that the OpenAI interface takes; at others the turn is cut here
CHARS_PER_TOKEN = 3  # a careful guess of a prompt's tokens, until the server has counted them
UNUSABLE = ("refused", "truncated", "empty", "malformed")  # kinds of answers that are counted: they were paid for too
POLL_S = 0.05  # seconds between two looks at a cap
GREEDY = Sampling(temperature=0.0, turn_tokens=2048)
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Budget:
    """A cap on tokens and on money that is never passed: a request on its way counts at its most."""

    name: str  # the endpoint's, for errors.
    endpoint: Endpoint  # the endpoint's caps and prices.
    spent: Spent  # tokens of the endpoint's log so far, which keeps it up to date.
    # Most tokens (prompt, completion) of each request on its way; who reserved them removes them.
    in_flight: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def cost(self, prompt: int, completion: int) -> float:
        """The price of so many tokens."""
        cost_in = prompt * (self.endpoint.price_in / 1e6)
        cost_out = completion * (self.endpoint.price_out / 1e6)
        return cost_in + cost_out

    async def reserve(self, most_tokens: tuple[int, int]) -> None:
        """Set aside the most tokens (prompt, completion) of a request; near a cap, wait until others took less.

        Raises:
            ResourceError: a cap is reached.
        """
        while True:
            problem = self._reached_cap(most_tokens)
            if not problem:
                break
            if not self.in_flight:
                hint = f"Raise it in the entry {self.name!r} and run again: what was answered is kept."
                raise ResourceError(f"endpoint {self.name!r} {problem}", hint)
            await asyncio.sleep(POLL_S)
        self.in_flight.append(most_tokens)

    def _reached_cap(self, most_tokens: tuple[int, int]) -> str:
        """The cap that one more request might pass, in words; "" if it fits."""
        prompt, completion = most_tokens
        for reserved_prompt, reserved_completion in self.in_flight:
            prompt += reserved_prompt
            completion += reserved_completion
        cap_tokens = self.endpoint.cap_tokens
        if cap_tokens is not None and self.spent.tokens + prompt + completion > cap_tokens:
            return f"has used {self.spent.tokens} tokens; its cap is {cap_tokens}"
        cap_cost = self.endpoint.cap_cost
        cost = self.cost(self.spent.prompt_tokens, self.spent.completion_tokens)
        if cap_cost is not None and cost + self.cost(prompt, completion) > cap_cost:
            money = f"{cost:.2f} of {cap_cost:.2f} {self.endpoint.currency}".rstrip()
            return f"has spent {money}; the next request may not fit"
        return ""


class Asker:
    """One endpoint as a function from a conversation to an answer that is bought at most once.

    Args:
        name: the endpoint's name in errors and in the log.
        responses: the folder of the log; None keeps nothing (evaluating a hosted model, say).
        concurrency: requests in flight at once.
    """

    def __init__(self, endpoint: Endpoint, name: str, responses: Path | None, concurrency: int = 16) -> None:
        self.endpoint = endpoint
        self.name = name
        self.concurrency = concurrency
        self.bought = Spent()  # this run's answers; the log's own count goes back to the first run
        # Key -> tokens of the prompt and of the answer, and the kind, of each answer handed out, whichever run paid.
        self.used: dict[str, tuple[int, int, str]] = {}
        self.connection = Connection(endpoint, name)
        self.log: ResponseLog | None = None
        spent = self.bought
        if responses is not None:
            self.log = ResponseLog(responses, name)
            spent = self.log.spent
        self.budget = Budget(name, endpoint, spent)
        self._streaming: dict[str, Any] = {}  # keys of a request that ask for a stream
        if endpoint.stream:
            self._streaming["stream"] = True
            if "stream_options" not in endpoint.omit:  # a server that refuses them counts no tokens
                self._streaming["stream_options"] = {"include_usage": True}
        self._has_told_of_thoughts = False
        self._gate: tuple[asyncio.AbstractEventLoop, asyncio.Semaphore] | None = None

    @classmethod
    def named(cls, name: str, responses: Path | None) -> "Asker":
        """The endpoint of that name in `conf/local/endpoints.yaml`."""
        settings = endpoint(name)
        return cls(settings, name, responses, settings.concurrency)

    async def ask(
        self,
        messages: Sequence[Message],
        sampling: Sampling = GREEDY,
        stop: Sequence[str] = (),
        max_tokens: int | None = None,
        sample: int = 0,
    ) -> Answer:
        """One answer, that numbered `sample` of several to the same conversation; `Connection.ask` has the errors."""
        settings = self.endpoint
        body = self._body(messages, sampling, stop, max_tokens)
        key = self._key(body, sample)
        if "seed" not in settings.omit:
            body["seed"] = int(key[:8], 16) >> 1
        claim: contextlib.AbstractAsyncContextManager[Any] = contextlib.nullcontext()
        if self.log is not None:
            claim = self.log.claim(key)
        async with self._free_slot(), claim as kept:
            if kept is None:
                answer = await self._buy(body, key, sample)
            else:
                answer = answers.from_record(kept)
        with_text = answers.with_thought_as_text(answer)
        if with_text is not answer:
            self._tell_of_thoughts()
        self.used[key] = with_text.prompt_tokens, with_text.completion_tokens, with_text.kind
        return with_text

    def _key(self, body: Mapping[str, Any], sample: int) -> str:
        """The 32 hex digits that stand for endpoint, model, request and sample in the log.

        The seed is not part of them: another recipe's seed is no reason to pay again.
        """
        identity = [self.name, self.endpoint.model, body, sample]
        text = json.dumps(identity, sort_keys=True, ensure_ascii=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]

    def _tell_of_thoughts(self) -> None:
        """Log once that answers are read from the reasoning field."""
        if self._has_told_of_thoughts:
            return
        self._has_told_of_thoughts = True
        log.warning(
            "endpoint %r puts whole answers into the reasoning field: they are read from there. If they are its "
            "thoughts, start the server with another reasoning parser, or without one",
            self.name,
        )

    def _body(
        self, messages: Sequence[Message], sampling: Sampling, stop: Sequence[str], max_tokens: int | None
    ) -> dict[str, Any]:
        """The JSON of a request, without its seed."""
        settings = self.endpoint
        conversation = messages
        if settings.system == "merge":
            conversation = without_system(messages)
        body: dict[str, Any] = {
            "model": settings.model,
            "messages": [{"role": role, "content": text} for role, text in conversation],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            settings.max_tokens_key: max_tokens or sampling.turn_tokens,
        }
        if stop:
            body["stop"] = list(stop)[:MOST_STOPS]
        for name in settings.omit:
            body.pop(name, None)
        return body | settings.extra

    def _free_slot(self) -> asyncio.Semaphore:
        """The slots of requests in flight, new ones in each event loop."""
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = (loop, asyncio.Semaphore(self.concurrency))
        return self._gate[1]

    def take_used(self) -> dict[str, float]:
        """Answers, tokens and cost of what was handed out since the last call, and the unusable answers by kind."""
        prompt_tokens = 0
        completion_tokens = 0
        kinds: Counter[str] = Counter()
        for prompt, completion, kind in self.used.values():
            prompt_tokens += prompt
            completion_tokens += completion
            kinds[kind] += 1
        numbers = {
            "answers": float(len(self.used)),
            "prompt_tokens": float(prompt_tokens),
            "completion_tokens": float(completion_tokens),
            "cost": self.budget.cost(prompt_tokens, completion_tokens),
        }
        numbers |= {kind: float(kinds[kind]) for kind in UNUSABLE}
        self.used.clear()
        return numbers

    def bill(self) -> str:
        """What `take_used` says, in one line for a person, with what this run itself has paid."""
        used = self.take_used()
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        line = f"{self.name}: {used['answers']:.0f} answers"
        for kind in UNUSABLE:
            if used[kind]:
                line += f", {used[kind]:.0f} {kind}"
        line += f", {tokens:.0f} tokens"
        if used["cost"]:
            line += f" for {used['cost']:.2f} {self.endpoint.currency}"
        return f"{line}; {self.bought.requests} of them bought now"

    def ask_all(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: Sampling = GREEDY,
        samples: int = 1,
        lenient: bool = False,
    ) -> list[Answer | None]:
        """Answers in order, many in flight; None for a conversation that is longer than the model's context.

        Several samples of a conversation stand together.

        Args:
            lenient: None also for a conversation on which the endpoint failed: a training leaves out an episode that a
                boundary broke, and caches no answer's absence.
        """
        return asyncio.run(self.ask_all_async(conversations, sampling, samples, lenient))

    async def ask_all_async(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: Sampling = GREEDY,
        samples: int = 1,
        lenient: bool = False,
    ) -> list[Answer | None]:
        """`ask_all` inside a running event loop."""
        requests = list(itertools.product(conversations, range(samples)))
        done: list[Answer | None] = [None] * len(requests)
        failures: list[SqltrainError] = []  # errors after all retries
        caught = (EndpointError, RecipeError) if lenient else (EndpointError,)
        queue = iter(enumerate(requests))

        async def work() -> None:
            for index, (messages, sample) in queue:
                try:
                    done[index] = await self.ask(messages, sampling, sample=sample)
                except ContextOverflow:
                    pass
                except caught as error:
                    failures.append(error)

        try:
            n_workers = min(self.concurrency, len(requests))
            async with asyncio.TaskGroup() as group:
                for _ in range(n_workers):
                    group.create_task(work())
        except BaseExceptionGroup as many:
            raise many.exceptions[0] from None
        finally:
            await self.connection.close()
        if failures and not lenient:
            problem = f"{len(failures)} of {len(done)} requests failed: {failures[0].message}"
            raise BoundaryError(problem, "Run again: what was answered is kept, only these are asked.")
        if failures and len(failures) == len(done):
            if isinstance(failures[0], RecipeError):
                raise failures[0]
            raise BoundaryError(f"endpoint {self.name!r} answered none of {len(done)} requests: {failures[0]}")
        return done

    async def _buy(self, body: Mapping[str, Any], key: str, sample: int) -> Answer:
        """Send a request within budget and pace."""
        chars = sum(len(message["content"]) + 16 for message in body["messages"])
        guessed_prompt = chars // CHARS_PER_TOKEN + 1
        limit = int(body.get(self.endpoint.max_tokens_key) or GREEDY.turn_tokens)
        most_tokens = (guessed_prompt, limit)
        unread: list[UnreadableAnswer] = []  # whole answers of the last tries, which were paid for
        await self.budget.reserve(most_tokens)

        async def send(client: Any) -> Answer:
            """One request, whose answer is kept before anybody uses it, be its asker still there or not."""
            try:
                # The whole body is read either way: some servers stream unasked, and others do not when asked.
                request = {**body, **self._streaming}
                raw = await client.post("/chat/completions", cast_to=str, body=request)
                value = answers.read_body(raw)
                answer = answers.read_completion(value)
            except UnreadableAnswer as error:
                unread.append(error)
                raise
            except Exception:
                unread.clear()
                raise
            if not (answer.prompt_tokens or answer.completion_tokens):
                answer = _with_guessed_tokens(answer, guessed_prompt)
            return self._keep(answer, key, sample)

        try:
            answer = await self.connection.ask(send, sum(most_tokens))
        except Refused:
            answer = self._keep(Answer("", "refused"), key, sample)
        except EndpointError:
            if not unread:
                raise
            answer = self._keep(_malformed_answer(unread), key, sample)
        finally:
            self.budget.in_flight.remove(most_tokens)
        # The rate took the most tokens: those not used come back.
        used = answer.prompt_tokens + answer.completion_tokens
        self.connection.pace.tokens.level += sum(most_tokens) - used
        return answer

    def _keep(self, answer: Answer, key: str, sample: int) -> Answer:
        """Write an answer to the log, if there is one, and count it as bought."""
        if self.log is not None:
            used = (answer.prompt_tokens, answer.completion_tokens)
            record = {"model": self.endpoint.model, "sample": sample, **dataclasses.asdict(answer)}
            self.log.append(key, used, record)
        self.bought.requests += 1
        self.bought.prompt_tokens += answer.prompt_tokens
        self.bought.completion_tokens += answer.completion_tokens
        return answer


def _malformed_answer(unread: Sequence[UnreadableAnswer]) -> Answer:
    """One answer for several that could not be read, with the tokens of all."""
    prompt_tokens = 0
    completion_tokens = 0
    for response in unread:
        prompt, completion = response.used
        prompt_tokens += prompt
        completion_tokens += completion
    return Answer(text="", kind="malformed", prompt_tokens=prompt_tokens, completion_tokens=completion_tokens)


def _with_guessed_tokens(answer: Answer, prompt_tokens: int) -> Answer:
    """The answer of a server that counts no tokens, so that caps and costs hold there too."""
    chars_of_calls = sum(len(text) for _, text in answer.calls)
    chars = len(answer.text) + len(answer.reasoning) + chars_of_calls
    guess = math.ceil(chars / CHARS_PER_TOKEN)
    return dataclasses.replace(answer, prompt_tokens=prompt_tokens, completion_tokens=guess)
