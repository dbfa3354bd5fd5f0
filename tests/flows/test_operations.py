"""Commands of operation and sweeps as a user types them; and what a terminal shows of names and errors of others."""

import io
import json
import sqlite3
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Completed, Running
from rich.console import Console

from flows import terminal as screen
from flows.commands import use
from flows.prefect import remote
from flows.terminal import Bars
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind, plain
from pipelines.evaluation.stats import Estimate
from pipelines.nightly import store_status
from pipelines.nightly.ledger import Ledger
from pipelines.protocols.base import build_protocol
from pipelines.recipe import recipes
from pipelines.report import console_text
from pipelines.report.console_text import stage_figures
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.rollout.policies import factories
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.stages.stage import StageResult


@pytest.fixture
def store(tmp_path):
    """One finished stage, and three nights: a champion, one that was kept, and a better one."""
    made = Store(tmp_path / "store")
    made.make("data", "d1", lambda folder: (folder / "data.txt").write_text("rows") and None, {}, lambda: None)
    ledger = Ledger(made, "miniature")
    for decision, key, ex in (("promoted", "k1", 0.25), ("kept", "k2", 0.5), ("promoted", "k3", 0.75)):
        challenger = {"stage": "grpo", "key": key}
        facts = {"decision": decision, "reason": f"because of {key}", "numbers": {"challenger_ex": ex}}
        ledger.add("night", challenger=challenger, new=[], learned=[], **facts)
    return made


def test_status_tells_the_last_night_and_plots_accuracy(store, sqltrain):
    out = sqltrain.ok("status", "--store", str(store.root))
    assert "nothing runs" in out
    assert "miniature: champion grpo/k3" in out
    assert "promoted: because of k3" in out
    drawn = [line.partition("┤")[2] for line in out.splitlines() if "┤" in line]
    assert drawn[0] == "    ●"  # 75 %, the third night
    assert drawn[-1] == "●"  # 25 %, the first
    assert sum("○" in line for line in drawn) == 1
    out = sqltrain.ok("status", "--store", str(store.root), "--json")
    assert [night["ex"] for night in json.loads(out)["recipes"]["miniature"]["nights"]] == [0.25, 0.5, 0.75]
    night = {"at": "", "decision": "kept", "ex": 0.5}
    assert [line for line in store_status.plot_nights([night, night]) if "┤○" in line] == ["  50.0 ┤○ ○"]
    assert store_status.plot_nights([{"at": "", "decision": "nothing", "ex": None}]) == []


def test_status_shows_several_stores(store, tmp_path, sqltrain):
    (tmp_path / "empty").mkdir()
    both = ("--store", str(store.root), "--store", str(tmp_path / "empty"))
    out = sqltrain.ok("status", *both)
    found = [line for line in out.splitlines() if line.startswith("store ")]
    assert found == [f"store {store.root}", f"store {tmp_path / 'empty'}"]
    _, out, _ = sqltrain("status", *both, "--json")
    assert [list(json.loads(line)["recipes"]) for line in out.splitlines()] == [["miniature"], []]


def test_a_deployed_night_is_waited_for_while_the_server_restarts(monkeypatch, sqltrain):
    answers = [Running(), httpx.ConnectError("refused"), httpx.ReadError(""), Completed(name="Kept", message="no gain")]
    asked = []

    class Client:
        def read_flow_run(self, run):
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return SimpleNamespace(state=answer)

    def start(name, **how):
        asked.append((name, how["parameters"]))
        return SimpleNamespace(id="r1", name="a night")

    monkeypatch.setattr("tasks.prefect_server.check_server", lambda: None)
    monkeypatch.setattr(remote, "run_deployment", start)
    monkeypatch.setattr(remote, "get_client", lambda **_: nullcontext(Client()))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    command = ["nightly", "miniature", "seed=1", "--deployment", "retrain/nightly", "--store", "s"]
    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code, out, err = sqltrain(*command)
    assert (code, out) == (0, "kept: no gain\n")
    assert err.count("does not answer") == 1
    assert asked == [("retrain/nightly", {"recipe": "miniature", "overrides": ["seed=1"], "store": "s"})]
    with temporary_settings({PREFECT_API_URL: None}):
        code, _, err = sqltrain(*command)
    assert code == 2
    assert "PREFECT_API_URL is not set" in err


