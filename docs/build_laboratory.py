"""Writes docs/results/laboratory.md, its figures and docs/results/laboratory.csv from the sweeps of a store.

    python docs/build_laboratory.py STORE [seed=7..9]

Nothing is made here: an arm that the store lacks is not measured yet, and the page says so. The claims take hours, so
they may be measured a few at a time, each in a store of its own: a claim of which the page shows more than the store
has is kept as it stands, with the commit that measured it, as long as its file and its recipes say what they said then.
"""

import csv
import dataclasses
import io
import math
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this checkout, not an installed copy

from laboratory_figures import STYLE_OF, Tested, figure, forest, standalone

from pipelines.core.errors import DataError, SqltrainError
from pipelines.core.files import digest
from pipelines.core.provenance import as_tags
from pipelines.core.store import Store
from pipelines.evaluation.stats import Paired
from pipelines.report import formats
from pipelines.stages import graph
from pipelines.stages.stage import Step
from pipelines.sweeps import claims, paper_tables, sweep_plan
from pipelines.sweeps import sweep_table as report
from pipelines.sweeps.claims import Claim, Contrast, ContrastResult
from pipelines.training import watch

DOCS = Path(__file__).resolve().parent
PAGE = DOCS / "results" / "laboratory.md"
DATA = DOCS / "results" / "laboratory.csv"
IMAGES = DOCS / "images" / "laboratory"
PART = re.compile(r"^## (\d+)\. .*\n((?:(?!## ).*\n)*)", re.MULTILINE)  # of the page: a claim's number and its text


def gather(store: Store, words: Sequence[str]) -> list[Tested]:
    """All claims in the order of their numbers, each with the cells that are there."""
    return [_tested(name, table, store, words) for name, table in paper_tables.claim_tables().items()]


def _tested(name: str, source: paper_tables.PaperTable, store: Store, words: Sequence[str]) -> Tested:
    if source.claim is None:
        raise DataError(f"{name} tests no claim", "A file of conf/tables/claims says its claim.")
    cells, empty = (
        ([], report.Sweep(name, ()))
        if source.claim.untestable
        else sweep_plan.cells_of_paper_table(name, words, None, False)
    )
    plans = {cell.name: graph.plan(cell.recipe, store) for cell in cells}

    def look(cell: sweep_plan.SweepCell) -> None:
        missing = [step.name for step in plans[cell.name] if not step.cached and step.name != "report"]
        if missing:
            raise DataError(f"not made yet: {', '.join(missing)}")

    filled = tuple(sweep_plan.fill(cells, store, look, lambda line: None))
    sweep = dataclasses.replace(empty, cells=filled)
    decided = sweep.contrasts if filled else ()
    seconds, settings = sum(_trainings(plans.values()).values()), _settings(source.claim, cells)
    made_by = _made_by(plans.values(), store)
    return Tested(name, source.claim, sweep, decided, seconds, settings, made_by, title=source.title)


def _settings(claim: Claim, cells: Sequence[sweep_plan.SweepCell]) -> str:
    """A digest of what decides a claim's figures: another one says that they are of another experiment."""
    arms = []
    for cell in cells:
        settings = cell.recipe.model_dump(mode="json", exclude={"hardware", "rollout"})
        arms.append([dict(cell.values), cell.after, cell.asked, settings])
    return digest([claims.RULE, [contrast.model_dump(mode="json") for contrast in claim.contrasts], arms])[:12]


def _made_by(plans: Iterable[Sequence[Step]], store: Store) -> str:
    """The commits of the evaluations that are there, and the processors that made them."""
    words = set()
    for steps in plans:
        step = steps[-1]
        if step.cached:
            tags = as_tags(store.manifest(step.kind, step.key).get("made_by", {}))
            commit, apart, changes = tags.get("commit", "?").partition(" ")
            words.add(f"commit {commit[:7]}{apart}{changes}, {tags.get('machine', '?')}")
    return "; ".join(sorted(words))


def with_kept(tested: Sequence[Tested], rows: Sequence[Mapping[str, str]], page_before: str) -> list[Tested]:
    """The same, with what stands in an earlier page and its data of claims of which the store has less.

    Args:
        rows: of the earlier data.
    """
    parts = dict(PART.findall(page_before))
    both = []
    for entry in tested:
        own = [row for row in rows if row["file"] == entry.name and row.get("settings") == entry.settings]
        measured = sum(bool(row["difference"]) for row in own)
        part = parts.get(str(entry.claim.number))
        if part is None or measured <= entry.n_measured or len(own) != len(entry.claim.contrasts):
            both.append(entry)
            continue
        pairs = zip(entry.claim.contrasts, own, strict=True)
        both.append(
            dataclasses.replace(
                entry,
                decided=tuple(_decided(contrast, row) for contrast, row in pairs),
                seconds=60 * float(own[0]["minutes"] or 0),
                made_by=own[0]["made_by"],
                kept=tuple(part.strip().splitlines()),
            )
        )
    return both


