"""What Hydra, OmegaConf and YAML refuse is one line that names the file or the key and the cure."""

from pathlib import Path

import pytest

from controller.config.compose import compose, compose_raw, compose_variants
from controller.core.errors import ConfigError

TINY = ["cloud=local", "loop=grpo", "model=tiny", "optimizer=adamw", "data=arithmetic"]
GLOBAL = "# @package _global_\n"


def refusal(words: list[str], folder: Path | None = None) -> str:
    """The one line that composing these words ends with."""
    with pytest.raises(ConfigError) as caught:
        compose(words, extra_dir=folder)
    [said] = caught.value.problems
    assert "\n" not in said
    with pytest.raises(ConfigError) as again:
        [*compose_variants([words], extra_dir=folder)]
    assert again.value.problems == [said]
    return said


@pytest.mark.parametrize("name", ["1", "42", "3.5", "1e5", "1_2", "nan", "true", "False", ".5", "-inf", "0x1F", "007"])
@pytest.mark.parametrize("group", ["+experiment", "data", "tpu"])
def test_a_choice_that_looks_like_a_number_is_a_name(name: str, group: str, tmp_path: Path) -> None:
    kind = group.lstrip("+")
    assert refusal([f"{group}={name}"]).startswith(f"{kind}: no {kind} named '{name}'; ")
    (tmp_path / kind).mkdir()
    (tmp_path / kind / f"{name}.yaml").write_text(f"{GLOBAL}env: {{vars: {{MINE: x}}}}\n")
    assert compose_raw([f"{group}={name}"], extra_dir=tmp_path)["env"]["vars"]["MINE"] == "x"


@pytest.mark.parametrize("name", ["null", "NULL", "Null"])
def test_null_is_no_choice(name: str) -> None:
    assert refusal([f"data={name}"]).startswith(f"data: no data named '{name}'; ~data removes it; choices: arithmetic")
    assert refusal(["+experiment=quickstart", f"model@loop.teacher={name}"]).startswith("model@loop.teacher: no model")


