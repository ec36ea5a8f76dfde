"""`${oc.env:NAME}` resolves what is no secret; a secret is refused before it is in any config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from controller.cli import main
from controller.config.compose import compose
from controller.core.errors import ConfigError
from tests.composed import config_of

WORDS = ["cloud=local", "program=command", "program.command=[a]"]
SECRETS = {
    "HF_TOKEN": "hf_planted0123456789", "AWS_SECRET_ACCESS_KEY": "planted", "DB_PASSWORD": "planted",
    "GITHUB_PAT": "planted", "STRIPE_KEY": "planted", "SENTRY_DSN": "planted", "SHORT_TOKEN": "1234567",
    "DATABASE": "postgres://me:planted@host/db",
    "DEPLOY": "-----BEGIN OPENSSH PRIVATE KEY-----\\nplanted", "my_api_key": "planted",
}  # fmt: skip


@pytest.fixture(autouse=True)
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "EDITION": "second", "PWD": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_refused_by_name_or_value_and_not_shown(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*WORDS, f"env.vars.X=${{oc.env:{name}}}"])
    said = f"env.vars.X: ${{oc.env:{name}}} would put a secret into the plan and the record"
    assert str(caught.value).startswith(said)
    assert f"env.secrets.{name}=env" in str(caught.value)
    assert SECRETS[name] not in str(caught.value)


def test_what_is_no_secret_is_resolved_as_omegaconf_does() -> None:
    config = config_of(*WORDS, "env.vars.X=${oc.env:EDITION}", "env.vars.Y='${oc.env:NONE_SET,5}-${oc.env:PWD}'")
    assert dict(config.env.vars) == {"X": "second", "Y": "5-/home/me"}
    with pytest.raises(ConfigError, match="NONE_SET"):
        compose([*WORDS, "env.vars.X=${oc.env:NONE_SET}"])
    assert OmegaConf.create({"a": "${oc.env:HF_TOKEN}"}).a == SECRETS["HF_TOKEN"], "the configs of others are theirs"


@pytest.mark.parametrize(
    "content",
    [
        {"run": {"name": "${oc.env:HF_TOKEN}"}},
        {"run": {"seed": "${oc.decode:${oc.env:SHORT_TOKEN}}"}},
        {"env": {"vars": {"A": "${oc.select:env.vars.B}", "B": "x${oc.env:DB_PASSWORD,none}"}}},
        {"env": {"vars": {"A": "${oc.env:${env.vars.B}}", "B": "HF_TOKEN"}}},
        {"program": {"command": ["python", "--key=${oc.env:STRIPE_KEY}"]}},
    ],
)
def test_a_file_of_the_user_gets_no_secret_either(
    content: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "slipway/experiment").mkdir(parents=True)
    (folder / "own.yaml").write_text("# @package _global_\n" + yaml.safe_dump(content))
    words = WORDS[: -1 if "program" in content else None]
    assert main.run(["plan", "+experiment=own", *words]) == 2
    out, err = capsys.readouterr()
    assert "would put a secret into the plan" in err
    assert "Traceback" not in err
    written = [path.read_bytes() for path in (tmp_path / "home").rglob("*") if path.is_file()]
    for secret in SECRETS.values():
        assert secret not in out + err
        assert not [body for body in written if secret.encode() in body]
