"""The page as text: nothing from outside gets out of its place, nothing is loaded, and every table tells the truth."""

import base64
import csv
import dataclasses
import hashlib
import io
import json
import re

import pytest
from evaluation_world import EVIL, NAMES, Outline, report_data

from pipelines.evaluation.stats import Estimate
from pipelines.report import formats, report_tables, writer
from pipelines.report.charts import Scale, around, data, join, tag, ticks
from pipelines.report.data import ReportData, System
from pipelines.report.page import document


@pytest.fixture(scope="module")
def page():
    return document(report_data())


@pytest.fixture(scope="module")
def outline(page):
    found = Outline()
    found.feed(page)
    found.close()
    assert found.open == []
    return found


def test_hostile_text_opens_no_tag_and_is_whole_in_the_data(page, outline):
    assert EVIL not in page
    assert "<img" not in page
    scripts = [attributes.get("type") for name, attributes in outline.tags if name == "script"]
    assert scripts == ["application/json"] * (len(scripts) - 1) + [None]
    index = json.loads(outline.blocks["index"])
    chunk = json.loads(outline.blocks["chunk-0"])
    assert EVIL in index["questions"][1]["text"]
    assert any(turn.get("raw") == EVIL for turn in chunk[3]["turns"])


def test_nothing_is_loaded_from_anywhere(page, outline):
    for name, attributes in outline.tags:
        for key in ("src", "href", "action", "srcset", "data"):
            value = attributes.get(key) or ""
            assert value.startswith(("#", "data:")) or not value, (name, key, value)
    assert "@import" not in page
    assert "url(" not in page
    assert "http://" not in page.replace("http://www.w3.org/", "")