def test_rollback_is_one_command_and_cannot_go_too_far(store, monkeypatch, sqltrain):
    # The registry is tested in tests/tasks.
    monkeypatch.setattr("tasks.models.announce_champion", lambda *arguments: None)
    where = f"--store={store.root}"
    store.make("grpo", "k1", lambda folder: None, {}, lambda: None)
    with Ledger(store, "miniature").locked():  # a night is at work
        code, out, _ = sqltrain("champion", "rollback", "miniature", where)
    assert code == 0
    assert "grpo/k1/model (was grpo/k3)" in out
    code, out, _ = sqltrain("champion", "show", "miniature", where, "--json")
    shown = json.loads(out)
    assert ([one["key"] for one in shown["champions"]], shown["staging"]) == (["k1"], [])
    refused = sqltrain.refused("champion", "promote", "miniature", where)
    assert "miniature has no champion of staging" in refused
    assert "no earlier champion" in sqltrain.refused("champion", "rollback", "miniature", where)


def test_the_store_is_listed_verified_and_collected(store, sqltrain, monkeypatch):
    where = ("--store", str(store.root))
    assert "data/d1" in sqltrain.ok("store", "ls", "--all", *where)
    assert sqltrain("store", "verify", *where)[:2] == (0, "1 stages, 0 damaged\n")
    (store.folder("data", "d1") / "data.txt").write_text("rowz")
    code, out, _ = sqltrain("store", "verify", *where)
    assert code == 1
    assert out.splitlines()[0].endswith(": data.txt")
    monkeypatch.setattr(type(store), "damage", lambda *_, **names: [f"{number}.txt" for number in range(7)])
    _, out, _ = sqltrain("store", "verify", *where)
    assert out.splitlines()[0].endswith(": 0.txt, 1.txt, 2.txt, 3.txt, 4.txt and 2 more")
    assert "0 folders" in sqltrain.ok("store", "gc", *where)
    assert "would remove data/d1" in sqltrain.ok("store", "gc", "--days", "0", *where)
    assert store.has("data", "d1")
    assert "removed data/d1" in sqltrain.ok("store", "gc", "--days", "0", "--delete", *where)
    assert not store.has("data", "d1")


def test_a_papers_table_is_planned_by_its_name(tmp_path, sqltrain):
    words = ("sweep", "sql_trail/table6", "--miniature", "grpo.steps=2", f"--store={tmp_path}", "--plan")
    code, out, _ = sqltrain(*words)
    lines = out.splitlines()
    assert code == 0
    assert lines[1] == "row=after SFT: nothing to make"  # the row before makes the whole chain
    assert lines[3] == "row=w/o turns: grpo, evaluate_grpo, report"
    assert lines[-1].startswith("9 cells: ")
    assert not list(tmp_path.iterdir())
    planned = json.loads(sqltrain(*words, "--json")[1].splitlines()[-1])
    assert planned["cells"]["row=w/o turns"] == "grpo, evaluate_grpo, report"
    assert planned["sum"] == lines[-1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("sql_trail/table66",), "there is no table 'sql_trail/table66'. Did you mean 'sql_trail/table6'?"),
        (("miniature", "--miniature"), "--miniature is for a paper's table"),
        (("sql_trail/table5", "--miniature"), "SQL-Trail, table 5 has no miniature"),
        (("miniature", "seed=0..1", "--engine", "workers"), "'workers' is not one of 'plain', 'prefect'"),
        (("miniature", "after=end"), "there is no checkpoint 'end'"),
        (("miniature", "variant=none,no_turns", "--baseline", "variant=x"), "no row has 'variant=x'"),
        (("miniature", "seed=0..1", "--baseline", "seed=0"), "no row has 'seed=0'"),
        (("miniature", "seed=0,1", "seed=0..2"), "the axis seed is given twice"),
        (("sql_trail/table6", "grpo.stepz=1"), "unknown key 'grpo.stepz'"),
    ],
)
def test_a_mistake_is_one_plain_line(words, said, sqltrain):
    assert said in sqltrain.refused("sweep", *words, "--plan")


def test_a_finished_sweep_prints_its_tables_line_by_line(tmp_path, sqltrain):
    words = (
        "sweep",
        "miniature",
        "seed=0..1",
        f"--store={tmp_path}",
        "stages=[data]",
        "data.sft={kind: jsonl, path: none}",
    )
    code, out, _ = sqltrain(*words)  # its cells fail, and the table says so
    assert code != 0
    assert "\\n" not in out
    assert any(line.startswith("| EX | difference |") for line in out.splitlines())


