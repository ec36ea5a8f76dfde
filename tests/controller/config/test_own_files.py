"""A mistake in a YAML file of one's own is one line with the file, its line and the cure."""

import re
from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.config.own_files import overruled
from controller.core.errors import ConfigError
from tests.controller.config.test_refusals import GLOBAL, refusal

OWN = {
    "a value where a group belongs": ("cloud: local\n", "line 2: cloud is a group; put `- override /cloud: local` u"),
    "an unknown choice there": ("loop: grop\n", "line 2: loop is a group; put `- override /loop: grop` under `defau"),
    "an unknown group": ("defaults:\n  - override /modle: tiny\n", "line 3: modle: unknown group; did you mean over"),
    "an unknown name": ("defaults:\n  - override /model: tiyn\n", "line 3: no model named 'tiyn'; did you mean mode"),
    "an unknown name at a place": (
        "defaults:\n  - /model@loop.teacher: tiyn\n", "line 3: no model named 'tiyn'; did you mean model=tiny?",
    ),
    "no override, no slash": ("defaults:\n  - model: tiny\n", "line 3: model is a group of the whole config; write"),
    "no slash at a place": (
        "defaults:\n  - model@loop.teacher: tiny\n", "line 3: model is a group of the whole config; write `/model@lo",
    ),
    "an unknown base": ("defaults: [quikstart]\n", "line 2: no experiment named 'quikstart'; did you mean experimen"),
    "a group as base": ("defaults: [loop]\n", "line 2: loop is a group; name a file of it, as in `override /loop: "),
    "a number as base": ("defaults: [3]\n", "line 2: defaults: 3 is no name of a file"),
    "no list": ("defaults: quickstart\n", "line 2: defaults must be a list"),
    "an own group that is overridden": ("defaults:\n  - override /extra: x\n", "line 3: extra: the config has no su"),
    "an unknown section": ("steps: 3\n", "line 2: steps: unknown key; did you mean loop.steps?"),
    "a section misspelled": ("optimiser: {lr: 1}\n", "line 2: optimiser: unknown key; did you mean optimizer?"),
    "a key twice": ("run: {seed: 1}\nloop: {}\nrun: {name: x}\n", "line 4: run stands in line 2 already"),
    "a key twice below": ("run:\n  seed: 1\n  seed: 2\n", "line 4: seed stands in line 3 already"),
    "a tab": ("run:\n\tseed: 1\n", "line 3: a tab stands here; indent with spaces"),
    "a space forgotten": ("loop:\n  steps:5\n", "line 3: loop: a space belongs behind the colon: `steps: 5`"),
    "a space forgotten below": ("logging:\n  profile:\n    after:5\n", "line 4: logging.profile: a space belongs"),
    "a space forgotten in the middle": ("loop:\n  steps:5\n  seq_len: 3\n", "line 3: a space belongs behind the colon"),
    "a space forgotten at the margin": ("run:3\n", "line 2: must be `key: value` lines, not 'run:3'; a space belongs"),
    "a sign of equality": ("loop:\n  steps = 5\n", "line 3: loop: a colon sets a value: `steps: 5`"),
    "an empty section": ("loop:\nrun: {seed: 1}\n", "line 2: loop: is empty, which removes the section; leave"),
    "an empty section of no group": ("budget:\n", "line 2: budget: is empty, which removes the section; leave"),
    "its own group below": ("experiment:\n  loop: {steps: 3}\n", "line 2: experiment: remove this line, and move its"),
    "settings of a group": ("prompt:\n  a: 1\n", "line 2: prompt is a group; put `- override /prompt: NAME` under"),
    "settings of Hydra": ("hydra: {run: {dir: x}}\n", "line 2: hydra: Slipway takes no settings of Hydra; leave the s"),
    "an anchor of its own": ("base: &b {steps: 3}\nloop:\n  <<: *b\n", "line 2: base: unknown key; put the anchor whe"),
    "a template": ("run:\n  seed: {{ steps }}\n", "line 3: {{ }} are of templates; write ${KEY}, the value of another"),
    "a no-break space": ("loop:\n\u00a0\u00a0steps: 3\n", "line 3: a no-break space (U+00A0) stands here"),
    "one behind a colon": ("run:\n  name:\u00a0a\n", "line 3: run: a no-break space (U+00A0) stands here"),
    "a colon missing": ("loop\n  steps: 3\n", "line 2: a colon is missing: `loop:`"),
    "a colon missing before a value": ("run:\n  seed 3\n  name: a\n", "line 3: a colon is missing: `seed: 3`"),
    "too deep": ("run:\n  seed: 3\n    name: a\n", "line 4: is indented deeper than line 3, which has a value already"),
    "not deep enough": ("run:\n    seed: 3\n  name: a\n", "line 4: is indented unlike what stands above it; keys of o"),
    "two colons": ("run:\n  name: a: b\n", "line 3: quote a text with a colon and a space in it"),
    "an open quote": ('run:\n  name: "a\nloop:\n  steps: 3\n', "line 3: the quote that opens here is not closed"),
    "an open bracket": ("run:\n  seed: [1, 2\nloop: {}\n", "line 3: the [ that opens here is not closed"),
    "an open brace": ("run: {seed: 1\nloop: 3\n", "line 2: the { that opens here is not closed, or a comma is missing"),
    "another key in braces": ("run: {seed: ${loop.steps}}\n", 'line 2: quote a ${…} inside { } or [ ]: "${KEY}"'),
    "another key in brackets": ("run:\n  name: [${a}, b]\n", 'line 3: quote a ${…} inside { } or [ ]: "${KEY}"'),
    "a section in capitals": ("LOOP: {steps: 3}\n", "line 2: LOOP: unknown key; did you mean loop?"),
    "a bracket too many": ("run: {seed: 1}}\n", "line 2: } closes nothing that is open"),
    "a percent sign": ("run:\n  name: %a\n", 'line 3: quote a text that begins with %: "%…"'),
    "an alias of nothing": ("run:\n  name: *a\n", "line 3: *a stands for no &a above; quote a text that begins with *"),
    "an include": ("loop: !include a.yaml\n", "line 2: !include is of no use here; name the file in `defaults`"),
    "a tag": ("run:\n  name: !a b\n", "line 3: quote a text that begins with !"),
    "a backslash": ('run:\n  name: "C:\\users"\n', "line 3: a backslash is \\\\ in double quotes; use single ones"),
    "question marks": ("run: {seed: ???}\n", "line 2: ??? is no value; write it"),
    "question marks alone": ("run:\n  seed: ???\n", "line 3: run.seed: ??? is no value; write it, or leave the line"),
    "two braces": ("run:\n  seed: ${{loop.steps}}\n", "line 3: run.seed: one brace is enough: ${loop.steps}"),
    "two documents": ("run: {seed: 1}\n---\nrun: {}\n", "line 3: --- begins a second document; a file has one"),
    "a conflict": ("<<<<<<< HEAD\nrun: {}\n=======\n>>>>>>> main\n", "line 2: a conflict of git is not resolved"),
    "the end of a conflict": ("run: {}\n>>>>>>> main\n", "line 3: a conflict of git is not resolved here"),
    "a base as a key": ("base: quickstart\n", "line 2: base: unknown key; a base is named in `defaults: [quickstart"),
    "another one": ("extends: quickstart.yaml\n", "line 2: extends: unknown key; a base is named in `defaults: [quick"),
    "default": ("default: [quickstart]\n", "line 2: default: unknown key; did you mean defaults?"),
    "an override of a list": ("defaults:\n  - override /model: [tiny, gpt2]\n", "line 3: override /model takes one"),
    "override closed up": ("defaults:\n  - override/loop: dapo\n", "line 3: defaults: 'override/loop' is no group; "),
    "a control character": ("run:\n  name: a\x01\n", "line 3: the character U+0001 cannot stand in YAML; remove it"),
    "itself as base": ("defaults: [mine]\n", "line 2: defaults: includes itself (mine → mine); remove it"),
    "a base that is overridden": ("defaults:\n  - override /experiment: quickstart\n", "line 3: experiment: a base is"),
    "a base with its folder": ("defaults: [experiment/quickstart]\n", "line 2: defaults: a base is named without its"),
    "a file of a group as base": ("defaults: [loop/dapo]\n", "line 2: defaults: write `- override /loop: dapo`"),
    "an override above the base": (
        "defaults:\n  - override /loop: dapo\n  - quickstart\n", "line 4: defaults: put `- quickstart` above `- o",
    ),
    "two overrides with one dash": (
        "defaults:\n  - override /model: tiny\n    override /loop: grpo\n", "line 4: defaults: each entry has its own",
    ),
    "an override twice": (
        "defaults:\n  - override /loop: grpo\n  - override /loop: dapo\n", "line 4: defaults: override /loop stands",
    ),
    "an override closed up": ("defaults:\n  - override /loop:dapo\n", "line 3: defaults: a space belongs behind the"),
    "an override of nothing": ("defaults:\n  - override /loop:\n", "line 3: loop: names no file; write `overri"),
    "a file of another group": ("defaults: [gsm8k]\n", "line 2: gsm8k is a file of data; write `- override /data"),
    "items of two columns": ("defaults:\n - quickstart\n  - _self_\n", "line 3: `- _self_` below it stands"),
    "items below a text": ("loop:\n  stop:\n    - a\n      - b\n", "line 4: `- b` below it stands"),
    "an override misspelled": ("defaults:\n  - overide /tpu: v6e_1\n", "line 3: defaults: 'overide /tpu' is no gro"),
    "a key of a group overridden": ("defaults:\n  - override /loop.x: 3\n", "line 3: defaults: 'override /loop.x' is "),
    "itself above its base": ("defaults: [_self_, quickstart]\nrun: {seed: 3}\n", "line 2: defaults: quickstart rep"),
    "two slashes": ("defaults:\n  - override //tpu: v6e_1\n", "line 3: defaults: 'override //tpu' is no gro"),
    "a colon behind override": ("defaults:\n  - override: /tpu: v6e_1\n", "line 3: no colon stands behind override: "),
    "another method": ("defaults:\n  - override /loop: ppo\n", "line 3: no loop named 'ppo'; choices: "),
    "a list in place of a section": ("run: [a]\n", "line 2: run: must be `key: value` lines, not a list"),
}  # fmt: skip


