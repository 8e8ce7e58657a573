from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.acceptance.cli import Cli, clean


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cli]:
    """A grid that the tests of a module share; each uses ids of its own."""
    cli = Cli(tmp_path_factory.mktemp("grid"))
    try:
        cli.start_up("--slots", "2")
        yield cli
    finally:
        clean(cli)


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Cli]:
    """For a test that starts and stops its own grid."""
    cli = Cli(tmp_path)
    try:
        yield cli
    finally:
        clean(cli)
