"""Names of files that travel with jobs and their results.

A name comes from a stranger and ends as a path on somebody's disk: a worker's, a client's, inside a
ZIP, on any system. So one grammar holds everywhere, and it is the strictest of all of them: what is
a plain relative path here is a plain relative path there. Whoever writes a file under a name that
came from elsewhere has it checked here first, and opens it without following links.
"""

from __future__ import annotations

import unicodedata
from typing import Final

from ekiden.errors import BadName
from ekiden.model.ids import shown

__all__ = ["COMPONENT_BYTES_MAX", "DEPTH_MAX", "NAME_BYTES_MAX", "check_file_name", "shown"]

# What file systems hold in one component.
COMPONENT_BYTES_MAX: Final = 255

# Folders deeper than this, or longer than that, are no layout but an attack or a mistake. With a
# scratch folder in front they stay below the 4,096 bytes of a path.
DEPTH_MAX: Final = 32
NAME_BYTES_MAX: Final = 2048

# Devices that Windows finds in every folder, whatever the extension; it also reads a superscript
# digit as a digit.
_DEVICES: Final = frozenset(
    ["con", "prn", "aux", "nul", "conin$", "conout$"]
    + [f"{port}{digit}" for port in ("com", "lpt") for digit in "0123456789¹²³"]
)

# Characters that reorder what is shown: a name must look like what it is.
_BIDI: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")

_REMEDY: Final = "use a relative name like results/a.csv"


def check_file_name(name: str) -> str:
    """`name`, if it may name a file in a job's folder: parts joined by "/", see above.

    Raises BadName.
    """
    why = _wrong(name)
    if why:
        raise BadName(f"file name {shown(name)} {why}", remedy=_REMEDY)
    return name


def _wrong(name: str) -> str:
    if not name:
        return "is empty"
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        return "is not valid Unicode"
    if size > NAME_BYTES_MAX:
        return f"is longer than {NAME_BYTES_MAX:,} bytes"
    if name.startswith("/"):
        return "is absolute"
    for sign, what in (("\\", "a backslash"), (":", "a colon")):
        if sign in name:
            return f"has {what} in it"
    if not name.isascii() or not name.isprintable():
        why = _wrong_characters(name)
        if why:
            return why
    parts = name.split("/")
    if len(parts) > DEPTH_MAX:
        return f"has more than {DEPTH_MAX} parts"
    return next((why for part in parts if (why := _wrong_part(part))), "")


def _wrong_characters(name: str) -> str:
    for sign in name:
        # Cc: control, NUL among them; Zl and Zp: line ends by another name; Cs: half a character.
        if unicodedata.category(sign) in ("Cc", "Zl", "Zp", "Cs"):
            return "has a control character in it"
        if sign in _BIDI:
            return "has a character in it that changes the direction of text"
    if not unicodedata.is_normalized("NFC", name):
        return "is not in Unicode's composed form (NFC)"
    return ""


def _wrong_part(part: str) -> str:
    if not part:
        return "has an empty part"
    if part in (".", ".."):
        return f"has {part!r} as a part"
    # Windows drops these from the end: ".. " would become "..".
    if part[-1] in ". ":
        return "has a part that ends in a dot or a space"
    if len(part.encode()) > COMPONENT_BYTES_MAX:
        return f"has a part longer than {COMPONENT_BYTES_MAX} bytes"
    if part.partition(".")[0].rstrip(" ").lower() in _DEVICES:
        return "has the name of a Windows device in it"
    return ""
