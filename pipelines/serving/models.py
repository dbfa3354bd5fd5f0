"""The answering model: a checkpoint, the champion of a recipe's nights, a model behind an endpoint, or a script."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError, RecipeError, UserError
from pipelines.core.files import read_lines
from pipelines.core.store import Store
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Champion, Ledger, ledgers
from pipelines.recipe import recipes
from pipelines.recipe.checkpoint import read_card, require_sound
from pipelines.recipe.config import Recipe
from pipelines.rollout.gguf_model import is_gguf
from pipelines.rollout.policies.base import Policy, Request, ScriptedPolicy
from pipelines.serving.agent import AnsweringModel
from pipelines.stages.gguf_folders import model_folder

# How a model's name begins that is no folder or file.
ENDPOINT = "endpoint:"
SCRIPT = "script:"
CHAMPION = "champion:"
KINDS = "a checkpoint folder, a GGUF file, champion:RECIPE, champion:RECIPE@staging, endpoint:NAME or script:FILE.jsonl"
DEFAULT_RECIPE = "sql_trail"  # gives an endpoint or a script its protocol, unless another is named
SLOTS = 16  # episodes that a model in this process decodes together
ANY = "*"  # the question of a script's line that answers all others
LOOK_S = 2.0  # seconds between two looks at the ledger
RETRY_S = 60.0  # seconds between two tries to load a champion
log = logging.getLogger(__name__)


def open_model(text: str, recipe: str, overrides: Sequence[str], store: Store) -> AnsweringModel:
    """Open the model that a text names.

    Args:
        recipe: gives an endpoint or a script its protocol; a checkpoint has it on its card.
    """
    if text.startswith(ENDPOINT):
        loaded = recipes.load(recipe, overrides)
        return _endpoint_model(text.removeprefix(ENDPOINT), loaded)
    if text.startswith(SCRIPT):
        file = Path(text.removeprefix(SCRIPT))
        policy = script(file)
        loaded = recipes.load(recipe, overrides)
        return AnsweringModel("script", policy, loaded)
    if text.startswith(CHAMPION):
        champion = champion_of(store, text.removeprefix(CHAMPION))
        folder = store.folder(champion.stage, champion.key) / "model"
        return _checkpoint(folder, recipe, overrides, champion.key)
    folder = model_folder(text, store, log.warning).resolve()
    if is_gguf(text):
        name = Path(text).stem
    elif folder.name == "model":
        name = folder.parent.name
    else:
        name = folder.name
    return _checkpoint(folder, recipe, overrides, name)


def _endpoint_model(name: str, recipe: Recipe) -> AnsweringModel:
    from pipelines.endpoints.client import endpoint
    from pipelines.protocols.base import build_protocol
    from pipelines.teachers.policy import OpenAIPolicy

    entry = endpoint(name)
    protocol = build_protocol(recipe.protocol)
    policy = OpenAIPolicy(entry, name, entry.concurrency, protocol=protocol)
    return AnsweringModel(name, policy, recipe)


def only_champion(store: Store) -> str:
    """The name of the store's champion, which answers if no model is passed; an error unless there is exactly one."""
    recipes_with_champion = []
    for recipe, ledger in ledgers(store).items():
        if ledger.champion() is not None:
            recipes_with_champion.append(recipe)
    if len(recipes_with_champion) == 1:
        return CHAMPION + recipes_with_champion[0]
    reason = "no recipe has a champion"
    if recipes_with_champion:
        reason = f"{len(recipes_with_champion)} recipes have a champion"
    raise UserError(f"{reason} in {store.root}", f"Pass --model with {KINDS}.")


def champion_of(store: Store, text: str) -> Champion:
    """The champion of a recipe's nights: `RECIPE` for that of prod, or `RECIPE@staging`."""
    recipe, _, tier = text.partition("@")
    if tier not in ("", *TIERS):
        tiers = ", ".join(TIERS)
        raise DataError(f"there is no tier {tier!r}", f"There are: {tiers}.")
    ledger = Ledger(store, recipe)
    champion = ledger.champion(tier or PROD)
    if champion is not None:
        return champion
    if tier == STAGING:
        raise DataError(f"recipe {recipe} has no champion of staging in {store.root}", f"Serve {CHAMPION}{recipe}.")
    problem = f"recipe {recipe} has no champion in {store.root}"
    hint = f"Run: sqltrain nightly {recipe}, or of a database: sqltrain adapt {recipe}"
    nights = [row for row in ledger.lines() if row["event"] == "night"]
    nights_that_trained = [row for row in nights if "challenger" in row]
    if nights_that_trained:
        last = nights_that_trained[-1]
        challenger = last["challenger"]
        model = store.folder(challenger["stage"], challenger["key"]) / "model"
        problem += f": its last model was {last['decision']}, {last['reason']}"
        hint = f"Add questions and train again, or name that model itself: {model}"
    raise DataError(problem, hint)


