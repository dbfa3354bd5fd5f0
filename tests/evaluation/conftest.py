"""A small harbour world, and a maker of evaluation records that states only what a test is about."""

import dataclasses

import pytest
from evaluation_world import RECORD

from tests.fakes import build_database

HARBOUR = """
CREATE TABLE ships (ship_id INTEGER PRIMARY KEY, name TEXT, type TEXT, flag TEXT, tonnage INTEGER, built INTEGER);
CREATE TABLE ports (port_id INTEGER PRIMARY KEY, name TEXT, country TEXT, depth REAL);
CREATE TABLE visits (
    visit_id INTEGER PRIMARY KEY,
    ship_id INTEGER REFERENCES ships (ship_id),
    port_id INTEGER REFERENCES ports (port_id),
    year INTEGER,
    cargo TEXT
);
INSERT INTO ships VALUES
    (1, 'Aurora', 'CNT', 'NO', 52000, 1999), (2, 'Borealis', 'TNK', 'PA', 81000, 2005),
    (3, 'Cormorant', 'CNT', 'PA', 47000, 2011), (4, 'Dunlin', 'BLK', 'NO', 30000, 1987),
    (5, 'Egret', 'TNK', 'LR', 95000, 2018);
INSERT INTO ports VALUES
    (1, 'Bergen', 'Norway', 12.5), (2, 'Colon', 'Panama', 13.0), (3, 'Monrovia', 'Liberia', 11.0),
    (4, 'Narvik', 'Norway', 14.5);
INSERT INTO visits VALUES
    (1, 1, 1, 2020, 'fish'), (2, 1, 4, 2021, 'ore'), (3, 2, 2, 2020, 'oil'), (4, 3, 2, 2021, 'cars'),
    (5, 3, 1, 2021, 'fish'), (6, 5, 3, 2022, 'oil'), (7, 5, 2, 2022, 'oil'), (8, 1, 1, 2022, NULL);
"""


@pytest.fixture
def record():
    """A right greedy answer of one turn, with whatever a test changes; `score` sets the strict verdict."""

    def make(score=None, **changes):
        if score is not None:
            changes["scores"] = {"strict": score}
        return dataclasses.replace(RECORD, **changes)

    return make


@pytest.fixture(scope="session")
def harbour(tmp_path_factory):
    return build_database(tmp_path_factory.mktemp("harbour") / "harbour.sqlite", HARBOUR)
