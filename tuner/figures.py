"""Writing a picture to the file that a user named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from search_space.errors import UserError


def save_figure(figure: Any, path: Path) -> None:
    """Write a matplotlib figure and close it.

    Raises:
        UserError: the file cannot be written, or its name ends in no kind of picture.
    """
    from matplotlib import pyplot

    try:
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise UserError(f"--plot {path}: cannot be written ({error}); name a .png file in an existing folder") from None
    finally:
        pyplot.close(figure)
