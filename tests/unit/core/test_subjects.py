"""Subjects: the grammar, one against one, one against many."""

from __future__ import annotations

import pytest

from ekiden import limits
from ekiden.core.subjects import SubjectTrie, check_pattern, check_subject, match, overlap
from ekiden.errors import BadSubject


@pytest.mark.parametrize(
    "text", ["a", "job.assign.pricer", "Job.ASSIGN", "レンダー.4k", "a-b_c:d.e/f", "$sys.x", "ü.x"]
)
def test_a_plain_subject_is_accepted_as_it_is(text: str) -> None:
    assert check_subject(text) is text
    assert check_pattern(text) is text


@pytest.mark.parametrize(
    "text",
    [
        "",
        ".",
        "a.",
        ".a",
        "a..b",
        "a b",
        " a",
        "a\tb",
        "a\nb",
        "a\x00",
        "a\x7f",
        "a\u00a0b",  # a space that does not look like one
        "a\u202eb",  # turns the reading direction
        "a\u2066b",
        "a\u200bb",  # no width at all
        "a\ufeff",
        "a\u2028b",
        "\ud800",  # half a character
        "e\u0301",  # é in two pieces
    ],
)
def test_what_no_reader_could_tell_apart_is_refused_everywhere(text: str) -> None:
    for check in (check_subject, check_pattern):
        with pytest.raises(BadSubject) as caught:
            check(text)
        assert caught.value.remedy
        assert caught.value.code == "bad_subject"
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("text", ["*", ">", "a.*", "a.>", "a.b*", "a>b", "*.a"])
def test_a_wildcard_in_a_subject_is_refused(text: str) -> None:
    with pytest.raises(BadSubject, match="wildcard"):
        check_subject(text)


@pytest.mark.parametrize("text", ["*", ">", "a.*", "a.>", "*.*.>", "*.a.*"])
def test_a_wildcard_alone_in_its_token_makes_a_pattern(text: str) -> None:
    assert check_pattern(text) is text


@pytest.mark.parametrize("text", [">.a", "a.>.b", ">.>", "a*", "*a.b", "a.>>", "**", "a.b>"])
def test_a_misplaced_wildcard_is_refused(text: str) -> None:
    with pytest.raises(BadSubject):
        check_pattern(text)


def test_length_is_counted_in_bytes_and_tokens() -> None:
    assert check_subject("a" * limits.SUBJECT_LENGTH_MAX)
    assert check_subject(".".join("a" * limits.SUBJECT_TOKENS_MAX))
    for text in (
        "a" * (limits.SUBJECT_LENGTH_MAX + 1),
        "駅" * (limits.SUBJECT_LENGTH_MAX // 3 + 1),
        ".".join("a" * (limits.SUBJECT_TOKENS_MAX + 1)),
        "a" * 10_000_000,
    ):
        with pytest.raises(BadSubject) as caught:
            check_subject(text)
        assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("pattern", "subject", "expected"),
    [
        ("job.assign.echo", "job.assign.echo", True),
        ("job.assign.echo", "job.assign.Echo", False),
        ("job.assign.>", "job.assign.echo", True),
        ("job.assign.>", "job.assign.echo.eu", True),
        ("job.assign.>", "job.assign", False),
        ("job.*.echo", "job.assign.echo", True),
        ("job.*", "job.assign.echo", False),
        ("job.*.*", "job.assign", False),
        (">", "a", True),
        ("*", "a", True),
        ("*", "a.b", False),
        ("*.>", "a", False),
        ("*.>", "a.b.c", True),
        ("a.b", "a", False),
    ],
)
def test_match_by_example(pattern: str, subject: str, expected: bool) -> None:
    assert match(pattern, subject) is expected


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ("a.b", "a.b", True),
        ("a.b", "a.c", False),
        ("a.*", "*.b", True),
        ("a.*", "b.*", False),
        ("a.>", "a.b.c", True),
        ("a.>", "a", False),
        ("a.>", "*", False),
        ("a.>", "*.*", True),
        ("a.b.>", "a.>", True),
        ("a.b.>", "a.c.>", False),
        (">", "*", True),
        (">", "a.b.c.>", True),
        ("a.*.c", "a.b.>", True),
    ],
)
def test_overlap_by_example(one: str, other: str, expected: bool) -> None:
    assert overlap(one, other) is expected
    assert overlap(other, one) is expected


def test_the_trie_answers_in_the_order_of_adding_and_each_value_once() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("job.assign.echo", "w3")
    trie.add("job.assign.>", "w1")
    trie.add("job.*.echo", "w2")
    trie.add("job.assign.>", "w3")
    trie.add("other.>", "w4")

    assert trie.match("job.assign.echo") == ["w3", "w1", "w2"]
    assert trie.match("job.assign.sleep") == ["w1", "w3"]
    assert trie.match("job.assign") == []


def test_adding_a_pair_again_changes_nothing() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("a.>", "w1")
    trie.add("a.>", "w2")
    trie.add("a.>", "w1")

    assert len(trie) == 2
    assert trie.match("a.b") == ["w1", "w2"]
    assert trie.remove("a.>", "w1") is True
    assert trie.remove("a.>", "w1") is False
    assert trie.match("a.b") == ["w2"]


def test_removing_the_last_pattern_leaves_nothing_behind() -> None:
    trie: SubjectTrie[int] = SubjectTrie()
    for number in range(100):
        trie.add(f"a.{number}.*.>", number)
    trie.add("a.b", -1)
    for number in range(100):
        assert trie.remove(f"a.{number}.*.>", number)
    assert trie.remove("a.c.d", 1) is False

    assert len(trie) == 1
    assert list(trie._root.children) == ["a"]
    assert list(trie._root.children["a"].children) == ["b"]


def test_whom_a_pattern_reaches_is_overlap_not_match() -> None:
    trie: SubjectTrie[str] = SubjectTrie()
    trie.add("job.assign.render.>", "renderers")
    trie.add("job.assign.>", "all")
    trie.add("job.*", "short")
    trie.add("*.*.price", "pricers")

    assert trie.overlapping("job.assign.>") == ["renderers", "all", "pricers"]
    assert trie.overlapping("job.assign.price") == ["all", "pricers"]
    assert trie.overlapping("job.x") == ["short"]
    assert trie.overlapping(">") == ["renderers", "all", "short", "pricers"]
    assert trie.overlapping("nobody.>") == ["pricers"]
    assert trie.overlapping("nobody") == []


def test_the_work_of_a_match_does_not_grow_with_the_number_of_patterns() -> None:
    """Counted, not timed: how many nodes of the trie a match touches."""

    def touched(patterns: int) -> int:
        trie: SubjectTrie[int] = SubjectTrie()
        for number in range(patterns):
            trie.add(f"job.assign.exec{number}", number)
            trie.add(f"job.*.pool{number}.>", number)
        looked_up = 0

        class Counting(dict):  # type: ignore[type-arg]
            def get(self, key: str, default: object = None) -> object:
                nonlocal looked_up
                looked_up += 1
                return super().get(key, default)

        stack = [trie._root]
        while stack:
            node = stack.pop()
            node.children = Counting(node.children)
            stack += node.children.values()
        assert trie.match("job.assign.exec7") == [7]
        return looked_up

    assert touched(10) == touched(10_000)
