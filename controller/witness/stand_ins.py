"""Replace what identifies a project or a person by stand-ins: the same value always gets the same one.

A stand-in has the syntax of what it replaces, so that a recording can be replayed: `project-1`, `192.0.2.1`,
`account-1@project-1.iam.gserviceaccount.com`.
"""

import base64
import binascii
import itertools
import json
import re
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote, unquote

from conf.strict_json import dumps
from controller.gcp.answers import is_labelled

STAND_INS: dict[str, Callable[[int], str]] = {
    "project": lambda n: f"project-{n}",
    "project number": lambda n: f"{100000000000 + n}",
    "organization": lambda n: f"{200000000000 + n}",
    "account": lambda n: f"account-{n}",
    "account id": lambda n: f"{10**20 + n}",
    "mail": lambda n: f"person-{n}@example.com",
    "domain": lambda n: f"domain-{n}.example.com",
    "bucket": lambda n: f"bucket-{n}",
    "billing account": lambda n: f"000000-000000-{n:06X}",
    "address": lambda n: f"{('192.0.2', '198.51.100', '203.0.113')[(n - 1) // 250 % 3]}.{(n - 1) % 250 + 1}",
    "IPv6 address": lambda n: f"2001:db8::{n:x}",
    "key": lambda n: f"AAAAstandin{n:04}" + "A" * 53,
    "token": lambda n: f"TOKEN-{n}",
    "user": lambda n: f"user-{n}",
    "secret": lambda n: f"SECRET-{n}",
}
"""What is replaced, and by what; `n` counts from 1."""
KEPT = frozenset({"169.254.169.254", "0.0.0.0", "127.0.0.1", "255.255.255.255"})  # noqa: S104 - not bound to
"""Addresses that identify nobody."""
COMMON_NAMES = frozenset({
    "root", "slipway", "ubuntu", "user", "admin", "debian", "runner", "default", "localhost", "tpu", "gcp", "dev", "ml",
    "ai", "us", "eu",
})  # fmt: skip
"""User names and host names that identify nobody."""
PUBLIC_DOMAINS = frozenset({"gmail.com", "googlemail.com", "outlook.com"})
SHORTEST_SECRET, SHORTEST_USER = 4, 2
ADDRESS = re.compile(r"(?<![\d.])(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)(?![\d.]|/(?!32)\d)")
"""An IPv4 address; a range such as 10.0.0.0/20 is configuration, and stays."""
PATTERNS: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("secret", re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?-----END [A-Z ]*PRIVATE KEY-----", re.DOTALL)),
    ("token", re.compile(
        r"\b(?:ya29\.[\w.-]{8,}|1//[\w-]{20,}|eyJ[\w-]{8,}\.[\w-]+(?:\.[\w-]*)?|hf_\w{16,}|gh[pousr]_\w{16,}|AIza[\w-]{30,}"
        r"|sk-[\w-]{20,})")),
    ("token", re.compile(r"(?<=Bearer )[\w.~+/=-]{8,}")),
    ("key", re.compile(r"\bAAAA[\w+/]{40,}={0,2}")),
    ("mail", re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)+\b")),
    ("domain", re.compile(r"(?<=\bdomain:)[\w-]+(?:\.[\w-]+)+")),
    ("billing account", re.compile(r"\b[0-9A-F]{6}-[0-9A-F]{6}-[0-9A-F]{6}\b")),
    ("account id", re.compile(r"\b1\d{20}\b")),
    ("project number", re.compile(  # third: operations of Service Usage, operations/acf.p2-NUMBER-ID
        r"(?<=projects/)\d{6,}\b|(?<=service-)\d{6,}\b|(?<=\.p\d-)\d{6,}\b|\b\d{6,}(?=-compute@)")),
    ("organization", re.compile(r"(?<=organizations/)\d{4,}|(?<=folders/)\d{4,}")),
    ("user", re.compile(
        r"(?<![\w.\\-])[A-Za-z_][\w.-]*(?=:(?:ssh-(?:rsa|dss|ed25519)|ecdsa-sha2-[\w-]+|sk-[\w.@-]+) )")),
    ("address", ADDRESS),
    ("IPv6 address", re.compile(r"(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![\w:.])"
                                r"|(?<![\w:.])(?:[0-9a-fA-F]{1,4}:){1,6}(?::[0-9a-fA-F]{1,4}){1,6}(?![\w:.])")),
)  # fmt: skip
"""What is recognized by its form."""
KINDS_BY_KEY = {
    "projectNumber": "project number", "uniqueId": "account id", "oauth2ClientId": "account id", "bucket": "bucket",
    "username": "user", "accountId": "account",
}  # fmt: skip
"""JSON keys whose values are replaced whatever their form."""
SECRET_KEYS = frozenset({
    "payload", "privateKeyData", "accessToken", "access_token", "refresh_token", "id_token", "gecos", "given_name",
    "family_name", "picture",
})  # fmt: skip
"""JSON keys whose values are removed."""
REMOVED = "removed"
BASE64 = re.compile(r"[\w+/-]{16,}={0,2}")
MAX_DEPTH = 6
"""Nested encodings that are looked into."""


