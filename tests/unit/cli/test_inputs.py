"""What comes after PROGRAM: arguments, placeholders, inputs and the files among them."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.cli import inputs
from ekiden.cli.inputs import Entry, Folders, Source, Template, make_entries, parse, read_rows
from ekiden.errors import WrongUsage
from ekiden.model.names import check_file_name


def test_a_line_is_a_program_its_arguments_and_its_inputs() -> None:
    line = parse(["./price.sh", "--fast", "{}", ":::", "a", "b", "::::", "list.txt"])

    assert (line.program, line.args) == ("./price.sh", ("--fast", "{}"))
    assert line.sources == (Source(words=("a", "b")), Source(file="list.txt"))


def test_options_of_the_program_are_left_alone() -> None:
    assert parse(["wc", "-l", "--json", "--", ":::", "-x"]) == inputs.Line(
        "wc", ("-l", "--json", "--"), (Source(words=("-x",)),)
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([], "run what?"),
        ([":::", "a"], "run what?"),
        (["x", ":::+", "a"], "all combinations"),
        (["x", "::::"], "names no file"),
        (["./{}", ":::", "a"], "sh -c {}"),
        (["wc -l {}", ":::", "a"], "leave the quotes away"),
        (["", ":::", "a"], "no name"),
    ],
)
def test_a_line_that_makes_no_sense_is_refused_with_a_way_out(words: list[str], told: str) -> None:
    with pytest.raises(WrongUsage) as refused:
        parse(words)

    assert told in str(refused.value)


def test_several_lists_make_all_combinations_and_the_last_changes_fastest() -> None:
    rows = read_rows([Source(words=("a", "b")), Source(words=("1", "2"))])

    assert rows == [("a", "1"), ("a", "2"), ("b", "1"), ("b", "2")]


def test_inputs_are_the_lines_of_a_file_but_empty_ones(tmp_path: Path) -> None:
    file = tmp_path / "list"
    file.write_bytes(b"one\r\n\ntwo words\n\xff\nlast")

    rows = read_rows([Source(file=str(file))])

    assert rows == [("one",), ("two words",), ("\udcff",), ("last",)]


def test_without_a_list_the_inputs_are_lines_of_stdin() -> None:
    assert read_rows([], io.BytesIO(b"a\nb\n")) == [("a",), ("b",)]
    with pytest.raises(WrongUsage, match="stdin can be read once"):
        read_rows([Source(file="-"), Source(file="-")], io.BytesIO())


def test_more_inputs_than_a_broker_keeps_results_of_are_refused() -> None:
    many = Source(words=tuple("x" * 1001))

    with pytest.raises(WrongUsage, match="1,002,001 inputs"):
        read_rows([many, many])


@pytest.mark.parametrize(
    ("word", "filled"),
    [
        ("{}", "in/a.b.json"),
        ("{.}", "in/a.b"),
        ("{/}", "a.b.json"),
        ("{//}", "in"),
        ("{/.}", "a.b"),
        ("{#}", "7"),
        ("{1}", "in/a.b.json"),
        ("{1/.}", "a.b"),
        ("--out={/.}.csv", "--out=a.b.csv"),
        ("{}{}", "in/a.b.jsonin/a.b.json"),
    ],
)
def test_placeholders_are_those_of_gnu_parallel(word: str, filled: str) -> None:
    assert Template([word]).expand(("in/a.b.json",), 7) == [filled]


@pytest.mark.parametrize("word", ["{print $1}", "{2}", "{0}", "{a}", "{ }", "$x{"])
def test_braces_that_are_no_placeholder_stay(word: str) -> None:
    assert Template([word, "{}"]).expand(("in",), 1) == [word, "in"]


def test_the_input_comes_last_when_no_placeholder_is_there() -> None:
    assert Template(["-l"]).expand(("a",), 1) == ["-l", "a"]
    assert Template(["-l"], 2).expand(("a", "b"), 1) == ["-l", "a", "b"]
    assert Template(["{#}"]).expand(("a",), 3) == ["3"]


def test_an_input_is_one_argument_whatever_is_in_it() -> None:
    nasty = "a b; rm -rf / $(x) {#}"

    assert Template(["{}", "x={}"]).expand((nasty,), 1) == [nasty, f"x={nasty}"]


def test_of_several_lists_each_can_be_named() -> None:
    template = Template(["{2}", "{1.}", "all={}"], 2)

    assert template.expand(("a.txt", "b"), 1) == ["b", "a", "all=a.txt b"]


def test_hidden_files_and_files_without_a_name_keep_what_they_have() -> None:
    assert Template(["{.}", "{/.}"]).expand(("in/.profile",), 1) == ["in/.profile", ".profile"]
    assert Template(["{//}"]).expand(("plain",), 1) == ["."]


# ------------------------------------------------------------------ files


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a/x.json", "b/x.json", "b/price.sh"):
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(name)
    return tmp_path


def test_an_input_that_names_a_file_becomes_its_name_in_the_jobs_folder(here: Path) -> None:
    (entry,) = make_entries([("a/x.json",)])

    assert (entry.words, entry.files) == (("x.json",), {"x.json": "a/x.json"})
    assert entry.label == "a/x.json"


def test_without_shipping_an_input_is_its_text(here: Path) -> None:
    (entry,) = make_entries([("a/x.json",)], shipping=False)

    assert (entry.words, entry.files, entry.folder) == (("a/x.json",), {}, "a_x.json")


def test_two_files_of_one_name_in_one_job_do_not_meet(here: Path) -> None:
    (entry,) = make_entries([("a/x.json", "b/x.json")])

    assert entry.words == ("x.json", "2/x.json")
    assert entry.files == {"x.json": "a/x.json", "2/x.json": "b/x.json"}


def test_one_file_named_twice_travels_once(here: Path) -> None:
    (entry,) = make_entries([("a/x.json", "a/x.json")])

    assert entry.words == ("x.json", "x.json")
    assert entry.files == {"x.json": "a/x.json"}


def test_text_and_files_can_be_mixed(here: Path) -> None:
    (entry,) = make_entries([("fast", "a/x.json")])

    assert entry.words == ("fast", "x.json")
    assert entry.folder == "fast_x.json"


def test_an_input_does_not_replace_a_file_that_all_jobs_have(here: Path) -> None:
    (entry,) = make_entries([("b/price.sh",)], taken=["price.sh"])

    assert entry.words == ("1/price.sh",)


def test_a_folder_among_the_inputs_is_refused_with_a_way_out(here: Path) -> None:
    with pytest.raises(WrongUsage, match=r"'a' is a folder.*--no-ship"):
        list(make_entries([("a",)]))


def test_a_file_that_others_could_not_have_travels_under_a_plain_name(here: Path) -> None:
    (here / "a:b.txt").write_text("")
    os.mkfifo(here / "pipe")
    odd, pipe = make_entries([("a:b.txt",), ("pipe",)])

    assert (odd.words, odd.files) == (("a_b.txt",), {"a_b.txt": "a:b.txt"})
    assert pipe.files == {}


# ------------------------------------------------------------------ folders


def test_every_input_has_a_folder_of_its_own() -> None:
    folders = Folders()

    taken = [folders.take(each) for each in ("a", "a", "A", "a-2", "a", "../..", "")]

    assert taken == ["a", "a-2", "A-3", "a-2-2", "a-4", "input", "input-2"]


@given(st.lists(st.text(max_size=80), max_size=20))
def test_no_input_leads_out_of_the_folder_of_outputs(texts: list[str]) -> None:
    folders = Folders()
    taken = [folders.take(text) for text in texts]

    assert len({each.casefold() for each in taken}) == len(texts)
    for name in taken:
        assert "/" not in check_file_name(name)


def test_an_entry_travels_as_json() -> None:
    import msgspec

    entry = Entry("x.json", ("a/x.json", "1"), ("x.json", ""))

    assert msgspec.json.decode(msgspec.json.encode(entry), type=Entry) == entry
