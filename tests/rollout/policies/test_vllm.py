"""The vLLM policy against servers that answer as vLLM does: ids in, ids and log-probabilities out."""

import itertools
import time

import pytest

from pipelines.core.errors import EndpointError, ResourceError
from pipelines.core.types import StopReason
from pipelines.rollout.episode import EpisodeRequest
from pipelines.rollout.policies.vllm import VllmPolicy
from tests.rollout.policies.conftest import posted

PROBE = "<reasoning>look</reasoning><sql>SELECT name FROM singer</sql>"
PLAIN = {"top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}  # not the server's own defaults
ANSWER = "<reasoning>now</reasoning><solution>SELECT count(*) FROM singer</solution>"
TINY = {"id": "tiny", "object": "model", "created": 0, "owned_by": "vllm", "max_model_len": 1024}
MODELS = (200, {}, {"object": "list", "data": [TINY]})
COMPLETION = {"id": "1", "object": "text_completion", "created": 0, "model": "tiny"}


@pytest.fixture
def completions(codec):
    """A server's function: probes in an episode's first turn, answers in its second."""

    def make(**change):
        def answer(body):
            if not body:
                return MODELS
            ids = codec.agent(ANSWER if codec.decode(body["prompt"]).count("<observation>") else PROBE)
            choice = {"index": 0, "text": "unused", "finish_reason": "stop", "token_ids": ids}
            choice["logprobs"] = {"token_logprobs": [-0.5] * len(ids), "tokens": ["x"] * len(ids)}
            return 200, {}, COMPLETION | {"choices": [choice | change]}

        return answer

    return make


@pytest.fixture
def ask(engine, protocol, examples, tiny_folder):
    def run(servers, count=1, **sampling):
        policy = VllmPolicy([server.url for server in servers], tiny_folder)
        return engine(policy, protocol(), **sampling).run([EpisodeRequest(one, 0, 5) for one in examples[:count]])

    return run


def test_ids_go_in_and_come_out(ask, serve, completions, codec):
    server = serve(completions())
    made = ask([server])[0]
    assert [turn.text for turn in made.turns] == [PROBE, ANSWER]
    ids = [codec.agent(PROBE), codec.agent(ANSWER)]
    prompt, seen = codec.prompt(made.prompt), codec.observation(made.turns[0].observation)
    assert list(made.token_ids) == [*prompt, *ids[0], *seen, *ids[1]]
    assert sum(made.logprobs) == -0.5 * sum(made.agent_mask)
    assert posted(server)[1]["prompt"] == [*prompt, *ids[0], *seen]
    assert (posted(server)[0]["return_token_ids"], posted(server)[0]["stop"]) == (True, ["</sql>", "</solution>"])
    assert posted(server)[0]["seed"] != posted(server)[1]["seed"]
    assert {key: posted(server)[0][key] for key in ("top_k", "min_p", "repetition_penalty")} == PLAIN


@pytest.mark.parametrize(("told", "processed"), [(0.0, True), (-0.5, False)])
def test_a_server_that_tells_what_it_draws_from_is_known_by_a_nucleus_of_one_token(
    serve, completions, tiny_folder, engine, protocol, examples, told, processed
):
    """With --logprobs-mode processed_logprobs they are after temperature and top-p, and can be taken at any."""
    answer = completions()

    def one_token(body):
        if body.get("top_p") != 1e-6:
            return answer(body)
        choice = {"index": 0, "text": "", "logprobs": {"token_logprobs": [told], "tokens": ["x"]}}
        return 200, {}, COMPLETION | {"choices": [choice]}

    policy = VllmPolicy([serve(one_token).url], tiny_folder)
    assert policy.has_sampling_logprobs() is processed
    [made] = engine(policy, protocol(), temperature=0.6).run([EpisodeRequest(examples[0], 0, 5)])
    assert bool(made.logprobs) is processed


@pytest.mark.parametrize("told", [[-0.5], [-0.5] * 99])
def test_logprobs_that_are_not_one_a_token_break_the_episode(ask, serve, completions, told):
    server = serve(completions(logprobs={"token_logprobs": told, "tokens": ["x"] * len(told)}))
    made = ask([server])[0]
    assert made.stop is StopReason.BROKEN
    assert made.failure == "EndpointError"


def test_logprobs_at_another_temperature_are_not_taken(ask, serve, completions):
    assert ask([serve(completions())], temperature=0.6)[0].logprobs == ()


def test_episodes_are_dealt_out_and_stay(ask, serve, completions):
    servers = [serve(completions()), serve(completions())]
    ask(servers, count=10)
    assert [len(posted(server)) for server in servers] == [10, 10]  # five episodes of two turns each


def test_a_slow_server_gets_fewer_episodes(engine, protocol, examples, tiny_folder, serve, completions):
    """With four episodes at a time the slow one keeps its first two, while the other one works through the rest."""
    answer = completions()

    def slowly(body):
        if body:
            time.sleep(1.0)
        return answer(body)

    slow, fast = serve(slowly), serve(completions())
    policy = VllmPolicy([slow.url, fast.url], tiny_folder)
    policy.live = 4
    engine(policy, protocol()).run([EpisodeRequest(one, 0, 5) for one in examples[:10]])
    assert len(posted(slow)) <= 6
    assert len(posted(slow)) + len(posted(fast)) == 20


def test_when_one_server_fails_another_is_asked(ask, serve, completions):
    broken = serve(lambda body: (500, {"retry-after-ms": "1"}, {}) if body else MODELS)
    fine = serve(completions())
    assert {one.stop for one in ask([broken, fine], count=2)} == {StopReason.SOLUTION}
    assert len(posted(fine)) == 4


def test_a_turn_cut_by_its_budget(ask, serve, completions):
    finishes = itertools.chain(["length"], itertools.repeat("stop"))
    server = serve(lambda body: completions(finish_reason=next(finishes) if body else None)(body))
    assert ask([server])[0].final_sql is not None


def test_a_server_without_token_ids_is_refused(ask, serve, completions):
    with pytest.raises(ResourceError, match=r"vLLM 0\.22"):
        ask([serve(completions(token_ids=None))])


def test_no_server_says_how_to_start_one(tiny_folder):
    with pytest.raises(EndpointError, match="vllm serve MODEL"):
        VllmPolicy(["http://127.0.0.1:9/v1"], tiny_folder)
    with pytest.raises(ResourceError, match=r"Set rollout\.servers"):
        VllmPolicy([], tiny_folder)


def test_only_servers_that_have_the_weights_are_asked(serve, completions, engine, protocol, examples, tiny_folder):
    """One took no weights: it gets no episode, also not in the next run, until it is said to have some."""
    servers = [serve(completions()) for _ in range(2)]
    policy = VllmPolicy([server.url for server in servers], tiny_folder)
    requests = [EpisodeRequest(example, 0, 5) for example in examples[:4]]

    def asked(places=None):
        policy.follow_weights(places)
        before = [len(posted(server)) for server in servers]
        engine(policy, protocol()).run(requests)
        return [len(posted(server)) - count for server, count in zip(servers, before, strict=True)]

    assert asked([servers[1].url]) == [0, 8]
    assert asked() == [0, 8]
    assert asked([server.url for server in servers]) == [4, 4]


def test_each_token_keeps_the_version_of_the_weights_that_sampled_it(
    serve, codec, engine, protocol, examples, tiny_folder
):
    """Version 3 becomes 4 after two tokens; the second turn is of a server that was started again, which says none."""
    turns = [codec.agent(text) for text in (PROBE, ANSWER)]

    def answer(body):
        if not body:
            return MODELS
        turn = codec.decode(body["token_ids"]).count("<observation>")
        ids = turns[turn]
        spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": len(ids)}]
        if turn:
            spans = [{"version": "default", "start": 0, "end": len(ids)}]
        content = [{"token_id": index, "logprob": -0.5, "top_logprobs": []} for index in ids]
        choice = {"index": 0, "finish_reason": "stop", "token_ids": ids, "weight_versions": spans}
        return 200, {}, {"request_id": "1", "choices": [choice | {"logprobs": {"content": content}}]}

    server = serve(answer)
    policy = VllmPolicy([server.url], tiny_folder, carries=True)
    policy.follow_weights()
    [trajectory] = engine(policy, protocol()).run([EpisodeRequest(examples[0], 0, 5)])
    assert trajectory.final_sql == "SELECT count(*) FROM singer"
    assert set(trajectory.logprobs) == {0.0, -0.5}
    versions = policy.take_versions()
    assert versions == {"0": [3, 3, *[4] * (len(turns[0]) - 2), *[-1] * len(turns[1])]}
    assert len(versions["0"]) == sum(trajectory.agent_mask)
    assert policy.take_versions() == {}
    sampling = posted(server)[-1]["sampling_params"]
    assert {name: sampling[name] for name in PLAIN} == PLAIN
    assert "return_token_ids" not in sampling


def test_a_server_that_tells_no_versions_is_refused(serve, engine, protocol, examples, tiny_folder):
    server = serve(lambda body: (403, {}, {"error": {"message": "disabled", "code": 403}}) if body else MODELS)
    policy = VllmPolicy([server.url], tiny_folder, carries=True)
    policy.follow_weights()
    with pytest.raises(ResourceError, match=r"tells no versions .*--enable-scale-out"):
        engine(policy, protocol()).run([EpisodeRequest(examples[0], 0, 5)])


def test_the_newest_adapters_are_asked_for_by_their_name(serve, completions, engine, protocol, examples, tiny_folder):
    """Step 12 comes after step 3; until something was sent, the base is asked."""
    names, answer = ["tiny"], completions()

    def with_adapters(body):
        return answer(body) if body else (200, {}, {"object": "list", "data": [{"id": name} for name in names]})

    server = serve(with_adapters)
    policy = VllmPolicy([server.url], tiny_folder, adapters=True)
    names += ["step-3", "step-12"]
    for places in (None, [server.url]):
        policy.follow_weights(places)
        engine(policy, protocol()).run([EpisodeRequest(examples[0], 0, 5)])
    assert [body["model"] for body in posted(server) if body] == ["tiny", "tiny", "step-12", "step-12"]
