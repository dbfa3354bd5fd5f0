"""Single-line faults in what decides a figure, from a reward to a champion: those that no test sees, and a table.

    python benchmarks/mutants.py [--only WORD] [--check]

A fault has a place (a file under pipelines/ and a function in it), a name that says what is wrong, a piece of code that
stands once at that place, and what the piece becomes. Each is put into a copy of the working tree, where the tests
named with it run: by the name of their file under tests/, in whatever folder, with the folder in front or a test of it
behind (`nightly/ledger`, `answers::test_x`), as a default test run would; a fault that fails none is printed. `--check`
only looks whether each piece is still there. A fault that changes no result is in EQUIVALENT, with the reason.

The tests run in forks of this process, which has imported their libraries: some seconds a fault in place of twenty.
"""

import argparse
import ast
import contextlib
import importlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
TIMEOUT = 300  # seconds; a fault that makes its tests loop is seen
REWRITE = "ignore::pytest.PytestAssertRewriteWarning"  # of a plug-in that a library has imported
LIBRARIES = ("torch", "transformers", "trl.trainer.grpo_trainer", "trl.trainer.sft_trainer", "peft")  # of training


class Fault(NamedTuple):
    """One fault at its place."""

    name: str  # the fault in a few words
    code: str  # the right code, which stands once at the place
    faulty: str  # the code that replaces it


