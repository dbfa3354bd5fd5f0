"""Rows that are equal but for the last bits of their floats, and bags of such rows, for the equality `strict`.

A float that was summed in another order differs in its last bits; an integer never does. Workers import this module, so
it needs nothing beyond the standard library.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

Row = tuple[Any, ...]
RELATIVE = 1e-12  # sums of a million floats in two orders differ by some 1e-13
ABSOLUTE = 1e-15  # 0.1 + 0.2 - 0.3 is 5.6e-17 and not 0
WHOLE = 2**53  # below it a float tells every whole number from the next
MATCHED = 100  # rows of one group whose pairing is searched for


def close(left: Any, right: Any) -> bool:
    """Whether two cells are the same value: text, bytes, NULL and integers exactly, numbers with a fraction nearly.

    Two numbers of which one is a float may differ by `RELATIVE` of the larger or by `ABSOLUTE`. A whole number below
    2^53, whatever its type, equals nothing that is half a unit away or more, so no float stands for two integers; an
    integer from there on equals a float only exactly.
    """
    if left == right:
        return True
    if not isinstance(left, (int, float)) or not isinstance(right, (int, float)):
        return False
    if isinstance(left, int) and isinstance(right, int):
        return False
    try:
        near = math.isclose(left, right, rel_tol=RELATIVE, abs_tol=ABSOLUTE)
    except OverflowError:  # an integer beyond the range of floats
        return False
    return near and _same_whole(left, right)


def _same_whole(left: float, right: float) -> bool:
    """Of two near numbers that are unequal: whether no whole number on one side is another number on the other."""
    if max(abs(left), abs(right)) >= WHOLE:
        return isinstance(left, float) and isinstance(right, float)
    return not (left == int(left) or right == int(right)) or abs(left - right) < 0.5


def close_rows(left: Row, right: Row) -> bool:
    """Whether each cell of two rows of one width is `close` to its partner."""
    return left == right or all(map(close, left, right))


def same_bag(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """Whether two bags of equally many rows can be paired: same rows with same rows, the rest with close ones.

    A pairing is searched for in groups of rows that are near one another; a group of more than `MATCHED` rows, which
    takes as many floats within 1e-12 of their neighbours, is paired in sorted order.
    """
    if Counter(gold) == Counter(predicted):
        return True
    if float not in set(map(type, chain.from_iterable(chain(gold, predicted)))):
        return False
    left, right = Counter(map(_typed, gold)), Counter(map(_typed, predicted))
    missing = sorted((row for row, _ in (left - right).elements()), key=_sort_key)
    surplus = sorted((row for row, _ in (right - left).elements()), key=_sort_key)
    return all(map(close_rows, missing, surplus)) or _grouped(missing, surplus)


def _typed(row: Row) -> tuple[Row, tuple[int, ...]]:
    """A row and where it has floats from 2^53 on: an equal integer there is close to fewer numbers than the float."""
    return row, tuple(at for at, cell in enumerate(row) if isinstance(cell, float) and abs(cell) >= WHOLE)


def _sort_key(row: Row) -> tuple[list[tuple[int, int, Any]], list[float]]:
    """A total order over rows of mixed types: exact cells first, for numbers are what may differ by a last bit."""
    numbers = [cell for cell in row if _rank(cell) == 1]
    exact = [(at, _rank(cell), 0 if cell is None else cell) for at, cell in enumerate(row) if _rank(cell) != 1]
    return exact, numbers


def _rank(cell: Any) -> int:
    """NULL, numbers, text and bytes are not ordered among each other."""
    return 0 if cell is None else 1 if isinstance(cell, (int, float)) else 2 if isinstance(cell, str) else 3


def _grouped(missing: Sequence[Row], surplus: Sequence[Row]) -> bool:
    """Pair rows within groups: two rows that are close are in one group, whatever else is in it."""
    places = [_neighbourhoods(column) for column in zip(*missing, *surplus, strict=True)]

    def group(row: Row) -> tuple[Any, ...]:
        return tuple(places[at].get(cell, 0) if _rank(cell) == 1 else cell for at, cell in enumerate(row))

    left, right = _by(group, missing), _by(group, surplus)
    if {name: len(rows) for name, rows in left.items()} != {name: len(rows) for name, rows in right.items()}:
        return False
    return all(_match(rows, right[name]) for name, rows in left.items())


def _by(group: Any, rows: Iterable[Row]) -> dict[tuple[Any, ...], list[Row]]:
    groups = defaultdict(list)
    for row in rows:
        # The types keep a text or NULL in a cell apart from the number of a neighbourhood.
        groups[group(row), tuple(map(_rank, row))].append(row)
    return groups


def _neighbourhoods(cells: Iterable[Any]) -> dict[Any, int]:
    """The numbers of a column, each with the number of its neighbourhood: the next one begins where a gap is."""
    numbers = sorted({cell for cell in cells if _rank(cell) == 1})
    places: dict[Any, int] = {}
    place = 0
    for before, number in zip([*numbers[:1], *numbers], numbers, strict=False):
        place += not _near(before, number)
        places[number] = place
    return places


def _near(left: float, right: float) -> bool:
    """A bound that is wider than that of `close`, so that a gap parts no two close numbers."""
    try:
        return left == right or math.isclose(left, right, rel_tol=2 * RELATIVE, abs_tol=2 * ABSOLUTE)
    except OverflowError:
        return False


def _match(missing: Sequence[Row], surplus: Sequence[Row]) -> bool:
    """Whether every row finds a close partner of its own: augmenting paths (Kuhn)."""
    if len(missing) > MATCHED:
        return all(map(close_rows, missing, surplus))
    partners = [[at for at, other in enumerate(surplus) if close_rows(row, other)] for row in missing]
    taken: dict[int, int] = {}

    def place(row: int, seen: set[int]) -> bool:
        for at in partners[row]:
            if at not in seen:
                seen.add(at)
                if at not in taken or place(taken[at], seen):
                    taken[at] = row
                    return True
        return False

    return all(place(row, set()) for row in range(len(missing)))
