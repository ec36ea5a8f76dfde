"""Which records this machine may execute: any change of one asks again, and every part that executes is shown."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from controller.config.run_yaml import render
from controller.core.errors import ConfigError
from controller.core.json_documents import DamagedRecordError
from controller.inputs.code import CodeSnapshot
from controller.plan.worker_steps import venv_requirements
from controller.records import restore, trust
from tests.composed import config_of

DOCUMENT: dict[str, Any] = {
    "run": "r-1", "code_sha256": "a" * 64, "requirements": "a==1\nb==2\n", "config": {"x": [1, {"y": float("nan")}]},
    "project": "p", "bucket": "b", "assets": [], "run_yaml": "dir: gs://b/runs/r-1\n",
}  # fmt: skip
GIT_LINE = f"lab @ git+https://h/lab@{'b' * 40}"
WORDS = ("cloud=local", "program=command", "program.command=[python, train.py, 'a b']", "program.setup=[[make, it]]")


def test_any_change_of_a_record_asks_again(tmp_path: Path) -> None:
    document = DOCUMENT
    assert not trust.is_trusted(tmp_path, document)
    trust.remember(tmp_path, document)
    assert trust.is_trusted(tmp_path, json.loads(json.dumps(document)))
    for key in document:
        assert not trust.is_trusted(tmp_path, document | {key: "other"})
    assert not trust.is_trusted(tmp_path, document | {"more": None})
    (tmp_path / "file").write_text("")
    trust.remember(tmp_path / "file", document)
    assert not trust.is_trusted(tmp_path / "file", document), "a folder that cannot be written asks again"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ((), ("command", "python train.py 'a b'")),
        ((), ("setup", "make it")),
        (("code.resources=[a:B]",), ("own code", "code.resources: a:B, on this machine")),
        (("notify.notifier=a:tell",), ("own code", "notify.notifier: a:tell, on this machine")),
        (("cloud=here", "cloud.backend=cpu", "code.checks=[a:B]"), ("own code", "code.checks: a:B, on this machine")),
        (
            ("env.secrets={KEY: 'file:~/.ssh/id_rsa'}",),
            ("secret", "KEY, which this machine reads from file:~/.ssh/id_rsa"),
        ),
        ((), ("record", "gs://b/runs/r-1/record.json, in project p")),
        (("env.packages=none",), ("packages", "none")),
        (("env.packages=lock",), ("packages", "lock, in which 2 lines are not in that of this version: a==1, b==2")),
        (("cloud.roles=[roles/owner]",), ("sets", 'cloud.roles: ["roles/owner"]')),
        (("cloud.bucket_roles=[roles/storage.admin]",), ("sets", 'cloud.bucket_roles: ["roles/storage.admin"]')),
        (("cloud.service_account=boss",), ("sets", 'cloud.service_account: "boss"')),
        (("network.open_to_world=true",), ("sets", "network.open_to_world: true")),
        (("env.vars.LD_PRELOAD=/x.so",), ("sets", 'env.vars.LD_PRELOAD: "/x.so"')),
        (("ssh.host_keys=trust_on_first_use",), ("sets", 'ssh.host_keys: "trust_on_first_use"')),
        (("recovery.driver=bastion",), ("sets", 'recovery.driver: "bastion"')),
        (("env.packages=requirements", "env.requirements=own.txt"), ("build", f"{GIT_LINE}, on this machine")),
        (
            (f"code.repository={{url: 'https://h/r', commit: {'a' * 40}}}",),
            ("from", f"https://h/r at {'a' * 40}"),
        ),
    ],
)
def test_all_that_would_be_executed_is_named(tmp_path: Path, words: tuple[str, ...], shown: tuple[str, str]) -> None:
    (tmp_path / "own.txt").write_text(f"numpy==2.0.0\n{GIT_LINE}\n")
    code = CodeSnapshot(tmp_path, ("lib.py", "own.txt", "train.py"))
    found = list(trust.what_it_executes(DOCUMENT, config_of(*WORDS, *words), code))
    assert shown in found
    assert ("files", f"3 files in {tmp_path}") in found
    assert not [text for name, text in found if name == "sets" and not words], "what is usual is left out"
    assert ("commit", "unknown, as the record says") in found


TRAINED = ("cloud=local", "model=tiny", "data=arithmetic", "loop=grpo", "optimizer=adamw", "env.packages=lock")


def test_what_the_program_reads_is_what_its_config_says_or_is_shown(tmp_path: Path) -> None:
    """The trainer reads run.yaml, which a stranger can write as he likes beside an innocent config."""
    config, code = config_of(*TRAINED), CodeSnapshot(tmp_path, ())
    honest = render(config, "r-1", "b", {})
    document = DOCUMENT | {"run_yaml": honest, "requirements": venv_requirements(config, code).text}

    def shown(text: str) -> list[str]:
        found = trust.what_it_executes(document | {"run_yaml": text}, config, code)
        return [words for name, words in found if name == "run.yaml"]

    assert shown(honest) == []
    assert ("packages", "lock, that of this version") in list(trust.what_it_executes(document, config, code))
    for path, value in (
        (("loop", "rewards"), {"os:system": 1.0}), (("dir",), "gs://theirs/x"), (("model", "weights"), "/etc/passwd"),
        (("loop", "unknown"), [1]), (("checkpoint", "save_interval"), 1), (("seed",), 7), (("data",), None),
    ):  # fmt: skip
        changed = yaml.safe_load(honest)
        place = changed
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value
        [words] = shown(yaml.safe_dump(changed))
        assert words.startswith(".".join(path)), path
        assert words.endswith(", which its config does not say")


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "a: 1", "dir: [x]", "a: &a [x]\ndir: x\nb: *a", "x: &x [*x]", "{", "!!python/object:os.x {}",
        "dir: a\0b", "[" * 5000, "dir: x\nt: 2026-01-01\n",
    ],
)  # fmt: skip
def test_a_run_yaml_that_slipway_did_not_write_is_one_line(tmp_path: Path, text: str) -> None:
    with pytest.raises(DamagedRecordError, match=r"^--run r-1: the run\.yaml of its record is damaged: .*$") as refused:
        trust.require_trust(
            DOCUMENT | {"run_yaml": text}, config_of(*TRAINED), CodeSnapshot(tmp_path, ()), tmp_path, trust=True,
            asks=False,
        )  # fmt: skip
    assert len(str(refused.value)) < 300
    assert not trust.is_trusted(tmp_path, DOCUMENT | {"run_yaml": text})


def test_the_user_is_asked_once_and_no_means_that_nothing_happens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, code, answers = config_of(*WORDS), CodeSnapshot(tmp_path, ()), [False, True]
    monkeypatch.setattr(trust, "confirm", lambda question: answers.pop(0))
    with pytest.raises(ConfigError, match="nothing was executed"):
        trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=True)
    for _ in range(3):
        trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=True)
    assert answers == []


def test_nobody_to_ask_is_a_no_and_a_long_value_is_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config, code = config_of(*WORDS[:2], f"program.command=[{'x' * 9000}]"), CodeSnapshot(tmp_path, ())
    for asks in (True, False):
        with pytest.raises(ConfigError, match=r"--run r-1: nothing was executed: .* pass --trust"):
            trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=asks)
    assert "(9000 characters)" in capsys.readouterr().err
    trust.require_trust(DOCUMENT, config, code, tmp_path, trust=True, asks=False)
    trust.require_trust(DOCUMENT, config, code, tmp_path, trust=False, asks=False)


@pytest.mark.parametrize(
    "word",
    ["env.vars.X=${oc.env:INNOCENT}", "+env.vars={X: '${oc.env:INNOCENT}'}", "hydra.searchpath=[file://FOLDER]",
     "++hydra.searchpath=['file://FOLDER']"],
)  # fmt: skip
def test_a_record_of_an_older_slipway_is_completed_with_nothing_of_this_machine(
    word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys that it lacks come from its overrides, which others may have written."""
    monkeypatch.setenv("INNOCENT", "of this machine")
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment/theirs.yaml").write_text("# @package _global_\nenv: {vars: {X: of this machine}}\n")
    words = ["cloud=local", "program=command", "program.command=[a]"]
    config = json.loads(config_of(*words).model_dump_json())
    del config["recovery"], config["env"]
    more = ["+experiment=theirs"] if "searchpath" in word else []
    document = {"run": "r-1", "slipway": "1", "config": config, "overrides": [*words, *more]}
    document["overrides"].append(word.replace("FOLDER", str(tmp_path)))
    found = restore.recorded_config(document, tmp_path)
    assert "of this machine" not in found.model_dump_json()
    assert (found.program.kind, found.cloud.kind) == ("command", "local")
