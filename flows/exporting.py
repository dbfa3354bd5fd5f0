"""`sqltrain export`: a trained model as others take it."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from flows import asking, terminal
from pipelines.core.errors import DataError, UserError
from pipelines.core.store import Store
from pipelines.export import folder
from pipelines.export import folder as hub
from pipelines.export.cards import trace
from pipelines.recipe import recipes
from pipelines.serving.models import CHAMPION, champion_of


def export(what: str, kind: str, out: Path, name: str | None, overrides: Sequence[str], store: Store) -> None:
    """Write an export, and upload it where a name is given.

    Args:
        what: a checkpoint folder, champion:RECIPE, STAGE/KEY of the store, or a recipe that was trained.
        name: of the repository on a hub.
    """
    chosen: folder.Kind | None = next((known_kind for known_kind in get_args(folder.Kind) if known_kind == kind), None)
    if chosen is None:
        raise UserError(f"there is no export {kind!r}", f"There are: {', '.join(get_args(folder.Kind))}.")
    token = None if name is None else hub.require_token()  # before a folder is written
    lineage = trace(checkpoint(what, overrides, store))
    notes = folder.write(lineage, chosen, out)
    terminal.say(f"wrote {out}: read its {folder.README} before you hand it on")
    for note in notes:
        terminal.say(f"note: {note}")
    if kind == "ollama":
        terminal.say(f"import it: cd {out} && ollama create {out.name}")
    if name is not None and token is not None:
        terminal.say(f"pushed to {hub.push(out, name, token)}")


def checkpoint(what: str, overrides: Sequence[str], store: Store) -> Path:
    """The folder of the model that a text names."""
    path = Path(what).expanduser()
    if path.is_dir():
        return path
    if what.startswith(CHAMPION):
        champion = champion_of(store, what.removeprefix(CHAMPION))
        return store.folder(champion.stage, champion.key) / "model"
    stage, _, key = what.partition("/")
    if key and store.has(stage, key):
        return store.folder(stage, key) / "model"
    if what not in recipes.recipe_names() and not what.endswith(".yaml"):
        raise DataError(f"there is no model {what!r}", "Pass a folder, champion:RECIPE, STAGE/KEY or a recipe.")
    return asking.newest_model(recipes.load(what, overrides), store)
