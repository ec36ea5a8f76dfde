"""Codes of failed operations. Waiting for operations is tested with the resources that wait."""

from __future__ import annotations

import pytest

from controller.gcp.operations import code_name


@pytest.mark.parametrize(
    ("status", "name"),
    [
        ({"code": 8, "message": "no capacity"}, "RESOURCE_EXHAUSTED"),
        ({"code": 13}, "INTERNAL"),
        ({"message": "no code"}, "UNKNOWN"),
        ({"code": 4711}, "UNKNOWN"),
    ],
)
def test_a_status_has_the_name_of_its_code(status: dict[str, object], name: str) -> None:
    assert code_name(status) == name