def _decided(contrast: Contrast, row: Mapping[str, str]) -> ContrastResult:
    """What a row of the data says of a contrast."""
    difference = None
    if row["difference"]:
        bounds = [float(row[name]) for name in ("difference", "low", "high")]
        difference = Paired(*bounds, math.nan, int(row["questions"]), 0, "bootstrap by database and seed")
    by_seed = tuple(map(float, row["by_seed"].split()))
    could_be_shown = float(row["could_be_shown"]) if row["could_be_shown"] else None
    verdict = next(verdict for verdict in STYLE_OF if verdict == row["verdict"])
    return ContrastResult(contrast, difference, by_seed, int(row["questions"]), verdict, could_be_shown)


def _trainings(plans: Iterable[Sequence[Step]]) -> dict[Path, float]:
    """Processor seconds of each finished training that some cell needs."""
    spent = {}
    for steps in plans:
        for step in steps:
            if step.kind in ("sft", "grpo") and (timing := watch.read_curves(step.folder).timing):
                spent[step.folder] = sum(line["cpu_seconds"] for line in timing)
    return spent


HEAD = """# The laboratory: which claims hold in miniature

Twelve claims of the five papers, each tested by arms that differ in it alone, on three seeds that chose none of the
settings; claims 2, 3 and 9 on six. `python benchmarks/laboratory.py` runs what is missing and writes this page, its
figures, [the contrasts](laboratory.csv) and [the rows](laboratory_rows.csv); `sqltrain sweep claims/NAME` tests one
claim, as `conf/tables/claims/NAME.yaml` states it.

**The rule.** Each seed draws its own world, model and episodes. A difference is taken question by question within a
seed, or step by step for a training curve; its 95 % interval holds the chance of the seeds
([how](../explanation/uncertainty.md)). A claim of "better" **holds** if the interval lies on its side of 0. It **does
not hold** if the interval lies on the other side, or below the smallest difference that its file calls relevant. Else
it **cannot be told**. A claim of "no worse" holds if the interval lies above minus its margin, and does not hold if
the whole interval lies below 0. A claim of several contrasts holds if all do, and does not hold if one does not.
"Could be shown" is the smallest true difference that such a test would detect in about 80 % of cases.

**Changed after a first look**: the second contrast of claim 2, whose policies were first asked in different ways; some
text under verdicts; Student's t, without which claim 9 did not hold on its first three seeds; seeds 7 to 9 of claims
2, 3 and 9.

**Which code.** Each table names its commit, all with uncommitted changes; [the contrasts](laboratory.csv) name the
machine. Seed 4 of claims 1 ("SFT, then RL") and 12, made again from nothing by later code, is the same to the byte.

**Scope.** One million parameters, thirty or forty steps of GRPO: a claim that fails here may hold at the papers' scale.
"""


FOREST = "claims.svg"
CAPTION = (
    "Differences in units of the smallest that could be shown; to the right of 0 they agree with the claim. The short "
    'vertical bar marks the margin of a claim of "no worse".'
)


def is_measured(tested: Sequence[Tested]) -> bool:
    """Whether there is any figure to show."""
    return any(entry.n_measured for entry in tested)


def page(tested: Sequence[Tested]) -> str:
    """The whole page as Markdown."""
    counts = {word: sum(entry.verdict == word for entry in tested) for word in STYLE_OF}
    summary = "; ".join(f"{word}: {count}" for word, count in counts.items() if count)
    lines = [HEAD, f"**In all**: {summary}.", ""]
    if is_measured(tested):
        lines += [f"![Each contrast of each claim with its interval](../images/laboratory/{FOREST})", "", CAPTION, ""]
    lines += ["| claim | verdict | training, processor minutes |", "|---|---|---:|"]
    lines += [f"| {entry.claim.number}. {entry.claim.text} | {entry.verdict} | {_minutes(entry)} |" for entry in tested]
    for entry in tested:
        lines += ["", *_section(entry)]
    return "\n".join(lines) + "\n"


def _minutes(entry: Tested) -> str:
    return f"{entry.seconds / 60:.1f}" if entry.seconds and entry.verdict != "not measured" else "–"