FAULTS: dict[str, dict[str, list[Fault]]] = {  # by names of test files and by place
    "credit": {
        "training/advantages.py": [
            Fault("a larger epsilon", "EPS = 1e-4  # TRL's", "EPS = 1e-2  # TRL's"),
        ],
        "training/advantages.py::estimate_advantages": [
            Fault(
                "the batch's mean for the baseline of the others",
                'if baseline == "batch":',
                'if baseline != "group":',
            ),
            Fault("the mean added", "centred = grouped - mean\n", "centred = grouped + mean\n"),
            Fault("no leave-one-out factor", 'if baseline == "others":  # r -', 'if baseline == "none":  # r -'),
            Fault(
                "the inverse of the leave-one-out factor",
                "centred * count / (count - 1).clamp(min=1)",
                "centred * (count - 1) / count",
            ),
            Fault(
                "the group's and the batch's deviation exchanged",
                'if scale == "group":\n            compared = grouped',
                'if scale != "group":\n            compared = grouped',
            ),
            Fault("no epsilon", "centred / (spread + EPS)", "centred / spread"),
            Fault(
                "an advantage for rewards without a signal",
                "teaches = has_signal(rewards, group, baseline)",
                "teaches = ~rewards.isnan()",
            ),
        ],
        "training/advantages.py::turn_advantages": [
            Fault("rewards of earlier turns, not of later ones", ".flip(1).cumsum(1).flip(1)", ".cumsum(1)"),
            Fault(
                "the turn's own reward counted with the others",
                "last_turn = (n_paid - 1).clamp(min=0)",
                "last_turn = n_paid.clamp(min=0)",
            ),
            Fault(
                "the episode counted with the others",
                "others = takes_part.sum(dim=1, keepdim=True) - 1",
                "others = takes_part.sum(dim=1, keepdim=True)",
            ),
            Fault(
                "the episode's own reward in its baseline",
                "earned_by_others = earned.sum(dim=1, keepdim=True) - earned",
                "earned_by_others = earned.sum(dim=1, keepdim=True)",
            ),
            Fault(
                "an advantage without other episodes",
                "(earned - baseline) * (others > 0)",
                "(earned - baseline) * (others >= 0)",
            ),
            Fault(
                "a signal for rewards that are equal", "teaches = is_paid & (centred.abs() > SAME)", "teaches = is_paid"
            ),
        ],
        "training/advantages.py::zero_variance": [
            Fault(
                "no group has equal rewards",
                "_deviation(grouped) <= SAME",
                "_deviation(grouped) < 0",
            ),
        ],
        "training/advantages.py::_deviation": [
            Fault(
                "the deviation over n, not n - 1", "squares / (count - 1).clamp(min=1)", "squares / count.clamp(min=1)"
            ),
        ],
        "training/advantages.py::has_signal": [
            Fault("a signal for a missing reward", "return ~rewards.isnan() & ~is_equal", "return ~is_equal"),
        ],
        "training/rollouts.py::token_advantages": [
            Fault(
                "a turn's last token given to the next turn", "bisect_right(ends, index)", "bisect_left(ends, index)"
            ),
            Fault(
                "a turn behind the last one that is paid",
                "if turn < paid_turns:",
                "if turn <= paid_turns:",
            ),
            Fault("more turns with an end than with a reward", "min(len(ends), len(values))", "len(ends)"),
            Fault(
                "advantages that begin at the prompt",
                "first = length - len(completion)",
                "first = 0",
            ),
        ],
        "curation/filtering.py::broken_rule": [
            Fault(
                "the rule's verdict negated", "if FILTER_RULES[rule](outcome):", "if not FILTER_RULES[rule](outcome):"
            ),
        ],
    },
    "loss": {
        "training/losses.py::ratios": [
            Fault("the ratio inverted", "log_ratio = logps - old\n", "log_ratio = old - logps\n"),
            Fault(
                "the sum of an episode, not its mean",
                "log_ratio = _mean_over_tokens(log_ratio, mask)",
                "log_ratio = (log_ratio * mask).sum(-1, keepdim=True)",
            ),
        ],
        "training/losses.py::clipped_weight": [
            Fault(
                "a gradient through the weight",
                "ratio.clamp(max=1 + track.clip_high).detach()",
                "ratio.clamp(max=1 + track.clip_high)",
            ),
        ],
        "training/losses.py::clipped_objective": [
            Fault(
                "the larger of the two objectives",
                "return -plain.minimum(clipped)",
                "return -plain.maximum(clipped)",
            ),
            Fault(
                "the lower bound on both sides",
                "ratio.clamp(1 - track.clip_low, 1 + track.clip_high)",
                "ratio.clamp(1 - track.clip_low, 1 + track.clip_low)",
            ),
        ],
        "training/losses.py::mean_over_generation": [
            Fault("no share of the generation", ".clamp(min=1.0) / track.generation_share", ".clamp(min=1.0)"),
        ],
        "training/losses.py::mean_over_episodes": [
            Fault("no division by micro-batches", "by_episode.mean() / track.micro_batches", "by_episode.mean()"),
        ],
        "training/losses.py::mean_over_micro_batch": [
            Fault("no division by micro-batches", "/ tokens / track.micro_batches", "/ tokens"),
        ],
        "training/losses.py::mean_over_longest": [
            Fault(
                "the mean over tokens, not over the longest episode",
                "/ (episodes * track.longest_episode) / track",
                "/ track.mask.sum() / track",
            ),
        ],
        "training/losses.py::sampler_weights": [
            Fault(
                "the ratio of sampler and policy inverted",
                "gap = ((old - sampled) * mask)",
                "gap = ((sampled - old) * mask)",
            ),
            Fault("no cap", "log_weights.exp().clamp(max=cap)", "log_weights.exp()"),
            Fault(
                "one of the bounds is enough",
                "(mean_ratio >= low) & (mean_ratio",
                "(mean_ratio >= low) | (mean_ratio",
            ),
        ],
        "training/grpo_trainer.py::GrpoTrainer._split_micro_batch": [
            Fault("no empty parts for processes with fewer", "parts += [parts[0][:0]] * (count - len(parts))", "pass"),
        ],
        "training/grpo_trainer.py::GrpoTrainer._get_per_token_logps_and_entropies": [
            Fault("packed rows under an auxiliary loss", ' and not kwargs.get("compute_aux_loss")', ""),
            Fault("no row where none is needed", "rows[needed] if needed.any() else rows[:1]", "rows[needed]"),
        ],
        "training/micro_batches.py::rows_with_gradient": [
            Fault(
                "observations count as tokens with a gradient",
                "full_mask = full_track_mask(inputs)",
                'full_mask = inputs["completion_mask"]',
            ),
            Fault(
                "both tracks needed for a gradient",
                "has_gradient | _has_advantage(inputs",
                "has_gradient & _has_advantage(inputs",
            ),
        ],
        "training/micro_batches.py::split_by_tokens": [
            Fault(
                "a part that is exactly full is cut",
                "if tokens > max_tokens and number > starts[-1]",
                "if tokens >= max_tokens and number > starts[-1]",
            ),
            Fault(
                "the shared prefix counted once too often",
                "tokens += length - 1 - max(0, n_shared - 1)",
                "tokens += length - max(0, n_shared - 1)",
            ),
            Fault(
                "a part without rows",
                "if tokens > max_tokens and number > starts[-1]",
                "if tokens > max_tokens and number >= starts[-1]",
            ),
        ],
        "training/trainer.py::TrainerMixin.in_parts": [
            Fault("the loss of the last part alone", "return compute(parts[-1]) + before", "return compute(parts[-1])"),
        ],
        "training/grpo_trainer.py::GrpoTrainer._sampler_weights": [
            Fault(
                "no correction for episodes sampled ahead",
                "= self.sync is not None or self.grpo.staleness > 0  #",
                "= self.sync is not None  #",
            ),
            Fault("no correction on the schema track", 'mask = torch.maximum(mask, inputs["schema_mask"])', "pass"),
        ],
        "training/grpo_trainer.py::GrpoTrainer._corrected": [
            Fault(
                "old log-probabilities of rows without a forward",
                "old.masked_fill(~rows.unsqueeze(1), 0.0)",
                "old",
            ),
        ],
        "training/micro_batches.py::select_rows": [
            Fault(
                "masks of rows that are not selected",
                "return {name: mask * selected for name, mask",
                "return {name: mask for name, mask",
            ),
        ],
    },
    "step": {
        "training/rollouts.py::Rollouts.masks": [
            Fault(
                "episodes of equal rewards kept", "keep = is_useful or not self.grpo.drop_zero_variance", "keep = True"
            ),
        ],
        "training/grpo_trainer.py::GrpoTrainer._compute_loss": [
            Fault(
                "no weight of the schema track", "loss = loss + self.grpo.lambda_schema * self", "loss = loss + self"
            ),
            Fault(
                "every pass counted as the first",
                "is_first_pass = self._step % (steps * self.num_iterations) <",
                "is_first_pass = self._step % steps <",
            ),
        ],
        "training/grpo_trainer.py::GrpoTrainer._schema_loss": [
            Fault(
                "the micro-batch's tokens for the generation's",
                'generation_tokens = inputs["schema_items"]',
                "generation_tokens = mask.sum()",
            ),
        ],
        "training/grpo_trainer.py::GrpoTrainer._rollout": [
            Fault(
                "rows left out that KL or schema need",
                "if self.beta or self.grpo.lambda_schema:",
                "if False:",
            ),
        ],
        "training/grpo_trainer.py::GrpoTrainer._track": [
            Fault(
                "a gradient through the old log-probabilities",
                'inputs.get("old_per_token_logps", logps.detach())',
                'inputs.get("old_per_token_logps", logps)',
            ),
        ],
        "protocols/base.py::Protocol.track_turns": [
            Fault(
                "the schema track without the proposing turn",
                'tracks["schema"] = last + 1',
                'tracks["schema"] = last',
            ),
        ],
        "training/samples.py::track_mask": [
            Fault("the token behind a turn in its track", "list(agent_mask[:end])", "list(agent_mask[: end + 1])"),
        ],
    },
    "batching": {
        "training/samples.py::make_sample": [
            Fault(
                "failed turns learned and the others not",
                "if not turn.ran_well:",
                "if turn.ran_well:",
            ),
        ],
    },
    "packing": {
        "training/packing.py::pack": [
            Fault(
                "the last shared token computed again",
                "first = (shared - 1).clamp(min=0)  #",
                "first = shared.clamp(min=0)  #",
            ),
            Fault("one token more in a row", "& (columns < end.unsqueeze(1))", "& (columns <= end.unsqueeze(1))"),
            Fault(
                "keys from the place before",
                "keys = flat.gather(0, _last_row(",
                "keys = flat.roll(1, 1).gather(0, _last_row(",
            ),
            Fault(
                "a token predicted from its own place",
                "predictors = flat.roll(1, 1).gather(",
                "predictors = flat.gather(",
            ),
            Fault(
                "labels one place early",
                "labels[places[scored]] = completion_ids",
                "labels[places[scored] - 1] = completion_ids",
            ),
            Fault(
                "the order of the rows not undone",
                "places=places[order.argsort()]",
                "places=places[order]",
            ),
        ],
        "training/packing.py::_causal_mask": [
            Fault(
                "a token that does not see itself",
                "(key_columns <= query_columns.unsqueeze(2))",
                "(key_columns < query_columns.unsqueeze(2))",
            ),
            Fault("a cache taken for a whole sequence", "if n_queries == n_keys:", "if n_queries >= 0:"),
        ],
        "training/micro_batches.py::shared_prefix_lengths": [
            Fault("one row that has the token is enough", "& inside[1:] & inside[:-1]", "& inside[1:]"),
        ],
        "training/packing.py::supports_packing": [
            Fault(
                "one layer with full attention is enough",
                'sees_all = set(layer_types) == {"full_attention"}',
                'sees_all = "full_attention" in set(layer_types)',
            ),
        ],
        "training/fused_head.py::LogProbs.forward": [
            Fault(
                "no temperature in the forward pass",
                "logits = (hidden[rows] @ weight.T).float().mul_(inv_t)",
                "logits = hidden[rows] @ weight.T",
            ),
            Fault(
                "the entropy's sign",
                "entropies[rows] = -(log_ps.exp() * log_ps)",
                "entropies[rows] = (log_ps.exp() * log_ps)",
            ),
        ],
        "training/fused_head.py::LogProbs.backward": [
            Fault(
                "no temperature in the backward pass",
                "scales = (gradients[0] * ctx.inv_t).unsqueeze(1)",
                "scales = gradients[0].unsqueeze(1)",
            ),
        ],
        "training/micro_batches.py::without_padding": [
            Fault(
                "padding cut by the longest prompt",
                "keep = mask.size(1) - shortest_prompt",
                "keep = mask.size(1) - int(prompt_lengths.max())",
            ),
        ],
    },
    "leakage filtering difficulty": {
        "curation/leakage.py::leaks": [
            Fault(
                "equal SQL on another database counted",
                'if repeated and kind != "sql" and elsewhere is None:',
                "if repeated and elsewhere is None:",
            ),
            Fault(
                "no look for equal SQL", 'if kind == "sql" and database not in held_out_databases:', 'if kind == "sql":'
            ),
            Fault("the last leak elsewhere, not the first", 'kind != "sql" and elsewhere is None:', 'kind != "sql":'),
        ],
        "curation/leakage.py::_first_on": [
            Fault(
                "a match in another database taken for one in the same",
                "if name_of(example.database) == database:",
                "if example:",
            ),
        ],
        "curation/filtering.py::_first_of_each_question": [
            Fault("demonstrations in the order of the file", 'ordered = rows.sort("sample", "row")', "ordered = rows"),
            Fault(
                "one more demonstration of a question",
                "number_in_question < settings.per_example",
                "number_in_question <= settings.per_example",
            ),
        ],
        "curation/filtering.py::_first_of_each_plan": [
            Fault(
                "one more demonstration of a plan",
                "number_in_plan < settings.per_plan",
                "number_in_plan <= settings.per_plan",
            ),
        ],
        "curation/filtering.py::_first_in_all": [
            Fault("the first levels last", "is_late = ~hardness", "is_late = hardness"),
            Fault("levels in no order of priority", '.sort("late", "rank").head(', '.sort("rank").head('),
        ],
        "curation/filtering.py::select_demonstrations": [
            Fault(
                "a later rule's reason in place of the first", "pl.when(is_open & ~is_within)", "pl.when(~is_within)"
            ),
        ],
        "curation/filtering.py::CheckedTrajectory.of": [
            Fault(
                "a broken episode taken for a right one", "outcome.correct and not outcome.broken,", "outcome.correct,"
            ),
            Fault("plans of two databases taken for one", "traits = (database, *plan,", "traits = (*plan,"),
        ],
        "curation/filtering.py::fault": [
            Fault(
                "a broken trajectory not refused",
                "if trajectory.stop is StopReason.BROKEN or outcome.broken:",
                "if outcome.broken:",
            ),
        ],
        "curation/difficulty.py::ScoredQuestion.score": [
            Fault(
                "a question never solved scored by its pass rate",
                "if 0 < self.right < self.samples:",
                "if self.right < self.samples:",
            ),
        ],
        "curation/difficulty.py::select_rl_set": [
            Fault(
                "questions always solved kept",
                'pool = ranked.filter(pl.col("score") < 1.0)',
                'pool = ranked.filter(pl.col("score") <= 1.0)',
            ),
            Fault(
                "the bound on the pass rate inclusive",
                "pass_rate < settings.max_pass",
                "pass_rate <= settings.max_pass",
            ),
            Fault(
                "a question both balanced and explored",
                "ranked.filter(IS_NEVER_SOLVED & ~is_balanced)",
                "ranked.filter(IS_NEVER_SOLVED)",
            ),
            Fault("the best question left out", '"example_id"][: settings.keep]', '"example_id"][1 : settings.keep]'),
        ],
        "curation/difficulty.py::right_histogram": [
            Fault(
                "a question nearly always solved counted as always solved",
                "n_right = min(max(n_right, 1), group - 1)",
                "n_right = max(n_right, 1)",
            ),
        ],
        "sql/similarity.py::normalised": [
            Fault(
                "words in the order of the question",
                "return tuple(sorted(words))",
                "return tuple(words)",
            ),
            Fault("filler words kept", " if word not in _FILLERS]", "]"),
        ],
        "sql/similarity.py::example_shape": [
            Fault(
                "a shape without names",
                "return sql_shape(example.gold_sql, names=True)",
                "return sql_shape(example.gold_sql)",
            ),
        ],
        "curation/difficulty.py::score_questions": [
            Fault(
                "broken rollouts counted",
                "        if not outcome.broken:\n            samples",
                "        if outcome.trajectory:\n            samples",
            ),
        ],
        "curation/difficulty.py::rank": [
            Fault(
                "the easiest questions first", '.sort("score", "ticket")', '.sort("score", "ticket", descending=True)'
            ),
        ],
        "curation/difficulty.py::select_rl_set_by_parts": [
            Fault("the exploration set left out", "is_in([*balanced, *explore])", "is_in(balanced)"),
            Fault("no exploration of the SFT pool", "all_pools = (sft, *pools)", "all_pools = tuple(pools)"),
        ],
        "curation/difficulty.py::difficulty_figures": [
            Fault("a complete group not counted", 'pl.col("samples") >= group)', 'pl.col("samples") > group)'),
            Fault("pass@G over all questions", "total_pass_at / full.height", "total_pass_at / count"),
        ],
    },
    "gold_schema": {
        "curation/gold_schema.py::consensus": [
            Fault("one extractor is a quorum", "len(groups[best]) >= QUORUM", "len(groups[best]) >= 1"),
            Fault(
                "the rarest view, not the commonest",
                "best = max(groups, key=lambda items: len(groups[items])",
                "best = min(groups, key=lambda items: len(groups[items])",
            ),
        ],
        "curation/gold_schema.py::_differences": [
            Fault(
                "lacking items taken for added ones",
                "added = _names_without(view, best)",
                "added = _names_without(best, view)",
            ),
        ],
        "curation/gold_schema.py::gold_schemas": [
            Fault("a schema nobody agreed on accepted", '        if row["accepted"]:\n', "        if row:\n"),
        ],
    },
    "metrics": {
        "evaluation/voting.py::_canonical": [
            Fault("numbers equal in six digits", 'return f"number:{cell:.10g}"', 'return f"number:{cell:.6g}"'),
        ],
        "evaluation/voting.py::vote": [
            Fault("every vote a tie", "tied=n_largest > 1", "tied=n_largest >= 1"),
            Fault(
                "the last group of a tie, not the first",
                "best = max(groups.values(), key=len)",
                "best = max(reversed(groups.values()), key=len)",
            ),
            Fault(
                "candidates in the order of the file",
                "ordered = sorted(candidates, key=lambda candidate: candidate.sample)",
                "ordered = list(candidates)",
            ),
        ],
        "evaluation/voting.py::signature": [
            Fault(
                "a bag's rows counted once",
                'if form == "set":',
                'if form in ("set", "bag"):',
            ),
            Fault("results of different width taken for equal", ".join([width, *sorted(rows)])", ".join(sorted(rows))"),
        ],
        "evaluation/voting.py::_voters": [
            Fault("no vote where all results are empty", "return with_rows or voters", "return with_rows"),
            Fault(
                "failing candidates do not vote",
                'if rule.failing == "abstain":',
                'if rule.failing in ("abstain", "vote"):',
            ),
        ],
        "evaluation/stats.py::Paired.flipped": [
            Fault(
                "MIN_CLUSTERS databases are too few",
                '"database" if self.n_clusters >= MIN_CLUSTERS',
                '"database" if self.n_clusters > MIN_CLUSTERS',
            ),
        ],
        "evaluation/stats.py::paired": [
            Fault(
                "MIN_CLUSTERS databases are too few",
                "if len(groups) >= MIN_CLUSTERS:",
                "if len(groups) > MIN_CLUSTERS:",
            ),
            Fault(
                "the difference's sign",
                "differences = [new - old for old, new in",
                "differences = [old - new for old, new in",
            ),
        ],
        "evaluation/stats.py::estimate": [
            Fault(
                "MIN_CLUSTERS databases are too few",
                "elif len(groups) < MIN_CLUSTERS:",
                "elif len(groups) <= MIN_CLUSTERS:",
            ),
        ],
        "evaluation/stats.py::sign_flip": [
            Fault("a p-value of zero", "return (n_extreme + 1) / (FLIPS + 1)", "return n_extreme / FLIPS"),
        ],
        "evaluation/stats.py::mcnemar": [
            Fault("one outcome less in the tail", "range(fewest + 1)", "range(fewest)"),
            Fault("a p-value above 1", "return min(2 * one_sided, 1.0)", "return 2 * one_sided"),
        ],
        "evaluation/stats.py": [
            Fault("a one-sided quantile", "NormalDist().inv_cdf(1 - ALPHA / 2)", "NormalDist().inv_cdf(1 - ALPHA)"),
        ],
        "evaluation/stats.py::_reach": [
            Fault("the difference not squared", "discordant - difference**2", "discordant - difference"),
            Fault(
                "the variance without the difference", "math.sqrt(discordant - difference**2)", "math.sqrt(discordant)"
            ),
        ],
        "evaluation/metrics.py::pass_at_k": [
            Fault("pass@k-1 for pass@k", "= math.comb(n - correct, k)", "= math.comb(n - correct, k - 1)"),
        ],
        "evaluation/metrics.py::k_point": [
            Fault(
                "all samples, not the first k",
                "record.score(equality) for record in members[:k]]",
                "record.score(equality) for record in members]",
            ),
            Fault("questions with exactly k samples left out", "if len(members) >= k]", "if len(members) > k]"),
        ],
        "evaluation/metrics.py::spread": [
            Fault(
                "one place below the 95th percentile",
                "p95 = ordered[rank - 1]",
                "p95 = ordered[rank - 2]",
            ),
            Fault(
                "the sample's variance, not the population's",
                "variance = math.fsum(squares) / n",
                "variance = math.fsum(squares) / (n - 1 or 1)",
            ),
            Fault("the upper of two middle values", "ordered[(n - 1) // 2]", "ordered[n // 2]"),
        ],
        "evaluation/stats.py::wilson": [
            Fault("the denominator of Wilson's term", "z * z / (4 * n * n)", "z * z / (4 * n)"),
        ],
        "evaluation/stats.py::_nearest_rank": [
            Fault("the upper neighbour of a percentile", "return ordered[max(rank - 1, 0)]", "return ordered[rank]"),
        ],
        "evaluation/stats.py::bootstrap": [
            Fault(
                "tails of twice their size",
                "_nearest_rank(means, (1 - confidence) / 2)",
                "_nearest_rank(means, 1 - confidence)",
            ),
        ],
        "evaluation/stats.py::_count_extreme": [
            Fault(
                "no tolerance for rounding",
                "observed = abs(math.fsum(differences)) - 1e-12",
                "observed = abs(math.fsum(differences))",
            ),
        ],
        "evaluation/metrics.py::by_question": [
            Fault("samples in the order of the file", "members.sort(key=lambda record: record.sample)", "pass"),
            Fault(
                "broken episodes counted", "groups = group(unbroken(records), lambda", "groups = group(records, lambda"
            ),
        ],
        "evaluation/metrics.py::candidates": [
            Fault(
                "a query that failed taken for an empty result",
                "empty=record.executable and record.n_rows == 0",
                "empty=record.n_rows == 0",
            ),
        ],
        "evaluation/metrics.py::data_efficiency": [
            Fault(
                "the gain per question, not per thousand",
                "(after - before) * 100 / examples * 1000",
                "(after - before) * 100 / examples",
            ),
        ],
    },
    "answers::test_an_interval_is_of_the_questions_that_were_asked": {
        "evaluation/metrics.py::mean_by_question": [
            Fault("questions never asked in the interval", "groups = asked_groups", "pass"),
        ],
    },
    "sweep": {
        "evaluation/stats.py::student_t": [
            Fault(
                "a degree of freedom too many",
                "min(runs - 1, len(STUDENT))",
                "min(runs, len(STUDENT))",
            ),
        ],
        "evaluation/stats.py::_interval": [
            Fault(
                "the deviation, not the standard error",
                "statistics.stdev(means) / math.sqrt(n_runs)",
                "statistics.stdev(means)",
            ),
            Fault("half the width compared", "if 2 * half > high - low:", "if half > high - low:"),
        ],
        "evaluation/stats.py::deviation": [
            Fault(
                "the population's deviation",
                "return statistics.stdev(values)",
                "return statistics.pstdev(values)",
            ),
        ],
        "evaluation/stats.py::crossed_bootstrap": [
            Fault(
                "resampled runs without their weights",
                "((of_units @ totals) * of_runs).sum(1)",
                "(of_units @ totals).sum(1)",
            ),
        ],
        "evaluation/stats.py::mean": [
            Fault(
                "an interval beyond 0 and 1",
                "low = max(low, 0.0)\n    high = min(high, 1.0)",
                "pass",
            ),
        ],
        "evaluation/stats.py::difference": [
            Fault(
                "the difference's sign",
                "plain = paired(zeros, averages,",
                "plain = paired(averages, zeros,",
            ),
        ],
        "evaluation/stats.py::ScoresByQuestion.of": [
            Fault(
                "runs overwrite one another",
                "row[number] = value",
                "row[0] = value",
            ),
        ],
    },
    "observations react rollout_engine": {
        "protocols/observations.py::text_table": [
            Fault("line breaks not counted", "        spent += len(line) + 1\n", "        spent += len(line)\n"),
            Fault(
                "a note on cut rows where none is cut",
                "if n_rows < len(result.rows):",
                "if n_rows <= len(result.rows):",
            ),
            Fault(
                "a text of exactly the limit cut",
                "if lines and spent > total_chars:",
                "if lines and spent >= total_chars:",
            ),
            Fault("the header's line break counted", "spent = -1  # the header", "spent = 0  # the header"),
        ],
        "protocols/observations.py::cell": [
            Fault(
                "every cell cut",
                "    if len(text) > limit:\n        text = text[:limit] + CUT\n",
                "    text = text[:limit] + CUT\n",
            ),
            Fault("a bar in a cell ends it", 'defuse(text).replace("|", "\\\\|")', "defuse(text)"),
            Fault("twice as many bytes shown", "value[: limit // 2].hex()", "value[:limit].hex()"),
        ],
        "protocols/base.py::Protocol.is_thinking": [
            Fault(
                "a turn without thoughts taken for an open one",
                "opened > closed",
                "opened >= closed",
            ),
        ],
        "protocols/one_action.py::OneAction.parse": [
            Fault("two actions in a turn", "if error is None and len(actions) > 1:", "if False:"),
            Fault("faults of form counted if not strict", "if fault is None and self.strict:", "if fault is None:"),
        ],
        "rollout/episode.py::Rules.prompt": [
            Fault(
                "a prompt of another question",
                "if cached is not None and cached[:2] == (example, schema):",
                "if cached is not None:",
            ),
        ],
        "protocols/observations.py::json_records": [
            Fault(
                "a truncated result without a note",
                "if result.truncated or len(data) < len(result.rows):",
                "if len(data) < len(result.rows):",
            ),
        ],
        "protocols/observations.py::_json_cell": [
            Fault(
                "numbers that JSON does not know",
                "if math.isfinite(value):",
                "if True:",
            ),
        ],
        "protocols/one_action.py::React.observe": [
            Fault("the header kept, the rows dropped", 'body.partition("\\n")[2]', 'body.partition("\\n")[0]'),
        ],
        "protocols/base.py::Protocol._body": [
            Fault(
                "limits of cell and observation exchanged",
                "(self.config.observation_rows, self.cell_chars, self.observation_chars)",
                "(self.config.observation_rows, self.observation_chars, self.cell_chars)",
            ),
        ],
        "protocols/base.py::Protocol.prompt": [
            Fault("tags in a question", '"question": observations.defuse(', '"question": str('),
        ],
        "protocols/blocks.py::reasoning_error": [
            Fault("an empty reasoning block", "if demanded and not thoughts[0]:", "if demanded and not thoughts:"),
            Fault(
                "the wrong order counted if not strict",
                "if strict and thoughts and scan.blocks[0].tag != tag:",
                "if thoughts and scan.blocks[0].tag != tag:",
            ),
        ],
    },
    "blocks stops phases properties tool_call": {
        "protocols/blocks.py::scan": [
            Fault(
                "an unclosed tag without an error",
                'return Scan(tuple(blocks), stray, "unclosed_tag")',
                "return Scan(tuple(blocks), stray)",
            ),
            Fault(
                "another tag closes a block",
                "elif opened and not (closing and name == opened):",
                "elif opened and not closing:",
            ),
            Fault(
                "text behind the last block",
                "if text[end:].strip():",
                "if False:",
            ),
        ],
        "protocols/blocks.py::truncate_at_stop": [
            Fault(
                "the last end, not the first",
                "return text[: min(ends)]",
                "return text[: max(ends)]",
            ),
        ],
        "protocols/phases.py::Phases._named_kind": [
            Fault("two contents in a turn", "if len(contents) > 1:", "if False:"),
        ],
        "protocols/tools.py::read_fence": [
            Fault("a fence within a fence", 'if "```" in inner:\n', "if False:\n"),
        ],
        "protocols/tools.py::read_call": [
            Fault(
                "unknown arguments of a call",
                'set(arguments) - DATABASE_NAMES != {"sql"}',
                'not {"sql"} <= set(arguments)',
            ),
        ],
    },
    "decoder sampling": {
        "rollout/decoding.py::Decoder._next_batch": [
            Fault(
                "one row deferred too many",
                "self._deferred < self._max_deferred and",
                "self._deferred <= self._max_deferred and",
            ),
        ],
        "rollout/decoding.py::Decoder._rows_to_compute": [
            Fault("a row waits for itself", "if leader is not row and row.cached < shared:", "if row.cached < shared:"),
        ],
        "rollout/decoding.py::Decoder.begin": [
            Fault(
                "no token left to predict from",
                "len(request.token_ids) - 1)\n        row.ids",
                "len(request.token_ids))\n        row.ids",
            ),
        ],
        "rollout/decoding.py::Decoder._take": [
            Fault("a wrong guess followed by others", "if turn is not None or not is_guessed:", "if turn is not None:"),
            Fault("keys of a wrong guess kept", "row.cached = len(row.ids) - 1", "row.cached = part.span.end"),
        ],
        "rollout/decoding.py::Decoder._with_draft": [
            Fault("guesses past the budget", "row.guesses, left - 1)", "row.guesses)"),
        ],
        "rollout/decoding.py::Decoder._draw": [
            Fault("one random number for all guesses", "range(first, first + part.n_drawn)", "[first] * part.n_drawn"),
        ],
        "rollout/drafts.py::continuation": [
            Fault("the oldest place counts", "range(len(ids) - NGRAM - 1, -1, -1)", "range(len(ids) - NGRAM)"),
        ],
        "rollout/decoding.py::Decoder._fill_free_slots": [
            Fault(
                "one cached token copied",
                "self._slots.copy(row.slot, target, row.cached)",
                "self._slots.copy(row.slot, target, 1)",
            ),
        ],
        "rollout/slots.py::Slots._add_with_prefixes": [
            Fault("own keys without end", "span.end <= prefix.length + MOST_OWN_KEYS", "True"),
            Fault("the prefix is read as own keys, too", "first_own += [prefix.length]", "first_own += [0]"),
        ],
        "rollout/slots.py::Slots._add_behind": [
            Fault("a token that sees the next one", "<= last[:, None, :, None]", "<= last[:, None, :, None] + 1"),
        ],
        "rollout/decoding.py::Decoder._copy_prefix": [
            Fault(
                "a prefix longer than some share",
                "min(source.prefix.length, length)",
                "max(source.prefix.length, length)",
            ),
        ],
        "rollout/slots.py::Slots._add_copied": [
            Fault("a token that does not see itself", "mask = keys <= last[", "mask = keys < last["),
        ],
        "rollout/drawing.py::draw": [
            Fault(
                "the token itself in the mass before it",
                "before = ordered.cumsum(dim=-1) - ordered",
                "before = ordered.cumsum(dim=-1)",
            ),
            Fault(
                "tokens of equal probability kept",
                "torch.where(probs > drawn, probs, 0.0)",
                "torch.where(probs >= drawn, probs, 0.0)",
            ),
            Fault("one random number used twice", "uniform[outside, 1]", "uniform[outside, 0]"),
        ],
        "rollout/drawing.py::uniforms": [
            Fault("the same number at every position", "_mix(stream + positions * _GOLDEN)", "_mix(stream)"),
        ],
    },
    "packed_weights": {
        "rollout/packed_weights.py::packed_linear_layers": [
            Fault("layers that stay replaced", 'vars(layer).pop("forward", None)', "pass"),
        ],
        "rollout/packed_weights.py::_layers_to_pack": [
            Fault("packed in float32, too", "dtype != torch.bfloat16 or", "False or"),
            Fault("another's replacement is lost", " and not is_replaced:", ":"),
        ],
        "rollout/packed_weights.py::_product": [
            Fault("no bias", "packed, rounded_bias,", "packed, None,"),
        ],
    },
    "episode rollout_engine": {
        "rollout/episode.py::Episode.__init__": [
            Fault("a prompt that leaves no room", "if self._room < 1:\n", "if self._room < 0:\n"),
        ],
        "rollout/episode.py::Episode._show": [
            Fault(
                "an observation that leaves no room", "if self._room - len(ids) < 1:", "if self._room - len(ids) < 0:"
            ),
            Fault(
                "no forced answer at the cap",
                "self._forced = len(self.turns) >= self._rules.max_turns\n",
                "self._forced = len(self.turns) > self._rules.max_turns\n",
            ),
            Fault("a loss on observations", "self._mask += [0] * len(ids)", "self._mask += [1] * len(ids)"),
        ],
        "rollout/episode.py::Episode.accept": [
            Fault(
                "one turn more than the cap",
                "is_at_cap = len(self.turns) >= self._rules.max_turns",
                "is_at_cap = len(self.turns) > self._rules.max_turns",
            ),
        ],
        "rollout/episode.py::Episode.observe": [
            Fault(
                "an answer that did not run ends the episode",
                "result.ok and turn.action.kind",
                "turn.action.kind",
            ),
            Fault(
                "an answer without room for its error lost",
                "if self.stop is StopReason.TOKEN_LIMIT and",
                "if self.stop is StopReason.BROKEN and",
            ),
        ],
        "rollout/episode.py::Episode.next_request": [
            Fault(
                "a turn longer than the room",
                "max_tokens=min(self._rules.sampling.turn_tokens, self._room)",
                "max_tokens=self._rules.sampling.turn_tokens",
            ),
        ],
        "rollout/episode.py::Episode.trajectory": [
            Fault(
                "the episode's end at its start",
                "end = len(self._ids)",
                "end = 0",
            ),
        ],
    },
    "outcome terms rubric": {
        "rewards/panel.py::Rubric.score": [
            Fault(
                "no weights in a track's sum",
                "by_track[term.track] += term.weight * by_term",
                "by_track[term.track] += by_term",
            ),
            Fault(
                "no weights in the payments", "weighted.append([term.weight * value for", "weighted.append([value for"
            ),
        ],
        "rewards/terms.py::turns": [
            Fault(
                "a point for an answer at the cap",
                "return float(outcome.correct and finished < outcome.max_turns)",
                "return float(outcome.correct)",
            ),
            Fault("the last easy turn not paid", "return float(finished <= easy)", "return float(finished < easy)"),
            Fault(
                "the medium level's rule for easy questions",
                'if outcome.hardness == "medium":',
                'if outcome.hardness == "easy":',
            ),
        ],
        "rewards/terms.py::jaccard": [
            Fault(
                "two empty sets are alike",
                "    if not union:\n        return 0.0\n",
                "    if not union:\n        return 1.0\n",
            ),
        ],
        "rewards/outcome.py::make_outcomes": [
            Fault(
                "a broken episode scored", "verdict.broken or trajectory.stop is StopReason.BROKEN", "verdict.broken"
            ),
            Fault(
                "predictions parsed without need",
                "analysis.parse_queries(unbroken, reads_schema)",
                "analysis.parse_queries(unbroken)",
            ),
            Fault(
                "a partly right answer is correct",
                "correct=verdict.scores.get(equality, 0.0) == 1.0",
                "correct=verdict.scores.get(equality, 0.0) > 0.0",
            ),
        ],
        "rewards/outcome.py::Analysis.parse_queries": [
            Fault(
                "items of another schema",
                "if schema == schema_of[database]:",
                "if True:",
            ),
            Fault(
                "gold items of a query that does not parse",
                "if query in gold and new_items is not None:",
                "if query in gold:",
            ),
        ],
        "rewards/terms.py::mtir_result": [
            Fault(
                "a wrong answer paid like a right one",
                "return value\n    return -value",
                "return value\n    return value",
            ),
            Fault(
                "a failing query graded",
                "if not outcome.trajectory.well_formed or not outcome.executable:",
                "if not outcome.trajectory.well_formed:",
            ),
        ],
        "rewards/terms.py::table_and_column_set": [
            Fault(
                "tables left out of the set",
                "return frozenset(schema.tables) | frozenset(schema.columns)",
                "return frozenset(schema.columns)",
            ),
        ],
        "rewards/terms.py::format_": [
            Fault(
                "any answer is well-formed",
                "return float(outcome.trajectory.well_formed)",
                "return float(outcome.trajectory.final_sql is not None)",
            ),
        ],
        "rewards/terms.py::judge": [
            Fault("a grade of 0 taken for none", "    if outcome.judge is not None:\n", "    if outcome.judge:\n"),
        ],
        "rewards/terms.py::static_grade": [
            Fault(
                "the wrong divisor of a mean",
                "return total / 3",
                "return total / 2",
            ),
        ],
        "rewards/terms.py::turn_faults": [
            Fault("a fault paid", "return [-cost if is_faulty", "return [cost if is_faulty"),
            Fault("the first turn blamed", "faulty[-1] = True  #", "faulty[0] = True  #"),
        ],
        "rewards/terms.py::skyrl": [
            Fault(
                "right and wrong exchanged",
                "if outcome.correct:\n        return right\n    return wrong",
                "if outcome.correct:\n        return wrong\n    return right",
            ),
        ],
        "rewards/terms.py::trust_exec": [
            Fault(
                "running and failing exchanged",
                "if outcome.executable:\n        return runs\n    return fails",
                "if outcome.executable:\n        return fails\n    return runs",
            ),
        ],
        "rewards/terms.py::trust_format": [
            Fault(
                "one phase is enough",
                "trajectory.well_formed and demanded_kinds <= seen_kinds",
                "trajectory.well_formed and not demanded_kinds.isdisjoint(seen_kinds)",
            ),
            Fault("no rule against malformed turns", "if not is_complete or not is_clean:", "if not is_complete:"),
        ],
        "rewards/terms.py::trust_schema": [
            Fault("always coupled to the answer", "if coupled and not outcome.correct:", "if not outcome.correct:"),
            Fault("the subset's direction", "if not gold <= items:", "if not items <= gold:"),
            Fault("the precision inverted", "return len(gold) / len(items)", "return len(items) / len(gold)"),
        ],
        "rewards/terms.py::mtir_format": [
            Fault(
                "no penalty for a malformed turn",
                "return value\n    return -value",
                "return value\n    return 0.0",
            ),
        ],
        "rewards/terms.py::mtir_exec": [
            Fault(
                "no penalty for a query that fails",
                "return value\n    return -value",
                "return value\n    return 0.0",
            ),
        ],
        "rewards/panel.py::Rubric.margin": [
            Fault(
                "the best of the right answers",
                "worst_right = min(",
                "worst_right = max(",
            ),
            Fault("the least of the wrong answers", "best_wrong = max(", "best_wrong = min("),
        ],
        "rewards/panel.py::_payments": [
            Fault("the first turn paid", "paid = [*unpaid_turns, paid]", "paid = [paid, *unpaid_turns]"),
        ],
        "rewards/outcome.py::_measured_levels": [
            Fault("the level of a failed worker cached", 'if level != "extra":  # which', "if True:  # which"),
        ],
    },
    "judge": {
        "rewards/panel.py::_case": [
            Fault(
                "a judge for right answers",
                "if outcome.broken or outcome.correct or sql is None:",
                "if outcome.broken or sql is None:",
            ),
        ],
        "rewards/panel.py::read_grade": [
            Fault("a grade without its scale", "grade = float(match[1]) / scale", "grade = float(match[1])"),
            Fault("a grade of 0 is none", "if not 0.0 <= grade <= 1.0:", "if not 0.0 < grade <= 1.0:"),
        ],
        "rewards/panel.py::_grades": [
            Fault(
                "a case answered on its question alone stays broken",
                "if shortened is not None or without is not None:",
                "if shortened is not None:",
            ),
        ],
        "rewards/panel.py::grade": [
            Fault("a missing grade is not broken", "broken=case not in grades)", "broken=False)"),
        ],
    },
    "compare equality_properties": {
        "sql/equalities/compare.py::close": [
            Fault(
                "half a unit apart for any numbers",
                "not has_whole_number or abs(left - right) < 0.5",
                "not has_whole_number or True",
            ),
            Fault(
                "the smallest whole number not rounded",
                "if max(abs(left), abs(right)) >= WHOLE:",
                "if max(abs(left), abs(right)) > WHOLE:",
            ),
        ],
        "sql/equalities/compare.py": [
            Fault("a wider tolerance", "RELATIVE = 1e-12", "RELATIVE = 1e-9"),
        ],
        "sql/equalities/compare.py::strict": [
            Fault(
                "rows in any order",
                "is_equal = all(map(close_rows, gold.rows, predicted.rows))",
                "is_equal = same_bag(gold.rows, predicted.rows)",
            ),
            Fault(
                "results of different width",
                "if len(gold.columns) != len(predicted.columns) or len(gold.rows)",
                "if len(gold.rows)",
            ),
        ],
        "sql/equalities/compare.py::strict_nonempty": [
            Fault(
                "two empty results are equal",
                "    if not gold.rows:\n        return 0.0\n",
                "",
            ),
        ],
        "sql/equalities/compare.py::bird": [
            Fault(
                "rows counted, not a set",
                "or set(gold.rows) == set(predicted.rows)",
                "or Counter(gold.rows) == Counter(predicted.rows)",
            ),
        ],
        "sql/equalities/compare.py::suite": [
            Fault(
                "results of different width in the suite",
                "or len(gold.rows[0]) != len(predicted.rows[0]):",
                "or False:",
            ),
        ],
        "sql/equalities/compare.py::soft_f1": [
            Fault(
                "fewer predicted rows lower the count",
                "false_positive += max(0, len(predicted_rows) - len(gold_rows))",
                "false_positive += len(predicted_rows) - len(gold_rows)",
            ),
        ],
        "sql/equalities/compare.py::spider_exec": [
            Fault("a prediction without units", "    if predicted_units is None:\n        return 0.0\n", ""),
        ],
    },
    "verdicts execution": {
        "sql/sandbox/worker.py::JobServer._verdict": [
            Fault(
                "one database of the suite is enough",
                "scores[name] = min(scores[name], score)",
                "scores[name] = max(scores[name], score)",
            ),
            Fault(
                "one database for every equality",
                "compared_on = locations if equality.suite else locations[:1]",
                "compared_on = locations[:1]",
            ),
        ],
        "sql/sandbox/worker.py::OpenDatabases.gold": [
            Fault(
                "a truncated gold result",
                "raw = base.untruncated(self.run(location, sql, self._bounds.max_rows))",
                "raw = self.run(location, sql, self._bounds.max_rows)",
            ),
        ],
        "sql/sandbox/worker.py::OpenDatabases.refresh": [
            Fault(
                "gold results of another query dropped",
                "[key for key in self._gold if key[0] == location]",
                "[key for key in self._gold if key[1] == location]",
            ),
        ],
        "sql/dialects/base.py::fetch": [
            Fault("one row less than is needed", "max_rows + 1 - len(rows)))", "max_rows - len(rows)))"),
        ],
    },
    "sandbox_sqlite sandbox_failures sandbox_hostile sandbox_state engines": {
        "sql/dialects/base.py::fetch": [
            Fault(
                "one fetched row too many",
                "    size = 0\n    step = FIRST_FETCH\n",
                "    size = 1\n    step = FIRST_FETCH\n",
            ),
        ],
        "sql/dialects/sqlite.py::guard": [
            Fault("hidden tables readable", "DENY if first in HIDDEN_TABLES else ALLOW", "ALLOW"),
            Fault(
                "any function allowed",
                "second.lower() in FUNCTIONS else DENY",
                "second.lower() in FUNCTIONS else ALLOW",
            ),
        ],
    },
    "nightly/ledger nightly/promotion": {
        "nightly/promotion.py::decide_promotion": [
            Fault(
                "worse and better exchanged by the test",
                "is_worse = is_significant and net < 0\n        is_better = is_significant and net > 0",
                "is_worse = is_significant and net > 0\n        is_better = is_significant and net < 0",
            ),
            Fault(
                "worse and better exchanged by the interval",
                "is_worse = paired.high < 0\n        is_better = paired.low > 0",
                "is_worse = paired.low < 0\n        is_better = paired.high > 0",
            ),
            Fault(
                "the largest drop's sign",
                "if value < -settings.max_drop - 1e-9}",
                "if value < settings.max_drop - 1e-9}",
            ),
            Fault(
                "no tolerance for rounding", "if value < -settings.max_drop - 1e-9}", "if value < -settings.max_drop}"
            ),
            Fault(
                "a better model promoted unmeasured", "    if unmeasured:\n", "    if unmeasured and not is_better:\n"
            ),
        ],
        "nightly/promotion.py": [
            Fault("ten times the test's size", "ALPHA = 0.05  # size of McNemar's", "ALPHA = 0.5  # size of McNemar's"),
        ],
        "nightly/promotion.py::_records_of_level": [
            Fault(
                "rows of all levels",
                "for record in records if record.hardness == level]",
                "for record in records]",
            ),
        ],
        "nightly/promotion.py::question_drift": [
            Fault(
                "one large side is enough",
                "if min(len(learned), len(fresh)) < ENOUGH:",
                "if max(len(learned), len(fresh)) < ENOUGH:",
            ),
        ],
        "nightly/promotion.py::distance": [
            Fault("the distance not halved", "return sum(differences) / 2", "return sum(differences)"),
            Fault("traits of the older side alone", "for value in before | after:", "for value in before:"),
        ],
        "nightly/promotion.py::trained_on": [
            Fault(
                "data that both were trained on",
                "_data_keys(store, checkpoint) - _data_keys(store, other)",
                "_data_keys(store, checkpoint)",
            ),
            Fault(
                "repeats in other databases count",
                "for leak in repeated if leak.same_database)",
                "for leak in repeated)",
            ),
        ],
        "nightly/night.py::unseen_records": [
            Fault(
                "questions that were trained on",
                "for record in records if record.example_id not in seen]",
                "for record in records]",
            ),
        ],
        "nightly/night.py::compare_with_champion": [
            Fault(
                "the first challenger decided as worse",
                '        if decision == "worse":\n            decision = "kept"',
                "        pass",
            ),
            Fault(
                "the challenger, not its start, looked up",
                "    elif challenger.start in withdrawn:  #",
                "    elif challenger.key in withdrawn:  #",
            ),
        ],
        "nightly/night.py::evaluated": [
            Fault(
                "the largest share of broken answers refused",
                "if len(broken) > recipe.contracts.max_broken * len(greedy):",
                "if len(broken) >= recipe.contracts.max_broken * len(greedy):",
            ),
        ],
        "nightly/ledger.py::Ledger.champions": [
            Fault(
                "kept models taken for champions",
                'row["decision"] == "promoted" and row_tier == tier:',
                'row["decision"] != "worse" and row_tier == tier:',
            ),
            Fault("a rollback removes no champion", 'if champion.key != row["from"]]', "if champion.key]"),
        ],
        "nightly/ledger.py::Ledger.usable": [
            Fault(
                "batches of kept nights unusable",
                'if decided.get(path.name) != "worse"]',
                'if decided.get(path.name) == "promoted"]',
            ),
        ],
        "nightly/ledger.py": [
            Fault(
                "batches of refused nights taken",
                'TAKEN = ("promoted", "kept", "worse")',
                'TAKEN = ("promoted", "kept", "worse", "refused")',
            ),
        ],
        "nightly/ledger.py::Ledger.rollback": [
            Fault("the first champion restored", "restored = champions[-2]", "restored = champions[0]"),
        ],
        "nightly/ledger.py::Ledger.add": [
            Fault(
                "a champion that changed meanwhile overwritten",
                "standing_now != standing",
                "champion is not None and standing_now != standing",
            ),
        ],
        "nightly/union.py::_join_demonstrations": [
            Fault(
                "the replay's share of the old rows",
                "min(n_old, round(replay * n_fresh))",
                "min(n_old, round(replay * n_old))",
            ),
            Fault("places before the offset", "if n_before + row in replayed]", "if row in replayed]"),
        ],
        "nightly/union.py::_join_questions": [
            Fault(
                "sources numbered over one another",
                "n_sources += int(last_source) + 1",
                "n_sources += int(last_source)",
            ),
            Fault(
                "held-out questions of every part",
                "        if index == 0:\n            pools += HELD_OUT",
                "        pools += HELD_OUT",
            ),
        ],
        "nightly/union.py::_join_gold_schemas": [
            Fault(
                "the last row of a question, not the first", '"example_id", keep="first"', '"example_id", keep="last"'
            ),
        ],
    },
    "nightly/inbox": {
        "nightly/inbox.py::_fresh_rows": [
            Fault("a question taken twice", "if mark not in taken:", "if True:"),
        ],
        "nightly/inbox.py::freeze_batch": [
            Fault("a batch overwritten", "number = max(numbers, default=0) + 1", "number = max(numbers, default=0)"),
        ],
    },
    "recipes": {
        "recipe/recipes.py::laid_over": [
            Fault(
                "a mapping replaced, not merged",
                "merged[key] = laid_over(known, value)",
                "pass",
            ),
            Fault(
                "the base changed in place", "    merged = dict(base)\n    for key", "    merged = base\n    for key"
            ),
        ],
        "recipe/recipes.py::_of_one_kind": [
            Fault(
                "options of another kind kept",
                'base["kind"] != overlay["kind"]:\n        return {}',
                'base["kind"] != overlay["kind"]:\n        return dict(base)',
            ),
        ],
        "recipe/recipes.py::_compose": [
            Fault(
                "an include wins over what follows it",
                "merged = _merge(merged, included, path)",
                "merged = _merge(included, merged, path)",
            ),
            Fault(
                "an include wins over the file",
                "return _merge(merged, tree, path)",
                "return _merge(tree, merged, path)",
            ),
        ],
        "recipe/recipes.py::_merge": [
            Fault(
                "steps that a file sets beside epochs",
                '"steps" in grpo and "epochs" not in grpo\n',
                '"steps" in grpo\n',
            ),
        ],
        "recipe/recipes.py::_set": [
            Fault(
                "an override of steps that keeps the epochs",
                'if key == "grpo.steps":  #',
                'if key == "grpo.epochs" and value:  #',
            ),
            Fault(
                "options of the old part kept",
                "if last in OWNERS and node.get(last, value) != value:",
                "if last in OWNERS and last not in node:",
            ),
        ],
        "recipe/recipes.py::_list_index": [
            Fault(
                "a term found by its beginning", 'if item["term"] == name:', 'if str(item["term"]).startswith(name):'
            ),
            Fault("an index behind the list's end", "if name in numbers:", "if name.isdigit():"),
        ],
        "recipe/recipes.py::resolve_tree": [
            Fault(
                "the file's name wins over the recipe's",
                'tree.setdefault("name", path.stem)',
                'tree["name"] = path.stem',
            ),
        ],
        "recipe/yaml_files.py::_Strict.construct_mapping": [
            Fault(
                "a key given twice",
                "if key in seen or str(key) in seen:",
                "if (key in seen or str(key) in seen) and not seen:",
            ),
        ],
        "core/files.py::digest": [
            Fault(
                "a digest by the order of keys",
                "json.dumps(value, sort_keys=True, ensure_ascii=False, separators",
                "json.dumps(value, ensure_ascii=False, separators",
            ),
        ],
        "recipe/yaml_files.py::_parse": [
            Fault(
                "a long file refused, a bomb not",
                "if _size(value, {}) > max(MOST_VALUES, len(text)):",
                "if len(text) > MOST_VALUES:",
            ),
        ],
        "recipe/recipes.py::_put_benchmarks": [
            Fault(
                "benchmarks replaced, not added",
                "benchmarks += _benchmarks_of(entry)",
                "benchmarks = _benchmarks_of(entry)",
            ),
        ],
    },
}
EQUIVALENT = {  # faults that change no result, by place and name: why
    (
        "training/samples.py::track_mask",
        "the token behind a turn in its track",
    ): "the token behind a turn is an observation's, which has no weight",
    (
        "curation/filtering.py::CheckedTrajectory.of",
        "a broken episode taken for a right one",
    ): "a broken outcome's verdict scores 0, so it is not correct",
    (
        "nightly/promotion.py::decide_promotion",
        "no tolerance for rounding",
    ): "greedy answers are right or wrong: the float of their share is that of the same share as the bound",
    (
        "nightly/union.py::_join_gold_schemas",
        "the last row of a question, not the first",
    ): "the rows of the held-out questions are the same in all parts",
}


