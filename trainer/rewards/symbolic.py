"""Equality of mathematical expressions, by math-verify (https://github.com/huggingface/Math-Verify) and SymPy.

Its LaTeX parser is a grammar and never evaluates Python; parser and SymPy may never return, so call it under a limit.
"""

import logging
from functools import cache
from typing import Any

from trainer.rewards import limits


def is_equal(given: str, right: str) -> bool:
    """Return whether two LaTeX expressions, without `$` around them, are equal; False if one is unreadable."""
    math_verify = _load_math_verify()
    left, gold = ([*_parse(math_verify, text)] for text in (given, right))
    return bool(left and gold and math_verify.verify(gold, left, timeout_seconds=None))


@cache
def _load_math_verify() -> Any:
    with limits.uncounted_cpu_time():
        import math_verify
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # it warns of every unreadable expression
    return math_verify


def _parse(math_verify: Any, text: str) -> list[Any]:
    where = [math_verify.LatexExtractionConfig(boxed_match_priority=0)]
    return math_verify.parse(
        f"\\boxed{{{text}}}", extraction_config=where, fallback_mode="no_fallback", parsing_timeout=None
    )
