"""`sqltrain compare`: evaluations from a stage's folder or a bare file, which questions flipped, and its tests."""

import csv
import dataclasses
import json
import re
from pathlib import Path

import pytest

from flows.commands.evaluate import copy_page
from pipelines.core import frames
from pipelines.core.errors import UserError
from pipelines.core.types import to_dict, write_jsonl
from pipelines.evaluation.evaluate import of_prediction
from pipelines.rollout.engine import Timing
from pipelines.sql.diagnoses import Diagnosis, Hint
from pipelines.stages.answer_latency import note_latency
from tests.evaluation.evaluation_world import RECORD


def records(right):
    """One greedy record a character: "1" is right under both equalities, "b" under bird only, "0" wrong."""
    scores = {"1": {"strict": 1.0, "bird": 1.0}, "b": {"strict": 0.0, "bird": 1.0}, "0": {"strict": 0.0, "bird": 0.0}}
    return [
        dataclasses.replace(RECORD, example_id=f"q{index}", database=f"harbour_{index % 4}", scores=scores[letter])
        for index, letter in enumerate(right)
    ]


@pytest.fixture
def runs(tmp_path):
    """A stage's folder (with a pass that is another system's), and a bare file of records."""
    before = tmp_path / "evaluate_sft"
    before.mkdir()
    rows = [{"pass": "greedy", "record": to_dict(one)} for one in records("1110000b")]
    rows += [{"pass": "once", "record": to_dict(one)} for one in records("11111111")]
    (before / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (before / "summary.json").write_text('{"equality": "strict"}')
    write_jsonl(tmp_path / "after.jsonl", records("0111110b"))
    return [str(before), f"after={tmp_path / 'after.jsonl'}"]


def test_flips_and_tests_by_hand(runs, sqltrain, tmp_path):
    out = sqltrain.ok("compare", *runs, "--json")
    found = json.loads(out.splitlines()[-1])
    (one,) = found["comparisons"]
    assert found["equality"] == "strict"
    assert (one["before"], one["after"], one["gained"], one["lost"]) == ("evaluate_sft", "after", 3, 1)
    shown = [(flip["example_id"], flip["gained"]) for flip in one["flips"]]
    assert shown == [("q0", False), ("q3", True), ("q4", True), ("q5", True)]
    assert one["p_mcnemar"] == pytest.approx(0.625)  # 2 * (C(4,0) + C(4,1)) / 2^4
    assert (one["accuracy_before"], one["accuracy_after"]) == (3 / 8, 5 / 8)
    assert found["runs"]["after"]["figures"]["ex_strict"] == 5 / 8
    write_jsonl(tmp_path / "few.jsonl", records("010"))
    _, out, _ = sqltrain("compare", runs[0], str(tmp_path / "few.jsonl"))
    assert "compared on 3 questions, of 8 and 3: the others are not in both" in out
    _, out, _ = sqltrain("compare", *runs)
    assert "the others are not in both" not in out


def test_another_equality_and_tables_for_a_paper(runs, tmp_path, sqltrain):
    out_folder = tmp_path / "tables"
    out = sqltrain.ok("compare", *runs, "--equality", "bird", "--flips", "1", "--out", str(out_folder))
    assert "bird, 8 questions): 50.0 → 75.0 %" in out
    assert "and 3 more that flipped" in out
    (paired,) = csv.DictReader((out_folder / "paired.csv").read_text().splitlines())
    assert float(paired["gained"]) == 3
    assert (out_folder / "tables.tex").is_file()
    page = (out_folder / "report.html").read_text()
    assert "Paired differences" in page
    assert 'id="trajectories"' not in page  # records alone have no questions to read
    assert "Invalid value for '--flips'" in sqltrain.refused("compare", *runs, "--flips", "-1")


def test_records_of_an_unknown_pass_are_told(runs, sqltrain, caplog):
    file = Path(runs[0]) / "records.jsonl"
    rows = [{"pass": "twice", "record": to_dict(one)} for one in records("11")]
    file.write_text(file.read_text() + "".join(json.dumps(row) + "\n" for row in rows))
    sqltrain.ok("compare", *runs)
    assert [record.getMessage() for record in caplog.records] == [f"{file}: 2 records of the pass 'twice' are not read"]


def test_trajectories_that_fit_no_records_are_told(runs, tmp_path, sqltrain, caplog):
    """Six of eight answers are in the folder's data file, so nobody knows which record is whose."""
    folder = Path(runs[0])
    answers = [of_prediction(f"q{number}", "SELECT 1", "mine") for number in range(6)]
    frames.write(folder / frames.DATA, frames.to_frame(answers, extra=[{"pass": "greedy"}] * 6))
    sqltrain.ok("compare", *runs, "--out", str(tmp_path / "out"))
    assert [record.getMessage() for record in caplog.records] == [
        f"{folder} has 6 trajectories for 8 records: the report shows none of them"
    ]


def test_the_time_that_answers_took_is_read_from_its_side_file(runs, sqltrain):
    for seconds in (3.0, 5.0):
        note_latency(Path(runs[0]) / "timing.jsonl", "greedy", 4, Timing(wall_s=9, generate_s=seconds, sql_s=1.0))
    _, out, _ = sqltrain("compare", *runs)
    assert "evaluate_sft: 1.25 s a question (greedy)" in out  # (3 + 5 + 1 + 1) / 8


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda runs, folder: [runs[0]], "a comparison needs two runs"),
        (lambda runs, folder: [runs[0], str(folder / "none")], "no records at"),
        (lambda runs, folder: [runs[0], str(folder / "broken.jsonl")], "line 1 is no evaluation record"),
        (lambda runs, folder: [runs[0], str(folder / "empty.jsonl")], "holds no records"),
        (lambda runs, folder: [runs[0], str(folder / "other.jsonl")], "the runs share no question"),
        (lambda runs, folder: [runs[0], str(folder / "binary.jsonl")], "line 1 is not UTF-8"),
        (lambda runs, folder: [*runs, "--out", str(folder / "empty.jsonl")], "cannot be written: File exists"),
        (lambda runs, folder: [*runs, "--out", str(folder / "empty.jsonl" / "in")], "cannot be written"),
        (lambda runs, folder: [*runs, "--equality", "skyrl"], "not every run was evaluated under skyrl"),
    ],
)
def test_a_mistake_is_one_plain_line(change, message, runs, tmp_path, sqltrain):
    (tmp_path / "broken.jsonl").write_text('{"record": {"example_id": 1}}\n')
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "binary.jsonl").write_bytes(b"\xff\xfe\n")
    write_jsonl(tmp_path / "other.jsonl", [dataclasses.replace(records("1")[0], example_id="elsewhere")])
    err = sqltrain.refused("compare", *change(runs, tmp_path))
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("hostile", "message"),
    [
        ({"scores": {"strict": 7.5, "bird": 1.0}}, "line 8 is no evaluation record: .*'scores.strict'"),
        ({"scores": {"strict": float("nan"), "bird": 1.0}}, "'scores.strict'.*finite"),
        ({"scores": {"strict": -0.5, "bird": 1.0}}, "'scores.strict'"),
        ({"scores": {"strict": 1.0, "\ud800": 1.0}}, "'scores."),
        ({"scores": {"strict": 1.0}}, "line 8 has verdicts under other equalities"),
        ({"turns": 10**400}, "'turns'"),
        ({"sample": -1}, "'sample'"),
        ({"bigrams": float("inf")}, "'bigrams'"),
        (
            {"linking": {"tables": {"predicted": 1, "gold": 2**63, "common": 1}, "columns": None}},
            "'linking.tables.gold'",
        ),
        ({"hardness": "x"}, "'hardness'"),
        (("records.jsonl", "[" * 100_000 + "\n"), "line 1: not JSON"),
        (("records.jsonl", "9" * 5000 + "\n"), "line 1: not JSON"),
        (("records.jsonl", "5\n"), "line 1 is no evaluation record"),
        (("summary.json", "[" * 100_000), "is damaged"),
        (("summary.json", '{"left_out": {"why": 1e400}}'), "is damaged"),
        (("summary.json", '{"left_out": [1]}'), "is damaged"),
        (("summary.json", '{"equality": ["strict"]}'), "is damaged"),
        (("timing.json", '{"r_ves": NaN}'), "is damaged"),
        (("timing.json", "[]"), "is damaged"),
        (("timing.jsonl", '{"pass": "greedy", "episodes": 1, "generate_s": NaN, "sql_s": 0}\n'), "is damaged"),
        (("timing.jsonl", '{"pass": []}\n'), "is damaged"),
        (("manifest.json", "[]"), "manifest.json is damaged"),
        (("manifest.json", "[" * 100_000), "is damaged"),
    ],
)
def test_a_hostile_record_or_file_is_one_plain_line(hostile, message, runs, tmp_path, sqltrain):
    if isinstance(hostile, dict):  # values of the last record of eight
        rows = [to_dict(one) for one in records("0111110b")]
        rows[7] |= hostile
        runs[1] = str(tmp_path / "hostile.jsonl")
        Path(runs[1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        (Path(runs[0]) / hostile[0]).write_text(hostile[1])
    code, _, err = sqltrain("compare", *runs)
    assert (code, len(err.splitlines())) == (2, 1)
    assert re.search(message, err)


def test_a_question_that_comes_twice_in_a_pass_is_one_plain_line(runs, tmp_path, sqltrain):
    """Two files were joined; the same question in another pass, or in another sample, is no repetition."""
    joined = tmp_path / "joined.jsonl"
    sampled = [dataclasses.replace(one, mode="sampled", sample=sample) for sample in (0, 1) for one in records("11")]
    write_jsonl(joined, [*records("01"), *sampled])
    sqltrain.ok("compare", runs[0], str(joined))
    write_jsonl(joined, [*records("01"), *sampled, *records("1")])
    code, _, err = sqltrain("compare", runs[0], str(joined))
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"{joined}, line 7 has the question 'q0' again in the pass 'greedy'" in err


def without_a_pass(folder):
    frames.write(folder / frames.DATA, frames.to_frame(records("11111111")))


def with_odd_inputs(folder):
    frames.write(folder / frames.DATA, frames.to_frame(records("11111111"), extra=[{"pass": "once"}] * 8))
    (folder / "manifest.json").write_text('{"inputs": [1]}')


@pytest.mark.parametrize("damage", [without_a_pass, with_odd_inputs])
def test_odd_texts_beside_the_records_are_one_plain_line(damage, runs, tmp_path, sqltrain):
    damage(Path(runs[0]))
    code, _, err = sqltrain("compare", *runs, "--out", str(tmp_path / "out"))
    assert (code, len(err.splitlines())) == (2, 1)
    assert f"a file beside the records in {runs[0]} is damaged" in err


def test_a_clue_of_an_unknown_kind_is_shown_by_its_name(runs, tmp_path, sqltrain):
    why = Diagnosis("syntax", "near x", (Hint("of_tomorrow", "y"),))
    write_jsonl(tmp_path / "wrong.jsonl", [dataclasses.replace(one, diagnosis=why) for one in records("00000000")])
    out = tmp_path / "out"
    code, _, err = sqltrain("compare", runs[0], str(tmp_path / "wrong.jsonl"), "--out", str(out))
    assert (code, err) == (0, "")
    assert (out / "clues.csv").read_text().splitlines()[1].startswith("of_tomorrow,")


def test_kinds_of_clues_that_a_table_has_no_room_for_are_counted(runs, tmp_path, sqltrain):
    hints = tuple(Hint(f"kind_{number}", "y") for number in range(17))
    why = Diagnosis("syntax", "near x", hints)
    write_jsonl(tmp_path / "wrong.jsonl", [dataclasses.replace(one, diagnosis=why) for one in records("00000000")])
    out = tmp_path / "out"
    sqltrain.ok("compare", runs[0], str(tmp_path / "wrong.jsonl"), "--out", str(out))
    assert len((out / "clues.csv").read_text().splitlines()) == 1 + 14
    assert "A wrong answer can give several. 3 rarer kinds are not in this table." in (out / "tables.md").read_text()


def write_passes(folder, **passes):
    """An evaluation's folder with the records of each pass."""
    folder.mkdir()
    rows = []
    for name, right in passes.items():
        rows += [{"pass": name, "record": to_dict(one)} for one in records(right)]
    (folder / "records.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_what_an_endpoint_selected_is_a_system_of_its_own_and_at_once_is_none(tmp_path, sqltrain):
    for name, own, selected in (("a", "1100", "1110"), ("b", "1111", "0000")):
        write_passes(tmp_path / name, greedy=own, selected=selected, once="1000")
    found = json.loads(sqltrain.ok("compare", str(tmp_path / "a"), str(tmp_path / "b"), "--json").splitlines()[-1])
    pairs = [(one["before"], one["after"], one["gained"], one["lost"]) for one in found["comparisons"]]
    assert pairs == [
        ("a", "b", 2, 0), ("b", "a, selected", 0, 1), ("a, selected", "b, selected", 0, 3), ("a", "b, selected", 0, 2),
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["none/page.html", "taken"])
def test_a_report_that_cannot_be_copied_is_a_plain_line(tmp_path, place):
    (tmp_path / "report.html").write_text("page")
    (tmp_path / "taken").mkdir()
    with pytest.raises(UserError, match="cannot be written"):
        copy_page(tmp_path / "report.html", tmp_path / place)
    copy_page(tmp_path / "report.html", tmp_path / "copy.html")
    assert (tmp_path / "copy.html").read_text() == "page"


@pytest.mark.parametrize(
    ("before", "after", "fail_if", "expected"),
    [
        ("1" * 40, "0" * 20 + "1" * 20, "worse", 3),  # 20 of 40 lost
        ("0" * 20 + "1" * 20, "1" * 40, "worse", 0),
        ("0" * 20 + "1" * 20, "1" * 40, "not_better", 0),
        ("1110000b", "0111110b", "worse", 0),  # 3 gained, 1 lost of 8: the interval holds 0
        ("1110000b", "0111110b", "not_better", 3),
    ],
)
def test_the_paired_interval_decides_the_exit_code(tmp_path, sqltrain, before, after, fail_if, expected):
    for name, right in (("main", before), ("change", after)):
        write_jsonl(tmp_path / f"{name}.jsonl", records(right))
    runs = [f"{name}={tmp_path / name}.jsonl" for name in ("main", "change")]
    code, out, said = sqltrain("compare", *runs, "--fail-if", fail_if, "--json")
    assert code == expected
    assert json.loads(out.splitlines()[-1])["runs"].keys() == {"main", "change"}
    assert (f"change is {fail_if.replace('_', ' ')} than main (greedy)" in said) == (expected == 3)


def share(n_right):
    """Twenty questions, so many of them right."""
    return "1" * n_right + "0" * (20 - n_right)


@pytest.mark.parametrize("fail_if", ["worse", "not_better"])
@pytest.mark.parametrize(
    ("own", "selected", "failing"),
    [
        ((8, 14), (9, 15), []),  # what main's endpoint selected is worse than change's own answers: no matter
        ((8, 14), (15, 9), ["change, selected", "main, selected"]),
        ((14, 8), (9, 15), ["change", "main"]),
        ((8, 14), (9, None), []),  # one selector has no other to be held against
        ((14, 8), (None, 15), ["change", "main"]),
    ],
)
def test_own_answers_are_gated_by_own_ones_and_selected_by_selected(
    tmp_path, sqltrain, own, selected, failing, fail_if
):
    for name, n_own, n_selected in zip(("main", "change"), own, selected, strict=True):
        passes = {"greedy": share(n_own)}
        if n_selected is not None:
            passes["selected"] = share(n_selected)
        write_passes(tmp_path / name, **passes)
    code, _, err = sqltrain("compare", str(tmp_path / "main"), str(tmp_path / "change"), "--fail-if", fail_if)
    lines = []
    if failing:
        after, before = failing
        lines.append(f"{after} is {fail_if.replace('_', ' ')} than {before} (greedy)")
    assert (code, err.splitlines()) == (3 if failing else 0, lines)


def test_the_last_of_three_is_gated_by_the_first_among_its_like(tmp_path, sqltrain):
    """From 14 to 11 and 8 right of 20 each step may be chance, and both together are not."""
    for name, n_selected in (("first", 14), ("second", 11), ("third", 8)):
        write_passes(tmp_path / name, greedy=share(10), selected=share(n_selected))
    runs = [str(tmp_path / name) for name in ("first", "second", "third")]
    code, _, err = sqltrain("compare", *runs, "--fail-if", "worse")
    assert (code, err.splitlines()[-1]) == (3, "third, selected is worse than first, selected (greedy)")


def test_a_gate_without_a_question_in_common_is_not_passed(tmp_path, sqltrain):
    """What main's endpoint selected can be held against main's own answers, which gates nothing."""
    write_passes(tmp_path / "main", greedy="1111", selected="1111")
    write_jsonl(tmp_path / "change.jsonl", [dataclasses.replace(records("1")[0], example_id="elsewhere")])
    err = sqltrain.refused("compare", str(tmp_path / "main"), str(tmp_path / "change.jsonl"), "--fail-if", "worse")
    assert "--fail-if: the runs share no question" in err
