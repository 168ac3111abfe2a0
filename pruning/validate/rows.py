"""Rows of a table of measurements under the common header, as typed data."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

from search_space.errors import UserError


@dataclass(frozen=True)
class Row:
    """One measured configuration. Cells are as printed; ``number`` reads them."""

    table: str
    """Name of the file without its ending."""

    cells: dict[str, str]
    """Every cell by column name."""

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column, "")

    @property
    def row_id(self) -> str:
        """Identifier within the table."""
        return self["row_id"]

    def number(self, column: str) -> float | None:
        """A cell as a number; None when it is empty or no number."""
        try:
            return float(self[column])
        except ValueError:
            return None

    def whole(self, column: str, default: int | None = None) -> int | None:
        """A cell as a whole number, or the default."""
        value = self.number(column)
        return default if value is None else int(value)

    def flag(self, column: str) -> bool | None:
        """A cell as a switch; None when it is empty."""
        return {"true": True, "false": False}.get(self[column].lower())

    @property
    def before_fix(self) -> bool:
        """Whether a pipelined row was measured before its framework's pipeline fix (nanotron)."""
        return "after_pp_fix=False" in self["notes"] and (self.whole("pp", 1) or 1) > 1

    @property
    def ranks(self) -> bool:
        """Whether the row is meant for ranking: tables that tag code experiments and noise tag the others."""
        return "class=" not in self["notes"] or "class=layout-or-kernel" in self["notes"]

    def step_time_s(self) -> float | None:
        """Measured seconds per step, from the step time or the tokens per second; None when neither is there."""
        step = self.number("step_time_s")
        if step is not None:
            return step
        rate, gpus = self.number("tokens_per_s_per_gpu"), self.number("gpus")
        batch, seq_len = self.number("global_batch_seqs"), self.number("seq_len")
        if not rate or not gpus or not batch or not seq_len:
            return None
        return batch * seq_len / (rate * gpus)


def read_table(path: str | Path) -> list[Row]:
    """The rows of one CSV file.

    Raises:
        UserError: the file cannot be read, or lacks columns of the common header.
    """
    file = Path(path)
    try:
        with file.open(newline="", encoding="utf-8") as stream:
            rows = [Row(file.stem, {k: v or "" for k, v in cells.items() if k}) for cells in csv.DictReader(stream)]
    except OSError as error:
        raise UserError(f"table {path}: cannot be read ({error.strerror})") from None
    except UnicodeDecodeError:
        raise UserError(f"table {path}: is no text file") from None
    needed = ("row_id", "framework", "hardware", "gpus", "model", "seq_len", "tp", "pp", "micro_batch", "step_time_s")
    missing = [name for name in needed if rows and name not in rows[0].cells]
    if missing or not rows:
        raise UserError(f"table {path}: no rows under the common header (missing: {', '.join(missing) or 'all'})")
    return rows
