"""Commands of operation: nightly retraining, its champion, what runs, and the housekeeping of a store."""

import functools
import json
import re
import shlex
import shutil
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from flows import terminal
from flows.terminal import Bars, JsonOutput, Overrides, RecipeName, StoreOption, emit
from pipelines.core.errors import SqltrainError, UserError
from pipelines.core.files import write_atomic
from pipelines.core.store import Store
from pipelines.nightly import inbox, store_gc
from pipelines.nightly.ledger import PROD, STAGING, TIERS, Ledger
from pipelines.nightly.night import NightContext, night_title, run_night
from pipelines.nightly.store_status import status_text, store_status
from pipelines.nightly.store_transfer import pull_stages, push_stages
from pipelines.recipe.config import Recipe
from pipelines.recipe.opening import explicit_store_folder, open_recipe, split_store
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
MAX_LISTED = 5  # damaged files of a stage on one line
INFRA = Path(__file__).resolve().parents[2] / "infra"
Tier = Literal["prod", "staging"]

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
    json_output: JsonOutput = False,
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

      sqltrain nightly miniature nightly.inbox=~/questions --since 2026-11-01

    """
    words, _ = split_store(overrides, store_folder)
    if deployment is not None:
        parameters: dict[str, Any] = {"recipe": recipe, "overrides": words}
        named_folder = explicit_store_folder(overrides, store_folder)
        if named_folder is not None:
            parameters["store"] = named_folder
        if since is not None:
            parameters["since"] = str(since.date())
        run_deployment(deployment, parameters, json_output)
        return
    loaded, store = open_recipe(recipe, overrides, store_folder)
    announce_if_stale(loaded.name, store, terminal.say)
    days: Sequence[date | None] = [None]
    if since is not None:
        days = inbox.delivery_days(loaded.nightly, since.date())
    for day in days:
        line = make_night(recipe, words, loaded, store, day)
        if json_output:
            emit(line)
        else:
            text = f"{line['decision']}: {line['reason']}"
            if day is not None:
                text = f"{day}: {text}"
            terminal.say(text)


def make_night(name: str, words: Sequence[str], recipe: Recipe, store: Store, day: date | None) -> dict[str, Any]:
    """One tracked night with its progress on the screen; its line of the ledger.

    Args:
        name: the recipe as the user named it.
        words: the user's overrides.
        day: the day that is replayed; None for a night of today.
    """
    with Bars(terminal.console) as bars:
        title = night_title(recipe, store)
        with Tracker(recipe, store, bars.say, title) as tracker:
            walk = functools.partial(terminal.walk, progress=bars, tracker=tracker)
            context = NightContext(name, words, recipe, store, walk, contracts.check)
            line = run_night(context, day)
            tracker.note_decision(line)
        announce_champion(recipe.name, store, bars.say)
    return line


def echo_error(line: str) -> None:
    typer.echo(line, err=True)


def run_deployment(deployment: str, parameters: dict[str, Any], json_output: bool) -> None:
    """Run a deployment of a Prefect server, wait for its end, and print how it ended."""
    from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
    from prefect.settings import PREFECT_API_URL

    from flows.prefect.remote import run_elsewhere
    from tasks.prefect_server import check_server

    if not PREFECT_API_URL.value():
        raise UserError("PREFECT_API_URL is not set", "Set it to the Prefect server that has the deployment.")
    check_server()
    unknown = UserError(f"the server has no deployment {deployment!r}", "See: prefect deployment ls")
    if deployment.count("/") != 1:
        raise unknown
    try:
        state = run_elsewhere(deployment, parameters, echo_error)
    except ObjectNotFound:
        raise unknown from None
    except PrefectHTTPStatusError as error:
        raise UserError(f"the server refuses {deployment}: {error.response.text[:500]}") from None
    line = {"decision": str(state.name).lower(), "reason": state.message}
    if json_output:
        emit(line)
    else:
        typer.echo(f"{line['decision']}: {line['reason']}")


@champion_app.command("show")
def champion_show(
    recipe: RecipeName, overrides: Overrides = None, json_output: JsonOutput = False, store_folder: StoreOption = None
) -> None:
    """Print the champions of prod and staging, and those that a rollback goes back to; MLflow's aliases are put right.

    Example: sqltrain champion show miniature
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    announce_if_stale(loaded.name, store, echo_error)
    ledger = Ledger(store, loaded.name)
    by_tier: dict[str, list[dict[str, Any]]] = {tier: [] for tier in TIERS}
    for tier, rows in by_tier.items():
        for champion in reversed(ledger.champions(tier)):
            folder = store.folder(champion.stage, champion.key)
            row: dict[str, Any] = {"stage": champion.stage, "key": champion.key}
            row["model"] = str(folder / "model")
            row["batches"] = len(champion.batches)
            rows.append(row)
    if json_output:
        emit({"champions": by_tier[PROD], STAGING: by_tier[STAGING]})
        return
    titles = {PROD: "champion", STAGING: STAGING}
    for tier, rows in by_tier.items():
        for number, row in enumerate(rows):
            title = "before"
            if number == 0:
                title = titles[tier]
            typer.echo(f"{title:<9} {row['model']}  ({row['batches']} batches learned)")
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
    title = "champion" if tier == PROD else tier
    model = store.folder(came.stage, came.key) / "model"
    typer.echo(f"{title}: {model} (was {former.stage}/{former.key})")


