"""Render the page as one file without scripts; its Content-Security-Policy allows its own style and no request.

The policy names the style by its hash: https://www.w3.org/TR/CSP3/
"""

import base64
import hashlib
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from xml.etree.ElementTree import Element

from controller.report import sections
from controller.report.markup import add_child, serialize_page
from controller.report.model import ReportModel

SECTIONS = (
    ("metrics", "Learning curves and comparisons", sections.metrics_section),
    ("time", "Time and cost", sections.time_section),
    ("transcripts", "Sample transcripts", sections.transcripts_section),
    ("runs", "Runs", sections.runs_section),
)


def render(report: ReportModel, now: float) -> str:
    """Return the page.

    Args:
        report: the contents.
        now: time of creation, seconds since the epoch.
    """
    style = files("controller.report").joinpath("page.css").read_text()
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; img-src data:; base-uri 'none'; form-action 'none'"
    root = Element("html", {"lang": "en"})
    head = add_child(root, "head")
    add_child(head, "meta", charset="utf-8")
    add_child(head, "meta", http_equiv="Content-Security-Policy", content=policy)
    add_child(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add_child(head, "meta", name="referrer", content="no-referrer")
    add_child(head, "title", f"{report.name}: report")
    add_child(head, "link", rel="icon", href="data:,")
    add_child(head, "style", style)
    body = add_child(root, "body")
    _header(add_child(body, "header"), report, now)
    main = add_child(body, "main")
    for name, title, fill in SECTIONS:
        section = add_child(main, "section", id=name, aria_labelledby=f"{name}-title")
        add_child(section, "h2", title, id=f"{name}-title")
        fill(section, report)
    return serialize_page(root)


def _header(header: Element, report: ReportModel, now: float) -> None:
    add_child(header, "h1", report.name)
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M")
    add_child(header, "p", f"Report of {when} UTC by slipway {version('slipway')}", class_="soft")
    times = [report.times[run.id] for run in report.runs]
    costs = [time.usd for time in times if time.usd is not None]
    states = [run.state for run in report.runs]
    facts = {
        "settings": len(report.settings),
        "runs": len(states),
        "state": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "interruptions": sum(len(time.marks) for time in times),
        "pod hours": f"{sum(time.pod_hours or 0.0 for time in times):.2f}",
        "cost": f"${sum(costs):,.2f}" if costs else "not billed or unknown",
    }
    listed = add_child(header, "dl")
    for name, value in facts.items():
        fact = add_child(listed, "div")
        add_child(fact, "dt", name)
        add_child(fact, "dd", value)
    links = add_child(add_child(header, "nav", aria_label="Sections"), "ul")
    for name, title, _ in SECTIONS:
        add_child(add_child(links, "li"), "a", title, href=f"#{name}")
