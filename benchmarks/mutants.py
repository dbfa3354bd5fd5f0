"""Single-line faults in advantages, losses, credit, packing, curation, statistics and protocols: which no test sees.

    python benchmarks/mutants.py [--only WORD] [--check]

A fault is a piece of code that stands once under pipelines/, in whatever file, and what it becomes. Each is put into a
copy of the working tree, where the tests named with it run (by the name of their file under tests/, in whatever folder)
as a default test run would; a fault that fails none is printed. `--check` only looks whether each piece is still there.
A fault that changes no result is in EQUIVALENT, with the reason.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds; a fault that makes its tests loop is seen
FAULTS: dict[str, list[tuple[str, str]]] = {  # names of test files: (code, faulty code)
    "credit": [
        ("EPS = 1e-4  # TRL's", "EPS = 1e-2  # TRL's"),
        ('rewards.nanmean() if baseline == "batch"', 'rewards.nanmean() if baseline != "group"'),
        ("centred = grouped - mean\n", "centred = grouped + mean\n"),
        ('if baseline == "others":  # r -', 'if baseline == "none":  # r -'),
        ("centred * count / (count - 1).clamp(min=1)", "centred * (count - 1) / count"),
        ('_deviation(grouped if scale == "group" else', '_deviation(grouped if scale != "group" else'),
        ("centred / (spread.unsqueeze(1) + EPS)", "centred / (spread.unsqueeze(1))"),
        ("where(useful(rewards, group, baseline), 0.0)", "where(~rewards.isnan(), 0.0)"),
        (".flip(1).cumsum(1).flip(1)", ".cumsum(1)"),
        ("(there.sum(dim=1, keepdim=True) - 1).clamp(min=0)", "there.sum(dim=1, keepdim=True).clamp(min=0)"),
        ("others = counts.sum(dim=1, keepdim=True) - 1", "others = counts.sum(dim=1, keepdim=True)"),
        ("earned - (earned.sum(dim=1, keepdim=True) - earned)", "earned - (earned.sum(dim=1, keepdim=True))"),
        ("centred * (others > 0)", "centred * (others >= 0)"),
        ("there & (centred.abs() > SAME)", "there"),
        ("_deviation(rewards.view(-1, group)) <= SAME", "_deviation(rewards.view(-1, group)) < 0"),
        ("(there.sum(dim=1) - 1).clamp(min=1)).sqrt()", "there.sum(dim=1).clamp(min=1)).sqrt()"),
        ("return ~rewards.isnan() & ~alike", "return ~alike"),
        ("bisect_right(ends, place)", "bisect_left(ends, place)"),
        ("values[turn] if turn < paid_turns else 0.0", "values[turn] if turn <= paid_turns else 0.0"),
        ("min(len(ends), len(values))", "len(ends)"),
    ],
    "loss": [
        ("log_ratio = logps - old\n", "log_ratio = old - logps\n"),
        ("/ mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)", ").unsqueeze(-1)"),
        ("ratio.clamp(max=1 + clip_high).detach()", "ratio.clamp(max=1 + clip_high)"),
        ("-torch.min(ratio * advantages, ratio.clamp", "-torch.max(ratio * advantages, ratio.clamp"),
        ("ratio.clamp(1 - clip_low, 1 + clip_high)", "ratio.clamp(1 - clip_low, 1 + clip_low)"),
        ("(items.clamp(min=1.0) / share)", "items.clamp(min=1.0)"),
        (".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean() / parts", ".sum(-1) / mask.sum(-1).clamp(min=1.0)).mean()"),
        ("/ mask.sum().clamp(min=1.0) / parts", "/ mask.sum().clamp(min=1.0)"),
        ("/ (losses.size(0) * longest) / parts", "/ mask.sum() / parts"),
        ("gap = ((old - sampled) * mask)", "gap = ((sampled - old) * mask)"),
        ("whole.expand_as(gap)).exp().clamp(max=cap)", "whole.expand_as(gap)).exp()"),
        ("(mean >= bounds[0]) & (mean <= bounds[1])", "(mean >= bounds[0]) | (mean <= bounds[1])"),
        ("parts += [parts[0][:0]] * (count - len(parts))", "pass"),
        (' and not kwargs.get("compute_aux_loss")', ""),
        ("rows[current.rows] if current.rows.any() else rows[:1]", "rows[current.rows]"),
        (' * inputs.get("tool_mask", 1)\n    moves =', "\n    moves ="),
        ("moves | _paid(inputs", "moves & _paid(inputs"),
        ("if tokens > most and place > starts[-1]", "if tokens >= most and place > starts[-1]"),
        ("tokens += length - 1 - max(0, common - 1)", "tokens += length - max(0, common - 1)"),
    ],
    "packing": [
        ("first, end = (shared - 1).clamp(min=0), lengths - 1", "first, end = shared.clamp(min=0), lengths - 1"),
        (
            "& (at < end.unsqueeze(1))",
            "& (at <= end.unsqueeze(1))",
        ),
        ("seen = index.gather(0, _last_row(", "seen = index.roll(1, 1).gather(0, _last_row("),
        ("scored = index.roll(1, 1).gather(", "scored = index.gather("),
        ("labels[places[there]] = input_ids", "labels[places[there] - 1] = input_ids"),
        ("labels[None], places[order.argsort()]", "labels[None], places[order]"),
        ("(key_at <= at.unsqueeze(2))", "(key_at < at.unsqueeze(2))"),
        ("masks.append(None if len(steps) == len(key_at) else", "masks.append(None if len(steps) >= 0 else"),
        ("& inside[1:] & inside[:-1]", "& inside[1:]"),
        ('whole = set(kinds) == {"full_attention"}', 'whole = "full_attention" in set(kinds)'),
    ],
    "leakage filtering difficulty": [
        ('if others and kind != "sql":', "if others:"),
        ('if kind == "sql" and database not in asked:', 'if kind == "sql":'),
        ('rows = rows.sort("sample", "row").filter(', "rows = rows.filter("),
        ('.over("signature") < settings.per_plan', '.over("signature") <= settings.per_plan'),
        ('.over("example_id") < settings.per_example', '.over("example_id") <= settings.per_example'),
        ('late = ~rows["hardness"]', 'late = rows["hardness"]'),
        ("outcome.correct and not outcome.broken,", "outcome.correct,"),
        ("if trajectory.stop is StopReason.BROKEN or outcome.broken:", "if outcome.broken:"),
        ("self.pass_rate if 0 < self.right < self.samples else", "self.pass_rate if self.right < self.samples else"),
        ('pool = ranked.filter(pl.col("score") < 1.0)', 'pool = ranked.filter(pl.col("score") <= 1.0)'),
        ('pl.col("samples") < settings.max_pass', 'pl.col("samples") <= settings.max_pass'),
        ("place = min(max(place, 1), group - 1)", "place = max(place, 1)"),
    ],
    "metrics": [
        ('return f"number:{cell:.10g}"', 'return f"number:{cell:.6g}"'),
        ("sizes.count(len(best)) > 1", "sizes.count(len(best)) >= 1"),
        ("best = max(groups.values(), key=len)", "best = max(reversed(groups.values()), key=len)"),
        ('sorted(set(rows) if form == "set" else rows)', "sorted(set(rows))"),
        ("if not candidate.empty] or voters", "if not candidate.empty]"),
        ('"database" if self.n_clusters >= MIN_CLUSTERS', '"database" if self.n_clusters > MIN_CLUSTERS'),
        ("by_database = len(groups) >= MIN_CLUSTERS", "by_database = len(groups) > MIN_CLUSTERS"),
        ("elif len(groups) < MIN_CLUSTERS:", "elif len(groups) <= MIN_CLUSTERS:"),
        ("else (extreme + 1) / (FLIPS + 1)", "else extreme / FLIPS"),
        ("range(min(gained, lost) + 1)", "range(min(gained, lost))"),
        ("NormalDist().inv_cdf(1 - ALPHA / 2)", "NormalDist().inv_cdf(1 - ALPHA)"),
        ("discordant - difference**2", "discordant - difference"),
        ("1.0 - math.comb(n - correct, k)", "1.0 - math.comb(n - correct, k - 1)"),
        (
            "average = [math.fsum(record.score(equality) for record in members[:k])",
            "average = [math.fsum(record.score(equality) for record in members)",
        ),
        ("ordered[math.ceil(0.95 * n) - 1]", "ordered[math.ceil(0.95 * n) - 2]"),
    ],
    "observations react rollout_engine": [
        ("        spent += len(line) + 1\n", "        spent += len(line)\n"),
        ("shown = text if len(text) <= limit else text[:limit] + CUT", "shown = text[:limit] + CUT"),
        ("if shown < len(result.rows):", "if shown <= len(result.rows):"),
        ('defuse(shown).replace("|", "\\\\|")', "defuse(shown)"),
        ('text.rfind(f"<{THINK}>") > text', 'text.rfind(f"<{THINK}>") >= text'),
        ("if found.error or len(actions) != 1:", "if found.error or not actions:"),
        ("error = error or (fault if self.strict else None)", "error = error or fault"),
        ("if kept is None or kept[:2] != (example, schema):", "if kept is None:"),
    ],
    "outcome terms rubric": [
        ("by_track[term.track] += term.weight * by_term", "by_track[term.track] += by_term"),
        ("return float(outcome.correct and finished < outcome.max_turns)", "return float(outcome.correct)"),
        ("return len(ours & other) / union if union else 0.0", "return len(ours & other) / union if union else 1.0"),
        ("in verdict.undecided or trajectory.stop is StopReason.BROKEN\n", "in verdict.undecided\n"),
        ('analysis.parse_queries(whole, predicted="schema" in reads)', "analysis.parse_queries(whole)"),
        (
            "in kept.items() if schema == of[query[0]]",
            "in kept.items()",
        ),
        ("return value if outcome.correct else -value", "return value if outcome.correct else value"),
    ],
}
EQUIVALENT = {  # code: why its fault changes no result
    "outcome.correct and not outcome.broken,": "a broken outcome's verdict scores 0, so it is not correct",
}


def place_of(root: Path, code: str) -> Path:
    """The one file under pipelines/ that holds a piece of code once."""
    counts = {path: path.read_text(encoding="utf-8").count(code) for path in (root / "pipelines").rglob("*.py")}
    if sum(counts.values()) != 1:
        sys.exit(f"{code!r} stands {sum(counts.values())} times under pipelines/: name another piece")
    return max(counts, key=counts.__getitem__)


def seen(root: Path, tests: list[str]) -> bool:
    """Whether some of these tests fails in a copy of the tree."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        return bool(subprocess.run(command, cwd=root, env=environment, capture_output=True, timeout=TIMEOUT).returncode)
    except subprocess.TimeoutExpired:
        return True


