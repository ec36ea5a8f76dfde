"""Settings of the emulated cloud: given, kept, changed while it runs."""

from pathlib import Path

import pytest

from controller import emulator
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Store
from tests.controller.conftest import ECHO_COMMAND, SlipwayCli


def test_given_values_are_kept_for_the_next_process(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.db")
    assert Settings(store).is_strict
    Settings(store, operation_seconds=0.25, realism="relaxed")
    again = Settings(store, operation_seconds=None, realism=None)
    assert (again.operation_seconds, again.is_strict) == (0.25, False)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "Unknown setting speed; known: operation_seconds, realism, caller_roles, token_seconds, quotas"),
        ({"token_seconds": -1}, "token_seconds must be a number of seconds, not -1"),
        ({"caller_roles": "roles/owner"}, "caller_roles must be a list of roles, not 'roles/owner'"),
        ({"realism": "kind"}, "realism must be strict or relaxed, not 'kind'"),
        ({"quotas": {"CHIPS": 4}}, "the emulated project has no quota 'CHIPS'; "),
        ({"quotas": {"INSTANCES": -1}}, "quotas: INSTANCES must be a whole number of at least 0, not -1"),
        ({"operation_seconds": "fast"}, "operation_seconds must be a number of seconds, not 'fast'"),
    ],
)
def test_an_invalid_change_is_refused_and_changes_nothing(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    settings = Settings(Store(tmp_path / "state.db"))
    with pytest.raises(ApiError, match=message):
        settings.update(change)
    assert settings.as_json() == Settings(Store(tmp_path / "other.db")).as_json()


def test_a_verb_sets_the_running_cloud_to_its_config(slipway: SlipwayCli) -> None:
    assert slipway.cloud().get("settings")["realism"] == "strict"
    assert slipway("plan", ECHO_COMMAND, "cloud.realism=relaxed", "cloud.operation_seconds=7")[0] == 0
    found = emulator.find_running(emulator.state_folder(str(slipway.home))).get("settings")
    assert (found["realism"], found["operation_seconds"]) == ("relaxed", 7)
