"""Writes docs/laboratory.md, its figures and docs/laboratory.csv from the sweeps of a store.

    python docs/build_laboratory.py STORE [seed=7..9]

Nothing is made here: an arm that the store lacks is not measured yet, and the page says so. The claims take hours, so
they may be measured a few at a time, each in a store of its own: a claim of which the page shows more than the store
has is kept as it stands, with the commit that measured it, as long as its file and its recipes say what they said then.
"""

from __future__ import annotations

import csv
import dataclasses
import io
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from flows import sweeping
from pipelines import paper_tables
from pipelines.errors import DataError, SqltrainError
from pipelines.evaluation import claims, measures
from pipelines.evaluation.claims import Claim, Contrast, Decided, Verdict
from pipelines.evaluation.stats import Estimate, Paired
from pipelines.provenance import as_tags
from pipelines.recipes import digest
from pipelines.report import formats
from pipelines.report import sweep as report
from pipelines.report.page import charts, sweep_page
from pipelines.report.page.html import Html, tag
from pipelines.report.page.svg import Frame, Scale, around, axis_x, canvas, marker, text
from pipelines.stages import graph
from pipelines.store import Store
from pipelines.types import read_lines

DOCS = Path(__file__).resolve().parent
PAGE, DATA, IMAGES = DOCS / "laboratory.md", DOCS / "laboratory.csv", DOCS / "images" / "laboratory"
ASSETS = Path(sweep_page.__file__).parent / "assets"
PART = re.compile(r"^## (\d+)\. .*\n((?:(?!## ).*\n)*)", re.MULTILINE)  # of the page: a claim's number and its text
RULES = re.compile(r"[^{}]+\{[^{}]*\}")
DRAWN = (
    ":root",
    *(f".s{place} " for place in range(6)),
    ".chart",
    ".grid",
    ".axis",
    ".mark",
    ".whisker",
    ".line",
    ".band",
)
STYLE_OF: dict[Verdict, int] = {"holds": 3, "does not hold": 2, "cannot be told": 0, "not measured": 0}
SHOWN_CURVES = 3


@dataclasses.dataclass(frozen=True)
class Tested:
    """A claim with what the store has of it.

    Attributes:
        name: of its file.
        seconds: of processor time that its trainings took, those that it shares with other claims included.
        settings: a digest of its contrasts and its cells' recipes.
        made_by: the commits and the processors that its figures are of.
        kept: the lines of its part of the page, where they are kept from an earlier run; else ().
    """

    name: str
    claim: Claim
    sweep: report.Sweep
    decided: tuple[Decided, ...]
    seconds: float
    settings: str
    made_by: str
    kept: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """Its name without its folder."""
        return self.name.rpartition("/")[2]

    @property
    def n_measured(self) -> int:
        """Contrasts that have figures."""
        return sum(part.difference is not None for part in self.decided)

    @property
    def verdict(self) -> Verdict:
        """On the whole claim."""
        return "cannot be told" if self.claim.untold else claims.together([part.verdict for part in self.decided])


def gather(store: Store, words: Sequence[str]) -> list[Tested]:
    """All claims in the order of their numbers, each with the cells that are there."""
    return [_tested(name, table, store, words) for name, table in paper_tables.claims().items()]


def _tested(name: str, source: paper_tables.PaperTable, store: Store, words: Sequence[str]) -> Tested:
    if source.claim is None:
        raise DataError(f"{name} tests no claim", "A file of conf/tables/claims says its claim.")
    cells, empty = ([], report.Sweep(name, ())) if source.claim.untold else sweeping.of_paper(name, words, None, False)
    plans = {cell.name: graph.plan(cell.recipe, store) for cell in cells}

    def look(cell: sweeping.Cell) -> None:
        missing = [step.name for step in plans[cell.name] if not step.cached and step.name != "report"]
        if missing:
            raise DataError(f"not made yet: {', '.join(missing)}")

    filled = tuple(sweeping.fill(cells, store, look, lambda line: None))
    sweep = dataclasses.replace(empty, cells=filled)
    decided = tuple(report.decided(sweep)) if filled else ()
    seconds, settings = sum(_trainings(plans.values()).values()), _settings(source.claim, cells)
    return Tested(name, source.claim, sweep, decided, seconds, settings, _made_by(plans.values(), store))


