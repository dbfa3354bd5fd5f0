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
from pipelines.core.errors import DataError, first_line
from pipelines.core.messages import without_system
from pipelines.core.types import Message

# Marker strings are plain words: no template alters them.
_AGENT = "agentmarker"
_USER = "usermarker"
_SYSTEM = "systemmarker"
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


def _control_pattern(tokenizer: Any, rendered: str) -> re.Pattern[str]:
    """A pattern of the tokens that steer a conversation; a protocol's own tags are not among them.

    Args:
        rendered: a conversation by the chat template.
    """
    control = {tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token}
    for token in tokenizer.added_tokens_decoder.values():
        is_in_template = token.content in rendered
        if token.special or is_in_template or _CONTROL_SHAPE.fullmatch(token.content):
            control.add(token.content)
    tokens = [token for token in control if token is not None and len(token) > 1]
    if not tokens:
        return re.compile(r"(?!)")  # matches nothing
    tokens.sort(key=lambda token: (-len(token), token))  # the longest first
    return re.compile("|".join(map(re.escape, tokens)))


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
        conversation = (("user", "q"), ("assistant", _AGENT), ("user", _USER))
        rendered = self._render(conversation)
        _, has_agent, after_agent = rendered.rpartition(_AGENT)
        self._before_user, has_user, self._after_user = after_agent.partition(_USER)
        if not has_agent or not has_user:
            raise DataError("the tokenizer's chat template does not repeat the messages that it is given")
        self._control = _control_pattern(tokenizer, rendered)
        self._has_system = self._shows_system()
        if not self._has_system:
            _tell_of_merging(str(tokenizer.name_or_path))
        self.end_id: int | None = None  # the token that ends a turn, if the template has one
        closing = self._encode(self._before_user)
        special = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
        if closing and closing[0] in special:
            self.end_id = closing[0]
        self._prompts: dict[tuple[Message, ...], list[int]] = {}

    def _shows_system(self) -> bool:
        """Whether the template shows a system message: some refuse the role, as Gemma's do, and some leave it out."""
        conversation = (("system", _SYSTEM), ("user", "q"))
        try:
            return _SYSTEM in self._render(conversation)
        except DataError:
            return False

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """(T,) ids of a conversation's beginning, up to where the agent speaks.

        Messages from the first assistant one on are appended turn by turn, as in an episode.
        """
        key = tuple(messages)
        if key not in self._prompts:
            if len(self._prompts) >= MAX_PROMPTS:
                self._prompts.clear()
            self._prompts[key] = self._prompt_ids(key)
        return list(self._prompts[key])

    def _prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """The ids of messages: by the template up to the first assistant one, then turn by turn."""
        roles = [role for role, _ in messages]
        n_opening = len(roles)
        if "assistant" in roles:
            n_opening = roles.index("assistant")
        opening = [(role, self._defuse(text)) for role, text in messages[:n_opening]]
        if not self._has_system:
            opening = without_system(opening)
        ids = self._encode(self._render(opening))
        for role, text in messages[n_opening:]:
            if role == "assistant":
                ids += self.agent(text)
            else:
                ids += self.observation(text)
        return ids

    def observation(self, text: str, last: int | None = None) -> list[int]:
        """(T,) ids that follow an agent's turn: its end, the user's message, and where the agent speaks again. An
        end-of-turn token that the agent generated itself, as its `last` id, is not repeated.
        """
        between_turns = self._before_user + self._defuse(text) + self._after_user
        ids = self._encode(between_turns)
        if last is not None and last == self.end_id:
            return ids[1:]
        return ids

    def agent(self, text: str) -> list[int]:
        """(T,) ids of an agent's turn that is known as text only."""
        return self._encode(self._defuse(text))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens included."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return text

    def _render(self, messages: Sequence[Message]) -> str:
        """The text of a conversation by the template, up to where the agent speaks."""
        import jinja2

        chat = [{"role": role, "content": text} for role, text in messages]
        try:
            text: str = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            message = f"the tokenizer's chat template cannot be used: {first_line(error)}"
            raise DataError(message, TEMPLATE_HINT) from None
        return text

    def _defuse(self, text: str) -> str:
        return self._control.sub(_with_space, text)


def _with_space(token: re.Match[str]) -> str:
    """A control token with a space behind its first character, so that it is read as plain text."""
    text = token[0]
    return f"{text[0]} {text[1:]}"