def split_place(place: str) -> tuple[str, str]:
    """The file under pipelines/ and the function of a place; "" for a line outside of functions."""
    file, _, function = place.partition("::")
    return file, function


def source_span(text: str, function: str) -> tuple[int, int]:
    """Where a function's source begins and ends in a file's text, its decorators included; (0, 0) if there is none."""
    node: ast.AST | None = ast.parse(text)
    for name in function.split("."):
        named = (child for child in ast.walk(node) if isinstance(child, ast.ClassDef | ast.FunctionDef))
        node = next((child for child in named if child.name == name), None)
        if node is None:
            return 0, 0
    assert isinstance(node, ast.ClassDef | ast.FunctionDef)
    assert node.end_lineno is not None
    lines = text.splitlines(keepends=True)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    return len("".join(lines[: first - 1])), len("".join(lines[: node.end_lineno]))


def with_fault(text: str, place: str, fault: Fault) -> str:
    """A file's text with a fault in it."""
    _, function = split_place(place)
    start, end = source_span(text, function) if function else (0, len(text))
    count = text[start:end].count(fault.code)
    if count != 1:
        sys.exit(f"{place}: {fault.name}: its code stands there {count} times: {fault.code!r}")
    return text[:start] + text[start:end].replace(fault.code, fault.faulty) + text[end:]


