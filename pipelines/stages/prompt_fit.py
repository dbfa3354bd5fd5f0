"""The number of questions whose prompts leave no token for an answer: counted before anything is paid or trained."""

import contextlib
import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pipelines.core.errors import RecipeError
from pipelines.core.store import Store
from pipelines.databases.of_recipe import schemas
from pipelines.databases.schema_filter import CHARS_PER_TOKEN
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Recipe
from pipelines.rollout.gguf_model import is_gguf
from pipelines.stages.context import each_example
from pipelines.stages.gguf_folders import gguf_folder
from pipelines.stages.stage import benchmarks_by_stage

log = logging.getLogger(__name__)
SHOWN = 5  # databases that a message names
NEAR = 0.2  # Prompts within this share of an episode's tokens are counted in tokens, the others are estimated.
CountTokens = Callable[[str], int]
_COUNTED: set[tuple[str, ...]] = set()  # recipes, and folders of questions, whose prompts this process has counted


@dataclass(frozen=True)
class PoolFit:
    """The prompts of one pool of questions."""

    pool: str  # "sft", "rl", or a benchmark's name.
    questions: int
    unfit: int  # prompts as long as an episode, or longer.
    line: str  # the finding for a person; it names the databases.
    hint: str  # advice, if more prompts are unfit than the recipe allows; else "".


@dataclass(frozen=True)
class BoundedPool:
    """A pool of questions that stages of a recipe ask, and the token budgets of its episodes."""

    title: str  # "sft", "rl", or a benchmark's name.
    step: str  # the stage that holds the questions: "data", "test", or "test.NAME".
    pool: str  # their pool in that stage's file.
    budgets: Mapping[str, int]  # tokens of an episode, by the dotted key of the setting that bounds it.

    @property
    def limit(self) -> int:
        """The smallest budget."""
        return min(self.budgets.values())

    @property
    def binding_settings(self) -> str:
        """The settings that have the smallest budget, for a message."""
        settings = [setting for setting, tokens in self.budgets.items() if tokens == self.limit]
        return " and ".join(settings)


def token_counter(recipe: Recipe, store: Store) -> tuple[CountTokens, bool]:
    """A function that counts a text's tokens, and whether it is exact.

    It is exact if the model's tokenizer is on this machine, and for the tiny model, whose tokens are words. Else three
    characters count as a token.
    """
    source = recipe.model.source
    if recipe.protocol.is_brief:
        return lambda text: len(text.split()), True
    folder = Path(source).expanduser()
    if is_gguf(source):
        folder = gguf_folder(Path(source), store, log.warning)
    path = folder / "tokenizer.json"
    if not path.is_file() and source != "tiny":
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError

        with contextlib.suppress(HFValidationError):  # a missing folder: the model's first stage reports it
            cached = try_to_load_from_cache(source, "tokenizer.json")
            path = Path(str(cached))
    if not path.is_file():
        return lambda text: len(text) // CHARS_PER_TOKEN, False
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text).ids), True


def bounded_pools(recipe: Recipe) -> list[BoundedPool]:
    """The pools that the recipe's stages ask, with their budgets, without those that no bounded episode asks.

    A teacher that speaks text only is bounded by turn, not by episode, so it sets no budget.
    """
    rollout_budgets: dict[str, int] = {}
    sampling_of_stage = {"difficulty": recipe.difficulty.sampling, "grpo": recipe.grpo.sampling}
    for stage, sampling in sampling_of_stage.items():
        if stage in recipe.stages:
            rollout_budgets[f"{stage}.sampling.episode_tokens"] = sampling.episode_tokens
    sft_budgets = _sft_budgets(recipe)
    explores_sft = any(recipe.difficulty.explore_parts[:1])
    if "difficulty" in recipe.stages and explores_sft:
        sft_budgets |= rollout_budgets
    sft_pool = BoundedPool("sft", "data", "sft", sft_budgets)
    rl_pool = BoundedPool("rl", "data", "rl", rollout_budgets)
    pools = [sft_pool, rl_pool]
    evaluation_budgets = {"evaluation.sampling.episode_tokens": recipe.evaluation.sampling.episode_tokens}
    for stage, benchmark in benchmarks_by_stage(recipe).items():
        pools.append(BoundedPool(str(benchmark.name), stage, "test", evaluation_budgets))
    return [pool for pool in pools if pool.budgets]


@dataclass
class PromptSizes:
    """The sizes of a pool's prompts in tokens, by database.

    A database's first prompt is counted in tokens, and so is each that is about as long as an episode; the others are
    estimated from their characters, with the first prompt's tokens a character.
    """

    count_tokens: CountTokens
    limit: int
    sizes: dict[str, list[float]] = field(default_factory=dict)
    tokens_a_character: dict[str, float] = field(default_factory=dict)

    def add(self, database: str, prompt: str) -> None:
        """Measure one prompt."""
        if database not in self.tokens_a_character:
            n_tokens = self.count_tokens(prompt)
            self.tokens_a_character[database] = n_tokens / max(1, len(prompt))
        size = len(prompt) * self.tokens_a_character[database]
        if abs(size - self.limit) < NEAR * self.limit:
            size = self.count_tokens(prompt)
        self.sizes.setdefault(database, []).append(size)

    @property
    def questions(self) -> int:
        return sum(map(len, self.sizes.values()))

    def unfit_by_database(self) -> dict[str, int]:
        """Prompts as long as an episode or longer, for each database that has some, the most first."""
        unfit: Counter[str] = Counter()
        for database, sizes in self.sizes.items():
            number = sum(size >= self.limit for size in sizes)
            if number:
                unfit[database] = number
        return dict(unfit.most_common())


