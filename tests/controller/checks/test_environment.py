"""Findings of environment, assets and program for a wrong config, and none for a right one."""

from pathlib import Path

import pytest

from conf.schema.config import Config
from controller.checks import assets, environment, program
from controller.checks.preflight import checks_of
from controller.config.compose import compose
from controller.inputs.code import take_snapshot
from controller.plan.workers import PIN, venv_requirements

COMMAND = ["cloud=local", "program=command", "program.command=[python,train.py]"]
SHA = "a" * 64
COMMIT = "c" * 40


def words(*overrides: str) -> list[str]:
    config, problems = compose([*COMMAND, *overrides])
    assert not problems
    assert isinstance(config, Config)
    checks = [
        check for module in (environment, assets, program) for check in checks_of(module) if check.rule.id != "complete"
    ]
    return [f"{finding.check}: {finding.severity} {finding}" for check in checks for finding in check(config)]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NETRC", "KEY"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_said_of_what_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words() == []
    monkeypatch.setenv("KEY", "k")
    (tmp_path / "data").write_text("")
    right = [
        f"assets.models.m.path={tmp_path}/data",
        "env.vars={MODELS: '{assets.models.m}/', JSON: '{a: 1}', DIR: '{run_dir}'}",
        "env.secrets.MY_KEY=env:KEY",
        f"assets.datasets.d.files={{f: {{url: 'https://h/f', sha256: {SHA}, token_secret: MY_KEY}}}}",
        "assets.fetch_on=pod",
        f"code.repository={{url: 'git@github.com:org/repo.git', commit: {COMMIT}}}",
        "env.packages=requirements",
        "env.requirements=requirements.txt",
    ]
    assert words(*right) == []
    own = ["tpu=v6e_8_ce", "tpu.runtime_version=projects/me/global/images/with-jax"]
    assert words("program=trainer", "cloud=gcp", "env.packages=image", *own) == [], "it may have JAX"


def test_the_value_of_a_secret_is_refused_and_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """`env.vars.X=$HF_TOKEN` in a shell; interpolations are refused earlier, see test_environment.py of the config."""
    monkeypatch.setenv("HF_TOKEN", "hf_planted0123456789")
    monkeypatch.setenv("KEY", "another planted")
    for override in ("env.vars.X=hf_planted0123456789", "run.state_dir=/hf_planted0123456789"):
        [said] = words(override)
        assert "secret_value: error" in said
        assert "your variable HF_TOKEN" in said
        assert "planted" not in said
    [said] = words("env.vars.X=${oc.env:KEY}", "env.secrets.MINE=env:KEY")
    assert "your variable KEY" in said
    assert words("env.vars.X=${oc.env:KEY}") == [], "it is no secret"


