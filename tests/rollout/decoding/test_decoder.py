"""The batched decoder says what a plain forward pass says, at the cost of new tokens only."""

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from pipelines.core.types import Database, Example
from pipelines.recipe.config import Sampling
from pipelines.rollout import decoding, slots
from pipelines.rollout.decoding import Decoder
from pipelines.rollout.drafts import continuation
from pipelines.rollout.policies.base import Request
from pipelines.rollout.slots import attend_with_prefixes, slot_attention

ANY = Example("q", "?", Database("d", "sqlite", ""), "")
SHAPE = {"vocab_size": 400, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 2048}


def request(session, ids, turn=0, **settings):
    sampling = Sampling(temperature=settings.pop("temperature", 1.0), top_p=settings.pop("top_p", 1.0))
    limits = {"max_tokens": 12, "stop": (), "seed": int(session)} | settings
    return Request(session, (), tuple(ids), sampling, example=ANY, turn=turn, **limits)


def run(decoder, model):
    """Step until no turn is being generated."""
    done = {}
    with slot_attention(model):
        while decoder.generating:
            done |= dict(decoder.step())
    return done


def said(decoder, model, session, context, turn=0, **settings):
    """What a session alone says next."""
    decoder.begin(request(session, context, turn, **settings))
    return run(decoder, model)[session]


def prompt(index, length):
    return [20 + (index * 31 + k * 7) % 300 for k in range(length)]


def plain_logprobs(model, context, ids, temperature=1.0):
    """By one forward pass over the whole sequence."""
    with torch.no_grad():
        logits = model(torch.tensor([[*context, *ids]], device=model.device)).logits[0].float() / temperature
    rows = logits[len(context) - 1 : -1].log_softmax(-1)
    return [rows[i, token].item() for i, token in enumerate(ids)]


def assert_close(left, right):
    assert max(abs(a - b) for a, b in zip(left, right, strict=True)) < 1e-4


@pytest.fixture
def counted(model):
    """How many tokens each of the decoder's forward passes took in."""
    taken = []

    def hook(module, args, kwargs):
        if "slots" in kwargs:
            taken.append(kwargs["input_ids"].shape[1])

    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    yield taken
    handle.remove()


def test_logprobs_over_turns_are_those_of_a_plain_forward_pass(model, codec):
    decoder = Decoder(model, codec, 5)
    contexts = {str(i): prompt(i, 9 + 5 * i) for i in range(5)}
    for turn in range(3):
        for session, context in contexts.items():
            decoder.begin(request(session, context, turn, temperature=0.7, max_tokens=8 + int(session)))
        for session, completion in run(decoder, model).items():
            context, ids = contexts[session], completion.token_ids
            assert_close(completion.logprobs, plain_logprobs(model, context, ids, 0.7))
            contexts[session] = [*context, *ids, *prompt(turn + 7, 3 + int(session))]


@pytest.mark.parametrize("config", [Qwen3Config(**SHAPE, **HEADS, head_dim=16), LlamaConfig(**SHAPE, **HEADS)])
def test_other_models_and_grouped_heads(config, codec):
    torch.manual_seed(0)
    model = (Qwen3ForCausalLM if config.model_type == "qwen3" else LlamaForCausalLM)(config)
    model.generation_config.eos_token_id = None
    decoder = Decoder(model, codec, 4)
    contexts = [prompt(i, 5 + 11 * i) for i in range(4)]
    for i, context in enumerate(contexts):
        decoder.begin(request(str(i), context))
    for session, completion in run(decoder, model).items():
        assert_close(completion.logprobs, plain_logprobs(model, contexts[int(session)], completion.token_ids))


def test_greedy_is_what_generate_says(model, codec):
    context = prompt(3, 20)
    ours = said(Decoder(model, codec, 1), model, "0", context, temperature=0.0, max_tokens=15).token_ids
    ids = torch.tensor([context])
    theirs = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=15, do_sample=False)
    assert ours == tuple(theirs[0, 20:].tolist()[: len(ours)])


def test_a_turn_costs_its_new_tokens_only(model, codec, counted):
    decoder = Decoder(model, codec, 1)
    context = prompt(0, 50)
    ids = said(decoder, model, "0", context, max_tokens=4).token_ids
    assert counted == [50, 1, 1, 1]
    said(decoder, model, "0", [*context, *ids, *prompt(1, 10)], 1, max_tokens=2)
    assert counted[4:] == [11, 1]  # the last sampled token and the observation


