"""The models that are trained: a tiny Qwen3 made from scratch with its own tokenizer, or any causal language model."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipelines.recipe.config_training import Lora, Model, TinyModel
from pipelines.rollout.model_loading import hide_bars, load

PAD, END, ROLES = "<|pad|>", "<|end|>", ("<|system|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Where an answer begins and ends, for servers: by the model's type they take the chat template for Qwen's.
ANSWER = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|assistant|>",
    "fields": {"content": {"close": "<|end|>"}},
}
# A word with the space before it is one piece, so spaced SQL and schema text share their tokens; digits and punctuation
# stand alone, so that numbers and quoted values can be copied.
PIECES = r" ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]|\s"


def make_tiny(model: Model, corpus: Iterable[str], tags: Sequence[str], out: Path, seed: int) -> None:
    """Make a model that has learned nothing, with a tokenizer that knows the corpus, as a normal checkpoint folder.

    Args:
        model: its `tiny` part gives the sizes.
        corpus: texts that the tokenizer's merges are learned from (prompts, agent turns, observations).
        tags: protocol tags; each becomes a single token.
        seed: of the weights.
    """
    from transformers import Qwen3ForCausalLM

    hide_bars()
    tokenizer = _train_tokenizer(model.tiny, corpus, tags)
    tokenizer.response_template = ANSWER
    torch.manual_seed(seed)
    network = Qwen3ForCausalLM(_qwen3(model.tiny, tokenizer))
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(out)
    network.save_pretrained(out)


def load_to_train(path_or_name: str | Path, model: Model) -> tuple[Any, Any]:
    """What `load` gives, with the weights under training in float32: all of them, or none of a base under adapters.

    Raises: what `load` does.
    """
    if model.lora is None:
        return load(path_or_name, model, torch.float32)
    return load(path_or_name, model, quantized=model.lora.bits is not None)


def adapters(lora: Lora | None) -> Any:
    """The PEFT configuration of a recipe's low-rank adapters, on every linear layer but the head; None for none."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules="all-linear",
    )


def _train_tokenizer(tiny: TinyModel, corpus: Iterable[str], tags: Sequence[str]) -> Any:
    """A byte-level BPE: any text encodes and decodes back exactly."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    special = [PAD, END, *ROLES]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=max(tiny.vocabulary - len(tags), 256 + len(special)),
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without(corpus, tags), trainer=trainer)
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=list(ROLES),
        chat_template=TEMPLATE,
        model_max_length=tiny.context,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _without(corpus: Iterable[str], tags: Sequence[str]) -> Iterable[str]:
    """The corpus without its tags: they are tokens already, and must not spend merges."""
    for text in corpus:
        for tag in tags:
            text = text.replace(tag, "")
        yield text


def _qwen3(tiny: TinyModel, tokenizer: Any) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=tiny.width,
        intermediate_size=tiny.ffn,
        num_hidden_layers=tiny.layers,
        num_attention_heads=tiny.heads,
        num_key_value_heads=tiny.heads,
        head_dim=tiny.width // tiny.heads,
        max_position_embeddings=tiny.context,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )
