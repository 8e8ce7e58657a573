"""The import rules of ARCHITECTURE.md, and that callers run where there is no POSIX."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "ekiden"

# Pure by rule 1, beside whole rooms. A module of this list that exists must be under contract.
PURE = [
    *("limits", "errors", "model", "machine", "config", "wire", "core", "consensus", "journal"),
    *("security.identity", "security.policy"),
    *("broker.intake", "broker.relay", "broker.machine", "worker.machine", "client.machine"),
    "coordinator.placement",
]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the contracts of `folder`/pyproject.toml on the package in `folder`/src."""
    return subprocess.run(
        [
            sys.executable,
            *(
                "-c",
                "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports())",
            ),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder / "src"), "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_rooms_import_down_the_stairs_only() -> None:
    outcome = lint_imports(ROOT)

    assert outcome.returncode == 0, outcome.stdout + outcome.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("core/subjects.py", "import time", "Pure rooms"),
        ("core/subjects.py", "import ekiden.wire.messages", "Imports go down the stairs"),
        ("journal/__init__.py", "import ekiden.core.commands", "Imports go down the stairs"),
        ("worker/__init__.py", "import ekiden.broker", "Imports go down the stairs"),
        ("cli/__init__.py", "import ekiden.simulation", "Imports go down the stairs"),
        ("model/jobs.py", "import ekiden.model.ids\nimport os", "Pure rooms"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, module: str, line: str, contract: str) -> None:
    shutil.copytree(
        SOURCE, tmp_path / "src" / "ekiden", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "src" / "ekiden" / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")

    outcome = lint_imports(tmp_path)

    assert outcome.returncode == 1, outcome.stdout + outcome.stderr
    broken = [row for row in outcome.stdout.splitlines() if row.rstrip().endswith("BROKEN")]
    assert any(row.startswith(contract) for row in broken), outcome.stdout


def test_every_pure_module_that_exists_is_under_contract() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = {
        contract["id"]: contract for contract in settings["tool"]["importlinter"]["contracts"]
    }
    watched = set(contracts["pure"]["source_modules"])

    there = [
        f"ekiden.{name}"
        for name in PURE
        if SOURCE.joinpath(*name.split(".")).is_dir()
        or SOURCE.joinpath(*name.split(".")).with_suffix(".py").is_file()
    ]

    assert [name for name in there if name not in watched] == []


# What Windows does not have. Blocked before anything else is imported.
BLOCKED_IMPORT = """
import importlib, sys

class NoPosix:
    names = {"fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "syslog", "uvloop"}
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.names:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)

for name in NoPosix.names:
    sys.modules.pop(name, None)
sys.meta_path.insert(0, NoPosix())
module, _, attribute = sys.argv[1].partition(":")
getattr(importlib.import_module(module), attribute)
"""


@pytest.mark.parametrize(
    "target", ["ekiden:Client", "ekiden:AsyncClient", "ekiden:Worker", "ekiden.cli.main:main"]
)
def test_callers_and_workers_import_without_posix(target: str) -> None:
    outcome = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORT, target],
        capture_output=True,
        text=True,
        check=False,
    )

    assert outcome.returncode == 0, outcome.stderr
