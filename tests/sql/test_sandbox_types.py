"""Every value that leaves a worker is plain and bounded, whatever type the engine has for it."""

import collections
import datetime
import decimal
import json
import re
import uuid

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.core.types import ExecutionStatus
from pipelines.sql.dialects.base import plain_value
from pipelines.sql.engine import Limits, Pair
from pipelines.sql.schema import introspect
from tests.fakes import build_database

LIMITS = Limits(timeout_s=10, max_rows=100, max_bytes=1_000_000, memory_mb=512)
DUCKDB = """
true|'infinity'::DATE|'-infinity'::DATE|'-infinity'::TIMESTAMP|'infinity'::TIMESTAMPTZ|'290000-01-01'::DATE
'294246-01-01 00:00:00'::TIMESTAMP|'0044-03-15 (BC)'::DATE|INTERVAL '1 month 3 days 4 us'|INTERVAL '99999 years'
to_days(2147483647)|to_days(-2147483648)|to_months(2147483647)|'24:00:00'::TIME|'12:00:00+15:59'::TIMETZ
'101'::BIT|repeat('1', 10000)::BIT|'{"a": NaN}'::VARCHAR|'{"a":1}'::JSON|map {1: 2}|map {[1]: 2}|map {{'a': 1}: 2}
map {DATE '2024-01-01': 1}|map {1.5: INTERVAL '1 day'}|map {NULL::INTEGER: 1}|{'a': 1}|{'a': DATE 'infinity'}
[1.5, NULL]
[[[[1]]]]|[to_days(2147483647)]|[NULL]|[]|170141183460469231731687303715884105727::HUGEINT
(-170141183460469231731687303715884105727)::HUGEINT|340282366920938463463374607431768211455::UHUGEINT
'nan'::FLOAT|'-inf'::DOUBLE|['nan'::DOUBLE, 'inf'::DOUBLE]|{'x': 'inf'::FLOAT}|1.5::DECIMAL(38, 20)
99999999999999999999999999999999999999::DECIMAL(38, 0)|'\\x00'::BLOB|['\\xFF'::BLOB]|'a'::ENUM ('a', 'b')
union_value(num := 2)|array_value(1, 2)|'2024-01-01 00:00:00.123456789'::TIMESTAMP_NS|'290000-01-01'::TIMESTAMP_S
'290000-01-01'::TIMESTAMP_MS|TIME_NS '12:00:00.123456789'|repeat('9', 5000)::BIGNUM|repeat('9', 30000)::BIGNUM
gen_random_uuid()|factorial(33)|chr(0)|chr(1114111)|repeat('x', 100)::BLOB|list_transform(range(1000), lambda x: [x])
1::UTINYINT|'1'::VARIANT|NULL|'a'::VARCHAR COLLATE NOCASE
"""
POSTGRES = """
true|factorial(2000)|('1' || repeat('0', 100000))::numeric|('0.' || repeat('1', 16000))::numeric|'NaN'::numeric
'Infinity'::numeric|'-Infinity'::numeric|'NaN'::float8|'-Infinity'::float4|1e308::float8|'infinity'::date
'-infinity'::timestamp|'infinity'::timestamptz|'5874897-12-31'::date|'4714-11-24 BC'::date
'294276-12-31 23:59'::timestamp
'24:00:00'::time|'12:00:00+15:59'::timetz|'178000000 years'::interval|'-178000000 years'::interval
'1 mon 2 days'::interval
'101'::bit(3)|repeat('1', 10000)::varbit|'{"a": 1}'::json|('{"a": ' || repeat('9', 5000) || '}')::json
('{"a": ' || repeat('9', 5000) || '}')::jsonb|('[' || repeat('9', 5000) || ']')::jsonb
(repeat('[', 1000) || repeat(']', 1000))::json|ARRAY[1, NULL]|ARRAY[[1, 2], [3, 4]]|ARRAY[factorial(2000)]
ARRAY['infinity'::date]|ARRAY['178000000 years'::interval]|'{}'::int[]|'[2:3]={1,2}'::int[]|ROW(1, 'a', NULL)
ROW(ROW(factorial(2000)), ARRAY[1])|int4range(1, 5)|daterange('2024-01-01', 'infinity')|'empty'::int8range
'{[1,2), [4,5)}'::int4multirange|numrange(1, factorial(2000))|'10.0.0.1/8'::inet|'10.0.0.0/8'::cidr
'08:00:2b:01:02:03'::macaddr
'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11'::uuid|'$1,234.56'::money|'(1,2)'::point|'<(1,2),3>'::circle|'(1,2),(3,4)'::box
'a fat cat'::tsvector|'fat & rat'::tsquery|'16/B374D848'::pg_lsn|'<a>b</a>'::xml|'\\x00ff'::bytea
ARRAY['\\x00ff'::bytea]
'customer'::regclass|'int4'::regtype|'a'::"char"|'abc'::name|'abc'::bpchar|chr(1114111)|NULL|1::oid|1::int2
'1 day'::interval * 3|now()|current_date|localtime|'$.a'::jsonpath|'10:20:10,14,15'::txid_snapshot
"""


