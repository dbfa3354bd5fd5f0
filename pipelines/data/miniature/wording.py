"""How questions are put: sentences made of phrases, with whole sentences held out for the development and test sets.

A sentence such as `[open] the names of {t} [filter]` stands for one template per choice of its phrases. A template
belongs to one split only, so a test question is never worded like a training question; its words are known, though.
"""

from __future__ import annotations

import functools
import itertools
import re
import zlib

from pipelines.data.miniature.vocabulary import Split

SHARES: tuple[tuple[Split, int], ...] = (("test", 3), ("dev", 2), ("train", 11))  # of 16 templates

PHRASES: dict[str, tuple[str, ...]] = {
    "open": ("show", "list", "find", "give", "return", "what are"),
    "one": ("show", "find", "give", "return", "what is"),
    "count": ("how many {t}", "count the {t}", "count all {t}", "the number of {t}", "find the number of {t}"),
    "names": ("the names of {t}", "the names of all {t}", "the {t1} names", "names of {t}"),
    "filter": ("with {c} {v}", "whose {c} is {v}", "where {c} is {v}", "having {c} {v}", "that have {c} {v}"),
    "second": ("and {d} {w}", "and whose {d} is {w}", "and where {d} is {w}", "and having {d} {w}"),
    "compare": ("with {n} {than} {k}", "whose {n} is {than} {k}", "where {n} is {than} {k}", "having {n} {than} {k}"),
    "more": ("and {n} {than} {k}", "and whose {n} is {than} {k}", "and where {n} is {than} {k}"),
    "above": (
        "with {n} above the average",
        "whose {n} is above the average",
        "where {n} is more than the average",
        "having {n} over the average {n}",
    ),
    "without": ("without {h}", "with no {h}", "that have no {h}", "having no {h}", "that do not have {h}"),
    "with": ("with {h}", "that have {h}", "having {h}"),
    "by": ("for each {c}", "by {c}", "of each {c}", "per {c}"),
    "common": ("the most common {g}", "the {g} that is most common", "the most frequent {g}"),
    "linked": ("of {p}", "for {p}", "that belong to {p}"),
}

SENTENCES: dict[str, tuple[str, ...]] = {
    "count_all": ("how many {t} are there", "[count:t]", "[count:t] in all", "what is the number of {t}"),
    "count_filtered": ("[count:t] [filter]", "for {t} [filter] , [count:t]"),
    "names_filtered": (
        "[open] [names:t] [filter]",
        "which {t} are there [filter]",
        "for {t} [filter] [open] the names",
    ),
    "aggregate_all": ("[one] the {agg} {n} of {t}", "[one] the {agg} {n} of all {t}", "the {agg} {t} {n}"),
    "aggregate_filtered": ("[one] the {agg} {n} of {t} [filter]", "for {t} [filter] [one] the {agg} {n}"),
    "names_compared": ("[open] [names:t] [compare]", "for {t} [compare] [open] the names"),
    "columns_filtered": (
        "[open] the names and {n} of {t} [filter]",
        "[open] the name and the {n} of {t} [filter]",
        "for {t} [filter] [open] the name and {n}",
    ),
    "count_by_group": ("[count:t] [by]", "[by] [count:t]", "[open] each {c} and the number of {t}"),
    "filtered_compared": ("[open] [names:t] [filter] [more]", "for {t} [filter] [more] [open] the names"),
    "count_both": ("[count:t] [filter] [second]", "for {t} [filter] [second] , [count:t]"),
    "top_one": ("[one] the name of the {t1} with the {top} {n}", "which {t1} has the {top} {n}"),
    "linked_names": ("[open] [names:h] [linked] [filter]", "for {p} [filter] [open] [names:h]"),
    "linked_count": ("[count:h] [linked] [filter]", "for {p} [filter] , [count:h]"),
    "top_filtered": (
        "[one] the name of the {t1} with the {top} {n} [filter]",
        "for {t} [filter] [one] the name with the {top} {n}",
        "of {t} [filter] which has the {top} {n}",
    ),
    "above_average": ("[open] [names:t] [above]", "for {t} [above] [open] the names"),
    "without_child": ("[open] [names:p] [without]", "which {p} are there [without]"),
    "with_child_filtered": ("[open] [names:p] [with] [filter]", "which {p} are there [with] [filter]"),
    "most_common": ("[one] [common] of {t}", "[one] [common] of all {t}", "for {t} [one] [common]"),
    "linked_top": (
        "[one] the name of the {h1} with the {top} {n} [linked] [filter]",
        "for {p} [filter] [one] the {h1} with the {top} {n}",
    ),
    "filtered_above_average": ("[open] [names:t] [filter] and [above]", "for {t} [filter] [open] the names [above]"),
    "filtered_without_child": ("[open] [names:p] [filter] and [without]", "which {p} are there [filter] and [without]"),
    "most_children": (
        "[one] the name of the {p1} with the most {h}",
        "which {p1} has the most {h}",
        "which {p1} has the highest number of {h}",
    ),
    "most_common_filtered": ("[one] [common] of {t} [filter]", "for {t} [filter] [one] [common]"),
}

_SUBJECT = re.compile(r"{t(1?)}")
_PHRASE = re.compile(r"\[(\w+)(?::(\w))?\]")


@functools.cache
def templates(family: str, split: Split) -> tuple[str, ...]:
    """The templates of a family that belong to a split, in a fixed order; their slots are `{t}`, `{c}`, `{v}`, ..."""
    every = [template for sentence in SENTENCES[family] for template in expand(sentence)]
    ranked = sorted(every, key=lambda text: zlib.crc32(f"{family}/{text}".encode()))
    start = 0
    for name, share in SHARES:
        size = len(ranked) - start if name == "train" else max(1, round(len(ranked) * share / 16))
        if name == split:
            return tuple(sorted(ranked[start : start + size]))
        start += size
    raise AssertionError(split)


def expand(sentence: str) -> list[str]:
    """All templates of one sentence: `[names:h]` is any phrase of that list, said of {h} in place of {t}."""
    matches = list(_PHRASE.finditer(sentence))
    choices = [[_SUBJECT.sub(f"{{{m[2]}\\1}}", phrase) for phrase in PHRASES[m[1]]] for m in matches]
    results = []
    for chosen in itertools.product(*choices):
        parts = iter(chosen)
        results.append(_PHRASE.sub(lambda _, parts=parts: next(parts), sentence))  # type: ignore[misc]
    return results
