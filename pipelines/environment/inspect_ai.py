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

ANSWER = "sqltrain_answer"  # in the sample's store: the final SQL, its turns and how the episode stopped


@task  # type: ignore[untyped-decorator]
def text_to_sql(recipe: str = "sql_trail", overrides: str | list[str] = "", pool: str = "", workers: int = 2) -> Task:
    """The benchmark of a recipe: every question an episode, every answer held against gold under each equality.

    Args:
        recipe: a recipe's name or path: its protocol, prompt, turn cap and limits of SQL hold.
        overrides: `key=value`; one, or a list.
        pool: `sft`, `rl`, `dev`, or a benchmark of `data.test`; without it, the first benchmark.
        workers: processes that run SQL.
    """
    words = [overrides] if isinstance(overrides, str) else overrides
    environment = shared(recipe, tuple(filter(None, words)), workers, evaluates=True)
    name = pool or environment.recipe.data.test[0].name
    samples = []
    for example in environment.questions(name):
        metadata = {"row": row_of(example)}
        samples.append(Sample(input=example.question, target=example.gold_sql, id=example.id, metadata=metadata))
    return Task(
        dataset=MemoryDataset(samples, name=name),
        solver=episode(environment),
        scorer=execution(environment, environment.equalities(name)),
    )


@solver  # type: ignore[untyped-decorator]
def episode(environment: Environment) -> Solver:
    """Turns and observations until the answer, or the turn cap."""

    async def solve(state: TaskState, generate: Generate) -> TaskState:
        session = environment.reset(example_of(state.metadata["row"]))
        kinds = {"system": ChatMessageSystem, "user": ChatMessageUser, "assistant": ChatMessageAssistant}
        state.messages = [kinds[message["role"]](content=message["content"]) for message in session.messages]
        while not session.done:
            state = await generate(state, stop_seqs=list(session.stop))
            text = state.output.completion
            if state.output.stop_reason == "stop":  # most servers leave out the text that they stop at
                text = close_tag(text, session.stop, None)
            step = await session.step_async(text)
            if step.observation is not None:
                state.messages.append(ChatMessageUser(content=step.observation))
        state.store.set(ANSWER, {key: step.info[key] for key in ("final_sql", "stop", "turns", "broken")})
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
