"""What a user's torchtitan config function says: read once in a child process, cached by content."""

from __future__ import annotations

from dataclasses import asdict
from dataclasses import dataclass
from dataclasses import field
import hashlib
from importlib import metadata
import json
import os
from pathlib import Path
import subprocess
import sys
import tempfile
from typing import Any

from search_space.errors import UserError
from search_space.model import ModelShape


MARK = "ledgertune-base:"
"""Starts the one line of the child's output that carries the facts."""


@dataclass(frozen=True, kw_only=True)
class BaseFunction:
    """A torchtitan config function as facts; nothing of torchtitan is needed to hold it."""

    module: str
    """Import path of the module that defines it."""

    function: str
    """Its name."""

    user_path: str | None
    """Folder that must come first on the import path, if it is the user's own."""

    shape: ModelShape
    """The model."""

    num_params: int
    """torchtitan's own parameter count of the model, built on the meta device."""

    seq_len: int
    """Tokens in one sequence."""

    local_batch: int
    """Sequences of one data-parallel rank in one gradient accumulation step."""

    global_batch: int
    """Sequences in one optimizer step; -1: local batch × data-parallel ranks."""

    knobs: dict[str, Any] = field(default_factory=dict)
    """Knob values that the function sets; ``data_parallel_shard`` -1 means all that is left."""

    warnings: tuple[str, ...] = ()
    """What could not be read exactly."""

    def to_json(self) -> dict[str, Any]:
        """Every field by name."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> BaseFunction:
        """The inverse of :meth:`to_json`."""
        shape = ModelShape.from_json(values["shape"])
        return cls(**{**values, "shape": shape, "warnings": tuple(values["warnings"])})


def cache_folder() -> Path:
    """Where facts that never change for the same content are kept between studies."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "ledgertune"


def _content_key(target: str, user_path: str | None) -> str:
    """A hash over everything the facts depend on: the name, the user's Python files, torchtitan's version."""
    digest = hashlib.sha256(f"{target}|{user_path}|{metadata.version('torchtitan')}|{sys.version}".encode())
    digest.update(Path(__file__).with_name("describe.py").read_bytes())
    if user_path:
        for path in _sources(Path(user_path)):
            digest.update(str(path).encode() + path.read_bytes())
    return digest.hexdigest()[:24]


def _sources(folder: Path) -> list[Path]:
    """The user's own Python files: not those of environments, caches and installed packages."""
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and f not in ("site-packages", "node_modules"))
        found += [Path(parent) / name for name in sorted(files) if name.endswith(".py")]
    return found


def describe(target: str, user_path: str | None = None, timeout_s: float = 300) -> BaseFunction:
    """Read the config function ``module:function`` in a child process.

    Args:
        target: torchtitan module and config function.
        user_path: folder of the user's own module.
        timeout_s: longest time the import may take, seconds.

    Raises:
        UserError: the module or the function does not exist, or importing it fails; the message is the child's.
    """
    if user_path is not None and not Path(user_path).is_dir():
        raise UserError(f"model.path: {user_path!r} is not a folder")
    user_path = str(Path(user_path).resolve()) if user_path else None
    cached = cache_folder() / f"base-{_content_key(target, user_path)}.json"
    if cached.exists():
        return BaseFunction.from_json(json.loads(cached.read_text()))
    command = [sys.executable, "-P", "-m", "trial_runner.recipe.describe", target, *([user_path] if user_path else [])]
    try:
        child = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, cwd=tempfile.gettempdir(), check=False
        )
    except subprocess.TimeoutExpired:
        raise UserError(f"model {target}: importing it took more than {timeout_s:.0f} s") from None
    facts = next((line[len(MARK) :] for line in child.stdout.splitlines() if line.startswith(MARK)), None)
    if facts is None:
        tail = "\n".join(child.stderr.strip().splitlines()[-12:])
        raise UserError(f"model {target}: reading it failed in the child process:\n{tail}")
    values = json.loads(facts)
    if "error" in values:
        raise UserError(f"model {target}: {values['error']}")
    if user_path is None and not values["module"].startswith("torchtitan."):
        # A module that is installed somewhere: nothing tells when it changes, so it is read anew each time.
        return BaseFunction.from_json(values)
    cached.parent.mkdir(parents=True, exist_ok=True)
    scratch = cached.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(values))
    scratch.replace(cached)
    return BaseFunction.from_json(values)
