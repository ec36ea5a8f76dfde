r"""Extract the answer of a response.

An answer is marked: `#### 18`, `\boxed{18}`, `\fbox{18}`; or stated: "the answer is 18"; or else it is the last
number in the response. The last one wins, with two exceptions, since a model without a chat template seldom knows when
to stop: a box that is never closed, or holds no answer (`\boxed{}`, `\boxed{answer}`), does not count; nor does what
the response answers after it has gone on to another question of its own making. Text between `<think>` and
`</think>` is never searched, nor is text after a `<think>` that is not closed.
"""

import re

MAX_RESPONSE_CHARS = 50_000
"""Characters of a response to search, from its end. Every pattern here takes time linear in them."""

ANOTHER_QUESTION = re.compile(
    r"^[ \t]*(?:\#+[ \t]*)?\**(?:question|problem|exercise|user|human|q)(?:[ \t]*\d+)?\**[ \t]*:"
    r"|<\|?(?:start_of_turn|end_of_turn|im_start|im_end|endoftext|eot_id|start_header_id|eos|bos)\|?>|</s>"
    r"|(?:\n[ \t\r]*){3,}",
    re.IGNORECASE | re.MULTILINE,
)
HASH_ANSWER = re.compile(r"####[ \t]*([^\n]*)")
BRACES = re.compile(
    r"(?P<box>\\(?:boxed|fbox|framebox)\s*\{)|\\boxed[ \t]+(?P<bare>[^\s{}\\$]+)|\\[{}]|(?P<open>\{)|(?P<close>\})"
)
NO_ANSWER = re.compile(
    r"(?:\\text\s*\{)?\W*(?:(?:your|the|final|numeric|numerical|correct)\s+)*"
    r"(?:answer|result|number|value|[lc]?dots)?(?:\s+here)?\W*",
    re.IGNORECASE,
)
ANSWER_PHRASE = re.compile(r"\banswer(?:\s+is|\s*=|\s*:)+\s*", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?](?:\s|$)")
SIGN = r"(?:(?<![\w.)\]}])[-+\u2212]\s?)?\$?"
"""No sign, but a minus, after another number."""
DIGITS = (
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3}(?!\w))?"
    r"(?:\s*/\s*[0-9]+(?:\.[0-9]+)?)?"
)
NUMBER = re.compile(SIGN + DIGITS)
MIXED_OR_NUMBER = rf"{SIGN}(?:[0-9]{{1,9}}[ \t]+(?=[0-9]+\s?/\s?[0-9]))?{DIGITS}"
"""3 1/2 is one number."""
LAST_NUMBER = re.compile(rf"(?:{MIXED_OR_NUMBER}\s+or\s+)*{MIXED_OR_NUMBER}")
"""Alternatives, 18 or 19, are one answer, which is never right."""
STATED_NUMBER = re.compile(
    rf"(?:{MIXED_OR_NUMBER}\s+or\s+)*(?:[0-9]{{1,3}}(?: [0-9]{{3}})+(?![0-9/])|{MIXED_OR_NUMBER})"
)
"""As LAST_NUMBER; and digits in groups of three, 1 800, which elsewhere may be two numbers."""
DENIED_NUMBER = re.compile(
    rf"(?:\b(?:is|was|be|equals?)\s+not\b|\b(?:isn|can)['\u2019]t\b(?:\s+be\b)?|\bcannot\s+be\b|\\neq?\b|\u2260|!=)"
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
            return _with_denial(piece, *boxes[-1])
    return None


def has_marked_answer(response: str) -> bool:
    return any(_marked_answer(piece) for piece in _split_at_questions(response))


def _split_at_questions(response: str) -> list[str]:
    """Split the response, without its thoughts, where it goes on to another question."""
    told = response.rpartition("</think>")[2].partition("<think>")[0]
    tail = told[-MAX_RESPONSE_CHARS:].replace("{,}", ",")  # the comma of 1{,}800 in TeX
    return [piece for piece in ANOTHER_QUESTION.split(tail) if piece.strip()]


def _marked_answer(piece: str) -> str | None:
    hashes = [m.span(1) for m in HASH_ANSWER.finditer(piece) if not NO_ANSWER.fullmatch(m[1])]
    marks = sorted(hashes + _boxes(piece))
    return _with_denial(piece, *marks[-1]) if marks else None


def _stated_answer(piece: str) -> str | None:
    piece = DENIED_NUMBER.sub(" ", piece)
    said = [m.end() for m in ANSWER_PHRASE.finditer(piece)]
    if not said:
        return None
    line = piece[said[-1] :].partition("\n")[0]
    sentence = SENTENCE_END.split(line, maxsplit=1)[0]
    end = said[-1] + len(sentence)
    number = STATED_NUMBER.search(piece, end - len(sentence.rpartition("=")[2]), end)
    return _with_denial(piece, *number.span()) if number else sentence.strip(" *$\\") or None


def _with_denial(piece: str, start: int, end: int) -> str:
    """Return an answer together with what takes it back right after it, so that it equals no other."""
    denial = DENIAL.match(piece, end)
    return (piece[start:end].strip() + (f" {denial[0].strip()}" if denial else "")).strip()


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
