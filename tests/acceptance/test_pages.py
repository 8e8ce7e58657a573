"""The README is true: its files are written down, its commands typed in, their outputs compared.

A `python` block whose first line names a file is that file. In a `console` block a line after `$` is
typed in; what follows is what must come out, where `…` stands for anything. A command that ends
with `&`, and `ekiden up`, go on in the background.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.cli import WAIT_S, Cli, clean, until

ROOT = Path(__file__).parents[2]

BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", re.MULTILINE)


class Reader:
    """A new user in an empty folder."""

    def __init__(self, cli: Cli) -> None:
        self.cli = cli
        self.folder = cli.folder / "work"
        self.folder.mkdir()
        self.background: list[subprocess.Popen[bytes]] = []
        # As after `. .venv/bin/activate`, whatever the tests themselves run in.
        commands = cli.folder / "bin"
        commands.mkdir()
        for name, words in {"ekiden": "-m ekiden.cli.main", "python": ""}.items():
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            script.chmod(0o755)
        cli.environment["PATH"] = f"{commands}{os.pathsep}{os.environ['PATH']}"

    def read(self, page: Path) -> None:
        for language, text in BLOCK.findall(page.read_text()):
            if language == "python":
                name = text.partition("\n")[0].removeprefix("# ")
                assert name.endswith(".py"), f"a block of python without a name: {text[:60]}"
                (self.folder / name).write_text(text)
            elif language == "console":
                for command, expected in COMMAND.findall(text):
                    self.type_in(command, expected)

    def type_in(self, command: str, expected: str) -> None:
        if command == "ekiden up":
            self.cli.start_up("--slots", "2")
        elif command.endswith("&"):
            self.start(command.removesuffix("&").strip())
        else:
            printed = self.run(command)
            assert fits(expected, printed), f"$ {command}\n{printed}\nbut the page says\n{expected}"

    def run(self, command: str) -> str:
        done = subprocess.run(
            ["bash", "-c", command], cwd=self.folder, env=self.cli.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=WAIT_S * 2, check=False,
        )  # fmt: skip
        return done.stdout

    def start(self, command: str) -> None:
        joined = self.cli.look("stats")["workers"]["connected"]
        process = subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.cli.environment,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        self.background.append(process)
        until(lambda: self.cli.look("stats")["workers"]["connected"] > joined, "a worker to join")


def fits(expected: str, printed: str) -> bool:
    """Whether this is what the page says; spaces at the ends of lines and in columns do not count."""
    parts = [re.escape(part) for part in " ".join(expected.split()).split("…")]
    pattern = ".*".join(parts).replace(r"\ .*", r"\ ?.*")
    return re.fullmatch(pattern, " ".join(printed.split())) is not None


def test_a_page_that_says_something_else_is_noticed() -> None:
    assert fits("id  name …\n…", "id name  worker\nx  y\n")
    assert fits("1 passed …", "1 passed in 0.1s")
    assert not fits("2 passed …", "1 passed in 0.1s")
    assert not fits("hello", "hello world")


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    cli = Cli(tmp_path)
    reader = Reader(cli)
    try:
        yield reader
    finally:
        for process in reader.background:
            process.kill()
            process.wait()
        clean(cli)


def test_what_the_page_says_is_what_happens(reader: Reader) -> None:
    reader.read(ROOT / "README.md")


def test_the_japanese_page_shows_the_same_commands_and_programs() -> None:
    def shown(name: str) -> list[str]:
        found = BLOCK.findall((ROOT / name).read_text())
        return [re.sub(r"# .*", "", text) for language, text in found if language != "sh"]

    assert shown("README.ja.md") == shown("README.md")


@pytest.mark.parametrize(
    "page", sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]), ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith(("http:", "https:")):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


def test_every_test_that_a_page_names_exists() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")]:
        for file, name in re.findall(r"(tests/[\w/]+\.py)(?:::(\w+))?", page.read_text()):
            text = (ROOT / file).read_text()
            assert f"def {name}(" in text if name else text, f"{page.name} names {file}::{name}"


def test_the_demo_shows_what_it_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ekiden.cli.demo"], cwd=tmp_path, text=True, timeout=WAIT_S * 3,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout
    assert "demo: all is well" in done.stdout
    assert "Traceback" not in done.stdout
    assert list(tmp_path.iterdir()) == []
