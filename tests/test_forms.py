"""The same 50 questions in every form that people's files have, through each door: read exactly, or refused by line."""

import csv
import io
import json
import re
import sqlite3
from contextlib import closing

import duckdb
import pytest

from pipelines.benchmarks import base
from pipelines.core.errors import DataError
from pipelines.core.rows import kind_of
from pipelines.core.text_files import read_text
from pipelines.nightly import inbox
from pipelines.recipe.config import Nightly, Source
from pipelines.review import items
from pipelines.sql import scoring
from pipelines.teachers.invent import read_log
from tests.fakes import build_database

TEXTS = ["Zoë", "a, b", 'say "hi"', "5; 6", "it's", "tab\there", "東京", "two\nlines", "a\u2028b", r"back\slash"]
NAMES = ("question", "database", "sql")


def row_of(number):
    text = TEXTS[number % len(TEXTS)]
    literal = text.replace("'", "''")
    sql = f"SELECT {number} FROM item WHERE name = '{literal}'"
    return {"question": f"How many are called {text}, {number} ?", "database": "shop.sqlite", "sql": sql}


ROWS = [row_of(number) for number in range(50)]
EXPECTED = [(row["question"], row["sql"]) for row in ROWS]
READ, ASIDE, REFUSED = "read", "aside", "refused"  # all rows; all but some, whose lines are told; none, told in a line
ENCODINGS = {
    "utf-8": READ,
    "utf-8-sig": READ,
    "utf-16": REFUSED,  # little-endian with its mark
    "utf-16-le": REFUSED,
    "utf-16-be": REFUSED,
    "cp1252": REFUSED,
}


def encoded(text, encoding):
    """The bytes of a text; Windows-1252 lacks two of its signs."""
    if encoding == "cp1252":
        text = text.replace("東京", "é").replace("\u2028", "é")
    return text.encode(encoding)


def json_lines(rows, end="\n", ascii=False):
    return "".join(json.dumps(row, ensure_ascii=ascii) + end for row in rows)


def table(rows, header=NAMES, **layout):
    """A CSV file; a column without a name has the number of its row."""
    out = io.StringIO()
    writer = csv.writer(out, **{"lineterminator": "\n", **layout})
    writer.writerow(header)
    for number, row in enumerate(rows):
        writer.writerow([row[name.lower()] if name else number for name in header])
    return out.getvalue()


def joined(first, second):
    """The bytes of two files, each with its mark, one behind the other."""
    return first.encode("utf-8-sig") + second.encode("utf-8-sig")


def replaced(lines, number, line):
    return [*lines[:number], line, *lines[number + 1 :]]