@pytest.mark.parametrize(
    ("file", "content", "words", "said"),
    [
        (
            "experiment/mine.yaml",
            f"{GLOBAL}run: {{}}\n# caf\udce9\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 3: is not UTF-8",
        ),
        (
            "data/mine.yaml",
            "kind: \udcff\n",
            ["data=mine"],
            "slipway/data/mine.yaml, line 1: is not UTF-8",
        ),
        (
            "loop/mine.yaml",
            "\udcfe\udcff",
            ["+experiment=quickstart", "loop=mine"],
            "slipway/loop/mine.yaml: begins with a byte-order mark",
        ),
        (
            "experiment/mine.yml",
            GLOBAL,
            ["+experiment=mine"],
            "experiment: no experiment named 'mine'; slipway/experiment/mine.yml must be renamed to mine.yaml; ",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [quickstart]\n",
            ["+experiment=Mine"],
            "experiment: no experiment named 'Mine'; did you mean experiment=mine? choices: ",
        ),
        *(
            (
                "experiment/mine.yaml",
                f"{GLOBAL}defaults: [quickstart]\nloop:\n  steps: '{written}'\n",
                ["+experiment=mine"],
                f"loop.steps: slipway/experiment/mine.yaml, line 4: {said}",
            )
            for written, said in (
                ("${loop.group_size * 3}", "${…} is one key's value, and nothing is computed; write the result"),
                ("${loop.group_size*3}", "${…} is one key's value, and nothing is computed"),
                ("${loop.group_size-1}", "${…} is one key's value, and nothing is computed"),
                ("${round(loop.group_size)}", "${…} is one key's value, and nothing is computed"),
                ("${loop.group_size", "no } closes the ${; a text with it is written \\${"),
                ("${loop.group-size}", "there is no key loop.group-size"),
                ("${assets.models.gpt-2}", "there is no key assets.models.gpt-2"),
            )
        ),
        ("data/mine.YAML", "kind: x", ["data=mine"], "data: no data named 'mine'; slipway/data/mine.YAML must be"),
        ("data/mine.yml", "kind: x", ["data=mine.yml"], "data: no data named 'mine.yml'; slipway/data/mine.yml must"),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults:\n  - override data: gsm8k\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 3: data is a group of the whole config; write `override /data: gsm8k`",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults:\n  - override /nobody: x\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 3: nobody: unknown group; groups: assets, cloud",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [quickstart]\nrun:\n  name: a\n  note: ${{nowhere}}\n",
            ["+experiment=mine"],
            "run.note: slipway/experiment/mine.yaml, line 5: there is no key nowhere",
        ),
        (
            "loop/mine.yaml",
            "defaults: [grpo]\nnote: ${loop.twice}\n",
            ["+experiment=quickstart", "loop=mine"],
            "loop.note: slipway/loop/mine.yaml, line 2: there is no key loop.twice",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [quickstart]\nprogram:\n  command: [a, '${{no_such:1}}']\n",
            ["+experiment=mine"],
            "program.command.1: slipway/experiment/mine.yaml, line 4: there is no such ${…:…}; ${oc.env:NAME} reads",
        ),
        ("data/mine.yaml", "kind: [", ["data=mine"], "slipway/data/mine.yaml, line 1: a bracket or quote is"),
        ("data/mine.yaml", "3", ["data=mine"], "slipway/data/mine.yaml, line 1: must be `key: value` lines, not '3'"),
        (
            "data/mine.yaml",
            "defaults: 3",
            ["data=mine"],
            "slipway/data/mine.yaml, line 1: defaults must be a list: `- override /mod",
        ),
        (
            "data/mine.yaml",
            "defaults: [[3]]",
            ["data=mine"],
            "slipway/data/mine.yaml, line 1: defaults: a list is no name of a file",
        ),
        (
            "data/mine.yaml",
            "a: &a [*a]",
            ["data=mine"],
            "slipway/data/mine.yaml: an alias stands in what it means",
        ),
        (
            "data/mine.yaml",
            "kind: ${x",
            ["data=mine"],
            "kind: slipway/data/mine.yaml, line 1: no } closes the ${",
        ),
        (
            "experiment/mine.yaml",
            "\udcff\udcfe#\0\n\0",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml: begins with a byte-order mark; save it as UTF-8 without one",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}- loop\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 2: must be `key: value` lines, not a list",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}env: {{vars: [A]}}\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 2: env.vars: must be `key: value` lines, not a list",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [program: command]\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 2: program is a group of the whole config; write `override /program:",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [/program: command]\n",
            ["+experiment=mine"],
            "slipway/experiment/mine.yaml, line 2: program: is chosen already, and a file can only override it; writ",
        ),
        ("data/mine.yaml", "? [a]\n: b", ["data=mine"], "slipway/data/mine.yaml, line 1: a list cannot be a key"),
        (
            "experiment/quickstart.yaml",
            f"{GLOBAL}run: {{name: mine}}\n",
            ["+experiment=quickstart"],
            "slipway/experiment/quickstart.yaml: is never read, since Slipway has its own experiment=quickstart;",
        ),
        (
            "env/mine.yaml",
            "vars: {A: b}",
            ["env=mine"],
            "env is no group that a config chooses; put its keys into an experiment, or write env.KEY=…",
        ),
        (
            "tpu/mine.yaml",
            f"{GLOBAL}defaults: [v5litepod_8]\n",
            ["tpu=mine"],
            "slipway/tpu/mine.yaml, line 1: remove '# @package _global_'; a file of tpu begins with the keys of tpu",
        ),
        (
            "scale/mine.yaml",
            "loop.steps: 3\n",
            ["scale=mine"],
            "slipway/scale/mine.yaml: must begin with the line '# @package _global_'",
        ),
        (
            "prompt/mine.yaml",
            "defaults: [zero_shot]\n",
            ["prompt=mine"],
            "slipway/prompt/mine.yaml: must begin with the line '# @package data.prompt'",
        ),
        (
            "optimiser/mine.yaml",
            "defaults: [adamw, _self_]\n",
            ["optimiser=mine"],
            "slipway/optimiser/mine.yaml: slipway/optimiser is no group; did you mean slipway/optimizer?",
        ),
        (
            "data/mine.yaml",
            "defaults: [nobody]",
            ["data=mine"],
            "slipway/data/mine.yaml, line 1: no data named 'nobody'",
        ),
    ],
)
def test_a_file_that_is_refused(file: str, content: str, words: list[str], said: str, tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    (folder / file).parent.mkdir(parents=True)
    (folder / file).write_bytes(content.encode(errors="surrogateescape"))
    assert refusal(words, folder).startswith(said)


def test_an_unreadable_file_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    (folder / "data" / "mine.yaml").mkdir(parents=True)
    (folder / "data" / "link.yaml").symlink_to("/nowhere")
    assert refusal(["data=mine"], folder) == "slipway/data/mine.yaml is a folder, not a file"
    assert refusal(["data=link"], folder) == "slipway/data/link.yaml is a link to a file that does not exist"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("loop: {steps: 3}\n", "loop: has no `kind`; choose its group: loop=…, in a file `override /loop: …`"),
        ("tpu.zone: us-central1-a\n", "tpu.zone: a key of a file has no dots; write tpu: {zone: …}"),
        ("loop.alerts.x: 3\n", "loop.alerts.x: a key of a file has no dots; write loop: {alerts: {x: …}}"),
    ],
)
def test_a_key_of_a_file_that_is_refused(content: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}{content}")
    _, problems = compose(["+experiment=mine"], extra_dir=tmp_path)
    assert str(problems[0]).startswith(said)