def test_a_group_takes_its_prompt_in_once(model, codec, counted):
    decoder = Decoder(model, codec, 6)
    context = prompt(0, 50)
    for sample in range(6):
        decoder.begin(request(str(sample), context, max_tokens=3))
    done = run(decoder, model)
    assert counted == [50, 6, 6, 5]  # the others copy it in the second step, a step behind
    assert len({completion.token_ids for completion in done.values()}) == 6
    for completion in done.values():
        assert_close(completion.logprobs, plain_logprobs(model, context, completion.token_ids))


def test_prompts_of_one_database_take_their_schema_in_once(model, codec, counted, monkeypatch):
    """The first prompt is computed whole; the two that wait for it copy 40 tokens, and compute 12 and 14."""
    monkeypatch.setattr(decoding, "LEAST_PREFIX", 40)
    schema = prompt(0, 40)
    contexts = {str(i): [*schema, 310 + i, *prompt(i + 1, 9 + 2 * i)] for i in range(3)}
    decoder = Decoder(model, codec, 4)
    for session, context in contexts.items():
        decoder.begin(request(session, context, max_tokens=3))
    done = run(decoder, model)
    assert counted[:2] == [50, 1 + 12 + 14]
    for session, completion in done.items():
        assert_close(completion.logprobs, plain_logprobs(model, contexts[session], completion.token_ids))
    # A later question finds the schema in a conversation that has ended its turn.
    counted.clear()
    late = [*schema, 319]
    completion = said(decoder, model, "3", late, max_tokens=1)
    assert counted == [1]
    assert_close(completion.logprobs, plain_logprobs(model, late, completion.token_ids))


def test_short_prefixes_are_computed_again(model, codec, counted, monkeypatch):
    """Forty tokens in common are below the least prefix: both prompts are computed whole, in one pass."""
    monkeypatch.setattr(decoding, "LEAST_PREFIX", 41)
    decoder = Decoder(model, codec, 2)
    for i in range(2):
        decoder.begin(request(str(i), [*prompt(0, 40), 310 + i], max_tokens=1))
    run(decoder, model)
    assert counted == [41 + 41]


def test_a_late_sample_copies_from_one_that_is_in_its_third_turn(model, codec, counted):
    decoder = Decoder(model, codec, 2)
    context = prompt(0, 30)
    longer = [*context, *said(decoder, model, "0", context, max_tokens=3).token_ids, *prompt(5, 9)]
    said(decoder, model, "0", longer, 1, max_tokens=3)
    counted.clear()
    late = said(decoder, model, "1", context, max_tokens=2)
    assert counted == [1, 1]
    assert_close(late.logprobs, plain_logprobs(model, context, late.token_ids))


def test_when_the_first_of_a_group_leaves_the_others_go_on(model, codec):
    decoder = Decoder(model, codec, 3)
    context = prompt(0, 30)
    for session in "012":
        decoder.begin(request(session, context))
    decoder.end("0")
    for completion in run(decoder, model).values():
        assert_close(completion.logprobs, plain_logprobs(model, context, completion.token_ids))


def test_tokens_do_not_depend_on_the_number_of_slots(model, codec):
    contexts = [prompt(i, 6 + 3 * i) for i in range(12)]

    def tokens(slots):
        decoder, done, waiting = Decoder(model, codec, slots), {}, list(range(12))
        with slot_attention(model):
            while waiting or decoder.generating:
                while waiting and decoder.room:
                    index = waiting.pop(0)
                    decoder.begin(request(str(index), contexts[index], max_tokens=5 + index, top_p=0.9))
                for session, completion in decoder.step():
                    done[session] = completion.token_ids
                    decoder.end(session)
        return done

    assert tokens(1) == tokens(5) == tokens(12)


def test_long_conversations_and_prompts_over_several_steps(model, codec, counted, monkeypatch):
    monkeypatch.setattr(decoding, "STEP_TOKENS", 100)
    decoder = Decoder(model, codec, 3)
    contexts = [prompt(0, 300), prompt(1, 520), prompt(2, 4)]
    for i, context in enumerate(contexts):
        decoder.begin(request(str(i), context, max_tokens=5))
    for session, completion in run(decoder, model).items():
        assert_close(completion.logprobs, plain_logprobs(model, contexts[int(session)], completion.token_ids))
    assert max(counted) == 100