class StandIns:
    """The values seen so far and their stand-ins. `learn` everything first, then `scrub` it."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}
        self._codes: dict[str, tuple[str, ...]] = {}
        """What tells of a value in base64."""
        self._counts: dict[str, int] = {}
        self._pattern: re.Pattern[str] | None = None

    def add(self, kind: str, value: str | None) -> None:
        """Replace this value from now on, unless it is too short or too common to identify anything."""
        shortest = SHORTEST_USER if kind == "user" else SHORTEST_SECRET
        if not value or len(value) < shortest or value in KEPT or value.lower() in COMMON_NAMES:
            return
        if value in self._known or value in self._known.values():
            return
        self._counts[kind] = self._counts.get(kind, 0) + 1
        self._known[value] = STAND_INS[kind](self._counts[kind])
        self._codes[value] = tuple(_encodings(value))
        self._pattern = None

    def learn(self, value: Any, key: str = "") -> None:
        """Find what has to be replaced in JSON data, at any depth and in nested JSON, base64 and URLs."""
        if isinstance(value, dict):
            self._learn_object(value)
            for name, inner in value.items():
                self.learn(name)
                if name not in SECRET_KEYS:
                    self.learn(inner, name)
        elif isinstance(value, list | tuple):
            for inner in value:
                self.learn(inner, key)
        elif isinstance(value, int | str):
            if key in KINDS_BY_KEY:
                self.add(KINDS_BY_KEY[key], str(value))
            for text in _forms(value) if isinstance(value, str) else ():
                for kind, pattern in PATTERNS:
                    for found in pattern.finditer(text):
                        self._add_match(kind, found[0])

    def _learn_object(self, value: dict[str, Any]) -> None:
        """Find what only its neighbours tell: the name of a bucket or a person, the parent of a project."""
        for kind, key, applies in (
            ("bucket", "name", value.get("kind") == "storage#bucket"),
            ("organization", "id", value.get("type") in ("organization", "folder")),
            ("secret", "name", "given_name" in value),
        ):
            if applies and isinstance(found := value.get(key), str | int):
                self.add(kind, str(found))

    def _add_match(self, kind: str, value: str) -> None:
        if kind != "mail":
            self.add(kind, value)
            return
        name, _, domain = value.partition("@")
        if domain.endswith("gserviceaccount.com"):
            if not re.match(r"service-\d+$|\d+-compute$|p\d+-", name):  # Google's own accounts hold only a number
                self.add("account", name)
        elif not domain.endswith("example.com"):
            self.add("mail", value)
            if domain not in PUBLIC_DOMAINS:
                self.add("domain", domain)

    def scrub(self, value: Any) -> Any:
        """Return JSON data with every known value replaced; keys included."""
        if isinstance(value, dict):
            return {
                self.scrub(name): REMOVED if name in SECRET_KEYS else self.scrub(inner) for name, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.scrub(inner) for inner in value]
        if isinstance(value, str):
            return self._scrub_text(value, MAX_DEPTH)
        if isinstance(value, int) and not isinstance(value, bool) and str(value) in self._known:
            return int(self._known[str(value)]) if self._known[str(value)].isdigit() else self._known[str(value)]
        return value

    def _scrub_text(self, text: str, depth: int) -> str:
        if depth == 0:
            return self._replace(text)
        if (data := _parsed(text)) is not None:
            return text if (clean := self.scrub(data)) == data else dumps(clean)
        text = self._replace(text)
        if "%" in text and (plain := unquote(text)) != text and (clean := self._scrub_text(plain, depth - 1)) != plain:
            text = quote(clean, safe="/:?=&@,.~-_")
        text = BASE64.sub(lambda found: self._scrub_base64(found[0], depth), text)
        for code in (code for codes in self._codes.values() for code in codes):
            text = text.replace(code, REMOVED)
        return text

    def _scrub_base64(self, text: str, depth: int) -> str:
        plain = _decoded(text)
        if plain is None or (clean := self._scrub_text(plain, depth - 1)) == plain:
            return text
        return base64.b64encode(clean.encode()).decode()

    def _replace(self, text: str) -> str:
        if self._pattern is None:
            longest = sorted(self._known, key=len, reverse=True)
            self._pattern = re.compile("|".join(map(_as_word, longest)) or r"(?!)")
        return self._pattern.sub(lambda found: self._known[found[0]], text)

    def leaks(self, text: str) -> list[str]:
        """Return the stand-ins of the known values that a finished text still holds, in any of their forms."""
        forms = [(form, form.lower()) for form in _forms(text)]
        return sorted(
            stand_in
            for value, stand_in in self._known.items()
            if any(_holds(form, lower, value) for form, lower in forms)
            or any(code in text for code in self._codes[value])
        )


def _as_word(value: str) -> str:
    """Return a pattern of a value as a word of its own; a hyphen or dot does not end a short one (us-central1)."""
    if len(value) < SHORTEST_SECRET:
        return rf"(?<![\w.-]){re.escape(value)}(?![\w-]|\.\w)"
    return rf"(?<![A-Za-z0-9]){re.escape(value)}(?![A-Za-z0-9])"


def _holds(text: str, lower: str, value: str) -> bool:
    """Return whether a text, also given in lower case, holds a value; a short one only as a word of its own."""
    if len(value) >= 8:  # longer ones are no part of a word
        return value.lower() in lower
    return value in text and re.search(_as_word(value), text) is not None


def _encodings(value: str) -> Iterator[str]:
    """Yield base64 of a value at each of its three alignments, without the characters that its neighbours change."""
    if len(value) < 9:  # too few characters would remain
        return
    for shift in range(3):
        encoded = base64.b64encode(b"\0" * shift + value.encode()).decode().rstrip("=")
        yield encoded[(0, 2, 3)[shift] : len(encoded) - 1]


def _forms(text: str, depth: int = MAX_DEPTH) -> Iterator[str]:
    """Yield a text and everything that is encoded in it: URLs, nested JSON strings, base64."""
    yield text
    if depth == 0:
        return
    if "%" in text and (plain := unquote(text)) != text:
        yield from _forms(plain, depth - 1)
    if (data := _parsed(text)) is not None:
        for inner in _strings(data):
            yield from _forms(inner, depth - 1)
        return
    if "\\" in text and (plain := text.replace("\\n", "\n").replace('\\"', '"').replace("\\\\", "\\")) != text:
        yield from _forms(plain, depth - 1)
    for found in BASE64.finditer(text):
        if (plain := _decoded(found[0])) is not None:
            yield from _forms(plain, depth - 1)


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, dict | list):
        for part in itertools.chain.from_iterable(data.items()) if isinstance(data, dict) else data:
            yield from _strings(part)
    elif data is not None:
        yield str(data)


def _parsed(text: str) -> Any:
    """Return the JSON object or array that a text is, or None."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _decoded(text: str) -> str | None:
    """Return the readable text that base64, of either alphabet, encodes; None if it is something else."""
    bare = text.rstrip("=")
    try:
        decoded = base64.b64decode(
            bare + "=" * (-len(bare) % 4), altchars=b"-_" if {"-", "_"} & set(bare) else None, validate=True
        ).decode()
    except (binascii.Error, ValueError):
        return None
    return decoded if all(c.isprintable() or c in "\n\t\r" for c in decoded) else None


