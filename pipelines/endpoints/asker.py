"""Asking one endpoint: look into the log, stay within budget and pace, send, keep the answer, hand it on."""

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import logging
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

MOST_STOPS = 4  # that the OpenAI interface takes; at others the turn is cut here
CHARS_PER_TOKEN = 3  # a careful guess of a prompt's tokens, until the server has counted them
UNUSABLE = ("refused", "truncated", "empty", "malformed")  # kinds of answers that are counted: they were paid for too
POLL_S = 0.05  # between two looks at a cap
GREEDY = Sampling(temperature=0.0, turn_tokens=2048)
log = logging.getLogger(__name__)


@dataclasses.dataclass
class Budget:
    """A cap on tokens and on money that is never passed: a request on its way counts at its most."""

    name: str  # the endpoint's, for errors.
    endpoint: Endpoint  # its caps and prices.
    spent: Spent  # by the endpoint's log so far, which keeps it up to date.
    # The most tokens (prompt, completion) of each request on its way; who reserved them removes them.
    in_flight: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def cost(self, prompt: int, completion: int) -> float:
        """The price of so many tokens."""
        return prompt * (self.endpoint.price_in / 1e6) + completion * (self.endpoint.price_out / 1e6)

    async def reserve(self, most: tuple[int, int]) -> None:
        """Set aside the most tokens (prompt, completion) of a request; near a cap, wait until others took less."""
        cap_tokens, cap_cost = self.endpoint.cap_tokens, self.endpoint.cap_cost
        while True:
            prompt = most[0] + sum(reserved[0] for reserved in self.in_flight)
            completion = most[1] + sum(reserved[1] for reserved in self.in_flight)
            cost = self.cost(self.spent.prompt_tokens, self.spent.completion_tokens)
            if cap_tokens is not None and self.spent.tokens + prompt + completion > cap_tokens:
                problem = f"has used {self.spent.tokens} tokens; its cap is {cap_tokens}"
            elif cap_cost is not None and cost + self.cost(prompt, completion) > cap_cost:
                money = f"{cost:.2f} of {cap_cost:.2f} {self.endpoint.currency}".rstrip()
                problem = f"has spent {money}; the next request may not fit"
            else:
                break
            if not self.in_flight:
                hint = f"Raise it in the entry {self.name!r} and run again: what was answered is kept."
                raise ResourceError(f"endpoint {self.name!r} {problem}", hint)
            await asyncio.sleep(POLL_S)
        self.in_flight.append(most)


