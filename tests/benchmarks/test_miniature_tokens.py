"""The tiny tokenizer learns each word of the miniature world, in each stored form, as one token."""

import pytest

from pipelines.benchmarks import base
from pipelines.benchmarks.miniature.world import CATEGORIES, FORMS, KINDS, MEASURES, stored
from pipelines.protocols.base import build_protocol
from pipelines.recipe.config import Model, ProtocolSection, Sampling
from pipelines.rollout import model_loading
from pipelines.rollout.engine import RolloutEngine
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.oracle import OraclePolicy
from pipelines.sql.engine import Limits, SqlEngine
from pipelines.sql.schema import introspect
from pipelines.training import model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(load, tmp_path_factory):
    """Trained as the model stage does, on the teacher's trajectories over all databases of the recipe's SFT pool."""
    root = tmp_path_factory.mktemp("stage")
    examples = base.resolve_locations(load("train", root, databases=1000, questions=14).examples, root)
    protocol = build_protocol(ProtocolSection(name="react", prompt="brief", observation_rows=8, cell_chars=24))
    with SqlEngine(Limits(timeout_s=5, memory_mb=512)) as sql:
        engine = RolloutEngine(OraclePolicy(protocol), protocol, sql, Sampling(), 6, introspect)
        done = engine.run([EpisodeRequest(example, 0, number) for number, example in enumerate(examples)])
    texts = [text for one in done for text in (one.prompt[0][1], *(t.text + (t.observation or "") for t in one.turns))]
    out = tmp_path_factory.mktemp("model")
    model.make_tiny(Model(), texts, protocol.tags, out, seed=0)
    return model_loading.load(out, Model())[1]


def test_every_name_and_every_value_in_every_form_is_one_token(tokenizer):
    names = [f" {table}{plural}" for table in KINDS for plural in ("", "s")]
    names += [f" {column}" for column in (*CATEGORIES, *MEASURES)]
    values = [stored(c, word, form) for c, words in CATEGORIES.items() for word in words for form in FORMS]
    wanted = names + [space + value for value in values for space in (" ", "")]  # spaced in text, bare inside quotes
    split = [word for word in wanted if len(tokenizer.encode(word)) > 1]
    assert len(wanted) == 444
    assert split == []


def test_a_quoted_value_is_quote_word_quote(tokenizer):
    ids = tokenizer.encode(" WHERE country = 'FRANCE'")
    assert [tokenizer.decode([id]) for id in ids] == [" WHERE", " country", " =", " '", "FRANCE", "'"]
