r"""Extract the answer of a response.

An answer is marked: `#### 18`, `\boxed{18}`, `\fbox{18}`; or stated: "the answer is 18", up to the end of the sentence
or the reason it gives; or else it is the last number in the response. Several answers that are stated together, in a
list or in boxes with only a comma, `and` or `or` between, are one. The last one wins, with two exceptions, since a
model without a chat template seldom knows when to stop: a box that is never closed, or holds no answer (`\boxed{}`,
`\boxed{answer}`), does not count; nor does what the response answers after it has gone on to another question of its
own making. Text between `<think>` and `</think>` is never searched, nor is text after a `<think>` that is not closed.
"""

import re

MAX_RESPONSE_CHARS = 50_000
"""Characters of a response to search, from its end. Every pattern here takes time linear in them."""
MAX_STATEMENT_CHARS = 1000
"""Characters of a statement to search for its end; a longer one is no answer."""

ANOTHER_QUESTION = re.compile(
    r"^[ \t]*(?:\#+[ \t]*)?\**(?:question|problem|exercise|user|human|q)(?:[ \t]*\d+)?\**[ \t]*:"
    r"|<\|?(?:start_of_turn|end_of_turn|im_start|im_end|endoftext|eot_id|start_header_id|eos|bos)\|?>|</s>"
    r"|(?:\n[ \t\r]*){3,}",
    re.IGNORECASE | re.MULTILINE,
)
HASH_ANSWER = re.compile(r"####[ \t]*([^\n]*)")
HEADING = re.compile(
    r"[\s*_]*(?:(?:step|part|case|phase|stage|section|method|approach|example)\s*\d+\b.*|[1-9][.)]\s+[A-Z].*"
    r"|(?:conclusion|solution|explanation|reasoning|summary|verification|check|calculations?|analysis|steps"
    r"|notes?)\W*)",
    re.IGNORECASE,
)
"""What Markdown has behind `####` where it is no answer: `Step 3: add them`, `2. Add them`, `Conclusion`."""
BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)\s*\{)|\\boxed[ \t]+(?P<bare>[^\s{}\\$]+)|\\[{}]|(?P<open>\{)|(?P<close>\})"
)
NO_ANSWER = re.compile(
    r"(?:\\text\s*\{)?\W*+(?:(?:your|the|final|numeric|numerical|correct)\s+)*"
    r"(?:answer|result|number|value|[lc]?dots)?(?:\s*here)?\W*",
    re.IGNORECASE,
)
BETWEEN_BOXES = re.compile(
    r"\}[\s$]{0,9}(?:,?\s{0,3}\b(?:and|(?P<or>or))\b|,)[\s$]{0,9}(?:[a-zA-Z]\s{0,3}=\s{0,3})?"
    r"\\(?:boxed|fbox|framebox)\s{0,3}\{"
)
INVISIBLE = re.compile("[\u00ad\u200b-\u200f\u2060\ufe0e\ufe0f\ufeff]")
ANSWER_PHRASE = re.compile(
    r"\b(?:answer(?P<plural>s)?|(?:correct|right|best)\s(?:option|choice))\*{0,3}"
    r"(?:\s(?:to|for)\s(?:the|this|that)\s(?:[a-z]{1,12}\s)?(?:question|problem|puzzle))?"
    r"(?:\s+(?:is|are|(?:will|would|must|should)\s+be|equals)\b|\s*=|\s*:)+(?:\*{1,3}(?=\s))?\s*",
    re.IGNORECASE,
)
NUMBERED = re.compile(r"(?:^|(?<=\s))\(?[0-9]{1,2}[.)][ \t]+(?=\S)")
BULLETS = re.compile(r"([-*+\u2022])[ \t]+\S[^\n]*(?:\n\s*\1[ \t]+\S[^\n]*)+")
LETTERS = re.compile(
    r"\(?[aAiI][.)][ \t]+\S[^\n]*\n[ \t]*\(?(?:[bB]|ii|II)[.)][ \t]+\S[^\n]*(?:\n[ \t]*\(?[a-zA-Z]{1,4}[.)][^\n]*)*"
)
LIST_MARK = re.compile(r"\s*(?:[-*+\u2022]|\(?[a-zA-Z]{1,4}[.)])[ \t]+")
"""Of an item of BULLETS or LETTERS. One letter alone is a choice, and one bullet may be a minus."""
DISPLAYED = re.compile(r"\$\$[^$]+\$\$|\\\[.+?\\\]", re.DOTALL)
STATEMENT_END = re.compile(
    r"\n|(?<=\?)|(?:(?<!i\.e)(?<!e\.g)\.|!(?!\s*[-=+*/^<>]))(?P<closing>[*_$\"'”’)]*)"
    r"(?!(?<=^[A-J]\.)\s+[^A-Z\s])(?:\s|$)"
    r"|(?<=\S)[\s,;(]+(?:(?:because|since)\b|as\s+(?!well\b|if\b)(?<=,\sas\s))",
)
"""The end of a sentence, but of no factorial or letter of a choice, or where it goes on to give a reason."""
SIGN = r"(?:(?<![\w.)\]}])[-+\u2212]\s?)?\$?"
"""No sign, but a minus, after another number."""
DIGITS = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
    r"(?:\s*/\s*[0-9]+(?:\.[0-9]+)?)?"
)
NUMBER = re.compile(SIGN + DIGITS)
MIXED_OR_NUMBER = (
    rf"{SIGN}(?:[0-9]{{1,9}}[ \t]+(?=[0-9]+\s?/\s?[0-9]))?{DIGITS}"
    r"(?i:[ \t]{1,3}(?:hundred|thousand|million|billion|trillion)\b)*"
)
"""3 1/2 is one number, and so is 3 million."""
LAST_NUMBER = re.compile(rf"(?:{MIXED_OR_NUMBER}\s+or\s+)*{MIXED_OR_NUMBER}")
"""Alternatives, 18 or 19, are one answer, which is never right."""
DENIED_NUMBER = re.compile(
    rf"(?:\b(?:is|was|be|equals?)\s+not\b|\b(?:isn|can)['\u2019]t\b(?:\s+be\b)?|\bcannot\s+be\b|\\neq?\b|\u2260|!="
    r"|,\s{1,3}(?:and\s)?not|\b(?:rather|other)\s+than|\binstead\s+of)"
    rf"(?:\s+equal\s+to\b)?[\s:*]*{MIXED_OR_NUMBER}",
    re.IGNORECASE,
)
"""`The answer is not 18` states no answer."""
FALSE = r"(?:wrong|incorrect|false|untrue|mistaken|invalid|impossible)\b"
DENIAL = re.compile(
    r"[\s$]{1,3}or\s{1,3}[a-z]+|[\s})\]$*.,;:?!\\-]{0,12}(?:(?!is\b|was\b|no\b)[a-z%]{1,15}[\s,]{1,3}){0,4}"
    rf"(?:(?:is|was|[a-z]{{0,15}}['\u2019]s)\s{{1,3}}(?:[a-z]{{1,12}}\s{{1,3}}){{0,2}}?{FALSE}"
    r"|(?:(?:is|was)\s{1,3}not|(?:is|was)n['\u2019]?t)\s{1,3}(?:(?:the|a|my)\s{1,3})?"
    r"(?:(?:right|correct|true|final)\b|it\b|answer\b)"
    rf"|(?:no|{FALSE})\s*(?:[.!,;)]|$))",
    re.IGNORECASE,
)
"""After an answer, what takes it back or adds another: `\\boxed{18} is wrong`, `18. No.`, `18 or nineteen`."""

