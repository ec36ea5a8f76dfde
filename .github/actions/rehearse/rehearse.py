"""Plan and rehearse an experiment in a GitHub workflow, and write a report in Markdown.

Reads WORDS and MINUTES. Writes the report to the job's summary and to a file, and `passed`, `report` and `marker` to
the step's outputs. The marker is the report's first line, by which the next comment replaces this one.
"""

import hashlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SIGNS = {"error": "✗", "warning": "!", "note": "·"}
SHOWN_LINES = 40
PLACEHOLDER = "your-project"


def main() -> int:
    words = shlex.split(os.environ["WORDS"])
    marker = f"<!-- slipway rehearsal {hashlib.sha256(os.environ['WORDS'].encode()).hexdigest()[:12]} -->"
    plan, plan_error = slipway("plan", "--json", *words, limit=600)
    rehearsed, log = slipway("rehearse", "--json", *words, limit=60 * float(os.environ["MINUTES"]))
    facts: list[dict[str, Any]] = rehearsed.get("facts", [])
    passed = bool(facts) and all(fact["proven"] for fact in facts)
    lines = [marker, f"### {'✓' if passed else '✗'} Slipway rehearsal of {code(shlex.join(words))}", ""]
    lines += [*describe_plan(plan)] if plan else ["The plan failed:", "", *block(plan_error)]
    lines += ["", "**Rehearsal** on an emulated pod, scaled down, with a preemption:", ""]
    lines += [f"- {'✓' if fact['proven'] else '✗'} {text(fact['words'])}" for fact in facts]
    lines += [] if passed else ["", *block(log)]
    lines += ["", "Not rehearsed: Google's capacity and quota, real weights and data, chip memory."]
    report = Path(os.environ["RUNNER_TEMP"]) / f"slipway-{marker.split()[3]}.md"
    report.write_text("\n".join(lines) + "\n")
    with Path(os.environ["GITHUB_STEP_SUMMARY"]).open("a") as summary:
        summary.write(report.read_text())
    with Path(os.environ["GITHUB_OUTPUT"]).open("a") as outputs:
        outputs.write(f"passed={str(passed).lower()}\nreport={report}\nmarker={marker}\n")
    print(report.read_text())
    return 0 if passed else 1


def slipway(*arguments: str, limit: float) -> tuple[dict[str, Any], str]:
    """Run a verb with --json; return its document, empty if there is none, and what it said besides."""
    # The rehearsed program is code of the pull request: it gets no file through which it could change later steps.
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("GITHUB_", "ACTIONS_"))}
    environment.setdefault("GOOGLE_CLOUD_PROJECT", PLACEHOLDER)
    argv = [sys.executable, "-P", "-m", "slipway", *arguments]
    try:
        done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return {}, f"no end after {limit / 60:g} minutes (input `minutes` of the action)"
    return last_document(done.stdout), done.stderr


def last_document(output: str) -> dict[str, Any]:
    """Return the output as one JSON document, or its last line, which follows lines of progress."""
    for candidate in (output, *reversed(output.splitlines()[-1:])):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        return found if isinstance(found, dict) else {}
    return {}


def describe_plan(plan: dict[str, Any]) -> Iterator[str]:
    """Yield the plan's price and findings. What needs credentials was not asked, and is no news."""
    network = plan["usd_per_hour_network"]
    price = f"${plan['usd_per_hour']:.2f} per hour" + (f" and ${network:.2f} for the network" if network else "")
    yield "| | |"
    yield "|---|---|"
    yield f"| run | {code(plan['run'])} |"
    yield f"| pod | {code(plan['pod'])}, {len(plan['resources'])} resources |"
    yield f"| price | {price} |"
    if estimate := plan["estimate"]:
        yield f"| estimate | ${estimate['usd']:.2f}, {estimate['hours']:.1f} h: {text(estimate['basis'])} |"
    yield ""
    for finding in plan["findings"]:
        if finding["check"] != "credentials":
            yield f"- {SIGNS.get(finding['severity'], '·')} {code(finding['key'])}: {text(finding['words'])}"


def code(words: str) -> str:
    return f"`{words.replace('`', chr(39)).replace('|', chr(166))}`"


def text(words: str) -> str:
    """Escape a text of a user's program or config: it must not mention people or hold HTML."""
    return words.replace("<", "&lt;").replace("@", "@\u200b").replace("|", "\\|").replace("\n", " ")


def block(output: str) -> Iterator[str]:
    """Yield the end of an output as a block of code."""
    yield "```text"
    yield from (line.replace("```", "'''") for line in output.splitlines()[-SHOWN_LINES:])
    yield "```"


if __name__ == "__main__":
    sys.exit(main())
