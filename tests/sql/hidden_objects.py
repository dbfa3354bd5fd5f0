"""A generator of objects of a database that may reach hidden values: views over statements of the grammar and over each
other, indices of text, computed columns, types, functions, policies and the like, and what would read them.
"""

import random
import re
from dataclasses import dataclass, field

# Besides the tables of `test_hidden.TABLES`: a shown table with a column of the hidden one's name, in both twins alike.
SHOWN = """
CREATE TABLE badge (ssn VARCHAR(40), door VARCHAR(20), id INTEGER);
INSERT INTO badge VALUES ('SECRET-1', 'north', 1), ('x', 'south', 2);
"""
# engine, what is made, what reads it. {o} is the object's name, {from} a table or an object before it, {query} and
# {column} are the grammar's; a column `pin` is hidden, and SECRET-n is another text in the other twin.
FORMS = [
    ("all", "CREATE VIEW {o} AS {query}", "SELECT * FROM {o}; SELECT count(*) FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT * FROM {from} p", "SELECT * FROM {o}; SELECT count(*) FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT count(*) AS n FROM {from} p", "SELECT n FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT {column} AS x FROM person p JOIN visit v ON v.id = p.id", "SELECT x FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT door FROM person JOIN badge USING ({shared})", "SELECT * FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT 1 AS one FROM {from} NATURAL JOIN {from2}", "SELECT count(*) FROM {o}"),
    ("all", "CREATE VIEW {o} AS SELECT b.* FROM badge b JOIN person p ON {test}", "SELECT * FROM {o}"),
    ("all", "CREATE VIEW {o} AS WITH wage AS (SELECT 1 AS x) SELECT x FROM wage, {from} p", "SELECT count(*) FROM {o}"),
    (
        "all",
        "CREATE TABLE {o} (id INTEGER, pin VARCHAR(40), g VARCHAR(80) GENERATED ALWAYS AS ({computed}) {stored});"
        "INSERT INTO {o} (id, pin) VALUES (1, 'SECRET-1'), (2, 'SECRET-2')",
        "SELECT g FROM {o}; SELECT id FROM {o} WHERE g > 'S'; SELECT id FROM {o}; SELECT * FROM {o}",
    ),
    (
        "all",
        "CREATE TABLE {o} (pin VARCHAR(40) PRIMARY KEY, id INTEGER); CREATE INDEX i{o} ON {o} (pin, id);"
        "INSERT INTO {o} VALUES ('SECRET-1', 1), ('SECRET-2', 2)",
        "SELECT id FROM {o}; SELECT count(*) FROM {o}",
    ),
    (
        "sqlite",
        "CREATE TABLE {o} (pin TEXT PRIMARY KEY, id INTEGER) WITHOUT ROWID;"
        "INSERT INTO {o} VALUES ('SECRET-1', 1), ('SECRET-2', 2)",
        "SELECT id FROM {o}; SELECT id + 1 FROM {o} WHERE id < 9",
    ),
    (
        "sqlite",
        "CREATE VIEW v{o} AS SELECT id, {column} AS n FROM person p;"
        "CREATE VIRTUAL TABLE {o} USING fts5(n, content='v{o}', content_rowid='id');"
        "INSERT INTO {o}({o}) VALUES ('rebuild');"
        "CREATE VIRTUAL TABLE w{o} USING fts5vocab({o}, 'row')",
        "SELECT rowid FROM {o} WHERE {o} MATCH 'secret'; SELECT term FROM w{o}; SELECT count(*) FROM {o}_data;"
        "SELECT rowid FROM {o} WHERE {o} MATCH '1'; SELECT n FROM {o}",
    ),
    (
        "sqlite",
        """CREATE VIRTUAL TABLE {o} USING fts4(content="{from}", name, ssn); INSERT INTO {o}({o}) VALUES ('rebuild');"""
        "CREATE VIRTUAL TABLE w{o} USING fts4aux({o})",
        "SELECT docid FROM {o} WHERE {o} MATCH 'secret'; SELECT term FROM w{o}; SELECT ssn FROM {o}",
    ),
    ("duckdb", "CREATE VIEW {o} AS FROM query_table('{from}')", "SELECT * FROM {o}; SELECT count(*) FROM {o}"),
    ("duckdb", "CREATE VIEW {o} AS FROM query('SELECT {column} AS x FROM person p')", "SELECT x FROM {o}"),
    ("duckdb", "CREATE MACRO {o}() AS (SELECT max({column}) FROM person p)", "SELECT {o}()"),
    (
        "duckdb",
        "CREATE MACRO m{o}() AS TABLE {query}; CREATE VIEW {o} AS FROM m{o}()",
        "SELECT * FROM {o}; SELECT * FROM m{o}()",
    ),
    (
        "duckdb",
        "CREATE TYPE {o} AS ENUM ('SECRET-1', 'SECRET-2'); CREATE TABLE t{o} (id INTEGER, pin {o});"
        "INSERT INTO t{o} VALUES (1, 'SECRET-1'); CREATE VIEW v{o} AS SELECT pin AS x FROM t{o}",
        "SELECT typeof(NULL::{o}); SELECT 'zz'::{o}; SELECT TRY_CAST('SECRET-1' AS {o}); SELECT typeof(x) FROM v{o};"
        "SELECT id FROM t{o}; SELECT enum_range(NULL::{o}); SELECT typeof([NULL::{o}]);"
        "SELECT from_json('1', '\"{o}\"')",
    ),
    ("duckdb", "CREATE TYPE {o} AS ENUM (SELECT ssn FROM person)", "SELECT typeof(NULL::{o}); SELECT 'zz'::{o}"),
    (
        "duckdb",
        "CREATE TABLE {o} (note VARCHAR DEFAULT 'a\rb', g VARCHAR AS (h || '-'), h VARCHAR AS (pin), pin VARCHAR);"
        "INSERT INTO {o} (pin) VALUES ('SECRET-1'); CREATE VIEW v{o} AS SELECT {generated} AS x FROM {o}",
        "SELECT g FROM {o}; SELECT h FROM {o}; SELECT x FROM v{o}; SELECT note FROM {o}",
    ),
    ("postgres", "CREATE MATERIALIZED VIEW {o} AS {query}", "SELECT * FROM {o}; SELECT count(*) FROM {o}"),
    (
        "postgres",
        "CREATE VIEW {o} AS SELECT query_to_xml('SELECT {column} FROM person p', true, true, '')::text AS x",
        "SELECT x FROM {o}; SELECT count(*) FROM {o}",
    ),
    ("postgres", "CREATE VIEW {o} AS SELECT table_to_xml('{from}', true, true, '')::text AS x", "SELECT x FROM {o}"),
    (
        "postgres",
        "CREATE VIEW {o} AS SELECT word FROM ts_stat('SELECT to_tsvector(name||ssn) FROM person')",
        "TABLE {o}",
    ),
    (
        "postgres",
        "CREATE FUNCTION {o}(text) RETURNS text LANGUAGE sql AS 'SELECT string_agg(ssn, $$,$$) FROM person';"
        "CREATE OPERATOR {operator} (RIGHTARG = text, FUNCTION = {o});"
        "CREATE VIEW v{o} AS SELECT {operator} 'a'::text AS x",
        "SELECT {o}('a'); SELECT {operator} 'a'::text; SELECT x FROM v{o}; SELECT (name).{o} FROM visit, badge",
    ),
    (
        "postgres",
        "CREATE TYPE {o} AS ENUM ('SECRET-1', 'SECRET-2'); CREATE TABLE t{o} (id INTEGER, pin {o});"
        "INSERT INTO t{o} VALUES (1, 'SECRET-1'); CREATE VIEW v{o} AS SELECT pin AS x FROM t{o}",
        "SELECT 'SECRET-1'::{o}; SELECT '{{SECRET-1}}'::_{o}; SELECT x::text FROM v{o}; SELECT id FROM t{o};"
        "SELECT enum_range(NULL::{o}); SELECT CAST('SECRET-2' AS {o}[])",
    ),
    (
        "postgres",
        "CREATE DOMAIN {o} AS text CHECK (VALUE <> 'SECRET-1'); CREATE TABLE t{o} (id INTEGER, pin {o})",
        "SELECT 'SECRET-1'::{o}; SELECT CAST('x' AS {o}); SELECT id FROM t{o}",
    ),
    (
        "postgres",
        "CREATE TABLE {o} (id INTEGER); INSERT INTO {o} VALUES (1), (2); ALTER TABLE {o} ENABLE ROW LEVEL SECURITY;"
        "CREATE POLICY p ON {o} USING (EXISTS (SELECT 1 FROM {schema}person p WHERE {policy} AND p.id = {o}.id))",
        "SELECT id FROM {o}; SELECT count(*) FROM {o}",
    ),
    (
        "postgres",
        "CREATE TABLE {o} (id INTEGER, pin TEXT) PARTITION BY LIST (pin);"
        "CREATE TABLE a{o} PARTITION OF {o} FOR VALUES IN ('SECRET-1'); CREATE TABLE b{o} PARTITION OF {o} DEFAULT;"
        "INSERT INTO {o} VALUES (1, 'SECRET-1'), (2, 'SECRET-2'), (3, 'x')",
        "SELECT id FROM {o}; SELECT id FROM a{o}; SELECT id, tableoid FROM {o}; SELECT count(*) FROM b{o}",
    ),
    (
        "postgres",
        "CREATE TABLE {o} (id INTEGER, pin INTEGER GENERATED ALWAYS AS IDENTITY (START 7));"
        "INSERT INTO {o} VALUES (1); CREATE VIEW v{o} AS SELECT last_value AS x FROM {o}_pin_seq",
        "SELECT last_value FROM {o}_pin_seq; SELECT x FROM v{o}; SELECT id FROM {o}",
    ),
    (
        "mysql",
        "CREATE TABLE {o} (id INTEGER, pin VARCHAR(40), g VARCHAR(80) DEFAULT (concat(pin, 'x')));"
        "INSERT INTO {o} (id, pin) VALUES (1, 'SECRET-1'); CREATE VIEW v{o} AS SELECT DEFAULT(g) AS x FROM {o}",
        "SELECT x FROM v{o}; SELECT DEFAULT(g) FROM {o}; SELECT id FROM {o}",
    ),
    (
        "mysql",
        "CREATE TABLE {o} (id INTEGER, pin VARCHAR(40)) ENGINE=MyISAM; INSERT INTO {o} VALUES (1, 'SECRET-1');"
        "CREATE TABLE m{o} (id INTEGER, pin2 VARCHAR(40)) ENGINE=MERGE UNION=({o})",
        "SELECT pin2 FROM m{o}; SELECT count(*) FROM m{o}; SELECT id FROM {o}",
    ),
    (
        "mysql",
        "CREATE TABLE {o} (id INTEGER, pin VARCHAR(40)) PARTITION BY LIST COLUMNS (pin)"
        " (PARTITION p1 VALUES IN ('SECRET-1'), PARTITION p2 VALUES IN ('SECRET-2'), PARTITION p3 DEFAULT);"
        "INSERT INTO {o} VALUES (1, 'SECRET-1'), (2, 'SECRET-2'), (3, 'x')",
        "SELECT id FROM {o} PARTITION (p1); SELECT id FROM {o}; SELECT count(*) FROM {o} PARTITION (p3) x",
    ),
    (
        "mysql",
        "CREATE FUNCTION {o}() RETURNS TEXT DETERMINISTIC READS SQL DATA RETURN (SELECT max({column}) FROM person p);"
        "CREATE VIEW v{o} AS SELECT {o}() AS x",
        "SELECT {o}(); SELECT x FROM v{o}",
    ),
]