def test_on_a_gpu_several_new_tokens_wait_for_company(model, codec, counted):
    decoder = Decoder(model, codec, 2)
    decoder._max_deferred = 2  # steps; a GPU's are MAX_DEFERRED_STEPS
    decoder.begin(request("0", prompt(0, 20), max_tokens=6))
    with slot_attention(model):
        decoder.step()
    decoder.begin(request("1", prompt(1, 5), max_tokens=3))
    done = run(decoder, model)
    assert counted == [20, 1, 1, 1 + 5, 2, 2]
    assert_close(done["1"].logprobs, plain_logprobs(model, prompt(1, 5), done["1"].token_ids))


def test_a_retried_turn_forgets_what_was_drawn(model, codec):
    decoder, context = Decoder(model, codec, 1), prompt(0, 20)
    first, again = (said(decoder, model, "0", context) for _ in range(2))
    assert first.token_ids == again.token_ids == said(Decoder(model, codec, 1), model, "0", context).token_ids


def forced(model, ids, logit=100.0):
    """Make the model say `ids` one after the other: position p predicts ids[p - 3], whose logit is this, others' 0."""
    said = torch.tensor([0, 0, 0, *ids, *[0] * 64])

    def hook(module, args, kwargs, output):
        positions = kwargs["position_ids"][0][kwargs["logits_to_keep"]]
        output.logits = torch.nn.functional.one_hot(said[positions], module.config.vocab_size)[None] * logit
        return output

    model.register_forward_hook(hook, with_kwargs=True)


@pytest.mark.parametrize(
    ("spoken", "settings", "text", "finish", "count"),
    [
        ("<sql> count </sql> name", {"stop": ("</sql>",)}, "<sql> count </sql>", "stop", 4),
        ("count", {}, "count", "stop", -1),
        ("count name city from singer", {"max_tokens": 2}, "cou", "length", 2),
    ],
    ids=["stop string", "end-of-turn token", "budget"],
)
def test_a_turn_ends(model, codec, spoken, settings, text, finish, count):
    ids = [*codec.agent(spoken), codec.end_id or 0, 5]
    forced(model, ids)
    done = said(Decoder(model, codec, 1), model, "0", prompt(0, 4), **settings)
    assert (done.text, done.finish, done.token_ids) == (text, finish, tuple(ids[:count]))


def test_the_model_is_left_as_it_was(model, codec):
    model.train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    said(Decoder(model, codec, 1), model, "0", prompt(0, 4))
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == "sdpa"
    model(torch.tensor([prompt(0, 9)]), labels=torch.tensor([prompt(0, 9)])).loss.backward()
    assert model.model.layers[0].self_attn.q_proj.weight.grad is not None


TEMPERATURES = {"0": 0.0, "1": 0.0, "2": 0.8, "3": 0.8}  # of conversations


@pytest.fixture
def drafting(monkeypatch):
    """Guesses also in float32, where the same tokens are drawn whatever the shape of a pass."""
    monkeypatch.setattr(decoding, "suits_products", lambda device, dtype: True)


def test_guesses_change_no_token(model, codec, counted, drafting, monkeypatch):
    """Of greedy and of sampled conversations with prompts that repeat, over two turns."""
    said_by = {}
    passes = {}  # the tokens of each
    for most in (0, 32):
        monkeypatch.setattr(decoding, "DRAFT_TOKENS", most)
        counted.clear()
        decoder = Decoder(model, codec, 4)
        contexts = {str(i): prompt(i, 10) * (1 + i) for i in range(4)}
        done = []
        for turn in range(2):
            for session, context in contexts.items():
                temperature = TEMPERATURES[session]
                decoder.begin(request(session, context, turn, temperature=temperature, max_tokens=40))
            for session, completion in run(decoder, model).items():
                done.append((session, completion.text, completion.token_ids, completion.finish))
                plain = plain_logprobs(model, contexts[session], completion.token_ids, TEMPERATURES[session] or 1.0)
                assert_close(completion.logprobs, plain)
                contexts[session] = [*contexts[session], *completion.token_ids, *prompt(turn + 7, 5)]
        said_by[most] = sorted(done)
        passes[most] = list(counted)
    assert said_by[0] == said_by[32]
    assert passes[32] != passes[0]  # there were guesses


