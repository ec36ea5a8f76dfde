"""Overrides and groups become one config, kept until what Hydra reads has changed; its complaints become ours."""

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from conf.schema.training.optimizer import ConstantSchedule, DecaySchedule
from controller.cli import main
from controller.config import compose as composing
from controller.config import composed_cache
from controller.config.compose import (
    compose,
    compose_raw,
    compose_variants,
    config_groups,
    normalize_override,
    with_overrides,
)
from controller.core.errors import ConfigError
from tests.composed import config_of, problems_of

by_hydra = pytest.mark.usefixtures("composed_by_hydra")
QUICKSTART = "+experiment=quickstart"


def write(folder: Path, files: dict[str, str]) -> Path:
    """Write files of the user's own; return their folder."""
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("# @package _global_\n" * name.startswith(("experiment", "scale/mini.")) + text)
    return folder


def test_normalize() -> None:
    meant = {
        "tpu.zone=us-west4-a": "++tpu.zone=us-west4-a",
        "+tpu.zone=a": "++tpu.zone=a",
        "+experiment=quickstart": "experiment=quickstart",
        "experiment=quickstart": "experiment=quickstart",
        "hydra.verbose=true": "hydra.verbose=true",
        "~data": "~data",
    }
    assert {typed: normalize_override(typed) for typed in meant} == meant


