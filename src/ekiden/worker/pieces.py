"""Parts of a batch that wait to begin, whatever runs them."""

from __future__ import annotations

from typing import Protocol, TypeVar


class Placed(Protocol):
    """Attempts of one grant, by index; the first of them has this offset."""

    first: int


B = TypeVar("B", bound=Placed)


def parted(batch: B, indices: range, asked: set[int]) -> tuple[list[tuple[B, int, int]], list[int]]:
    """Pieces [low, end) of `indices` that were not asked for, and the offsets that were."""
    first = batch.first
    if asked.isdisjoint(range(first + indices.start, first + indices.stop)):
        return ([(batch, indices.start, indices.stop)] if indices else []), []
    kept: list[tuple[B, int, int]] = []
    gone: list[int] = []
    for at in indices:
        if first + at in asked:
            gone.append(first + at)
        elif kept and kept[-1][2] == at:
            kept[-1] = (batch, kept[-1][1], at + 1)
        else:
            kept.append((batch, at, at + 1))
    return kept, gone
