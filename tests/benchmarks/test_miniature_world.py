"""What the generated databases promise: their size, their determinism, and what only held-out databases show."""

import hashlib
import itertools
import sqlite3

import pytest

from pipelines.benchmarks import base
from pipelines.benchmarks.miniature import world
from pipelines.benchmarks.miniature.world import CATEGORIES, DOMAINS, KINDS, MEASURES, held_out_columns, held_out_pairs


def pairs(database):
    return {frozenset(two) for two in itertools.combinations([table.name for table in database.tables], 2)}


def columns(database):
    return {(table.name, column) for table in database.tables for column in (*table.categories, *table.measures)}


def digests(root):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (root / "databases").rglob("*.sqlite")}


def test_a_seed_decides_examples_and_bytes_however_many_are_drawn(load, tmp_path):
    first = load("train", tmp_path / "a", seed=3, databases=6, questions=8)
    again = load("train", tmp_path / "b", seed=3, databases=6, questions=8)
    other = load("train", tmp_path / "c", seed=4, databases=6, questions=8)
    assert first.examples == again.examples
    assert digests(tmp_path / "a") == digests(tmp_path / "b")
    assert first.examples != other.examples
    many = load("train", tmp_path / "a", databases=6, questions=8).examples
    assert many[4 * 8 :] == load("train", tmp_path / "b", first=4, databases=2, questions=8).examples


def test_databases_are_small_and_whole_and_every_split_meets_each_domain(databases):
    assert len(DOMAINS) >= 12
    for drawn in databases.values():
        assert {database.domain for database in drawn} == {domain.name for domain in DOMAINS}
    for database in databases["test"]:
        assert 2 <= len(database.tables) <= 4
        for table in database.tables:
            assert 8 <= len(database.rows[table.name]) <= 40
            assert all(len(row) == len(table.columns) for row in database.rows[table.name])


def test_no_two_tables_that_a_test_database_holds_out_meet_in_training_in_any_role(databases):
    """Not linked, and not through a third table that both are linked to."""
    met = set().union(*map(pairs, databases["train"]))
    for split in ("dev", "test"):
        assert not met & held_out_pairs(split)
        domains = {domain.name: frozenset(getattr(domain, split)) for domain in DOMAINS}
        for database in databases[split]:
            linked = {frozenset((table.name, table.parent)) for table in database.tables if table.parent}
            assert domains[database.domain] in linked
    # and dev and test hold different pairs out
    assert not held_out_pairs("dev") & held_out_pairs("test")
    assert not set().union(*map(pairs, databases["dev"])) & held_out_pairs("test")
    assert not set().union(*map(pairs, databases["test"])) & held_out_pairs("dev")


def test_held_out_databases_have_columns_that_training_lacks_and_no_such_word(databases):
    seen = set().union(*map(columns, databases["train"]))
    for split in ("dev", "test"):
        own = {(table, column) for table in KINDS for column in held_out_columns(table, split)}
        assert not seen & own
        assert all(len(columns(database) & own) >= 4 for database in databases[split])  # two tables, two columns each

    def words(split):
        return {word for database in databases[split] for pair in columns(database) for word in pair}

    assert words("test") | words("dev") <= words("train")


def test_stored_forms_of_one_column_are_told_apart_and_evenly_drawn(databases):
    forms = [form for database in databases["train"] for table in database.tables for form in table.categories.values()]
    shares = {form: forms.count(form) / len(forms) for form in world.FORMS}
    assert shares["word"] == pytest.approx(1 / 7, abs=0.03)
    assert all(shares[form] == pytest.approx(2 / 7, abs=0.04) for form in ("upper", "title", "code"))
    for column, values in CATEGORIES.items():
        for form in world.FORMS:
            assert len({world.stored(column, word, form) for word in values}) == len(values)


def test_the_file_holds_the_rows_with_keys_that_match(tmp_path):
    drawn = world.draw_database("test", 5, 0)
    world.build_database(drawn, tmp_path / "a.sqlite")
    connection = sqlite3.connect(tmp_path / "a.sqlite")
    assert connection.execute("PRAGMA foreign_key_check").fetchall() == []
    for table in drawn.tables:
        assert connection.execute(f"SELECT * FROM {table.name}").fetchall() == drawn.rows[table.name]


def test_measures_do_not_repeat_in_a_table_so_that_an_order_is_never_luck(databases):
    for database in databases["dev"]:
        for table in database.tables:
            for measure in table.measures:
                place = table.columns.index(measure)
                values = [row[place] for row in database.rows[table.name]]
                assert len(set(values)) == len(values)
                assert all(MEASURES[measure].low <= value <= MEASURES[measure].high for value in values)


def test_locations_are_relative_until_resolved_and_an_unknown_option_is_refused(load, tmp_path):
    (example, *_) = load("dev", tmp_path, databases=1, questions=2).examples
    assert example.database.location == f"databases/miniature/{example.database.id}.sqlite"
    (resolved,) = base.resolve_locations([example], tmp_path)
    assert sqlite3.connect(resolved.database.location).execute(example.gold_sql).fetchall()
    with pytest.raises(ValueError, match="reader 'miniature' has no option 'tables'"):
        load("train", tmp_path, tables=3)
