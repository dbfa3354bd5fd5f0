"""Commands of operation: nightly retraining, its champion, what runs, and the housekeeping of a store."""

import contextlib
import functools
import json
import re
import shlex
import shutil
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows import terminal
from flows.terminal import AsJson, Bars, Overrides, RecipeName, StoreOption, emit
from pipelines.core.errors import DataError, SqltrainError, UserError
from pipelines.core.files import write_atomic
from pipelines.core.store import MANIFEST, Store
from pipelines.core.store_remote import Remote, select_stages
from pipelines.nightly import inbox, ledger_remote, store_gc
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Ledger, ledgers
from pipelines.nightly.night import NightContext, run_night, title
from pipelines.recipe.opening import explicit_store_folder, open_recipe, split_store
from pipelines.report.terminal import plain
from tasks import contracts
from tasks.models import announce_champion, announce_if_stale
from tasks.run import Tracker

Stores = Annotated[
    list[str] | None, typer.Option("--store", help="A store, or several of them; SQLTRAIN_STORE or ./store by default.")
]
Url = Annotated[str, typer.Argument(help="Where: s3://BUCKET/FOLDER, file:///FOLDER, whatever fsspec knows.")]
Names = Annotated[
    list[str] | None, typer.Argument(help="STAGE or STAGE/KEY (or its beginning); all of them when left out.")
]
INFRA = Path(__file__).resolve().parents[2] / "infra"
Tier = Literal["prod", "staging"]
HEIGHT, NIGHTS = 8, 60  # of the plot of `status`: lines, and columns at most
MARKS = {"promoted": "●", "kept": "○", "worse": "×"}

app = typer.Typer()
champion_app = typer.Typer(help="The checkpoint that nightly retraining promoted.", no_args_is_help=True)
store_app = typer.Typer(help="What a store holds, and what of it may go.", no_args_is_help=True)
app.add_typer(champion_app, name="champion")
app.add_typer(store_app, name="store")


@app.command()
def nightly(
    recipe: RecipeName,
    overrides: Overrides = None,
    deployment: Annotated[
        str | None, typer.Option(help="Have it run as this deployment, such as retrain/nightly, and wait for its end.")
    ] = None,
    since: Annotated[
        datetime | None,
        typer.Option(formats=["%Y-%m-%d"], help="Replay: a night for each day from this one on with new questions."),
    ] = None,
    as_json: AsJson = False,
    store_folder: StoreOption = None,
) -> None:
    """Run one night: take new questions, train a challenger, promote it only if it is better.

    With --deployment it waits through a restart of the Prefect server, and exits with 0 if the night completed.
    With --since a question's day is that of its file's last change, in UTC. After a kill or a refused day the same
    command goes on.

    Examples:

      sqltrain nightly miniature nightly.inbox=~/questions

      sqltrain nightly sql_trail nightly.inbox=new.duckdb nightly.table=questions nightly.start=base

      sqltrain nightly miniature --deployment retrain/nightly

      sqltrain nightly miniature --since 2026-11-01

    """
    words, store = split_store(overrides, store_folder)
    if deployment is not None:
        from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
        from prefect.settings import PREFECT_API_URL

        from flows.prefect.remote import run_elsewhere
        from tasks.prefect_server import check_server

        if not PREFECT_API_URL.value():
            raise UserError("PREFECT_API_URL is not set", "Set it to the Prefect server that has the deployment.")
        check_server()
        named_folder = explicit_store_folder(overrides, store_folder)
        parameters: dict[str, Any] = {} if named_folder is None else {"store": named_folder}
        parameters |= {} if since is None else {"since": str(since.date())}
        unknown = UserError(f"the server has no deployment {deployment!r}", "See: prefect deployment ls")
        if deployment.count("/") != 1:
            raise unknown
        try:
            state = run_elsewhere(
                deployment, parameters | {"recipe": recipe, "overrides": words}, lambda line: typer.echo(line, err=True)
            )
        except ObjectNotFound:
            raise unknown from None
        except PrefectHTTPStatusError as error:
            raise UserError(f"the server refuses {deployment}: {error.response.text[:500]}") from None
        line = {"decision": str(state.name).lower(), "reason": state.message}
        typer.echo(json.dumps(line, sort_keys=True) if as_json else f"{line['decision']}: {line['reason']}")
        return
    loaded, store = open_recipe(recipe, overrides, store_folder)
    announce_if_stale(loaded.name, store, terminal.say)
    days = [None] if since is None else inbox.delivery_days(loaded.nightly, since.date())
    for day in days:
        with Bars(terminal.console) as bars:
            with Tracker(loaded, store, bars.say, title(loaded, store)) as tracker:
                walk = functools.partial(terminal.walk, progress=bars, tracker=tracker)
                line = run_night(NightContext(recipe, words, loaded, store, walk, contracts.check), day)
                tracker.note_decision(line)
            announce_champion(loaded.name, store, bars.say)
        if as_json:
            emit(line)
        else:
            terminal.say(f"{'' if day is None else f'{day}: '}{line['decision']}: {line['reason']}")


