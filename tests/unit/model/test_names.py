"""One grammar for the names of files: what passes is harmless on every system."""

from __future__ import annotations

import ntpath
import posixpath
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ekiden.errors import BadName, error_of
from ekiden.model.names import COMPONENT_BYTES_MAX, DEPTH_MAX, NAME_BYTES_MAX, check_file_name

GOOD = [
    "a", "a.csv", "results/2026/a.csv", ".hidden", "..data", "a..b", "...x", "-rf", "a b", " a",
    "~", "$HOME", "a;b", "a'b", "*", "?", "日本/結果.csv", "\u00fcber", "👩\u200d🔬.txt", "console",
    "com", "com10", "nulls", "CONfig.sys", "x" * COMPONENT_BYTES_MAX, "/".join("d" * DEPTH_MAX),
]  # fmt: skip

BAD = [
    # Nothing, or not a name.
    "", ".", "..", "/", "./a", "a/.", "a/", "a//b", "//a",
    # Out of the folder.
    "../a", "a/../b", "a/..", "../../../../etc/passwd", "/etc/passwd", "a/../../b",
    # Out of it on Windows.
    "..\\a", "a\\b", "\\a", "\\\\host\\share\\a", "C:", "C:\\a", "c:/a", "//host/share", "a:stream",
    "\\\\?\\C:\\a", "\\\\.\\COM1", ".. /a", "a/.. ", "a./b", "a ", "a.", "...", ". .",
    # Devices.
    "con", "CON", "nul", "Aux.txt", "prn.tar.gz", "com1", "LPT9.log", "x/nul/y", "COM\u00b9", "con .txt",
    "conin$", "CONOUT$",
    # What is not seen, or seen as something else.
    "a\0b", "a\nb", "a\rb", "a\tb", "\x1b[2J", "a\x7fb", "a\x85b", "a\u2028b", "a\u2029b",
    "txt.\u202eexe", "a\u200eb", "a\u200fb", "a\u2066b", "a\u2069b", "a\u061cb",
    # Not the composed form, not Unicode.
    "u\u0308ber", "\u212b", "a\udcffb", "\ud800",
    # Too long, too deep.
    "x" * (COMPONENT_BYTES_MAX + 1), "日" * 86, "/".join("d" * (DEPTH_MAX + 1)),
    "/".join(["x" * 250] * (NAME_BYTES_MAX // 250 + 1)),
]  # fmt: skip


@pytest.mark.parametrize("name", GOOD)
def test_a_plain_relative_name_passes_unchanged(name: str) -> None:
    assert check_file_name(name) == name


@pytest.mark.parametrize("name", BAD)
def test_a_malicious_name_is_refused_with_a_short_harmless_message(name: str) -> None:
    with pytest.raises(BadName) as caught:
        check_file_name(name)

    text = str(caught.value)
    assert text.isprintable()
    assert len(text.encode()) < 1000


def test_the_refusal_travels() -> None:
    assert isinstance(error_of("bad_name", "x"), BadName)


@given(st.text(max_size=40) | st.text("./\\:ab \0", max_size=12))
def test_whatever_passes_stays_inside_the_folder_on_every_system(name: str) -> None:
    try:
        check_file_name(name)
    except BadName:
        return

    assert posixpath.normpath(posixpath.join("/root", name)).startswith("/root/")
    assert posixpath.normpath(name) == name
    inside = ntpath.normpath(ntpath.join("C:\\root", name))
    assert inside == "C:\\root\\" + name.replace("/", "\\")
    assert unicodedata.normalize("NFC", name) == name
