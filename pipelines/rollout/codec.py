"""Token-exact assembling of conversations from a tokenizer's own chat template.

The template is rendered once around marker strings to learn what stands between an agent's turn and the next; after
that a conversation only ever grows at its end, so that an id that was generated is never encoded a second time.
"""

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.core.errors import DataError

_AGENT, _USER = "agentmarker", "usermarker"  # plain words: no template alters them
_CONTROL_SHAPE = re.compile(r"<\|.*\|>")
PROMPTS_KEPT = 512  # prompts whose ids are kept: a group's samples share one


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that two sequences of one type begin with alike."""
    shared = 0
    different = min(len(first), len(second)) + 1
    while different - shared > 1:
        middle = (shared + different) // 2
        if first[:middle] == second[:middle]:
            shared = middle
        else:
            different = middle
    return shared


class ChatCodec:
    """Turns messages into ids and ids into text.

    Control tokens (end of turn, start of text, ...) that stand inside a message's text are defused with a space, so
    that neither a database's values nor a question can end a turn or forge one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        if not getattr(tokenizer, "chat_template", None):
            raise DataError("the model's tokenizer has no chat template", "use an instruction-tuned checkpoint")
        self._encode: Callable[[str], list[int]] = functools.partial(tokenizer.encode, add_special_tokens=False)
        self._render: Callable[[list[dict[str, str]]], str] = functools.partial(
            tokenizer.apply_chat_template, tokenize=False, add_generation_prompt=True
        )
        chat = (("user", "q"), ("assistant", _AGENT), ("user", _USER))
        rendered = self._render([{"role": role, "content": text} for role, text in chat])
        _, marked, after = rendered.rpartition(_AGENT)
        self._before_user, also, self._after_user = after.partition(_USER)
        if not (marked and also):
            raise DataError("the tokenizer's chat template does not repeat the messages that it is given")
        # The tokens that steer a conversation; a protocol's own tags are not among them.
        added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
        control = {token for token in (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) if token}
        control |= {
            token for token, special in added.items() if special or token in rendered or _CONTROL_SHAPE.fullmatch(token)
        }
        longest_first = sorted((token for token in control if len(token) > 1), key=lambda token: (-len(token), token))
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        closing = self._encode(self._before_user)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        self.end_id: int | None = closing[0] if closing and closing[0] in special else None
        self._prompts: dict[tuple[tuple[str, str], ...], list[int]] = {}

    def prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """(T,) ids of a conversation's beginning, up to where the agent speaks.

        Messages from the first assistant one on are appended turn by turn, as in an episode.
        """
        key = tuple(messages)
        if key not in self._prompts:
            if len(self._prompts) >= PROMPTS_KEPT:
                self._prompts.clear()
            first = next((i for i, (role, _) in enumerate(key) if role == "assistant"), len(key))
            begun = [{"role": role, "content": self._defuse(text)} for role, text in key[:first]]
            ids = self._encode(self._render(begun))
            for role, text in key[first:]:
                ids += self.agent(text) if role == "assistant" else self.observation(text)
            self._prompts[key] = ids
        return list(self._prompts[key])

    def observation(self, text: str, last: int | None = None) -> list[int]:
        """(T,) ids that follow an agent's turn: its end, the user's message, and where the agent speaks again. An
        end-of-turn token that the agent generated itself, as its `last` id, is not repeated.
        """
        ids = self._encode(self._before_user + self._defuse(text) + self._after_user)
        return ids[1:] if last is not None and last == self.end_id else ids

    def agent(self, text: str) -> list[int]:
        """(T,) ids of an agent's turn that is known as text only."""
        return self._encode(self._defuse(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _defuse(self, text: str) -> str:
        return self._control.sub(lambda match: match[0][0] + " " + match[0][1:], text)