def _settings(claim: Claim, cells: Sequence[sweeping.Cell]) -> str:
    """A digest of what decides a claim's figures: another one says that they are of another experiment."""
    arms = []
    for cell in cells:
        settings = cell.recipe.model_dump(mode="json", exclude={"hardware", "rollout"})
        arms.append([dict(cell.values), cell.after, cell.asked, settings])
    return digest([[contrast.model_dump(mode="json") for contrast in claim.contrasts], arms])[:12]


def _made_by(plans: Iterable[Sequence[graph.Step]], store: Store) -> str:
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


def _decided(contrast: Contrast, row: Mapping[str, str]) -> Decided:
    """What a row of the data says of a contrast."""
    difference = None
    if row["difference"]:
        figures = [float(row[name]) for name in ("difference", "low", "high", "p")]
        difference = Paired(*figures, n=int(row["questions"]), n_clusters=0, method="bootstrap by database and seed")
    by_seed = tuple(map(float, row["by_seed"].split()))
    could_be_shown = float(row["could_be_shown"]) if row["could_be_shown"] else None
    verdict = next(verdict for verdict in STYLE_OF if verdict == row["verdict"])
    return Decided(contrast, difference, by_seed, int(row["questions"]), verdict, could_be_shown)


def _trainings(plans: Iterable[Sequence[graph.Step]]) -> dict[Path, float]:
    """Processor seconds of each finished training that some cell needs."""
    spent = {}
    for steps in plans:
        for step in steps:
            timing = step.folder / "timing.jsonl"
            if step.kind in ("sft", "grpo") and timing.is_file():
                spent[step.folder] = sum(line["cpu_seconds"] for _, line in read_lines(timing))
    return spent


HEAD = """# The laboratory: which of the papers' claims hold in miniature?

The five papers make twelve claims that one thing is better than another. Each claim that this world can test is tested
by arms (runs) that differ in one setting, on three seeds that chose none of the settings. `python
benchmarks/laboratory.py` runs what is missing and writes this page, its figures and [laboratory.csv](laboratory.csv); a
claim by itself: `sqltrain sweep claims/NAME`. What must come out for a claim to hold is in
`conf/tables/claims/NAME.yaml`. Its contrasts, margins and smallest differences were written before anything was run;
what the page says under a verdict was partly written afterwards.

**The rule.** Each seed draws its own world, model and episodes. A difference is taken question by question within a
seed, or step by step for a training curve; its 95 % interval redraws databases and seeds, each for itself
(`pipelines/evaluation/seeds.py`). With three seeds such an interval reaches about from the lowest seed to the highest,
so a claim can hold only where the seeds agree. A claim of "better" **holds** where the interval lies on its side of 0;
it **does not hold** where the interval lies on the other side, or below the smallest difference that its file says
would matter; else it **cannot be told**. A claim of "no worse" holds where the interval lies above minus the margin
that its file states; it does not hold where the whole interval lies below 0; else it cannot be told. A claim of several
contrasts holds if all do, and does not hold if one does not. "Could be shown" is the smallest true difference that a
test with an interval of this width would detect in 80 % of cases (`pipelines/evaluation/claims.py`).

**What a reader may conclude.** A model of one million parameters, a generated world of a few hundred words, thirty or
forty steps of GRPO where the papers take hundreds: a claim that holds here does so without the papers' scale, and one
that does not hold here may hold there. What is under each claim says more.
"""


