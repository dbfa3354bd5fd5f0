"""Commands of operation on a real store: status, store, champion; each with examples in its help."""

import json
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from command_line import sqltrain
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running

from flows import cli
from flows.commands import operate
from flows.prefect import remote
from pipelines.core.store import Store
from pipelines.nightly.ledger import Ledger

COMMANDS = [
    ["nightly"],
    ["status"],
    ["champion", "show"],
    ["champion", "rollback"],
    ["store", "ls"],
    ["store", "gc"],
    ["store", "verify"],
    ["store", "pin"],
    ["store", "push"],
    ["store", "pull"],
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One finished stage, and three nights: a champion, one that was kept, and a better one."""
    made = Store(tmp_path / "store")
    made.make("data", "d1", lambda folder: (folder / "data.txt").write_text("rows") and None, {}, lambda: None)
    ledger = Ledger(made, "miniature")
    for decision, key, ex in (("promoted", "k1", 0.25), ("kept", "k2", 0.5), ("promoted", "k3", 0.75)):
        challenger = {"stage": "grpo", "key": key}
        facts = {"decision": decision, "reason": f"because of {key}", "numbers": {"challenger_ex": ex}}
        ledger.add("night", challenger=challenger, new=[], learned=[], **facts)
    return made


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_has_an_example(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = sqltrain(monkeypatch, capsys, *command, "--help")
    assert code == 0
    assert f"sqltrain {' '.join(command)}" in out.partition("Example")[2]


def test_every_command_names_a_store_a_model_and_a_database_by_the_same_option() -> None:
    def leaves(group: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
        for name, command in group.items():
            whole = f"{path} {name}".strip()
            yield from leaves(command.commands, whole) if hasattr(command, "commands") else [(whole, command)]

    commands = dict(leaves(cli.every_command(), ""))
    takes = {name for name, command in commands.items() if any("--store" in one.opts for one in command.params)}
    changes = {
        name for name, command in commands.items() if {one.name for one in command.params} & {"overrides", "axes"}
    }
    assert changes - takes == {"review", "environment serve"}  # they use no store
    assert takes - changes == {"mcp", "status", *(name for name in commands if name.startswith("store "))}
    options = {word for command in commands.values() for one in command.params for word in one.opts}
    assert not options & {"--policy", "--endpoint", "--teacher", "--databases"}  # they are --model and --database
    texts = [text for one in commands.values() for text in (one.help, *(getattr(p, "help", "") for p in one.params))]
    assert not [text for text in texts if "store=" in (text or "")]


def test_status_tells_the_last_night_and_plots_accuracy(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = sqltrain(monkeypatch, capsys, "status", "--store", str(store.root))
    assert code == 0
    assert "nothing runs" in out
    assert "miniature: champion grpo/k3" in out
    assert "promoted: because of k3" in out
    drawn = [line.partition("┤")[2] for line in out.splitlines() if "┤" in line]
    assert drawn[0] == "    ●"  # 75 %, the third night
    assert drawn[-1] == "●"  # 25 %, the first
    assert sum("○" in line for line in drawn) == 1
    code, out, _ = sqltrain(monkeypatch, capsys, "status", "--store", str(store.root), "--json")
    assert [night["ex"] for night in json.loads(out)["recipes"]["miniature"]["nights"]] == [0.25, 0.5, 0.75]


def test_status_shows_several_stores(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    both = ("--store", str(store.root), "--store", str(tmp_path / "empty"))
    code, out, _ = sqltrain(monkeypatch, capsys, "status", *both)
    assert code == 0
    assert [line for line in out.splitlines() if line.startswith("store ")] == [
        f"store {store.root}",
        f"store {tmp_path / 'empty'}",
    ]
    _, out, _ = sqltrain(monkeypatch, capsys, "status", *both, "--json")
    assert [list(json.loads(line)["recipes"]) for line in out.splitlines()] == [["miniature"], []]


def test_a_plot_of_equal_nights_and_of_none() -> None:
    night = {"at": "", "decision": "kept", "ex": 0.5}
    assert [line for line in operate.plot([night, night]) if "┤○" in line] == ["  50.0 ┤○ ○"]
    assert operate.plot([{"at": "", "decision": "nothing", "ex": None}]) == []


def test_a_deployed_night_is_waited_for_while_the_server_restarts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [Running(), httpx.ConnectError("refused"), httpx.ReadError(""), Completed(name="Kept", message="no gain")]
    asked: list[Any] = []

    class Client:
        def read_flow_run(self, run: str) -> SimpleNamespace:
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(state=answer)

    def start(name: str, **how: Any) -> SimpleNamespace:
        asked.append((name, how["parameters"]))
        return SimpleNamespace(id="r1", name="a night")

    monkeypatch.setattr("tasks.prefect_server.check_server", lambda: None)
    monkeypatch.setattr(remote, "run_deployment", start)
    monkeypatch.setattr(remote, "get_client", lambda **_: nullcontext(Client()))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    command = ["nightly", "miniature", "seed=1", "--deployment", "retrain/nightly", "--store", "s"]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code, out, err = sqltrain(monkeypatch, capsys, *command)
    assert (code, out) == (0, "kept: no gain\n")
    assert err.count("does not answer") == 1
    assert asked == [("retrain/nightly", {"recipe": "miniature", "overrides": ["seed=1"], "store": "s"})]
    with temporary_settings({PREFECT_API_URL: None}):
        code, _, err = sqltrain(monkeypatch, capsys, *command)
    assert code == 2
    assert "PREFECT_API_URL is not set" in err


def test_rollback_is_one_command_and_cannot_go_too_far(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tasks.models.announce", lambda *arguments: None)  # the registry is tested in tests/tasks
    where = f"--store={store.root}"
    store.make("grpo", "k1", lambda folder: None, {}, lambda: None)
    with Ledger(store, "miniature").locked():  # a night is at work
        code, out, _ = sqltrain(monkeypatch, capsys, "champion", "rollback", "miniature", where)
    assert code == 0
    assert "grpo/k1/model (was grpo/k3)" in out
    code, out, _ = sqltrain(monkeypatch, capsys, "champion", "show", "miniature", where, "--json")
    assert [one["key"] for one in json.loads(out)["champions"]] == ["k1"]
    code, _, err = sqltrain(monkeypatch, capsys, "champion", "rollback", "miniature", where)
    assert code == 2
    assert "no earlier champion" in err


def test_the_store_is_listed_verified_and_collected(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--store", str(store.root))
    code, out, _ = sqltrain(monkeypatch, capsys, "store", "ls", "--all", *where)
    assert code == 0
    assert "data/d1" in out
    assert sqltrain(monkeypatch, capsys, "store", "verify", *where)[:2] == (0, "1 stages, 0 damaged\n")
    (store.folder("data", "d1") / "data.txt").write_text("rowz")
    code, out, _ = sqltrain(monkeypatch, capsys, "store", "verify", *where)
    assert code == 1
    assert "damaged:" in out
    code, out, _ = sqltrain(monkeypatch, capsys, "store", "gc", *where)
    assert "0 folders" in out
    code, out, _ = sqltrain(monkeypatch, capsys, "store", "gc", "--days", "0", *where)
    assert "would remove data/d1" in out
    assert store.has("data", "d1")
    code, out, _ = sqltrain(monkeypatch, capsys, "store", "gc", "--days", "0", "--delete", *where)
    assert "removed data/d1" in out
    assert not store.has("data", "d1")
