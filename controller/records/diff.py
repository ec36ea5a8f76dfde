"""Compare two runs: config, code, packages, data, machine and results."""

from typing import Any

from controller.records.recorder import RunRecord
from controller.records.table import flat

RecordDiff = dict[str, dict[str, tuple[Any, Any]]]


def diff_records(old: RunRecord, new: RunRecord) -> RecordDiff:
    """Return the differing keys by section, each with both values, None if one run lacks the key.

    Each record carries its row of the table of runs under `row`.
    """
    sections = {
        "config": lambda d: flat(d["config"]),
        "code": lambda d: {"sha256": d["code_sha256"], **_git(d)},
        "packages": lambda d: _worker_0(d).get("packages", {}),
        "data": lambda d: {f"{asset['kind']} {asset['name']}": asset["identity"] for asset in d["assets"]},
        "machine": lambda d: flat({key: _worker_0(d).get(key) for key in MACHINE_KEYS}) | {"slipway": d["slipway"]},
        "price": lambda d: d.get("prices", {}),
        "result": lambda d: flat({key: d["row"].get(key) for key in RESULT_KEYS}),
    }
    found = {}
    for name, of in sections.items():
        a, b = of(old), of(new)
        found[name] = {key: (a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)}
    return {name: unequal for name, unequal in found.items() if unequal}


MACHINE_KEYS = ("devices", "python", "image_fingerprint", "runtime_version")
RESULT_KEYS = ("state", "attempts", "seconds", "usd", "metrics")


def format_diff(old: str, new: str, found: RecordDiff) -> list[str]:
    lines = [f"- {old}", f"+ {new}"]
    for section, keys in found.items():
        lines += ["", section]
        for key, (a, b) in sorted(keys.items()):
            lines.append(f"  {key}: {_format_value(a)} -> {_format_value(b)}")
    return lines if found else [*lines, "", "no differences"]


def _worker_0(document: RunRecord) -> dict[str, Any]:
    """Return what the launch knew of worker 0; a record that was written again after damage lacks it."""
    return document.get("worker_0", {})


def _git(document: RunRecord) -> dict[str, Any]:
    git = document.get("git", {})
    return {key: git.get(key) for key in ("commit", "dirty")}


def _format_value(value: Any) -> str:
    return "none" if value is None else str(value)
