"""Dead letters: jobs that used up their attempts, with the cause of every one."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer

from ekiden.cli import jobs, options, output

app = typer.Typer(
    help="Dead letters: list, inspect, replay, purge.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

FAILED: Final = "failed"
COLUMNS: Final = ("id", "name", "#attempts", "cause", "message", "worker", "failed")

Ids = Annotated[list[str] | None, typer.Argument(metavar="ID")]
Everything = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@app.command("list", epilog=output.EXIT_CODES)
def list_command(
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    limit: options.Limit = 100,
    everything: Everything = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List dead letters with the cause of their last attempt.

    \b
    examples:
      $ ekiden dlq list --run night-0517
      $ ekiden dlq list --all --json | jq -r .id
    """
    jobs.list_jobs(
        options.filter_of(state=FAILED, subject=subject, client=client_id, run=run),
        connect=connect,
        key_file=key_file,
        limit=0 if everything else limit,
        as_json=as_json,
        empty="no dead letters",
        columns=COLUMNS,
        line=_line,
    )


def _line(job: dict[str, Any]) -> tuple[Any, ...]:
    return (
        job["id"],
        job["name"],
        job["attempt"],
        job.get("last_cause") or job.get("reason"),
        output.first_line(job.get("last_message", "")),
        job["worker"],
        output.clock(job["finished"]),
    )


@app.command("show", epilog=output.EXIT_CODES)
def show_command(
    job_id: Annotated[str, typer.Argument(metavar="ID")],
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show why a job failed, attempt by attempt."""
    jobs.show_job(job_id, connect=connect, key_file=key_file, as_json=as_json)


@app.command("replay", epilog=output.EXIT_CODES)
def replay_command(
    ids: Ids = None,
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Everything = False,
    yes: options.Yes = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Let dead letters run again, under the same ids.

    They get fresh attempts; the causes of the earlier ones are kept.

    \b
    examples:
      $ ekiden dlq replay night-0517-42
      $ ekiden dlq replay --subject 'job.assign.price.>'
      $ ekiden dlq replay --all --yes
    """
    wishes = options.filter_of(subject=subject, client=client_id, run=run)
    jobs.check_chosen(ids, wishes, everything, "replay")
    if everything and not yes:
        options.confirm("Run every dead letter of the group again?")
    return _change("replay", "replayed", ids, wishes, connect, key_file, as_json)


@app.command("purge", epilog=output.EXIT_CODES)
def purge_command(
    ids: Ids = None,
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Everything = False,
    yes: options.Yes = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Forget dead letters for good; their ids are free again.

    \b
    examples:
      $ ekiden dlq purge night-0517-42
      $ ekiden dlq purge --run night-0517
      $ ekiden dlq purge --all --yes
    """
    wishes = options.filter_of(subject=subject, client=client_id, run=run)
    jobs.check_chosen(ids, wishes, everything, "purge")
    if everything and not yes:
        options.confirm("Forget every dead letter of the group? There is no way back.")
    return _change("purge", "purged", ids, wishes, connect, key_file, as_json)


def _change(
    verb: str,
    done: str,
    ids: list[str] | None,
    wishes: dict[str, str],
    connect: str,
    key_file: Any,
    as_json: bool,
) -> int:
    with options.connected(connect, key_file) as client:
        answer = jobs.change(client, verb, ids, {**wishes, "state": FAILED})
    return jobs.report_change(answer, (done, "skipped"), as_json=as_json, asked=ids or [])