def each_fault() -> Iterator[tuple[str, Fault]]:
    """Every fault with its place."""
    for by_place in FAULTS.values():
        for place, faults in by_place.items():
            for fault in faults:
                yield place, fault


def check() -> int:
    """Look for the code of every fault; their number."""
    texts: dict[str, str] = {}
    names: set[tuple[str, str]] = set()
    for place, fault in each_fault():
        file, _ = split_place(place)
        if file not in texts:
            path = ROOT / "pipelines" / file
            if not path.is_file():
                sys.exit(f"{place}: {fault.name}: there is no such file")
            texts[file] = path.read_text(encoding="utf-8")
        with_fault(texts[file], place, fault)
        if (place, fault.name) in names:
            sys.exit(f"{place}: {fault.name}: two faults have this name")
        names.add((place, fault.name))
    unknown = EQUIVALENT.keys() - names
    if unknown:
        sys.exit(f"EQUIVALENT names faults that do not exist: {sorted(unknown)}")
    return len(names)


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


def test_paths(root: Path, names: str) -> list[str]:
    """The tests that decide some faults, as pytest takes them."""
    tests = []
    for word in names.split():
        name, *test = word.split("::")
        folder, slash, name = name.rpartition("/")
        found = sorted((root / "tests").rglob(f"{folder}{slash}test_{name}.py"))
        tests += ["::".join([str(path), *test]) for path in found]
    return tests


