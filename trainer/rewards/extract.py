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
    r"(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3}(?!\w))?"
    r"(?:\s*/\s*\d+(?:\.\d+)?)?"
)
NUMBER = re.compile(SIGN + DIGITS)
MIXED_OR_NUMBER = rf"{SIGN}(?:\d{{1,9}}[ \t]+(?=\d+\s?/\s?\d))?{DIGITS}"
"""3 1/2 is one number."""
LAST_NUMBER = re.compile(rf"(?:{MIXED_OR_NUMBER}\s+or\s+)*{MIXED_OR_NUMBER}")
"""Alternatives, 18 or 19, are one answer, which is never right."""
STATED_NUMBER = re.compile(rf"(?:{MIXED_OR_NUMBER}\s+or\s+)*(?:\d{{1,3}}(?: \d{{3}})+(?![\d/])|{MIXED_OR_NUMBER})")
"""As LAST_NUMBER; and digits in groups of three, 1 800, which elsewhere may be two numbers."""
DENIED_NUMBER = re.compile(
    rf"(?:\b(?:is|was|be|equals?)\s+not\b|\b(?:isn|can)['\u2019]t\b(?:\s+be\b)?|\bcannot\s+be\b|\\neq?\b|\u2260|!=)"
    rf"(?:\s+equal\s+to\b)?[\s:*]*{MIXED_OR_NUMBER}",
    re.IGNORECASE,
)
"""`The answer is not 18` states no answer."""


def extract_answer(response: str) -> str | None:
    """Return the answer of a response, or None if there is none."""
    pieces = _split_at_questions(response)
    for piece in pieces:
        if found := _marked_answer(piece) or _stated_answer(piece):
            return found
    for piece in pieces:
        if numbers := LAST_NUMBER.findall(DENIED_NUMBER.sub(" ", piece)):
            return numbers[-1]
    return None


def extract_boxed(response: str) -> str | None:
    """Return the content of the last closed box that holds an answer, or None."""
    for piece in _split_at_questions(response):
        if found := [box for _, box in _boxes(piece)]:
            return found[-1]
    return None


def has_marked_answer(response: str) -> bool:
    return any(_marked_answer(piece) for piece in _split_at_questions(response))


def _split_at_questions(response: str) -> list[str]:
    """Split the response, without its thoughts, where it goes on to another question."""
    told = response.rpartition("</think>")[2].partition("<think>")[0]
    tail = told[-MAX_RESPONSE_CHARS:].replace("{,}", ",")  # the comma of 1{,}800 in TeX
    return [piece for piece in ANOTHER_QUESTION.split(tail) if piece.strip()]


def _marked_answer(piece: str) -> str | None:
    hashes = [(m.start(), m[1]) for m in HASH_ANSWER.finditer(piece) if not NO_ANSWER.fullmatch(m[1])]
    marks = sorted(hashes + _boxes(piece))
    return marks[-1][1].strip() if marks else None


def _stated_answer(piece: str) -> str | None:
    piece = DENIED_NUMBER.sub(" ", piece)
    said = [m.end() for m in ANSWER_PHRASE.finditer(piece)]
    if not said:
        return None
    line = piece[said[-1] :].partition("\n")[0]
    sentence = SENTENCE_END.split(line, maxsplit=1)[0]
    numbers = STATED_NUMBER.findall(sentence.rpartition("=")[2])
    return numbers[0] if numbers else sentence.strip(" *$\\") or None


def _boxes(piece: str) -> list[tuple[int, str]]:
    """Return start and content of the outermost closed boxes that hold an answer, in order."""
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
    return [(start, piece[start:end].strip()) for start, end in spans if not NO_ANSWER.fullmatch(piece, start, end)]