@champion_app.command("show")
def champion_show(
    recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False, store_folder: StoreOption = None
) -> None:
    """Print the champions of prod and staging, and those that a rollback goes back to; MLflow's aliases are put right.

    Example: sqltrain champion show miniature
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    announce_if_stale(loaded.name, store, lambda line: typer.echo(line, err=True))
    ledger = Ledger(store, loaded.name)
    by_tier: dict[str, list[dict[str, Any]]] = {tier: [] for tier in TIERS}
    for tier, rows in by_tier.items():
        for one in reversed(ledger.champions(tier)):
            model = str(store.folder(one.stage, one.key) / "model")
            rows.append({"stage": one.stage, "key": one.key, "model": model, "batches": len(one.batches)})
    if as_json:
        emit({"champions": by_tier[PROD], STAGING: by_tier[STAGING]})
        return
    for first, champions in zip(("champion", STAGING), by_tier.values(), strict=True):
        for place, champion in zip([first, *["before"] * len(champions)], champions, strict=False):
            typer.echo(f"{place:<9} {champion['model']}  ({champion['batches']} batches learned)")
    if not any(by_tier.values()):
        typer.echo(f"{loaded.name} has no champion yet; run: sqltrain nightly {recipe}")


@champion_app.command("rollback")
def champion_rollback(
    recipe: RecipeName,
    overrides: Overrides = None,
    tier: Annotated[Tier, typer.Option(help="prod or staging; what leaves prod leaves staging too.")] = "prod",
    store_folder: StoreOption = None,
) -> None:
    """Make the previous champion the champion again; the one that leaves is not promoted again.

    A night may be running: it decides against the champion that stands when it ends, and does not promote what it
    trained from the one that left.

    Examples:

      sqltrain champion rollback miniature

      sqltrain champion rollback miniature --tier staging
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    former, came = Ledger(store, loaded.name).rollback(tier)
    announce_champion(loaded.name, store, typer.echo)
    who = "champion" if tier == PROD else tier
    typer.echo(f"{who}: {store.folder(came.stage, came.key) / 'model'} (was {former.stage}/{former.key})")