def _section(entry: Tested) -> Iterator[str]:
    claim = entry.claim
    yield f"## {claim.number}. {entry.title[0].upper()}{entry.title[1:]}"
    yield ""
    if entry.kept:
        yield from entry.kept
        return
    yield f"{claim.source}; `{entry.name}`."
    yield ""
    if claim.untestable:
        yield f"**Cannot be told.** {claim.untestable}"
        return
    yield f"**{entry.verdict.capitalize()}.**" + (f" {claim.reading}" if entry.verdict != "not measured" else "")
    yield ""
    yield from _body(formats.markdown(report.verdict_table(entry.sweep)))
    if entry.verdict == "not measured":
        yield ""
        yield f"Expected: {claim.seconds / 60:.0f} minutes of one core, beside the runs of other files that it uses."
        return
    yield ""
    yield f"{_commits(entry.made_by)}."
    if figure(entry) is not None:
        yield ""
        yield f"![The rows of claim {claim.number}](../images/laboratory/{entry.short}.svg)"


def _commits(made_by: str) -> str:
    """The commits of a claim's evaluations; the data has the machines too."""
    commits = [maker.partition(",")[0].removeprefix("commit ") for maker in made_by.split("; ")]
    return f"Commit {', '.join(commits)}"


def _body(markdown: str) -> list[str]:
    """A table's rows, without its title and its note."""
    return [line for line in markdown.splitlines() if line.startswith("|")]


COLUMNS = (
    *("claim", "file", "contrast", "row", "over", "measure", "unit", "difference", "low", "high", "by_seed"),
    *("questions", "could_be_shown", "margin", "matters", "verdict", "verdict_of_claim"),
    *("minutes", "settings", "made_by"),
)


ROW_COLUMNS = ("claim", "row", "column", "value")


def data(tested: Sequence[Tested]) -> str:
    """A row a contrast, raw values; those of a claim that is not measured are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry in tested:
        writer.writerows(_values(entry, part) for part in entry.decided)
    return out.getvalue()


def arm_rows(tested: Sequence[Tested], before: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Every cell of the arms' tables as a row; a claim that is kept keeps its rows of the earlier data."""
    found: list[dict[str, str]] = []
    for entry in tested:
        number = str(entry.claim.number)
        if entry.kept:
            found += [dict(row) for row in before if row["claim"] == number]
        elif entry.n_measured:
            found += _long_rows(number, _body(formats.markdown(report.table(entry.sweep))))
    return found


def _long_rows(number: str, lines: Sequence[str]) -> Iterator[dict[str, str]]:
    columns, _, *rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    for cells in rows:
        for column, value in zip(columns[1:], cells[1:], strict=True):
            yield dict(zip(ROW_COLUMNS, (number, cells[0], column, value), strict=True))


def _values(entry: Tested, part: ContrastResult) -> list[str | float | None]:
    contrast, difference = part.contrast, part.difference
    figures: list[float | None] = [None] * 3
    if difference is not None:
        figures = [difference.difference, difference.low, difference.high]
    return [
        *(
            entry.claim.number,
            entry.name,
            contrast.says,
            contrast.row,
            contrast.over,
            report.contrast_measure(contrast),
        ),
        *("share" if contrast.unit < 1 else "count", *figures, " ".join(f"{value:.6f}" for value in part.by_seed)),
        *(part.questions, part.detectable, contrast.margin, contrast.matters, part.verdict, entry.verdict),
        *(f"{entry.seconds / 60:.1f}", entry.settings, entry.made_by),
    ]


def main(store: Path, words: Sequence[str]) -> None:
    """Write page, figures and data."""
    rows_file = DATA.with_name("laboratory_rows.csv")
    page_before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    tested = with_kept(gather(Store(store), words), _read_rows(DATA), page_before)
    IMAGES.mkdir(parents=True, exist_ok=True)
    if is_measured(tested):
        (IMAGES / FOREST).write_text(standalone(forest(tested)), encoding="utf-8")
    for entry in tested:
        drawing = figure(entry)
        if drawing is not None:
            (IMAGES / f"{entry.short}.svg").write_text(standalone(drawing), encoding="utf-8")
    arms = arm_rows(tested, _read_rows(rows_file))
    DATA.write_text(data(tested), encoding="utf-8")
    with rows_file.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, ROW_COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(arms)
    PAGE.write_text(page(tested), encoding="utf-8")


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.is_file():
        return []
    return list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except SqltrainError as error:
        raise SystemExit(str(error)) from None
