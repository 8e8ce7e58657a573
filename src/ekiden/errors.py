"""Every error a user can see.

Three kinds of trouble, told apart by type: a `Refusal` is the asker's doing or a bound that was
reached, and nothing changed; a `Fault` is the world's doing, expected and retried within bounds; a
bug is ours: an `assert` that ends the process, so that a restart replays the journal.

Each has a stable `code` for programs, a sentence for people and, where there is one, a `remedy`.
Codes travel on the wire; `refusal_of` turns one back into the exception it was.
"""

from __future__ import annotations

from typing import ClassVar


class EkidenError(Exception):
    """Base of all errors ekiden raises on purpose."""

    code: ClassVar[str] = "error"

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}; {self.remedy}" if self.remedy else self.message


class Refusal(EkidenError):
    """The request was not taken. Nothing changed; `retry_after_s` says if later may be better."""

    code = "refused"

    def __init__(self, message: str, *, remedy: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(message, remedy=remedy)
        self.retry_after_s = retry_after_s


class Fault(EkidenError):
    """The world failed us: a disk, a network, a process. Trying again may help."""

    code = "fault"


# ------------------------------------------------------------------ refusals


class BadRequest(Refusal):
    """A message whose content cannot be meant: wrong shape, unknown verb, bad combination."""

    code = "bad_request"


class BadSubject(Refusal):
    """A subject or pattern that breaks the grammar of docs/PROTOCOL.md."""

    code = "bad_subject"


class BadId(Refusal):
    """A job, client or worker id outside its grammar."""

    code = "bad_id"


class BadName(Refusal):
    """A file name that is not a plain relative one on every system."""

    code = "bad_name"


class BadFrame(Refusal):
    """Bytes that are no frame of ours. The connection that sent them is closed."""

    code = "bad_frame"


class TooLarge(Refusal):
    """A payload, result or frame over its limit."""

    code = "too_large"


class Conflict(Refusal):
    """The job id is taken by a job with other content."""

    code = "conflict"


class QueueFull(Refusal):
    """Too many jobs or bytes wait. Nothing was stored; submitting again later is safe."""

    code = "queue_full"


class DiskFull(Refusal):
    """The broker's disk has no room for new jobs. Running work still settles."""

    code = "disk_full"


class UnknownJob(Refusal):
    """No job of that id is known, or it was forgotten after its retention."""

    code = "unknown_job"


class UnknownWorker(Refusal):
    """No worker of that id is connected."""

    code = "unknown_worker"


class UnknownCache(Refusal):
    """No cache of that id is known, or it is none with that file or that content."""

    code = "unknown_cache"


class CacheInUse(Refusal):
    """Jobs that have not ended use the cache. Nothing was removed."""

    code = "cache_in_use"


class StoreFull(Refusal):
    """The broker's store is at its quota, and all it holds is in use."""

    code = "store_full"


class UnknownBlob(Refusal):
    """The broker's store has no bytes of that hash, or has them no longer."""

    code = "unknown_blob"


class NotAllowed(Refusal):
    """The identity may not do this."""

    code = "not_allowed"


class Unauthenticated(Refusal):
    """No key, or a wrong one."""

    code = "unauthenticated"


class VersionMismatch(Refusal):
    """The peer speaks a protocol, or the folder holds a format, that this release cannot read."""

    code = "version"


class PythonMismatch(Refusal):
    """Functions of this Python cannot run on any worker there is: pickles of code fit one minor
    version only."""

    code = "python_mismatch"


class NotLeader(Refusal):
    """This broker does not lead its group; `leader` says who does, if anyone is known to."""

    code = "not_leader"

    def __init__(self, message: str, *, leader: str = "", remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.leader = leader


class Draining(Refusal):
    """The broker is shutting down and takes no new work."""

    code = "draining"


class FolderInUse(Refusal):
    """Another process holds the data folder."""

    code = "folder_in_use"


class CannotListen(Refusal):
    """The address to listen on cannot be had: taken, or not of this machine."""

    code = "cannot_listen"


class WrongUsage(Refusal):
    """The call or command line does not make sense as given."""

    code = "usage"


# ------------------------------------------------------------------ faults


class Unreachable(Fault):
    """No broker answered at any of the addresses."""

    code = "unreachable"


class ConnectionLost(Fault):
    """The conversation ended before an answer came."""

    code = "connection_lost"


class Closed(Fault):
    """The client was closed while this was open."""

    code = "closed"


class StorageFault(Fault):
    """The disk failed a write or a sync. The broker stops at once: nothing unsynced is believed."""

    code = "storage"


class NoSpace(StorageFault):
    """The disk is full. What was being written was taken back, so waiting and retrying is safe."""

    code = "no_space"


class CorruptJournal(Fault):
    """Damage inside the journal or a snapshot, not at its tail. Nothing was deleted."""

    code = "corrupt"

    def __init__(self, message: str, *, file: str = "", offset: int = 0, remedy: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.file = file
        self.offset = offset


class BlobDamaged(Fault):
    """Bytes that do not match the hash they go by. None of them were kept."""

    code = "blob_damaged"


class CacheIncomplete(Fault):
    """The cache is in the store, but fewer workers have it than were asked for. Putting it again is
    safe and brings it to those that lack it."""

    code = "cache_incomplete"
    report: object = None
    """At the client: how far it came, an `ekiden.CacheReport`."""


class ResultGone(Fault):
    """The job is done, but its result bytes are past their retention."""

    code = "result_gone"


# ------------------------------------------------------------------ outcomes of a job


class JobFailed(EkidenError):
    """The job used up its attempts. `causes` holds one line for every attempt, `reason` why there
    is no other: the cause of the last one, or `poison` for a job that took its workers with it."""

    code = "job_failed"
    detail: bytes = b""
    """What the last attempt left for the client alone: of a function, its pickled exception."""

    def __init__(self, job_id: str, causes: list[dict[str, object]], reason: str = "") -> None:
        self.job_id = job_id
        self.causes = causes
        last = causes[-1] if causes else {}
        self.reason = reason or str(last.get("cause", "unknown"))
        why = f"{self.reason}: {last.get('message', '')}".rstrip(": ")
        super().__init__(
            f"job {job_id!r} failed after {len(causes)} attempt{'s' * (len(causes) != 1)} ({why})",
            remedy=f"inspect it with: ekiden jobs show {job_id}",
        )


class JobCancelled(EkidenError):
    """The job was cancelled or expired before it finished."""

    code = "job_cancelled"

    def __init__(self, job_id: str, reason: str = "cancelled") -> None:
        self.job_id = job_id
        self.reason = reason
        super().__init__(f"job {job_id!r} was {reason}")


def _family(root: type[EkidenError]) -> list[type[EkidenError]]:
    found = [root]
    for child in root.__subclasses__():
        found += _family(child)
    return found


_BY_CODE: dict[str, type[EkidenError]] = {
    kind.code: kind for kind in [*_family(Refusal), *_family(Fault)]
}


def error_of(code: str, message: str, remedy: str = "", retry_after_s: float = 0.0) -> EkidenError:
    """The exception a peer meant by `code`. An unknown code is still a refusal, never a crash."""
    kind = _BY_CODE.get(code, Refusal)
    error = kind(message, remedy=remedy)
    if isinstance(error, Refusal):
        error.retry_after_s = retry_after_s
    return error