@champion_app.command("promote")
def champion_promote(recipe: RecipeName, overrides: Overrides = None, store_folder: StoreOption = None) -> None:
    """Make the champion of staging, to which nights with nightly.tier=staging promote, the champion of prod too.

    It may be done while a night runs. The deployment promote/prod does the same from Prefect's UI.

    Example: sqltrain champion promote miniature
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    made = Ledger(store, loaded.name).promote()["challenger"]
    announce_champion(loaded.name, store, typer.echo)
    typer.echo(f"champion: {store.folder(made['stage'], made['key']) / 'model'} (from staging)")


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where infra/ and .dockerignore come.")]) -> None:
    """Write the files of a deployment into a folder: Prefect, automations, compose, Kubernetes, images.

    They are those of infra/, with its page. Images are built of a wheel that lies in the folder.

    Example: sqltrain init ~/deployment
    """
    home = folder.expanduser().resolve()
    ready, ignored, work = home / "infra", home / ".dockerignore", home / ".infra"
    for path in (path for path in (ready, ignored) if path.exists()):
        raise UserError(f"{path} is there already", "Nothing was written: name another folder, or move it away.")
    shutil.rmtree(work, ignore_errors=True)  # of an earlier command that was killed
    shutil.copytree(INFRA, work, ignore=shutil.ignore_patterns("__pycache__"))
    for path in work.glob("images/*.Dockerfile"):  # the wheel instead of a checkout's folders and pinned versions
        text = re.sub(r"\nCOPY (pipelines|tasks|flows|conf) .*", "", path.read_text(encoding="utf-8"))
        text = text.replace("COPY pyproject.toml constraints.txt", "COPY sqltrain-*.whl")
        text = text.replace("-c constraints.txt ", "")
        write_atomic(path, re.sub(r"-e '\.(\[[\w,]+\])'", r'"$(echo ./sqltrain-*.whl)\1"', text))
    write_atomic(ignored, "*\n!infra\n!sqltrain-*.whl\n")
    work.rename(ready)
    typer.echo(f"wrote {ready}: its README.md has every step, from the server's key on; run them in {home}")
    typer.echo("images are built of the wheel of this version: put it there first")
    typer.echo(f"next: cd {shlex.quote(str(home))} && export SQLTRAIN_HOME=$PWD && python infra/deploy.py")


@app.command()
def status(store_folders: Stores = None, as_json: AsJson = False) -> None:
    """Show what runs, what the last night decided, and held-out accuracy over the nights.

    Examples:

      sqltrain status

      sqltrain status --store /data/sales --store /data/farms --json
    """
    folders: Sequence[str | None] = store_folders or [None]
    states = [state_of(existing_store(folder)) for folder in folders]
    texts = [json.dumps(state, sort_keys=True) if as_json else render_state(state) for state in states]
    typer.echo(("\n" if as_json else "\n\n").join(texts))


def state_of(store: Store) -> dict[str, Any]:
    """The state of a store as JSON values; no server is asked."""
    # A run claims the stages that it makes and, for as long as it is recorded, itself: with stages it is shown once.
    runs = {
        (row["host"], row["pid"]): row for row in sorted(store_gc.live_runs(store), key=lambda row: bool(row["stages"]))
    }
    running = []
    for row in runs.values():
        waiting = [stage for stage, key in row["stages"] if not store.has(stage, key)]
        names = ("recipe", "host", "pid", "since", "flow_run_name")
        known: dict[str, Any] = {name: row[name] for name in names if name in row}
        n_stages = len(row["stages"])
        running.append({**known, "stage": next(iter(waiting), ""), "done": n_stages - len(waiting), "of": n_stages})
    by_recipe: dict[str, Any] = {}
    for name, ledger in ledgers(store).items():
        lines = ledger.lines()
        champions = {tier: ledger.champion(tier) for tier in TIERS}
        keys = {tier: None if one is None else f"{one.stage}/{one.key}" for tier, one in champions.items()}
        by_recipe[name] = {
            "champion": keys[PROD],
            "staging": keys[STAGING],
            "last": lines[-1] if lines else None,
            "nights": [
                {"at": row["at"], "decision": row["decision"], "ex": row.get("numbers", {}).get("challenger_ex")}
                for row in lines
                if row["event"] == "night"
            ],
        }
    return {"store": str(store.root), "running": running, "recipes": by_recipe}


def render_state(state: dict[str, Any]) -> str:
    """The state for a person."""
    lines = [f"store {state['store']}", ""]
    for row in state["running"]:
        minutes = max(0.0, time.time() - row["since"]) / 60  # the clock may have been set back
        where = f"{row['stage']}, {row['done']} of {row['of']} stages done"
        where = where if row["stage"] else "between two stages, or waits for MLflow"
        lines.append(f"runs: {row['recipe']}: {where}, for {minutes:.0f} min (process {row['pid']} on {row['host']})")
    if not state["running"]:
        lines.append("nothing runs")
    for name, recipe in state["recipes"].items():
        staging = f", in staging {recipe['staging']}" if recipe.get("staging") else ""
        lines += ["", f"{name}: champion {recipe['champion'] or 'none yet'}{staging}"]
        last = recipe["last"]
        if last is not None and last["event"] == "night":
            lines.append(f"last night, {last['at']}: {last['decision']}: {last['reason']}")
        elif last is not None and last["event"] == "promotion":
            lines.append(f"promoted from staging, {last['at']}: {last['challenger']['key']}")
        elif last is not None:
            lines.append(f"rolled back, {last['at']}: from {last['from']} to {last['to']}")
        lines += plot(recipe["nights"])
    if not state["recipes"]:
        lines.append("no night yet; see: sqltrain nightly --help")
    return "\n".join(map(plain, lines))


def plot(nights: list[dict[str, Any]]) -> list[str]:
    """Challengers' held-out EX over the nights, in per cent: one column a night that trained one."""
    points = [(100 * night["ex"], MARKS[night["decision"]]) for night in nights if night["ex"] is not None][-NIGHTS:]
    if not points:
        return []
    low, high = min(value for value, _ in points), max(value for value, _ in points)
    step = (high - low) / (HEIGHT - 1) or 1.0
    rows = [[" "] * len(points) for _ in range(HEIGHT)]
    for column, (value, mark) in enumerate(points):
        rows[round((value - low) / step)][column] = mark
    lines = [f"{low + step * index:6.1f} ┤{' '.join(row)}".rstrip() for index, row in reversed(list(enumerate(rows)))]
    return ["EX %, a column a night: ● promoted, ○ kept, × worse", *lines]


