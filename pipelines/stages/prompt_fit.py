"""How many questions' prompts leave no token for an answer: counted before anything is paid or trained."""

import contextlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.databases.of_recipe import schemas
from pipelines.databases.schema_filter import CHARS_PER_TOKEN
from pipelines.protocols.base import build
from pipelines.recipe.config import Recipe, Sampling
from pipelines.rollout.gguf_model import is_gguf
from pipelines.stages.context import each_example
from pipelines.stages.gguf_folders import gguf_folder

log = logging.getLogger(__name__)
SHOWN = 5  # databases that a message names
NEAR = 0.2  # of an episode's tokens: prompts that are so near to it are counted, and not estimated


@dataclass(frozen=True)
class PoolFit:
    """The prompts of one pool of questions."""

    pool: str  # "sft", "rl", or a benchmark's name
    questions: int
    unfit: int  # prompts as long as an episode, or longer
    line: str  # for a person; names the databases
    hint: str  # if more are unfit than the recipe allows, what to do; else ""


def token_counter(recipe: Recipe, store: Store) -> tuple[Callable[[str], int], bool]:
    """A function that counts a text's tokens, and whether it is exact: it is if the model's tokenizer is on this
    machine; the tiny model's are words, those of others about three characters.
    """
    source = recipe.model.source
    if recipe.protocol.is_brief:
        return lambda text: len(text.split()), True
    folder = gguf_folder(Path(source), store, log.warning) if is_gguf(source) else Path(source).expanduser()
    path = folder / "tokenizer.json"
    if not path.is_file() and source != "tiny":
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):  # a folder that is not there: the model's first stage says so
            path = Path(str(try_to_load_from_cache(source, "tokenizer.json")))
    if not path.is_file():
        return lambda text: len(text) // CHARS_PER_TOKEN, False
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text).ids), True


def count(recipe: Recipe, folders: Mapping[str, Path]) -> list[PoolFit]:
    """The prompts of each pool that the recipe's stages ask, against the smallest budget of these stages. `folders` are
    those of the finished stages `data` and `test`, by step (`test.NAME` of a further benchmark).

    A database's first prompt is counted in tokens, and so is each that is about as long as an episode; the others by
    their characters, at as many for a token.
    """
    # The settings that bound the episodes of each pool. Those of a teacher that speaks text only are bounded by turn.
    sampling = {"difficulty": recipe.difficulty.sampling, "grpo": recipe.grpo.sampling}
    trained: dict[str, Sampling] = {name: of for name, of in sampling.items() if name in recipe.stages}
    name, teachers = "synthesis." + ("mix.{}" if recipe.synthesis.mix else "teacher"), recipe.synthesis.teachers
    own = {name.format(place): one.sampling for place, one in enumerate(teachers) if one.kind == "policy"}
    taught = own if "synthesize" in recipe.stages else {}
    if "difficulty" in trained and any(recipe.difficulty.explore_parts[:1]):
        taught |= trained
    pools: list[tuple[str, dict[str, Sampling], str, str]]
    pools = [("sft", taught, "data", "sft"), ("rl", trained, "data", "rl")]
    for place, benchmark in enumerate(recipe.data.test):
        step, asked = f"test.{benchmark.name}" if place else "test", {"evaluation": recipe.evaluation.sampling}
        pools.append((str(benchmark.name), asked, step, "test"))
    if not folders:
        return []
    store = Store(next(iter(folders.values())).parent.parent)
    tokens_of, is_exact = token_counter(recipe, store)
    protocol, schema = build(recipe.protocol), schemas(recipe)
    found = []
    for name, sections, step, pool in pools:
        budgets = {f"{section}.sampling.episode_tokens": of.episode_tokens for section, of in sections.items()}
        if pool == "sft" and "sft" in recipe.stages:
            budgets["sft.max_tokens"] = recipe.sft.max_tokens
        if step not in folders or not budgets:
            continue
        limit = min(budgets.values())
        smallest = " and ".join(setting for setting, tokens in budgets.items() if tokens == limit)
        turns = recipe.protocol.max_turns_eval if pool == "test" else recipe.protocol.max_turns
        sizes: dict[str, list[float]] = {}
        ratio: dict[str, float] = {}  # tokens of a character, by database
        for example in each_example(folders[step], pool):
            text = "\n".join(content for _, content in protocol.prompt(example, schema(example.database), turns))
            database = example.database.id
            if database not in ratio:
                ratio[database] = tokens_of(text) / max(1, len(text))
            size = len(text) * ratio[database]
            near = abs(size - limit) < NEAR * limit
            sizes.setdefault(database, []).append(tokens_of(text) if near else size)
        questions = sum(map(len, sizes.values()))
        by_database = {name: sum(size >= limit for size in of) for name, of in sizes.items()}
        unfit = sum(by_database.values())
        worst = sorted((name for name, number in by_database.items() if number), key=lambda name: -by_database[name])
        names = ", ".join(f"{name} {by_database[name]} (up to {max(sizes[name]):,.0f})" for name in worst[:SHOWN])
        more = f", and {len(worst) - SHOWN} more" if len(worst) > SHOWN else ""
        about = "" if is_exact else "about "
        line = f"{about}{unfit} of {questions} prompts of {name} have no room for an answer in {limit:,} tokens"
        hint = (
            f"Raise {smallest}, show less (protocol.schema_view=filtered data.linker=local), "
            f"or allow it: data.max_unfit_share={-(-100 * unfit // max(1, questions)) / 100:g}."
        )
        is_allowed = unfit <= recipe.data.max_unfit_share * questions
        found.append(
            PoolFit(name, questions, unfit, f"{line}: {names}{more}" if unfit else line, "" if is_allowed else hint)
        )
    return found


def check(recipe: Recipe, folders: Mapping[str, Path]) -> list[str]:
    """Lines about pools with prompts that do not fit.

    Raises:
        RecipeError: more than `data.max_unfit_share` of a pool.
    """
    found = count(recipe, folders)
    for pool in found:
        if pool.hint:
            raise RecipeError(pool.line, pool.hint)
    return [pool.line for pool in found if pool.unfit]
