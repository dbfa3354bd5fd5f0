"""Guesses at a conversation's next tokens, which one forward pass checks together.

Prompt lookup decoding (Saxena, 2023, github.com/apoorvumang/prompt-lookup-decoding): SQL and its reasoning repeat the
names of the schema, and a model that has lost its way repeats itself. A guess costs little where a pass of few tokens
takes about as long as a pass of one; a wrong one changes nothing, for each token is drawn from its own logits.
"""

from collections.abc import Sequence

NGRAM = 3  # tokens: how long a repetition must be before its continuation is guessed
FIRST_GUESSES = 4  # tokens guessed for a conversation at first
MOST_GUESSES = 24  # tokens guessed for a conversation at most


def continuation(ids: Sequence[int], most: int) -> list[int]:
    """What followed the last `NGRAM` tokens where they stood before: `most` tokens, or none.

    A sequence that repeats itself goes on repeating: a continuation that reaches the end of `ids` goes on in itself.

    Args:
        ids: (T,) all tokens of a conversation.
        most: number of tokens to guess.
    """
    ngram = list(ids[-NGRAM:])
    for start in range(len(ids) - NGRAM - 1, -1, -1):
        if ids[start] == ngram[0] and list(ids[start : start + NGRAM]) == ngram:
            extended = list(ids)
            for source in range(start + NGRAM, start + NGRAM + most):
                extended.append(extended[source])
            return extended[len(ids) :]
    return []


def next_length(length: int, n_right: int) -> int:
    """How many tokens to guess after a guess of `length` tokens, of which the first `n_right` were drawn."""
    if n_right == length:
        return min(2 * length, MOST_GUESSES)
    return n_right + 1
