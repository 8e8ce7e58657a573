"""The journal, read from outside: what happened, and whether the bytes are sound."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ekiden.cli import options, output
from ekiden.errors import WrongUsage

app = typer.Typer(
    help="Read a broker's journal: dump, verify.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog=output.EXIT_CODES,
)
