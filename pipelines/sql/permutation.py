"""Equality of two results up to the order of their columns, as the official test suite defines it, without its blow-up.

The official code (Zhong et al. 2020, `exec_eval.py: result_eq`) tries the whole product of candidate columns: ten like
columns are 10^10 trials. Here a column can only stand for one that holds the same bag of values, equal columns are
interchangeable, and a partial choice is dropped as soon as the bags of its partial rows differ.
"""

from __future__ import annotations

import marshal
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

Row = tuple[Any, ...]
MAX_STEPS = 2_000


def equal_up_to_columns(gold: Sequence[Row], predicted: Sequence[Row], ordered: bool) -> bool:
    """Whether some permutation of the predicted columns makes the two results equal as lists (ordered) or as bags.

    Neither may be empty unless the other has rows. A search of more than `MAX_STEPS` partial choices counts as unequal;
    only results with dozens of columns that hold the same values in other rows come near.
    """
    if len(gold) != len(predicted) or not gold or len(gold[0]) != len(predicted[0]):
        return False
    if gold is predicted or (gold == predicted and _bytes(gold) == _bytes(predicted)):
        return True
    if ordered:
        is_equal = _same_columns(gold, predicted)
    else:
        is_equal = Counter(gold) == Counter(predicted) or _search(gold, predicted)
    return is_equal and _same_unordered_rows(gold, predicted, ordered)


def _same_unordered_rows(gold: Sequence[Row], predicted: Sequence[Row], ordered: bool) -> bool:
    """The official quick rejection. It also decides: it sorts a row's cells by their text and type, so that 1 and 1.0
    can sort apart and equal rows count as unequal. Kept, to be true to the source, but last: it takes most of the time.
    """
    left, right = [_unordered(row) for row in gold], [_unordered(row) for row in predicted]
    return left == right if ordered else set(left) == set(right)


def _bytes(rows: Sequence[Row]) -> bytes:
    """Cells with their types: where these are equal the quick rejection cannot part equal rows."""
    return marshal.dumps(list(rows), 2)


def _unordered(row: Row) -> Row:
    return row if len(row) == 1 else tuple(sorted(row, key=lambda cell: str(cell) + str(type(cell))))


def _same_columns(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """With the order of rows fixed, columns are whole values: their bags must be equal."""
    return Counter(zip(*gold, strict=True)) == Counter(zip(*predicted, strict=True))


def _search(gold: Sequence[Row], predicted: Sequence[Row]) -> bool:
    """Depth-first over the gold's columns, those with the fewest candidates first."""
    left, right = list(zip(*gold, strict=True)), list(zip(*predicted, strict=True))
    left_bags, right_bags = [Counter(column) for column in left], [Counter(column) for column in right]
    options = [[j for j, bag in enumerate(right_bags) if bag == own] for own in left_bags]
    order = sorted(range(len(left)), key=lambda i: len(options[i]))
    stack: list[tuple[tuple[int, ...], Iterator[int]]] = [((), iter(options[order[0]]))]
    steps = 0
    while stack and steps < MAX_STEPS:
        chosen, candidates = stack[-1]
        column = next((j for j in candidates if j not in chosen), None)
        if column is None:
            stack.pop()
            continue
        steps += 1
        picked = (*chosen, column)
        if _agree([left[i] for i in order[: len(picked)]], [right[j] for j in picked]):
            if len(picked) == len(left):
                return True
            # Columns that hold the same cells row by row are one choice, not several.
            follow = {right[j]: j for j in options[order[len(picked)]] if j not in picked}
            stack.append((picked, iter(follow.values())))
    return False


def _agree(left: list[Row], right: list[Row]) -> bool:
    return Counter(zip(*left, strict=True)) == Counter(zip(*right, strict=True))