def test_what_the_schema_refuses_is_found_where_it_is_set_last(tmp_path: Path) -> None:
    folder = tmp_path / "slipway"
    (folder / "experiment").mkdir(parents=True)
    (folder / "loop").mkdir()
    (folder / "loop" / "mine.yaml").write_text("defaults: [grpo]\nstepz: 1\n")
    (folder / "experiment" / "mine.yaml").write_text(
        f"{GLOBAL}defaults: [quickstart, override /loop: mine]\n"
        "optimizer: {schedule: {kind: x}}\nrun: {seed: -1}\n"
    )
    _, problems = compose(["+experiment=mine", "loop.steps=0"], extra_dir=folder)
    placed = {problem.key: problem.place for problem in problems}
    assert placed["run.seed"] == "slipway/experiment/mine.yaml, line 4"
    assert placed["loop.stepz"] == "slipway/loop/mine.yaml, line 2"
    assert placed["optimizer.schedule.kind"] == "slipway/experiment/mine.yaml, line 3"
    assert placed["loop.steps"] == ""
    _, problems = compose(["+experiment=mine", "run.seed=-2"], extra_dir=folder)
    assert str(next(p for p in problems if p.key == "run.seed")).endswith("(got -2)")
    assert str(next(p for p in problems if p.key == "loop.stepz")).endswith(" (slipway/loop/mine.yaml, line 2)")


QUICKSTART = "+experiment=quickstart"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("optimizer.schedule=cosine", "optimizer.schedule: is a section with keys, not 'cosine'; did you mean "
         "optimizer.schedule.kind=cosine; kinds: constant, cosine, linear, warmup_stable_decay, piecewise"),
        ("optimizer.schedule.kind=cosin", "optimizer.schedule.kind: unknown kind 'cosin'; did you mean 'cosine'? "
         "choices: constant, cosine, linear, warmup_stable_decay, piecewise"),
        ("logging.wandb=mine", "logging.wandb: is a section with keys, not 'mine'; did you mean "
         "logging.wandb.project=mine; keys: entity, mode, project"),
        ("logging.trackers=[wandv]", "logging.trackers: must be one of tensorboard, trackio, mlflow, wandb, or "
         "module:name"),
        ("loop.environment.options=[1]", "loop.environment.options: must be a mapping {NAME: VALUE, …}"),
        ("logging.trackers=wandb", "logging.trackers: must be a list"),
        ("logging.trackers=[mlflow,mlflow]", "logging.trackers: has mlflow twice; name it once"),
        ("model.num_heads=5", "model: num_heads (5) must be a multiple of num_kv_heads (2)"),
        ("loop.rewards={mine:close:1.0}", "loop.rewards: a colon in a name is written \\: on the command line: "
         "{mine\\:close: 1.0}"),
        ("scale=small", "scale: no scale named 'small'; choices: full, tiny"),
    ],
)  # fmt: skip
def test_a_value_in_place_of_a_section_or_a_kind_that_is_none(words: str, said: str) -> None:
    try:
        found = [str(problem) for problem in compose([QUICKSTART, words])[1]]
    except ConfigError as error:
        found = [*error.problems]
    assert any(each.startswith(said) for each in found), found


def test_keys_of_another_kind_are_one_line_behind_what_is_wrong() -> None:
    found = [str(problem) for problem in compose([QUICKSTART, "loop=lm", "loop.stepz=3"])[1]]
    assert found[0] == "loop.stepz: unknown key; did you mean loop.steps?"
    [other] = [each for each in found if "belong to another kind of this section" in each]
    assert other.startswith("loop: prompts_per_step, group_size, ")
    keys = other.partition("remove them: ")[2].split()
    problems = compose([QUICKSTART, "loop=lm", "loop.stepz=3", *keys])[1]
    assert [problem.key for problem in problems] == ["loop.stepz"]


