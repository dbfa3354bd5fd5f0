"""Token-exact assembling of conversations from a tokenizer's own chat template.

The template is rendered once around marker strings to learn what stands between an agent's turn and the next; after
that a conversation only ever grows at its end, so that an id that was generated is never encoded a second time.
"""

import functools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from pipelines.core import processes
from pipelines.core.errors import DataError
from pipelines.core.messages import without_system

_AGENT, _USER, _SYSTEM = "agentmarker", "usermarker", "systemmarker"  # plain words: no template alters them
TEMPLATE_HINT = "Mend chat_template.jinja, or take that of the model's own folder."
_CONTROL_SHAPE = re.compile(r"<\|.*\|>")
MAX_PROMPTS = 512  # prompts whose ids stay in memory: a group's samples share one
log = logging.getLogger(__name__)


@functools.cache
def _tell_of_merging(name: str) -> None:
    if processes.number == 0:
        log.warning("the chat template of %s takes no system message: it begins the first user message", name)


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
        rendered = self._render((("user", "q"), ("assistant", _AGENT), ("user", _USER)))
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
        # Some templates refuse the system role, as Gemma's do, and some leave its message out.
        try:
            self._has_system = _SYSTEM in self._render((("system", _SYSTEM), ("user", "q")))
        except DataError:
            self._has_system = False
        if not self._has_system:
            _tell_of_merging(str(tokenizer.name_or_path))
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
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            first = next((i for i, (role, _) in enumerate(key) if role == "assistant"), len(key))
            begun = [(role, self._defuse(text)) for role, text in key[:first]]
            ids = self._encode(self._render(begun if self._has_system else without_system(begun)))
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

    def _render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The text of a conversation by the template, up to where the agent speaks."""
        import jinja2

        chat = [{"role": role, "content": text} for role, text in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"the tokenizer's chat template cannot be used: {reason}", TEMPLATE_HINT) from None
        return text

    def _defuse(self, text: str) -> str:
        return self._control.sub(lambda match: match[0][0] + " " + match[0][1:], text)
