"""Versions of the library verifiers."""

import pytest

from conf.verifiers import ENVIRONMENTS, TASKSETS, VersionError, kind_of


def test_every_version_is_of_a_kind_or_refused_with_the_choices() -> None:
    kinds = {
        "0.1.14": ENVIRONMENTS,
        "0.2.1": ENVIRONMENTS,
        "0.3.1.post0": ENVIRONMENTS,
        "0.4.0": TASKSETS,
        "0.4": TASKSETS,
    }
    assert {version: kind_of(version) for version in kinds} == kinds
    for version in ("0.1.13", "0.1", "0.5", "0.5.0rc1", "1.0", "", "dev"):
        with pytest.raises(
            VersionError, match=rf"^Slipway does not know verifiers {version}; install 0.1.14 to 0.3, .* or 0.4"
        ):
            kind_of(version)