@by_hydra
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["+experiment=quickstrat"], "no experiment named 'quickstrat'; did you mean experiment=quickstart?"),
        (["colour=red"], "colour: unknown group; "),
        (["tpu.zone=[1"], "tpu.zone"),
        ([QUICKSTART, "optimizer.lr=1e-4,7e-4"], "optimizer.lr: '1e-4,7e-4' is several values; for a sweep add -m"),
        (
            [QUICKSTART, 'loop.rewards={"trainer.x:brief": 0.1}'],
            "write keys without quotes, and a colon in a key as",
        ),
        ([QUICKSTART, "run.name=été"], "quote a value with the character é: 'run.name=\"été\"'"),
    ],
)
def test_what_hydra_cannot_use_is_one_line_with_the_cure(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_unknown_lists_the_choices() -> None:
    with pytest.raises(ConfigError, match=r"choices: .*gemma2b_gsm8k"):
        compose(["+experiment=zzz"])
    with pytest.raises(ConfigError, match=r"groups: .*tpu"):
        compose(["colour=red"])
    with pytest.raises(ConfigError, match=r"optimizer\.lr: '1e-4,7e-4' is several values; for a sweep add -m"):
        list(compose_variants([[QUICKSTART, "optimizer.lr=1e-4,7e-4"]]))


def test_a_variant_is_what_it_would_be_alone() -> None:
    words = [["run.seed=1", "loop.max_new_tokens=9"], ["cloud.kind=gcp"], ["run.name=${cloud.kind}"], []]
    cases = [[QUICKSTART, *each] for each in words]
    assert [*compose_variants(cases)] == [compose(case) for case in cases]


@by_hydra
def test_scale_comes_last_but_for_the_command_line(tmp_path: Path) -> None:
    words = ["+experiment=mine", "scale=mini", "program=command"]
    write(tmp_path, {"experiment/mine.yaml": "run:\n  name: from-experiment\n"})
    write(tmp_path, {"scale/mini.yaml": "run:\n  name: from-scale\n"})
    assert config_of(*words, folder=tmp_path).run.name == "from-scale"
    write(tmp_path, {"scale/mini_command.yaml": "run:\n  name: from-scale-of-program\n"})
    assert config_of(*words, folder=tmp_path).run.name == "from-scale-of-program"
    assert config_of(*words, "run.name=typed", folder=tmp_path).run.name == "typed"


@by_hydra
def test_a_scale_has_values_for_what_a_file_chose_and_none_for_null(tmp_path: Path) -> None:
    write(tmp_path, {"scale/mini.yaml": "run:\n  name: mini\n", "scale/base.yaml": "loop: {log_samples: 1}\n"})
    write(tmp_path, {"experiment/none.yaml": "defaults: [quickstart, override /loop: null, override /data: null]\n"})
    (tmp_path / "scale" / "loop").mkdir()
    (tmp_path / "scale" / "loop" / "mini_grpo.yaml").write_text("defaults: [/scale/base@_here_]\nloop: {steps: 7}\n")
    chosen = compose_raw([QUICKSTART, "scale=mini"], extra_dir=tmp_path)
    assert (chosen["run"]["name"], chosen["loop"]["steps"], chosen["loop"]["log_samples"]) == ("mini", 7, 1)
    assert compose_raw([QUICKSTART, "scale=mini", "loop.steps=8"], extra_dir=tmp_path)["loop"]["steps"] == 8
    without = compose_raw(["+experiment=none", "scale=mini"], extra_dir=tmp_path)
    assert without["run"]["name"] == "mini"
    assert without["loop"]["steps"] == compose_raw([QUICKSTART])["loop"]["steps"]


@by_hydra
def test_the_user_has_a_folder_of_their_own(tmp_path: Path) -> None:
    write(tmp_path, {"tpu/mine.yaml": "defaults: [v5litepod_16]\nzone: europe-west4-b\n"})
    assert config_of("tpu=mine", "program=command", folder=tmp_path).tpu.zone == "europe-west4-b"
    assert "mine" in config_groups(tmp_path)["tpu"]


@by_hydra
def test_the_cures_are_understood_and_rewards_are_replaced() -> None:
    cures = [r"loop.rewards={my_rewards\:brief: 0.1}", "env.vars.LEVEL=0", "env.vars.FAST=true", "env.vars.RATE=0.5"]
    config = config_of(QUICKSTART, *cures)
    assert config.loop.rewards == {"my_rewards:brief": 0.1}  # pyright: ignore[reportOptionalMemberAccess, reportAttributeAccessIssue]
    assert config.env.vars == {"LEVEL": "0", "FAST": "true", "RATE": "0.5"}


@by_hydra
def test_several_threads_may_compose_at_once() -> None:
    """Runs of samplers that were replaced are composed from their records in threads."""
    chunks = [1, 2, 3]
    with ThreadPoolExecutor(len(chunks)) as pool:
        made = list(pool.map(lambda chunk: compose_raw([f"run.seed={chunk}", "cloud=local"]), chunks))
    assert [one["run"]["seed"] for one in made] == chunks


LINEAR = {"kind": "linear", "warmup_steps": 5, "horizon_steps": 80, "final_fraction": 0.1}
KEY = "optimizer.schedule"
REPLACED = f"{KEY}={{kind: constant, warmup_steps: 1}}"
CONSTANT = {"kind": "constant", "warmup_steps": 1}


@by_hydra
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], LINEAR),
        ([f"+{REPLACED}"], CONSTANT),
        ([REPLACED, f"{KEY}.warmup_steps=3"], CONSTANT | {"warmup_steps": 3}),
        ([f"{KEY}.warmup_steps=3", REPLACED], CONSTANT),
        ([f"{KEY}={{kind: linear, warmup_steps: 1}}"], LINEAR | {"warmup_steps": 1}),
        ([f"{KEY}={{warmup_steps: 1}}"], LINEAR | {"warmup_steps": 1}),
        ([f"{KEY}.kind=constant"], LINEAR | {"kind": "constant"}),
        ([f"~{KEY}.horizon_steps"], {k: v for k, v in LINEAR.items() if k != "horizon_steps"}),
    ],
)
def test_the_command_line_replaces(words: list[str], expected: dict[str, object]) -> None:
    assert compose_raw([QUICKSTART, *words])["optimizer"]["schedule"] == expected


def test_a_planned_file_and_a_sweep_replace_too() -> None:
    assert with_overrides(compose_raw([QUICKSTART]), [REPLACED])["optimizer"]["schedule"] == CONSTANT
    cases = [[QUICKSTART, *case] for case in ([REPLACED], [])]
    found = [config.optimizer.schedule for config, _ in compose_variants(cases) if config and config.optimizer]
    assert [*map(type, found)] == [ConstantSchedule, DecaySchedule]


