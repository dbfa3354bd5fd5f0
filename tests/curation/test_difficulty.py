"""S(q), SQL-Trail's RL selection (A.6, equation 13) and TRUST-SQL's bound, by hand-computed numbers."""

import dataclasses
import json

import polars as pl
import pytest

from pipelines.core.errors import DataError, EndpointError
from pipelines.curation.difficulty import (
    COLUMNS,
    ScoredQuestion,
    difficulty_figures,
    rank,
    right_histogram,
    score_questions,
    select_rl_set,
    select_rl_set_by_parts,
)
from pipelines.recipe import recipes
from pipelines.recipe.config import Difficulty
from pipelines.rollout.policies.base import ScriptedPolicy
from pipelines.stages import data
from pipelines.stages import difficulty as stage
from pipelines.stages.context import Context, Silent


def of(*scored):
    """A table of questions: id, rollouts, right ones."""
    return pl.DataFrame([dataclasses.asdict(ScoredQuestion(*one)) for one in scored], schema=COLUMNS)


def test_s_of_q_is_the_pass_rate_without_broken_rollouts_and_one_at_its_ends(outcome):
    # Equation 13 with G = 6: 0/6 -> 1, 1/6 -> 1/6, 5/6 -> 5/6, 6/6 -> 1
    found = [ScoredQuestion("q", 6, right).score for right in range(7)]
    assert found == pytest.approx([1, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6, 1])
    outcomes = [outcome("a"), outcome("a", 1, correct=False), outcome("a", 2, broken=True), outcome("b", broken=True)]
    assert score_questions(outcomes) == [ScoredQuestion("a", 2, 1)]


@pytest.fixture
def scoring(tmp_path, monkeypatch):
    """The stage over four questions of one generated database, with a plain function as the policy."""
    small = "{kind: miniature, split: SPLIT, options: {databases: 1, questions: 4}}"
    sources = {"sft": small, "dev": small, "rl": f"[{small}]", "test": f"[{small}]"}
    splits = {"sft": "train", "rl": "train", "dev": "dev", "test": "test"}
    settings = [f"data.{pool}={text.replace('SPLIT', splits[pool])}" for pool, text in sources.items()]
    settings += ["rollout.processes=1", "difficulty.group=2", "difficulty.keep=4", "difficulty.explore=4"]
    recipe, watched = recipes.load("miniature", [*settings, "difficulty.candidates=null"]), Watched()
    inputs = {"data": tmp_path / "data", "model": tmp_path / "model"}
    for folder in (*inputs.values(), tmp_path / "difficulty"):
        folder.mkdir()
    data.build_pools(Context("data", recipe, inputs["data"], {}, watched))

    def run(say):
        monkeypatch.setattr(stage, "policy", lambda *_: ScriptedPolicy(say))
        stage.score_difficulty(Context("difficulty", recipe, tmp_path / "difficulty", inputs, watched))
        return json.loads((tmp_path / "difficulty" / "metrics.json").read_text()), watched.warned

    return run


class Watched(Silent):
    def __init__(self):
        self.warned = []

    def warn(self, text):
        self.warned.append(text)


def test_a_question_whose_every_rollout_broke_is_counted_and_warned_of(scoring):
    """The first of four questions breaks both times, the others are answered wrong; nothing else has a score."""
    first = []

    def say(request):
        first.append(request.example.id)
        if request.example.id == first[0]:
            raise EndpointError("down")
        return "<solution> SELECT 'no'</solution>"

    figures, warned = scoring(say)
    assert (figures["unscored"], figures["questions"], figures["explore"]) == (1, 3, 3)
    assert warned == ["1 of 4 questions have no score: all their episodes broke"]


def test_a_stage_whose_every_question_has_a_score_warns_of_nothing(scoring):
    figures, warned = scoring(lambda request: "<solution> SELECT 'no'</solution>")
    assert (figures["unscored"], figures["questions"], warned) == (0, 4, [])


def test_a_stage_in_which_everything_broke_says_so(scoring):
    def down(request):
        raise EndpointError("down")

    with pytest.raises(DataError, match="all episodes of 4 questions broke"):
        scoring(down)


def test_ranking_puts_the_hardest_solvable_first_and_the_degenerate_last():
    scored = of(("all", 6, 6), ("most", 6, 5), ("none", 6, 0), ("one", 6, 1), ("half", 6, 3))
    ids = rank(scored, seed=0)["example_id"].to_list()
    assert ids[:3] == ["one", "half", "most"]
    assert set(ids[3:]) == {"all", "none"}


