"""Ratios stated by hand: a TOML file of name = value, [low, high] or {value, interval}."""

from __future__ import annotations

from math import isfinite
from pathlib import Path
import tomllib
from typing import Any

from pruning.coefficients import TABLE
from pruning.extrapolate import Ratio
from pruning.extrapolate import RATIO_HELP
from search_space.errors import UserError


UNITS = {"launch_s_per_block": "s", "data_tail_s": "s"}
"""Units of ratios that are none."""

COEFFICIENTS = {coefficient.name: coefficient for coefficient in TABLE}
"""The ledger's coefficients by name; a file may name them too."""


def load_ratios(path: str) -> list[Ratio]:
    """Read a ratios file.

    Raises:
        UserError: it cannot be read, names an unknown ratio, or a value is no positive number inside its interval.
    """
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--ratios {path}: cannot be read ({error})") from None
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"--ratios {path}: {error}; lines such as tensor_exposed = [0.3, 0.6] are needed") from None
    if not values:
        raise UserError(f"--ratios {path}: no ratio in it; known are {', '.join(known_names())}")
    return [_ratio(path, name, value) for name, value in values.items()]


def known_names() -> list[str]:
    """Names that a file may state: the ratios, then the ledger's coefficients."""
    return [*RATIO_HELP, *COEFFICIENTS]


def _ratio(path: str, name: str, value: Any) -> Ratio:
    if name not in RATIO_HELP and name not in COEFFICIENTS:
        raise UserError(f"--ratios {path}: unknown ratio {name!r}; known are {', '.join(known_names())}")
    middle: Any = None
    ends: Any = value
    if isinstance(value, dict):
        middle, ends = value.get("value"), value.get("interval", value.get("value"))
        if set(value) - {"value", "interval"}:
            raise UserError(f"--ratios {path}: {name} takes value and interval, found {', '.join(value)}")
    if _number(ends):
        ends = [ends, ends]
    if not isinstance(ends, list) or len(ends) != 2 or not all(map(_number, ends)):
        raise UserError(f"--ratios {path}: {name} = {value!r}, needs a number, [low, high], or value and interval")
    low, high = map(float, ends)
    middle = (low + high) / 2 if middle is None else middle
    if not _number(middle) or not 0 <= low <= middle <= high:
        raise UserError(f"--ratios {path}: {name} = {value!r}, needs 0 <= low <= value <= high")
    if name in COEFFICIENTS and middle <= 0:
        raise UserError(f"--ratios {path}: {name} = {middle:g}, needs a positive value")
    if name in ("kernel_over_ideal", "reserve") and low < 1:
        raise UserError(f"--ratios {path}: {name} = {low:g}, cannot be below 1")
    text = RATIO_HELP.get(name) or COEFFICIENTS[name].help
    unit = UNITS.get(name, "ratio") if name in RATIO_HELP else COEFFICIENTS[name].unit
    return Ratio(name=name, value=float(middle), low=low, high=high, source="given", unit=unit, help=text)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and isfinite(value)