@pytest.mark.parametrize("value", ["true", "{}", "{project: mine}", "{mode: offline}"])
def test_wandb_is_on_with_what_it_needs(value: str) -> None:
    config, problems = compose([QUICKSTART, f"logging.wandb={value}"])
    assert problems == []
    assert config is not None
    assert config.logging is not None
    assert config.logging.wandb is not None
    assert (config.logging.wandb.entity, config.logging.wandb.project) == (
        None,
        "mine" if "mine" in value else "slipway",
    )
    assert compose([QUICKSTART, "logging.wandb=false"])[0] == compose([QUICKSTART])[0]


@pytest.mark.parametrize(
    ("word", "meant"),
    [
        ("dataset=gsm8k", "data=gsm8k"),
        ("model_name=gemma2_2b", "model=gemma2_2b"),
        ("experiment_name=quickstart", "+experiment=quickstart"),
        ("data_path=gsm8k", "data.path=gsm8k"),
        ("dataset=./file.jsonl", "data.path=./file.jsonl"),
        ("spot=false", "tpu.capacity=on_demand"),
        ("preemptible=true", "tpu.capacity=spot"),
        ("use_wandb=no", "logging.wandb=false"),
        ("report_to=none", "logging.wandb=false"),
        ("script=train.py", "`slipway run -- python train.py`"),
        ("entrypoint=scripts/run.sh", "`slipway run -- bash scripts/run.sh`"),
        ("tpu_name=mine", "tpu.name=mine"),
        ("checkpoint_every=50", "checkpoint.save_interval=50"),
        ("lr_decay_steps=50", "optimizer.schedule.decay_steps=50 or optimizer.schedule.horizon_steps=50"),
    ],
)
def test_a_word_leads_to_what_does_the_same_here(word: str, meant: str) -> None:
    assert refusal([word]) == f"{word.partition('=')[0]}: unknown group; did you mean {meant}?"


def test_a_file_of_a_group_comes_before_a_section_that_takes_no_word() -> None:
    assert refusal(["policy=gemma2_2b"]).startswith("policy: unknown group; did you mean model=gemma2_2b? ")
    assert refusal(["wandb=true"]) == "wandb: unknown group; did you mean logging.wandb=true?"


@pytest.mark.parametrize(
    ("word", "meant"),
    [("modl=tiny", "model=tiny"), ("lop=grpo", "loop=grpo"), ("scal=tiny", "scale=tiny"), ("tpus=v4_8", "tpu=v4_8")],
)
def test_a_short_group_is_known_by_its_file(word: str, meant: str) -> None:
    assert refusal([word]).startswith(f"{word.partition('=')[0]}: unknown group; did you mean {meant}?")


@pytest.mark.parametrize("word", ["autoscale=true", "mode=train", "port=22", "include=src", "clouds=many"])
def test_another_word_is_no_misspelling(word: str) -> None:
    key = word.partition("=")[0]
    near = "did you mean cloud=…? " if key == "clouds" else ""
    assert refusal([word]).startswith(f"{key}: unknown group; {near}a key stands behind its section, as in loop.steps")


def test_a_section_is_led_to_its_key_and_a_type_to_its_sizes(tmp_path: Path) -> None:
    for word, said in (
        ("budget=20", "budget: is a section with keys, not '20'; did you mean budget.max_usd=20; keys: "),
        ("logging=wandb", "logging: is a section with keys, not 'wandb'; did you mean logging.wandb=…; keys: "),
        ("cleanup=keep", "did you mean cleanup.on_failure=keep or cleanup.on_success=keep; keys: "),
        ("sweep.search=random", "not 'random'; did you mean sweep.search.method=random; keys: method, metric"),
        ("run=train.py", "run: is a section with keys, not 'train.py'; did you mean `slipway run -- python train.py`"),
        ("tpu=v5e", "tpu: no tpu named 'v5e'; did you mean tpu=v5litepod_1? choices: "),
        ("tpu=v4-8", "tpu: no tpu named 'v4-8'; did you mean tpu=v4_8? choices: "),
        ("tpu.accelerator_type=v5e", "unknown type 'v5e'; closest: v5litepod-1, v5litepod-4, v5litepod-8, "),
    ):
        try:
            problems = [str(problem) for problem in compose([*TINY, word])[1]]
        except ConfigError as error:
            problems = error.problems
        assert said in problems[0], word
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\nloop:\n  steps 3\n")
    assert refusal(["+experiment=mine"], tmp_path).endswith("line 3: loop: a colon is missing: `steps: 3`")


def test_a_program_is_no_file_of_a_group() -> None:
    said = "program: no program named 'train.py'; did you mean `slipway run -- python train.py`? choices: command"
    assert refusal(["program=train.py"]).startswith(said)
    assert refusal(["image=python:3.11"]).startswith("image: unknown group; the VM's image is set with tpu.runtime")
