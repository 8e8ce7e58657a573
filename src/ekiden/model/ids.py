"""Grammar of the names that people and machines choose."""

from __future__ import annotations

import re

from ekiden import limits
from ekiden.errors import BadId

# Safe in a shell, a URL path segment, a log line and a file name on every system we run on.
_JOB_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PARTY = re.compile(r"[A-Za-z0-9._:@-]{1,128}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")

is_job_id = _JOB_ID.fullmatch


def check_job_id(text: str) -> str:
    """`text`, if it may name a job."""
    if _JOB_ID.fullmatch(text) is None:
        raise BadId(
            f"job id {shown(text)} is not usable",
            remedy="use 1 to 128 of A-Z a-z 0-9 . _ : -",
        )
    return text


def check_party(text: str, what: str) -> str:
    """`text`, if it may name a client or a worker."""
    if _PARTY.fullmatch(text) is None:
        raise BadId(
            f"{what} id {shown(text)} is not usable",
            remedy="use 1 to 128 of A-Z a-z 0-9 . _ : @ -",
        )
    return text


def check_name(text: str, what: str) -> str:
    """`text`, if it may name a handler, an executable or a run."""
    if _NAME.fullmatch(text) is None:
        raise BadId(
            f"{what} {shown(text)} is not usable", remedy="use 1 to 128 of A-Z a-z 0-9 . _ -"
        )
    return text


def shown(text: str) -> str:
    """`text` quoted for a message: escaped, and cut so that a hostile name cannot fill a log."""
    return repr(text if len(text) <= limits.ID_LENGTH_MAX else text[: limits.ID_LENGTH_MAX] + "…")
