"""The page as one file: it asks for nothing, and its policy lets it run only its own script.

https://www.w3.org/TR/CSP3/: style and script are named by their hashes; no request of any kind is allowed.
"""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from xml.etree.ElementTree import Element

from controller.report import sections
from controller.report.curves import build_curve, points_per_curve, round_values
from controller.report.markup import add_child, printable_text, serialize_page
from controller.report.model import ReportModel

SECTIONS = (
    ("curves", "Curves", sections.curves_section),
    ("ablation", "Settings compared", sections.ablation_section),
    ("time", "Time and cost", sections.time_section),
    ("transcripts", "Transcripts", sections.transcripts_section),
    ("runs", "Runs", sections.runs_section),
)


def render(study: ReportModel, now: float) -> str:
    """The page.

    Args:
        now: when it is made, seconds since the epoch.
    """
    style, script = (files("controller.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js"))
    root = Element("html", {"lang": "en"})
    head = add_child(root, "head")
    add_child(head, "meta", charset="utf-8")
    add_child(head, "meta", http_equiv="Content-Security-Policy", content=policy(style, script))
    add_child(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add_child(head, "meta", name="referrer", content="no-referrer")
    add_child(head, "title", f"{study.name}: report")
    add_child(head, "link", rel="icon", href="data:,")
    add_child(head, "style", style)
    body = add_child(root, "body")
    add_child(body, "a", "Skip to the curves", class_="skip", href="#curves")
    _header(add_child(body, "header"), study, now)
    main = add_child(body, "main")
    for _, _, part in SECTIONS:
        part(main, study)
    add_child(body, "script", _chart_data(study), type="application/json", id="data")
    add_child(body, "script", script)
    return serialize_page(root)


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy."""

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = ["default-src 'none'", f"style-src {hashed(style)}", f"script-src {hashed(script)}", "img-src data:"]
    rules += ["base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"]
    return "; ".join(rules)


def _header(header: Element, study: ReportModel, now: float) -> None:
    add_child(header, "h1", study.name)
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M")
    add_child(header, "p", f"Report of {when} UTC by slipway {version('slipway')}", class_="soft")
    times = [study.times[run.id] for run in study.runs]
    hours = sum(time.pod_hours or 0.0 for time in times)
    dollars = [time.usd for time in times if time.usd is not None]
    states = [run.state for run in study.runs]
    facts = {
        "settings": len(study.settings),
        "runs": len(states),
        "state": ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states)),
        "interruptions": sum(len(time.marks) for time in times),
        "pod hours": f"{hours:.2f}",
        "cost": f"${sum(dollars):,.2f}" if dollars else "not billed, or not known",
    }
    listed = add_child(header, "dl", class_="facts")
    for name, value in facts.items():
        fact = add_child(listed, "div")
        add_child(fact, "dt", name)
        add_child(fact, "dd", value)
    links = add_child(add_child(header, "nav", aria_label="Sections"), "ul")
    for name, title, _ in SECTIONS:
        add_child(add_child(links, "li"), "a", title, href=f"#{name}")


def _chart_data(study: ReportModel) -> str:
    """What page.js draws. Steps that curves share are there once."""
    points = points_per_curve(study.metrics, study.settings)
    grids: dict[tuple[float, ...], int] = {}
    metrics = []
    for metric in study.metrics:
        lines = []
        for setting in study.settings:
            found = build_curve(setting, metric, points)
            if found is None:
                lines.append(None)
                continue
            line: dict[str, object] = {"x": grids.setdefault(found.steps, len(grids)), "m": round_values(found.mean)}
            if len(setting.counted) > 1:
                line |= {"l": round_values(found.low), "h": round_values(found.high)}
            lines.append(line)
        metrics.append({"name": printable_text(sections.metric_name(metric)), "lines": lines})
    told = [[int(step) if step.is_integer() else step for step in steps] for steps in grids]
    text = json.dumps({"grids": told, "metrics": metrics}, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