@pytest.mark.parametrize("mistake", OWN)
def test_a_mistake_in_a_file_is_named_with_file_line_and_cure(mistake: str, tmp_path: Path) -> None:
    content, said = OWN[mistake]
    folder = tmp_path / "slipway"
    for group, name, text in (("experiment", "mine", GLOBAL + content), ("extra", "x", "a: 1\n")):
        (folder / group).mkdir(parents=True)
        (folder / group / f"{name}.yaml").write_text(text)
    assert refusal(["+experiment=mine"], folder).startswith(f"slipway/experiment/mine.yaml, {said}")


def test_every_mistake_of_a_file_and_of_its_own_base_is_said_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "base.yaml").write_text(f"{GLOBAL}cloud: local\n")
    (folder / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [base]\nmodel: tiny\nsteps: 1\n")
    with pytest.raises(ConfigError) as caught:
        compose(["+experiment=mine"], extra_dir=folder)
    places = [str(problem).partition(": ")[0].partition("/experiment/")[2] for problem in caught.value.problems]
    assert places == ["base.yaml, line 2", "mine.yaml, line 3", "mine.yaml, line 4"]


GROUPS = [
    ("tpu", "tpu:\n  zone: us-west4-a\n", ["line 1: tpu: remove this line, and move its keys to the left margin"]),
    (
        "tpu",
        f"{GLOBAL}zone: us-west4-a\n",
        ["line 1: remove '# @package _global_'; a file of tpu begins with the keys"],
    ),
    ("loop", "defaults: [grpo]\nsteps:5\n", ["line 2: a space belongs behind the colon: `steps: 5`"]),
]


@pytest.mark.parametrize(("group", "content", "said"), GROUPS)
def test_a_mistake_in_a_file_of_a_group_is_named_likewise(
    group: str, content: str, said: list[str], tmp_path: Path
) -> None:
    folder = tmp_path / "slipway"
    (folder / group).mkdir(parents=True)
    (folder / group / "mine.yaml").write_text(content)
    assert refusal(["+experiment=quickstart", f"{group}=mine"], folder).startswith(
        f"slipway/{group}/mine.yaml, {said[0]}"
    )


def test_a_file_of_a_group_without_a_base_is_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    for group, content in (("tpu", "zoen: us-west4-a\n"), ("cloud", "project: acme-123\n")):
        (folder / group).mkdir(parents=True)
        (folder / group / "mine.yaml").write_text(content)
    [typed, lacking] = compose(["+experiment=quickstart", "tpu=mine"], extra_dir=folder)[1]
    assert str(typed) == "tpu.zoen: unknown key; did you mean tpu.zone? (slipway/tpu/mine.yaml, line 1)"
    assert "lacks accelerator_type, plane, " in str(lacking)
    assert "begin it with `defaults: [" in str(lacking)
    assert str(lacking).endswith(" (slipway/tpu/mine.yaml)")
    said = refusal(["+experiment=quickstart", "cloud=mine"], folder)
    assert "slipway/cloud/mine.yaml: lacks cloud.ssh_source_ranges; begin it with `defaults: [gcp, _self_]`" in said


@pytest.mark.parametrize(
    ("group", "content", "said"),
    [
        (
            "optimizer",
            "kind: adamw\nlr: 1e-3\n",
            "lacks weight_decay, [^;]*; begin it with `defaults: .adamw, _self_.` ",
        ),
        ("optimizer", "kind: muon\nlr: 1e-3\n", "`defaults: .muon, _self_.`, or with another of nanochat "),
        (
            "optimizer",
            "lr: 1e-3\n",
            "has no `kind`; begin it with `defaults: .adafactor, _self_.`, or with another of ",
        ),
        ("loop", "kind: lm\nsteps: 3\n", "has keys of another kind .*; begin it with `defaults: .lm, _self_.` "),
        (
            "loop",
            "kind: dapo\nsteps: 3\n",
            "loop=dapo is a file of the group, and the base of yours with `defaults: .d",
        ),
        ("tpu", "accelerator_type: v5litepod-8\n", "begin it with `defaults: .v5litepod_8, _self_.`, or with another"),
    ],
)
def test_a_file_of_a_group_without_a_base_is_led_to_that_of_its_kind(
    group: str, content: str, said: str, tmp_path: Path
) -> None:
    (folder := tmp_path / "slipway" / group).mkdir(parents=True)
    (folder / "mine.yaml").write_text(content)
    [problem] = compose(["+experiment=quickstart", f"{group}=mine"], extra_dir=folder.parent)[1]
    assert re.search(said, str(problem))


def test_merged_keys_and_keys_with_dots_have_their_line(tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text(
        f"{GLOBAL}defaults: [quickstart]\nloop: &l\n  steps: 3\nrun:\n  <<: *l\n"
        "sweep:\n  params: {run.seed: [0, 1]}\n"
    )
    found = [str(problem) for problem in compose(["+experiment=mine"], extra_dir=folder)[1]]
    assert "run.steps: unknown key; did you mean loop.steps? (slipway/experiment/mine.yaml, line 4)" in found
    assert any("run.seed: must be text, not [0, 1]" in each and each.endswith("mine.yaml, line 8)") for each in found)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "slipway/experiments/mine.yaml",
            "slipway/experiments/mine.yaml lies in a folder of another name; move it to slipw",
        ),
        (
            "conf/experiment/mine.yaml",
            "conf/experiment/mine.yaml is not looked at; move it to slipway/experiment/mine.y",
        ),
        (
            ".slipway/experiment/mine.yaml",
            ".slipway/experiment/mine.yaml is not looked at; move it to slipway/experiment",
        ),
        (
            "Slipway/experiment/mine.yml",
            "Slipway/experiment/mine.yml is not looked at; move it to slipway/experiment/min",
        ),
        (
            "slipway/experiment/sub/mine.yaml",
            "slipway/experiment/sub/mine.yaml is not looked at; move it to slipway/expe",
        ),
        ("slipway/mine.yaml", "slipway/mine.yaml is in no group; move it to slipway/experiment/mine.yaml"),
        ("mine.yaml", "mine.yaml is in no group; move it to slipway/experiment/mine.yaml"),
        ("slipway/experiment/mine.yml", "slipway/experiment/mine.yml must be renamed to mine.yaml"),
        ("slipway/experiment/mine.yaml.txt", "slipway/experiment/mine.yaml.txt must be renamed to mine.yaml; ch"),
        ("slipway/experiment/mine", "slipway/experiment/mine must be renamed to mine.yaml; ch"),
        (
            "slipway/loop/mine.yaml",
            "slipway/loop/mine.yaml is a file of loop: choose loop=mine, or move it to slipway/experiment/mine.yaml",
        ),
        (
            "../slipway/experiment/mine.yaml",
            "/slipway/experiment/mine.yaml exists, and slipway/ is looked for in the curr",
        ),
    ],
)
def test_a_file_in_another_folder_is_found(path: str, said: str, tmp_path: Path) -> None:
    here = tmp_path / "project" / "sub"
    (here / "slipway" / "experiment").mkdir(parents=True)
    (here / path).parent.mkdir(parents=True, exist_ok=True)
    (here / path).write_text(GLOBAL)
    told = refusal(["+experiment=mine"], here / "slipway")
    assert told.startswith("experiment: no experiment named 'mine'; ")
    assert said in told


