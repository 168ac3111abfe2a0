"""Where a study keeps its files."""

from __future__ import annotations

from datetime import datetime
import difflib
import json
import os
from pathlib import Path
import re

from search_space.errors import UserError


def studies_root() -> Path:
    """Folder of all studies: ``LEDGERTUNE_STUDIES``, else ``studies`` in the working directory."""
    return Path(os.environ.get("LEDGERTUNE_STUDIES", "studies")).resolve()


NETWORK = ("nfs", "nfs4", "cifs", "smb3", "smbfs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "afs", "9p")
"""File systems over a network, as mount tables name them; ``fuse.`` ones are judged by what follows."""


def network_mount(path: Path, mounts: Path = Path("/proc/mounts")) -> str | None:
    """The network file system that a path lies on; None when it is local, or where there is no mount table."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return None
    where, kind = "", ""
    for fields in (line.split() for line in lines):
        if len(fields) < 3:
            continue
        point = fields[1].replace("\\040", " ")
        inside = path.absolute() == Path(point) or Path(point) in path.absolute().parents
        if inside and len(point) >= len(where):
            where, kind = point, fields[2]
    plain = kind.removeprefix("fuse.")
    return kind if plain in NETWORK or plain in ("sshfs", "glusterfs", "s3fs", "gcsfuse") else None


class StudyFolder:
    """Paths inside one study's folder."""

    def __init__(self, root: Path) -> None:
        self.root = root.resolve()

    @property
    def name(self) -> str:
        """The study's name: the folder's."""
        return self.root.name

    @property
    def handle(self) -> str:
        """What to call the study on the command line: its name, or its path where the name alone is not found."""
        return self.name if self.root.parent == studies_root() else str(self.root)

    @property
    def facts(self) -> Path:
        """``study.json``: what holds for the whole study."""
        return self.root / "study.json"

    @property
    def job(self) -> Path:
        """``job.json``: the job as it was read."""
        return self.root / "job.json"

    @property
    def journal(self) -> Path:
        """``journal.jsonl``: everything that happened, append-only."""
        return self.root / "journal.jsonl"

    @property
    def claim(self) -> Path:
        """``claim.json``: the winner with its evidence, as it is committed."""
        return self.root / "claim.json"

    @property
    def seed_weights(self) -> Path:
        """``seed_weights``: initial weights that confirmation runs of every layout begin with."""
        return self.root / "seed_weights"

    @property
    def optuna(self) -> Path:
        """``optuna.db``: Optuna's storage."""
        return self.root / "optuna.db"

    @property
    def mlflow(self) -> Path:
        """``mlflow``: the local MLflow store and its artifacts."""
        return self.root / "mlflow"

    @property
    def coefficients(self) -> Path:
        """``coefficients.json``: the calibrated ledger."""
        return self.root / "coefficients.json"

    @property
    def transfer(self) -> Path:
        """``transfer.json``: what carried over from earlier studies; absent in a study that started from none."""
        return self.root / "transfer.json"

    @property
    def rejected(self) -> Path:
        """``rejected.jsonl``: refused candidates with their reasons."""
        return self.root / "rejected.jsonl"

    @property
    def lock(self) -> Path:
        """``study.lock``: held by the process that runs the study."""
        return self.root / "study.lock"

    @property
    def leases(self) -> Path:
        """``lease``: who runs the study, for processes on other machines."""
        return self.root / "lease"

    @property
    def repository(self) -> Path:
        """``repository``: where the winner is committed unless the user names a repository."""
        return self.root / "repository"

    def trial(self, number: int) -> Path:
        """Folder of one trial."""
        return self.root / "trials" / f"{number:04d}"


def new_folder(name: str | None, model: str) -> StudyFolder:
    """A folder for a new study; named after the model and the time when no name is given.

    Raises:
        UserError: the folder already holds a study.
    """
    if name is None:
        stem = re.sub(r"[^A-Za-z0-9_.-]", "-", model).strip(".-") or "study"
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        root = studies_root() / f"{stem}-{stamp}"
        count = 1
        while root.exists():
            count += 1
            root = studies_root() / f"{stem}-{stamp}-{count}"
    else:
        if not name.isprintable() or not name.strip() or name.startswith("-"):
            raise UserError(f"--study {name!r}: a study's name needs printable characters and no leading dash")
        root = named_folder(name).root
    folder = StudyFolder(root)
    if folder.facts.exists():
        raise UserError(
            f"study {root} already exists; go on with it by `tune resume {name}`, or choose another --study"
        )
    return folder


def named_folder(name: str) -> StudyFolder:
    """The folder that a name or path means, whether or not there is a study in it."""
    return StudyFolder(Path(name) if os.sep in name or name.startswith(".") else studies_root() / name)


def find_folder(name: str | None) -> StudyFolder:
    """The folder of an existing study: a path, a name under :func:`studies_root`, or the newest one.

    Raises:
        UserError: there is no such study; the message says where was looked.
    """
    if name is None:
        found = list_folders()
        if not found:
            raise UserError(f"no study in {studies_root()}; start one with `tune start --budget 0.3-gpu-hours`")
        return found[-1]
    for root in (Path(name), studies_root() / name):
        folder = StudyFolder(root)
        if folder.facts.exists():
            return folder
    names = [folder.name for folder in list_folders()]
    near = difflib.get_close_matches(name, names, n=1)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    known = ", ".join(names[-8:]) or "none"
    raise UserError(f"study {name!r} not found in {studies_root()}{meant}; there are: {known}")


def _readable(facts: Path) -> bool:
    """Whether a study's facts are whole; one torn file must not hide all the others."""
    try:
        json.loads(facts.read_text())
    except (OSError, ValueError):
        return False
    return True


def list_folders(root: Path | None = None) -> list[StudyFolder]:
    """All studies under ``root`` (absent: :func:`studies_root`), oldest first."""
    facts = [path for path in (root or studies_root()).glob("*/study.json") if _readable(path)]
    return [StudyFolder(path.parent) for path in sorted(facts, key=lambda path: path.stat().st_mtime)]
