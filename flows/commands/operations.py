"""Commands of operation: nightly retraining, its champion, what runs, and the housekeeping of a store."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.options import AsJson, Overrides, RecipeName, Where, open_recipe, split, with_store
from pipelines.core.errors import SqltrainError, UserError

if TYPE_CHECKING:
    from pipelines.core.store import Store

Stores = Annotated[
    list[str] | None, typer.Option("--store", help="A store, or several of them; SQLTRAIN_STORE or ./store by default.")
]
Url = Annotated[str, typer.Argument(help="Where: s3://BUCKET/FOLDER, file:///FOLDER, whatever fsspec knows.")]
Names = Annotated[
    list[str] | None, typer.Argument(help="STAGE or STAGE/KEY (or its beginning); all of them when left out.")
]

champion_app = typer.Typer(help="The checkpoint that nightly retraining promoted.", no_args_is_help=True)
store_app = typer.Typer(help="What a store holds, and what of it may go.", no_args_is_help=True)


def nightly(
    recipe: RecipeName,
    overrides: Overrides = None,
    deployment: Annotated[
        str | None, typer.Option(help="Have it run as this deployment, such as retrain/nightly, and wait for its end.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run one night: take new questions, train a challenger, promote it only if it is better.

    With --deployment it waits through a restart of the Prefect server, and exits with 0 if the night completed.

    Examples:

      sqltrain nightly miniature nightly.inbox=~/questions

      sqltrain nightly sql_trail nightly.inbox=new.duckdb nightly.table=questions nightly.start=base

      sqltrain nightly miniature --deployment retrain/nightly

    """
    if deployment is not None:
        from prefect.exceptions import ObjectNotFound, PrefectHTTPStatusError
        from prefect.settings import PREFECT_API_URL

        from flows.prefect.remote import run_elsewhere
        from tasks.prefect_server import see_server

        if not PREFECT_API_URL.value():
            raise UserError("PREFECT_API_URL is not set", "Set it to the Prefect server that has the deployment.")
        see_server()
        stores = [word.removeprefix("store=") for word in overrides or [] if word.startswith("store=")]
        parameters: dict[str, Any] = {"store": stores[-1]} if stores else {}
        parameters["recipe"] = recipe
        parameters["overrides"] = [word for word in overrides or [] if not word.startswith("store=")]
        unknown = UserError(f"the server has no deployment {deployment!r}", "See: prefect deployment ls")
        if deployment.count("/") != 1:
            raise unknown
        try:
            state = run_elsewhere(deployment, parameters, lambda line: typer.echo(line, err=True))
        except ObjectNotFound:
            raise unknown from None
        except PrefectHTTPStatusError as error:
            raise UserError(f"the server refuses {deployment}: {error.response.text[:500]}") from None
        line = {"decision": str(state.name).lower(), "reason": state.message}
        typer.echo(json.dumps(line, sort_keys=True) if as_json else f"{line['decision']}: {line['reason']}")
        return
    from flows import run, terminal
    from flows.nights import night, title
    from flows.terminal import Bars
    from tasks import spans
    from tasks.models import announce, put_right
    from tasks.run import Tracker

    loaded, store = open_recipe(recipe, overrides or [])
    put_right(loaded.name, store, terminal.say)
    with Bars(terminal.console) as bars:
        with Tracker(loaded, store, bars.say, title(loaded, store)) as tracker, spans.run(tracker):
            line = night(
                recipe,
                split(overrides or [])[0],
                loaded,
                store,
                lambda part, at, steps, role: run.walk(part, at, steps, bars, lambda *_: None, tracker, role),
            )
            tracker.decided(line)
        announce(loaded.name, store, bars.say)
    if as_json:
        typer.echo(json.dumps(line, sort_keys=True))
    else:
        terminal.say(f"{line['decision']}: {line['reason']}")


@champion_app.command("show")
@with_store
def champion_show(recipe: RecipeName, overrides: Overrides = None, as_json: AsJson = False) -> None:
    """Print the champion, and those that a rollback goes back to; MLflow's alias is moved if a rollback could not.

    Example: sqltrain champion show miniature
    """
    from pipelines.nightly.ledger import Ledger
    from tasks.models import put_right

    loaded, store = open_recipe(recipe, overrides or [])
    put_right(loaded.name, store, lambda line: typer.echo(line, err=True))
    champions = [
        {
            "stage": champion.stage,
            "key": champion.key,
            "model": str(store.folder(champion.stage, champion.key) / "model"),
            "batches": len(champion.batches),
        }
        for champion in reversed(Ledger(store, loaded.name).champions())
    ]
    if as_json:
        typer.echo(json.dumps({"champions": champions}, sort_keys=True))
        return
    for place, champion in zip(["champion", *["before"] * len(champions)], champions, strict=False):
        typer.echo(f"{place:<9} {champion['model']}  ({champion['batches']} batches learned)")
    if not champions:
        typer.echo(f"{loaded.name} has no champion yet; run: sqltrain nightly {recipe}")


