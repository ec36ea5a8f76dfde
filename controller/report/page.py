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
from controller.report.curves import curve, points_of, rounded
from controller.report.markup import add, page, shown
from controller.report.model import Study

PARTS = (
    ("curves", "Curves", sections.curves),
    ("ablation", "Settings compared", sections.ablation),
    ("time", "Time and cost", sections.time),
    ("transcripts", "Transcripts", sections.transcripts),
    ("runs", "Runs", sections.runs),
)


def render(study: Study, now: float) -> str:
    """The page.

    Args:
        now: when it is made, seconds since the epoch.
    """
    style, script = (files("controller.report").joinpath(f"page.{kind}").read_text() for kind in ("css", "js"))
    root = Element("html", {"lang": "en"})
    head = add(root, "head")
    add(head, "meta", charset="utf-8")
    add(head, "meta", http_equiv="Content-Security-Policy", content=policy(style, script))
    add(head, "meta", name="viewport", content="width=device-width, initial-scale=1")
    add(head, "meta", name="referrer", content="no-referrer")
    add(head, "title", f"{study.name}: report")
    add(head, "link", rel="icon", href="data:,")
    add(head, "style", style)
    body = add(root, "body")
    add(body, "a", "Skip to the curves", class_="skip", href="#curves")
    _header(add(body, "header"), study, now)
    main = add(body, "main")
    for _, _, part in PARTS:
        part(main, study)
    add(body, "script", _data(study), type="application/json", id="data")
    add(body, "script", script)
    return page(root)


def policy(style: str, script: str) -> str:
    """The Content-Security-Policy."""

    def hashed(text: str) -> str:
        return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"

    rules = ["default-src 'none'", f"style-src {hashed(style)}", f"script-src {hashed(script)}", "img-src data:"]
    rules += ["base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'", "trusted-types 'none'"]
    return "; ".join(rules)


def _header(header: Element, study: Study, now: float) -> None:
    add(header, "h1", study.name)
    when = datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%d %H:%M")
    add(header, "p", f"Report of {when} UTC by slipway {version('slipway')}", class_="soft")
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
    listed = add(header, "dl", class_="facts")
    for name, value in facts.items():
        fact = add(listed, "div")
        add(fact, "dt", name)
        add(fact, "dd", value)
    links = add(add(header, "nav", aria_label="Sections"), "ul")
    for name, title, _ in PARTS:
        add(add(links, "li"), "a", title, href=f"#{name}")


def _data(study: Study) -> str:
    """What page.js draws. Steps that curves share are there once."""
    points = points_of(study.metrics, study.settings)
    grids: dict[tuple[float, ...], int] = {}
    metrics = []
    for metric in study.metrics:
        lines = []
        for setting in study.settings:
            found = curve(setting, metric, points)
            if found is None:
                lines.append(None)
                continue
            line: dict[str, object] = {"x": grids.setdefault(found.steps, len(grids)), "m": rounded(found.mean)}
            if len(setting.counted) > 1:
                line |= {"l": rounded(found.low), "h": rounded(found.high)}
            lines.append(line)
        metrics.append({"name": shown(sections.name_of(metric)), "lines": lines})
    told = [[int(step) if step.is_integer() else step for step in steps] for steps in grids]
    text = json.dumps({"grids": told, "metrics": metrics}, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