LINES = json_lines(ROWS).split("\n")[:-1]
QUERY_TWICE = '{"query": "SELECT 1", '
NAMED_TWICE = LINES[3].replace("{", '{"sql": "SELECT 1", ', 1)
WITH_ZERO = LINES[3].replace("How", r"\u0000How", 1)
WITHOUT_SQL = json.dumps({"question": "q", "database": "shop.sqlite"})
BAD_BYTE = "ë".encode(), b"\xeb", 1  # as Windows writes the letter
TABLE = table(ROWS)
LIST = json.dumps(ROWS, ensure_ascii=False, indent=1)
FORMS = {  # the file's name, its bytes, and what becomes of it
    **{
        f"lines {encoding}": ("q.jsonl", encoded(json_lines(ROWS), encoding), ASIDE if encoding == "cp1252" else fate)
        for encoding, fate in ENCODINGS.items()
    },
    **{f"table {encoding}": ("q.csv", encoded(TABLE, encoding), fate) for encoding, fate in ENCODINGS.items()},
    **{f"list {encoding}": ("q.jsonl", encoded(LIST, encoding), fate) for encoding, fate in ENCODINGS.items()},
    "lines cr": ("q.jsonl", json_lines(ROWS, "\r").encode(), READ),
    "lines of two joined files": ("q.jsonl", joined(json_lines(ROWS[:9]), json_lines(ROWS[9:])), READ),
    "lines, a zero character": ("q.jsonl", "\n".join(replaced(LINES, 3, WITH_ZERO)).encode(), ASIDE),
    "lines crlf": ("q.jsonl", json_lines(ROWS, "\r\n").encode(), READ),
    "lines parted by blank ones": ("q.jsonl", json_lines(ROWS, "\n\n").encode(), READ),
    "lines without a last end": ("q.jsonl", "\n".join(LINES).encode(), READ),
    "lines ascii": ("q.jsonl", json_lines(ROWS, ascii=True).encode("ascii"), READ),
    "lines, a name twice": ("q.jsonl", "\n".join(replaced(LINES, 3, NAMED_TWICE)).encode(), ASIDE),
    "lines, one without sql": ("q.jsonl", "\n".join(replaced(LINES, 3, WITHOUT_SQL)).encode(), ASIDE),
    "lines, the last torn": ("q.jsonl", "\n".join(LINES).encode()[:-20], ASIDE),
    "lines, one bad byte": ("q.jsonl", "\n".join(LINES).encode().replace(*BAD_BYTE), ASIDE),
    "list in one line": ("q.jsonl", json.dumps(ROWS).encode(), READ),
    "list, a name twice": ("q.jsonl", f"[{','.join(replaced(LINES, 3, NAMED_TWICE))}]".encode(), ASIDE),
    "list, a comma missing": ("q.jsonl", f"[{' '.join(LINES)}]".encode(), REFUSED),
    "table ;": ("q.csv", table(ROWS, delimiter=";").encode(), READ),
    "table tab": ("q.csv", table(ROWS, delimiter="\t").encode(), READ),
    "table tsv": ("q.tsv", table(ROWS, delimiter="\t").encode(), READ),
    "table all quoted": ("q.csv", table(ROWS, quoting=csv.QUOTE_ALL).encode(), READ),
    "table of two joined files": ("q.csv", joined(table(ROWS[:9]), table(ROWS[9:]).partition("\n")[2]), READ),
    "table with two marks": ("q.csv", joined("", TABLE), READ),
    "table, a zero character": ("q.csv", TABLE.replace("Zoë, 0", "Zoë\0, 0").encode(), ASIDE),
    "table crlf": ("q.csv", table(ROWS, lineterminator="\r\n").encode(), READ),
    "table cr": ("q.csv", table(ROWS, lineterminator="\r", quoting=csv.QUOTE_ALL).encode(), READ),
    "table in capitals": ("Q.CSV", table(ROWS, ("Question", "DATABASE", "SQL")).encode(), READ),
    "table with numbers of pandas": ("q.csv", table(ROWS, ("", *NAMES)).encode(), READ),
    "table, a column twice": ("q.csv", table(ROWS, (*NAMES, "Question")).encode(), REFUSED),
    "table, a column not there": ("q.csv", table(ROWS, NAMES[:2]).encode(), REFUSED),
    "table, quotes by backslash": ("q.csv", table(ROWS, doublequote=False, escapechar="\\").encode(), REFUSED),
    "table, a quote left open": ("q.csv", (TABLE + '"q,shop.sqlite,SELECT 1\n').encode(), REFUSED),
    "table, one bad byte": ("q.csv", TABLE.encode().replace(*BAD_BYTE), REFUSED),
    "table, a comma without quotes": ("q.csv", TABLE.replace("name = 'Zoë'", "name, 1", 1).encode(), ASIDE),
}
TOLD_OF_A_ROW = ("no sql", "question holds")  # the inbox's batch has the row's own id beside
LINE = re.compile(r"line \d+|:\d+$|has no column sql")


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    build_database(tmp_path / "in" / "shop.sqlite", "CREATE TABLE item (name TEXT)")
    return tmp_path


def by_reader(path, root):
    loaded = base.read(Source(kind=kind_of(path), path=str(path)), 0, root)
    return [(one.question, one.gold_sql) for one in loaded.examples], [row.row for row in loaded.quarantine]


def by_inbox(path, root, table=None):
    place = path if table else path.parent
    batch = inbox.freeze_batch(Nightly(inbox=str(place), table=table), root / "batches")
    loaded = base.read(Source(kind="jsonl", path=str(batch / inbox.QUESTIONS)), 0, root / "stage")
    rows = [(one.question, one.gold_sql) for one in loaded.examples]
    return rows, [row.detail for row in loaded.quarantine]


def by_review(path, root):
    listed, _ = items.read_file(path, None)
    return [(item.example.question, item.example.gold_sql) for item in listed], []