def test_a_loop_is_guessed_in_ever_longer_pieces(model, codec, counted, drafting):
    """Of 7 8 7 8 ... 4, 8, 16 and 24 tokens, each checked with the token before them, and none past the budget."""
    forced(model, [7, 8] * 40)
    done = said(Decoder(model, codec, 1), model, "0", [7, 8, 7, 8], max_tokens=60)
    assert done.token_ids == (7, 8) * 30
    assert counted == [4, 1 + 4, 1 + 8, 1 + 16, 1 + 24, 1 + 2]


def test_each_guess_is_drawn_at_its_own_position(model, codec, drafting, monkeypatch):
    """Of a loop whose tokens have a probability of 0.77: guesses are right and wrong by turns."""
    forced(model, [7, 8] * 40, logit=7.0)
    said_by = {}
    for most in (0, 32):
        monkeypatch.setattr(decoding, "DRAFT_TOKENS", most)
        done = said(Decoder(model, codec, 1), model, "1", [7, 8, 7, 8], max_tokens=60)
        said_by[most] = done.token_ids, done.logprobs
    assert said_by[0] == said_by[32]


def test_a_wrong_guess_costs_one_pass(model, codec, counted, drafting):
    """Behind 50 51 52 the prompt has 54 and the model says 53: four tokens are guessed, and none is taken."""
    ids = [50, 51, 52, 53, 60, 61, 62, 63]
    forced(model, ids)
    done = said(Decoder(model, codec, 1), model, "0", [50, 51, 52, 54], max_tokens=8)
    assert done.token_ids == tuple(ids)
    assert counted == [4, 1, 1, 1 + 4, 1, 1, 1, 1]


def test_a_guess_that_the_turns_end_cuts_short_is_not_held_against_the_next(model, codec, counted, drafting):
    """Of eight guesses four are right and the turn is over: the next turn begins with eight."""
    end = codec.end_id or 0
    said_first = [*[7, 8] * 5, end]
    forced(model, [*said_first, *[0] * 4, *[7, 8] * 6])
    decoder = Decoder(model, codec, 1)
    done = said(decoder, model, "0", [7, 8, 7, 8], max_tokens=20)
    assert done.token_ids == tuple(said_first)
    context = [7, 8, 7, 8, *said_first, 7, 8, 7, 8]
    assert said(decoder, model, "0", context, turn=1, max_tokens=12).token_ids == (7, 8) * 6
    assert counted == [4, 1 + 4, 1 + 8, 5, 1 + 8, 1 + 1]


def test_a_store_grows_by_half_and_by_no_more_than_its_step():
    """256, 384 in multiples of 256 = 512, 768, 1152 -> 1280, 1920 -> 2048, 3072, and then by 1,024."""
    store = slots.Slots(1, torch.device("cpu"))
    seen = []
    for length in range(1, 5000):
        store.grow([slots.Span(0, length - 1, length)])
        assert store.capacity == slots.grown_capacity(length)
        if store.capacity not in seen:
            seen.append(store.capacity)
    assert seen == [256, 512, 768, 1280, 2048, 3072, 4096, 5120]
    assert slots.grown_capacity(8192) == 8192


def counted_groups(monkeypatch) -> list[tuple[int, int, int, tuple[tuple[int, int], ...]]]:
    """Rows, queries and own keys of each group that reads common prefixes once, with the rows and length of each."""
    read = []
    attend = slots.attend_with_prefixes

    def counting(queries, keys, values, group, mask, scaling):
        shared = [(len(range(*one.rows.indices(len(queries)))), one.length) for one in group.beginnings]
        read.append((len(queries), queries.shape[2], mask.shape[3], tuple(shared)))
        return attend(queries, keys, values, group, mask, scaling)

    monkeypatch.setattr(slots, "attend_with_prefixes", counting)
    return read