def survivors(root: Path, only: str) -> Iterator[str]:
    """The faults that no test sees, as lines."""
    for names, faults in FAULTS.items():
        chosen = [(code, faulty) for code, faulty in faults if only in f"{names} {code}" and code not in EQUIVALENT]
        tests = [str(path) for name in names.split() for path in sorted((root / "tests").rglob(f"test_{name}.py"))]
        if chosen and seen(root, tests):
            sys.exit(f"the tests {names} fail without a fault")
        for code, faulty in chosen:
            path = place_of(root, code)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(code, faulty), encoding="utf-8")
            if not seen(root, tests):
                yield f"{path.relative_to(root)}: {code.strip()!r} -> {faulty.strip()!r}"
            path.write_text(text, encoding="utf-8")


def main() -> None:
    """Print the survivors; the exit code is 1 where there are some."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="faults whose code or tests hold this word")
    parser.add_argument("--check", action="store_true", help="look for each piece of code, and run nothing")
    options = parser.parse_args()
    pieces = [code for faults in FAULTS.values() for code, _ in faults]
    for code in pieces:
        place_of(ROOT, code)
    print(f"{len(pieces)} faults")
    if options.check:
        return
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory() as name:
        for file in filter(None, listed.split("\0")):
            if (ROOT / file).is_file():
                (Path(name) / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, Path(name) / file)
        left = 0
        for line in survivors(Path(name), options.only):
            left += 1
            print(line, flush=True)
    print(f"{left} survive")
    sys.exit(int(left > 0))


if __name__ == "__main__":
    main()
