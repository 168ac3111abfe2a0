"""Where the verbs print their tables."""

from __future__ import annotations

from rich.console import Console


WIDE = 180
"""Columns where there is no terminal: a file or a pipe has no width, and a cut column cannot be read back."""


def make_console() -> Console:
    """A console that wraps at the terminal's width, and hardly ever where there is no terminal."""
    console = Console(highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=max(console.width, WIDE))
    return console