def run(root: Path, only: str) -> int:
    """Put each chosen fault into a copy of the tree; print those that no test sees, then a table. Their number."""
    rows = []
    survivors = 0
    for names, by_place in FAULTS.items():
        listed = []
        for place, faults in by_place.items():
            listed += [(place, fault) for fault in faults if only in f"{names} {place} {fault.name} {fault.code}"]
        chosen = [(place, fault) for place, fault in listed if (place, fault.name) not in EQUIVALENT]
        tests = test_paths(root, names)
        if any("/training/" in test for test in tests) and chosen:
            os.environ.setdefault("OMP_NUM_THREADS", "1")  # as tests/conftest.py
            for library in LIBRARIES:
                importlib.import_module(library)
        if chosen and seen(root, tests, fault=False):
            sys.exit(f"the tests {names} fail without a fault")
        caught = 0
        for place, fault in chosen:
            file, _ = split_place(place)
            path = root / "pipelines" / file
            text = path.read_text(encoding="utf-8")
            path.write_text(with_fault(text, place, fault), encoding="utf-8")
            if seen(root, tests):
                caught += 1
            else:
                print(f"{place}: {fault.name}: {fault.code.strip()!r} -> {fault.faulty.strip()!r}", flush=True)
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
    parser.add_argument("--only", default="", help="faults whose tests, place, name or code hold this word")
    parser.add_argument("--check", action="store_true", help="look for each piece of code, and run nothing")
    options = parser.parse_args()
    print(f"{check()} faults")
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