def test_a_folder_that_cannot_be_written_is_an_error_before_a_cell_is_made(tmp_path, sqltrain):
    (tmp_path / "taken").write_text("")
    words = ("sweep", "miniature", "seed=0..1", "--out", str(tmp_path / "taken"), f"--store={tmp_path / 'store'}")
    assert "taken cannot be written: File exists. Name another folder with --out." in sqltrain.refused(*words)
    assert not (tmp_path / "store").exists()


HOSTILE = "x\x1b]0;pwned\x07\n✓ report  \u202edone"
SHOWN = "x\\x1b]0;pwned\\x07\\n✓ report  \\u202edone"


def console():
    return Console(file=io.StringIO(), highlight=False, width=100)


def printed(of):
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


@pytest.mark.parametrize(
    ("words", "one_line", "lines"),
    [
        ("café ✓ [/b] :smile:", "café ✓ [/b] :smile:", "café ✓ [/b] :smile:"),
        (HOSTILE, SHOWN, SHOWN.replace("\\n", "\n")),
        ("1\u202f234\u00a0rows", "1 234 rows", "1 234 rows"),
        ("a\tb\rc", "a\\tb\\rc", "a\\tb\\rc"),
        ("\u2028\ud83d\x9b", "\\u2028\\ud83d\\x9b", "\\u2028\\ud83d\\x9b"),
    ],
)
def test_what_does_not_print_is_shown_by_its_escape(words, one_line, lines):
    assert plain(words) == one_line
    assert plain(words, lines=True) == lines


def test_tables_and_progress_show_what_others_wrote():
    out = console()
    out.print(console_text.render(ReportTable("t", "of [/red]", (TableColumn("sys [/b]"),), ((HOSTILE,),)), 100))
    Bars(out).say(f"no schema of {HOSTILE} [/red] :warning:")
    found = printed(out).splitlines()
    assert found == ["of [/red]", "sys [/b]".ljust(len(SHOWN)), SHOWN, f"no schema of {SHOWN} [/red] :warning:"]


