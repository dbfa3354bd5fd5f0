"""Conversations as pairs of role and text."""

from collections.abc import Sequence


def without_system(messages: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The messages without the system role, whose text begins the first user message."""
    system_texts = []
    others = []
    for role, text in messages:
        if role == "system":
            system_texts.append(text)
        else:
            others.append((role, text))
    system = "\n\n".join(system_texts)
    if not others:
        return [("user", system)]
    if not system:
        return others
    for index, (role, text) in enumerate(others):
        if role == "user":
            others[index] = ("user", f"{system}\n\n{text}")
            break
    return others
