"""Real servers of PostgreSQL and MariaDB for the tests, each in a folder of its own, as a user that is not root."""

import contextlib
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pymysql

from pipelines.core.processes import free_port
from pipelines.core.types import Database

READER = Path(__file__).parents[2] / "infra" / "postgres" / "reader.sql"
USERS = ("postgres", "nobody")  # who may run the server when the tests run as root


@dataclass(frozen=True)
class Server:
    admin: str  # its superuser's connection string
    reader: str  # that of a role that may only read what it is granted
    shop: Database


def binaries():
    """The folder of PostgreSQL's programs; None if it is not installed."""
    found = shutil.which("initdb")
    folders = (
        [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    )
    return next((folder for folder in folders if (folder / "initdb").exists()), None)


def make_reader(programs, superuser, role, password):
    values = ("-v", f"role={role}", "-v", f"password={password}")
    command = [str(programs / "psql"), "-q", *values, "-f", str(READER), superuser]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def _user():
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return next(user for user in USERS if user in names)


class Cluster:
    """A PostgreSQL server in a folder of its own, which can be killed and started again."""

    def __init__(self, programs):
        self._programs, self._user, self._port = programs, _user(), free_port()
        self.admin = f"host=127.0.0.1 port={self._port} user=owner dbname=postgres"
        self.folder = Path(tempfile.mkdtemp(prefix="sqltrain-postgres-"))  # pytest's own are closed to other users
        self._data = self.folder / "data"
        if self._user is not None:
            shutil.chown(self.folder, self._user)
        self._call("initdb", "-D", str(self._data), "-U", "owner", "--auth=trust", "-E", "UTF8", "--no-sync")

    def start(self):
        network = f"-c listen_addresses=127.0.0.1 -p {self._port} -c unix_socket_directories="
        options = f"{network} -c fsync=off -c shared_buffers=16MB"
        self._call("pg_ctl", "start", "-D", str(self._data), "-w", "-o", options, "-l", str(self.folder / "log"))

    def kill(self):
        first = int((self._data / "postmaster.pid").read_text().split()[0])
        os.kill(first, signal.SIGSTOP)  # it starts no other process while those that there are get listed
        killed = (first, *children(first))
        for pid in killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until = time.monotonic() + 30
        while any(map(is_alive, killed)):  # their shared memory is theirs until they have ended
            assert time.monotonic() < until, f"still there after kill -9: {killed}"
            time.sleep(0.02)
        # Where nobody has waited for the dead process yet, its number is taken, and the next server would not start.
        (self._data / "postmaster.pid").unlink()

    def remove(self):
        self._call("pg_ctl", "stop", "-D", str(self._data), "-m", "immediate")
        shutil.rmtree(self.folder)

    def _call(self, program, *words):
        command = [str(self._programs / program), *words]
        environment = {"PATH": os.defpath}
        done = subprocess.run(
            command, user=self._user, cwd=self.folder, capture_output=True, text=True, env=environment
        )
        assert done.returncode == 0, done.stderr


def is_alive(pid):
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def children(parent):
    with contextlib.suppress(OSError):
        return [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    return []


@contextmanager
def postgres(programs):
    cluster = Cluster(programs)
    cluster.start()
    try:
        yield cluster.admin
    finally:
        cluster.remove()


@contextmanager
def postgres_schema(server, name, script, database="postgres"):
    """The owner's connection to a schema that the script fills, and the schema as the reader may read it."""
    admin, reader = (each.replace("dbname=postgres", f"dbname={database}") for each in (server.admin, server.reader))
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute(f"CREATE SCHEMA {name}; SET search_path = {name}; {script}".encode())
        grants = f"GRANT USAGE ON SCHEMA {name} TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA {name} TO reader"
        connection.execute(grants.encode())
        try:
            yield connection, Database(name, "postgres", f"{reader} options='-c search_path={name}'")
        finally:
            connection.execute(f"DROP SCHEMA {name} CASCADE".encode())


def mariadb_programs():
    """MariaDB's server and what makes its data folder; None if they are not installed."""
    path = os.pathsep.join((os.defpath, "/usr/sbin", "/usr/local/sbin"))
    server, installer = shutil.which("mariadbd", path=path), shutil.which("mariadb-install-db", path=path)
    return (server, installer) if server and installer else None


@contextmanager
def mariadb(programs):
    """Run a MariaDB server, with a superuser `owner` without a password, and give its port."""
    port = free_port()
    user = None if os.getuid() else "mysql" if any(e.pw_name == "mysql" for e in pwd.getpwall()) else "nobody"
    folder = Path(tempfile.mkdtemp(prefix="sqltrain-mariadb-"))
    (folder / "init.sql").write_text("CREATE USER owner@'%';\nGRANT ALL ON *.* TO owner@'%' WITH GRANT OPTION;\n")
    if user is not None:
        shutil.chown(folder, user)
    common = ["--no-defaults", f"--datadir={folder}/data"]
    made = subprocess.run(
        [programs[1], *common, "--auth-root-authentication-method=normal", "--skip-test-db"],
        user=user, cwd=folder, capture_output=True, text=True,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    options = [f"--port={port}", "--bind-address=127.0.0.1", f"--socket={folder}/socket", "--skip-name-resolve"]
    options.append(f"--init-file={folder}/init.sql")
    small = ["--innodb-buffer-pool-size=16M", "--performance-schema=off"]
    # Nothing of it outlives the tests, so no table waits for the disk.
    unsynced = ["--innodb-flush-log-at-trx-commit=0", "--innodb-flush-method=nosync", "--skip-sync-frm"]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(
            [programs[0], *common, *options, *small, *unsynced], user=user, cwd=folder, stdout=log, stderr=log
        )
    try:
        _wait_until_it_listens(server, port, folder / "log")
        yield port
    finally:
        server.kill()
        server.wait()
        shutil.rmtree(folder)


def _wait_until_it_listens(server, port, log):
    until = time.monotonic() + 60
    while time.monotonic() < until and server.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise AssertionError(log.read_text()[-2000:])


def build_mysql(port, user, *scripts):
    """A database for each script, which has the user's name and a number, and which the user may read."""
    names = [f"{user}{number}" for number in range(1, len(scripts) + 1)]
    with pymysql.connect(host="127.0.0.1", port=port, user="owner", autocommit=True) as connection:
        cursor = connection.cursor()
        cursor.execute(f"CREATE USER IF NOT EXISTS {user}@'%'")
        for name in names:
            cursor.execute(f"CREATE OR REPLACE DATABASE {name}")
            cursor.execute(f"GRANT SELECT, SHOW VIEW ON {name}.* TO {user}@'%'")
        for name, script in zip(names, scripts, strict=True):
            cursor.execute(f"USE {name}")
            for statement in script.strip().rstrip(";").split(";"):
                cursor.execute(statement)
    return [Database(user, "mysql", f"mysql://{user}@127.0.0.1:{port}/{name}") for name in names]