@champion_app.command("promote")
def champion_promote(recipe: RecipeName, overrides: Overrides = None, store_folder: StoreOption = None) -> None:
    """Make the champion of staging, to which nights with nightly.tier=staging promote, the champion of prod too.

    It may be done while a night runs. The deployment promote/prod does the same from Prefect's UI.

    Example: sqltrain champion promote miniature
    """
    loaded, store = open_recipe(recipe, overrides, store_folder)
    line = Ledger(store, loaded.name).promote()
    announce_champion(loaded.name, store, typer.echo)
    promoted = line["challenger"]
    model = store.folder(promoted["stage"], promoted["key"]) / "model"
    typer.echo(f"champion: {model} (from staging)")


@app.command()
def init(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where infra/ and .dockerignore come.")]) -> None:
    """Write the files of a deployment into a folder: Prefect, automations, compose, Kubernetes, images.

    They are those of infra/, with its page. Images are built of a wheel that lies in the folder.

    Example: sqltrain init ~/deployment
    """
    home = folder.expanduser().resolve()
    infra = home / "infra"
    ignore_file = home / ".dockerignore"
    for path in (infra, ignore_file):
        if path.exists():
            raise UserError(f"{path} is there already", "Nothing was written: name another folder, or move it away.")
    work = home / ".infra"
    shutil.rmtree(work, ignore_errors=True)  # an earlier command may have been killed
    shutil.copytree(INFRA, work, ignore=shutil.ignore_patterns("__pycache__"))
    for path in work.glob("images/*.Dockerfile"):
        of_checkout = path.read_text(encoding="utf-8")
        write_atomic(path, wheel_dockerfile(of_checkout))
    write_atomic(ignore_file, "*\n!infra\n!sqltrain-*.whl\n")
    work.rename(infra)
    typer.echo(f"wrote {infra}: its README.md has every step, from the server's key on; run them in {home}")
    typer.echo("images are built of the wheel of this version: put it there first")
    quoted_home = shlex.quote(str(home))
    typer.echo(f"next: cd {quoted_home} && export SQLTRAIN_HOME=$PWD && python infra/deploy.py")


def wheel_dockerfile(text: str) -> str:
    """A Dockerfile that installs the wheel in its folder, from one that copies a checkout and pinned versions."""
    text = re.sub(r"\nCOPY (pipelines|tasks|flows|conf) .*", "", text)
    text = text.replace("COPY pyproject.toml constraints.txt", "COPY sqltrain-*.whl")
    text = text.replace("-c constraints.txt ", "")
    return re.sub(r"-e '\.(\[[\w,]+\])'", r'"$(echo ./sqltrain-*.whl)\1"', text)


@app.command()
def status(store_folders: Stores = None, json_output: JsonOutput = False) -> None:
    """Show what runs, what the last night decided, and held-out accuracy over the nights.

    Examples:

      sqltrain status

      sqltrain status --store /data/sales --store /data/farms --json
    """
    folders: Sequence[str | None] = store_folders or [None]
    states = [store_status(existing_store(folder)) for folder in folders]
    if json_output:
        texts = [json.dumps(state, sort_keys=True) for state in states]
        typer.echo("\n".join(texts))
    else:
        texts = [status_text(state) for state in states]
        typer.echo("\n\n".join(texts))


@store_app.command("ls")
def store_ls(
    store_folder: StoreOption = None,
    every: Annotated[bool, typer.Option("--all", help="Each finished stage, with who needs it.")] = False,
    json_output: JsonOutput = False,
) -> None:
    """List what a store holds, by kind, with sizes.

    Examples:

      sqltrain store ls

      sqltrain store ls --all --store /data/store
    """
    store = existing_store(store_folder)
    kinds = {}
    for kind, (count, n_bytes) in store_gc.usage_by_kind(store).items():
        kinds[kind] = {"stages": count, "bytes": n_bytes}
    stages: list[dict[str, Any]] = []
    if every:
        stages = stages_with_reasons(store)
    if json_output:
        values: dict[str, Any] = {"store": str(store.root), "kinds": kinds}
        if every:
            values["stages"] = stages
        emit(values)
        return
    typer.echo(store.root)
    for kind, use in kinds.items():
        size = human(use["bytes"])
        typer.echo(f"{size:>10}  {use['stages']:>5} finished  {kind}")
    total = sum(use["bytes"] for use in kinds.values())
    typer.echo(f"{human(total):>10}  in all")
    for stage in stages:
        size = human(stage["bytes"])
        line = f"{size:>10}  {stage['name']:<40} {stage['needed']}"
        typer.echo(line.rstrip())


def stages_with_reasons(store: Store) -> list[dict[str, Any]]:
    """Each finished stage with its bytes, and why it is kept."""
    reasons = store_gc.reasons_to_keep(store)
    stages = []
    for name in store.made():
        stage: dict[str, Any] = {"name": "/".join(name)}
        stage["bytes"] = store_gc.size_of(store.folder(*name))
        stage["needed"] = reasons.get(name, "")
        stages.append(stage)
    return stages


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
    if delete:
        decided = store_gc.collect_garbage(store, candidates)
        verb = "removed"
    else:
        decided = ((candidate, True) for candidate in candidates)
        verb = "would remove"
    count = 0
    n_bytes = 0
    for candidate, is_removed in decided:
        path = candidate.folder.relative_to(store.root)
        if not is_removed:
            typer.echo(f"left {path}: it is needed by now, or gone")
            continue
        count += 1
        n_bytes += candidate.n_bytes
        typer.echo(f"{verb} {path}  {human(candidate.n_bytes)}")
    line = f"{count} folders, {human(n_bytes)}"
    if candidates and not delete:
        line += "; with --delete they go"
    typer.echo(line)


@store_app.command("verify")
def verify(store_folder: StoreOption = None) -> None:
    """Read every finished stage and compare its bytes with its manifest; exit code 1 when something is damaged.

    Example: sqltrain store verify --store /data/store
    """
    store = existing_store(store_folder)
    count = 0
    n_damaged = 0
    for stage, key in store.made():
        count += 1
        damaged_files = store.damage(stage, key, whole=True)
        if not damaged_files:
            continue
        n_damaged += 1
        listed = ", ".join(damaged_files[:MAX_LISTED])
        n_more = len(damaged_files) - MAX_LISTED
        if n_more > 0:
            listed += f" and {n_more} more"
        folder = store.folder(stage, key)
        typer.echo(f"damaged: {folder}: {listed}")
    typer.echo(f"{count} stages, {n_damaged} damaged")
    if n_damaged:
        raise SqltrainError(f"{n_damaged} stages are damaged", "Remove their folders and run again.")


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
    store = existing_store(store_folder)
    stage, key = store_gc.pin(store, name, not off)
    fate = "no longer kept" if off else "kept"
    typer.echo(f"{fate}: {stage}/{key}")


@store_app.command("push")
def store_push(url: Url, names: Names = None, store_folder: StoreOption = None) -> None:
    """Copy finished stages, and without names the nights too, to object storage; what is there unchanged is left alone.

    Examples:

      sqltrain store push s3://bucket/sqltrain

      sqltrain store push file:///backup grpo report/da120b4f
    """
    push_stages(existing_store(store_folder), url, names or [], typer.echo)


@store_app.command("pull")
def store_pull(url: Url, names: Names = None, store_folder: StoreOption = None) -> None:
    """Fetch finished stages that are lacking or damaged, and without names the nights too, checked against manifests.

    Example: sqltrain store pull s3://bucket/sqltrain data synthesize filter
    """
    _, store = split_store(None, store_folder)
    pull_stages(store, url, names or [], typer.echo)


def existing_store(folder: str | None) -> Store:
    """The store that `--store` or the environment names; a UserError if there is none yet."""
    _, store = split_store(None, folder)
    if not store.root.is_dir():
        raise UserError(f"no store at {store.root}", "Pass --store DIR or set SQLTRAIN_STORE; a run makes one.")
    return store


def human(n_bytes: int) -> str:
    """A size for people, in powers of 1,024."""
    size = float(n_bytes)
    if size < 1024:
        return f"{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
