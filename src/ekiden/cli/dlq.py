"""Dead letters: jobs that used up their attempts, with the cause of every one."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ekiden.cli import jobs, options, output

app = typer.Typer(
    help="Dead letters: list, inspect, replay, purge.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

FAILED = "failed"

Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID…]")]
Everything = Annotated[bool, typer.Option("--all", help="Every dead letter.")]


@app.command("list")
def list_command(
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    limit: Annotated[int, typer.Option("--limit", min=1, help="Show at most this many.")] = 100,
    after: Annotated[str, typer.Option("--after", metavar="ID", help="Go on after it.")] = "",
    everything: Everything = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List dead letters."""
    jobs.list_jobs(
        options.filter_of(state=FAILED, subject=subject, client=client_id, run=run),
        connect=connect,
        key_file=key_file,
        limit=0 if everything else limit,
        after=after,
        as_json=as_json,
        empty="no dead letters",
    )


@app.command("show")
def show_command(
    job_id: Annotated[str, typer.Argument(metavar="ID")],
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show why a job failed, attempt by attempt."""
    jobs.show_job(job_id, connect=connect, key_file=key_file, as_json=as_json)


@app.command("replay")
def replay_command(
    ids: Ids = None,
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Everything = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Let dead letters run again, under the same ids, with fresh attempts.

    \b
    examples:
      $ ekiden dlq replay night-0517-42
      $ ekiden dlq replay --subject 'job.assign.price.>'
      $ ekiden dlq replay --all
    """
    wishes = options.filter_of(subject=subject, client=client_id, run=run)
    answer = _change("replay", ids, wishes, everything, connect, key_file)
    return jobs.report_change(answer, ("replayed", "skipped"), as_json=as_json, asked=ids or [])


@app.command("purge")
def purge_command(
    ids: Ids = None,
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Everything = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Forget dead letters before their retention ends. There is no way back."""
    wishes = options.filter_of(subject=subject, client=client_id, run=run)
    answer = _change("purge", ids, wishes, everything, connect, key_file)
    return jobs.report_change(answer, ("purged", "skipped"), as_json=as_json, asked=ids or [])


def _change(
    verb: str,
    ids: list[str] | None,
    wishes: dict[str, str],
    everything: bool,
    connect: str,
    key_file: Any,
) -> dict[str, Any]:
    params = options.chosen(ids, wishes, everything, f"{verb}")
    if "filter" in params:
        params["filter"] = {**params["filter"], "state": FAILED}
    answer: dict[str, Any] = options.ask(connect, key_file, verb, **params)
    return answer
