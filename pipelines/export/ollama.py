"""Ollama's `Modelfile` for a folder of safetensors: its chat template in Go's words, its limits, and Ollama's gaps.

The architectures that Ollama converts, and its pre-tokenizers, are those of its `convert/convert.go` and
`tokenizer.go`.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pipelines.core.errors import DataError
from pipelines.core.files import read_json
from pipelines.protocols.base import build
from pipelines.recipe.checkpoint import CheckpointCard

CONVERTED = (
    *("LlamaForCausalLM", "Qwen2ForCausalLM", "GemmaForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"),
    *("Phi3ForCausalLM", "MixtralForCausalLM", "Olmo3ForCausalLM", "CohereForCausalLM", "GptOssForCausalLM"),
    *("DeepseekV3ForCausalLM", "Lfm2ForCausalLM"),
)
PRE_TOKENIZERS = (  # SHA-256 of the patterns that it splits a text by; the last one of none
    "d98f9631be1e9607a9848c26c1f9eac1aa9fc21ac6ba82a2fc0741af9780a48f",
    "03df5c5863ad70781dcfdef491ead25140f895fe8010964be0daefe27be32b02",
    "21cde974d587f0d54dc8d56b183cc1e6239600172035c68fbd6d4b9f8da0576e",
    "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e",
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855",
)
ROLES = ("system", "user", "assistant")
HINT = "Export it with --to hub-folder, and write a Modelfile by hand."
MARK = "contentmarker"  # a plain word: no template alters it


def modelfile(folder: Path, tokenizer: Any, card: CheckpointCard | None) -> str:
    """The text of a `Modelfile` beside the weights; without a card it has the chat template alone."""
    protocol = None if card is None else build(card.protocol)
    chat_template = template(tokenizer, protocol.thought if protocol is not None else "think")
    lines = ["FROM .", f'TEMPLATE """{chat_template}"""']
    limits: dict[str, Any] = {"temperature": 0, "repeat_penalty": 1.0}  # its own default of 1.1 changes greedy turns
    if card is not None:
        budget = card.sampling.episode_tokens
        context = int(read_json(folder / "config.json").get("max_position_embeddings") or budget)
        limits |= {"num_ctx": min(context, budget), "num_predict": card.sampling.turn_tokens}
    lines += [f"PARAMETER {name} {value}" for name, value in limits.items()]
    stops = [*(protocol.stop if protocol is not None else ()), tokenizer.eos_token]
    return "\n".join([*lines, *(f"PARAMETER stop {json.dumps(stop)}" for stop in stops if stop)]) + "\n"


def template(tokenizer: Any, thought: str) -> str:
    """The chat template as a template of Go; `thought` is the tag of reasoning, which some leave out of old turns."""
    if not tokenizer.chat_template:
        raise DataError("the model's tokenizer has no chat template", HINT)
    # The texts before and behind a message of each role, and the one that opens the agent's turn.
    around = {}
    for role in ROLES:
        first = [("user", "first")] if role == "assistant" else []
        shown = _render(tokenizer, [*first, (role, MARK)], False)
        before, marked, after = shown.removeprefix(_render(tokenizer, first, False) if first else "").partition(MARK)
        around[role] = (before, after) if marked else ("", "")
    asked = [("user", MARK)]
    opening = _render(tokenizer, asked, True).removeprefix(_render(tokenizer, asked, False))
    for roles in (ROLES, ("system", "user"), ("user",), (*ROLES, "user", "assistant", "user")):
        chat = [(role, f"<{thought}>why</{thought}>\n{MARK} {number}") for number, role in enumerate(roles)]
        plain = "".join(f"{around[role][0]}{text}{around[role][1]}" for role, text in chat) + opening
        if _render(tokenizer, chat, True) != plain:
            raise DataError("the chat template does more than put each message between fixed texts", HINT)
    cases = "{{ else ".join(
        f'if eq .Role "{role}" }}}}{_said(before)}{{{{ .Content }}}}{_said(after)}'
        for role, (before, after) in around.items()
    )
    return f"{{{{ range .Messages }}}}{{{{ {cases}{{{{ end }}}}{{{{ end }}}}{_said(opening)}"


def conversion_warnings(folder: Path) -> Iterator[str]:
    """The parts of a checkpoint that Ollama may not support, a line each."""
    config = read_json(folder / "config.json")
    kind = next(iter(config.get("architectures") or ["unknown"]))
    if kind not in CONVERTED:
        yield f"Ollama may refuse {kind}: those that it is known to convert are {', '.join(CONVERTED)}"
    # Ollama knows a pre-tokenizer by the digest of the regular expressions of its splits.
    steps = (read_json(folder / "tokenizer.json").get("pre_tokenizer") or {}).get("pretokenizers") or []
    patterns = (step["pattern"].get("Regex", "") for step in steps if step["type"] == "Split")
    if hashlib.sha256("".join(patterns).encode()).hexdigest() not in PRE_TOKENIZERS:
        yield "Ollama does not know how this tokenizer splits a text: its tokens, and so its answers, may differ"


def _render(tokenizer: Any, chat: Sequence[tuple[str, str]], opened: bool) -> str:
    """A conversation as the model reads it; the token that begins a text is Ollama's to add."""
    import jinja2

    messages = [{"role": role, "content": text} for role, text in chat]
    try:
        text: str = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=opened)
    except jinja2.TemplateError as error:
        raise DataError(f"the chat template refuses a conversation: {error}", HINT) from None
    return text.removeprefix(tokenizer.bos_token or "")


def _said(text: str) -> str:
    """A text escaped for Go's template."""
    return text.replace("{{", '{{ "{{" }}')
