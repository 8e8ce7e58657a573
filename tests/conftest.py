"""For all tests: what a user keeps between runs is not theirs to touch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True, scope="session")
def state_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keys, hashes and the like of clients in this process lie in a folder of this run."""
    folder = tmp_path_factory.mktemp("state")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EKIDEN_STATE", str(folder))
        yield folder
