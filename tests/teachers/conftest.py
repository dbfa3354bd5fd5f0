"""A miniature data stage, a teacher behind a real server, and the file that names it."""

import pytest
from teacher_server import TeacherServer, scripted_replies
from teacher_world import KEY, make, recipe_of  # noqa: F401

from pipelines.databases.of_recipe import schemas
from pipelines.protocols.base import build_protocol
from pipelines.stages.context import examples
from tests.fakes import build_database


@pytest.fixture
def servers():
    started = []

    def start(*args, **kwargs):
        started.append(TeacherServer(*args, **kwargs))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def music(tmp_path):
    """A database of three singers."""
    script = """
    CREATE TABLE singer (name TEXT, city TEXT, age INTEGER);
    INSERT INTO singer VALUES ('ann', 'paris', 30), ('bo', 'oslo', 40), ('cy', 'paris', 50);
    """
    return build_database(tmp_path / "music.sqlite", script)


@pytest.fixture
def replies():
    """What the oracle says to the questions of a recipe's data stage."""

    def of(recipe, store):
        folder = make(recipe, store, "data")
        protocol, schema = build_protocol(recipe.protocol), schemas(recipe)
        asked = {
            protocol.prompt(one, schema(one.database), recipe.protocol.max_turns)[-1][1]: one
            for one in examples(folder, "sft")
        }
        return scripted_replies(protocol, asked)

    return of


@pytest.fixture
def name_endpoint(tmp_path, monkeypatch):
    """Write the endpoints' file and the key that it names; a second server is the endpoint "other"."""

    def write(server, other=None, **settings):
        import yaml

        path = tmp_path / "endpoints.yaml"
        servers = {"teacher": server, "other": other or server}
        entry = {"model": "m", "key_env": "TEACHER_KEY", **settings}
        path.write_text(yaml.safe_dump({name: {"base_url": one.url, **entry} for name, one in servers.items()}))
        monkeypatch.setenv("SQLTRAIN_ENDPOINTS", str(path))
        monkeypatch.setenv("TEACHER_KEY", KEY)
        return path

    return write
