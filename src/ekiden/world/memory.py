"""How the C library's allocator is to treat buffers of the size of a part.

Every part of a file passes through a few buffers of 256 KiB that live for a moment. glibc gives
free memory at the end of its heap back to the system when it is more than twice the largest block
it has ever taken from the system directly and got back: with such buffers that is at every part,
and then touching the memory anew costs more than everything else that is done with a part.
"""

from __future__ import annotations

from typing import Final

# Twice this much may stay with the process for good. Larger blocks are given back as before.
_BLOCK_BYTES: Final = 8 << 20


def keep_part_buffers() -> None:
    """From now on, memory for parts is used again and not given back in between."""
    # Taken from the system and never touched: this costs some 10 µs, and no memory. With another
    # allocator it has no effect.
    bytearray(_BLOCK_BYTES)