NEGATION = re.compile(
    r"\b(?:not|never|nor|neither|isnt|wasnt|untrue|mistaken)\b|n['\u2019]t\b|\bno\b(?!\s*\.?\s*[0-9])"
    rf"|['\u2019]s\s+{FALSE}|\b(?:is|was|are|be)\s+(?:[a-z]+\s+){{0,2}}{FALSE}|(?<=[^a-z]){FALSE}[^a-z]*$",
    re.IGNORECASE,
)
"""What takes an answer back, `18 is wrong`; but not `18 wrong answers`."""


def extract_answer(response: str) -> str | None:
    """Return the answer of a response, or None if there is none."""
    pieces = _split_at_questions(response)
    for piece in pieces:
        if found := _marked_answer(piece) or _stated_answer(piece):
            return found
    for piece in pieces:
        piece = DENIED_NUMBER.sub(" ", piece)
        if numbers := [m.span() for m in LAST_NUMBER.finditer(piece)]:
            return _with_denial(piece, *numbers[-1])
    return None


def extract_boxed(response: str) -> str | None:
    """Return the content of the last closed box that holds an answer, or None."""
    for piece in _split_at_questions(response):
        if boxes := _boxes(piece):
            return _join_boxes(piece, boxes)
    return None


def has_marked_answer(response: str) -> bool:
    return any(_marked_answer(piece) for piece in _split_at_questions(response))