class Asker:
    """One endpoint as a function from a conversation to an answer that is bought at most once.

    `name` is for errors and the log, whose folder is `responses`; None keeps nothing (evaluating a hosted model, say).
    `concurrency` requests are in flight at once.
    """

    def __init__(self, endpoint: Endpoint, name: str, responses: Path | None, concurrency: int = 16) -> None:
        self.endpoint, self.name, self.concurrency = endpoint, name, concurrency
        self.bought = Spent()  # by this run; the log's own count goes back to the first run
        # Tokens of the prompt and of the answer, and the kind, of each answer handed out, by key, whichever run paid.
        self.used: dict[str, tuple[int, int, str]] = {}
        self.connection = Connection(endpoint, name)
        self.log = ResponseLog(responses, name) if responses is not None else None
        self.budget = Budget(name, endpoint, self.log.spent if self.log is not None else self.bought)
        # The keys of a request that ask for a stream; a server that refuses "stream_options" counts no tokens.
        options = {} if "stream_options" in endpoint.omit else {"stream_options": {"include_usage": True}}
        self._streaming: dict[str, Any] = {"stream": True, **options} if endpoint.stream else {}
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
        settings, conversation = self.endpoint, list(messages)
        if settings.system == "merge":
            conversation = without_system(messages)
        whole_body: dict[str, Any] = {
            "model": settings.model,
            "messages": [{"role": role, "content": text} for role, text in conversation],
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            settings.max_tokens_key: max_tokens or sampling.turn_tokens,
        }
        if stop:
            whole_body["stop"] = list(stop)[:MOST_STOPS]
        body = {name: value for name, value in whole_body.items() if name not in settings.omit} | settings.extra
        # (endpoint, model, request hash, sample index) as 32 hex digits. The seed is not part of it: another recipe's
        # seed is no reason to pay again.
        text = json.dumps([self.name, settings.model, body, sample], sort_keys=True, ensure_ascii=True)
        key = hashlib.sha256(text.encode()).hexdigest()[:32]
        if "seed" not in settings.omit:
            body["seed"] = int(key[:8], 16) >> 1
        loop = asyncio.get_running_loop()
        if self._gate is None or self._gate[0] is not loop:
            self._gate = loop, asyncio.Semaphore(self.concurrency)
        async with self._gate[1], self.log.claim(key) if self.log is not None else contextlib.nullcontext() as kept:
            answer = await self._buy(body, key, sample) if kept is None else answers.from_record(kept)
        whole = answers.with_thought_as_text(answer)
        if whole is not answer and not self._has_told_of_thoughts:
            self._has_told_of_thoughts = True
            log.warning(
                "endpoint %r puts whole answers into the reasoning field: they are read from there. If they are its "
                "thoughts, start the server with another reasoning parser, or without one",
                self.name,
            )
        self.used[key] = whole.prompt_tokens, whole.completion_tokens, whole.kind
        return whole

    def take_used(self) -> dict[str, float]:
        """Answers, tokens and cost of what was handed out since the last call, and how many answers were none."""
        prompt, completion = sum(used[0] for used in self.used.values()), sum(used[1] for used in self.used.values())
        kinds = [used[2] for used in self.used.values()]
        numbers = {"answers": float(len(self.used)), "prompt_tokens": float(prompt)}
        numbers |= {"completion_tokens": float(completion), "cost": self.budget.cost(prompt, completion)}
        numbers |= {kind: float(kinds.count(kind)) for kind in UNUSABLE}
        self.used.clear()
        return numbers

    def bill(self) -> str:
        """What `take_used` says, in one line for a person, with what this run itself has paid."""
        used = self.take_used()
        tokens = used["prompt_tokens"] + used["completion_tokens"]
        cost = f" for {used['cost']:.2f} {self.endpoint.currency}" if used["cost"] else ""
        unusable = "".join(f", {used[kind]:.0f} {kind}" for kind in UNUSABLE if used[kind])
        line = f"{self.name}: {used['answers']:.0f} answers{unusable}, {tokens:.0f} tokens{cost}"
        return f"{line}; {self.bought.requests} of them bought now"

    def ask_all(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: Sampling = GREEDY,
        samples: int = 1,
        lenient: bool = False,
    ) -> list[Answer | None]:
        """Answers in order, many in flight; None for a conversation that is longer than the model's context. Several
        samples of a conversation stand together.

        A training is `lenient`: None also for a conversation on which the endpoint failed. It leaves out an episode
        that a boundary broke, and caches no answer's absence.
        """
        return asyncio.run(self.ask_all_async(conversations, sampling, samples, lenient))

    async def ask_all_async(
        self,
        conversations: Sequence[Sequence[Message]],
        sampling: Sampling = GREEDY,
        samples: int = 1,
        lenient: bool = False,
    ) -> list[Answer | None]:
        """As `ask_all`, inside a running event loop."""
        requests = [(messages, sample) for messages in conversations for sample in range(samples)]
        done: list[Answer | None] = [None] * len(requests)
        failures: list[SqltrainError] = []  # after all retries
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
            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.concurrency, len(requests))):
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
        # Tokens of the prompt (a guess) and of the answer (its limit) that the request takes at most.
        chars = sum(len(message["content"]) + 16 for message in body["messages"])
        limit = int(body.get(self.endpoint.max_tokens_key) or GREEDY.turn_tokens)
        most = chars // CHARS_PER_TOKEN + 1, limit
        unread: list[UnreadableAnswer] = []  # whole answers of the last tries, which were paid for
        await self.budget.reserve(most)

        async def send(client: Any) -> Answer:
            """One request, whose answer is kept before anybody uses it, be its asker still there or not."""
            try:
                # The whole body is read either way: some servers stream unasked, and others do not when asked.
                raw = await client.post("/chat/completions", cast_to=str, body={**body, **self._streaming})
                value = answers.read_body(raw)
                answer = answers.read_completion(value)
            except UnreadableAnswer as error:
                unread.append(error)
                raise
            except Exception:
                unread.clear()
                raise
            if not (answer.prompt_tokens or answer.completion_tokens):
                # A server that counts no tokens has them guessed, so that caps and costs hold there too.
                chars = len(answer.text) + len(answer.reasoning) + sum(len(text) for _, text in answer.calls)
                guess = -(-chars // CHARS_PER_TOKEN)
                answer = dataclasses.replace(answer, prompt_tokens=most[0], completion_tokens=guess)
            return self._keep(answer, key, sample)

        try:
            answer = await self.connection.ask(send, sum(most))
        except Refused:
            answer = self._keep(Answer("", "refused"), key, sample)
        except EndpointError:
            if not unread:
                raise
            prompt, completion = (sum(response.used[place] for response in unread) for place in (0, 1))
            malformed = Answer("", "malformed", prompt_tokens=prompt, completion_tokens=completion)
            answer = self._keep(malformed, key, sample)
        finally:
            self.budget.in_flight.remove(most)
        # The rate took the most tokens: those not used come back.
        self.connection.pace.tokens.level += sum(most) - answer.prompt_tokens - answer.completion_tokens
        return answer

    def _keep(self, answer: Answer, key: str, sample: int) -> Answer:
        used = answer.prompt_tokens, answer.completion_tokens
        if self.log is not None:
            about = {"model": self.endpoint.model, "sample": sample}
            self.log.append(key, used, {**about, **dataclasses.asdict(answer)})
        self.bought.requests += 1
        self.bought.prompt_tokens += used[0]
        self.bought.completion_tokens += used[1]
        return answer