KINDS_OF_OTHERS = frozenset({
    "disks", "instances", "instanceGroupManagers", "instanceTemplates", "resourcePolicies", "buckets", "nodes",
    "queuedResources",
})  # fmt: skip
"""Kinds of resources of which lists are recorded without the items that lack our label."""
METADATA = frozenset({"metadata", "commonInstanceMetadata"})
"""Fields of nodes, VMs and the project that hold what people set."""


def omit_others(method_id: str, document: Any) -> Any:
    """Return the JSON of a request or an answer without the resources of others and the values of their metadata."""
    kind, verb = method_id.split(".")[-2:]
    if isinstance(document, dict) and kind in KINDS_OF_OTHERS and verb in ("list", "aggregatedList"):
        document = _only_ours(document, kind)
    return _clean(document) if method_id.startswith(("compute.", "tpu.")) else document


def _only_ours(document: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return a list without the items of others; Google omits the field of an empty list.

    One that is grouped by zone has the zones that had something else.
    """
    field = next((field for field in ("items", kind) if field in document), "")
    listed, rest = document.get(field), {name: value for name, value in document.items() if name != field}
    if isinstance(listed, dict):
        zones = {zone: _only_ours(one, kind) for zone, one in listed.items() if isinstance(one, dict)}
        return {**rest, field: {zone: one for zone, one in zones.items() if one}}
    if not isinstance(listed, list):
        return document
    ours = [item for item in listed if isinstance(item, dict) and _is_ours(item)]
    return {**rest, field: ours} if ours else rest


def _is_ours(item: dict[str, Any]) -> bool:
    """Return whether an item carries our label; a queued resource has it on its nodes, a template on its VMs."""
    tpu, vms = item.get("tpu"), item.get("properties")
    specs = tpu.get("nodeSpec", []) if isinstance(tpu, dict) else []
    inner = [vms if isinstance(vms, dict) else {}, *(spec.get("node", {}) for spec in specs)]
    return any(isinstance(one.get("labels"), dict) and is_labelled(one) for one in (item, *inner))


def _clean(value: Any) -> Any:
    """Return JSON data without the values of metadata, at any depth."""
    if isinstance(value, list):
        return [_clean(inner) for inner in value]
    if not isinstance(value, dict):
        return value
    if _is_operation(value):
        return {name: inner if name == "metadata" else _clean(inner) for name, inner in value.items()}
    return {
        name: _clean_metadata(inner) if name in METADATA and isinstance(inner, dict) else _clean(inner)
        for name, inner in value.items()
    }


def _is_operation(value: dict[str, Any]) -> bool:
    """Return whether this is a long-running operation, whose metadata Google sets."""
    name, metadata = value.get("name"), value.get("metadata")
    named = isinstance(name, str) and ("/operations/" in name or name.startswith("operations/"))
    return named or "done" in value or (isinstance(metadata, dict) and "@type" in metadata)


def _clean_metadata(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return metadata in the form of the TPU API, an object, or of Compute Engine, a list of keys and values."""
    items = metadata.get("items")
    if isinstance(items, list):
        shown = ({**item, "value": _shown(item.get("key", ""), item.get("value"))} for item in items)
        return {**metadata, "items": [*shown]}
    if metadata.get("kind") == "compute#metadata":  # without items
        return metadata
    return {key: _shown(key, value) for key, value in metadata.items()}


def _shown(key: str, value: Any) -> str:
    """Return what is recorded of one value: switches, and SSH keys without the comments, which name people."""
    if key == "ssh-keys" and isinstance(value, str):
        return "\n".join(" ".join(line.split()[:2]) for line in value.splitlines())
    return value if isinstance(value, str) and value.lower() in ("true", "false") else REMOVED