@by_hydra
def test_files_replace_in_their_order(tmp_path: Path) -> None:
    """A group of the user's built on a bundled one, and three experiments that build on each other."""
    files = {
        "optimizer/mine.yaml": "defaults: [muon]\n"
        "schedule: {kind: linear, warmup_steps: 2, horizon_steps: 9, final_fraction: 0}\n",
        "experiment/base.yaml": "defaults: [quickstart, {override /optimizer: mine}, _self_]\n"
        "optimizer: {schedule: {warmup_steps: 3}}\n",
        "experiment/other.yaml": "defaults: [base, _self_]\noptimizer: {schedule: {kind: constant, warmup_steps: 1}}\n",
        "experiment/more.yaml": "defaults: [other, _self_]\noptimizer: {schedule: {warmup_steps: 4}}\n",
    }
    expected = {
        "+experiment=base": LINEAR | {"warmup_steps": 3},  # quickstart's own values come after the optimizer's file
        "+experiment=other": CONSTANT,
        "+experiment=more": CONSTANT | {"warmup_steps": 4},
    }
    write(tmp_path, files)
    for word, values in expected.items():
        assert compose_raw([word], extra_dir=tmp_path)["optimizer"]["schedule"] == values, word
    words = ["program=trainer", "optimizer=mine"]
    assert compose_raw(words, extra_dir=tmp_path)["optimizer"]["schedule"]["horizon_steps"] == 9


def test_a_kind_alone_is_told_how_to_replace_the_mapping() -> None:
    """And a section is chosen as a group, and keeps what it builds on."""
    assert compose_raw(["cloud=local", "program=command"])["cloud"]["apis"]
    said = " ".join(problems_of(QUICKSTART, "optimizer.kind=lion"))
    assert " b2" not in said, "lion has it"
    assert "another kind of this section; choose its group (optimizer=…)" in said
    assert problems_of(QUICKSTART, f"{KEY}.kind=constant") == [
        f"{KEY}: horizon_steps, final_fraction belong to another kind of this section; set the section whole "
        f"({KEY}={{kind: …}}), or remove them: ~{KEY}.horizon_steps ~{KEY}.final_fraction"
    ]


WORDS = ["cloud=local", "program=command", "program.command=[a]"]
with_secrets = pytest.mark.usefixtures("variables")
SECRETS = {
    "HF_TOKEN": "hf_planted0123456789", "AWS_SECRET_ACCESS_KEY": "planted", "DB_PASSWORD": "planted",
    "GITHUB_PAT": "planted", "STRIPE_KEY": "planted", "SENTRY_DSN": "planted", "SHORT_TOKEN": "1234567",
    "DATABASE": "postgres://me:planted@host/db",
    "DEPLOY": "-----BEGIN OPENSSH PRIVATE KEY-----\\nplanted", "my_api_key": "planted",
}  # fmt: skip


