"""Sites for tests with real processes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.integration.processes import Site


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A folder of its own; whatever is started there is ended with the test."""
    site = Site(tmp_path)
    try:
        yield site
    finally:
        site.close()
