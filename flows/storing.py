"""`sqltrain store`: what a store holds, what may go, and whether its bytes are those that were written."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipelines.core.errors import DataError, SqltrainError
from pipelines.core.store import MANIFEST, Store
from pipelines.core.store_remote import Remote, chosen
from pipelines.nightly import ledger_remote, store_gc


def listing(store: Store, every: bool) -> dict[str, Any]:
    """The store as JSON values: bytes by kind and, with `every`, each finished stage with who needs it."""
    kinds = {name: {"stages": count, "bytes": size} for name, (count, size) in store_gc.usage(store).items()}
    listing: dict[str, Any] = {"store": str(store.root), "kinds": kinds}
    if every:
        why = store_gc.needed(store)
        listing["stages"] = [
            {"name": "/".join(name), "bytes": n_bytes, "needed": why.get(name, "")}
            for name, n_bytes in store_gc.sizes(store).items()
        ]
    return listing


def table(listing: dict[str, Any]) -> str:
    """The listing for a person."""
    lines = [listing["store"]]
    for name, kind in listing["kinds"].items():
        lines.append(f"{human(kind['bytes']):>10}  {kind['stages']:>5} finished  {name}")
    lines.append(f"{human(sum(kind['bytes'] for kind in listing['kinds'].values())):>10}  in all")
    lines += [
        f"{human(stage['bytes']):>10}  {stage['name']:<40} {stage['needed']}".rstrip()
        for stage in listing.get("stages", [])
    ]
    return "\n".join(lines)


def collect(store: Store, days: float, delete: bool) -> Iterator[str]:
    """Remove what nobody needs, or only say what would go; a line for each, then the sum."""
    warnings: list[str] = []
    doomed = store_gc.doomed(store, days, warnings.append)
    yield from warnings
    count = n_bytes = 0
    for entry, went in store_gc.collect(store, doomed) if delete else ((entry, False) for entry in doomed):
        where = entry.folder.relative_to(store.root)
        if delete and not went:
            yield f"left {where}: it is needed by now, or gone"
            continue
        count, n_bytes = count + 1, n_bytes + entry.n_bytes
        yield f"{'removed' if delete else 'would remove'} {where}  {human(entry.n_bytes)}"
    hint = "" if delete or not doomed else "; with --delete they go"
    yield f"{count} folders, {human(n_bytes)}{hint}"


def damaged(store: Store, say: Callable[[str], None]) -> int:
    """Check every finished stage against its manifest, saying what is wrong; returns how many are damaged."""
    bad = count = 0
    for stage, key in store.names():
        count += 1
        wrong = store.damage(stage, key, whole=True)
        if wrong:
            bad += 1
            say(f"damaged: {store.folder(stage, key)}: {', '.join(wrong[:5])}")
    say(f"{count} stages, {bad} damaged")
    return bad


def push(store: Store, url: str, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Upload the finished stages that are not whole there; without names, the nights too.

    Of a stage that two machines made with different bytes, the first to come stays: others may have pulled it.
    """
    remote = Remote(url)
    there = set(remote.names())
    pushed = damaged = 0
    for name in chosen(list(store.names()), names, str(store.root)):
        manifest = remote.whole(*name) if name in there else None
        if manifest is not None:
            if manifest != (store.folder(*name) / MANIFEST).read_bytes():
                say(f"not pushed: {'/'.join(name)} is whole there, with another manifest than here")
        elif wrong := store.damage(*name, whole=True):
            damaged += 1
            say(f"damaged, not pushed: {'/'.join(name)} ({wrong[0]})")
        else:
            remote.push(store, *name)
            pushed += 1
            say(f"pushed {'/'.join(name)}")
    say(_sum(pushed, "pushed"))
    if not names:
        ledger_remote.push(remote, store, say)
    if damaged:
        raise SqltrainError(f"{_sum(damaged, 'damaged')} here and not pushed", "Run again what made them, then push.")


def pull(store: Store, url: str, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Download the finished stages that the store lacks or has damaged, saying each; without names, the nights too."""
    remote = Remote(url)
    failures: list[DataError] = []
    count = 0
    for name in chosen(remote.names(), names, url):
        if store.has(*name):
            wrong = store.damage(*name, whole=True)
            aside = store.set_aside(*name, whole=True) if wrong else None
            if aside is not None:
                say(f"{'/'.join(name)} is damaged ({wrong[0]}): set aside as {aside.name}")
            if store.has(*name):
                continue
        try:
            remote.pull(store, *name)
        except DataError as error:
            failures.append(error)
            say(f"not pulled: {'/'.join(name)}: {error.message}")
            continue
        count += 1
        say(f"pulled {'/'.join(name)}")
    say(_sum(count, "pulled"))
    if not names:
        ledger_remote.pull(remote, store, say)
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise DataError(f"{_sum(len(failures), 'not pulled')}; the first: {failures[0].message}", failures[0].hint)


def _sum(count: int, what: str) -> str:
    return f"{count} stage{'' if count == 1 else 's'} {what}"


def human(n_bytes: int) -> str:
    """A size for people, in powers of 1,024."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
