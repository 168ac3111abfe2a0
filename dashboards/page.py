"""The report page: one file that holds its data, its charts and the library that draws them, and asks nobody."""

from __future__ import annotations

import base64
import hashlib
import html
from importlib import resources
from typing import Any

from dashboards.page_data import embed
from dashboards.page_data import page_document
from dashboards.page_data import refused_rows
from tuner.records.journal import read_journal
from tuner.records.layout import StudyFolder


LIBRARY = "vendor/plotly-basic.min.js"
"""Plotly's bundle of scatter and bar charts; it neither evaluates text nor loads anything."""

SCRIPTS = ("format.js", "theme.js", "charts.js", "lines.js", "table.js", "lookup.js", "main.js", "live.js")
"""The page's own scripts, in the order in which they run."""


def report_page(folder: StudyFolder) -> str:
    """A finished or running study as one self-contained page.

    The page's own policy forbids every request. Data stands in it as JSON; scripts are known to the policy by their
    hashes, so that no text from a record can run.
    """
    events = read_journal(folder.journal)
    return render(page_document(folder, events), refused_rows(folder, events), live=None)


def render(document: dict[str, Any], rejected: list[dict[str, Any]], live: dict[str, Any] | None) -> str:
    """The page's text.

    Args:
        document: from :func:`dashboards.page_data.page_document`.
        rejected: from :func:`dashboards.page_data.refused_rows`.
        live: for a page that follows a running study: ``url`` of the updates, ``version`` of the document,
            ``back`` (address of the list of studies) or None.
    """
    scripts = [_asset(LIBRARY), *(_asset(name) for name in SCRIPTS)]
    for script in scripts:
        assert "</script" not in script.lower() and "<!--" not in script
    title = html.escape(f"{document['study']} · ledgertune")
    data = embed({"document": document, "refused": rejected, "live": live})
    parts = _asset("page.html").split("{{SCRIPTS}}")
    head = parts[0].replace("{{POLICY}}", policy(scripts, live is not None)).replace("{{TITLE}}", title)
    head = head.replace("{{STYLE}}", _asset("page.css"))
    blocks = [f'<script type="application/json" id="data">{data}</script>']
    blocks += [f"<script>{script}</script>" for script in scripts]
    return head + "\n".join(blocks) + parts[1]


def list_page(rows: list[dict[str, Any]]) -> str:
    """A page that links to several studies.

    Args:
        rows: one a study, newest first: ``href``, ``study``, ``state``, ``winner``, ``gain``, ``budget``.
    """
    cells = []
    for row in rows:
        link = f'<a href="{html.escape(row["href"], quote=True)}">{html.escape(row["study"])}</a>'
        others = (html.escape(str(row[key])) for key in ("state", "winner", "gain", "budget"))
        cells.append(f'<tr><th scope="row">{link}</th>' + "".join(f"<td>{cell}</td>" for cell in others) + "</tr>")
    body = "\n".join(cells) or '<tr><td colspan="5">no study yet</td></tr>'
    text = _asset("list.html").replace("{{POLICY}}", policy([], False)).replace("{{STYLE}}", _asset("page.css"))
    return text.replace("{{ROWS}}", body)


def policy(scripts: list[str], live: bool) -> str:
    """The Content-Security-Policy: scripts by hash, no request at all; a live page may ask its own server.

    Plotly writes style rules at run time, so styles are free; with every source of images and fonts closed a style can
    reach nobody.
    """
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{value}'" for value in hashes) or "'none'"
    connect = "'self'" if live else "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; connect-src {connect}; "
        "base-uri 'none'; form-action 'none'"
    )


def _asset(name: str) -> str:
    return resources.files("dashboards").joinpath("page", name).read_text(encoding="utf-8")