FOREST = "claims.svg"
CAPTION = (
    "Each difference in the direction of its claim, in units of the smallest difference that could be shown. A point "
    'to the right of 0 agrees with the claim. The short vertical bar marks the margin of a claim of "no worse".'
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
        lines += [f"![Each contrast of each claim with its interval](images/laboratory/{FOREST})", "", CAPTION, ""]
    lines += ["| claim | verdict | training, processor minutes |", "|---|---|---:|"]
    lines += [f"| {entry.claim.number}. {entry.claim.text} | {entry.verdict} | {_minutes(entry)} |" for entry in tested]
    for entry in tested:
        lines += ["", *_section(entry)]
    return "\n".join(lines) + "\n"


def _minutes(entry: Tested) -> str:
    return f"{entry.seconds / 60:.1f}" if entry.seconds and entry.verdict != "not measured" else "–"


def _section(entry: Tested) -> Iterator[str]:
    claim = entry.claim
    yield f"## {claim.number}. {claim.text}"
    yield ""
    if entry.kept:
        yield from entry.kept
        return
    yield f"{claim.source}. `sqltrain sweep {entry.name}`"
    yield ""
    if claim.untold:
        yield f"**Cannot be told.** {claim.untold}"
        return
    yield f"**{entry.verdict.capitalize()}.**" + (f" {claim.reading}" if entry.verdict != "not measured" else "")
    yield ""
    yield from _body(formats.markdown(report.verdicts(entry.sweep)))
    if entry.verdict == "not measured":
        yield ""
        yield f"Expected: {claim.seconds / 60:.0f} minutes of one core, beside the runs of other files that it uses."
        return
    yield ""
    yield f"Made by {entry.made_by}."
    yield ""
    yield from _body(formats.markdown(report.table(entry.sweep)))
    if figure(entry) is not None:
        yield ""
        yield f"![The rows of claim {claim.number}](images/laboratory/{entry.short}.svg)"


def _body(markdown: str) -> list[str]:
    """A table's rows, without its title and its note."""
    return [line for line in markdown.splitlines() if line.startswith("|")]


def standalone(drawing: Html) -> str:
    """A chart as a file of its own: with the page's colours, light or dark as the reader's system is."""
    sheets = [(ASSETS / name).read_text(encoding="utf-8") for name in sweep_page.STYLES]
    plain = re.sub(r"/\*.*?\*/", "", "\n".join(sheets), flags=re.DOTALL)
    rules = [rule.strip() for rule in RULES.findall(plain) if rule.strip().startswith(DRAWN)]
    style = f"<style>{' '.join(' '.join(rules).split())}</style>"
    opening, closing, rest = drawing.partition(">")
    return opening.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1) + closing + style + rest + "\n"


def forest(tested: Sequence[Tested]) -> Html:
    """Every contrast that was measured, in units of what it could have shown."""
    rows = [(entry, part, part.difference) for entry in tested for part in entry.decided if part.difference is not None]
    pitch, left, right, width = 24.0, 430.0, 830.0, 1072.0
    frame = Frame(left, 8, right, 8 + pitch * len(rows))
    across = Scale(-3, 3, left, right)
    grid = {mark: "grid" if mark else "axis" for mark in range(-3, 4)}
    parts: list[Html] = [
        tag("line", x1=across(mark), x2=across(mark), y1=frame.top, y2=frame.bottom, class_=style)
        for mark, style in grid.items()
    ]
    for number, (entry, part, difference) in enumerate(rows):
        parts.append(_drawn(entry, part, difference, across, frame.top + pitch * (number + 0.5)))
    parts.append(
        axis_x(across, frame, list(range(-3, 4)), lambda mark: f"{mark:g}", "times the smallest that could be shown")
    )
    label = "; ".join(f"claim {entry.claim.number}, {part.contrast.says}: {part.verdict}" for entry, part, _ in rows)
    return canvas(width, frame.bottom + 40, label, parts)


def _drawn(entry: Tested, part: Decided, difference: Paired, across: Scale, y: float) -> Html:
    contrast, scale = part.contrast, part.detectable or 1.0
    sign = -1 if contrast.less else 1
    ends = [
        max(-3.0, min(3.0, sign * value / scale)) for value in (difference.low, difference.difference, difference.high)
    ]
    style, margin = STYLE_OF[part.verdict], (contrast.margin or 0) * contrast.unit
    bar = across(max(-3.0, -margin / scale))
    return tag(
        "g",
        text(0, y + 4, f"{entry.claim.number}  {contrast.says}", "row-note"),
        tag("line", x1=bar, x2=bar, y1=y - 8, y2=y + 8, class_="axis") if margin else None,
        tag("line", x1=across(ends[0]), x2=across(ends[2]), y1=y, y2=y, class_=f"whisker s{style}"),
        marker(across(ends[1]), y, style),
        text(across.end + 14, y + 4, formats.signed(difference, contrast.unit), "bounds"),
        text(1072, y + 4, part.verdict, "row-note", "end"),
    )


def chosen(entry: Tested) -> dict[str, list[report.Line]]:
    """The curves that a claim's file names, as far as its rows have them."""
    drawn = report.curves(entry.sweep)
    return {name: drawn[name] for name in entry.sweep.curves[:SHOWN_CURVES] if name in drawn}