OTHER_DIGITS = str.maketrans("0123456789", "9876543210")


def other_value(match):
    """Another hidden value; of two with equally many digits the larger one becomes the smaller one."""
    digits = match[1]
    return f"{9 - len(digits)}other{digits.translate(OTHER_DIGITS)}"


def with_other_values(script):
    """A script with other hidden values, which also sort in another order."""
    script = script.replace("(START 7)", "(START 700)")
    return re.sub(r"SECRET-(\d+)", other_value, script)


COMPUTED = {"mysql": "concat(pin, 'x')"}


@dataclass
class Made:
    """The script of each object, what reads them, and the columns that are hidden in tables of their own."""

    scripts: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    hidden: dict[str, tuple[str, ...]] = field(default_factory=dict)


def objects(engine, chance: random.Random, count, derive, schema=""):
    """So many objects of an engine; `derive` gives a statement of its grammar."""
    forms = [form for form in FORMS if form[0] in ("all", engine)]
    # Half of the objects are the engine's own kinds, so that these are met as well.
    own = [form for form in forms if form[0] == engine]
    relations = ["person", "wage", "visit", "badge", "papers", "staff", "paid"]
    made = Made()
    for place in range(count):
        _, script, reads = chance.choice(own if own and place % 2 else forms)
        name = f"o{place}"
        words = {
            "o": name,
            "from": chance.choice(relations),
            "from2": chance.choice(relations),
            "query": derive(engine, chance, place % 5 == 4),
            "column": chance.choice(("ssn", "p.ssn", "name", "p.name", "max(p.ssn)", "p.boss_id")),
            "shared": chance.choice(("ssn", "id")),
            "test": chance.choice(("p.ssn = b.ssn", "p.id = b.id", "p.name < b.door", "b.ssn < p.ssn")),
            "computed": COMPUTED.get(engine, "pin || 'x'"),
            "generated": chance.choice(("g", "h", "note")),
            "stored": "STORED" if engine == "postgres" else "",
            "operator": "#" + "".join(chance.choice("@#&~") for _ in range(8)),
            "policy": chance.choice(("p.ssn = 'SECRET-1'", "p.name = 'Ada'", "p.ssn > 'S'")),
            "schema": schema,
        }
        fill = lambda text, words=words: re.sub(r"\{(\w+)\}", lambda m: words.get(m[1], m[0]), text)  # noqa: E731
        made.scripts.append(fill(script).replace("{{", "{").replace("}}", "}"))
        made.reads += [read.strip().replace("{{", "{").replace("}}", "}") for read in fill(reads).split(";")]
        made.hidden |= dict.fromkeys(re.findall(r"CREATE TABLE (\w+) \([^;]*\bpin\b", fill(script)), ("pin",))
        if script.startswith("CREATE VIEW {o}"):
            relations.append(name)
    return made
