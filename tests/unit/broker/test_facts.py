"""What the broker's process says of itself, while its children change the folder."""

from __future__ import annotations

import pytest

import ekiden.testing
from ekiden.world.disk import FolderStorage


def test_a_file_tidied_away_while_it_is_counted_does_not_end_the_broker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = FolderStorage.names
    monkeypatch.setattr(FolderStorage, "names", lambda self: [*names(self), "segment-gone.log"])

    with ekiden.testing.grid() as grid:
        first = grid.client.stats()["journal"]
        second = grid.client.stats()["journal"]

    assert first["segments"] == second["segments"]
    assert second["bytes"] >= first["bytes"]
