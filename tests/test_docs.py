"""The pages say what the code says: made pages are current, links lead somewhere, commands are commands."""

from __future__ import annotations

from collections.abc import Iterator
import importlib.util
from pathlib import Path
import re
import shlex
from types import ModuleType

import pytest

from tuner.cli import _parse
from tuner.cli import VERBS


ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


@pytest.fixture(scope="module")
def generate() -> ModuleType:
    """docs/generate.py."""
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "job_file.md", "troubleshooting.md"])
def test_made_pages_are_current(generate: ModuleType, name: str) -> None:
    assert (ROOT / "docs" / name).read_text() == generate.pages()[name], "run `make docs`"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)\s#]+)[^)]*\)", text) + re.findall(r'<img src="([^"]+)"', text)
    for link in links:
        if "://" not in link:
            assert (page.parent / link).exists(), link


def commands() -> Iterator[tuple[str, str]]:
    """Every `tune` command in a block of code, as (page, command)."""
    for page in PAGES:
        for block in re.findall(r"^```(?:sh|bash)?\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            for line in block.splitlines():
                bare = line.strip().removeprefix("$ ")
                if bare.startswith("tune "):
                    yield page.name, bare


@pytest.mark.parametrize(("page", "command"), sorted(set(commands())))
def test_commands_parse(page: str, command: str) -> None:
    arguments = shlex.split(command, comments=True)[1:]
    assert arguments[0] in VERBS, command
    try:
        _parse(arguments)
    except SystemExit as error:
        raise AssertionError(f"{page}: {command}") from error


def test_every_message_of_the_troubleshooting_page_is_said() -> None:
    """Each quoted message stands in a string of the code, so a page cannot outlive its message."""
    source = "".join(
        path.read_text()
        for package in ("tuner", "search_space", "trial_runner", "pruning", "dashboards")
        for path in (ROOT / package).rglob("*.py")
    )
    joined = re.sub(r'"\s*\n\s*f?"', "", source)
    head = (ROOT / "docs" / "troubleshooting.md").read_text().split("## Why a trial failed")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", head, re.MULTILINE)
    assert len(messages) >= 12
    for message in messages:
        pattern = re.escape(message).replace(re.escape("'tune_slot'"), r"(?:'tune_slot'|\{resource!r\})")
        assert re.search(pattern, joined), message


def test_every_verb_is_in_the_reference() -> None:
    text = (ROOT / "docs" / "cli.md").read_text()
    for verb in VERBS:
        assert re.search(rf"^## tune {re.escape(verb)}( |$)", text, re.MULTILINE), verb


def test_make_targets_of_the_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z-]+)", page.read_text(), re.MULTILINE):
            assert target in targets, f"{page.name}: make {target}"