def expressions(lines):
    return [sql for line in lines.strip().splitlines() for sql in re.split(r"(?<!\|)\|(?!\|)", line)]


def assert_plain(value):
    assert type(value) in (int, float, str, bytes, type(None)), type(value)
    if isinstance(value, int):
        assert -(1 << 128) < value < 1 << 128
    assert len(repr(value)) < 1_000_000
    json.dumps(None if isinstance(value, bytes) else value)


def assert_all_plain(engine, database, listed):
    results = engine.execute_many([(database, f"SELECT {sql}") for sql in listed])
    for sql, result in zip(listed, results, strict=True):
        assert result.status is not ExecutionStatus.UNAVAILABLE, (sql, result)
        for row in result.rows:
            assert_plain(row[0])
    return {sql: result.rows[0][0] for sql, result in zip(listed, results, strict=True) if result.ok}


def test_every_type_of_duckdb_comes_out_plain(engine, duckdb_shop):
    values = assert_all_plain(engine, duckdb_shop, expressions(DUCKDB))
    assert len(values) > len(expressions(DUCKDB)) - 12
    assert values["to_days(-2147483648)"] == "-2147483648 days"
    assert values["'2024-01-01 00:00:00.123456789'::TIMESTAMP_NS"] == "2024-01-01 00:00:00.123456789"
    assert values["['nan'::DOUBLE, 'inf'::DOUBLE]"] == '["NaN", "inf"]'


@pytest.mark.services
def test_every_type_of_postgres_comes_out_plain(engine, server):
    values = assert_all_plain(engine, server.shop, expressions(POSTGRES))
    assert len(values) > len(expressions(POSTGRES)) - 12
    assert len(values["factorial(2000)"]) == 5736
    assert values["'infinity'::date"] == "infinity"
    assert values["'294276-12-31 23:59'::timestamp"] == "294276-12-31 23:59:00"
    assert values["'1 mon 2 days'::interval"] == "1 mon 2 days"


NESTED = """
CREATE TABLE trip (tags VARCHAR[], place STRUCT(city VARCHAR, zip INTEGER), marks MAP(VARCHAR, INTEGER),
    stops STRUCT(name VARCHAR, hours INTEGER[])[], either UNION(num INTEGER, str VARCHAR));
INSERT INTO trip VALUES (['sea', 'sun'], {'city': 'Oslo', 'zip': 150}, MAP {'a': 1, 'b': 2},
    [{'name': 'x', 'hours': [1, 2]}, {'name': 'y', 'hours': []}], 'text')
"""


