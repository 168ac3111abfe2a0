"""Loading a torchtitan config function from a file or a module, with the user's own modules first on the path."""

from __future__ import annotations

from collections.abc import Callable
import importlib
import importlib.util
from pathlib import Path
import sys
from typing import Any

from search_space.errors import UserError


def add_user_path(user_path: str | None) -> None:
    """Put the user's folder first on the import path.

    Our own packages that a rank needs are imported by then, so a user repository may hold packages of the
    same names as the rest of ours.
    """
    if user_path and user_path not in sys.path:
        sys.path.insert(0, user_path)


def load_function(config_file: str, function: str) -> Callable[[], Any]:
    """The config function ``function`` of the Python file ``config_file``.

    Raises:
        UserError: the file has no such function.
    """
    path = Path(config_file)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    found = getattr(module, function, None)
    if not callable(found):
        raise UserError(f"config file {path.name}: it has no function {function!r}")
    return found


def find_module(name: str) -> str:
    """The import path of the config registry that torchtitan's ``--module name`` means.

    Raises:
        UserError: there is no such module; the message names the shorthands.
    """
    from torchtitan.experiments import _supported_experiments
    from torchtitan.models import _supported_models

    shorthands = _supported_models | _supported_experiments
    if name in shorthands:
        candidates = [f"{prefix}.{name}.config_registry" for prefix in ("torchtitan.models", "torchtitan.experiments")]
    else:
        candidates = [f"{name}.config_registry", name]
    for candidate in candidates:
        try:
            importlib.import_module(candidate)
        except ModuleNotFoundError as error:
            if error.name and (candidate == error.name or candidate.startswith(error.name + ".")):
                continue
            raise
        return candidate
    raise UserError(
        f"model module {name!r} cannot be imported; torchtitan's own are {', '.join(sorted(_supported_models))}; "
        "for your own module give its import name and set model.path to its folder"
    )
