"""What users type in place of our words: names of runs, other tools' verbs and flags, other ways to set a value."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from controller.cli import main
from controller.cli.flags import VERBS, flags
from controller.cli.words import OTHER_FLAGS, OTHER_VERBS
from controller.core.errors import ConfigError
from controller.records import index

OLD, NEW, OTHER = "dapo-0123abcd", "dapo-89abcdef", "sft-00000000-r2"
ONE_RUN = sorted(name for name in VERBS if {"named", "--run"} <= {word for flag in flags(name) for word in flag.names})
SEVERAL = ("report", "tensorboard")


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    rows = [(OLD, "dapo", 1.0), (NEW, "dapo", 3.0), (OTHER, "sft", 2.0), ("by-hand", "own", 4.0)]
    index.append_rows(tmp_path / "home", [{"run": run, "name": name, "created": at} for run, name, at in rows])
    (tmp_path / "home" / "sweeps").mkdir()
    (tmp_path / "home" / "sweeps" / "dapo-5f0c.json").write_text("{}")
    for folder in ("model", "plain"):
        (tmp_path / folder).mkdir()
    (tmp_path / "model" / "config.json").touch()
    return tmp_path / "home"


def parsed(words: Sequence[str]) -> main.Command:
    return main.with_runs(main.parse(words))


def refused(*words: str) -> str:
    with pytest.raises(ConfigError) as error:
        parsed(words)
    return str(error.value)


def test_each_verb_of_one_run_takes_it_in_both_ways() -> None:
    assert {*ONE_RUN} == index.RUN_VERBS | {"up", "plan"}


@pytest.mark.parametrize("verb", ONE_RUN)
@pytest.mark.parametrize(
    ("word", "run"),
    [(OLD, OLD), ("dapo", NEW), ("sft", OTHER), ("by-hand", "by-hand"), ("far-12345678", "far-12345678")],
)
def test_an_id_is_that_run_and_a_name_the_latest_of_its_runs(home: Path, verb: str, word: str, run: str) -> None:
    behind = ["8888"] if verb == "forward" else []
    for words in ([verb, word, *behind], [verb, "--run", word, *behind], [verb, *behind, "--run", word]):
        assert parsed(words).options.run_id == run


@pytest.mark.parametrize("verb", SEVERAL)
def test_verbs_of_several_runs_take_names_too(home: Path, verb: str) -> None:
    assert parsed([verb, "dapo", OLD, "--run", "sft"]).flags.runs == [NEW, OLD, OTHER]
    assert parsed(["runs", "--diff", "dapo", "sft"]).flags.diff == [NEW, OTHER]


@pytest.mark.parametrize("verb", sorted({*ONE_RUN} - {"get"}))
def test_a_word_that_names_no_run_is_refused(home: Path, verb: str) -> None:
    behind = ["8888"] if verb == "forward" else []
    assert "no run has the id or name 'dappo' on this machine; did you mean 'dapo'?" in refused(verb, "dappo", *behind)
    assert "give one of them" in refused(verb, OLD, *behind, "--run", NEW)
    said = refused(verb, "quickstart", *behind)
    assert "did you mean +experiment=quickstart?" in said


def test_get_says_that_the_run_comes_before_the_path(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.run(["get", "logs"]) == 2
    assert "name the run before the path: `slipway get RUN logs`" in capsys.readouterr().err


def test_a_sweep_is_shown_by_status_and_named_by_others(home: Path) -> None:
    command = parsed(["status", "dapo-5f0c"])
    assert (command.flags.sweep, command.options.run_id) == ("dapo-5f0c", "")
    assert refused("logs", "dapo-5f0c") == "'dapo-5f0c' is a sweep; `slipway status --sweep dapo-5f0c` lists its runs"


@pytest.mark.parametrize("word", OTHER_VERBS)
def test_verbs_of_other_tools_lead_to_ours(home: Path, word: str) -> None:
    assert word not in VERBS
    meant = refused(word).partition("did you mean `slipway ")[2].partition("`?")[0]
    assert meant == OTHER_VERBS[word]
    assert meant.split()[0] in VERBS or parsed(meant.split()).verb == "up"


@pytest.mark.parametrize("flag", OTHER_FLAGS)
def test_flags_of_other_tools_lead_to_what_does_it_here(home: Path, flag: str) -> None:
    assert refused("up", "+experiment=quickstart", flag).endswith(f"has no {flag}; {OTHER_FLAGS[flag]}")
    assert refused("up", f"{flag}=x").endswith(f"has no {flag}; {OTHER_FLAGS[flag]}")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("status --folow", "status: has no --folow; did you mean --follow?; see slipway status --help"),
        ("plan --state-dir=/x", "plan: has no --state-dir; did you mean run.state_dir=/x?; see slipway plan --help"),
        ("plan --mesh-tensor 4", "plan: has no --mesh-tensor; did you mean mesh.tensor=4?; see slipway plan --help"),
        ("plan --colour 4", "plan: has no --colour; flags: -m, --multirun, --run, --trust, --tpu, --zone"),
        ("logs --tail ten", "--tail: must be a whole number of at least 0, not 'ten'"),
        ("logs --tail=ten", "--tail: must be a whole number of at least 0, not 'ten'"),
        ("logs -n ten", "-n: must be a whole number of at least 0, not 'ten'"),
        ("logs 3", "no run has the id or name '3' on this machine; did you mean --worker 3?"),
        ("runs --status failed", "runs: has no --status; did you mean --where?"),
        ("ssh -L 8888:localhost:8888", "ssh: has no -L; `slipway forward PORT` brings a worker's port here"),
        ("plan loop.steps:=3", "'loop.steps:=3' is not how a value is set; did you mean loop.steps=3?"),
        ("cloud start", "unknown verb 'cloud'; did you mean `slipway localcloud`?"),
        ("submit +experiment=quickstart", "did you mean `slipway up +experiment=quickstart`?"),
        ("sbatch experiment=dapo loop.steps=3", "did you mean `slipway up +experiment=dapo`?"),
        ("submit train.py", "did you mean `slipway run -- PROGRAM`?"),
        (
            "chat model",
            "'model' is a folder, and chat takes a run, which `slipway runs` lists; an exported model is tr",
        ),
        ("generate ./model --prompt a", "`python -m trainer.chat ./model`"),
        ("chat --model gemma", "chat: has no --model; it takes a run, which `slipway runs` lists: slipway chat RUN"),
        ("generate --checkpoint=./a --prompt x", "generate: has no --checkpoint; it takes a run, which `slipway"),
        ("chat data", "no run has the id or name 'data' on this machine; `slipway runs` lists them"),
        ("export plain --to x", "'plain' is a folder, and export takes a run, which `slipway runs` lists"),
        ("status --tail 5", "status: has no --tail; it is a flag of logs; flags: "),
        ("forward --port 8080", "forward: has no --port; write it alone: 8080; see slipway forward --help"),
        ("chat --temp 0", "chat: has no --temp; did you mean --temperature?"),
        ("export --output x", "export: has no --output; did you mean --to?"),
        ("orphans --remove", "orphans: has no --remove; did you mean --delete?"),
        ("generate -p hi", "generate: has no -p; did you mean --presence-penalty or --prompt or --prompts?"),
        ("--versoin", "up: has no --versoin; did you mean --version?"),
        ("fit -- python train.py", "fit: takes no command after --; only run, plan, rehearse, ssh, exec do; fit c"),
        ("orphans delete", "orphans: did you mean --delete?"),
        ("plan --steps 300", "plan: has no --steps; did you mean loop.steps=300?"),
        ("plan --max-steps 300", "plan: has no --max-steps; did you mean loop.steps=300?"),
        ("up --learning-rate=3e-4", "up: has no --learning-rate; did you mean optimizer.lr=3e-4?"),
        ("plan --run-seed 3", "plan: has no --run-seed; did you mean run.seed=3?"),
        ("plan seed 1", "plan: 'seed' is no name of a run; did you mean run.seed=1?"),
        ("plan +experiment=quickstart steps 300", "did you mean loop.steps=300?"),
        ("plan lr: 1e-4", "did you mean optimizer.lr=1e-4?"),
        ("plan seed:1", "'seed:1' is not how a value is set; did you mean run.seed=1?"),
        ("plan seed = 1", "'seed = 1' is not how a value is set; did you mean run.seed=1?"),
        ("exec dapo nvidia-smi", "exec: a command goes after --: slipway exec dapo -- nvidia-smi"),
        ("exec dapo --worker 0 ls -la", "exec: a command goes after --: slipway exec dapo -- ls -la"),
        ("ssh dapo 0", "ssh: '0' is too much; did you mean --worker 0?"),
        ("ssh worker-3", "no run has the id or name 'worker-3' on this machine; did you mean --worker 3?"),
        ("logs gs://b/runs/dapo-0123abcd", "gs://b/runs/dapo-0123abcd is an address; name the run: dapo-0123abcd"),
        ("get gs://b/runs/dapo-0123abcd/logs", "is an address; name the run: dapo-0123abcd"),
        ("status https://example.com/x", "is an address; name the run: its id, which `slipway runs` lists"),
        ("plan --warmup-steps 4", "plan: has no --warmup-steps; did you mean optimizer.schedule.warmup_steps=4?"),
        ("runs extra", "runs: 'extra' is too much: runs takes flags: --where, --sort, --last, --csv, --diff, --r"),
        ("status dapo sft", "status: 'sft' is too much: status takes 1 word at most"),
        ("plan loop.rewards.answer_match", "loop.rewards.answer_match is a key; write loop.rewards.answer_match=VALUE"),
        ("plan model@loop.teacher", "model@loop.teacher is a key; write model@loop.teacher=VALUE"),
        ("plan optimizer[lr]=1e-3", "optimizer[lr]: a key has dots between its parts; write optimizer.lr=1e-3"),
        ("plan loop:steps=3", "loop:steps: a key has dots between its parts; write loop.steps=3"),
        ("plan env[secrets][A]=sk-1", "env[secrets][A]: 'env[secrets][A]' cannot be a part of a key; use letters"),
        ("plan .loop.steps=3", ".loop.steps: one dot stands between the parts of a key; write loop.steps=3"),
        (
            "plan .env.secrets.A=sk-1",
            ".env.secrets.A: one dot stands between the parts of a key; write env.secrets.A=…",
        ),
        ("plan loop.steps={a: 1}", "plan: a shell splits at spaces; put the override in quotes: 'loop.steps={a: 1}'"),
        ("plan tpu.capacity=[spot, on_demand] x=1", "put the override in quotes: 'tpu.capacity=[spot, on_demand]'"),
        ('plan run.name="my run"', "plan: a shell splits at spaces; put the override in quotes: 'run.name=\"my run\"'"),
        ("plan slipway/tpu/mine.yaml", "'slipway/tpu/mine.yaml' is a file; did you mean tpu=mine?"),
        ("status conf/experiment/dapo.yml", "is a file; did you mean +experiment=dapo?"),
        ("run task.yaml", "run: 'task.yaml' is a file; did you mean +experiment=task?"),
        ("plan local", "no run has the id or name 'local' on this machine; did you mean cloud=local? "),
        ("plan v6e-8", "did you mean tpu=v6e_8? "),
        ("here", "unknown verb 'here'; did you mean cloud=here? "),
        ("plan --budget 5 -- python a.py", "plan: has no --budget; did you mean budget.max_usd=5?"),
        ("plan -m optimizer.lr=1e-4, 3e-4", "put the override in quotes: 'optimizer.lr=1e-4, 3e-4'"),
        ("plan -m run.seed=1, 2 x=3", "put the override in quotes: 'run.seed=1, 2'"),
        ("plan train.py", "plan: the program goes after --: slipway plan -- train.py"),
        ("plan cloud=local python3 train.py", "slipway plan cloud=local -- python3 train.py"),
        ("plan --tpu v5e-8 python train.py --steps 9", "slipway plan --tpu v5e-8 -- python train.py --steps 9"),
        ("up torchrun -m train lr=3", "up: the program goes after --: slipway run -- torchrun -m train lr=3"),
        ("up experiment=a +experiment=b", "can have both as bases: `defaults: [a, b, _self_]`"),
        ("plan --tpu v5e-8 --tpu=v6e-8 -- python a.py", "--tpu: is given twice; give it once"),
        ("logs --tail 3 -n 4", "-n: is given twice; give it once"),
        ("plan +experiment=quickstart --batch-size 3", "did you mean loop.prompts_per_step=3?"),
        ("plan +experiment=quickstart --max-length 3", "did you mean loop.max_new_tokens=3?"),
        ("plan +experiment=quickstart --epochs 3", "plan: has no --epochs; did you mean loop.steps=…?"),
        ("plan +experiment=quickstart --beams 3", "plan: has no --beams; flags: "),
        ("exec --workers all -- ls", "exec: has no --workers; did you mean --worker?"),
        ("report quickstart --open", "report: has no --open; flags: "),
        ("doctor tpu", "tpu is a key; write tpu=VALUE"),
        ("plan --config optimizer", "optimizer is a key; write optimizer=VALUE, or see `slipway help optimizer`"),
        ("plan \u2013\u2013json", "\u2013\u2013json begins with a typographic dash; type --json"),
        ("logs \u2014follow", "begins with a typographic dash; type --follow"),
        ("plan --json=true", "--json: takes no value; write --json alone, or leave it out; see slipway plan --help"),
        ("logs --follow=yes", "--follow: takes no value; write --follow alone, or leave it out"),
        ("--json plan +experiment=quickstart", "the verb comes first, and once: slipway plan …"),
        ("plan plan", "the verb comes first, and once: slipway plan …"),
        (
            "get dapo --to gs://b/x",
            "--to: gs://b/x is an address; name a file or folder of this machine; see slipway g",
        ),
        ("generate --prompt a --out s3://b/x.jsonl", "--out: s3://b/x.jsonl is an address; name a file or folder"),
        ("report -o gs://b/x.html", "-o: gs://b/x.html is an address"),
        ("report -o a.pdf", "-o: a.pdf would hold an HTML page; give it the ending .html; see slipway report --help"),
        ("report --output b/c.tar.gz", "--output: b/c.tar.gz would hold an HTML page"),
        ("fit python train.py", "fit: 'python' is too much: fit takes flags: "),
        ("exec ls", "no run has the id or name 'ls' on this machine; a command stands behind --: exec -- ls; "),
    ],
)
def test_words_that_a_verb_does_not_take_lead_on(home: Path, line: str, said: str) -> None:
    assert said in refused(*line.split(" "))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("plan -- python train.py tpu=v6e_8", "note: tpu=v6e_8 goes to the program"),
        (
            "run cloud=local -- python train.py budget.max_hours=2 --lr 1",
            "note: budget.max_hours=2 goes to the program",
        ),
        ("run cloud=local -- python train.py --detach", "note: --detach goes to the program"),
        ("run -- python train.py network=mlp env=cartpole cloud.sky=3 model=tiny loop.steps=3 --name a", ""),
        ("plan -m cloud=local -- python train.py --lr 1,2", "note: 1,2 goes to the program as it is, for -m varies"),
        ("plan -m cloud=local -- python train.py lr=a,b", "note: lr=a,b goes to the program as it is, for -m varies"),
        ("plan cloud=local -- python train.py lr=1,2", ""),
        ("plan -m run.seed=1,2 -- python train.py a.py,", ""),
    ],
)
def test_a_word_for_slipway_behind_the_dashes_is_noted(
    home: Path, capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    Path("train.py").write_text("print()\n")
    main.with_program(parsed(line.split(" ")))
    said = " ".join(capsys.readouterr().err.split())
    assert (told or "(program=command") in said
    assert told or "goes to the program" not in said


def test_a_topic_that_is_misspelled_is_near(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    known = {"tpus": "tpu.accelerator_type", "learning_rate": "optimizer.lr", "temprature": "temperature"}
    for word, near in {"lopo": "loop", "optimiser": "optimizer", **known}.items():
        assert main.run(["help", word]) == 2
        assert f"did you mean `slipway help {near}`?" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        ["loop.steps", "=", "10"],
        ["loop.steps=", "10"],
        ["loop.steps", "=10"],
        ["loop.steps", "10"],
        ["--loop.steps=10"],
        ["--loop.steps", "10"],
        ["loop.steps:10"],
        ["loop.steps:", "10"],
        ["loop.steps", ":", "10"],
    ],
)
@pytest.mark.parametrize("before", [[], ["plan"], ["up", "+experiment=quickstart"], ["plan", "--save"], ["fit"]])
def test_other_ways_to_set_a_value_name_ours(home: Path, before: list[str], words: list[str]) -> None:
    assert refused(*before, *words).endswith("is not how a value is set; did you mean loop.steps=10?")


@pytest.mark.parametrize("words", [["tpu:v6e_8"], ["--tpu", "v6e_8"], ["tpu", "v6e_8"], ["tpu", "=", "v6e_8"]])
def test_groups_are_set_likewise(home: Path, words: list[str]) -> None:
    assert "did you mean tpu=v6e_8?" in refused("fit", *words)


def test_an_unknown_slice_to_compare_is_told_before_the_compiler_starts(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["fit", "+experiment=quickstart", "--slices", "v6e-8,v5e-16"]) == 2
    assert capsys.readouterr().err == "error: --slices: unknown type 'v5e-16'; closest: v5litepod-16\n"


@pytest.mark.parametrize(
    ("line", "flags", "overrides"),
    [
        ("plan data.answer_mark= cloud=local", {}, ("data.answer_mark=", "cloud=local")),
        ("plan env.vars={A:1} env.vars={B:2}", {}, ("env.vars={A:1}", "env.vars={B:2}")),
        ("export --to gs://bucket/folder --tokenizer a.json", {"to": "gs://bucket/folder", "tokenizer": "a.json"}, ()),
        ("plan --plan my.yaml", {"plan": "my.yaml"}, ()),
        ("forward 6006:6007", {"port": (6006, 6007)}, ()),
        ("report -o a.html --x params", {"output": "a.html", "x": "params"}, ()),
        ("report -o a.b/c", {"output": "a.b/c"}, ()),
        ("report -o ./.a", {"output": "./.a"}, ()),
        ("run --tpu v5e-8 cloud=local -- python train.py --lr = 3 -e x", {"tpu": "v5e-8"}, ("cloud=local",)),
        ("runs --where metrics.loss<0.5 --sort metrics.loss", {"where": ["metrics.loss<0.5"]}, ()),
        ("generate --prompt loop.steps:3 --out=-d", {"prompt": ["loop.steps:3"], "out": "-d"}, ()),
        ("report model-0123abcd model data", {"runs": ["model-0123abcd", "model", "data"]}, ()),
        ("get data logs", {"run": "data", "path": "logs"}, ()),
    ],
)
def test_what_is_meant_so_stays(home: Path, line: str, flags: dict[str, object], overrides: tuple[str, ...]) -> None:
    command = parsed(line.split())
    assert {name: vars(command.flags)[name] for name in flags} == flags
    assert command.overrides == overrides


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("plan run.seed=1 ++run.seed=2", "note: run.seed is given twice; 2 counts, not 1"),
        ("plan loop=grpo loop=dpo", "note: loop is given twice; dpo counts, not grpo"),
        ("plan loop.rewards={a:1} loop.rewards={b:1}", "note: loop.rewards is given twice; {b:1} counts, not {a:1}"),
        ("plan env.vars={A:1} env.vars=null", "note: env.vars is given twice; null counts, not {A:1}"),
        ("plan env.secrets.A=sk-1 env.secrets.A=sk-2", "note: env.secrets.A is given twice; the last counts"),
        ("plan env.vars={A:1} env.vars={B:2} run.seed=1 run.seed=1", ""),
    ],
)
def test_the_last_of_two_values_counts_and_that_is_said(
    home: Path, capsys: pytest.CaptureFixture[str], line: str, said: str
) -> None:
    parsed(line.split())
    assert capsys.readouterr().err.strip() == said


def test_an_experiment_is_near(home: Path) -> None:
    assert "did you mean +experiment=quickstart?" in refused("quickstrat")
    assert "`slipway status dapo-0123abcd`" in refused(OLD)


def test_the_index_is_read_for_a_name_only(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> Callable[[], None]:
        raise AssertionError("read")

    monkeypatch.setattr(index, "load_rows", fail)
    assert parsed(["status", OLD]).options.run_id == OLD
    assert parsed(["status"]).options.run_id == ""
