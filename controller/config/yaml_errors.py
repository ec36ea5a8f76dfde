"""What is wrong with a text that is no YAML: the line that has to change, and how, which the parser does not say."""

import re
import unicodedata

import yaml

WRONG_SPACE = re.compile(r"[^\S \t\n\r]|[\u200b\u2060\ufeff]")
"""Spaces that only look like one, as editors and web pages leave them."""
SPACED = re.compile(r"^[ \t]*(?:- *)?(?:[\w./-]+ *:)?[ \t]*(?P<space>[^\S \t\n\r]|[\u200b\u2060\ufeff])")
CLOSED_UP = re.compile(r"\s*(?:- +)?(?P<key>[A-Za-z_][\w.]*)(?P<sign>:| *= *)(?P<value>[^\s=].*)?")
"""`key:value` without its space, or `key = value`."""
LONE = re.compile(r"\s*(?P<key>[A-Za-z_][\w.]*)(?P<value> +[^:#]+)?\s*(#.*)?")
"""A line without a colon."""
CAUSES: tuple[tuple[str, str], ...] = (
    (r"expected escape sequence|unknown escape character", "a backslash is \\\\ in double quotes; use single ones"),
    (r"quoted scalar", "^the quote that opens here is not closed"),
    (r"found '<stream end>'", "a bracket or quote is not closed here, or a value is missing"),
    (r"character '\\t'", "a tab stands here; indent with spaces"),
    (r"found character '(?P<sign>.)'", "quote a text that begins with {sign}: \"{sign}…\""),
    (r"a flow (?P<kind>mapping|sequence) expected", "^the {sign} that opens here is not closed, or a comma is missing"),
    (r"found '\?'", "??? is no value; write it"),
    (r"found another document", "--- begins a second document; a file has one"),
    (r"undefined alias '(?P<sign>.*)'", "*{sign} stands for no &{sign} above; quote a text that begins with *"),
    (r"(?:scanning|an?) (?:alias|anchor)", "quote a text that begins with & or *"),
    (r"constructor for the tag '!include'", "!include is of no use here; name the file in `defaults`"),
    (r"constructor for the tag|undefined tag|scanning a tag", "quote a text that begins with !"),
    (r"found '(?P<sign>[\]}])'", "{sign} closes nothing that is open"),
    (r"found '<scalar>'", "text stands behind a closing quote; a quote inside is doubled: 'it''s'"),
    (r"for merging", "<< takes the alias of a section: <<: *name"),
    (r"block sequence|sequence entries|found '-'|block collection", "the `-` of a list stand in one column, below "
     "their key"),
    (r"<block end>|block mapping", "is indented unlike what stands above it; keys of one section stand in one column"),
)  # fmt: skip
"""What the parser says, and the cure; one that begins with ^ is for the line where what is wrong begins."""


def explain(error: yaml.YAMLError, text: str) -> tuple[int, str]:
    """Return the number of the line that is wrong and what to do there; 0 for the whole file."""
    lines = text.splitlines()
    if isinstance(error, yaml.reader.ReaderError):
        line = text[: error.position].count("\n") + 1
        return line, f"the character U+{ord(text[error.position]):04X} cannot stand in YAML; remove it"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if not isinstance(error, yaml.MarkedYAMLError) or mark is None:
        return 0, " ".join(str(error).split())
    for number, line in enumerate(lines[: mark.line + 1], 1):
        if found := SPACED.match(line):
            return number, wrong_space(found["space"])
        if re.match(r"(<{7}|={7}|>{7})(?: |$)", line):
            return number, "a conflict of git is not resolved here"
    said = " ".join(f"{error.context or ''} {error.problem or ''}".split())
    if "mapping values are not allowed" in said or "could not find expected ':'" in said:
        at = error.context_mark.line if error.context_mark else mark.line
        return _colon(lines, at)
    for pattern, cure in CAUSES:
        if found := re.search(pattern, said):
            named = found.groupdict()
            if "kind" in named:
                if (number := mark.line) < len(lines) and re.search(r"(?<![\"'\w])\$\{", lines[number]):
                    return number + 1, 'quote a ${…} inside { } or [ ]: "${KEY}"'
                named["sign"] = "{" if named["kind"] == "mapping" else "["
            at = error.context_mark if cure[0] == "^" and error.context_mark else mark
            return min(at.line + 1, max(len(lines), 1)), cure.lstrip("^").format(**named)
    return mark.line + 1, said


def wrong_space(space: str) -> str:
    name = unicodedata.name(space, "a control character").lower()
    return f"a {name} (U+{ord(space):04X}) stands here, which only looks like a space; type a space"


def closed_up(text: str) -> str:
    """Say how `key:value` or `key = value` is written; empty for another text."""
    found = CLOSED_UP.fullmatch(text.split("\n")[0])
    if found is None or text.startswith(("http", "gs:", "hf:")) or (found["value"] or "").startswith("//"):
        return ""
    value = (found["value"] or "VALUE").split()[0]
    if found["sign"] == ":":
        return f"a space belongs behind the colon: `{found['key']}: {value}`"
    return f"a colon sets a value: `{found['key']}: {value}`"


def _colon(lines: list[str], at: int) -> tuple[int, str]:
    """Say which line lacks its colon, or the space behind it, where a colon was not expected, or was."""
    above = next((number for number in range(at - 1, -1, -1) if lines[number].strip()), None)
    for number in (at, above) if len(re.findall(r":(?:\s|$)", lines[at])) < 2 else ():
        if number is None or re.search(r":(\s|$)", lines[number]):
            continue
        if said := closed_up(lines[number]):
            return number + 1, said
        if lone := LONE.fullmatch(lines[number]):
            behind = f" {lone['value'].strip()}" if lone["value"] else ""
            return number + 1, f"a colon is missing: `{lone['key']}:{behind}`"
    if above is not None and len(re.findall(r":(?:\s|$)", lines[at])) < 2:
        return at + 1, f"is indented deeper than line {above + 1}, which has a value already"
    if found := re.match(r"\s*- +override: *(/?\w+: *\S+)", lines[at]):
        return at + 1, f"no colon stands behind override: `- override {found[1]}`"
    return at + 1, "quote a text with a colon and a space in it"
