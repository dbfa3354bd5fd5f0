"""A recipe's questions as a task of inspect_ai: its episodes as the solver, our equalities as the scorer.

inspect eval sqltrain/text_to_sql --model openai/MODEL -T recipe=sql_trail -T include=local/bird_dev
"""

import asyncio
from collections.abc import Sequence

from inspect_ai import Task, task
from inspect_ai.dataset import MemoryDataset, Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser
from inspect_ai.scorer import Score, Scorer, Target, mean, scorer, stderr
from inspect_ai.solver import Generate, Solver, TaskState, solver

from pipelines.environment.core import Environment, example_of, row_of, shared
from pipelines.protocols.blocks import close_tag

ANSWER = "sqltrain_answer"  # a sample's record of the final SQL, its turns and how the episode stopped
MESSAGE_KINDS = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}


@task  # type: ignore[untyped-decorator]
def text_to_sql(recipe: str = "sql_trail", overrides: str | list[str] = "", pool: str = "", workers: int = 2) -> Task:
    """The benchmark of a recipe: every question an episode, every answer held against gold under each equality.

    Args:
        recipe: a recipe's name or path: its protocol, prompt, turn cap and limits of SQL hold.
        overrides: `key=value`; one, or a list.
        pool: `sft`, `rl`, `dev`, or a benchmark of `data.test`; without it, the first benchmark.
        workers: processes that run SQL.
    """
    if isinstance(overrides, str):
        overrides = [overrides]
    words = tuple(filter(None, overrides))
    environment = shared(recipe, words, workers, evaluates=True)
    name = pool or environment.recipe.data.test[0].name
    samples = []
    for example in environment.questions(name):
        metadata = {"row": row_of(example)}
        sample = Sample(input=example.question, target=example.gold_sql, id=example.id, metadata=metadata)
        samples.append(sample)
    dataset = MemoryDataset(samples, name=name)
    equalities = environment.equalities(name)
    return Task(dataset=dataset, solver=episode(environment), scorer=execution(environment, equalities))


@solver  # type: ignore[untyped-decorator]
def episode(environment: Environment) -> Solver:
    """Turns and observations until the answer, or the turn cap."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        example = example_of(state.metadata["row"])
        session = environment.reset(example)
        state.messages = []
        for message in session.messages:
            kind = MESSAGE_KINDS[message["role"]]
            state.messages.append(kind(content=message["content"]))
        while not session.done:
            state = await generate(state, stop_seqs=list(session.stop))
            text = state.output.completion
            if state.output.stop_reason == "stop":  # most servers leave out the text that they stop at
                text = close_tag(text, session.stop, None)
            step = await session.step_async(text)
            if step.observation is not None:
                state.messages.append(ChatMessageUser(content=step.observation))
        answer = {key: step.info[key] for key in ("final_sql", "stop", "turns", "broken")}
        state.store.set(ANSWER, answer)
        return state

    return solve


@scorer(metrics={"*": [mean(), stderr()]})  # type: ignore[untyped-decorator]
def execution(environment: Environment, equalities: Sequence[str]) -> Scorer:
    """1 for a right answer, by equality; an episode whose database or gold SQL failed is not scored."""

    async def score(state: TaskState, target: Target) -> Score:
        answer = state.store.get(ANSWER)
        example = example_of(state.metadata["row"])
        verdicts = None
        if answer is not None and not answer["broken"]:
            verdicts = await asyncio.to_thread(environment.verdicts, example, answer["final_sql"], equalities)
        if verdicts is None:
            return Score.unscored(explanation="the episode, its database or its gold SQL is broken")
        return Score(value=verdicts, answer=answer["final_sql"], metadata=answer)

    return score
