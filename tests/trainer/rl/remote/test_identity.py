"""Who a process is, and the secret that it shows."""

import pytest

from conf.samplers import POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, attempt_token
from conf.schema.training.run_yaml import RunFileError
from trainer.rl.remote.identity import SamplerKey, attempt_mark, own_name, own_token
from trainer.rl.remote.wire import WireError


@pytest.fixture(autouse=True)
def nobody(monkeypatch) -> None:
    for name in (POD_VARIABLE, SECRET_VARIABLE, TOKEN_VARIABLE, "SLIPWAY_WORKER", "TPU_WORKER_ID"):
        monkeypatch.delenv(name, raising=False)


def test_a_worker_of_the_pod_knows_one_attempt(monkeypatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    monkeypatch.setenv("SLIPWAY_WORKER", "3")
    key = SamplerKey.own()
    assert (own_name(), own_token(), key.outlives_attempts) == ("worker 3", "token", False)
    assert key.token_for({"attempt": attempt_mark("token")}) == "token"
    with pytest.raises(WireError):
        key.token_for({"attempt": attempt_mark("another")})


def test_a_pod_of_samplers_derives_the_token_of_each_attempt(monkeypatch) -> None:
    monkeypatch.setenv(POD_VARIABLE, "2")
    monkeypatch.setenv(SECRET_VARIABLE, "of the run")
    key = SamplerKey.own()
    assert (own_name(), key.outlives_attempts) == ("sampler pod 2", True)
    tokens = [attempt_token("of the run", number) for number in (1, 2)]
    assert len({*tokens, "of the run"}) == 3
    for number, token in enumerate(tokens, 1):
        assert key.token_for({"attempt": attempt_mark(token), "number": number}) == token
    with pytest.raises(WireError):
        key.token_for({"attempt": attempt_mark(tokens[0]), "number": 2})
    with pytest.raises(WireError, match="has ended"):
        key.token_for({"attempt": attempt_mark(tokens[0]), "number": 1, "exit_code": 75})


def test_without_a_secret_the_message_names_the_variable(monkeypatch) -> None:
    with pytest.raises(RunFileError, match=TOKEN_VARIABLE):
        SamplerKey.own()
    monkeypatch.setenv(POD_VARIABLE, "1")
    monkeypatch.setenv(TOKEN_VARIABLE, "token")
    with pytest.raises(RunFileError, match=SECRET_VARIABLE):
        SamplerKey.own()
    monkeypatch.delenv(POD_VARIABLE)
    with pytest.raises(RunFileError, match="SLIPWAY_WORKER"):
        own_name()
