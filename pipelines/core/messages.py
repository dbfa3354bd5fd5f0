"""Conversations as pairs of role and text."""

from collections.abc import Sequence


def without_system(messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages without the system role, whose text begins the first user message."""
    system = "\n\n".join(text for role, text in messages if role == "system")
    rest = [message for message in messages if message[0] != "system"]
    first = next((index for index, (role, _) in enumerate(rest) if role == "user"), None)
    if system and first is not None:
        rest[first] = ("user", f"{system}\n\n{rest[first][1]}")
    return rest or [("user", system)]
