"""Looking at jobs and cancelling them; what dead letters share with them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ekiden.cli import options, output
from ekiden.errors import WrongUsage

if TYPE_CHECKING:
    from ekiden.client.blocking import Client

app = typer.Typer(
    help="Jobs: list, show, cancel.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

PAGE: Final = 1000
# Of ids of the longest kind, as many as fit one frame.
IDS_PER_CHANGE: Final = 5000

COLUMNS: Final = ("id", "state", "name", "#attempt", "worker", "client", "submitted")


@app.command("list", epilog=output.EXIT_CODES)
def list_command(
    state: Annotated[
        str,
        typer.Option("--state", metavar="STATE", help="queued, running, done, failed, …"),
    ] = "",
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    limit: options.Limit = 100,
    everything: Annotated[bool, typer.Option("--all", help="Show all that fit.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List jobs, finished ones included while they are kept.

    What runs comes first, then what waits, then what ended, latest first.

    \b
    examples:
      $ ekiden jobs list --state queued --subject 'job.assign.render.>'
      $ ekiden jobs list --run night-0517 --all --json
    """
    wishes = options.filter_of(state=state, subject=subject, client=client_id, run=run)
    list_jobs(
        wishes,
        connect=connect,
        key_file=key_file,
        limit=0 if everything else limit,
        as_json=as_json,
        empty="no such jobs" if wishes else "no jobs; send one: ekiden submit echo --payload hi",
    )


def list_jobs(
    wishes: dict[str, str],
    *,
    connect: str,
    key_file: Any,
    limit: int,
    as_json: bool,
    empty: str,
    columns: Sequence[str] = COLUMNS,
    line: Callable[[dict[str, Any]], tuple[Any, ...]] | None = None,
) -> None:
    """Print the jobs that fit, at most `limit` (0: all), as a table or as JSON Lines."""
    with options.connected(connect, key_file) as client:
        found = found_jobs(client, wishes, limit=limit)
        if as_json:
            for job in found:
                output.emit(job)
            return
        rows = list(found)
    output.print_table(columns, map(line or _line, rows), empty=empty)
    if limit and len(rows) == limit:
        output.say(f"these are {output.count(limit, 'job')}; there may be more: --limit N or --all")


def _line(job: dict[str, Any]) -> tuple[Any, ...]:
    state = job["state"]
    if job.get("last_cause") and state != "done":
        state += f" ({job['last_cause']})"
    names = ("name", "attempt", "worker", "client")
    return (job["id"], state, *(job.get(name) for name in names), output.clock(job["submitted"]))


def found_jobs(client: Client, wishes: dict[str, str], *, limit: int) -> Iterator[dict[str, Any]]:
    """Jobs that fit, up to `limit` of them (0: all).

    One look of the broker is bounded. If it has not seen all that there is, its book is gone
    through from cover to cover, in the order of the book instead of the most interesting first.
    """
    if 0 < limit <= PAGE:
        answer = client.ask("jobs", **wishes, limit=limit)
        if not answer.get("partial") or len(answer["jobs"]) == limit:
            yield from answer["jobs"]
            return
    left, cursor = limit, ""
    seen: set[str] = set()
    while True:
        size = min(PAGE, left) if limit else PAGE
        answer = client.ask("jobs", **wishes, limit=size, cursor=cursor)
        for job in answer["jobs"]:
            if job["id"] not in seen:
                seen.add(job["id"])
                left -= 1
                yield job
        cursor = answer["cursor"]
        if not cursor or (limit and left <= 0):
            return


