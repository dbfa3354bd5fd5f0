"""HTTP servers whose answers are a plain function of the body that was posted; {} for a GET."""

from contextlib import ExitStack

import pytest

from tests.fakes import http_server


def posted(server):
    """The bodies of the requests that asked for an answer."""
    return [asked.json for asked in server.asked if asked.method == "POST"]


@pytest.fixture
def serve():
    with ExitStack() as servers:

        def start(answer):
            server = servers.enter_context(http_server(lambda asked: answer(asked.json)))
            server.url += "/v1"
            return server

        yield start