@pytest.mark.parametrize(
    "base", ["quickstart", "/experiment/quickstart", "quickstart@_global_", "own", "/experiment/own"]
)
def test_a_base_is_named_as_hydra_takes_it(base: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "own.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\nloop: {{stepz: 5}}\n")
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [{base}]\nrun: {{seed: 3}}\n")
    found, problems = compose(["+experiment=mine"], extra_dir=tmp_path)
    assert found is not None
    assert (found.run.seed, found.run.name) == (3, "quickstart")
    assert [str(each).partition("own.yaml")[2] for each in problems] == [", line 3)"] * ("own" in base)


@pytest.mark.parametrize("path", ["slipway/experiment/mine.yaml", "mine.yaml", "experiment/mine"])
def test_a_path_in_place_of_a_name_is_understood(path: str, tmp_path: Path) -> None:
    (tmp_path / "slipway" / "experiment").mkdir(parents=True)
    (tmp_path / "slipway" / "experiment" / "mine.yaml").write_text(GLOBAL)
    if path != "mine.yaml":  # whose ending Hydra leaves out
        assert "; did you mean experiment=mine? " in refusal([f"+experiment={path}"], tmp_path / "slipway")


@pytest.mark.parametrize(
    ("body", "typed", "found"),
    [
        ("tpu: {accelerator_type: v5litepod-8}", ["tpu=v6e_8"], {"tpu.accelerator_type": ("tpu=v6e_8", " too")}),
        ("network:\n  name: x\n  mtu: 1460", ["network=default"], {"network.name": ("network=default", " too")}),
        ("cloud: {kind: gcp}", ["cloud=local"], {"cloud.kind": ("cloud=local", " too")}),
        ("tpu: {accelerator_type: v6e-8, capacity: spot}", ["tpu=v6e_8"], {}),
        ("tpu: {accelerator_type: v5litepod-8}", ["tpu=v6e_8", "tpu.accelerator_type=v6e-4"], {}),
        ("tpu: {accelerator_type: v5litepod-8}", ["run.seed=3"], {}),
        ("run: {seed: 3}", ["tpu=v6e_8", "scale=tiny"], {}),
        ("optimizer: {lr: 1}\nloop: {warm_start_lr: 1e-3, steps: 9}", ["optimizer=lion", "loop=grpo"], {}),
        ("program: {command: [a], needs_chips: false}", ["program=command", f"program.setup=[[{'x' * 5000}]]"], {}),
        ("tpu: {name: mine, capacity: [spot]}", ["tpu=v6e_8"], {}),
        ("tpu: {name: mine}", ["tpu=/etc/hosts", f"tpu.name={'y' * 300}", "env.vars.CONFIG=/tmp/x"], {}),
    ],
)  # fmt: skip
def test_values_of_a_typed_choice_that_the_experiment_replaces_are_named(
    tmp_path: Path, body: str, typed: list[str], found: dict[str, tuple[str, str]]
) -> None:
    folder = tmp_path / "slipway"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\n{body}\n")
    said = overruled(folder, ["+experiment=mine", *typed])
    assert said.keys() == found.keys()
    for key, (choice, cure) in found.items():
        assert said[key].startswith(f"is not that of {choice}: slipway/experiment/mine.yaml, line ")
        assert said[key].endswith(cure)
    assert overruled(None, typed) == {}


def test_a_key_that_yaml_reads_as_no_text_is_shown(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\nnotify: {{on: true}}\n")
    _, [problem] = compose(["+experiment=mine"], extra_dir=tmp_path)
    assert problem.message.endswith("if it is a key, which YAML reads as True, quote it")


@pytest.mark.parametrize(
    ("body", "key"),
    [
        ("budget: {max_hours: 2, max_usd: 1,000}", "budget"),
        ("run: {name: a,5}", "run"),
    ],
)
def test_a_comma_in_a_value_in_braces_begins_a_key(tmp_path: Path, body: str, key: str) -> None:
    folder = tmp_path / "slipway"
    (folder / "experiment").mkdir(parents=True)
    (folder / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\n{body}\n")
    _, [problem] = compose(["+experiment=mine"], extra_dir=folder)
    assert str(problem).startswith(f"{key}: a value stands where `key: value` belongs; a number has no comma, and a ")
    assert problem.place.startswith("slipway/experiment/mine.yaml, line 3")