def test_conversations_that_begin_alike_read_it_once(model, codec, drafting, monkeypatch):
    """Two questions of one schema of 230 tokens, three samples each, and one of another schema, over two turns.

    The second turn begins with the token that was drawn last and five of an observation. What the six read by
    themselves is up to 32 keys, and the other one reads all of its own.
    """
    monkeypatch.setattr(decoding, "SHORT_PREFIX", 40)
    monkeypatch.setattr(decoding, "DRAFT_TOKENS", 0)
    read = counted_groups(monkeypatch)
    schema = prompt(0, 230)
    contexts = {str(i): [*schema, 310 + i % 2, *prompt(i % 2 + 1, 9)] for i in range(6)}
    contexts["6"] = prompt(5, 150)
    decoder = Decoder(model, codec, 8)
    for turn in range(2):
        for session, context in contexts.items():
            decoder.begin(request(session, context, turn, max_tokens=3))
        for session, completion in run(decoder, model).items():
            assert_close(completion.logprobs, plain_logprobs(model, contexts[session], completion.token_ids))
            contexts[session] = [*contexts[session], *completion.token_ids, *prompt(turn + 7, 5)]
    of_all = {shape for shape in read if shape[0] == 6}
    assert of_all == {(6, 1, 32, ((6, 230),)), (6, 6, 32, ((6, 230),))}
    assert (1, 1, 160, ()) in read


def test_a_conversation_that_went_far_from_the_others_reads_all_of_its_keys(model, codec, drafting, monkeypatch):
    """Three that share 50 tokens: the third goes on for 300 of its own."""
    monkeypatch.setattr(decoding, "SHORT_PREFIX", 40)
    monkeypatch.setattr(decoding, "DRAFT_TOKENS", 0)
    read = counted_groups(monkeypatch)
    decoder = Decoder(model, codec, 4)
    contexts = {str(i): [*prompt(0, 50), 310 + i, *prompt(i + 1, 300 if i == 2 else 9)] for i in range(3)}
    for session, context in contexts.items():
        decoder.begin(request(session, context, max_tokens=3))
    for session, completion in run(decoder, model).items():
        assert_close(completion.logprobs, plain_logprobs(model, contexts[session], completion.token_ids))
    assert (2, 1, 32, ((2, 50),)) in read
    assert (1, 1, 352, ()) in read


def test_attention_with_prefixes_is_that_of_float64():
    """Of four slots the first and last begin alike with 5 keys; the second reads its own 7 keys and sees 3 of them."""
    torch.manual_seed(0)
    keys, values = torch.randn(2, 4, 2, 16, 8, dtype=torch.float64)
    for stored in (keys, values):
        stored[3, :, :5] = stored[0, :, :5]
    queries = torch.randn(3, 2, 4, 8, dtype=torch.float64)  # of slots 0, 3 and 1
    first = torch.tensor([5, 5, 0])
    last = torch.tensor([11, 6, 2])
    own = first[:, None] + torch.arange(7)
    mask = (own <= last[:, None])[:, None, None].expand(3, 1, 4, 7)
    beginning = slots.SeenByAll(slice(0, 2), slot=0, length=5)
    group = slots.PrefixGroup(torch.tensor([0, 3, 1]), torch.arange(3), mask, own, [beginning])
    outputs = attend_with_prefixes(queries, keys, values, group, mask, None)
    for row, (slot, end) in enumerate(((0, 12), (3, 7), (1, 3))):
        scores = queries[row] @ keys[slot, :, :end].mT / 8**0.5
        expected = scores.softmax(-1) @ values[slot, :, :end]
        assert (outputs[row] - expected).abs().max() < 1e-12


def test_what_follows_a_repetition():
    """The newest place of 1 2 3 counts; a continuation that reaches the end goes on in itself."""
    assert continuation([1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3], 2) == [9, 1]
    assert continuation([7, 8, 7, 8, 7], 5) == [8, 7, 8, 7, 8]
    assert continuation([1, 2, 3, 4], 3) == []
    assert continuation([1, 2], 3) == []


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bfloat16(tiny_folder, codec, device):
    """Against its own forward pass, which rounds in another order: bfloat16 keeps 8 bits."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.bfloat16).to(device)
    decoder = Decoder(model, codec, 8)
    for index in range(8):
        decoder.begin(request(str(index), prompt(index % 3, 40), top_p=0.95))
    done = run(decoder, model)
    assert len(done) == 8
    for session, one in done.items():
        plain = plain_logprobs(model, prompt(int(session) % 3, 40), one.token_ids)
        assert max(abs(a - b) for a, b in zip(one.logprobs, plain, strict=True)) < 0.05
