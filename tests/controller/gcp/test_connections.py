"""A whole run goes on behind a proxy that never answers: the emulated cloud, its SSH, its bucket and its workers."""

import pytest

from tests.controller.conftest import ECHO_COMMAND, ONE_WORKER, SlipwayCli
from tests.fakes.proxy import set_proxies, silent_proxy


@pytest.mark.e2e
@pytest.mark.deep
def test_a_run_on_the_emulated_cloud_meets_no_proxy(slipway: SlipwayCli, monkeypatch: pytest.MonkeyPatch) -> None:
    with silent_proxy() as silent:
        set_proxies(monkeypatch, http_proxy=silent, HTTPS_PROXY=silent, all_proxy=silent)
        code, out, err = slipway("up", ECHO_COMMAND, ONE_WORKER, f"env.vars.https_proxy={silent}")
    assert (code, err) == (0, "")
    assert "hello from worker 0" in out