def test_the_policy_names_the_pages_own_script_and_style(outline):
    policy = next(a["content"] or "" for _, a in outline.tags if a.get("http-equiv") == "Content-Security-Policy")
    for kind in ("script", "style"):
        digest = base64.b64encode(hashlib.sha256(outline.blocks[kind].encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_same_data_gives_the_same_bytes(page, tmp_path):
    writer.write(report_data(), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == page
    with pytest.raises(ValueError, match="needs a system"):
        writer.write(ReportData("empty", "strict", (), {}), tmp_path / "report.html")


def test_a_lone_surrogate_and_a_null_can_be_written(tmp_path):
    base = report_data(questions=2, samples=0)
    odd = {key: dataclasses.replace(each, question="odd \ud800 \x00") for key, each in base.examples.items()}
    writer.write(dataclasses.replace(base, examples=odd, title="odd \ud800 \x00"), tmp_path / "report.html")
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '"odd \\ud800 \\u0000"' in written
    assert "\x00" not in written


def test_a_report_of_one_bare_prediction_file_leaves_empty_sections_out():
    base = report_data(questions=12, samples=0)
    only = System("predictions", base.systems[1].records)
    page = document(ReportData(title="mine", equality="strict", systems=(only,), examples=base.examples))
    for absent in ("paired", "samples", "training", "difficulty"):
        assert f'<section id="{absent}"' not in page
    for present in ("accuracy", "hardness", "errors", "trajectories"):
        assert f'<section id="{present}"' in page
    only = System("predictions", base.systems[1].records[:1])
    alone = document(ReportData(title="one", equality="strict", systems=(only,), examples=base.examples))
    assert "1 question over 1 database," in alone
    assert ">1 question<" in alone


def index_of(page):
    return json.loads(re.search(r'id="index">(.*?)</script>', page, re.S)[1])


def test_trajectories_beyond_the_cap_are_counted_and_greedy_ones_stay():
    page = document(report_data(questions=36, samples=4, max_trajectories=120))
    index = index_of(page)
    assert len(index["rows"]) == 120
    assert [row[2] for row in index["rows"]] == [0] * 108 + [1] * 12  # 36 questions by 3 systems, then samples
    assert "420 more are not in this file" in page  # 3 * 36 * 5 - 120


def test_broken_episodes_are_counted_at_the_top():
    base = report_data(questions=12, samples=0)
    broken = dataclasses.replace(base.systems[0].records[0], broken=True, failure="worker_died", diagnosis=None)
    system = dataclasses.replace(base.systems[0], records=(broken, *base.systems[0].records[1:]))
    page = document(dataclasses.replace(base, systems=(system, *base.systems[1:])))
    assert "before SFT: 1 of 12 episodes (8.3 %) are broken and count nowhere (1 worker died)" in page
    base = report_data(questions=4, samples=1)
    systems = tuple(
        dataclasses.replace(
            system,
            records=tuple(dataclasses.replace(r, broken=True, failure="disk", diagnosis=None) for r in system.records),
        )
        for system in base.systems
    )
    page = document(dataclasses.replace(base, systems=systems, curves={"SFT": [{"step": 1, "loss": float("nan")}]}))
    assert "after GRPO: 8 of 8 episodes (100.0 %) are broken and count nowhere (8 disk)" in page
    assert "nan" not in page.split("<style>")[0] + page.split("</style>")[1].split("<script")[0]


def test_the_curves_that_matter_come_first_and_those_that_never_move_are_words():
    steps = [
        {"step": n, "clip_low": 0.0, "entropy": 0.2 + n, "turns": 1.5 + n, "ex": 0.1 * n, "reward": 2.0 * n}
        for n in (1, 2)
    ]
    page = document(dataclasses.replace(report_data(questions=4, samples=0), curves={"GRPO": steps}))
    first, _, rest = page.split('id="training"')[1].split("</section>")[0].partition("<details><summary>1 more")
    assert re.findall("<figcaption>(.*?)</figcaption>", first) == ["reward", "ex", "turns"]
    assert re.findall("<figcaption>(.*?)</figcaption>", rest) == ["entropy"]
    assert "The same at every step: clip low (0)." in rest


def test_flips_and_verdicts_of_the_index_are_those_of_the_records():
    base = report_data(questions=10, samples=0)
    index = index_of(document(base))
    rows = {(row[1], row[0]): row for row in index["rows"]}
    for question in range(10):
        right = [int(system.records[question].right("strict")) for system in base.systems]
        assert [rows[system, question][4] for system in range(3)] == right
        assert [rows[system, question][8] for system in range(3)] == [0, right[1] - right[0], right[2] - right[1]]
    base = report_data(questions=4, samples=0)
    known = {name: each for name, each in base.examples.items() if name != "q2"}
    index = index_of(document(dataclasses.replace(base, examples=known)))
    assert [each["id"] for each in index["questions"]] == ["q0", "q1", "q3"]
    assert len(index["rows"]) == 9


def test_the_leader_table_by_hand(record):
    leader = report_tables.leader(report_data(questions=10, samples=4))
    assert [column.name for column in leader.columns] == ["system", "EX greedy", "EX sampled", "majority@4", "pass@4"]
    greedy = [row[1].value for row in leader.rows if isinstance(row[1], Estimate)]
    assert greedy == [0.0, 0.6, 0.8]  # (7 n) mod 10 takes every digit once
    other = report_tables.equalities(report_data(questions=10, samples=0))
    assert [column.name for column in other.columns] == ["system", "strict", "bird"]
    one = dataclasses.replace(report_data(questions=1, samples=0), systems=(System("one", (record(),)),))
    assert report_tables.equalities(one) is None


def test_markdown_latex_and_csv_agree_and_escape():
    estimate = Estimate(0.802, 0.764, 0.839, 480, 40, "wilson")
    table = formats.ReportTable(
        "t",
        "A title",
        (formats.TableColumn("system"), formats.TableColumn("EX", "estimate"), formats.TableColumn("p", "p")),
        (("a|b_c & 50 %", estimate, 0.0004), ("=cmd()", None, None)),
    )
    assert "| a\\|b_c & 50 % | 80.2 [76.4, 83.9] | &lt; 0.001 |" in formats.markdown(table)
    assert "a|b\\_c \\& 50 \\% & 80.2 [76.4, 83.9] & $<$ 0.001 \\\\" in formats.latex(table)
    rows = list(csv.reader(io.StringIO(formats.to_csv(table))))
    assert rows[0] == ["system", "EX", "EX low", "EX high", "EX n", "p"]
    assert rows[1] == ["a|b_c & 50 %", "0.802", "0.764", "0.839", "480", "0.0004"]
    assert rows[2] == ["'=cmd()", "", "", "", "", ""]  # no spreadsheet runs it


def test_no_text_of_a_table_is_read_as_a_command():
    columns = (formats.TableColumn("system"), formats.TableColumn('=HYPERLINK("x")', "count"))
    table = formats.ReportTable(
        "t", "A title", columns, (("[3] ![x](http://x/x.png)", 1), ("* a\n\nb\u2028c", 2)), "note\n\nmore"
    )
    assert formats.markdown(table).splitlines()[4:6] == [r"| \[3\] \!\[x\](http://x/x.png) | 1 |", "| * a b c | 2 |"]
    written = formats.latex(table)
    assert "\n{}[3] ![x](http://x/x.png) & 1 \\\\\n" in written
    assert "\n{}* a  b c & 2 \\\\\n" in written
    assert "note  more}" in written
    assert next(csv.reader(io.StringIO(formats.to_csv(table)))) == ["system", '\'=HYPERLINK("x")']


def test_every_table_is_written_in_every_form(tmp_path):
    base = report_data()
    writer.write_tables(base, tmp_path)
    slugs = [table.slug for table in report_tables.all_tables(base)]
    assert len(slugs) == len(set(slugs))
    each = {f"{slug}.csv" for slug in slugs}
    assert {path.name for path in tmp_path.iterdir()} == {"tables.md", "tables.tex"} | each
    assert (tmp_path / "tables.tex").read_text().count("\\begin{table}") == len(slugs)
    for name in NAMES:
        assert name in writer.markdown(base)


def test_the_results_of_paired_tests_are_sentences():
    first, second = report_tables.verdicts(report_data(questions=40, samples=0))
    assert first.startswith("From before SFT to after SFT: +60.0 points of greedy EX [")
    assert second.startswith("From after SFT to after GRPO: +20.0 points of greedy EX [")
    same = report_data(questions=40, samples=0)
    twice = dataclasses.replace(same, systems=(same.systems[1], dataclasses.replace(same.systems[1], name="again")))
    assert "(may be chance)" in next(report_tables.verdicts(twice))


@pytest.mark.parametrize(
    ("number", "shown"),
    [
        (0, "0"),
        (0.00047, "4.7e−4"),
        (0.00735, "7.3e−3"),
        (1234.5, "1234"),
        (12345.0, "1.2e4"),
        (-0.5, "−0.5"),
        (3.14159, "3.14"),
        (1e-6, "1e−6"),
    ],
)
def test_numbers_on_axes_have_three_digits(number, shown):
    assert formats.compact(number) == shown


def test_figures_are_written_alike_everywhere():
    assert formats.percent(0.8024) == "80.2"
    assert formats.points(-0.0312) == "−3.1"
    assert formats.count(12345) == "12\u202f345"
    assert (formats.p_value(0.0004), formats.p_value(0.0213)) == ("< 0.001", "0.021")
    assert (formats.mean(3.14159), formats.mean(18.64), formats.mean(1234)) == ("3.14", "18.6", "1\u202f234")
    assert {formats.percent(None), formats.interval(None), formats.mean(None), formats.p_value(None)} == {"–"}


def test_ticks_are_round_and_cover_the_range():
    assert ticks(0, 1) == [0, 0.25, 0.5, 0.75, 1]
    assert ticks(0, 571, 3) == [0, 200, 400]
    assert ticks(5, 5) == [5]
    assert around([0.61, 0.87]) == pytest.approx((0.6, 0.9))
    low, high = around([2.0, 2.0])
    assert low < 2 < high
    across = Scale(1, 8, 0, 300, log2=True)
    assert [across(k) for k in (1, 2, 4, 8)] == pytest.approx([0, 100, 200, 300])
    assert Scale(3, 3, 0, 10)(3) == 5


@pytest.mark.parametrize(
    "values", [[sum([0.1, 0.2, 0.3]) / 3, sum([0.3, 0.2, 0.1]) / 3], [0.0, 3e-14], [0.0, 5e-324], [7e9, 7e9 + 1e-6]]
)
def test_a_curve_that_hardly_moves_has_an_axis(values):
    low, high = around(values)
    assert low <= min(values) < max(values) <= high
    assert 2 <= len(ticks(low, high)) <= 11


def test_markup_escapes_whatever_is_not_its_own():
    made = tag("p", "<b>", tag("i", 'a"b'), None, title='x"<', hidden=True, lang=None)
    assert made == '<p title="x&quot;&lt;" hidden>&lt;b&gt;<i>a"b</i></p>'
    assert join(["a", ["b", 1.5]], None) == "ab1.5"
    assert "</" not in data("x", "</script>").removesuffix("</script>")


def test_shares_of_the_error_classes_by_hand():
    errors = report_tables.errors(report_data(questions=10, samples=0))
    # Of ten wrong answers of the first system the classes take two each; 4 and 2 answers of the others are wrong.
    assert [row[1] for row in errors.rows] == [2, 2, 2, 2, 2, 10]
    assert [row[2] for row in errors.rows] == [0.2, 0.2, 0.2, 0.2, 0.2, 1.0]
    for count, share, wrong in ((3, 4, 4), (5, 6, 2)):
        assert [row[share] for row in errors.rows] == [row[count] / wrong for row in errors.rows]


def test_the_leader_table_has_answers_at_once_and_questions_left_out():
    base = report_data(questions=10, samples=0)
    first, second, third = base.systems
    missing = {"missing database": 60, "gold error": 2}
    systems = (first, dataclasses.replace(second, single_turn=third.records, left_out=missing), third)
    data_ = dataclasses.replace(base, systems=systems)
    leader = report_tables.leader(data_)
    assert [row[0] for row in leader.rows] == [NAMES[0], NAMES[1], f"{NAMES[1]}, at once", NAMES[2]]
    assert [row[1].value for row in leader.rows if isinstance(row[1], Estimate)] == [0.0, 0.6, 0.8, 0.8]
    assert leader.styles == (0, 1, 1, 2)
    words = "62 questions are left out (60 missing database, 2 gold error)."
    assert leader.note.endswith(f"At once: made to answer without looking. {NAMES[1]}: {words}")
    assert f'role="note">{NAMES[1]}: {words}' in document(data_)
    assert words in writer.markdown(data_)
    every = tuple(dataclasses.replace(system, left_out=missing) for system in base.systems)
    assert report_tables.left_out(dataclasses.replace(base, systems=every)) == [words]
    assert data_.summaries[1].flat()["n_left_out"] == 62


def test_the_cost_of_answers_is_a_table_if_it_was_noted():
    base = report_data(questions=4, samples=0)
    assert report_tables.costs(base) is None
    systems = (dataclasses.replace(base.systems[0], costs={"seconds (greedy)": 1.25, "R-VES": 71.5}), *base.systems[1:])
    table = report_tables.costs(dataclasses.replace(base, systems=systems))
    assert [column.name for column in table.columns] == ["system", "seconds (greedy)", "R-VES"]
    assert table.rows[:2] == ((NAMES[0], 1.25, 71.5), (NAMES[1], None, None))


def test_a_question_judged_by_result_files_shows_the_first_of_them():
    base = report_data(questions=1, samples=0)
    gold = {"results": [[["name", "n"], ["Aurora", "1"], ["", "2"]], [["other"], ["x"]]], "columns": [[], []]}
    question = dataclasses.replace(base.examples["q0"], gold_sql="", meta={"gold_results": gold})
    index = index_of(document(dataclasses.replace(base, examples={"q0": question})))
    found = index["questions"][0]["result"]
    assert found == {"columns": ["name", "n"], "rows": [["Aurora", "1"], ["NULL", "2"]], "total": 2}


def test_data_efficiency_is_counted_from_the_base_in_one_turn():
    """SQL-Trail, table 1: gains over the base model in a single pass, where it was asked so."""
    base = report_data(questions=10, samples=0)
    first, second, third = (dataclasses.replace(system, training_examples=1000) for system in base.systems)
    plain = report_tables.behaviour(dataclasses.replace(base, systems=(first, second, third)))
    assert [row[-1] for row in plain.rows] == [None, pytest.approx(60.0), pytest.approx(80.0)]
    assert plain.note.endswith(f"are counted from {NAMES[0]} (0.0).")
    single = dataclasses.replace(first, single_turn=second.records)  # right on six of ten without a look
    table = report_tables.behaviour(dataclasses.replace(base, systems=(single, second, third)))
    assert [row[-1] for row in table.rows] == [None, pytest.approx(0.0), pytest.approx(20.0)]
    assert table.note.endswith(f"are counted from {NAMES[0]} in one turn (60.0).")
