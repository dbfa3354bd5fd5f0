"""What a terminal is told: names, errors, cells and reasons of others are shown, never obeyed."""

import io
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from command_line import sqltrain
from rich.console import Console

from flows import terminal as screen
from flows.commands import operate, use
from flows.terminal import Bars
from pipelines.core.store import Store
from pipelines.core.types import Action, ActionKind
from pipelines.evaluation.stats import Estimate
from pipelines.protocols.base import build
from pipelines.recipe import recipes
from pipelines.report import terminal
from pipelines.report.formats import ReportTable, TableColumn
from pipelines.rollout.policies import making
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.stages import graph

HOSTILE = "x\x1b]0;pwned\x07\n✓ report  \u202edone"
SHOWN = "x\\x1b]0;pwned\\x07\\n✓ report  \\u202edone"


def console() -> Console:
    return Console(file=io.StringIO(), highlight=False, width=100)


def printed(of: Console) -> str:
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
def test_what_does_not_print_is_shown_by_its_escape(words: str, one_line: str, lines: str) -> None:
    assert terminal.plain(words) == one_line
    assert terminal.plain(words, lines=True) == lines


def test_tables_and_progress_show_what_others_wrote() -> None:
    out = console()
    out.print(terminal.render(ReportTable("t", "of [/red]", (TableColumn("sys [/b]"),), ((HOSTILE,),)), 100))
    Bars(out).say(f"no schema of {HOSTILE} [/red] :warning:")
    assert printed(out).splitlines() == [
        "of [/red]".ljust(len(SHOWN)),
        "sys [/b]".ljust(len(SHOWN)),
        SHOWN,
        f"no schema of {SHOWN} [/red] :warning:",
    ]


def test_a_table_fits_the_screen_whole_turned_or_row_by_row() -> None:
    """Of two rows: 6 + 2 + 17 + 2 + 17 = 44 columns; turned 7 + 2 + 17 + 2 + 17 = 45; row by row 7 + 2 + 17 = 26."""
    columns = (TableColumn("system"), TableColumn("greedy", "estimate"), TableColumn("sampled", "estimate"))
    one, two = (Estimate(value, 0.5, 0.75, 480, 480, "wilson") for value in (0.625, 0.7))
    table = ReportTable("t", "EX", columns, (("before", one, two), ("after", two, one)))
    shown = {}
    for width in (44, 43, 30):
        out = Console(file=io.StringIO(), highlight=False, width=width)
        out.print(terminal.render(table, width))
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
    wide = ReportTable("t", "EX", (*columns, TableColumn("questions", "count")), (("before", one, two, 480),))
    out = Console(file=io.StringIO(), highlight=False, width=30)
    out.print(terminal.render(wide, 30))
    assert [line.rstrip() for line in printed(out).splitlines()] == [
        "EX",
        "system                before",
        "greedy     62.5 [50.0, 75.0]",
        "sampled    70.0 [50.0, 75.0]",
        "questions                480",
    ]


@pytest.mark.parametrize("terminal", [True, False])
def test_bars_and_lines_of_stages_fit_80_columns(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    out = Console(file=io.StringIO(), highlight=False, width=80, force_terminal=terminal, color_system=None)
    monkeypatch.setattr(screen, "console", out)
    metrics = {"questions": 800, "pass_rate": 0.8156, "zero_variance_share": 0.6687, "balanced": 265, "explore": 28}
    result = graph.StageResult("difficulty", "c34af7f371c821cb", Path("x"), metrics, False)

    def walk(
        recipe: object, store: object, steps: object, bars: Bars, done: Callable[..., None], _: object
    ) -> list[object]:
        bars.begin("evaluate_grpo", 2835, "questions")
        bars.advance(127, "loss 0.406")
        done(result, 77.61)
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


def test_a_reason_of_the_ledger_stays_one_line() -> None:
    last = {"event": "night", "at": "x", "decision": "refused", "reason": HOSTILE}
    found = {"store": "s", "running": [], "recipes": {"m": {"champion": None, "nights": [], "last": last}}}
    assert operate.render_state(found).splitlines()[-1] == f"last night, x: refused: {SHOWN}"


def test_titles_and_paths_hold_no_markup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    code, _, err = sqltrain(monkeypatch, capsys, "run", "miniature", *pools, "--until", "data", f"--store={folder}")
    assert (code, err) == (0, "")
    assert printed(out).startswith(f"miniature: a [/b] :smile: (store: {folder})\n✓ data ")
    screen.say("5 questions in r[final].jsonl and s[/old]")
    assert printed(out).endswith("5 questions in r[final].jsonl and s[/old]\n")


def test_an_error_is_one_line_whatever_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = sqltrain(monkeypatch, capsys, "ask", "how many ?", "--database", f"/none/{HOSTILE}.sqlite")
    assert code == 2
    assert err == f"error: no such database: /none/{SHOWN}.sqlite. Pass a file, an address, or a name of databases/.\n"


def test_an_answer_is_shown_and_not_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.sqlite"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE t (a TEXT)")
        connection.execute("INSERT INTO t VALUES (?)", ("\x1b]52;c;cm0=\x07\x1b[2Jhi\r",))
    connection.close()
    (tmp_path / "config.json").write_text(json.dumps({}))
    recipe = recipes.load("miniature")
    protocol = build(recipe.protocol)
    said = protocol.write(Action(ActionKind.SOLUTION, 'SELECT a AS "\x1b[31mcol"\nFROM t', "why"))
    monkeypatch.setattr(making, "local_policy", lambda *_, **__: ScriptedPolicy(lambda _: said))
    shown: list[str] = []
    use.ask_model(recipe, Store(tmp_path / "store"), "q", str(path), tmp_path, shown.append)
    assert shown[-4:] == [
        '\nSQL: SELECT a AS "\\x1b[31mcol"\nFROM t',
        "\\x1b[31mcol",
        "\\x1b]52;c;cm0=\\x07\\x1b[2Jhi\\r",
        "(1 rows)",
    ]
    assert not any("\x1b" in line for line in shown)


def test_a_count_is_printed_with_all_its_digits() -> None:
    metrics = {"trajectories": 14000.0, "broken": 0.0, "turns_mean": 1.71739}
    result = graph.StageResult("synthesize", "key", Path(), metrics, False)
    assert screen.stage_figures(result) == "trajectories 14,000  turns_mean 1.717  broken 0"
