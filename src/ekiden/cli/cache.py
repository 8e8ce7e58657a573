"""Caches: sets of files that are brought to the workers once and used by many jobs."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from time import monotonic, sleep
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from ekiden.cli import options, output
from ekiden.cli.runs import age
from ekiden.errors import CacheIncomplete, WrongUsage

if TYPE_CHECKING:
    from ekiden.client.caches import CacheProgress, CacheReport

app = typer.Typer(
    help="Caches: put, list, show, verify, rm.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)

COLUMNS: Final = ("id", "#files", "#size", "put", "client", "workers", "#jobs", "targets")
WORKER_COLUMNS: Final = ("worker", "status", "#there", "#of", "message")

FAILURES_SHOWN: Final = 20
TARGET: Final = "job.>"

LOOK_S: Final = 0.5

_BAR: Final = 24
_WORDS: Final = {"reading": "reading", "sending": "sending", "reaching": "at the workers"}

CacheId = Annotated[str, typer.Argument(metavar="ID")]


@app.command("put", epilog=output.EXIT_CODES)
def put_command(
    cache_id: Annotated[str, typer.Argument(metavar="ID", help="What jobs call it by.")],
    paths: Annotated[
        list[str],
        typer.Argument(metavar="PATH", help="A folder, whose files it is; or files and folders."),
    ],
    target: Annotated[
        str,
        typer.Option("--target", metavar="PATTERN", help="Workers that listen to such subjects."),
    ] = TARGET,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="How long workers may take."),
    ] = 600.0,
    success_ratio: Annotated[
        float,
        typer.Option(
            "--success-ratio", min=0, max=1, metavar="R", help="Done if so many of them have it."
        ),
    ] = 1.0,
    no_wait: Annotated[
        bool, typer.Option("--no-wait", help="Leave when the broker has it; workers go on.")
    ] = False,
    reread: Annotated[
        bool,
        typer.Option("--reread", help="Read all files, also those unchanged by inode and times."),
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="No progress; failures are told.")
    ] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Bring files to the workers, once, for jobs to use by ID.

    One folder stands for the files in it; of several PATHs each goes by its own name. What the
    broker has from earlier caches is not sent again. An ID stands for one content for ever: put
    changed files under another one. The same once more is safe, and brings it to workers that lack
    it. Workers that join later get it by themselves.

    Ends with 1 if fewer workers have it in time than asked for.

    \b
    examples:
      # All files of a folder; jobs find them in $EKIDEN_CACHE/curves-0517/.
      $ ekiden cache put curves-0517 ./curves
      $ ekiden run --cache curves-0517 sh -c 'wc -l $EKIDEN_CACHE/curves-0517/{}' ::: eur usd
      # Single files, for the workers that price only, and nine of ten will do.
      $ ekiden cache put model-7 model.bin params.json --target job.assign.price
      $ ekiden cache put model-7 model.bin params.json --success-ratio 0.9 --timeout 60
    """
    from ekiden.world.threads import stand_back

    stand_back()  # and every thread that is made from here on
    bar = _Bar(wanted=not (as_json or quiet))
    with options.connected(connect, key_file) as client:
        try:
            report = client.put_cache(
                cache_id,
                paths[0] if len(paths) == 1 else _named(paths),
                target,
                timeout_s=timeout,
                success_ratio=success_ratio,
                reread=reread,
                progress=bar.draw,
                wait=not no_wait,
            )
        except CacheIncomplete as error:
            bar.wipe()
            return _tell_incomplete(error, as_json=as_json)
        except KeyboardInterrupt:
            bar.wipe()
            output.say("not waiting any more; the same command goes on where this one ended")
            raise
        finally:
            bar.wipe()
    if as_json:
        output.emit(_document(report))
        return output.DONE
    print(_sentence(report, waited=not no_wait))
    _tell_workers(report)
    if report.remark:
        output.say(report.remark)
    return output.DONE


