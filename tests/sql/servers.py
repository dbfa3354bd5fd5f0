"""A real PostgreSQL server for the tests, in a folder of its own, as a user that is not root."""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipelines.types import Database

READER = Path(__file__).parents[2] / "infra" / "postgres" / "reader.sql"
USERS = ("postgres", "nobody")  # who may run the server when the tests run as root


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        admin: its superuser's connection string.
        reader: that of a role that may only read what it is granted.
        shop: the test shop in it.
    """

    admin: str
    reader: str
    shop: Database


def binaries() -> Path | None:
    """The folder of PostgreSQL's programs; None if it is not installed."""
    found = shutil.which("initdb")
    folders = (
        [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    )
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def make_reader(programs: Path, superuser: str, role: str, password: str) -> None:
    """Make the role that the project's own script makes."""
    values = ("-v", f"role={role}", "-v", f"password={password}")
    command = [str(programs / "psql"), "-q", *values, "-f", str(READER), superuser]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _user() -> str | None:
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(user for user in USERS if user in names)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def postgres(programs: Path) -> Iterator[str]:
    """Run a server and give its superuser's connection string."""
    user, port = _user(), _free_port()
    folder = Path(tempfile.mkdtemp(prefix="sqltrain-postgres-"))  # pytest's own folders are closed to other users
    data = folder / "data"

    def call(*command: str) -> None:
        done = subprocess.run(command, user=user, cwd=folder, capture_output=True, text=True, env={"PATH": os.defpath})
        assert done.returncode == 0, done.stderr

    if user is not None:
        shutil.chown(folder, user)
    call(str(programs / "initdb"), "-D", str(data), "-U", "owner", "--auth=trust", "-E", "UTF8", "--no-sync")
    options = f"-c listen_addresses=127.0.0.1 -p {port} -c unix_socket_directories= -c fsync=off -c shared_buffers=16MB"
    try:
        call(str(programs / "pg_ctl"), "start", "-D", str(data), "-w", "-o", options, "-l", str(folder / "log"))
        yield f"host=127.0.0.1 port={port} user=owner dbname=postgres"
    finally:
        call(str(programs / "pg_ctl"), "stop", "-D", str(data), "-m", "immediate")
        shutil.rmtree(folder)
