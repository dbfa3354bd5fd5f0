"""What questions cover of a schema: counted by hand over four queries."""

from pipelines.core.types import Database, Example
from pipelines.sql.schema import Column, ForeignKey, Schema, Table
from pipelines.teachers.invent import Coverage, coverage, lines

SHOP = Database("shop", "sqlite", "shop.sqlite")
SCHEMA = Schema(
    (
        Table("Customer", (Column("id", "INTEGER", True), Column("name", "TEXT"))),
        Table(
            "purchase",
            (Column("id", "INTEGER", True), Column("customer_id", "INTEGER"), Column("amount", "INTEGER")),
            (ForeignKey("customer_id", "Customer", "id"),),
        ),
        Table("refund", (Column("purchase_id", "INTEGER"),), (ForeignKey("purchase_id", "purchase", "id"),)),
    )
)
QUERIES = {
    "SELECT count(*) FROM customer": "easy",
    "SELECT upper(name) FROM Customer WHERE name LIKE 'a%' AND id > 1": "easy",
    "SELECT c.name, sum(p.amount) FROM customer c JOIN purchase p ON c.id = p.customer_id GROUP BY c.name": "hard",
    "SELECT my_own(amount), count(*) FROM purchase": "medium",
    "no SQL at all": "extra",
}


def test_tables_joins_functions_and_levels_are_counted() -> None:
    examples = [
        Example(str(number), "?", SHOP, sql, hardness=level)  # type: ignore[arg-type]
        for number, (sql, level) in enumerate(QUERIES.items())
    ]
    found = coverage(examples, SCHEMA)
    assert found == Coverage(
        {"Customer": 3, "purchase": 2, "refund": 0},
        {"purchase.customer_id = Customer.id": 1, "refund.purchase_id = purchase.id": 0},
        {"count": 2, "my_own": 1, "sum": 1, "upper": 1},
        {"easy": 2, "medium": 1, "hard": 1, "extra": 1},
    )
    assert list(lines(found)) == [
        "tables: 2 of 3; no question about refund",
        "joins over a foreign key: 1 of 2; no question about refund.purchase_id = purchase.id",
        "functions: count 2, my_own 1, sum 1, upper 1",
        "hardness: easy 2, medium 1, hard 1, extra 1",
    ]


def test_names_beyond_the_first_ten_are_counted() -> None:
    many = Coverage({f"t{number}": 0 for number in range(12)}, {}, {}, {})
    assert next(lines(many)) == ("tables: 0 of 12; no question about t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 and 2 more")
