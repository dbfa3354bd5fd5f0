"""A record to change, and a report's data made by rule: three systems, hostile texts, every section filled."""

import dataclasses
import html.parser
from typing import cast

from pipelines.core.types import (
    HARDNESS_LEVELS,
    Action,
    ActionKind,
    Database,
    Example,
    ExecutionStatus,
    SchemaItems,
    StopReason,
    Trajectory,
    Turn,
)
from pipelines.evaluation.record import EpisodeRecord, Linking, Mode, Preview
from pipelines.report.charts import VOID
from pipelines.report.data import ReportData, System
from pipelines.sql.diagnoses import ERROR_CLASSES, Diagnosis, Hint

RECORD = EpisodeRecord(
    example_id="q0",
    database="harbour",
    hardness="easy",
    mode="greedy",
    sample=0,
    final_sql="SELECT 1",
    scores={"strict": 1.0},
    broken=False,
    failure=None,
    status=ExecutionStatus.OK,
    n_rows=1,
    gold_rows=1,
    signature="same",
    stop=StopReason.SOLUTION,
    forced=False,
    well_formed=True,
    turns=1,
    tool_calls=0,
    failed_calls=0,
    tokens_in=100,
    tokens_out=20,
    reasoning_chars=0,
    linking=None,
    bigrams=1.0,
)


EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'><!-- \u2028 & \" '"
NAMES = ("before SFT", "after SFT", "after GRPO")
SHARES = (0, 6, 8)  # of ten answers right, by system
GOLD = "SELECT name FROM ships WHERE flag = 'NO' ORDER BY built DESC LIMIT 1"
WRONG = "SELECT name FROM ships WHERE flag = 'PA' ORDER BY built LIMIT 1"
LINKS = SchemaItems(frozenset({"ships"}), frozenset({("ships", "name"), ("ships", "flag")}))


def example(number):
    database = Database(f"harbour_{number % 12}", "sqlite", "/nowhere")
    question = f"Which ship {number} is the newest?" + (EVIL if number == 1 else "")
    level = HARDNESS_LEVELS[number % 4]
    return Example(f"q{number}", question, database, GOLD, evidence=EVIL if number == 1 else "", hardness=level)


def is_right(system, number, sample):
    return (number * 7 + sample * 3) % 10 < SHARES[system]


def record(system, number, mode, sample):
    asked, right = example(number), is_right(system, number, sample)
    error = ERROR_CLASSES[(number + system) % 5]
    evil = EVIL if number == 1 else "ships.flag = 'PA'; gold: ships.flag = 'NO'"
    hints = (Hint("wrong_literal", evil),)
    return dataclasses.replace(
        RECORD,
        example_id=asked.id,
        database=asked.database.id,
        hardness=asked.hardness or "easy",
        mode=mode,
        sample=sample,
        final_sql=GOLD if right else WRONG,
        scores={"strict": float(right), "bird": float(right)},
        signature="gold" if right else "other",
        turns=2 + (system == 0),
        tool_calls=1,
        needs_probe=number % 2 == 0,
        reasoning_chars=40 + 10 * system,
        tokens_out=60 + number % 30,
        linking=Linking.of(LINKS, LINKS),
        diagnosis=None if right else Diagnosis(error, evil, hints),
    )


def trajectory(system, number, mode, sample):
    sql = GOLD if is_right(system, number, sample) else WRONG
    seen = EVIL if number == 1 else "flag\nNO\nPA\nLR"
    probe = Action(ActionKind.SQL, "SELECT DISTINCT flag FROM ships", "Which codes are stored?")
    turns = (
        Turn("...", probe, f"<observation>\n{seen}\n</observation>", ExecutionStatus.OK, None, 3),
        Turn(EVIL, Action(ActionKind.INVALID, format_error="two_actions"), "Try again."),
        Turn("...", Action(ActionKind.SOLUTION, sql, "The code is NO.")),
    )
    return Trajectory(f"q{number}", sample, NAMES[system], "react", (), turns, sql, StopReason.SOLUTION)


def report_data(questions=36, samples=4, **changes):
    """Data with `questions` questions, each answered once greedily and `samples` times by sampling."""
    systems = []
    for number, name in enumerate(NAMES):
        keys = [
            (number, question, mode, sample)
            for mode, count in (("greedy", 1), ("sampled", samples))
            for question in range(questions)
            for sample in range(count)
        ]
        typed = [(a, b, cast(Mode, mode), d) for a, b, mode, d in keys]
        records = tuple(record(*key) for key in typed)
        systems.append(System(name, records, tuple(trajectory(*key) for key in typed), 1000 * number or None))
    data = ReportData(
        title="harbour",
        equality="strict",
        systems=tuple(systems),
        examples={f"q{number}": example(number) for number in range(questions)},
        schemas={
            f"harbour_{number}": "CREATE TABLE ships (name TEXT, flag TEXT, built INTEGER)" for number in range(12)
        },
        curves={"GRPO": [{"step": step, "reward": step / 10, "loss": 1 / step} for step in range(1, 30)]},
        pass_rates=(0.0, 0.25, 0.25, 0.5, 1.0),
        group=4,
        results={("harbour_1", GOLD): Preview(("name",), (("Aurora",), (EVIL,)), 9)},
        facts={"recipe": "harbour", "seed": "0"},
        ks=(1, 2, 4),
    )
    return dataclasses.replace(data, **changes)


class Outline(html.parser.HTMLParser):
    """The tags of a page, in order, each checked to be closed where it was opened."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.blocks: dict[str, str] = {}

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        name, attributes = self.tags[-1] if self.tags else ("", {})
        if name in ("script", "style") and self.open[-1:] == [name]:
            key = attributes.get("id") or name
            self.blocks[key] = self.blocks.get(key, "") + data