def _split_at_questions(response: str) -> list[str]:
    """Split the response, without its thoughts, where it goes on to another question."""
    told = response.rpartition("</think>")[2].partition("<think>")[0]
    tail = INVISIBLE.sub("", told[-MAX_RESPONSE_CHARS:]).replace("{,}", ",")  # the comma of 1{,}800 in TeX
    return [piece for piece in ANOTHER_QUESTION.split(tail) if piece.strip()]


def _marked_answer(piece: str) -> str | None:
    found = [m for m in HASH_ANSWER.finditer(piece) if not (NO_ANSWER.fullmatch(m[1]) or HEADING.fullmatch(m[1]))]
    hashes, boxes = [m.span(1) for m in found], _boxes(piece)
    if boxes and boxes[-1] == max(hashes + boxes):
        return _join_boxes(piece, boxes)
    return _with_denial(piece, *hashes[-1]) if hashes else None


def _stated_answer(piece: str) -> str | None:
    piece = DENIED_NUMBER.sub(" ", piece)
    said = [*ANSWER_PHRASE.finditer(piece)]
    if not said:
        return None
    start = said[-1].end()
    window = piece[start : start + MAX_STATEMENT_CHARS]
    if listed := _listed_answers(window, is_below="\n" in said[-1][0], are_several=said[-1]["plural"] is not None):
        return listed
    displayed = DISPLAYED.match(window)
    found = STATEMENT_END.search(window, displayed.end() if displayed else 0)
    if found is None:
        return window if len(window) == MAX_STATEMENT_CHARS else _with_denial(piece, start, len(piece)) or None
    return _with_denial(piece, start, start + found.start(), found["closing"] or "") or None


def _listed_answers(window: str, *, is_below: bool, are_several: bool) -> str | None:
    """Return the answers of a list, with commas between; None if the text does not begin with one.

    is_below: the text has lines of its own; are_several: it is called answers, and so may be a list within a line.
    """
    if is_below and (found := BULLETS.match(window) or LETTERS.match(window)):
        items = [LIST_MARK.sub("", line, count=1) for line in found[0].splitlines()]
    elif (is_below or are_several) and (first := NUMBERED.match(window)) and first[0].strip(" \t(.)") == "1":
        _, *rest = NUMBERED.split(window if is_below else window.partition("\n")[0])
        items = [item.partition("\n")[0] for item in rest] if is_below or len(rest) > 1 else []
    elif is_below and are_several and not DISPLAYED.match(window):
        items = re.split(r"\n\s*\n", window, maxsplit=1)[0].splitlines()
        items = items if len(items) > 1 else []
    else:
        return None
    return ", ".join(item.strip().rstrip(".,;") for item in items if item.strip()) or None


def _join_boxes(piece: str, boxes: list[tuple[int, int]]) -> str:
    """Return the last box's answer, and those before it that are stated with it."""
    texts, are_alternatives = [_with_denial(piece, *boxes[-1])], False
    for (start, end), (next_start, _) in zip(reversed(boxes[:-1]), reversed(boxes), strict=False):
        between = BETWEEN_BOXES.fullmatch(piece, end, next_start)
        if between is None:
            break
        if (text := piece[start:end].strip()) not in texts:
            texts.insert(0, text)
            are_alternatives = are_alternatives or between["or"] is not None
    return (" or " if are_alternatives else ", ").join(texts)


def _with_denial(piece: str, start: int, end: int, closing: str = "") -> str:
    """Return an answer together with what takes it back right after it, so that it equals no other."""
    denial = DENIAL.match(piece, end)
    return (piece[start:end].strip() + closing + (f" {denial[0].strip()}" if denial else "")).strip()


def _boxes(piece: str) -> list[tuple[int, int]]:
    """Return where the contents of the outermost closed boxes that hold an answer begin and end, in order."""
    spans: list[tuple[int, int]] = []
    opened: list[tuple[int, bool]] = []
    for brace in BRACES.finditer(piece):
        if brace["bare"]:
            spans.append(brace.span("bare"))
        elif brace["box"] or brace["open"]:
            opened.append((brace.end(), bool(brace["box"])))
        elif brace["close"] and opened:
            start, is_box = opened.pop()
            if is_box:
                while spans and spans[-1][0] > start:
                    spans.pop()
                spans.append((start, brace.start()))
    return [(start, end) for start, end in spans if not NO_ANSWER.fullmatch(piece, start, end)]
