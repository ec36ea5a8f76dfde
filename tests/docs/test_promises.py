"""docs/security.md and docs/unattended.md promise nothing without a test.

Each sentence, and each row of a table, has the tests that would fail if it were false: those that the page names, and
those of promises.yaml. What is under "What is not defended" warns and promises nothing.
"""

import re
from typing import Any

import pytest

from controller.gcp.outages import OUTAGE_SECONDS
from controller.gcp.prices import BASTION_DISK_GB, load_prices
from controller.lease import SAFETY_MARGIN
from tests.composed import config_of
from tests.docs.test_proofs import exists, named_in
from tests.groups import load_yaml
from tests.paths import ROOT
from trainer.rl.remote import server, wire

PAGES = ("docs/security.md", "docs/unattended.md")
PROMISES: dict[str, dict[str, list[str]]] = load_yaml(ROOT / "tests" / "docs" / "promises.yaml")
"""Tests of the sentences of a page, by how the sentence begins."""
WARNINGS = "## What is not defended"
NOT_TEXT = re.compile(r"^```.*?^```$|^#.*?$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"\n\n+|\n(?=- |\|)|(?<=\|)\n")
PROOF = re.compile(r" ?\((?:on the worker )?(?:`tests/[\w/]+\.py::\w+`(?:, (?:on the worker )?)?)+\)")
END = re.compile(r"(?<=[.!?])\s+(?=[`$*~A-Z])|(?<=\.\*\*)\s+")
LABEL = re.compile(r"\*\*(?:\w+ ?){1,4}\.\*\*")
NUMBERS: dict[str, Any] = {
    "At most (64) connections wait to show the token": server.MAX_WAITING,
    "each for at most (30) seconds": wire.HANDSHAKE_SECONDS,
    r"and (64) KiB \(": wire.MAX_FIRST_BYTES / 1024,
    "tried for (ten) minutes": {600.0: "ten"}[OUTAGE_SECONDS],
    "after (five sixths) of its term": {1 / 6: "five sixths"}[SAFETY_MARGIN],
    r"About \$([\d.]+) per hour and a 10 GB disk": round(load_prices()["vm"]["usd_per_hour"]["e2-small"], 3),
    "per hour and a (10) GB disk": BASTION_DISK_GB,
}
"""Numbers of the two pages that no test of the list spells out."""


def sentences(page: str) -> dict[str, list[str]]:
    """Return each sentence and each row of a page without the tests that it names, and those."""
    text = NOT_TEXT.sub("", (ROOT / page).read_text().partition(WARNINGS)[0])
    found: dict[str, list[str]] = {}
    words = ""
    for block in BLOCK.split(text):
        before, words = words, " ".join(block.split())
        if words.startswith("|---"):
            found.pop(before)  # the head of the table
            continue
        for sentence in [words] if words.startswith("|") else END.split(words.removeprefix("- ")):
            if sentence and not LABEL.fullmatch(sentence):
                found[PROOF.sub("", sentence)] = named_in(sentence)
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_sentence_has_its_test(page: str) -> None:
    proofs = {
        sentence: [
            *named,
            *(test for begin, more in PROMISES[page].items() if sentence.startswith(begin) for test in more),
        ]
        for sentence, named in sentences(page).items()
    }
    assert len(proofs) > 35
    assert [sentence for sentence, tests in proofs.items() if not tests] == [], "name its test in promises.yaml"
    wrong = [test for tests in proofs.values() for test in tests if "::" not in test or not exists(test)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES)
def test_every_line_of_the_list_is_about_one_sentence(page: str) -> None:
    known = sentences(page)
    about = {begin: [sentence for sentence in known if sentence.startswith(begin)] for begin in PROMISES[page]}
    assert {begin: found for begin, found in about.items() if len(found) != 1} == {}
    again = {begin: {*known[found[0]]} & {*PROMISES[page][begin]} for begin, found in about.items()}
    assert {begin: tests for begin, tests in again.items() if tests or not PROMISES[page][begin]} == {}


def test_numbers_are_those_of_the_code() -> None:
    text = " ".join(" ".join((ROOT / page).read_text().split()) for page in PAGES)
    said = {pattern: re.findall(pattern, text) for pattern in NUMBERS}
    assert {
        pattern: found for pattern, found in said.items() if found != [str(NUMBERS[pattern]).removesuffix(".0")]
    } == {}
    keys = re.findall(r"`(\w+(?:\.\w+)+)` \((\d+)\)", text)
    assert len(keys) >= 3
    config = config_of()
    for key, number in keys:
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        assert value == float(number), key