def test_the_balanced_set_is_the_first_by_s_and_the_exploration_set_was_never_solved():
    scored = of(*((f"q{right}{copy}", 6, right) for right in range(7) for copy in range(3)))
    chosen = select_rl_set(scored, Difficulty(keep=7, explore=2), seed=0)
    assert sorted(chosen.balanced[:3]) == ["q10", "q11", "q12"]
    assert sorted(chosen.balanced[3:6]) == ["q20", "q21", "q22"]
    assert chosen.balanced[6].startswith("q3")
    assert len(chosen.explore) == 2
    assert all(id.startswith("q0") for id in chosen.explore)


def test_a_small_pool_gives_a_smaller_set_and_explores_a_question_once():
    scored = of(("none", 6, 0), ("all", 6, 6), ("some", 6, 2))
    assert select_rl_set(scored, Difficulty(keep=700, explore=0), seed=0).balanced == ["some"]
    both = of(("q", 6, 0))
    assert select_rl_set_by_parts(
        both, [both], Difficulty(keep=1, explore=2, explore_parts=(1, 1)), seed=0
    ).explore == ["q"]


def test_bounds_and_seeds_of_a_selection():
    scored = of(*((f"q{right}", 8, right) for right in range(9)))
    chosen = select_rl_set(scored, Difficulty(group=8, keep=100, max_pass=6 / 8, explore=5), seed=0)
    assert sorted(chosen.balanced) == ["q0", "q1", "q2", "q3", "q4", "q5"]
    assert chosen.explore == []  # the never-solved one is in the set already
    scored = of(*((f"q{number}", 6, 3) for number in range(20)))
    first = select_rl_set(scored, Difficulty(keep=5), seed=0).balanced
    assert first == select_rl_set(scored.reverse(), Difficulty(keep=5), seed=0).balanced
    assert first != select_rl_set(scored, Difficulty(keep=5), seed=1).balanced


def test_sql_trails_exploration_set_is_made_of_parts_of_named_pools():
    """A.6: post-SFT failures, then pass@6 = 0 of two pools (127 + 100 + 100 there; 2 + 1 + 1 here)."""
    sft = of(*((f"sft{number}", 6, 0) for number in range(5)), ("learned", 6, 6))
    synsql = of(("syn_never", 6, 0), ("syn_some", 6, 1), ("syn_more", 6, 4))
    spider = of(("spider_never", 6, 0), ("spider_some", 6, 1))
    chosen = select_rl_set_by_parts(
        sft, [synsql, spider], Difficulty(keep=700, explore=4, explore_parts=(2, 1, 1)), seed=0
    )
    assert chosen.balanced == ["syn_some", "syn_more"]  # of the first pool only
    assert [id.rstrip("0123456789") for id in chosen.explore] == ["sft", "sft", "syn_never", "spider_never"]
    assert len(set(chosen.explore)) == 4


def test_the_histogram_counts_questions_by_right_rollouts():
    assert right_histogram([ScoredQuestion("q", 4, right) for right in (0, 4, 4, 1)], 4) == [1, 1, 0, 0, 2]
    assert right_histogram([ScoredQuestion("a", 2, 1)], 6) == [0, 0, 0, 1, 0, 0, 0]
    assert right_histogram([ScoredQuestion("a", 20, 1)], 6) == [0, 1, 0, 0, 0, 0, 0]
    assert right_histogram([ScoredQuestion("a", 20, 19)], 6) == [0, 0, 0, 0, 0, 1, 0]


def test_the_summary_by_hand():
    # Pass rates 0, 1/4, 1: mean 5/12. Zero variance: 2 of 3. pass@4 of full groups: (0 + 1 + 1) / 3
    found = difficulty_figures(of(("a", 4, 0), ("b", 4, 1), ("c", 4, 4)), group=4)
    assert found["questions"] == 3
    assert found["pass_rate"] == pytest.approx(5 / 12)
    assert found["zero_variance_share"] == pytest.approx(2 / 3)
    assert found["pass_at_4"] == pytest.approx(2 / 3)
    assert (
        difficulty_figures(of(("a", 4, 0), ("b", 4, 4), ("c", 3, 3)), 4)["pass_at_4"] == 1 / 2
    )  # c's group is not full
    assert [found[f"right_{n}_of_4"] for n in range(5)] == [1, 1, 0, 0, 1]
    assert difficulty_figures(of(), 6) == {"questions": 0.0}
