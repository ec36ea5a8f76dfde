"""What Hydra, OmegaConf and YAML refuse is one line that names the file or the key and the cure."""

from pathlib import Path

import pytest

from controller.config.compose import compose, compose_raw, compose_variants
from controller.core.errors import ConfigError

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
            "cannot compose the config: slipway/experiment/mine.yaml: line 3 is not UTF-8",
        ),
        (
            "data/mine.yaml",
            "kind: \udcff\n",
            ["data=mine"],
            "cannot compose the config: slipway/data/mine.yaml: line 1 is not UTF-8",
        ),
        (
            "loop/mine.yaml",
            "\udcfe\udcff",
            ["+experiment=quickstart", "loop=mine"],
            "cannot compose the config: slipway/loop/mine.yaml: line 1",
        ),
        (
            "experiment/mine.yml",
            GLOBAL,
            ["+experiment=mine"],
            "experiment: no experiment named 'mine'; slipway/experiment/mine.yml must be renamed to end in .yaml; ",
        ),
        ("data/mine.YAML", "kind: x", ["data=mine"], "data: no data named 'mine'; slipway/data/mine.YAML must be"),
        ("data/mine.yml", "kind: x", ["data=mine.yml"], "data: no data named 'mine.yml'; slipway/data/mine.yml must"),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults:\n  - override data: gsm8k\n",
            ["+experiment=mine"],
            "cannot compose the config: a file of the group experiment overrides data without a slash; write "
            "`override /data: …`",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [quickstart]\nrun:\n  name: a\n  note: ${{nowhere}}\n",
            ["+experiment=mine"],
            "cannot compose the config: run.note: slipway/experiment/mine.yaml, line 5: Interpolation key 'nowhere'",
        ),
        (
            "loop/mine.yaml",
            "defaults: [grpo]\nnote: ${loop.twice}\n",
            ["+experiment=quickstart", "loop=mine"],
            "cannot compose the config: loop.note: slipway/loop/mine.yaml, line 2: Interpolation key 'loop.twice' not",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [quickstart]\nprogram:\n  command: [a, '${{no_such:1}}']\n",
            ["+experiment=mine"],
            "cannot compose the config: program.command[1]: slipway/experiment/mine.yaml, line 4: Unsupported",
        ),
        ("data/mine.yaml", "kind: [", ["data=mine"], "cannot compose the config: while parsing a flow"),
        ("data/mine.yaml", "3", ["data=mine"], "cannot compose the config: slipway/data/mine.yaml: Invalid loaded"),
        (
            "data/mine.yaml",
            "defaults: 3",
            ["data=mine"],
            "cannot compose the config: Invalid defaults list in 'data/mine'",
        ),
        (
            "data/mine.yaml",
            "defaults: [[3]]",
            ["data=mine"],
            "cannot compose the config: slipway/data/mine.yaml: defaults:",
        ),
        (
            "data/mine.yaml",
            "a: &a [*a]",
            ["data=mine"],
            "cannot compose the config: slipway/data/mine.yaml: maximum rec",
        ),
        (
            "data/mine.yaml",
            "kind: ${x",
            ["data=mine"],
            "cannot compose the config: kind: slipway/data/mine.yaml, line 1: no ",
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
            "cannot compose the config: In 'experiment/mine': Cannot merge DictConfig with ListConfig; a list stands",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}env: {{vars: [A]}}\n",
            ["+experiment=mine"],
            "cannot compose the config: In 'experiment/mine': Cannot merge DictConfig with ListConfig; a list stands",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [program: command]\n",
            ["+experiment=mine"],
            "cannot compose the config: program: a file chooses it again in `defaults`; write `override /program: com",
        ),
        (
            "experiment/mine.yaml",
            f"{GLOBAL}defaults: [/program: command]\n",
            ["+experiment=mine"],
            "cannot compose the config: program: a file chooses it again in `defaults`; write `override /program: com",
        ),
        ("data/mine.yaml", "? [a]\n: b", ["data=mine"], "cannot compose the config: while constructing a mapping in"),
        ("data/mine.yaml", "defaults: [nobody]", ["data=mine"], "cannot compose the config: In 'data/mine'"),
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
    assert refusal(["data=mine"], folder) == "cannot compose the config: slipway/data/mine.yaml is a folder, not a file"
    assert "data" in refusal(["data=link"], folder)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("loop.steps=[range(1,3)]", r"loop\.steps: range\(…\) cannot stand inside a list or beside other values"),
        ("loop.steps=1,2", r"loop\.steps: '1,2' is several values"),
        ("loop.steps=range(a,b)", r"loop\.steps: .*while evaluating"),
        ("loop.steps=nobody(1)", r"loop\.steps: .*Unknown function 'nobody'"),
        ("loop.steps=int(null)", r"loop\.steps: .*while evaluating"),
        ("loop.steps=a,[", r"loop\.steps: 'a,\[' cannot be parsed"),
        ("run.name=${x", r"run\.name"),
        ("~run.seed", r"~run\.seed: would remove run\.seed=1, which stands before it; leave out one"),
        ("~run", r"~run: would remove run\.seed=1"),
    ],
)
def test_a_value_that_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        compose(["+experiment=quickstart", "run.seed=1", word])
    assert "\n" not in str(caught.value)


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