def test_a_table_fits_the_screen_whole_turned_or_row_by_row():
    """Of two rows: 6 + 2 + 17 + 2 + 17 = 44 columns; turned 7 + 2 + 17 + 2 + 17 = 45; row by row 7 + 2 + 17 = 26."""
    columns = (TableColumn("system"), TableColumn("greedy", "estimate"), TableColumn("sampled", "estimate"))
    one, two = (Estimate(value, 0.5, 0.75, 480, 480, "wilson") for value in (0.625, 0.7))
    table = ReportTable("t", "EX", columns, (("before", one, two), ("after", two, one)))
    shown = {}
    for width in (44, 43, 30):
        out = Console(file=io.StringIO(), highlight=False, width=width)
        out.print(console_text.render(table, width))
        shown[width] = [line.rstrip() for line in printed(out).splitlines()]
    assert shown[44] == [
        "EX",
        "system             greedy            sampled",
        "before  62.5 [50.0, 75.0]  70.0 [50.0, 75.0]",
        "after   70.0 [50.0, 75.0]  62.5 [50.0, 75.0]",
    ]
    assert (
        shown[30]
        == shown[43]
        == [
            "EX",
            *("system   before", "greedy   62.5 [50.0, 75.0]", "sampled  70.0 [50.0, 75.0]"),
            "",
            *("system   after", "greedy   70.0 [50.0, 75.0]", "sampled  62.5 [50.0, 75.0]"),
        ]
    )
    words = "Held-out execution accuracy"  # a title may be wider than its table
    wide = ReportTable("t", words, (*columns, TableColumn("questions", "count")), (("before", one, two, 480),))
    out = Console(file=io.StringIO(), highlight=False, width=30)
    out.print(console_text.render(wide, 30))
    assert [line.rstrip() for line in printed(out).splitlines()] == [
        words,
        "system                before",
        "greedy     62.5 [50.0, 75.0]",
        "sampled    70.0 [50.0, 75.0]",
        "questions                480",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_and_lines_of_stages_fit_80_columns(monkeypatch, terminal):
    out = Console(file=io.StringIO(), highlight=False, width=80, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(screen, "console", out)
    metrics = {"questions": 800, "pass_rate": 0.8156, "zero_variance_share": 0.6687, "balanced": 265, "explore": 28}
    result = StageResult("difficulty", "c34af7f371c821cb", Path("x"), metrics, False)

    def walk(recipe, store, steps, progress, tracker, on_stage):
        progress.begin("evaluate_grpo", 2835, "questions")
        progress.advance(127, "loss 0.406")
        on_stage(result, 77.61)
        return []

    monkeypatch.setattr(screen, "walk", walk)
    screen.run(recipes.load("miniature"), Store(Path("store")), None)
    lines = printed(out).splitlines()
    assert max(map(len, lines[1:])) <= 80 + 9 * terminal  # a bar's own line begins with what moves the cursor
    assert any(
        "\n".join(lines[place : place + 2]).endswith(
            "✓ difficulty       c34af7f371c821cb  77.6 s    questions 800  pass_rate 0.8156\n"
            "    zero_variance_share 0.6687  balanced 265  explore 28"
        )
        for place in range(len(lines))
    )
    if terminal:
        assert any("evaluate_grpo" in line and "127/2835 questions    0:00:00 loss 0.406" in line for line in lines)


def test_a_reason_of_the_ledger_stays_one_line():
    last = {"event": "night", "at": "x", "decision": "refused", "reason": HOSTILE}
    found = {"store": "s", "running": [], "recipes": {"m": {"champion": None, "nights": [], "last": last}}}
    assert store_status.status_text(found).splitlines()[-1] == f"last night, x: refused: {SHOWN}"


def test_titles_and_paths_hold_no_markup(tmp_path, monkeypatch, sqltrain):
    out = console()
    monkeypatch.setattr(screen, "console", out)
    folder = tmp_path / "store"
    pool = "{kind: miniature, split: SPLIT, options: {databases: 1, questions: 2}}"
    train, dev, test = (pool.replace("SPLIT", name) for name in ("train", "dev", "test"))
    pools = [
        f"data.sft={train}",
        f"data.rl=[{train}]",
        f"data.dev={dev}",
        f"data.test=[{test}]",
        'title="a [/b] :smile:"',
    ]
    code, _, err = sqltrain("run", "miniature", *pools, "--until", "data", f"--store={folder}")
    assert (code, err) == (0, "")
    assert printed(out).startswith(f"miniature: a [/b] :smile: (store: {folder})\n✓ data ")
    screen.say("5 questions in r[final].jsonl and s[/old]")
    assert printed(out).endswith("5 questions in r[final].jsonl and s[/old]\n")


def test_an_error_is_one_line_whatever_it_names(tmp_path, sqltrain):
    err = sqltrain.refused("ask", "how many ?", "--database", f"/none/{HOSTILE}.sqlite")
    assert err == f"error: no such database: /none/{SHOWN}.sqlite. Pass a file, an address, or a name of databases/.\n"


def test_an_answer_is_shown_and_not_obeyed(tmp_path, monkeypatch):
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute("INSERT INTO t VALUES (?)", ("\x1b]52;c;cm0=\x07\x1b[2Jhi\r",))
    connection.close()
    (tmp_path / "config.json").write_text(json.dumps({}))
    recipe = recipes.load("miniature")
    said = build_protocol(recipe.protocol).write(
        Action(ActionKind.SOLUTION, 'SELECT a AS "\x1b[31mcol"\nFROM t', "why")
    )
    monkeypatch.setattr(factories, "local_policy", lambda *_, **__: ScriptedPolicy(lambda _: said))
    shown = []
    use.ask_model(recipe, Store(tmp_path / "store"), "q", str(path), tmp_path, shown.append)
    assert shown[-4:] == [
        '\nSQL: SELECT a AS "\\x1b[31mcol"\nFROM t',
        "\\x1b[31mcol",
        "\\x1b]52;c;cm0=\\x07\\x1b[2Jhi\\r",
        "(1 row)",
    ]
    assert not any("\x1b" in line for line in shown)


def test_a_count_is_printed_with_all_its_digits():
    metrics = {"trajectories": 14000.0, "broken": 0.0, "turns_mean": 1.71739}
    said = stage_figures("synthesize", metrics).replace("\xa0", " ")
    assert said == "trajectories 14,000  turns_mean 1.717  broken 0"
