"""The list of a run's inputs, kept in the broker's store for as long as the run is of use.

Every job of a run names it, so whoever knows the name of a run finds its inputs, and the folder
that each one's outputs belong in, from any machine. It says nothing of where it was written or
when: the same command makes the same list, and a run that is started again is recognised by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec import Struct

from ekiden.cli import jobs
from ekiden.cli.inputs import Entry, Template, printable
from ekiden.errors import UnknownBlob, UnknownJob, WrongUsage
from ekiden.model.jobs import FORM_PROGRAM
from ekiden.model.work import Program

if TYPE_CHECKING:
    from ekiden.client.blocking import Client

FORMAT: Final = 1

_decode_program = msgspec.msgpack.Decoder(Program).decode


class Manifest(Struct, frozen=True):
    """A run: what is called, and with what."""

    format: int
    command: str
    args: tuple[str, ...]
    entries: list[Entry]
    numbers: list[int] = []
    """Those that were to be run; none: all. The others were done before."""

    @property
    def template(self) -> Template:
        """What fills the arguments."""
        sources = len(self.entries[0].inputs) if self.entries else 1
        return Template(self.args, sources)


def job_id(run: str, number: int) -> str:
    """The id of a run's job; numbers begin at 1."""
    return f"{run}.{number}"


def number_of(job: str) -> int:
    """The number in such an id."""
    return int(job.rpartition(".")[2])


def put(client: Client, manifest: Manifest) -> str:
    """Store it; what its jobs call it by."""
    stored = client.put_blob(msgspec.json.encode(_readable(manifest)))
    return f"{stored[0]}:{stored[1]}"


def is_same(manifest: Manifest, other: Manifest) -> bool:
    """Whether these are of one run, whatever of it was done before."""
    whole = msgspec.structs.replace(_readable(manifest), numbers=[])
    return whole == msgspec.structs.replace(_readable(other), numbers=[])


def _readable(manifest: Manifest) -> Manifest:
    """JSON holds text only: a name that is none is told as well as it can be."""
    entries = [
        entry
        if all(map(_is_text, entry.inputs))
        else Entry(entry.folder, tuple(map(printable, entry.inputs)), entry.names)
        for entry in manifest.entries
    ]
    args = tuple(map(printable, manifest.args))
    return msgspec.structs.replace(
        manifest, command=printable(manifest.command), args=args, entries=entries
    )


def _is_text(word: str) -> bool:
    # Only a byte that is no text is carried as half of a pair.
    return word.isascii() or word == printable(word)


def find(client: Client, run: str) -> str:
    """What the jobs of a run call their manifest by; "" if there is no such run. Raises
    `WrongUsage` if its jobs have none."""
    line = _some_job(client, run)
    if line is None:
        return ""
    found = ""
    if line["form"] == FORM_PROGRAM:
        try:
            found = _decode_program(line["shared"]).manifest
        except msgspec.DecodeError:
            pass
    if not found:
        raise WrongUsage(
            f"run {run!r} was not started with 'ekiden run'",
            remedy=f"see its jobs with: ekiden jobs list --run {run}",
        )
    return found


def _some_job(client: Client, run: str) -> dict[str, Any] | None:
    try:
        line = client.job(job_id(run, 1))
        if line["run"] == run:
            return line
    except UnknownJob:
        pass  # A resumed run may begin later.
    for found in jobs.found_jobs(client, {"run": run}, limit=1):
        return client.job(found["id"])
    return None


def fetch(client: Client, run: str) -> Manifest:
    """The manifest of a run. Raises `UnknownJob`, or `WrongUsage` if it has none."""
    reference = find(client, run)
    if not reference:
        raise UnknownJob(f"no run {run!r} is known", remedy="list with: ekiden runs list")
    return read(client, run, reference)


def read(client: Client, run: str, reference: str) -> Manifest:
    """What lies under such a reference."""
    blob, _, size = reference.partition(":")
    try:
        text = client.fetch_blob(blob, int(size or 0))
    except UnknownBlob as error:
        error.remedy = f"the list of its inputs is gone; ekiden jobs list --run {run} has its jobs"
        raise
    assert text is not None
    manifest = msgspec.json.decode(text, type=Manifest)
    if manifest.format != FORMAT:
        raise WrongUsage(
            f"run {run!r} was started by another release of ekiden",
            remedy="attach to it with the release that started it",
        )
    return manifest
