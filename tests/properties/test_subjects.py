"""The trie and the one-against-one rules, against a matcher too simple to be wrong."""

from __future__ import annotations

from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from ekiden.core.subjects import SubjectTrie, check_pattern, check_subject, match, overlap
from ekiden.errors import BadSubject

ALPHABET = ("a", "b", "c")
DEPTH = 4

subjects = st.lists(st.sampled_from(ALPHABET), min_size=1, max_size=DEPTH).map(".".join)


@st.composite
def patterns(draw: st.DrawFn) -> str:
    tokens = draw(st.lists(st.sampled_from((*ALPHABET, "*")), min_size=0, max_size=DEPTH - 1))
    if draw(st.booleans()) or not tokens:
        tokens.append(">")
    return ".".join(tokens)


def naive_match(pattern: list[str], subject: list[str]) -> bool:
    """The definition, token by token."""
    if pattern == [">"]:
        return len(subject) >= 1
    if not pattern or not subject:
        return pattern == subject
    head_fits = pattern[0] in ("*", subject[0])
    return head_fits and naive_match(pattern[1:], subject[1:])


# Every subject that matters for patterns of DEPTH tokens: `z` stands for a token nobody names, and
# one token more than DEPTH stands for all longer ones.
UNIVERSE = [
    ".".join(tokens)
    for length in range(1, DEPTH + 2)
    for tokens in product((*ALPHABET, "z"), repeat=length)
]


@given(patterns(), subjects)
def test_match_agrees_with_the_definition(pattern: str, subject: str) -> None:
    assert match(pattern, subject) == naive_match(pattern.split("."), subject.split("."))


@given(patterns(), patterns())
def test_overlap_means_that_a_common_subject_exists(one: str, other: str) -> None:
    common = any(match(one, subject) and match(other, subject) for subject in UNIVERSE)

    assert overlap(one, other) == common
    assert overlap(other, one) == common


changes = st.lists(st.tuples(st.booleans(), patterns(), st.integers(0, 5)), max_size=40)


@given(changes, subjects, patterns())
def test_the_trie_agrees_with_a_list_of_pairs(
    changes: list[tuple[bool, str, int]], subject: str, asked: str
) -> None:
    trie: SubjectTrie[int] = SubjectTrie()
    pairs: list[tuple[str, int]] = []
    for adding, pattern, value in changes:
        if adding:
            trie.add(pattern, value)
            if (pattern, value) not in pairs:
                pairs.append((pattern, value))
        else:
            assert trie.remove(pattern, value) == ((pattern, value) in pairs)
            pairs = [pair for pair in pairs if pair != (pattern, value)]

    assert len(trie) == len(pairs)
    assert trie.match(subject) == _distinct(
        value for pattern, value in pairs if match(pattern, subject)
    )
    assert trie.overlapping(asked) == _distinct(
        value for pattern, value in pairs if overlap(pattern, asked)
    )


@given(st.text(max_size=40))
def test_any_text_is_either_refused_or_safe_to_show_and_match(text: str) -> None:
    for check in (check_subject, check_pattern):
        try:
            checked = check(text)
        except BadSubject as error:
            assert error.remedy
            continue
        assert checked == text
        assert text.isprintable()
        assert " " not in text
        assert all(text.split("."))


@given(subjects)
def test_a_subject_picks_itself_and_nothing_else_of_another_spelling(subject: str) -> None:
    assert check_subject(subject) == check_pattern(subject)
    assert match(subject, subject)
    assert not match(subject, subject.upper())


def _distinct(values: object) -> list[int]:
    return list(dict.fromkeys(values))  # type: ignore[call-overload,no-any-return]