@pytest.fixture
def variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SECRETS, "EDITION": "second", "PWD": "/home/me"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@with_secrets
@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_refused_by_name_or_value_and_not_shown(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        compose([*WORDS, f"env.vars.X=${{oc.env:{name}}}"])
    said = f"env.vars.X: ${{oc.env:{name}}} would put a secret into the plan and the record"
    assert str(caught.value).startswith(said)
    assert f"env.secrets.{name}=env" in str(caught.value)
    assert SECRETS[name] not in str(caught.value)


@with_secrets
def test_what_is_no_secret_is_resolved_as_omegaconf_does() -> None:
    config = config_of(*WORDS, "env.vars.X=${oc.env:EDITION}", "env.vars.Y='${oc.env:NONE_SET,5}-${oc.env:PWD}'")
    assert dict(config.env.vars) == {"X": "second", "Y": "5-/home/me"}
    with pytest.raises(ConfigError, match="NONE_SET"):
        compose([*WORDS, "env.vars.X=${oc.env:NONE_SET}"])
    assert OmegaConf.create({"a": "${oc.env:HF_TOKEN}"}).a == SECRETS["HF_TOKEN"], "the configs of others are theirs"


@with_secrets
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


CACHED = ("+experiment=quickstart", "optimizer.lr=1e-3")


@pytest.fixture
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder with one experiment."""
    (folder := tmp_path / "slipway" / "experiment").mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [quickstart]\nrun: {seed: 5}\n")
    return tmp_path / "slipway"


@pytest.mark.usefixtures("composed_by_hydra", "own_home")
def test_the_second_time_needs_no_hydra_unless_the_file_is_damaged(
    monkeypatch: pytest.MonkeyPatch, own_home: Path
) -> None:
    composed = compose_raw(CACHED)
    [kept] = (own_home / "cache" / "composed").iterdir()
    kept.write_text("{")
    assert compose_raw(CACHED) == composed
    assert json.loads(kept.read_text()) == composed
    monkeypatch.setattr(composing, "_compose_unresolved", lambda *_: pytest.fail("composed again"))
    assert compose_raw(CACHED) == composed
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


@pytest.mark.usefixtures("composed_by_hydra", "own_home")
def test_whatever_hydra_reads_is_in_the_key(own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys: list[Path | None] = []

    def look(*words: str, folder: Path | None = own) -> None:
        keys.append(composed_cache.cache_file(("+experiment=mine", *words), folder))

    look()
    look("run.seed=1")
    look(folder=None)
    assert compose_raw(["+experiment=mine"], extra_dir=own)["run"]["seed"] == 5
    file = own / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("5", "7"))
    assert compose_raw(["+experiment=mine"], extra_dir=own)["run"]["seed"] == 7
    look()
    (own / "experiment" / "other.yaml").write_text("")
    look()
    monkeypatch.setenv("WANDB_MODE", "online")  # a bundled experiment reads it
    look()
    (tmp_path / "hydra_plugins" / "search_path").mkdir(parents=True)  # a plugin that is installed later
    monkeypatch.syspath_prepend(str(tmp_path))
    look()
    monkeypatch.setattr(composed_cache, "_modified", lambda module: 1)  # another version of Hydra
    look()
    bundled = tmp_path / "conf"
    (bundled / "schema" / "training").mkdir(parents=True)
    monkeypatch.setattr(composed_cache, "CONFIG_DIR", bundled)
    for number in (1, 2):
        (schema := bundled / "schema" / "training" / "loop.py").touch()
        os.utime(schema, ns=(number, number))
        look()
    assert len({file.name for file in keys if file}) == len(keys)


@pytest.mark.usefixtures("composed_by_hydra", "own_home")
@pytest.mark.parametrize(
    "text", ["run: {name: '${oc.env:USER}'}", "run: {name: '${now:%H}'}", "hydra: {searchpath: [file:///x]}"]
)
def test_what_depends_on_more_is_not_kept(own: Path, text: str) -> None:
    """A secret of the environment would reach the disk; a time would stand still."""
    (own / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    assert composed_cache.cache_file(["+experiment=mine"], own) is None
    assert composed_cache.cache_file([text], None) is None


@pytest.mark.usefixtures("composed_by_hydra", "own_home")
def test_the_folder_stays_small_and_what_json_cannot_represent_is_not_kept(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed_cache.store(own_home / "cache" / "x.json", {"by_number": {1: "one"}})
    assert not own_home.exists()
    monkeypatch.setattr(composed_cache, "MOST_FILES", 2)
    for i in range(4):
        composed_cache.store(own_home / "cache" / f"{i}.json", {"i": i})
    assert len([*(own_home / "cache").iterdir()]) == 2


@pytest.mark.usefixtures("composed_by_hydra", "own_home")
def test_plan_imports_nothing_slow_when_the_config_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))  # no credentials
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")  # without a network
    monkeypatch.chdir(tmp_path)
    argv = ["plan", "+experiment=gemma2b_gsm8k", "cloud.project=a-project"]
    main.parse(argv).options.config()  # now it is known
    slow = "hydra omegaconf googleapiclient paramiko fabric cryptography tenacity jax huggingface_hub asyncio http ssl"
    run = (
        f"import sys; sys.argv = ['slipway', *{argv!r}]\n"
        "from controller.__main__ import main\nmain()\n"
        f"print(sorted({{*{slow.split()!r}, 'rich', 'numpy'}} & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert "run      gemma2b_gsm8k-" in done.stdout


@pytest.mark.parametrize(
    "text",
    ["${", "${}", "${oc.env:INNOCENT}", "${oc.env:INNOCENT", "${a.b}", "\\${x}", "echo ${HOME:-x} $$", "${env.vars.B}",
     "${oc.create:{a: 1}}", "\0held 0", "???"],
)  # fmt: skip
def test_texts_of_a_record_stay_as_they_are(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may have written it: nothing of this machine's environment gets in, and no text ends a verb."""
    monkeypatch.setenv("INNOCENT", "of this machine")
    data = {"tpu": {"zone": "a"}, "env": {"vars": {"A": text, "B": "b"}}, "program": {"setup": [["sh", "-c", text]]}}
    for words in ([], ["tpu.zone=b"], ["env.vars.B=c"], ["program.setup=[]"]):
        made = with_overrides(data, words)
        assert made["env"]["vars"]["A"] == text
        assert made["program"]["setup"] in ([["sh", "-c", text]], [])
    assert with_overrides(data, ["env.vars.A=new"])["env"]["vars"]["A"] == "new"