DOORS = {"--questions": by_reader, "inbox": by_inbox, "review": by_review}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_50_questions_is_read_exactly_or_refused_with_its_line(folder, form, door):
    name, data, fate = FORMS[form]
    path = folder / "in" / name
    path.write_bytes(data)
    # A review is of the whole file, so it takes none of which a line cannot be read; it may mend a missing query.
    if door == "review" and fate == ASIDE:
        fate = ASIDE if form == "lines, one without sql" else REFUSED
    if door == "inbox" and form == "table, a column not there":  # a file of another kind stops no night
        fate = ASIDE
    if fate == REFUSED:
        with pytest.raises(DataError) as caught:
            DOORS[door](path, folder / "stage")
        assert LINE.search(caught.value.message)
        return
    rows, aside = DOORS[door](path, folder / "stage")
    if fate == READ:
        assert (rows, aside) == (EXPECTED, [])
        return
    lost = [pair for pair in EXPECTED if pair not in rows]
    if door == "review":
        assert (len(rows), rows[3][1]) == (50, "")
        return
    assert rows == [pair for pair in EXPECTED if pair not in lost]
    assert len(aside) == len(lost) > 0
    assert all(place.startswith(TOLD_OF_A_ROW) or LINE.search(place) for place in aside)


@pytest.mark.parametrize("suffix", ["sqlite", "duckdb"])
def test_a_table_of_50_questions_is_read_exactly(folder, suffix):
    place = folder / "in" / f"asked.{suffix}"
    connect = sqlite3.connect if suffix == "sqlite" else duckdb.connect
    with closing(connect(str(place))) as lake:
        lake.execute("CREATE TABLE asked (question TEXT, database TEXT, sql TEXT)")
        lake.executemany("INSERT INTO asked VALUES (?, ?, ?)", [[row[name] for name in NAMES] for row in ROWS])
        lake.commit()
    assert by_inbox(place, folder / "stage", "asked") == (EXPECTED, [])


def test_a_text_of_a_table_that_is_not_utf_8_is_set_aside_with_its_row(folder):
    place = folder / "in" / "asked.sqlite"
    with closing(sqlite3.connect(place)) as lake:
        lake.execute("CREATE TABLE asked (question TEXT, database TEXT, sql TEXT)")
        lake.executemany("INSERT INTO asked VALUES (?, ?, ?)", [[row[name] for name in NAMES] for row in ROWS])
        lake.execute("UPDATE asked SET sql = CAST(x'53ff' AS TEXT) WHERE rowid = 3")
        lake.commit()
    rows, (aside,) = by_inbox(place, folder / "stage", "asked")
    assert rows == EXPECTED[:2] + EXPECTED[3:]
    assert aside.startswith("row 3 of table asked: sql is not UTF-8")


QUERIES = [sql for _, sql in EXPECTED]
BROKEN = r"SELECT 'it\'s' FROM item"
LOG = "".join(f"{sql};\n" for sql in QUERIES)
LOG_FORMS = {  # the bytes of the log, what becomes of it, and the lines of the queries that are named
    **{f"log {encoding}": (encoded(LOG, encoding), fate, []) for encoding, fate in ENCODINGS.items()},
    **{
        f"log {encoding} crlf": (encoded(LOG.replace("\n", "\r\n"), encoding), fate, [])
        for encoding, fate in ENCODINGS.items()
    },
    **{
        f"log {encoding} cr": (encoded(LOG.replace("\n", "\r"), encoding), fate, [])
        for encoding, fate in ENCODINGS.items()
    },
    "log of two joined files": (joined(f"{QUERIES[0]};\n", LOG.partition("\n")[2]), READ, []),
    "log with UTF-16 behind it": (LOG.encode() + "SELECT 51;\n".encode("utf-16-le"), REFUSED, []),
    "log in one line": ("; ".join(QUERIES).encode(), READ, []),
    "log without a last end": (LOG.rstrip(";\n").encode(), READ, []),
    "log with blank lines": (LOG.replace(";\n", ";\n\n \n").encode(), READ, []),
    "log with several ends": (LOG.replace(";\n", ";;\n;").encode(), READ, []),
    "log with ends on their own lines": ("\n;\n".join(QUERIES).encode(), READ, []),
    "log with comments of lines": (LOG.replace(";\n", "; -- it's; so\n").encode(), READ, []),
    "log with comments of blocks": (LOG.replace(";\n", "; /* it's;\n so; */\n").encode(), READ, []),
    "log with every query twice": ((LOG + LOG).encode(), READ, []),
    "log, a broken query first": (f"{BROKEN};\n{LOG}".encode(), ASIDE, [1]),
    "log, a broken query last": (f"{LOG}{BROKEN};\n".encode(), ASIDE, [56]),  # five literals have two lines
    "log, two broken queries": (f"{BROKEN};\n{LOG}{BROKEN};".encode(), ASIDE, [1, 57]),
    "log, a comment left open": (f"{LOG}/* to do".encode(), ASIDE, [56]),
    "log, one bad byte": (LOG.encode().replace(*BAD_BYTE), REFUSED, []),
}


