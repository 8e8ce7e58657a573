"""What comes after PROGRAM in `ekiden run`: arguments with placeholders, and where inputs are from.

GNU parallel's habits, without its shell: `::: a b` names inputs, `:::: FILE` reads them, several of
either make all combinations, and an argument is one word of the program's argv whatever is in it.

An input that names a file here travels with its job. Its placeholders then speak of the file as it
is called in the job's folder, because that is where the program finds it.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from msgspec import Struct

from ekiden.errors import BadName, WrongUsage
from ekiden.model.names import check_file_name

# A broker keeps the results of so many jobs; the outcome of a larger run could be gone before it is
# fetched.
INPUTS_MAX: Final = 1_000_000

# Of an input, in the name of the folder of its outputs: file systems hold 255 bytes, a character
# may take four, and a suffix must fit.
FOLDER_LETTERS_MAX: Final = 56

WORDS: Final = ":::"
FILES: Final = "::::"
_LINKED: Final = (":::+", "::::+")
STDIN: Final = "-"

_PLACEHOLDER: Final = re.compile(r"\{#\}|\{(\d*)(//|/\.|/|\.)?\}")
_EXTENSION: Final = re.compile(r"(?<=[^/])\.[^/.]+$")
_UNSAFE: Final = re.compile(r"[^\w.+=,@%-]+")

Row = tuple[str, ...]
"""One input: a word of every source."""


class Source(Struct, frozen=True):
    """Where one list of inputs comes from."""

    words: tuple[str, ...] = ()
    file: str = ""
    """If not empty, a file with one input on every line."""


class Line(Struct, frozen=True):
    """A command line, taken apart."""

    program: str
    args: tuple[str, ...]
    sources: tuple[Source, ...]
    """None: inputs are lines of stdin."""


# ------------------------------------------------------------------ taking a line apart


def parse(words: Sequence[str]) -> Line:
    """`PROGRAM ARGS… ::: inputs… :::: files…` taken apart. Raises `WrongUsage`."""
    marks = [place for place, word in enumerate(words) if word in (WORDS, FILES, *_LINKED)]
    for place in marks:
        if words[place] in _LINKED:
            raise WrongUsage(
                f"{words[place]!r} is not known here",
                remedy="use ::: for all combinations, or put what belongs together on one line",
            )
    head = words[: marks[0]] if marks else words
    if not head:
        raise WrongUsage("run what?", remedy="as in: ekiden run ./price.sh {} ::: trades/*.json")
    sources: list[Source] = []
    for start, end in itertools.pairwise([*marks, len(words)]):
        part = tuple(words[start + 1 : end])
        if words[start] == WORDS:
            sources.append(Source(words=part))
        elif part:
            sources += [Source(file=name) for name in part]
        else:
            raise WrongUsage("'::::' names no file", remedy="as in: ekiden run ./x :::: list.txt")
    return Line(_checked_program(head[0]), tuple(head[1:]), tuple(sources))


def _checked_program(program: str) -> str:
    if not program:
        raise WrongUsage("the program has no name")
    if re.search(r"\s", program) and not os.path.exists(program):
        raise WrongUsage(
            f"{program!r} is one word, and there is no shell to take it apart",
            remedy="leave the quotes away, or write: ekiden run sh -c 'the command' sh {} ::: …",
        )
    if _PLACEHOLDER.search(program):
        raise WrongUsage(
            f"{program!r} would be another program for every input",
            remedy="have a shell run it: ekiden run sh -c {} ::: 'echo one' 'echo two'",
        )
    return program


# ------------------------------------------------------------------ reading inputs


def read_rows(sources: Sequence[Source], stdin: Any = None) -> list[Row]:
    """Every input, in order: the last source changes fastest. Raises `WrongUsage`."""
    if not sources:
        sources = (Source(file=STDIN),)
    if sum(source.file == STDIN for source in sources) > 1:
        raise WrongUsage("stdin can be read once", remedy="write '-' after one '::::' only")
    lists = [
        source.words if not source.file else _read_lines(source.file, stdin) for source in sources
    ]
    total = math.prod(map(len, lists))
    if total > INPUTS_MAX:
        raise WrongUsage(
            f"these are {total:,} inputs", remedy=f"run at most {INPUTS_MAX:,} at a time"
        )
    return list(itertools.product(*lists))


def _read_lines(name: str, stdin: Any) -> list[str]:
    """Lines that are not empty: a blank line at an end is nobody's input."""
    try:
        if name == STDIN:
            data: bytes = (stdin if stdin is not None else sys.stdin.buffer).read()
        else:
            with open(name, "rb") as file:
                data = file.read()
    except OSError as error:
        raise WrongUsage(
            f"cannot read {name!r}: {os.strerror(error.errno or 0).lower()}",
            remedy="after '::::' come names of files with one input a line; '-' is stdin",
        ) from None
    # Bytes that are no text stay what they are, as in the names that a shell passes on.
    lines = data.decode(errors="surrogateescape").split("\n")
    return [line for line in (line.removesuffix("\r") for line in lines) if line]


# ------------------------------------------------------------------ placeholders


class Template:
    """Arguments with placeholders in them; without any, the input comes last.

    `{}` the input · `{.}` without its extension · `{/}` without its folders · `{//}` its folder ·
    `{/.}` without both · `{#}` the number of the job · `{1}`, `{2.}`, … of one source.
    """

    def __init__(self, args: Sequence[str], sources: int = 1) -> None:
        self._words = [_pieces(word, sources) for word in args]
        if not any(isinstance(piece, _Hole) for word in self._words for piece in word):
            self._words.append([_Hole()])

    def expand(self, names: Row, number: int) -> list[str]:
        """The arguments of the job of this number."""
        found: list[str] = []
        for word in self._words:
            if len(word) == 1 and isinstance(word[0], _Hole):
                found += word[0].fill(names, number)
            else:
                found.append(
                    "".join(
                        piece if isinstance(piece, str) else " ".join(piece.fill(names, number))
                        for piece in word
                    )
                )
        return found