@store_app.command("ls")
def store_ls(
    store_folder: StoreOption = None,
    every: Annotated[bool, typer.Option("--all", help="Each finished stage, with who needs it.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what a store holds, by kind, with sizes.

    Examples:

      sqltrain store ls

      sqltrain store ls --all --store /data/store
    """
    store = existing_store(store_folder)
    kinds = {name: {"stages": count, "bytes": size} for name, (count, size) in store_gc.usage_by_kind(store).items()}
    stages: list[dict[str, Any]] = []
    if every:
        why = store_gc.reasons_to_keep(store)
        for name in store.made():
            n_bytes = store_gc.size_of(store.folder(*name))
            stages.append({"name": "/".join(name), "bytes": n_bytes, "needed": why.get(name, "")})
    if as_json:
        emit({"store": str(store.root), "kinds": kinds, **({"stages": stages} if every else {})})
        return
    typer.echo(store.root)
    for kind, use in kinds.items():
        typer.echo(f"{human(use['bytes']):>10}  {use['stages']:>5} finished  {kind}")
    typer.echo(f"{human(sum(use['bytes'] for use in kinds.values())):>10}  in all")
    for stage in stages:
        typer.echo(f"{human(stage['bytes']):>10}  {stage['name']:<40} {stage['needed']}".rstrip())


@store_app.command("gc")
def collect(
    store_folder: StoreOption = None,
    days: Annotated[float, typer.Option(min=0, max=36_500, help="Keep what is younger than this.")] = 7.0,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; without this, only say what would go.")] = False,
) -> None:
    """Remove what nobody needs: no run at work, no champion or its predecessor, no pin, no recipe's newest report.

    Examples:

      sqltrain store gc

      sqltrain store gc --days 30 --delete
    """
    store = existing_store(store_folder)
    candidates = store_gc.gc_candidates(store, days, typer.echo)
    count = n_bytes = 0
    for entry, went in store_gc.collect_garbage(store, candidates) if delete else ((entry, False) for entry in candidates):
        where = entry.folder.relative_to(store.root)
        if delete and not went:
            typer.echo(f"left {where}: it is needed by now, or gone")
            continue
        count, n_bytes = count + 1, n_bytes + entry.n_bytes
        typer.echo(f"{'removed' if delete else 'would remove'} {where}  {human(entry.n_bytes)}")
    hint = "" if delete or not candidates else "; with --delete they go"
    typer.echo(f"{count} folders, {human(n_bytes)}{hint}")


@store_app.command("verify")
def verify(store_folder: StoreOption = None) -> None:
    """Read every finished stage and compare its bytes with its manifest; exit code 1 when something is damaged.

    Example: sqltrain store verify --store /data/store
    """
    store = existing_store(store_folder)
    bad = count = 0
    for stage, key in store.made():
        count += 1
        wrong = store.damage(stage, key, whole=True)
        if wrong:
            bad += 1
            typer.echo(f"damaged: {store.folder(stage, key)}: {', '.join(wrong[:5])}")
    typer.echo(f"{count} stages, {bad} damaged")
    if bad:
        raise SqltrainError(f"{bad} stages are damaged", "Remove their folders and run again.")


@store_app.command("pin")
def store_pin(
    name: Annotated[str, typer.Argument(help="STAGE/KEY, or the beginning of the key.")],
    store_folder: StoreOption = None,
    off: Annotated[bool, typer.Option("--off", help="Keep it no longer.")] = False,
) -> None:
    """Keep a stage, with all that it was made of, whatever gc thinks of it.

    Examples:

      sqltrain store pin report/da120b4f

      sqltrain store pin report/da120b4f --off
    """
    stage, key = store_gc.pin(existing_store(store_folder), name, not off)
    typer.echo(f"{'no longer kept' if off else 'kept'}: {stage}/{key}")


@store_app.command("push")
def store_push(url: Url, names: Names = None, store_folder: StoreOption = None) -> None:
    """Copy finished stages, and without names the nights too, to object storage; what is there unchanged is left alone.

    Examples:

      sqltrain store push s3://bucket/sqltrain

      sqltrain store push file:///backup grpo report/da120b4f
    """
    push(existing_store(store_folder), url, names or [], typer.echo)


def push(store: Store, url: str, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Upload the finished stages that are not whole there; without names, the nights too.

    Of a stage that two machines made with different bytes, the first to come stays: others may have pulled it.
    """
    remote = Remote(url)
    there = set(remote.names())
    pushed = damaged = 0
    for name in select_stages(list(store.made()), names, str(store.root)):
        manifest = None
        if name in there:
            with contextlib.suppress(DataError):  # a stage that is not whole there is pushed again
                manifest, *_ = remote.listed(*name)
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


@store_app.command("pull")
def store_pull(url: Url, names: Names = None, store_folder: StoreOption = None) -> None:
    """Fetch finished stages that are lacking or damaged, and without names the nights too, checked against manifests.

    Example: sqltrain store pull s3://bucket/sqltrain data synthesize filter
    """
    pull(split_store(None, store_folder)[1], url, names or [], typer.echo)


def pull(store: Store, url: str, names: Sequence[str], say: Callable[[str], None]) -> None:
    """Download the finished stages that the store lacks or has damaged, saying each; without names, the nights too."""
    remote = Remote(url)
    failures: list[DataError] = []
    count = 0
    for name in select_stages(remote.names(), names, url):
        if store.has(*name):
            store.set_aside(*name, whole=True, say=say)
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


def existing_store(folder: str | None) -> Store:
    """The store that `--store` or the environment names; a UserError if there is none yet."""
    _, store = split_store(None, folder)
    if not store.root.is_dir():
        raise UserError(f"no store at {store.root}", "Pass --store DIR or set SQLTRAIN_STORE; a run makes one.")
    return store


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