@pytest.mark.parametrize("form", LOG_FORMS)
def test_each_form_of_a_log_of_50_queries_is_read_exactly_or_refused_with_its_line(tmp_path, form):
    data, fate, lines = LOG_FORMS[form]
    (tmp_path / "log.sql").write_bytes(data)
    if fate == REFUSED:
        with pytest.raises(DataError, match=r"line \d+ is not UTF-8"):
            read_text(tmp_path / "log.sql")
        return
    log = read_log(read_text(tmp_path / "log.sql"), "sqlite")
    assert [query.sql for query in log.queries] == QUERIES
    assert [query.line for query in log.unreadable] == lines


ONE_LINERS = [sql.replace("\n", " ") for sql in QUERIES]
GOLD = [scoring.GoldQuery(sql, "shop") for sql in ONE_LINERS]
BIRD = {str(number): f"{sql}{scoring.BIRD_SEPARATOR}shop" for number, sql in enumerate(ONE_LINERS)}
SPLIT = [{"query": sql, "db_id": "shop"} for sql in ONE_LINERS]
PLAIN = "".join(f"{sql}\n" for sql in ONE_LINERS)
WITH_DATABASES = "".join(f"{sql}\tshop\n" for sql in ONE_LINERS)
FIFTH_TWICE = json.dumps(BIRD).replace('"5": ', '"5": "SELECT 1", "5": ')


def in_encodings(name, text):
    return {f"{name} {encoding}": (encoded(text, encoding), fate) for encoding, fate in ENCODINGS.items()}


PREDICTION_FORMS = {
    **in_encodings("lines", PLAIN),
    **in_encodings("object", json.dumps(BIRD, ensure_ascii=False, indent=1)),
    **in_encodings("list", json.dumps(ONE_LINERS, ensure_ascii=False)),
    "lines of two joined files": (joined(ONE_LINERS[0] + "\n", PLAIN.partition("\n")[2]), READ),
    "lines with UTF-16 behind them": (ONE_LINERS[0].encode() + b"\n" + PLAIN.encode("utf-16-le"), REFUSED),
    "lines crlf": (PLAIN.replace("\n", "\r\n").encode(), READ),
    "lines cr": (PLAIN.replace("\n", "\r").encode(), READ),
    "lines without a last end": (PLAIN.rstrip("\n").encode(), READ),
    "lines parted by blank ones": (PLAIN.replace("\n", "\n\n").encode(), READ),
    "lines with databases": (WITH_DATABASES.encode(), READ),
    "lines with BIRD's databases": ("".join(f"{text}\n" for text in BIRD.values()).encode(), READ),
    "object ascii": (json.dumps(BIRD).encode("ascii"), READ),
    "object in another order": (json.dumps(dict(reversed(BIRD.items()))).encode(), READ),
    "lines, one too few": (PLAIN.partition("\n")[2].encode(), "49 predictions for 50"),
    "lines, one too many": (f"{PLAIN}SELECT 1\n".encode(), "51 predictions for 50"),
    "lines, one bad byte": (PLAIN.encode().replace(*BAD_BYTE), REFUSED),
    "object, a number twice": (FIFTH_TWICE.encode(), "'5' stands twice in one object"),
    "object, a number written in two ways": (json.dumps({**BIRD, "05": "SELECT 1"}).encode(), "two predictions 5"),
    "object, a number beyond": (json.dumps({**BIRD, "50": "SELECT 1"}).encode(), "a prediction 50, and there are 50"),
    "object, a name": (json.dumps({**BIRD, "x": "SELECT 1"}).encode(), "a prediction 'x', which is no number"),
    "object torn": (json.dumps(BIRD, indent=1).encode()[:-2], "line 51: not JSON"),
    "list of objects": (json.dumps(SPLIT).encode(), "prediction 0: an object where SQL text was expected"),
}