class _Hole(Struct, frozen=True):
    source: int = 0
    """From 1; 0 is all of them."""
    part: str = ""
    """What is between the braces beside the source."""

    def fill(self, names: Row, number: int) -> list[str]:
        if self.part == "#":
            return [str(number)]
        chosen = names if not self.source else (names[self.source - 1],)
        return [_PARTS[self.part](name) for name in chosen]


def _pieces(word: str, sources: int) -> list[str | _Hole]:
    found: list[str | _Hole] = []
    done = 0
    for hole in _PLACEHOLDER.finditer(word):
        source = int(hole[1] or 0)
        if source > sources or hole[1] == "0":
            continue  # {9} may mean something to the program
        found += [word[done : hole.start()]] if hole.start() > done else []
        found.append(_Hole(part="#") if hole[0] == "{#}" else _Hole(source, hole[2] or ""))
        done = hole.end()
    return [*found, word[done:]] if word[done:] or not found else found


def _without_extension(name: str) -> str:
    return _EXTENSION.sub("", name)


def _base(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2] or name


_PARTS: Final[dict[str, Callable[[str], str]]] = {
    "": lambda name: name,
    ".": _without_extension,
    "/": _base,
    "//": lambda name: os.path.dirname(name) or ".",
    "/.": lambda name: _without_extension(_base(name)),
}


# ------------------------------------------------------------------ files among inputs


class Entry(Struct, frozen=True, array_like=True, gc=False):
    """One input of a run: where its outputs go, its words, and the files among them."""

    folder: str
    inputs: Row
    names: Row = ()
    """For every word that is a file, its name in the job's folder, else ""; none: no files."""

    @property
    def words(self) -> Row:
        """What placeholders speak of."""
        if not self.names:
            return self.inputs
        return tuple(n or word for n, word in zip(self.names, self.inputs, strict=True))

    @property
    def files(self) -> dict[str, str]:
        """Name in the job's folder → path here."""
        return {n: word for n, word in zip(self.names, self.inputs, strict=False) if n}

    @property
    def label(self) -> str:
        """The input, for people."""
        return " ".join(self.inputs)


def make_entries(
    rows: Iterable[Row], *, shipping: bool = True, taken: Iterable[str] = ()
) -> Iterator[Entry]:
    """The inputs with their files, and a folder for each. `taken` are names of files that all jobs
    have. Raises `WrongUsage` for a folder among the inputs."""
    folders = Folders()
    reserved = frozenset(name.casefold() for name in taken)
    for row in rows:
        names = _shipped_names(row, reserved) if shipping else ()
        titles = row
        if names:
            titles = tuple(_base(w) if n else w for n, w in zip(names, row, strict=True))
        yield Entry(folders.take("_".join(titles)), row, names)


def _shipped_names(row: Row, reserved: frozenset[str]) -> Row:
    names: dict[str, str] = {}
    used = set(reserved)
    for place, word in enumerate(row, 1):
        if word not in names and file_size(word) is not None:
            names[word] = name = _free_name(file_name(word), place, used)
            used.add(name.casefold())
    return tuple(names.get(word, "") for word in row) if names else ()


def file_size(word: str) -> int | None:
    """How large the file is that `word` names; None if it names none. Raises for a folder."""
    try:
        facts = os.stat(word)
    except (OSError, ValueError):
        return None
    if stat.S_ISDIR(facts.st_mode):
        raise WrongUsage(
            f"input {word!r} is a folder, and only files travel",
            remedy="pack it (tar), name the files in it, or pass the text with --no-ship",
        )
    return facts.st_size if stat.S_ISREG(facts.st_mode) else None


def file_name(path: str) -> str:
    """What the file is called in a job's folder: its own name if every system can have it."""
    name = unicodedata.normalize("NFC", _base(path))
    try:
        return check_file_name(name)
    except BadName:
        return folder_name(name)


def _free_name(name: str, place: int, used: set[str]) -> str:
    """Two inputs of one job may be files of the same name; the later one gets a folder."""
    if name.casefold() not in used:
        return name
    free = (f"{folder}/{name}" for folder in itertools.count(place))
    return next(each for each in free if each.casefold() not in used)


# ------------------------------------------------------------------ where outputs go


def folder_name(text: str) -> str:
    """`text` as one plain name of a folder: what may be trouble on any system becomes `_`."""
    name = _UNSAFE.sub("_", unicodedata.normalize("NFC", printable(text)))
    name = name[:FOLDER_LETTERS_MAX].strip("._ ") or "input"
    try:
        return check_file_name(name)
    except BadName:
        return f"_{name}"


class Folders:
    """A folder of its own for every input: its text made safe; if that is taken, with a number.
    The folder of an input does not depend on inputs after it."""

    def __init__(self) -> None:
        self._used: set[str] = set()
        self._counts: dict[str, int] = {}

    def take(self, title: str) -> str:
        """The folder for the next input."""
        free = name = folder_name(title)
        # Also where capitals do not count, two inputs must not share a folder.
        key = name.casefold()
        while free.casefold() in self._used:
            self._counts[key] = self._counts.get(key, 1) + 1
            free = f"{name}-{self._counts[key]}"
        self._used.add(free.casefold())
        return free


def printable(text: str) -> str:
    """`text` as Unicode: bytes of a name that are no text become `�`."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
