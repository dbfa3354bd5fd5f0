"""A miniature data stage, a teacher behind a real server, and the file that names it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from teacher_server import TeacherServer, scripted_replies
from teacher_world import KEY, make, recipe_of  # noqa: F401

from pipelines.core.store import Store
from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import build
from pipelines.recipe.config import Recipe
from pipelines.stages.context import examples


@pytest.fixture
def servers() -> Iterator[Callable[..., TeacherServer]]:
    started: list[TeacherServer] = []

    def start(*args: Any, **kwargs: Any) -> TeacherServer:
        started.append(TeacherServer(*args, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def replies() -> Callable[[Recipe, Store], Any]:
    """What the oracle says to the questions of a recipe's data stage."""

    def of(recipe: Recipe, store: Store) -> Any:
        folder = make(recipe, store, "data")
        protocol, schema = build(recipe.protocol), schemas(recipe)
        asked = {
            protocol.prompt(one, schema(one.database), recipe.protocol.max_turns)[-1][1]: one
            for one in examples(folder, "sft")
        }
        return scripted_replies(protocol, asked)

    return of


@pytest.fixture
def name_endpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Write the endpoints' file and the key that it names; a second server is the endpoint "other"."""

    def write(server: TeacherServer, other: TeacherServer | None = None, **settings: Any) -> Path:
        import yaml

        path = tmp_path / "endpoints.yaml"
        servers = {"teacher": server, "other": other or server}
        entry = {"model": "m", "key_env": "TEACHER_KEY", **settings}
        path.write_text(yaml.safe_dump({name: {"base_url": one.url, **entry} for name, one in servers.items()}))
        monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))
        monkeypatch.setenv("TEACHER_KEY", KEY)
        return path

    return write
