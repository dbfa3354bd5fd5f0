"""The answering model: a checkpoint, the champion of a recipe's nights, a model behind an endpoint, or a script."""

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipelines.core.errors import DataError, RecipeError
from pipelines.core.files import read_lines
from pipelines.core.store import Store
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Champion, Ledger
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
        return _endpoint_model(text.removeprefix(ENDPOINT), recipes.load(recipe, overrides))
    if text.startswith(SCRIPT):
        policy = script(Path(text.removeprefix(SCRIPT)))
        return AnsweringModel("script", policy, recipes.load(recipe, overrides))
    if text.startswith(CHAMPION):
        champion = champion_of(store, text.removeprefix(CHAMPION))
        return _checkpoint(store.folder(champion.stage, champion.key) / "model", recipe, overrides, champion.key)
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
    policy = OpenAIPolicy(entry, name, entry.concurrency, None, build_protocol(recipe.protocol))
    return AnsweringModel(name, policy, recipe)


def champion_of(store: Store, text: str) -> Champion:
    """The champion of a recipe's nights: `RECIPE` for that of prod, or `RECIPE@staging`."""
    recipe, _, tier = text.partition("@")
    if tier not in ("", *TIERS):
        raise DataError(f"there is no tier {tier!r}", f"There are: {', '.join(TIERS)}.")
    ledger = Ledger(store, recipe)
    champion = ledger.champion(tier or PROD)
    if champion is not None:
        return champion
    if tier == STAGING:
        raise DataError(f"recipe {recipe} has no champion of staging in {store.root}", f"Serve {CHAMPION}{recipe}.")
    problem = f"recipe {recipe} has no champion in {store.root}"
    hint = f"Run: sqltrain nightly {recipe}, or of a database: sqltrain adapt {recipe}"
    nights = [row for row in ledger.lines() if row["event"] == "night" and "challenger" in row]
    if nights:
        last = nights[-1]
        model = store.folder(last["challenger"]["stage"], last["challenger"]["key"]) / "model"
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
    loaded = loaded.model_copy(update={"rollout": loaded.rollout.model_copy(update=changes)})
    import torch

    torch.set_num_threads(1)  # the server shares its cores with workers and clients (docs/results/learning.md)
    return AnsweringModel(name, local_policy(str(folder), loaded), loaded)


def script(path: Path) -> Policy:
    """A policy from a file: a JSON object a line, with a `question` ("*" for any other) and its `turns`."""
    turns: dict[str, list[str]] = {}
    hint = 'Each line is {"question": "...", "turns": ["..."]}.'
    for number, row in read_lines(path, hint):
        lines = row.get("turns") if isinstance(row, dict) else None
        if not isinstance(lines, list) or not lines or not all(isinstance(turn, str) for turn in lines):
            raise DataError(f"{path}, line {number}: no turns", hint)
        question = row.get("question")
        if not isinstance(question, str):
            raise DataError(f"{path}, line {number}: no question", hint)
        if question in turns:
            problem = f"{path}, line {number}: the question {question!r} is there twice"
            raise DataError(problem, "Leave one of them out.")
        turns[question] = lines

    def reply(request: Request) -> str:
        lines = turns.get(request.example.question) or turns.get(ANY)
        if lines is None:
            raise RecipeError("the script has no line for this question", f'Add one, or a line for "{ANY}".')
        return lines[min(request.turn, len(lines) - 1)]

    return ScriptedPolicy(reply, "script")


@dataclass
class CurrentModel:
    """The model that answers now: a promotion or a rollback replaces it between two questions."""

    text: str  # see `open_model`.
    recipe: str
    overrides: Sequence[str]
    store: Store

    def __post_init__(self) -> None:
        self.model = open_model(self.text, self.recipe, self.overrides, self.store)

    async def follow(self) -> None:
        """Look at the ledger now and then, until cancelled; questions under way end with the model that began them."""
        tried_key = ""  # the newest champion that was tried
        retry_at = 0.0
        last_warning = ("", "")  # the champion and the reason
        while self.text.startswith(CHAMPION):
            await asyncio.sleep(LOOK_S)
            try:
                key = champion_of(self.store, self.text.removeprefix(CHAMPION)).key
                if key != self.model.name and (key != tried_key or time.monotonic() > retry_at):
                    tried_key = key
                    retry_at = time.monotonic() + RETRY_S
                    self.model = await asyncio.to_thread(open_model, self.text, self.recipe, self.overrides, self.store)
                    log.warning("the champion is %s now", key)
            except Exception as error:  # a full memory, too: who serves must go on looking
                warning = (tried_key, str(error) or type(error).__name__)
                if warning != last_warning:
                    log.warning("the champion before goes on serving: %s", warning[1])
                last_warning = warning
