"""Single-line faults in what decides a figure, from a reward to a champion: those that no test sees, and a table.

    python benchmarks/mutants.py [--only WORD] [--check]

A fault is a piece of code that stands once under pipelines/, in whatever file, and what it becomes. Each is put into a
copy of the working tree, where the tests named with it run: by the name of their file under tests/, in whatever folder,
with the folder in front or a test of it behind (`nightly/ledger`, `answers::test_x`),
as a default test run would; a fault that fails none is printed. `--check` only looks whether each piece is still there.
A fault that changes no result is in EQUIVALENT, with the reason.

The tests run in forks of this process, which has imported their libraries: some seconds a fault in place of twenty.
"""

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds; a fault that makes its tests loop is seen
REWRITE = "ignore::pytest.PytestAssertRewriteWarning"  # of a plug-in that a library has imported
LIBRARIES = ("torch", "transformers", "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "peft")  # of training
FAULTS: dict[str, list[tuple[str, str]]] = {  # names of test files: (code, faulty code)
    "credit": [
        ("EPS = 1e-4  # TRL's", "EPS = 1e-2  # TRL's"),
        ('rewards.nanmean() if baseline == "batch"', 'rewards.nanmean() if baseline != "group"'),
        ("centred = grouped - mean\n", "centred = grouped + mean\n"),
        ('if baseline == "others":  # r -', 'if baseline == "none":  # r -'),
        ("centred * count / (count - 1).clamp(min=1)", "centred * (count - 1) / count"),
        ('_deviation(grouped if scale == "group" else', '_deviation(grouped if scale != "group" else'),
        ("centred / (spread.unsqueeze(1) + EPS)", "centred / (spread.unsqueeze(1))"),
        ("where(has_signal(rewards, group, baseline), 0.0)", "where(~rewards.isnan(), 0.0)"),
        (".flip(1).cumsum(1).flip(1)", ".cumsum(1)"),
        ("(is_paid.sum(dim=1, keepdim=True) - 1).clamp(min=0)", "is_paid.sum(dim=1, keepdim=True).clamp(min=0)"),
        ("others = takes_part.sum(dim=1, keepdim=True) - 1", "others = takes_part.sum(dim=1, keepdim=True)"),
        ("baseline = (earned.sum(dim=1, keepdim=True) - earned)", "baseline = earned.sum(dim=1, keepdim=True)"),
        ("(earned - baseline) * (others > 0)", "(earned - baseline) * (others >= 0)"),
        ("is_paid & (centred.abs() > SAME)", "is_paid"),
        ("_deviation(rewards.view(-1, group)) <= SAME", "_deviation(rewards.view(-1, group)) < 0"),
        ("/ (count - 1).clamp(min=1)).sqrt()", "/ count.clamp(min=1)).sqrt()"),
        ("return ~rewards.isnan() & ~is_equal", "return ~is_equal"),
        ("bisect_right(ends, place)", "bisect_left(ends, place)"),
        ("values[turn] if turn < paid_turns else 0.0", "values[turn] if turn <= paid_turns else 0.0"),
        ("min(len(ends), len(values))", "len(ends)"),
        ("first = length - len(split_prompt(paid.trajectory, 0)[1])", "first = 0"),
        ("if FILTER_RULES[rule](outcome)), None)", "if not FILTER_RULES[rule](outcome)), None)"),
    ],
    "loss": [
        ("log_ratio = logps - old\n", "log_ratio = old - logps\n"),
        ("/ mask.sum(-1).clamp(min=1.0)).unsqueeze(-1)", ").unsqueeze(-1)"),
        ("ratio.clamp(max=1 + track.clip_high).detach()", "ratio.clamp(max=1 + track.clip_high)"),
        ("-(track.ratio * track.advantages).minimum(", "-(track.ratio * track.advantages).maximum("),
        ("ratio.clamp(1 - track.clip_low, 1 + track.clip_high)", "ratio.clamp(1 - track.clip_low, 1 + track.clip_low)"),
        (".clamp(min=1.0) / track.generation_share", ".clamp(min=1.0)"),
        ("by_episode.mean() / track.micro_batches", "by_episode.mean()"),
        ("/ tokens / track.micro_batches", "/ tokens"),
        ("/ (episodes * track.longest_episode) / track", "/ track.mask.sum() / track"),
        ("gap = ((old - sampled) * mask)", "gap = ((sampled - old) * mask)"),
        ("log_weights.exp().clamp(max=cap)", "log_weights.exp()"),
        ("(mean_ratio >= bounds[0]) & (mean_ratio", "(mean_ratio >= bounds[0]) | (mean_ratio"),
        ("parts += [parts[0][:0]] * (count - len(parts))", "pass"),
        (' and not kwargs.get("compute_aux_loss")', ""),
        ("rows[needed] if needed.any() else rows[:1]", "rows[needed]"),
        (' * inputs.get("tool_mask", 1)\n    has_gradient =', "\n    has_gradient ="),
        ("has_gradient | _has_advantage(inputs", "has_gradient & _has_advantage(inputs"),
        ("if tokens > max_tokens and number > starts[-1]", "if tokens >= max_tokens and number > starts[-1]"),
        ("tokens += length - 1 - max(0, n_shared - 1)", "tokens += length - max(0, n_shared - 1)"),
        ("return compute(parts[-1]) + before", "return compute(parts[-1])"),
        ("= self.sync is not None or self.grpo.staleness > 0  #", "= self.sync is not None  #"),
        ('mask = torch.maximum(mask, inputs["schema_mask"])', "pass"),
        ('["old_per_token_logps"].masked_fill(~rows.unsqueeze(1), 0.0)', '["old_per_token_logps"]'),
        ("return {name: mask * selected for name, mask", "return {name: mask for name, mask"),
        ("if tokens > max_tokens and number > starts[-1]", "if tokens > max_tokens and number >= starts[-1]"),
    ],
    "step": [
        ("keep = is_useful or not self.grpo.drop_zero_variance", "keep = True"),
        ("loss = loss + self.grpo.lambda_schema * self", "loss = loss + self"),
        ('generation_tokens = inputs["schema_items"]', "generation_tokens = mask.sum()"),
        ("self._old_rows = None if self.beta or self.grpo.lambda_schema else", "self._old_rows ="),
        ('inputs.get("old_per_token_logps", logps.detach())', 'inputs.get("old_per_token_logps", logps)'),
        ("if last is None else last + 1\n        return tracks", "if last is None else last\n        return tracks"),
        ("[mask if index < end else 0", "[mask if index <= end else 0"),
        (
            "is_first_pass = self._step % (steps * self.num_iterations) <",
            "is_first_pass = self._step % steps <",
        ),
    ],
    "packing": [
        ("first = (shared - 1).clamp(min=0)  #", "first = shared.clamp(min=0)  #"),
        ("& (columns < end.unsqueeze(1))", "& (columns <= end.unsqueeze(1))"),
        ("keys = flat.gather(0, _last_row(", "keys = flat.roll(1, 1).gather(0, _last_row("),
        ("predictors = flat.roll(1, 1).gather(", "predictors = flat.gather("),
        ("labels[places[scored]] = input_ids", "labels[places[scored] - 1] = input_ids"),
        ("labels[None], places[order.argsort()]", "labels[None], places[order]"),
        ("(key_columns <= query_columns.unsqueeze(2))", "(key_columns < query_columns.unsqueeze(2))"),
        ("if n_queries == n_keys:", "if n_queries >= 0:"),
        ("& inside[1:] & inside[:-1]", "& inside[1:]"),
        ('sees_all = set(layer_types) == {"full_attention"}', 'sees_all = "full_attention" in set(layer_types)'),
        ("logits = (hidden[rows] @ weight.T).float().mul_(inv_t)", "logits = hidden[rows] @ weight.T"),
        ("scales = (gradients[0] * ctx.inv_t).unsqueeze(1)", "scales = gradients[0].unsqueeze(1)"),
        ("entropies[rows] = -(log_ps.exp() * log_ps)", "entropies[rows] = (log_ps.exp() * log_ps)"),
        ("keep = mask.size(1) - int(prompt_lengths.min())", "keep = mask.size(1) - int(prompt_lengths.max())"),
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
        ("if name_of(other.database) == database), None)", "), None)"),
        ("elsewhere = elsewhere or Leak(", "elsewhere = Leak("),
        (
            "tuple(sorted(word for word in _WORD.findall(fold(question))",
            "tuple((word for word in _WORD.findall(fold(question))",
        ),
        (" if word not in _FILLERS))", "))"),
        ("return sql_shape(example.gold_sql, names=True)", "return sql_shape(example.gold_sql)"),
        ('.sort("late", "rank").head(', '.sort("rank").head('),
        ('gone = pl.col("reason").is_null() & ~', "gone = ~"),
        ("traits = (database, *turns,", "traits = (*turns,"),
        ("        if not outcome.broken:\n            samples", "        if outcome.trajectory:\n            samples"),
        ('.sort("score", "ticket")', '.sort("score", "ticket", descending=True)'),
        ("is_in([*balanced, *explore])", "is_in(balanced)"),
        ('pl.col("right") == 0) & ~pl.col("example_id").is_in(balanced)', 'pl.col("right") == 0)'),
        ("zip((sft, *pools), settings", "zip(pools, settings"),
        ('pl.col("samples") >= group)', 'pl.col("samples") > group)'),
        ("for samples, right in pairs) / full.height", "for samples, right in pairs) / count"),
        ('"example_id"][: settings.keep]', '"example_id"][1 : settings.keep]'),
    ],
    "gold_schema": [
        ("len(groups[best]) >= QUORUM", "len(groups[best]) >= 1"),
        (
            "best = max(groups, key=lambda items: len(groups[items])",
            "best = min(groups, key=lambda items: len(groups[items])",
        ),
        ('(("adds", view, best), ("lacks", best, view))', '(("adds", best, view), ("lacks", view, best))'),
        ('        if row["accepted"]:\n', "        if row:\n"),
    ],
    "metrics": [
        ('return f"number:{cell:.10g}"', 'return f"number:{cell:.6g}"'),
        ("sizes.count(len(best)) > 1", "sizes.count(len(best)) >= 1"),
        ("best = max(groups.values(), key=len)", "best = max(reversed(groups.values()), key=len)"),
        ('rows = sorted(set(rows) if form == "set" else rows)', "rows = sorted(set(rows))"),
        ("return with_rows or voters", "return with_rows"),
        ('"database" if self.n_clusters >= MIN_CLUSTERS', '"database" if self.n_clusters > MIN_CLUSTERS'),
        ("by_database = len(groups) >= MIN_CLUSTERS", "by_database = len(groups) > MIN_CLUSTERS"),
        ("elif len(groups) < MIN_CLUSTERS:", "elif len(groups) <= MIN_CLUSTERS:"),
        ("return (n_extreme + 1) / (FLIPS + 1)", "return n_extreme / FLIPS"),
        ("range(min(gained, lost) + 1)", "range(min(gained, lost))"),
        ("NormalDist().inv_cdf(1 - ALPHA / 2)", "NormalDist().inv_cdf(1 - ALPHA)"),
        ("discordant - difference**2", "discordant - difference"),
        ("1.0 - math.comb(n - correct, k)", "1.0 - math.comb(n - correct, k - 1)"),
        ("record.score(equality) for record in members[:k]]", "record.score(equality) for record in members]"),
        ("ordered[math.ceil(0.95 * n) - 1]", "ordered[math.ceil(0.95 * n) - 2]"),
        ("z * z / (4 * n * n)", "z * z / (4 * n)"),
        ("return ordered[max(rank - 1, 0)]", "return ordered[rank]"),
        ("_nearest_rank(means, (1 - confidence) / 2)", "_nearest_rank(means, 1 - confidence)"),
        ("observed = abs(math.fsum(differences)) - 1e-12", "observed = abs(math.fsum(differences))"),
        ("return min(2 * one_sided, 1.0)", "return 2 * one_sided"),
        ("math.sqrt(discordant - difference**2)", "math.sqrt(discordant)"),
        ("differences = [new - old for old, new in", "differences = [old - new for old, new in"),
        ("variance = math.fsum(squares) / n", "variance = math.fsum(squares) / (n - 1 or 1)"),
        ("median = (ordered[(n - 1) // 2]", "median = (ordered[n // 2]"),
        ("if len(members) >= k]", "if len(members) > k]"),
        ("sorted(members, key=lambda record: record.sample)", "list(members)"),
        ("groups = group(unbroken(records), lambda", "groups = group(records, lambda"),
        ("empty=record.executable and record.n_rows == 0", "empty=record.n_rows == 0"),
        ("(after - before) * 100 / examples * 1000", "(after - before) * 100 / examples"),
        ("ordered = sorted(candidates, key=lambda candidate: candidate.sample)", "ordered = list(candidates)"),
        ('if rule.failing == "vote" or candidate.signature', 'if rule.failing == "vote" and candidate.signature'),
        (".join([width, *rows])", ".join(rows)"),
    ],
    "answers::test_an_interval_is_of_the_questions_that_were_asked": [
        ("groups = asked_groups", "pass"),
    ],
    "sweep": [
        ("STUDENT[min(runs - 1, len(STUDENT)) - 1]", "STUDENT[min(runs, len(STUDENT)) - 1]"),
        ("statistics.stdev(means) / math.sqrt(scores.n_runs)", "statistics.stdev(means)"),
        ("statistics.stdev(values) if len(values) > 1", "statistics.pstdev(values) if len(values) > 1"),
        ("((of_units @ totals) * of_runs).sum(1)", "(of_units @ totals).sum(1)"),
        ("if 2 * half > high - low:", "if half > high - low:"),
        ("Estimate(average, max(low, 0.0), min(high, 1.0),", "Estimate(average, low, high,"),
        ("plain = paired([0.0] * len(averages), averages,", "plain = paired(averages, [0.0] * len(averages),"),
        ("rows.setdefault(question, {})[number] = value", "rows.setdefault(question, {})[0] = value"),
    ],
    "observations react rollout_engine": [
        ("        spent += len(line) + 1\n", "        spent += len(line)\n"),
        ("    if len(text) > limit:\n        text = text[:limit] + CUT\n", "    text = text[:limit] + CUT\n"),
        ("if n_rows < len(result.rows):", "if n_rows <= len(result.rows):"),
        ('defuse(text).replace("|", "\\\\|")', "defuse(text)"),
        ('text.rfind(f"<{THINK}>") > text', 'text.rfind(f"<{THINK}>") >= text'),
        ("if scanned.error or len(actions) != 1:", "if scanned.error or not actions:"),
        ("if fault is None and self.strict:", "if fault is None:"),
        ("if cached is not None and cached[:2] == (example, schema):", "if cached is not None:"),
        ("if lines and spent > total_chars:", "if lines and spent >= total_chars:"),
        ("spent = -1  # the header", "spent = 0  # the header"),
        ("if result.truncated or len(data) < len(result.rows):", "if len(data) < len(result.rows):"),
        ("value[: limit // 2].hex()", "value[:limit].hex()"),
        ("return value if value - value == 0.0 else str(value)", "return value"),
        ('body.partition("\\n")[2]', 'body.partition("\\n")[0]'),
        (
            "(self.config.observation_rows, self.cell_chars, self.observation_chars)",
            "(self.config.observation_rows, self.observation_chars, self.cell_chars)",
        ),
        ('"question": observations.defuse(', '"question": str('),
        ("if demanded and not thoughts[0]:", "if demanded and not thoughts:"),
        ("if strict and thoughts and scan.blocks[0].tag != tag:", "if thoughts and scan.blocks[0].tag != tag:"),
    ],
    "blocks stops phases properties tool_call": [
        ('return Scan(tuple(blocks), stray, "unclosed_tag")', "return Scan(tuple(blocks), stray)"),
        ("elif opened and not (closing and name == opened):", "elif opened and not closing:"),
        ("return Scan(tuple(blocks), stray or bool(text[end:].strip()))", "return Scan(tuple(blocks), stray)"),
        (
            "return text[: min(ends)] if ends else text\n\n\ndef close_tag",
            "return text[: max(ends)] if ends else text\n\n\ndef close_tag",
        ),
        ("if len(contents) != 1:", "if not contents:"),
        ('if "```" in inner:\n', "if False:\n"),
        ('set(arguments) - DATABASE_NAMES != {"sql"}', 'not {"sql"} <= set(arguments)'),
    ],
    "decoder sampling": [
        ("self._deferred < self._max_deferred and", "self._deferred <= self._max_deferred and"),
        ("if leader is not row and row.cached < shared:", "if row.cached < shared:"),
        ("len(request.token_ids) - 1)\n        row.ids", "len(request.token_ids))\n        row.ids"),
        ("self._slots.copy(row.slot, target, row.cached)", "self._slots.copy(row.slot, target, 1)"),
        ("mask = keys <= self._index(last)", "mask = keys < self._index(last)"),
        ("before = ordered.cumsum(dim=-1) - ordered", "before = ordered.cumsum(dim=-1)"),
        ("torch.where(probs > own, probs, 0.0)", "torch.where(probs >= own, probs, 0.0)"),
        ("seeds + _GOLDEN) + positions * _GOLDEN", "seeds + _GOLDEN)"),
        ("uniform[outside, 1]", "uniform[outside, 0]"),
    ],
    "episode rollout_engine": [
        ("if self._room < 1:\n", "if self._room < 0:\n"),
        ("if self._room - len(ids) < 1:", "if self._room - len(ids) < 0:"),
        (
            "len(self.turns) >= self._rules.max_turns and not self._rules.forced_final",
            "len(self.turns) > self._rules.max_turns and not self._rules.forced_final",
        ),
        (
            "self._forced = len(self.turns) >= self._rules.max_turns\n",
            "self._forced = len(self.turns) > self._rules.max_turns\n",
        ),
        ("max_tokens=min(self._rules.sampling.turn_tokens, self._room)", "max_tokens=self._rules.sampling.turn_tokens"),
        ("self._mask += [0] * len(ids)", "self._mask += [1] * len(ids)"),
        ("if self._ends and self._codec else len(self._ids)", "if self._ends and self._codec else 0"),
    ],
    "outcome terms rubric": [
        ("by_track[term.track] += term.weight * by_term", "by_track[term.track] += by_term"),
        ("return float(outcome.correct and finished < outcome.max_turns)", "return float(outcome.correct)"),
        ("return len(left & right) / union if union else 0.0", "return len(left & right) / union if union else 1.0"),
        ("verdict.broken or trajectory.stop is StopReason.BROKEN)", "verdict.broken)"),
        ('analysis.parse_queries(unbroken, predicted="schema" in reads)', "analysis.parse_queries(unbroken)"),
        ("if cached is not None and cached[0] == schema_of[query[0]]:", "if cached is not None:"),
        ("return value if outcome.correct else -value", "return value if outcome.correct else value"),
        ("return float(finished <= easy)", "return float(finished < easy)"),
        ('if outcome.hardness == "medium":', 'if outcome.hardness == "easy":'),
        ("return frozenset(schema.tables) | frozenset(schema.columns)", "return frozenset(schema.columns)"),
        ("return float(outcome.trajectory.well_formed)", "return float(outcome.trajectory.final_sql is not None)"),
        ("    if outcome.judge is not None:\n", "    if outcome.judge:\n"),
        ("schema(outcome) + bigram(outcome)) / 3", "schema(outcome) + bigram(outcome)) / 2"),
        ("return [-cost if is_faulty", "return [cost if is_faulty"),
        ("faulty[-1] = True  #", "faulty[0] = True  #"),
        ("return right if outcome.correct else wrong", "return wrong if outcome.correct else right"),
        ("return runs if outcome.executable else fails", "return fails if outcome.executable else runs"),
        ("all(PHASES[phase] in seen for phase in phases)", "any(PHASES[phase] in seen for phase in phases)"),
        ("if not is_complete or not is_clean:", "if not is_complete:"),
        ("if coupled and not outcome.correct:", "if not outcome.correct:"),
        ("if not gold <= items:", "if not items <= gold:"),
        ("return len(gold) / len(items)", "return len(items) / len(gold)"),
        (
            "return value if outcome.trajectory.well_formed else -value",
            "return value if outcome.trajectory.well_formed else 0.0",
        ),
        ("return value if outcome.executable else -value", "return value if outcome.executable else 0.0"),
        ("if not outcome.trajectory.well_formed or not outcome.executable:", "if not outcome.trajectory.well_formed:"),
        ("worst_right = min(term.weight * value for", "worst_right = max(term.weight * value for"),
        ("margin += worst_right - max(", "margin += worst_right - min("),
        ("[0.0] * (n_turns - 1) + [paid]", "[paid] + [0.0] * (n_turns - 1)"),
        ("weighted.append([term.weight * value for", "weighted.append([value for"),
        ("correct=verdict.scores.get(equality, 0.0) == 1.0", "correct=verdict.scores.get(equality, 0.0) > 0.0"),
        ("if query in gold and items is not None:", "if query in gold:"),
        ('if level != "extra":  # which', "if True:  # which"),
    ],
    "judge": [
        (
            "if outcome.broken or outcome.correct or sql is None:",
            "if outcome.broken or sql is None:",
        ),
        ("grade = float(match[1]) / scale", "grade = float(match[1])"),
        ("0.0 <= grade <= 1.0 else None", "0.0 < grade <= 1.0 else None"),
        ("if shortened is not None or without is not None:", "if shortened is not None:"),
        ("broken=case not in grades)", "broken=False)"),
    ],
    "compare equality_properties": [
        ("or right == int(right)) or abs(left - right) < 0.5", "or right == int(right)) or True"),
        ("RELATIVE = 1e-12", "RELATIVE = 1e-9"),
        ("if max(abs(left), abs(right)) >= WHOLE:", "if max(abs(left), abs(right)) > WHOLE:"),
        ("float(all(map(close_rows, gold.rows, predicted.rows)))", "float(same_bag(gold.rows, predicted.rows))"),
        ("if len(gold.columns) != len(predicted.columns) or len(gold.rows)", "if len(gold.rows)"),
        ("strict(gold, predicted, facts) if gold.rows else 0.0", "strict(gold, predicted, facts)"),
        ("or set(gold.rows) == set(predicted.rows))", "or Counter(gold.rows) == Counter(predicted.rows))"),
        ("or len(gold.rows[0]) != len(predicted.rows[0]):", "or False:"),
        (
            "false_positive += max(0, len(predicted_rows) - len(gold_rows))",
            "false_positive += len(predicted_rows) - len(gold_rows)",
        ),
        ("    if predicted_units is None:\n        return 0.0\n", ""),
    ],
    "verdicts execution": [
        ("scores[name] = min(scores[name], score)", "scores[name] = max(scores[name], score)"),
        ("compared_on = locations if equality.suite else locations[:1]", "compared_on = locations[:1]"),
        (
            "raw = base.untruncated(self.run(location, sql, self._bounds.max_rows))",
            "raw = self.run(location, sql, self._bounds.max_rows)",
        ),
        (
            "for key in [key for key in self._gold if key[0] == location]:",
            "for key in [key for key in self._gold if key[1] == location]:",
        ),
        ("max_rows + 1 - len(rows)))", "max_rows - len(rows)))"),
    ],
    "sandbox_sqlite sandbox_failures sandbox_hostile sandbox_state engines": [
        ("    size = 0\n    step = FIRST_FETCH\n", "    size = 1\n    step = FIRST_FETCH\n"),
        ("DENY if first in HIDDEN_TABLES else ALLOW", "ALLOW"),
        ("second.lower() in FUNCTIONS else DENY", "second.lower() in FUNCTIONS else ALLOW"),
    ],
    "nightly/ledger nightly/promotion": [
        (
            "is_worse = is_significant and net < 0\n        is_better = is_significant and net > 0",
            "is_worse = is_significant and net > 0\n        is_better = is_significant and net < 0",
        ),
        ("ALPHA = 0.05  # size of McNemar's", "ALPHA = 0.5  # size of McNemar's"),
        (
            "is_worse = paired.high < 0\n        is_better = paired.low > 0",
            "is_worse = paired.low < 0\n        is_better = paired.high > 0",
        ),
        ("if value < -settings.max_drop - 1e-9}", "if value < settings.max_drop - 1e-9}"),
        ("if value < -settings.max_drop - 1e-9}", "if value < -settings.max_drop}"),
        ("    if unmeasured:\n", "    if unmeasured and not is_better:\n"),
        (
            "row in records.before if level in (None, row.hardness)]\n"
            "    after = [row for row in records.after if level in (None, row.hardness)]",
            "row in records.before]\n    after = [row for row in records.after]",
        ),
        ("if min(len(learned), len(fresh)) < ENOUGH:", "if max(len(learned), len(fresh)) < ENOUGH:"),
        ("return sum(differences) / 2", "return sum(differences)"),
        ("for value in before | after]", "for value in before]"),
        ("_data_keys(store, checkpoint) - _data_keys(store, other)", "_data_keys(store, checkpoint)"),
        ("for leak in repeated if leak.same_database)", "for leak in repeated)"),
        (
            'row in read_records(before.folder, "greedy") if row.example_id not in seen]\n'
            '    new = [row for row in read_records(after.folder, "greedy") if row.example_id not in seen]',
            'row in read_records(before.folder, "greedy")]\n'
            '    new = [row for row in read_records(after.folder, "greedy")]',
        ),
        ('        if decision == "worse":\n            decision = "kept"', "        pass"),
        ("    elif challenger.start in withdrawn:  #", "    elif challenger.key in withdrawn:  #"),
        (
            "if len(broken) > recipe.contracts.max_broken * len(greedy):",
            "if len(broken) >= recipe.contracts.max_broken * len(greedy):",
        ),
        ('row["decision"] == "promoted" and row_tier == tier:', 'row["decision"] != "worse" and row_tier == tier:'),
        ('if champion.key != row["from"]]', "if champion.key]"),
        ('if decided.get(path.name) != "worse"]', 'if decided.get(path.name) == "promoted"]'),
        ('TAKEN = ("promoted", "kept", "worse")', 'TAKEN = ("promoted", "kept", "worse", "refused")'),
        ("restored = champions[-2]", "restored = champions[0]"),
        ("champion is None or champion.key != standing", "champion is not None and champion.key != standing"),
        ("min(n_old, round(replay * n_fresh))", "min(n_old, round(replay * n_old))"),
        ("if n_before + row in replayed]", "if row in replayed]"),
        ("n_sources += int(last_source) + 1", "n_sources += int(last_source)"),
        ('"example_id", keep="first"', '"example_id", keep="last"'),
        ("        if index == 0:\n            pools += HELD_OUT", "        pools += HELD_OUT"),
    ],
    "nightly/inbox": [
        ("if mark not in taken:", "if True:"),
        ("number = max(numbers, default=0) + 1", "number = max(numbers, default=0)"),
    ],
    "recipes": [
        ("laid_over(known, value) if isinstance(known, dict) and isinstance(value, dict) else value", "value"),
        ("    merged = dict(base)\n    for key", "    merged = base\n    for key"),
        (
            'overlay.get("kind", base.get("kind")):\n        return {}',
            'overlay.get("kind", base.get("kind")):\n        return dict(base)',
        ),
        (
            "merged = _merge(merged, _compose(_included(name), (*trail, path)), path)",
            "merged = _merge(_compose(_included(name), (*trail, path)), merged, path)",
        ),
        ("return _merge(merged, tree, path)", "return _merge(tree, merged, path)"),
        ('"steps" in grpo and "epochs" not in grpo and', '"steps" in grpo and'),
        ('if key == "grpo.steps":  #', 'if key == "grpo.epochs" and value:  #'),
        ("if last in OWNERS and node.get(last, value) != value:", "if last in OWNERS and last not in node:"),
        ('item.get("term") == part:', 'str(item.get("term")).startswith(part):'),
        ("if part in map(str, range(len(node))):", "if part.isdigit():"),
        ('tree.setdefault("name", path.stem)', 'tree["name"] = path.stem'),
        ("            if key in seen:\n", "            if key in seen and not seen:\n"),
        (
            "json.dumps(value, sort_keys=True, ensure_ascii=False, separators",
            "json.dumps(value, ensure_ascii=False, separators",
        ),
        ("if _size(value, {}) > max(MOST_VALUES, len(text)):", "if len(text) > MOST_VALUES:"),
        ("        benchmarks += listed_there\n", "        benchmarks = listed_there\n"),
    ],
}
EQUIVALENT = {  # (code, faulty code): why it changes no result
    (
        "outcome.correct and not outcome.broken,",
        "outcome.correct,",
    ): "a broken outcome's verdict scores 0, so it is not correct",
    (
        "if value < -settings.max_drop - 1e-9}",
        "if value < -settings.max_drop}",
    ): "greedy answers are right or wrong: the float of their share is that of the same share as the bound",
    (
        '"example_id", keep="first"',
        '"example_id", keep="last"',
    ): "the rows of the held-out questions are the same in all parts",
    (
        "[mask if index < end else 0",
        "[mask if index <= end else 0",
    ): "the token behind a turn is an observation's, which has no weight",
}


def place_of(root: Path, code: str) -> Path:
    """The one file under pipelines/ that holds a piece of code once."""
    counts = {path: path.read_text(encoding="utf-8").count(code) for path in (root / "pipelines").rglob("*.py")}
    if sum(counts.values()) != 1:
        sys.exit(f"{code!r} stands {sum(counts.values())} times under pipelines/: name another piece")
    return max(counts, key=counts.__getitem__)


def seen(root: Path, tests: list[str], fault: bool = True) -> bool:
    """Whether some of these tests fails in a copy of the tree; bytecode is kept of the code without a fault alone."""
    child = os.fork()
    if child == 0:
        try:
            os.setsid()
            os.chdir(root)
            quiet = os.open(os.devnull, os.O_RDWR)
            for stream in (0, 1, 2):
                os.dup2(quiet, stream)
            sys.path[:] = [str(root), *(path for path in sys.path if not Path(path).is_relative_to(ROOT))]
            sys.dont_write_bytecode = fault
            os.environ |= {"PYTHONPATH": str(root), **({"PYTHONDONTWRITEBYTECODE": "1"} if fault else {})}
            options = ["-x", "-q", "-p", "no:cacheprovider", "-W", REWRITE, f"--basetemp={root / '.tmp'}"]
            os._exit(int(pytest.main([*options, *tests])))
        finally:
            os._exit(1)
    end, failed = time.monotonic() + TIMEOUT, True
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            failed = bool(status)
            break
        time.sleep(0.05)
    with contextlib.suppress(ProcessLookupError):  # the tests of a fault may leave processes
        os.killpg(child, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(child, 0)
    return failed


def run(root: Path, only: str) -> int:
    """Put each chosen fault into a copy of the tree; print those that no test sees, then a table. Their number."""
    rows, survivors = [], 0
    for names, faults in FAULTS.items():
        listed = [(code, faulty) for code, faulty in faults if only in f"{names} {code}"]
        chosen = [fault for fault in listed if fault not in EQUIVALENT]
        tests = []
        for word in names.split():
            name, *test = word.split("::")
            folder, slash, name = name.rpartition("/")
            found = sorted((root / "tests").rglob(f"{folder}{slash}test_{name}.py"))
            tests += ["::".join([str(path), *test]) for path in found]
        if any("/training/" in test for test in tests) and chosen:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py
            for library in LIBRARIES:
                importlib.import_module(library)
        if chosen and seen(root, tests, fault=False):
            sys.exit(f"the tests {names} fail without a fault")
        caught = 0
        for code, faulty in chosen:
            path = place_of(root, code)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(code, faulty), encoding="utf-8")
            if seen(root, tests):
                caught += 1
            else:
                print(f"{path.relative_to(root)}: {code.strip()!r} -> {faulty.strip()!r}", flush=True)
            path.write_text(text, encoding="utf-8")
        survivors += len(chosen) - caught
        if listed:
            rows.append((names, len(listed), caught, len(listed) - len(chosen)))
    rows.append(("all", *(sum(row[at] for row in rows) for at in (1, 2, 3))))
    print("| tests | faults | caught | equivalent |\n|---|---|---|---|")
    print("\n".join(f"| {' | '.join(map(str, row))} |" for row in rows))
    return survivors


def main() -> None:
    """Print the survivors and a table; the exit code is 1 if there are survivors."""
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
        survivors = run(Path(name), options.only)
    print(f"{survivors} survive")
    sys.exit(int(survivors > 0))


if __name__ == "__main__":
    main()
