"""Finished stages and nights between a store and object storage: `sqltrain store push` and `sqltrain store pull`."""

import contextlib
from collections.abc import Sequence

from pipelines.core.errors import DataError, SqltrainError
from pipelines.core.store import MANIFEST, Store
from pipelines.core.store_remote import Remote, select_stages
from pipelines.core.types import Say
from pipelines.nightly import ledger_remote


def push_stages(store: Store, url: str, names: Sequence[str], say: Say) -> None:
    """Upload the finished stages that are not whole there; without names, the nights too.

    Of a stage that two machines made with different bytes, the first to come stays: others may have pulled it.
    """
    remote = Remote(url)
    remote_names = set(remote.names())
    selected = select_stages(list(store.made()), names, str(store.root))
    pushed = 0
    damaged = 0
    for name in selected:
        title = "/".join(name)
        manifest = None
        if name in remote_names:
            manifest = _remote_manifest(remote, name)
        if manifest is not None:
            path = store.folder(*name) / MANIFEST
            if manifest != path.read_bytes():
                say(f"not pushed: {title} is whole there, with another manifest than here")
            continue
        damage = store.damage(*name, whole=True)
        if damage:
            damaged += 1
            say(f"damaged, not pushed: {title} ({damage[0]})")
            continue
        remote.push(store, *name)
        pushed += 1
        say(f"pushed {title}")
    say(count_stages(pushed, "pushed"))
    if not names:
        ledger_remote.push_nights(remote, store, say)
    if damaged:
        message = f"{count_stages(damaged, 'damaged')} here and not pushed"
        raise SqltrainError(message, "Run again what made them, then push.")


def _remote_manifest(remote: Remote, name: tuple[str, str]) -> bytes | None:
    """The manifest of a stage there; None if it is not whole, so that it is pushed again."""
    with contextlib.suppress(DataError):
        manifest, *_ = remote.listed(*name)
        return manifest
    return None


def pull_stages(store: Store, url: str, names: Sequence[str], say: Say) -> None:
    """Download the finished stages that the store lacks or has damaged, saying each; without names, the nights too."""
    remote = Remote(url)
    failures: list[DataError] = []
    pulled = 0
    for name in select_stages(remote.names(), names, url):
        if store.has(*name):
            store.set_aside(*name, whole=True, say=say)
            if store.has(*name):
                continue
        title = "/".join(name)
        try:
            is_fetched = remote.pull(store, *name)
        except DataError as error:
            failures.append(error)
            say(f"not pulled: {title}: {error.message}")
            continue
        if not is_fetched:
            say(f"{title} is there: another run made it meanwhile")
            continue
        pulled += 1
        say(f"pulled {title}")
    say(count_stages(pulled, "pulled"))
    if not names:
        ledger_remote.pull_nights(remote, store, say)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        first = failures[0]
        summary = count_stages(len(failures), "not pulled")
        raise DataError(f"{summary}; the first: {first.message}", first.hint)


def count_stages(count: int, participle: str) -> str:
    """A number of stages for a person: "1 stage pushed"."""
    noun = "stage" if count == 1 else "stages"
    return f"{count} {noun} {participle}"