@pytest.mark.parametrize("form", PREDICTION_FORMS)
def test_each_form_of_50_predictions_is_read_exactly_or_refused_in_words(tmp_path, form):
    data, fate = PREDICTION_FORMS[form]
    (tmp_path / "pred").write_bytes(data)
    if fate != READ:
        with pytest.raises(DataError, match=r"line \d+ is not UTF-8" if fate == REFUSED else fate):
            scoring.read_predictions(tmp_path / "pred", GOLD)
        return
    read = scoring.read_predictions(tmp_path / "pred", GOLD)
    assert read.queries == ONE_LINERS
    assert (read.missing, read.empty, read.other_database) == ([], [], [])
    # Five texts have a tab in them, which no database stands behind.
    has_tabs = form.startswith("lines") and "databases" not in form
    assert read.tabs == (list(range(5, 50, 10)) if has_tabs else [])


GOLD_FORMS = {
    **in_encodings("lines", WITH_DATABASES),
    **in_encodings("list", json.dumps(SPLIT, ensure_ascii=False, indent=1)),
    "lines of two joined files": (joined(f"{ONE_LINERS[0]}\tshop\n", WITH_DATABASES.partition("\n")[2]), READ),
    "lines with BIRD's databases": ("".join(f"{text}\n" for text in BIRD.values()).encode(), READ),
    "lines crlf": (WITH_DATABASES.replace("\n", "\r\n").encode(), READ),
    "lines cr": (WITH_DATABASES.replace("\n", "\r").encode(), READ),
    "lines parted by blank ones": (WITH_DATABASES.replace("\n", "\n\n").encode(), READ),
    "list in one line": (json.dumps(SPLIT).encode(), READ),
    "lines without databases": (PLAIN.replace("\t", " ").encode(), "line 1: no tab"),
    "list, a name twice": (
        json.dumps(SPLIT).replace("{", '{"query": "SELECT 1", ', 1).encode(),
        "'query' stands twice",
    ),
    "list, one without its query": (json.dumps([{"db_id": "shop"}, *SPLIT]).encode(), "record 0: no sql"),
    "list, one without its database": (json.dumps([{"query": "SELECT 1"}, *SPLIT]).encode(), "record 0: no db_id"),
}


@pytest.mark.parametrize("form", GOLD_FORMS)
def test_each_form_of_50_gold_queries_is_read_exactly_or_refused_in_words(tmp_path, form):
    data, fate = GOLD_FORMS[form]
    (tmp_path / "gold").write_bytes(data)
    if fate == READ:
        assert scoring.read_gold(tmp_path / "gold") == GOLD
        return
    with pytest.raises(DataError, match=r"line \d+ is not UTF-8" if fate == REFUSED else fate):
        scoring.read_gold(tmp_path / "gold")


def test_a_prediction_of_its_database_alone_is_empty(tmp_path):
    lines = [f"{ONE_LINERS[0]}\tshop", "\tshop", f"{scoring.BIRD_SEPARATOR}shop", f"\t{ONE_LINERS[3]}"]
    (tmp_path / "pred").write_text("".join(f"{line}\n" for line in lines))
    read = scoring.read_predictions(tmp_path / "pred", GOLD[:4])
    assert read.queries == [ONE_LINERS[0], "", "", ONE_LINERS[3]]
    assert (read.empty, read.other_database, read.tabs) == ([1, 2], [], [])


@pytest.mark.parametrize("count", [1, 2])
def test_a_table_without_a_header_is_set_aside_row_by_row(folder, count):
    path = folder / "in" / "q.csv"
    path.write_text(table(ROWS[:count]).partition("\n")[2])
    rows, aside = by_inbox(path, folder / "stage")
    assert (rows, len(aside)) == ([], count)
    assert aside[0].startswith("q.csv, line 1: the first line names no column question: how many are called zoë")


def test_the_count_of_forms():
    """Questions in 49 forms through three doors, a log in 33, predictions in 37 and gold queries in 22."""
    fates = [fate for _, _, fate in FORMS.values()]
    assert (len(fates), fates.count(READ), fates.count(ASIDE), fates.count(REFUSED)) == (49, 23, 9, 17)
    assert (len(LOG_FORMS), len(PREDICTION_FORMS), len(GOLD_FORMS)) == (33, 37, 22)