def count_prompts(recipe: Recipe, folders: Mapping[str, Path]) -> list[PoolFit]:
    """The prompts of each pool that the recipe's stages ask, against the smallest budget of these stages.

    Args:
        folders: those of the finished stages `data` and `test`, by step (`test.NAME` for a further benchmark).
    """
    if not folders:
        return []
    pools = [pool for pool in bounded_pools(recipe) if pool.step in folders]
    first_folder = next(iter(folders.values()))
    store = Store(first_folder.parent.parent)
    count_tokens, is_exact = token_counter(recipe, store)
    protocol = build_protocol(recipe.protocol)
    schema = schemas(recipe)
    fits = []
    for pool in pools:
        turns = recipe.protocol.max_turns
        if pool.pool == "test":
            turns = recipe.protocol.max_turns_eval
        sizes = PromptSizes(count_tokens, pool.limit)
        for example in each_example(folders[pool.step], pool.pool):
            messages = protocol.prompt(example, schema(example.database), turns)
            contents = [content for _, content in messages]
            sizes.add(example.database.id, "\n".join(contents))
        fits.append(_pool_fit(pool, sizes, is_exact, recipe.data.max_unfit_share))
    return fits


def _pool_fit(pool: BoundedPool, sizes: PromptSizes, is_exact: bool, allowed_share: float) -> PoolFit:
    """The finding about one pool, in words."""
    questions = sizes.questions
    by_database = sizes.unfit_by_database()
    unfit = sum(by_database.values())
    about = "" if is_exact else "about "
    line = f"{about}{unfit} of {questions} prompts of {pool.title} have no room for an answer in {pool.limit:,} tokens"
    if unfit:
        databases = _databases_in_words(by_database, sizes)
        line += f": {databases}"
    hint = ""
    if unfit > allowed_share * questions:
        percent = -(-100 * unfit // max(1, questions))
        share = percent / 100
        hint = (
            f"Raise {pool.binding_settings}, show less (protocol.schema_view=filtered data.linker=local), "
            f"or allow it: data.max_unfit_share={share:g}."
        )
    return PoolFit(pool.title, questions, unfit, line, hint)


def _databases_in_words(unfit_by_database: Mapping[str, int], sizes: PromptSizes) -> str:
    """The databases with the most prompts that do not fit, each with its longest one."""
    texts = []
    for database, number in itertools.islice(unfit_by_database.items(), SHOWN):
        longest = max(sizes.sizes[database])
        texts.append(f"{database} {number} (up to {longest:,.0f})")
    n_more = len(unfit_by_database) - len(texts)
    if n_more:
        texts.append(f"and {n_more} more")
    return ", ".join(texts)


def _sft_budgets(recipe: Recipe) -> dict[str, int]:
    """The token budgets of the episodes that SFT learns from, and of SFT itself."""
    budgets: dict[str, int] = {}
    if "synthesize" in recipe.stages:
        for index, teacher in enumerate(recipe.synthesis.teachers):
            if teacher.kind == "policy":
                section = "synthesis.teacher"
                if recipe.synthesis.mix:
                    section = f"synthesis.mix.{index}"
                budgets[f"{section}.sampling.episode_tokens"] = teacher.sampling.episode_tokens
    if "sft" in recipe.stages:
        budgets["sft.max_tokens"] = recipe.sft.max_tokens
    return budgets


def note_unfit_prompts(recipe: Recipe, folders: Mapping[str, Path], say: Callable[[str], None]) -> None:
    """Count, once in a process, the questions whose prompts have no room for an answer, and say so.

    Args:
        folders: those of the stages `data` and `test`, by step; those that are not made yet are left out.

    Raises:
        RecipeError: more than `data.max_unfit_share` of a pool.
    """
    finished = {name: folder for name, folder in folders.items() if folder.is_dir()}
    key = (recipe.model_dump_json(), *map(str, finished.values()))
    if key in _COUNTED:
        return
    for line in require_fit(recipe, finished):
        say(f"note: {line}")
    _COUNTED.add(key)


def require_fit(recipe: Recipe, folders: Mapping[str, Path]) -> list[str]:
    """Lines about pools with prompts that do not fit.

    Raises:
        RecipeError: more than `data.max_unfit_share` of a pool.
    """
    fits = count_prompts(recipe, folders)
    for fit in fits:
        if fit.hint:
            raise RecipeError(fit.line, fit.hint)
    return [fit.line for fit in fits if fit.unfit]
