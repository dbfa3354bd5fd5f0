"""Our environment under TRL's GRPOTrainer: the agent's tools, and one real training step."""

import json
from pathlib import Path

import pytest

from pipelines.environment.core import Environment, row_of
from pipelines.environment.trl import NATIVE, tools

LOOK, WRONG = "SELECT name FROM sqlite_schema", "SELECT 'no'"


def played(environment, question, *answers):
    environment.reset(**row_of(question))
    return [environment.execute_sql_query(LOOK), *(environment.answer(sql) for sql in answers)]


def test_the_tools_pay_what_the_recipe_pays_for_the_same_turns_as_text(questions):
    make, question = tools("mtir_sql"), questions[0]
    for sql in (question.gold_sql, WRONG, "SELECT nothing FROM nowhere"):
        ours = make()
        looked, _ = played(ours, question, sql)
        with Environment("mtir_sql", NATIVE) as environment:
            session = environment.reset(question)
            call = json.dumps({"name": "execute_sql_query", "arguments": {"sql": LOOK}})
            seen = session.step(f"<think>a</think>\n<tool_call>\n{call}\n</tool_call>")
            end = session.step(f"<think>a</think>\n<answer>\n```sql\n{sql}\n```\n</answer>")
        assert ours.get_reward() == end.reward
        assert seen.observation == f"<tool_response>\n{looked}\n</tool_response>"
    assert make().reset(**row_of(question)).endswith("before you answer.")


def test_an_agent_that_never_answers_is_paid_for_no_answer(questions):
    ours = tools("skyrl_sql")()
    played(ours, questions[0])
    assert ours.get_reward() == -1.0  # SkyRL-SQL, section 4.1


def test_an_instance_begins_anew_and_a_call_after_the_answer_is_refused(questions):
    ours = tools("mtir_sql")()
    for question in questions[:2]:
        played(ours, question, question.gold_sql)
        first = ours.get_reward()
        with pytest.raises(ValueError, match="the episode is over"):
            ours.answer(WRONG)
        assert ours.get_reward() == first
        assert first is not None
        assert first > 1.0


def test_a_recipe_that_hides_the_schema_says_so(questions):
    assert "The schema is not given." in tools("trust_sql")().reset(**row_of(questions[0]))


def tokenizer(folder):
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    raw = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    made.add_tokens(["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"])
    made.chat_template = (Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja").read_text(encoding="utf-8")
    return made


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the libraries' own
def test_grpo_trainer_takes_a_step_on_the_rewards_of_our_panel(questions, tmp_path, monkeypatch):
    """The model's words are scripted, for an untrained one calls no tool; all else is TRL's: tool loop, loss, step."""
    import torch
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    question, speech = questions[0], tokenizer(tmp_path)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(vocab_size=len(speech), num_key_value_heads=2, head_dim=16, max_position_embeddings=16384, **shape)
    )

    def call(name, sql):
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': {'sql': sql}})}\n</tool_call><|im_end|>"

    looked, wrong, done = call("execute_sql_query", LOOK), call("answer", WRONG), "Done.<|im_end|>"
    rounds = iter([[looked, wrong], [call("answer", question.gold_sql), done], [done]])

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids, *_, **__):
            said = next(rounds)
            assert len(said) == len(prompt_ids)
            return [speech(text, add_special_tokens=False)["input_ids"] for text in said], None

    paid = []

    def noted(environments, **_):
        paid.extend(environment.get_reward() for environment in environments)
        return [0.0] * len(environments)

    step = {"per_device_train_batch_size": 2, "num_generations": 2, "max_steps": 1, "max_completion_length": 4096}
    plain = {"learning_rate": 1e-2, "bf16": False, "gradient_checkpointing": False, "use_cpu": True}
    quiet = {"report_to": [], "save_strategy": "no", "logging_steps": 1, "disable_tqdm": True}
    settings = GRPOConfig(output_dir=str(tmp_path / "out"), **step, **plain, **quiet)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer = Scripted(
        model,
        reward_funcs=noted,
        args=settings,
        train_dataset=Dataset.from_list([row_of(question)] * 2),
        processing_class=speech,
        environment_factory=tools("mtir_sql"),
    )
    trainer.train()
    ours = tools("mtir_sql")()
    expected = []
    for sql in (question.gold_sql, WRONG):
        played(ours, question, sql)
        expected.append(ours.get_reward())
    assert paid == pytest.approx(expected)
    (logged,) = [entry for entry in trainer.state.log_history if "rewards/SqlTools/mean" in entry]
    assert logged["rewards/SqlTools/mean"] == pytest.approx(sum(expected) / 2)
    assert logged["tools/call_frequency"] == 1.5
    assert logged["tools/failure_frequency"] == 0.0
    assert any(not torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