def _checkpoint(folder: Path, recipe: str, overrides: Sequence[str], name: str) -> AnsweringModel:
    if not (folder / "config.json").is_file():
        raise DataError(f"no model in {folder}", f"Pass {KINDS}.")
    require_sound(folder)
    from pipelines.rollout.policies.factories import local_policy

    card = read_card(folder)
    if card is not None:
        overrides = [*card.overrides(), *overrides]
        if card.recipe in recipes.recipe_names():
            recipe = card.recipe
    loaded = recipes.load(recipe, overrides)
    changes = {"deterministic": False, "slots": SLOTS}  # nobody waits for another's statement
    rollout = loaded.rollout.model_copy(update=changes)
    served = loaded.model_copy(update={"rollout": rollout})
    import torch

    torch.set_num_threads(1)  # the server shares its cores with workers and clients (docs/results/learning.md)
    policy = local_policy(str(folder), served)
    return AnsweringModel(name, policy, served)


def script(path: Path) -> Policy:
    """A policy from a file: a JSON object a line, with a `question` ("*" for any other) and its `turns`."""
    turns: dict[str, list[str]] = {}
    hint = 'Each line is {"question": "...", "turns": ["..."]}.'
    for number, row in read_lines(path, hint):
        place = f"{path}, line {number}"
        lines = None
        if isinstance(row, dict):
            lines = row.get("turns")
        if not isinstance(lines, list) or not lines:
            raise DataError(f"{place}: no turns", hint)
        if not all(isinstance(turn, str) for turn in lines):
            raise DataError(f"{place}: no turns", hint)
        question = row.get("question")
        if not isinstance(question, str):
            raise DataError(f"{place}: no question", hint)
        if question in turns:
            problem = f"{place}: the question {question!r} is there twice"
            raise DataError(problem, "Leave one of them out.")
        turns[question] = lines

    def reply(request: Request) -> str:
        lines = turns.get(request.example.question) or turns.get(ANY)
        if lines is None:
            raise RecipeError("the script has no line for this question", f'Add one, or a line for "{ANY}".')
        last = len(lines) - 1
        return lines[min(request.turn, last)]

    return ScriptedPolicy(reply, "script")


@dataclass
class CurrentModel:
    """The model that answers now: a promotion or a rollback replaces it between two questions."""

    text: str  # see `open_model`.
    recipe: str
    overrides: Sequence[str]
    store: Store

    def __post_init__(self) -> None:
        self.model = self._open()
        self._replaced: list[AnsweringModel] = []

    def _open(self) -> AnsweringModel:
        return open_model(self.text, self.recipe, self.overrides, self.store)

    async def follow(self) -> None:
        """Look at the ledger now and then, until cancelled; questions under way end with the model that began them."""
        tried_key = ""  # the newest champion that was tried
        retry_at = 0.0
        last_warning = ("", "")  # the champion and the reason
        while self.text.startswith(CHAMPION):
            await asyncio.sleep(LOOK_S)
            await self._close_replaced()
            try:
                champion = champion_of(self.store, self.text.removeprefix(CHAMPION))
                key = champion.key
                may_try = key != tried_key or time.monotonic() > retry_at
                if key != self.model.name and may_try:
                    tried_key = key
                    retry_at = time.monotonic() + RETRY_S
                    opened = await asyncio.to_thread(self._open)
                    self._replaced.append(self.model)
                    self.model = opened
                    log.warning("the champion is %s now", key)
            except Exception as error:  # a full memory, too: who serves must go on looking
                reason = str(error) or type(error).__name__
                warning = (tried_key, reason)
                if warning != last_warning:
                    log.warning("the champion before goes on serving: %s", reason)
                last_warning = warning

    async def _close_replaced(self) -> None:
        """Close the models that no question needs any more: their decoding would keep their weights in memory.

        A question that was given one just before it was replaced has begun its episode by the next look.
        """
        needed = []
        for model in self._replaced:
            if model.policy.is_idle:
                await model.policy.close()
            else:
                needed.append(model)
        self._replaced = needed
