"""A real vLLM server on this machine's CPU, in an environment of its own, as the policy of real episodes and of GRPO.

bash infra/vllm_cpu.sh FOLDER
SQLTRAIN_VLLM_PYTHON=/path/to/its/python pytest -m services tests/rollout/policies/test_vllm_server.py
"""

import json
import os

import pytest

from pipelines.protocols.one_action import React
from pipelines.recipe import config
from pipelines.recipe.config import Model
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.vllm import VllmPolicy

PYTHON = os.environ.get("SQLTRAIN_VLLM_PYTHON", "")
pytestmark = [
    pytest.mark.services,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="SQLTRAIN_VLLM_PYTHON names no Python with vLLM"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model of the default tiny sizes: vLLM's CPU attention wants heads of 32 and up."""
    from pipelines.training.model import make_tiny

    out = tmp_path_factory.mktemp("served")
    make_tiny(
        Model(),
        ["how many singers are there in paris select name from singer"] * 50,
        React(config.ProtocolSection()).tags,
        out,
        seed=0,
    )
    return out


@pytest.fixture(scope="module")
def url(folder):
    """A server that is started as a stage starts its own; its log-probabilities are those before top-p."""
    from pipelines.recipe import recipes
    from pipelines.rollout.policies.factories import serving

    own = ["rollout.policy=vllm", f"rollout.python={PYTHON}", "hardware={device: cpu, threads: 1}"]
    own += ["grpo.partial=carry", "model.lora={rank: 8, alpha: 16}"]  # it tells versions, and takes adapters
    arguments = "rollout.arguments=[--max-model-len=1024, --logprobs-mode=raw_logprobs]"
    with serving(str(folder), recipes.load("miniature", [*own, arguments]), folder, print, folder / "none") as served:
        yield served.recipe.rollout.servers[0]


def test_real_episodes_with_ids_and_logprobs(url, folder, engine, talk, examples):
    """The server's log-probabilities are those of a plain forward pass here over the ids that it returned."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    policy = VllmPolicy([url], folder)
    assert policy.context == 1024
    runner = engine(policy, talk, 3, turn_tokens=12, top_p=0.95)
    made = runner.run([EpisodeRequest(one, 0, index) for index, one in enumerate(examples[:12])])
    assert len({one.token_ids for one in made}) == 12
    for one in made:
        assert len(one.turns) == 3
        assert len(one.logprobs) == len(one.token_ids) == one.turn_ends[-1]
        with torch.no_grad():
            predicted = model(torch.tensor([one.token_ids])).logits[0].log_softmax(-1)
        for index, mine in enumerate(one.agent_mask):
            if mine:
                assert abs(predicted[index - 1, one.token_ids[index]].item() - one.logprobs[index]) < 1e-3


def test_greedy_turns_are_those_of_the_in_process_policy(url, folder, engine, talk, examples):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelines.rollout.policies.transformers import TransformersPolicy

    own = TransformersPolicy(AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder))
    todo = [EpisodeRequest(one, 0, index) for index, one in enumerate(examples[:8])]
    runs = [engine(p, talk, 2, turn_tokens=8, temperature=0.0).run(todo) for p in (VllmPolicy([url], folder), own)]
    same = [left.token_ids == right.token_ids for left, right in zip(*runs, strict=True)]
    assert sum(same) >= 7  # an untrained model's best two tokens may lie within rounding


def test_a_turn_ends_at_its_stop_string(url, folder, engine, talk, examples):
    talk.stop = ("a", "e", "i", "o", "u")
    made = engine(VllmPolicy([url], folder), talk, 1, turn_tokens=200).run([EpisodeRequest(examples[0], 0, 3)])
    text = made[0].turns[0].text
    assert text[-1] in talk.stop
    assert not set(text[:-1]) & set(talk.stop)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("staleness", "partial", "lora"),
    [(0, "wait", "null"), (1, "wait", "null"), (2, "carry", "null"), (0, "wait", "{rank: 8, alpha: 16}")],
)
def test_grpo_steps_sample_from_it_and_bring_it_their_weights(
    url, folder, tmp_path, examples, monkeypatch, staleness, partial, lora
):
    """The third step's samples are those of the weights after the second: sampler and trainer agree on them.

    An untrained model is never right, so rewards are drawn; the rate is one at which stale weights would be seen.
    """
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from pipelines.recipe import recipes
    from pipelines.training import grpo
    from pipelines.training.plan import Plan

    plugin = folder / "drawing.py"  # one for all: a name is registered once
    plugin.write_text(
        "import random\nfrom pipelines.core.registry import reward\n\n"
        "@reward('drawn')\ndef drawn(outcome):\n    return random.Random(str(outcome.trajectory.token_ids)).random()\n"
    )
    recipe = recipes.load(
        "miniature",
        [
            f"plugins=[{plugin}]",
            f"rollout={{policy: vllm, servers: [{url}]}}",
            "rewards=[{term: drawn}]",
            *("grpo.steps=3", "grpo.questions_per_step=2", "grpo.group=4", "grpo.micro_batch=8", "grpo.resample=0"),
            "grpo.sampling={temperature: 1.0, top_p: 1.0, turn_tokens: 12, episode_tokens: 512}",
            "grpo.optimizer={kind: adamw, lr: 3e-3, schedule: constant, warmup_ratio: 0.0}",
            *(f"grpo.staleness={staleness}", f"grpo.partial={partial}", f"model.lora={lora}"),
        ],
    )
    plan = Plan(kind="grpo", recipe=recipe, checkpoint_in=str(folder), data=tmp_path, out=tmp_path)
    grpo.train(plan, examples, lambda event: None)
    curves, timing = (
        [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("curves", "timing")
    )
    ages = [line.get("staleness_max", 0.0) for line in curves]
    assert all(line.get("drift_mean", 0.0) < 1e-3 for line, age in zip(curves, ages, strict=True) if not age)
    assert all(line.get("drift_mean", 1.0) > 1e-3 for line, age in zip(curves, ages, strict=True) if age)
    assert all(age <= most for age, most in zip(ages, [0, min(1, staleness), staleness], strict=True))
    assert staleness != 1 or ages == [0, 1, 1]
    assert all(line["grad_norm"] > 0 for line in curves)
    assert all(line["broken"] == line["dropped"] == 0 for line in curves)
    assert timing[1]["sync_seconds"] > 0
    assert (tmp_path / "served" / "model.safetensors").exists() is (lora == "null")


def test_a_stage_loads_its_checkpoint_into_the_server_and_notices_other_weights(
    url, folder, tmp_path, engine, talk, examples
):
    """The last test of the module: it brings the server's first weights back."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pipelines.core.errors import ResourceError
    from pipelines.recipe import recipes
    from pipelines.rollout.policies.factories import policy, serving

    model = AutoModelForCausalLM.from_pretrained(folder)
    torch.manual_seed(1)
    with torch.no_grad():
        for value in model.parameters():
            value += 0.1 * value.abs().mean() * torch.randn_like(value)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    recipe = recipes.load("miniature", ["rollout.policy=vllm", f"rollout.servers=[{url}]"])
    todo = [EpisodeRequest(examples[0], 0, 5)]

    def load_into(checkpoint):
        with serving(str(checkpoint), recipe, tmp_path, print):
            pass

    load_into(folder)
    with pytest.raises(ResourceError, match="does not hold"):
        engine(policy(str(tmp_path), recipe), talk, 1, turn_tokens=8).run(todo)
    load_into(tmp_path)
    assert engine(policy(str(tmp_path), recipe), talk, 1, turn_tokens=8).run(todo)[0].turns
    load_into(folder)
    assert engine(policy(str(folder), recipe), talk, 1, turn_tokens=8).run(todo)[0].turns