@app.command("show", epilog=output.EXIT_CODES)
def show_command(
    job_id: Annotated[str, typer.Argument(metavar="ID")],
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show one job: where it is, why, and how its attempts ended.

    \b
    example:
      $ ekiden jobs show night-0517-42
    """
    show_job(job_id, connect=connect, key_file=key_file, as_json=as_json)


def show_job(job_id: str, *, connect: str, key_file: Any, as_json: bool) -> None:
    """Print all that is known of one job."""
    job = options.ask(connect, key_file, "job", id=job_id)
    del job["shared"], job["form"]  # for clients that take up a run, not for people
    if as_json:
        output.emit(job)
        return
    output.print_facts(_facts(job))
    for cause in job["causes"]:
        burned = "" if cause["burned"] else ", which does not count"
        when = output.clock(cause["time"], exact=True)
        what = f"{cause['cause']} on {cause['worker']}, {when}"
        print(f"\nattempt {cause['attempt']}{burned}: {what}")
        output.print_lines(cause["message"], indent="  ")
        if usage := _usage(cause):
            print(f"  ({usage})")
    if job["state"] == "failed":
        output.say(f"\ntry it again with: ekiden dlq replay {job['id']}")
    elif job["state"] == "done":
        output.say(f"\nits output: ekiden wait {job['id']}")


def _usage(run: dict[str, Any]) -> str:
    """What a run took, as far as it was measured."""
    if not run.get("ran_s"):
        return ""
    parts = [f"ran {output.span(run['ran_s'])}"]
    if run["cpu_s"]:
        parts.append(f"CPU {output.span(run['cpu_s'])}")
    if run["peak_mb"]:
        parts.append(f"memory {run['peak_mb']:.0f} MB")
    return ", ".join(parts)


def _progress(body: bytes | None) -> str | None:
    return None if body is None else body.decode("utf-8", "replace")


def _facts(job: dict[str, Any]) -> list[tuple[str, Any]]:
    """What is worth a line: what is as usual is left out."""
    bytes_in, bytes_out = job.get("input_bytes"), job.get("output_bytes")
    ended = job["state"] in ("done", "failed", "cancelled")
    reason = f": {job['reason']}" if ended and job.get("reason") not in ("", job["state"]) else ""
    return [
        ("id", job["id"]),
        ("state", job["state"] + reason),
        ("why", None if ended else job["why"]),
        ("name", job["name"]),
        ("subject", job["subject"]),
        ("client", job["client"]),
        ("run", job["run"]),
        ("priority", job["priority"] or None),
        ("attempt", job["attempt"] or None),
        ("replayed", f"{job['generation']} times" if job["generation"] else None),
        ("worker", job["worker"]),
        ("progress", _progress(job["progress"])),
        ("exit code", job["exit_code"] or None),
        ("usage", _usage(job) or None),
        ("input", None if bytes_in is None else output.size(bytes_in)),
        ("output", None if bytes_out is None else output.size(bytes_out)),
        ("submitted", output.clock(job["submitted"], exact=True)),
        ("leased", output.clock(job["leased"], exact=True)),
        ("finished", output.clock(job["finished"], exact=True)),
    ]


@app.command("cancel", epilog=output.EXIT_CODES)
def cancel_command(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID")] = None,
    state: Annotated[
        str, typer.Option("--state", metavar="STATE", help="queued, delayed, leased, …")
    ] = "",
    subject: options.Subject = "",
    client_id: options.ClientId = "",
    run: options.Run = "",
    everything: Annotated[bool, typer.Option("--all", help="Every unfinished job.")] = False,
    yes: options.Yes = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Cancel jobs by id, by filter, or all.

    What runs is stopped; what is finished stays as it is.

    \b
    examples:
      $ ekiden jobs cancel night-0517-42
      $ ekiden jobs cancel --run night-0517
      $ ekiden jobs cancel --all --yes
    """
    wishes = options.filter_of(state=state, subject=subject, client=client_id, run=run)
    check_chosen(ids, wishes, everything, "cancel")
    if everything and not yes:
        options.confirm("Cancel every unfinished job of the group?")
    with options.connected(connect, key_file) as client:
        answer = change(client, "cancel", ids, {**wishes, "live": True})
    return report_change(
        answer, ("cancelled", "cancelling", "settled"), as_json=as_json, asked=ids or []
    )


# ------------------------------------------------------------------ changes of many jobs


def check_chosen(
    ids: list[str] | None, wishes: dict[str, str], everything: bool, what: str
) -> None:
    """A change must say which jobs: by id, by filter, or all on purpose."""
    ways = sum([bool(ids), bool(wishes), everything])
    if ways > 1:
        raise WrongUsage(
            f"{what} takes ids, or a filter, or --all", remedy="give only one of the three"
        )
    if not ways:
        raise WrongUsage(f"{what} what?", remedy="give ids, a filter such as --run, or --all")


def change(
    client: Client, verb: str, ids: list[str] | None, wishes: dict[str, Any]
) -> dict[str, Any]:
    """Change all jobs of these ids, or all that fit; what became of them in all.

    One look and one change of the broker are bounded, so a filter is turned into ids, page by page.
    """
    if ids:
        return _change_ids(client, verb, list(dict.fromkeys(ids)))
    total: dict[str, Any] = {}
    done: set[str] = set()
    cursor = ""
    while True:
        page = client.ask("jobs", **wishes, brief=True, limit=IDS_PER_CHANGE, cursor=cursor)
        fresh = [job["id"] for job in page["jobs"] if job["id"] not in done]
        done.update(fresh)
        _add(total, _change_ids(client, verb, fresh))
        cursor = page["cursor"]
        if not cursor:
            # Nobody has named these: one that is gone by now is no mistake of the asker.
            return {**total, "unknown": []}


def _change_ids(client: Client, verb: str, ids: list[str]) -> dict[str, Any]:
    total: dict[str, Any] = {}
    for start in range(0, max(len(ids), 1), IDS_PER_CHANGE):
        _add(total, client.ask(verb, ids=ids[start : start + IDS_PER_CHANGE]))
    return total


def _add(total: dict[str, Any], answer: dict[str, Any]) -> None:
    for word, value in answer.items():
        total[word] = total[word] + value if word in total else value


def report_change(
    answer: dict[str, Any], words: tuple[str, ...], *, as_json: bool, asked: list[str]
) -> int:
    """Print how many jobs became what. Refused if none of the ids asked for is known."""
    unknown = answer.get("unknown") or []
    if as_json:
        output.emit(answer)
    else:
        print(" · ".join(f"{answer.get(word, 0):,} {word}" for word in words))
        if unknown:
            shown = ", ".join(output.plain(one) for one in unknown[:5])
            more = f" and {len(unknown) - 5:,} more" if len(unknown) > 5 else ""
            output.say(f"unknown: {shown}{more}; list with: ekiden jobs list --all")
    return output.REFUSED if asked and len(unknown) == len(set(asked)) else output.DONE