def test_a_word_that_no_program_can_be_given() -> None:
    config, _ = compose(COMMAND)
    assert config is not None
    long = config.env.model_copy(update={"vars": {"X": "é" * 70_000}})
    [said] = environment.arguments_fit_a_process(config.model_copy(update={"env": long}))
    assert str(said).startswith("env.vars.X: has 140000 bytes")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            ["env.python='3.10'", "env.packages=requirements", "env.requirements=r.txt"],
            "python: warning env.python: 3.10 silently limits JAX",
        ),
        (["env.packages=requirements"], "requirements: error env.requirements: env.packages=requirements needs"),
        (["env.requirements=r.txt"], "requirements: error env.packages: image ignores env.requirements=r.txt"),
        (["env.python='3.10'", "env.packages=lock"], "python: error env.python: 3.10 silently limits JAX to 0.6.2"),
        (["program=trainer", "cloud=gcp", "env.packages=none"], "trainer_packages: error env.packages: program=traine"),
        (["program=trainer", "cloud=gcp", "env.packages=image"], "trainer_packages: error env.packages: program=train"),
        (["env.secrets.KEY=env"], "secret: warning env.secrets.KEY: the environment variable KEY is not set"),
        (["env.secrets.X=env:KEY"], "secret: error env.secrets.X: the environment variable KEY is not set"),
        (["env.secrets.X=file:/nowhere"], "secret: error env.secrets.X: no file at /nowhere"),
        (["env.vars.WANDB_API_KEY=x", "env.secrets.WANDB_API_KEY=null"], "secret_in_vars: warning env.vars.WANDB_API"),
        (["env.vars.NETRC=x"], "variable_twice: error env.secrets.NETRC: NETRC is also in env.vars"),
        (["env.vars.SLIPWAY_X=x"], "variable_reserved: error env.vars.SLIPWAY_X: names that start with SLIPWAY_"),
        (["env.vars.M='{assets.models.m}'"], "asset_named: error env.vars.M: {assets.models.m}: no such asset"),
        (["program.setup=[['{assets.models.m}']]"], "asset_named: error program.setup: {assets.models.m}: no such"),
        (["assets.models.m.path=/nowhere"], "asset_here: error assets.models.m.path: no file at /nowhere"),
        (
            [f"assets.models.m.files={{f: {{url: 'https://h/f', sha256: {SHA}, token_secret: KEY}}}}"],
            "asset_token: error assets.models.m.files.f.token_secret: KEY is not in env.secrets",
        ),
        (
            [f"assets.models.m.files={{f: {{url: 'http://h/f', sha256: {SHA}, token_secret: HF_TOKEN}}}}"],
            "asset_clear: error assets.models.m.files.f.url: would send the token unencrypted",
        ),
        (
            [f"assets.models.m.files={{f: {{url: 'https://me:pw@h/f', sha256: {SHA}}}}}"],
            "asset_clear: error assets.models.m.files.f.url: contains a password or token",
        ),
        (
            [f"assets.models.m.files={{f: {{url: 'https://h/f?X-Amz-Signature=x', sha256: {SHA}}}}}"],
            "asset_clear: warning assets.models.m.files.f.url: its query is a key to the file",
        ),
        (["assets.fetch_on=pod"], "fetch_on: warning assets.fetch_on: pod has no effect: every asset is on"),
        (["assets.fetch_on=vm"], "fetch_on: warning assets.fetch_on: vm has no effect: every asset is on th"),
        (
            ["assets.fetch_on=vm", "assets.models.m.source=hf://a/b", "tpu.adopt=true", "tpu.name=mine"],
            "fetch_on: warning assets.fetch_on: vm has no effect with tpu.adopt=true, which has no network for a VM",
        ),
        (
            ["program=trainer", f"code.repository={{url: 'https://h/r', commit: {COMMIT}}}"],
            "repository_unused: error code.repository: program=trainer ignores it",
        ),
        (
            [f"code.repository={{url: 'https://me:pw@h/r', commit: {COMMIT}}}"],
            "repository_password: error code.repository.url: contains a password or token",
        ),
        (["code.exclude=['!']"], "exclude: error code.exclude: '!' is not a valid .gitignore pattern"),
        (["code.max_mb=5000"], "code_limit: error code.max_mb: workers unpack at most 1074 MB of code"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(overrides: list[str], said: str) -> None:
    found = words(*overrides)
    assert len(found) == 1, found
    assert found[0].startswith(said)


TRAINER = ["+experiment=quickstart", "logging.wandb={project: p, entity: null, mode: online}"]


def test_wandb_wants_a_package_and_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*overrides: str) -> list[str]:
        config, problems = compose([*TRAINER, *overrides])
        assert not problems
        assert config is not None
        return [str(finding) for finding in environment.wandb_is_possible(config)]

    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    package, key = said()
    assert package.startswith("logging.wandb: the emulated workers use this machine's packages, which lack wandb")
    assert key.startswith("logging.wandb: WANDB_API_KEY is not set; set it (https://wandb.ai/authorize)")
    monkeypatch.setattr(environment, "find_spec", lambda name: name)
    assert said("logging.wandb.mode=offline") == []
    assert said("env.secrets.WANDB_API_KEY=file:/a/key") == []
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert said() == []
    assert len(said("env.secrets.WANDB_API_KEY=null")) == 1
    assert said("logging.wandb=null", "env.secrets.WANDB_API_KEY=null") == []
    assert "your own program must call W&B itself" in said("program=command", "program.command=[x]")[0]


def test_the_lock_has_what_is_wanted_and_every_package_once() -> None:
    harness = "loop.evaluations={e: {run: lm_eval, options: {tasks: [a]}}}"
    for words, there in (
        ([*TRAINER, "env.packages=lock"], {"wandb"}),
        (["+experiment=quickstart", "env.packages=lock", harness], {"lm-eval"}),
        ([*TRAINER, "env.packages=lock", harness], {"wandb", "lm-eval"}),
        (["+experiment=quickstart", "env.packages=lock"], set()),
    ):
        config, _ = compose(words)
        assert config is not None
        text = venv_requirements(config, take_snapshot(config, Path.cwd())).text
        names = [match["name"] for match in PIN.finditer(text)]
        assert len(names) == len(set(names))
        assert {"wandb", "lm-eval"} & {*names} == there
        assert text.count("--hash=sha256:") > len(names)