@champion_app.command("rollback")
@with_store
def champion_rollback(recipe: RecipeName, overrides: Overrides = None) -> None:
    """Make the previous champion the champion again; the one that leaves is not promoted again.

    A night may be running: it decides against the champion that stands when it ends, and does not promote what it
    trained from the one that left.

    Example: sqltrain champion rollback miniature
    """
    from pipelines.nightly.ledger import Ledger
    from tasks.models import announce

    loaded, store = open_recipe(recipe, overrides or [])
    former, came = Ledger(store, loaded.name).rollback()
    announce(loaded.name, store, typer.echo)
    typer.echo(f"champion: {store.folder(came.stage, came.key) / 'model'} (was {former.stage}/{former.key})")


def status(store: Stores = None, as_json: AsJson = False) -> None:
    """Show what runs, what the last night decided, and held-out accuracy over the nights.

    Examples:

      sqltrain status

      sqltrain status --store /data/sales --store /data/farms --json
    """
    from flows import status as statuses

    states = [statuses.gather(_store(root)) for root in store] if store else [statuses.gather(_store(None))]
    texts = [json.dumps(state, sort_keys=True) if as_json else statuses.render(state) for state in states]
    typer.echo(("\n" if as_json else "\n\n").join(texts))


@store_app.command("ls")
def store_ls(
    store: Where = None,
    every: Annotated[bool, typer.Option("--all", help="Each finished stage, with who needs it.")] = False,
    as_json: AsJson = False,
) -> None:
    """List what a store holds, by kind, with sizes.

    Examples:

      sqltrain store ls

      sqltrain store ls --all --store /data/store
    """
    from flows import storing

    listing = storing.listing(_store(store), every)
    typer.echo(json.dumps(listing, sort_keys=True) if as_json else storing.table(listing))


@store_app.command("gc")
def store_gc(
    store: Where = None,
    days: Annotated[float, typer.Option(min=0, max=36_500, help="Keep what is younger than this.")] = 7.0,
    delete: Annotated[bool, typer.Option("--delete", help="Remove it; without this, only say what would go.")] = False,
) -> None:
    """Remove what nobody needs: no run at work, no champion or its predecessor, no pin, no recipe's newest report.

    Examples:

      sqltrain store gc

      sqltrain store gc --days 30 --delete
    """
    from flows import storing

    for line in storing.collect(_store(store), days, delete):
        typer.echo(line)


@store_app.command("verify")
def store_verify(store: Where = None) -> None:
    """Read every finished stage and compare its bytes with its manifest; exit code 1 when something is damaged.

    Example: sqltrain store verify --store /data/store
    """
    from flows import storing

    bad = storing.damaged(_store(store), typer.echo)
    if bad:
        raise SqltrainError(f"{bad} stages are damaged", "Remove their folders and run again.")


@store_app.command("pin")
def store_pin(
    name: Annotated[str, typer.Argument(help="STAGE/KEY, or the beginning of the key.")],
    store: Where = None,
    off: Annotated[bool, typer.Option("--off", help="Keep it no longer.")] = False,
) -> None:
    """Keep a stage, with all that it was made of, whatever gc thinks of it.

    Examples:

      sqltrain store pin report/da120b4f

      sqltrain store pin report/da120b4f --off
    """
    from pipelines.nightly.store_gc import pin

    stage, key = pin(_store(store), name, not off)
    typer.echo(f"{'no longer kept' if off else 'kept'}: {stage}/{key}")


@store_app.command("push")
def store_push(url: Url, names: Names = None, store: Where = None) -> None:
    """Copy finished stages, and without names the nights too, to object storage; what is there unchanged is left alone.

    Examples:

      sqltrain store push s3://bucket/sqltrain

      sqltrain store push file:///backup grpo report/da120b4f
    """
    from flows import storing

    storing.push(_store(store), url, names or [], typer.echo)


@store_app.command("pull")
def store_pull(url: Url, names: Names = None, store: Where = None) -> None:
    """Fetch finished stages that are lacking or damaged, and without names the nights too, checked against manifests.

    Example: sqltrain store pull s3://bucket/sqltrain data synthesize filter
    """
    from flows import storing

    storing.pull(_store(store, there=False), url, names or [], typer.echo)


def _store(root: str | None, there: bool = True) -> Store:
    """The store that an option or the environment names.

    Args:
        there: whether it must be there already.
    """
    store = split([] if root is None else [f"store={root}"])[1]
    if there and not store.root.is_dir():
        raise UserError(f"no store at {store.root}", "Pass --store DIR or set SQLTRAIN_STORE; a run makes one.")
    return store


def register(app: typer.Typer) -> None:
    """Put these commands under the main one."""
    commands: list[Any] = [with_store(nightly), status]
    for command in commands:
        app.command()(command)
    app.add_typer(champion_app, name="champion")
    app.add_typer(store_app, name="store")