def _named(paths: Iterable[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for path in paths:
        name = os.path.basename(os.path.abspath(path))
        if name in found:
            raise WrongUsage(
                f"{found[name]!r} and {path!r} would both be called {name!r}",
                remedy="rename one, or put a folder that has both",
            )
        found[name] = path
    return found


def _sentence(report: CacheReport, *, waited: bool) -> str:
    sent = f"{output.size(report.sent_bytes)} sent" if report.sent_bytes else "nothing sent"
    where = f"at {report.reached:,} of {output.count(report.of, 'worker')}"
    if not waited:
        where = f"on its way to {output.count(report.of, 'worker')}"
    return (
        f"{report.cache_id}: {output.count(report.files, 'file')}, {output.size(report.bytes)} "
        f"({sent}), {where} in {output.span(report.seconds)}"
    )


def _tell_workers(report: CacheReport) -> None:
    for worker in report.failed[:FAILURES_SHOWN]:
        output.say(f"  {output.plain(worker.id)}: {worker.status}: {output.plain(worker.text)}")
    if (more := len(report.failed) - FAILURES_SHOWN) > 0:
        output.say(f"  and {more:,} more; all of them: ekiden cache show {report.cache_id}")


def _tell_incomplete(error: CacheIncomplete, *, as_json: bool) -> int:
    report: Any = error.report
    if as_json:
        output.emit({**_document(report), **output.error_document(error)})
        return output.JOB_FAILED
    print(_sentence(report, waited=True))
    _tell_workers(report)
    waiting = report.of - report.reached - len(report.failed)
    if waiting:
        output.say(f"  {output.count(waiting, 'worker')} not there yet, which go on by themselves")
    output.say(
        f"the same command once more brings it to those that lack it; "
        f"see: ekiden cache show {report.cache_id}"
    )
    return output.JOB_FAILED


def _document(report: CacheReport) -> dict[str, Any]:
    return {
        "id": report.cache_id,
        "manifest": report.manifest,
        "state": report.state,
        "files": report.files,
        "bytes": report.bytes,
        "sent_bytes": report.sent_bytes,
        "reached": report.reached,
        "of": report.of,
        "ratio": round(report.ratio, 4),
        "seconds": round(report.seconds, 3),
        "workers": [
            {
                "id": worker.id,
                "status": worker.status,
                "text": worker.text,
                "done": worker.done,
                "total": worker.total,
            }
            for worker in report.workers
        ],
    }


class _Bar:
    """The moving line of a put, where a person looks. Drawn by the client's thread."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted and sys.stderr.isatty()
        self._drawn = False

    def draw(self, progress: CacheProgress) -> None:
        """Show how far it is."""
        if self._wanted:
            width = shutil.get_terminal_size().columns
            sys.stderr.write(f"\r{line(progress)[: width - 1]}\x1b[K")
            sys.stderr.flush()
            self._drawn = True

    def wipe(self) -> None:
        """Leave the line to somebody else."""
        if self._drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._drawn = False


def line(progress: CacheProgress) -> str:
    """The moving line."""
    share = progress.done / progress.total if progress.total else 0.0
    full = int(min(share, 1.0) * _BAR)
    told = f"{output.size(progress.done)} of {output.size(progress.total)}"
    if progress.phase == "reaching":
        told = f"{progress.reached:,} of {output.count(progress.of, 'worker')} · {told}"
    bar = f"{'━' * full}{'╌' * (_BAR - full)}"
    return f"{bar} {min(share, 1.0):4.0%}  {_WORDS[progress.phase]} · {told}"


# ------------------------------------------------------------------ looking at caches


def _missing(cache: dict[str, Any]) -> str:
    """Whether the broker's own store has all of it."""
    blobs = cache.get("missing", 0)
    return f"{output.count(blobs, 'blob')} of the broker's store: put it again" if blobs else ""


@app.command("list", epilog=output.EXIT_CODES)
def list_command(
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """List caches, the newest first.

    \b
    examples:
      $ ekiden cache list
      $ ekiden cache list --json | jq -r 'select(.ok < .of) | .id'
    """
    with options.connected(connect, key_file) as client:
        caches = client.caches()
    if as_json:
        for cache in caches:
            output.emit(cache)
        return
    rows = [
        (
            cache["id"],
            cache["files"],
            output.size(cache["bytes"]),
            age(cache["put"]),
            cache["client"],
            f"{cache['ok']:,} of {cache['of']:,}",
            cache["jobs"],
            cache["targets"],
        )
        for cache in caches
    ]
    output.print_table(COLUMNS, rows, empty="no caches; put one: ekiden cache put ID FOLDER")


@app.command("show", epilog=output.EXIT_CODES)
def show_command(
    cache_id: CacheId,
    files: Annotated[bool, typer.Option("--files", help="List its files, too.")] = False,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> None:
    """Show a cache, and how it stands with it at every worker.

    \b
    examples:
      $ ekiden cache show curves-0517
      $ ekiden cache show curves-0517 --files --json | jq -r '.content[].name'
    """
    with options.connected(connect, key_file) as client:
        cache = client.cache(cache_id)
        content = client.cache_files(cache_id) if files else []
    if as_json:
        if files:
            cache["content"] = [
                {
                    "name": file.name,
                    "size": file.size,
                    "sha256": file.blob,
                    "executable": file.executable,
                }
                for file in content
            ]
        output.emit(cache)
        return
    output.print_facts(
        [
            ("cache", cache["id"]),
            ("content", cache["manifest"]),
            ("files", f"{cache['files']:,}"),
            ("size", output.size(cache["bytes"])),
            ("client", cache["client"]),
            ("put", f"{output.clock(cache['put'])} ({age(cache['put'])})"),
            ("targets", cache["targets"]),
            ("jobs", f"{cache['jobs']:,} that have not ended use it"),
            ("missing", _missing(cache)),
        ]
    )
    print()
    output.print_table(
        WORKER_COLUMNS,
        (
            (
                worker["id"],
                worker["status"],
                output.size(worker["done"]),
                output.size(worker["total"]),
                worker["text"],
            )
            for worker in cache["workers"]
        ),
        empty="no worker it is meant for is connected",
    )
    if files:
        print()
        for file in content:
            print(f"{file.size:>15,}  {file.blob[:12]}  {output.plain(file.name, limit=2048)}")


# ------------------------------------------------------------------ looking after caches


@app.command("verify", epilog=output.EXIT_CODES)
def verify_command(
    cache_id: CacheId,
    timeout: Annotated[
        float,
        typer.Option("--timeout", min=0, metavar="SECONDS", help="Stop waiting; workers go on."),
    ] = 600.0,
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Have every worker read its copy again and mend what is damaged.

    The workers do it beside their jobs. Ends with 1 if one could not mend its copy, or has not said
    so in time.

    \b
    example:
      $ ekiden cache verify curves-0517
    """
    from ekiden.client.caches import workers_of

    with options.connected(connect, key_file) as client:
        client.verify_cache(cache_id)
        deadline = monotonic() + timeout
        while True:
            cache = client.cache(cache_id)
            workers = workers_of(cache)
            left_s = deadline - monotonic()
            if left_s <= 0 or all(worker.settled for worker in workers):
                break
            sleep(min(LOOK_S, left_s))
    counts = {
        "sound": sum(worker.status == "skipped" for worker in workers),
        "mended": sum(worker.status == "ok" for worker in workers),
        "failed": sum(worker.settled and not worker.has_it for worker in workers),
        "open": sum(not worker.settled for worker in workers),
    }
    if as_json:
        output.emit({"id": cache_id, **counts, "workers": cache["workers"]})
    else:
        print(" · ".join(f"{count:,} {word}" for word, count in counts.items()))
        for worker in workers:
            if not worker.has_it:
                output.say(
                    f"  {output.plain(worker.id)}: {worker.status} {output.plain(worker.text)}"
                )
    return output.JOB_FAILED if counts["failed"] or counts["open"] else output.DONE


@app.command("rm", epilog=output.EXIT_CODES)
def remove_command(
    cache_ids: Annotated[list[str], typer.Argument(metavar="ID")],
    connect: options.Connect = options.ADDRESS_DEFAULT,
    key_file: options.KeyFile = None,
    as_json: options.Json = False,
) -> int:
    """Forget caches; workers and the broker free their disks in time.

    One that jobs still use stays, and the command ends with 4.

    \b
    example:
      $ ekiden cache rm curves-0515 curves-0516
    """
    with options.connected(connect, key_file) as client:
        answer = client.remove_cache(*cache_ids)
    if as_json:
        output.emit(answer)
    else:
        words = ("removed", "in_use", "unknown")
        print(" · ".join(f"{len(answer[word]):,} {word.replace('_', ' ')}" for word in words))
        for cache_id in answer["in_use"]:
            shown = output.plain(cache_id)
            output.say(f"{shown} is used by jobs that have not ended: ekiden cache show {shown}")
        if answer["unknown"]:
            shown = ", ".join(map(output.plain, answer["unknown"]))
            output.say(f"unknown: {shown}; list with: ekiden cache list")
    return output.REFUSED if answer["in_use"] or answer["unknown"] else output.DONE
