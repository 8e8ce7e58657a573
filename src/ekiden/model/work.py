"""What programs and functions are called with and bring back.

All of it travels as msgpack inside a spec's `shared`, a job's body or its output, and is opaque to
the broker. Fields may be added at the end with a default, as on the wire.
"""

from __future__ import annotations

from msgspec import Struct


class FileRef(Struct, array_like=True, frozen=True):
    """A file of a job: its bytes here, or under their hash in the broker's store."""

    name: str
    size: int
    data: bytes | None = None
    """None: the bytes lie in the store under `blob`."""
    blob: str = ""
    """SHA-256 of the bytes, in hex."""
    executable: bool = False
    cache: str = ""
    """The cache it is a file of, if it is one: then nothing is fetched for it, and it is linked."""
    path: str = ""
    """Its name in that cache."""


class Program(Struct, array_like=True, frozen=True):
    """What the jobs of a spec run, and how. `Spec.shared` of FORM_PROGRAM."""

    command: str
    """A name on the worker's allow-list; with `any`, what a shell would look up there."""
    any: bool = False
    """Only a worker that allows any program runs it: a command, or a file shipped with the job."""
    env: tuple[tuple[str, str], ...] = ()
    outputs: tuple[str, ...] | None = None
    """Names or globs of files to bring back; None: everything new in the folder."""
    files: tuple[FileRef, ...] = ()
    """Input files that all these jobs have."""
    ok_codes: tuple[int, ...] = (0,)
    """Exit codes that count as success."""
    manifest: str = ""
    """Of a run: the list of its inputs in the store, as "<hash>:<size>". The worker does not look
    at it."""


class ProgramCall(Struct, array_like=True, frozen=True):
    """One job of a program. Its body under FORM_PROGRAM."""

    args: list[str] = []
    stdin: FileRef | None = None
    files: list[FileRef] = []


class ProgramOutput(Struct, array_like=True, frozen=True):
    """What a program brought back. Its output under OUT_PROGRAM."""

    stdout: FileRef
    stderr: FileRef
    files: list[FileRef] = []


class Function(Struct, array_like=True, frozen=True):
    """A Python function by content. `Spec.shared` of FORM_FUNCTION; bodies are pickles of
    (args, kwargs)."""

    blob: str
    """SHA-256 of its pickle, in hex: under it the pickle lies in the store."""
    size: int
    python: str
    """Minor version it was pickled by, as "3.11": pickles of code fit no other."""
    name: str = ""