def test_nested_types_of_duckdb_are_in_the_schema_and_come_out_as_json(engine, tmp_path):
    database = build_database(tmp_path / "trip.duckdb", NESTED)
    (table,) = introspect(database, 1).tables
    types = {column.name: column.type.lower().replace('"', "") for column in table.columns}
    assert types == {
        "tags": "varchar[]",
        "place": "struct(city varchar, zip integer)",
        "marks": "map(varchar, integer)",
        "stops": "struct(name varchar, hours integer[])[]",
        "either": "union(num integer, str varchar)",
    }
    queries = [
        "SELECT * FROM trip",
        "SELECT tags[1], place.city, marks['b'], stops[1].hours[2] FROM trip",
        "SELECT unnest(tags) AS tag FROM trip ORDER BY tag",
    ]
    whole, parts, unnested = engine.execute_many([(database, query) for query in queries])
    stops = '[{"name": "x", "hours": [1, 2]}, {"name": "y", "hours": []}]'
    place = '{"city": "Oslo", "zip": 150}'
    assert whole.rows == (('["sea", "sun"]', place, '{"a": 1, "b": 2}', stops, "text"),)
    assert parts.rows == (("sea", "Oslo", 2, 2),)
    assert unnested.rows == (("sea",), ("sun",))


@pytest.mark.services
def test_dates_before_christ_and_without_end_are_the_text_of_postgresql(engine, server):
    dates = {
        "'0044-03-15 BC'::date": "0044-03-15 BC",
        "'0044-03-15 12:30 BC'::timestamp": "0044-03-15 12:30:00 BC",
        "'4714-11-24 BC'::date": "4714-11-24 BC",
        "'infinity'::date": "infinity",
        "'-infinity'::date": "-infinity",
        "'-infinity'::timestamp": "-infinity",
        "'infinity'::timestamptz": "infinity",
        "'5874897-12-31'::date": "5874897-12-31",
    }
    (result,) = engine.execute_many([(server.shop, f"SELECT {', '.join(dates)}")])
    assert result.rows == (tuple(dates.values()),)
    ides, same, other = "SELECT '0044-03-15 BC'::date", "SELECT make_date(-44, 3, 15)", "SELECT '0044-03-15'::date"
    pairs = [Pair(server.shop, ides, predicted) for predicted in (same, other)]
    assert [verdict.scores["strict"] for verdict in engine.verdicts(pairs, ["strict"])] == [1.0, 0.0]


def test_a_number_beyond_128_bits_is_its_digits():
    assert plain_value(10**5000) == "1" + "0" * 5000
    assert plain_value(decimal.Decimal(10**5000 + 1)) == "1" + "0" * 4999 + "1"
    exact = decimal.Decimal("1e400").quantize(decimal.Decimal(1), context=decimal.Context(prec=500))
    assert plain_value(exact) == "1" + "0" * 400
    assert plain_value(2**128 - 1) == 2**128 - 1
    assert plain_value(decimal.Decimal("2.50")) == 2.5
    assert plain_value(-(2**128)) == str(-(2**128))


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.decimals(), st.text(), st.binary(), st.dates(),
    st.datetimes(), st.times(), st.timedeltas(), st.uuids(), st.integers(39, 6000).map(lambda digits: -(10**digits)),
    st.just(decimal.Decimal("1e100000")), st.just(decimal.Decimal("-1.5e-100000")), st.complex_numbers(),
    st.builds(bytearray, st.binary()), st.builds(memoryview, st.binary()), st.builds(object),
)  # fmt: skip
KEYS = st.one_of(st.none(), st.integers(), st.text(), st.dates(), st.tuples(st.integers()), st.binary())


@settings(max_examples=300, deadline=None, derandomize=True)
@given(
    st.recursive(
        LEAVES, lambda inner: st.lists(inner) | st.dictionaries(KEYS, inner) | st.tuples(inner, inner), max_leaves=10
    )
)
def test_whatever_a_driver_returns_comes_out_plain(value):
    assert_plain(plain_value(value))


def test_odd_containers_come_out_plain():
    deep = []
    for _ in range(5000):
        deep = [deep]
    for value in (deep, {1, 2}, frozenset((1,)), collections.OrderedDict(a=1), {uuid.UUID(int=1): datetime.date.max}):
        assert_plain(plain_value(value))
