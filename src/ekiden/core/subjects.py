"""Dotted names that jobs are sent to, and the patterns that pick them.

A *subject* is a list of tokens joined by dots: `job.assign.pricer`. A *pattern* is a subject in
which a token may be `*` (exactly one token) and the last may be `>` (one or more tokens). Names
are case-sensitive and compared character by character: two spellings that mean the same to a reader
but not to a rule would be a way around the rule.

Two questions, never mixed: `match` asks whether a pattern picks a subject, `overlap` whether there
is any subject that two patterns both pick. `SubjectTrie` answers both for many patterns at once:
its cost depends on the tokens asked about and on the answers, not on how many patterns there are.

Only `check_subject` and `check_pattern` look at the grammar; everything else expects checked text.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Hashable, Iterator
from typing import Final, Generic, TypeVar

from ekiden import limits
from ekiden.errors import BadSubject
from ekiden.model.ids import shown

ONE: Final = "*"
"""Stands for exactly one token of a subject."""

REST: Final = ">"
"""Stands for one or more tokens at the end of a subject."""

_REMEDY: Final = (
    "use tokens of printable characters without spaces, joined by single dots, "
    "such as 'job.assign.pricer'"
)

T = TypeVar("T", bound=Hashable)


# ------------------------------------------------------------------ grammar


def check_subject(text: str) -> str:
    """`text`, if a job or a message may be sent to it. Wildcards are for patterns only."""
    for token in _tokens(text, "subject"):
        if ONE in token or REST in token:
            raise BadSubject(
                f"subject {shown(text)} contains a wildcard",
                remedy="'*' and '>' belong in patterns; name one subject exactly",
            )
    return text


def check_pattern(text: str) -> str:
    """`text`, if it may pick subjects: `*` and `>` only as whole tokens, `>` only as the last."""
    tokens = _tokens(text, "pattern")
    for position, token in enumerate(tokens):
        if token == ONE or (token == REST and position == len(tokens) - 1):
            continue
        if token == REST:
            raise BadSubject(
                f"pattern {shown(text)} goes on after '>'",
                remedy="'>' takes all that follows, so it must be the last token",
            )
        if ONE in token or REST in token:
            raise BadSubject(
                f"pattern {shown(text)} has a wildcard inside a token",
                remedy="'*' stands for one whole token and '>' for the rest, as in 'job.*.fast'",
            )
    return text


def _tokens(text: str, what: str) -> list[str]:
    """The tokens of `text`, if length and characters are right."""
    # Characters first: an enormous text is refused without encoding it.
    if len(text) > limits.SUBJECT_LENGTH_MAX or not _fits(text):
        raise BadSubject(
            f"{what} {shown(text)} is too long or not text",
            remedy=f"use at most {limits.SUBJECT_LENGTH_MAX} bytes of UTF-8",
        )
    tokens = text.split(".")
    if len(tokens) > limits.SUBJECT_TOKENS_MAX:
        raise BadSubject(
            f"{what} {shown(text)} has {len(tokens)} tokens",
            remedy=f"use at most {limits.SUBJECT_TOKENS_MAX}",
        )
    if "" in tokens:
        raise BadSubject(f"{what} {shown(text)} has an empty token", remedy=_REMEDY)
    # `isprintable` knows controls, line ends, bidirectional and zero-width marks, and every space
    # but the plain one.
    if " " in text or not text.isprintable():
        raise BadSubject(f"{what} {shown(text)} has a space or control character", remedy=_REMEDY)
    if not unicodedata.is_normalized("NFC", text):
        raise BadSubject(
            f"{what} {shown(text)} spells a character in more than one piece",
            remedy="send it in Unicode normal form C, so that equal names are equal bytes",
        )
    return tokens


def _fits(text: str) -> bool:
    try:
        return len(text.encode()) <= limits.SUBJECT_LENGTH_MAX
    except UnicodeEncodeError:  # a lone surrogate: no UTF-8 peer could have said it
        return False


# ------------------------------------------------------------------ one against one


def match(pattern: str, subject: str) -> bool:
    """Whether `pattern` picks `subject`."""
    wanted = pattern.split(".")
    given = subject.split(".")
    if wanted[-1] == REST:
        wanted.pop()
        if len(given) <= len(wanted):
            return False
    elif len(given) != len(wanted):
        return False
    return all(want in (ONE, got) for want, got in zip(wanted, given, strict=False))


def overlap(pattern: str, other: str) -> bool:
    """Whether some subject is picked by both. Symmetric; a subject counts as its own pattern."""
    left = pattern.split(".")
    right = other.split(".")
    left_open = left[-1] == REST
    right_open = right[-1] == REST
    if left_open:
        left.pop()
    if right_open:
        right.pop()
    # An open pattern picks subjects longer than its fixed part; both must agree on some length.
    if left_open and right_open:
        lengths_agree = True
    elif left_open:
        lengths_agree = len(right) > len(left)
    elif right_open:
        lengths_agree = len(left) > len(right)
    else:
        lengths_agree = len(left) == len(right)
    return lengths_agree and all(a == b or ONE in (a, b) for a, b in zip(left, right, strict=False))


# ------------------------------------------------------------------ one against many


class _Node(Generic[T]):
    """One token deep in the trie. Values carry the number of their `add`, which orders answers."""

    __slots__ = ("children", "ending", "rest")

    def __init__(self) -> None:
        self.children: dict[str, _Node[T]] = {}
        self.ending: dict[T, int] = {}
        """Values of patterns that end here."""
        self.rest: dict[T, int] = {}
        """Values of patterns that go on with `>` from here."""

    def is_bare(self) -> bool:
        return not (self.children or self.ending or self.rest)


class SubjectTrie(Generic[T]):
    """Which values asked for this subject?

    A value may sit under several patterns and is answered once. Answers come in the order in which
    the matching pairs were added, on every machine alike.
    """

    def __init__(self) -> None:
        self._root: _Node[T] = _Node()
        self._added = 0
        self._pairs = 0

    def __len__(self) -> int:
        """How many (pattern, value) pairs there are."""
        return self._pairs

    def add(self, pattern: str, value: T) -> None:
        """From now on `value` is an answer for what `pattern` picks. Adding it again is nothing."""
        node = self._root
        tokens = pattern.split(".")
        into_rest = tokens[-1] == REST
        if into_rest:
            tokens.pop()
        for token in tokens:
            child = node.children.get(token)
            if child is None:
                child = node.children[token] = _Node()
            node = child
        values = node.rest if into_rest else node.ending
        if value not in values:
            self._added += 1
            self._pairs += 1
            values[value] = self._added

    def remove(self, pattern: str, value: T) -> bool:
        """Undo `add`; False if there was no such pair. Empty branches do not stay behind."""
        tokens = pattern.split(".")
        into_rest = tokens[-1] == REST
        if into_rest:
            tokens.pop()
        path = [self._root]
        for token in tokens:
            child = path[-1].children.get(token)
            if child is None:
                return False
            path.append(child)
        values = path[-1].rest if into_rest else path[-1].ending
        if values.pop(value, None) is None:
            return False
        self._pairs -= 1
        for depth in range(len(tokens), 0, -1):
            if not path[depth].is_bare():
                break
            del path[depth - 1].children[tokens[depth - 1]]
        return True

    def match(self, subject: str) -> list[T]:
        """The values with a pattern that picks `subject`."""
        found: list[dict[T, int]] = []
        level = [self._root]
        for token in subject.split("."):
            below: list[_Node[T]] = []
            for node in level:
                if node.rest:
                    found.append(node.rest)
                child = node.children.get(token)
                if child is not None:
                    below.append(child)
                child = node.children.get(ONE)
                if child is not None:
                    below.append(child)
            if not below:
                return _in_order(found)
            level = below
        found += [node.ending for node in level if node.ending]
        return _in_order(found)

    def overlapping(self, pattern: str) -> list[T]:
        """The values with a pattern that overlaps `pattern`."""
        found: list[dict[T, int]] = []
        level = [self._root]
        for token in pattern.split("."):
            if token == REST:
                for node in level:
                    found += _all_below(node)
                return _in_order(found)
            below: list[_Node[T]] = []
            for node in level:
                if node.rest:
                    found.append(node.rest)
                if token == ONE:
                    below += node.children.values()
                    continue
                for name in (token, ONE):
                    child = node.children.get(name)
                    if child is not None:
                        below.append(child)
            level = below
        found += [node.ending for node in level if node.ending]
        return _in_order(found)


def _all_below(node: _Node[T]) -> Iterator[dict[T, int]]:
    """Values of every pattern that has at least one token more than `node`'s own path."""
    yield node.rest
    # Depth is bounded by SUBJECT_TOKENS_MAX, so plain recursion is safe.
    for child in node.children.values():
        yield child.ending
        yield from _all_below(child)


def _in_order(found: list[dict[T, int]]) -> list[T]:
    """Values by the number of their earliest matching `add`, each once."""
    if len(found) == 1:
        return list(found[0])  # one dict is already in the order of adding
    first: dict[T, int] = {}
    for values in found:
        for value, number in values.items():
            if number < first.get(value, number + 1):
                first[value] = number
    return sorted(first, key=first.__getitem__)
