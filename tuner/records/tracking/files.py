"""Which files of a trial go to the server: small ones with the run, large ones later, the largest not at all."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


SMALL_BYTES = 256 * 1024
"""Files up to this size are sent with the run; larger ones wait until all records are there."""

MIB = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Files:
    """A trial's files by what becomes of them."""

    now: tuple[Path, ...]
    """Sent with the run."""

    later: tuple[Path, ...]
    """Sent once no record waits."""

    never: tuple[Path, ...]
    """Over the cap: they stay in the study's folder."""


def sort_files(folder: Path, cap_bytes: int) -> Files:
    """The files of a folder by size; links are left alone, they could lead anywhere.

    Args:
        folder: a trial's folder; an absent one has none.
        cap_bytes: largest file that is uploaded (bytes).
    """
    found = [p for p in sorted(folder.iterdir()) if p.is_file() and not p.is_symlink()] if folder.is_dir() else []
    sizes = {path: path.stat().st_size for path in found}
    return Files(
        now=tuple(path for path in found if sizes[path] <= min(SMALL_BYTES, cap_bytes)),
        later=tuple(path for path in found if SMALL_BYTES < sizes[path] <= cap_bytes),
        never=tuple(path for path in found if sizes[path] > cap_bytes),
    )


def note_left_out(paths: tuple[Path, ...], root: Path, cap_bytes: int) -> str:
    """What a run says of files that were not uploaded: name, size, cap, where they are."""
    shown = [f"{_inside(path, root)} ({path.stat().st_size / MIB:.1f} MiB)" for path in paths]
    return f"not uploaded, over the cap of {cap_bytes / MIB:g} MiB a file: {', '.join(shown)}, in the study's folder"


def _inside(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if root in path.parents else path.name