def figure(entry: Tested) -> Html | None:
    """A claim's figure: pass@k over k where it is about that, else its curves, else its rows; None of nothing made."""
    if entry.claim.untold or entry.kept or entry.verdict == "not measured":
        return None
    names = [row.name for row in entry.sweep.rows()]
    drawn = chosen(entry)
    if drawn and any(name.startswith("pass@") for name in entry.sweep.measures):
        drawings = [over_k(entry)]
        shown = names
    elif drawn:
        drawings = [_titled(name, sweep_page.chart(lines, name, names)) for name, lines in drawn.items()]
        shown = [name for name in names if any(line.row == name for lines in drawn.values() for line in lines)]
    else:
        share = sweep_page.first_share(entry.sweep)
        return sweep_page.rows_chart(entry.sweep, share) if share is not None else None
    legend, width = _legend(names, shown)
    placed = [tag("g", drawing, transform=f"translate({number * 520} 28)") for number, drawing in enumerate(drawings)]
    label = f"claim {entry.claim.number}, {entry.claim.text}: {', '.join(shown)}"
    return canvas(max(520.0 * len(drawings), width), 300, label, legend, placed)


def _titled(name: str, chart: Html) -> Html:
    return tag("g", text(44, 12, name.replace("_", " "), "row-note"), tag("g", chart, transform="translate(0 14)"))


def _legend(names: Sequence[str], shown: Sequence[str]) -> tuple[Html, float]:
    """The rows with their colours, and how wide that is."""
    parts: list[Html] = []
    at = 0.0
    for place, name in enumerate(names):
        if name in shown:
            line = tag("line", x1=at, x2=at + 22, y1=10, y2=10, class_=sweep_page.line_class(place))
            parts += [line, text(at + 28, 14, name, "row-note")]
            at += 60 + 6.4 * len(name)
    return tag("g", parts), at


def over_k(entry: Tested) -> Html:
    """pass@k of each row against k, over all seeds."""
    wanted = [measures.measure(name) for name in entry.sweep.measures if name.startswith("pass@")]
    series = []
    for place, row in enumerate(entry.sweep.rows()):
        estimates = [(int(of.name.partition("@")[2]), report.figure(row, of)) for of in wanted]
        points = [
            charts.Point(k, part.value, part.low, part.high) for k, part in estimates if isinstance(part, Estimate)
        ]
        series.append(charts.Series(place, row.name, tuple(points)))
    bounds = [
        bound for line in series for point in line.points for bound in (point.low, point.high) if bound is not None
    ]
    return charts.curve_over_k([line for line in series if line.points], "pass@k by k", *around(bounds))


COLUMNS = (
    *("claim", "file", "contrast", "row", "over", "measure", "unit", "difference", "low", "high", "p", "by_seed"),
    *("questions", "could_be_shown", "margin", "matters", "verdict", "verdict_of_claim"),
    *("minutes", "settings", "made_by"),
)


def data(tested: Sequence[Tested]) -> str:
    """A row a contrast, raw values; those of a claim that is not measured are empty."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for entry in tested:
        writer.writerows(_values(entry, part) for part in entry.decided)
    return out.getvalue()


def _values(entry: Tested, part: Decided) -> list[str | float | None]:
    contrast, difference = part.contrast, part.difference
    figures: list[float | None] = [None] * 4
    if difference is not None:
        figures = [difference.difference, difference.low, difference.high, difference.p_permutation]
    return [
        *(entry.claim.number, entry.name, contrast.says, contrast.row, contrast.over, report.measured(contrast)),
        *("share" if contrast.unit < 1 else "count", *figures, " ".join(f"{value:.6f}" for value in part.by_seed)),
        *(part.questions, part.detectable, contrast.margin, contrast.matters, part.verdict, entry.verdict),
        *(f"{entry.seconds / 60:.1f}", entry.settings, entry.made_by),
    ]


def main(store: Path, words: Sequence[str]) -> None:
    """Write page, figures and data."""
    before = list(csv.DictReader(DATA.read_text(encoding="utf-8").splitlines())) if DATA.is_file() else []
    page_before = PAGE.read_text(encoding="utf-8") if PAGE.is_file() else ""
    tested = with_kept(gather(Store(store), words), before, page_before)
    IMAGES.mkdir(parents=True, exist_ok=True)
    if is_measured(tested):
        (IMAGES / FOREST).write_text(standalone(forest(tested)), encoding="utf-8")
    for entry in tested:
        drawing = figure(entry)
        if drawing is not None:
            (IMAGES / f"{entry.short}.svg").write_text(standalone(drawing), encoding="utf-8")
    DATA.write_text(data(tested), encoding="utf-8")
    PAGE.write_text(page(tested), encoding="utf-8")


if __name__ == "__main__":
    try:
        main(Path(sys.argv[1]), sys.argv[2:])
    except SqltrainError as error:
        raise SystemExit(str(error)) from None
