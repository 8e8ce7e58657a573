"""What all tests share: they leave nothing in the home of who runs them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def home_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keys, hashes of files and cached data lie in folders of this run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EKIDEN_STATE", str(tmp_path_factory.mktemp("state")))
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache-home")))
        yield
