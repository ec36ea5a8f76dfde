"""The secrets of samplers."""

from conf.samplers import attempt_token


def test_each_attempt_has_its_own_token() -> None:
    """The values are fixed: a controller and a trainer of two versions must agree."""
    first, second = attempt_token("secret", 1), attempt_token("secret", 2)
    assert first == "b07e8b6ba761865c21350ca0982c277b46c99b398befeec94b3ea27af1d9f2ff"
    assert first != second
