"""A recipe's benchmark as a task of inspect_ai, run whole with its scripted model: our verdicts, by equality."""

import pytest

inspect_ai = pytest.importorskip("inspect_ai")

SMALL = "data.test=[{kind: miniature, name: small, split: test, options: {databases: 1, questions: 3}}]"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the library's own
def test_inspect_gives_the_verdicts_of_our_equalities(tmp_path):
    from inspect_ai import eval as run
    from inspect_ai.model import ModelOutput, ModelUsage, get_model

    from pipelines.environment.inspect_ai import text_to_sql

    task = text_to_sql("skyrl_sql", overrides=[SMALL])
    golds = [str(sample.target).rstrip(";") for sample in task.dataset]
    look = "<think>a</think>\n<sql>SELECT 1 AS one"  # as a server leaves it: the stop string is gone
    doubled = f"SELECT * FROM ({golds[2]}) UNION ALL SELECT * FROM ({golds[2]})"
    said = []
    for sql in (golds[0], "SELECT 'no'", doubled):
        said += [look, f"<think>a</think>\n<solution>{sql}"]
    outputs = [ModelOutput.from_content("m", text) for text in said]
    for output in outputs:
        output.usage = ModelUsage(input_tokens=1, output_tokens=1)  # else they are counted with a file of the network
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = run(task, model=model, log_dir=str(tmp_path), display="none", max_samples=1)
    assert log.status == "success", log.error
    values = [next(iter((sample.scores or {}).values())).value for sample in log.samples]
    assert [value["strict"] for value in values] == [1.0, 0.0, 0.0]
    assert [value["bird"] for value in values] == [1.0, 0.0, 1.0]
    assert [len(sample.messages) for sample in log.samples] == [5, 5, 5]
    assert "one" in log.samples[0].messages[3].text
    task = text_to_sql("trust_sql", overrides=[SMALL, "variant=prefill"])  # whose first turn is given
    outputs[0].completion = "<think>a</think>\n<action>confirm_answer</action>\n<answer>SELECT 1</answer>"
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = run(task, model=model, log_dir=str(tmp_path), display="none", limit=1)
    assert [message.role for message in log.samples[0].messages][1:] == ["user", "assistant", "user", "assistant"]
