"""Validation reports every error at once, each with its key and a suggestion."""

import re
from pathlib import Path
from typing import Any

import pytest

from conf.reference import JSON_SCHEMA
from conf.schema.config import Config
from conf.schema.foreign_keys import FOREIGN
from conf.schema.problems import PATTERN_HINTS
from conf.schema.text_keys import types_at
from conf.schema.validation import validate
from controller.config.compose import compose, compose_raw
from tests.composed import problems_of
from tests.conf.schema.test_config import TINY

LM = ["+experiment=lm_tinyshakespeare", "cloud=local"]
COMMAND = ["program=command", "program.command=[a]"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([*TINY, "tpu.acelerator_type=v4-8"], "tpu.acelerator_type: unknown key; did you mean tpu.accelerator_type?"),
        ([*TINY, "loop.stepz=3"], "loop.stepz: unknown key; did you mean loop.steps?"),
        (["+experiment=trm_sudoku", "loop.steps=100"], "loop: steps: 50000 epochs are 65104 updates; set"),
        ([*TINY, "data.prompt.answer='{a.b}'"], "data.prompt: answer: {…} must contain only a column name; write {{"),
        (
            [*TINY, "run.name=null"],
            'run.name: must be text, not null; if it is meant as text, quote it: name: "null" in',
        ),
        (
            [*TINY, "data.prompt.question={question: null}"],
            'data.prompt.question: must be text, not a mapping; quote it: question: "{question}"',
        ),
        (
            [*TINY, "env.python=${run.seed}"],
            "env.python: must be text, not 0; if it is meant as text, quote it: python: ",
        ),
        (
            [*TINY, "env.vars={A: a, B: null}"],
            "env.vars.B: must be text, not null; if it is meant as text, quote it: B",
        ),
        ([*TINY, "run.name=-x"], "run.name: '-x' is invalid; use 1 to 42 characters a-z, 0-9, _ and -, with a letter"),
        *(
            (
                [*TINY, f"run.seed={typed}"],
                f"run.seed: must be a whole number, not '{typed}'; {words}, of a sweep (-m), are written '{written}'",
            )
            for typed, words, written in (
                ("0-3", "0 to 3", "run.seed=range(0,4)"),
                ("1..3", "1 to 3", "run.seed=range(1,4)"),
                ("00:3", "0 to 3", "run.seed=range(0,4)"),
                ("2 to 4", "2 to 4", "run.seed=range(2,5)"),
            )
        ),
        *(
            (
                [*TINY, f"{key}={typed}"],
                f"{key}: must be {kind}, not '{typed.strip(chr(39))}'; did you mean '{key}={meant}'?",
            )
            for key, kind, typed, meant in (
                ("loop.steps", "a whole number", "1k", "1000"),
                ("loop.steps", "a whole number", "1.5K", "1500"),
                ("loop.steps", "a whole number", "'1,000'", "1000"),
                ("optimizer.lr", "a number", "1/1000", "0.001"),
                ("optimizer.lr", "a number", "0.1%", "0.001"),
                ("budget.max_usd", "a number", "$20", "20.0"),
            )
        ),
        ([*TINY, "tpu.capacity='[spot, on_demand]'"], "tpu.capacity: quotes make a text of a list or a mapping; leave"),
        ([*TINY, "model.lora=8"], "model.lora: is a section with keys, not 8; set one of them, such as model.lora.r=…"),
        ([*TINY, "loop.steps='0,001'"], "loop.steps: must be a whole number, not '0,001'"),
        ([*TINY, "loop.steps=1/3"], "loop.steps: must be a whole number, not '1/3'"),
        ([*TINY, "loop.steps=1e-4.0"], "loop.steps: must be a whole number, not '1e-4.0'"),
        ([*TINY, "optimizer.lr=1/0"], "optimizer.lr: must be a number, not '1/0'"),
        ([*TINY, "loop.batch_size=8"], "loop.batch_size: is of loop.kind=puzzle; did you mean loop.prompts_per_step?"),
        ([*LM, "loop.batch_size=8"], "loop.batch_size: is of loop.kind=puzzle; did you mean loop.total_batch_tokens?"),
        ([*TINY, "loop.seq_len=8"], "loop.seq_len: is of loop.kind=lm; did you mean loop.max_new_tokens or lo"),
        ([*TINY, "data=questions"], "data.source: is not set yet; write data.source=… (module:name of a function"),
        ([*TINY, "optimizer=custom"], "optimizer.rule: is not set yet; write optimizer.rule=…"),
        ([*TINY, "run.seed=0+5"], "run.seed: must be a whole number, not '0+5'"),
        ([*TINY, "loop.steps=00-3"], "loop.steps: must be a whole number, not '00-3'; 0 to 3, of a sweep"),
        (
            [*TINY, "optimizer.lr=1e-4-3e-4"],
            "optimizer.lr: must be a number, not '1e-4-3e-4'; several values, of a swe",
        ),
        ([*TINY, "loop.scale_rewards=false"], "loop.scale_rewards: unknown key; did you mean loop.advantage_std?"),
        ([*TINY, "tpu.num_workers=4"], "tpu.num_workers: unknown key; did you mean tpu.accelerator_type?"),
        ([*TINY, "tpu.workers=4"], "tpu.workers: unknown key; did you mean tpu.accelerator_type?"),
        ([*TINY, "tpu.chips=4"], "tpu.chips: unknown key; did you mean tpu.accelerator_type?"),
        ([*TINY, "data.shuffle_seed=3"], "data.shuffle_seed: unknown key; did you mean run.seed?"),
        (
            [*TINY, "loop.environment.timeout=5"],
            "loop.environment.timeout: unknown key; did you mean loop.environment.t",
        ),
        (["+experiment=trm_sudoku", "model.H_cycles=3"], "model.H_cycles: unknown key; did you mean model.h_cycles?"),
        ([*TINY, "loop.micro_batch=3"], "loop.micro_batch: unknown key; did you mean loop.micro_batch_size?"),
        ([*TINY, "optimizer.params={lr: 1}"], "optimizer.params: unknown key; did you mean optimizer.param_groups?"),
        ([*TINY, "assets.datasets.x={url: a}"], "assets.datasets.x.url: unknown key; choices: build, fetch_on, files,"),
        (
            [*TINY, "loop.teacher=qwen3_8b"],
            "loop.teacher: is a section with keys, not 'qwen3_8b'; did you mean model@l",
        ),
        ([*TINY, "logging.wandb=p"], "logging.wandb: is a section with keys, not 'p'; did you mean logging.wandb.proj"),
        (
            [*TINY, "data.prompt='Q: {question}'"],
            "data.prompt: is a section with keys, not 'Q: {question}'; did you mea",
        ),
        (
            [*TINY, "checkpoint.best=eval_accuracy"],
            "checkpoint.best: must be null or {metric: eval_accuracy, mode: max}",
        ),
        ([*TINY, "run.state_dir=gs://b/x"], "run.state_dir: gs://b/x is no folder of this machine"),
        ([*TINY, "loop.loss_options={cap: 2.0}"], "loop: loss_options: grpo takes none, but a loss_type of your own"),
        (
            [*TINY, "budget.max_usd=none"],
            "budget.max_usd: must be a number, not 'none'; did you mean budget.max_usd=nul",
        ),
        (
            [*TINY, "tpu.data_disk_gb=None"],
            "tpu.data_disk_gb: must be a whole number, not 'None'; did you mean tpu.dat",
        ),
        ([*TINY, "run.seed=None"], "run.seed: must be a whole number, not 'None'"),
        (
            [*TINY, "budget.max_hours=1:30"],
            "budget.max_hours: must be a number, not '1:30'; write the number alone, in",
        ),
        (
            [*TINY, "cleanup.idle_minutes=0:45"],
            "cleanup.idle_minutes: must be a number, not '0:45'; write the number a",
        ),
        ([*TINY, "run.seed=true"], "run.seed: must be a number, not true; YAML reads yes and on as true, no and off"),
        ([*TINY, "budget={max_hours: 2, max_usd: true}"], "budget.max_usd: must be a number, not true; YAML"),
        (
            [*TINY, "optimizer.schedule={kind: piecewise, points: [[0, 0.5], [5, true]]}"],
            "optimizer.schedule.points.1.1: must be a number, not true",
        ),
        ([*TINY, "tpu.name=1x"], "tpu.name: '1x' is invalid; use 1 to 63 characters a-z, 0-9 and -, starting with"),
        (
            [*TINY, "cloud=gcp", "cloud.project='123456789'"],
            "cloud.project: '123456789' is invalid; use a project ID such as my-project or example.com:my-",
        ),
        ([*TINY, "~tpu.capacity", "~tpu.zone"], "tpu: needs what ~tpu.capacity ~tpu.zone removes; leave that out, or"),
        ([*TINY, "logging.profile={after: 1}"], "logging.profile: lacks updates; set logging.profile.updates=… too"),
        ([*TINY, "loop.kind=lm"], "loop: has keys of another kind (prompts_per_step, "),
        ([*TINY, "+assets.models.a={files: {b: {}}}"], "assets.models.a.files.b: lacks url, sha256; set assets."),
        ([*TINY, "tpu.capacity=preemptable"], "tpu.capacity: unknown choice 'preemptable'; did you mean 'preemptible'"),
        ([*TINY, "notify.events=[end,fail]"], "notify.events: unknown choice 'fail'; did you mean 'failure'? choices"),
        ([*TINY, "env.vars.FOO-BAR=1"], "env.vars: 'FOO-BAR' cannot be a name here; use letters, digits and _, not"),
        ([*TINY, "+assets.models.Qwen.path=x"], "assets.models: 'Qwen' cannot be a name here; use 1 to 63 characters"),
        (
            [*TINY, "program.exit_codes={300: hung}"],
            "program.exit_codes: 300 cannot be a name here: input should be less",
        ),
        (
            [*TINY, "network.cidr=10.0.0.0"],
            "network.cidr: '10.0.0.0' is invalid; use a range of IPv4 addresses such as 10.0",
        ),
        ([*TINY, "network.laptop=here"], "network.laptop: 'here' is invalid; use a range of IPv4 addresses such as"),
        ([*TINY, "network.ssh_source_ranges=[300.1.2.3/24]"], "network.ssh_source_ranges: octet 300 (> 255) not perm"),
        ([*TINY, "network.ssh_source_ranges=[10.0.0.0/33]"], "network.ssh_source_ranges: '33' is not a valid netmask"),
        ([*TINY, "network.laptop=1.2.3.4/40"], "network.laptop: '40' is not a valid netmask; use a range of IPv4 addr"),
        ([*TINY, "network.cidr=300.80.0.0/20"], "network.cidr: octet 300 (> 255) not permitted in '300.80.0.0'; use a"),
        (
            [*TINY, "network.cidr=10.80.0.1/20"],
            "network.cidr: 10.80.0.1/20 has bits behind /20; write 10.80.0.0/20",
        ),
        ([*TINY, "network.laptop=1.2.3.4/24"], "network.laptop: 1.2.3.4/24 has bits behind /24; write 1.2.3.0/24"),
        ([*TINY, "network.laptop='2001:db8::/32'"], "network.laptop: '2001:db8::/32' is invalid; use a range of IPv4"),
        (
            [*TINY, "loop.length_buckets=64"],
            "loop.length_buckets: must be a list [NUMBER, …], not 64; did you mean 'loop.length_buckets=[64]'?",
        ),
        (
            [*TINY, "loop.rewards=answer_match"],
            "loop.rewards: must be a mapping {NAME: NUMBER, …}, not 'answer_match'"
            "; did you mean 'loop.rewards={answer_match: 1.0}'?",
        ),
        (
            [*TINY, "loop.rewards=[a,b]"],
            "loop.rewards: must be a mapping {NAME: NUMBER, …}, not ['a', 'b']; did you me"
            "an 'loop.rewards={a: 1.0, b: 1.0}'?",
        ),
        (
            [*TINY, "env.vars='A=b c'"],
            "env.vars: must be a mapping {NAME: TEXT, …}, not 'A=b c'; did you mean 'env.vars={A: \"b c\"}'?",
        ),
        (
            [*TINY, "loop.sampler.stop='</s>'"],
            "loop.sampler.stop: must be a list of words, not '</s>'; did you mean 'loop.sampler.stop=[\"</s>\"]'?",
        ),
        (
            [*TINY, "program.setup='pip install -e .'"],
            "program.setup: must be a list [[…], …], not 'pip install -e .';"
            " did you mean 'program.setup=[[pip, install, -e, .]]'?",
        ),
        (
            [*TINY, "program.setup=[pip, install, -e, .]"],
            "program.setup: each must be a list of words, not 'pip'; did you mean 'program.setup=[[pip, install, -e, .",
        ),
        ([*TINY, "env.secrets.my-token=env"], "env.secrets: 'my-token' cannot be a name here; use letters, digits"),
        (
            [*COMMAND, "loop.steps=100"],
            "loop.steps: program=command has no loop; pass it to the program, or choose pro",
        ),
        (
            [*TINY, "optimizer.lr=[1e-4,3e-4]"],
            "optimizer.lr: must be a number, not [0.0001, 0.0003]; several values, of a s",
        ),
        (
            [*TINY, "optimizer.lr='1e-4 3e-4'"],
            "optimizer.lr: must be a number, not '1e-4 3e-4'; several values, of a swe",
        ),
        (
            [*TINY, "run.name=[a,b]"],
            "run.name: must be text, not ['a', 'b']; several values, of a sweep (-m), are written run",
        ),
        (
            [*COMMAND, "env.requirements=[jax,flax]"],
            "env.requirements: must be the name of a file, not ['jax', 'flax']; write them into it, one a line",
        ),
        ([*TINY, "loop.rewards={accuracy: 1.0}"], "loop.rewards: unknown reward 'accuracy'; choices: answer_match, an"),
        (
            [*TINY, r"loop.rewards={slipway/my_reward.py\:brief: 1.0}"],
            "loop.rewards: 'slipway/my_reward.py:brief' is no module:function; did you mean my_reward:brief? names of",
        ),
        ([*TINY, "+assets.model.m.source=hf://a/b"], "assets.model: unknown key; did you mean assets.models?"),
        (
            [*TINY, "loop.environment=calculator"],
            "loop.environment: is a section with keys, not 'calculator'; did you mean loop.environment.name=calculator",
        ),
        (
            ["+experiment=gemma2b_gsm8k", "data.answer_mark="],
            "data.answer_mark: is empty; set a value, or leave it out",
        ),
        ([*TINY, "mesh.dp=4"], "mesh.dp: unknown key; did you mean mesh.data?"),
        ([*TINY, "loop.stop=a"], "loop.stop: unknown key; did you mean loop.sampler.stop?"),
        (
            [*TINY, 'loop.sampler.stop="\n"'],
            "loop.sampler.stop: must be a list of words, not '\\n'; did you mean $'loop.sampler.stop=[\"\\n\"]'?",
        ),
        (
            [*TINY, r"loop.sampler.stop=\n"],
            "loop.sampler.stop: must be a list of words, not '\\\\n'; did you mean $'loop.sampler.stop=[\"\\n\"]'?",
        ),
        (
            [*TINY, r'loop.sampler.stop=["\n\n"]'],
            r"loop.sampler.stop: '\n\n' is no line break but a backslash and a letter; write",
        ),
        (
            [*LM, r'data.separator="\t"'],
            r"data.separator: '\t' is no line break but a backslash and a letter; write",
        ),
        (
            [*TINY, r"program.setup='printf \d'"],
            r"""program.setup: must be a list [[…], …], not 'printf \\d'; did you mean 'program.setup=[[printf, "\d""",
        ),
        (
            [*TINY, "loop.steps=$loop.eval_interval"],
            "loop.steps: must be a whole number, not '$loop.eval_interval'; another key's value is ${loop.eval_interv",
        ),
        ([*TINY, "tpu.capacity='spot, on_demand'"], "tpu.capacity: must be a list: 'tpu.capacity=[spot, on_demand]'"),
        ([*TINY, "tpu.capacity='spot,on-demand'"], "tpu.capacity: unknown choice 'spot,on-demand'; did you mean 'on"),
        (
            [*TINY, "notify.events='end, failure'"],
            "notify.events: must be a list [end|failure|preemption|alert, …], not 'end, failure'; did you mean "
            "'notify.events=[end, failure]'?",
        ),
        (
            [*TINY, "tpu.fallback_zones='us-east1-c, us-west4-a'"],
            "tpu.fallback_zones: must be a list of words, not 'us-east1-c, us-west4-a'; did you mean "
            "'tpu.fallback_zones=[us-east1-c, us-west4-a]'?",
        ),
        (
            [*TINY, "loop.length_buckets='64,128'"],
            "loop.length_buckets: must be a list [NUMBER, …], not '64,128'; did you mean 'loop.length_buckets=[64, 128",
        ),
        (
            ["+experiment=gemma2b_gsm8k", "data.path=['gs://b/a.jsonl','gs://b/b.jsonl']"],
            "data.path: must be text, not ['gs://b/a.jsonl', 'gs://b/b.jsonl']; several files are one pattern, such as "
            "gs://b/*.jsonl",
        ),
        (
            [*TINY, "checkpoint.save_interval=false"],
            "checkpoint.save_interval: must be a number, not false; YAML reads",
        ),
        ([*TINY, "loop.epochs=3"], "loop.epochs: is of "),
        (
            [*TINY, "model.activation_dtype=fp16"],
            "model.activation_dtype: unknown choice 'fp16'; choices: float32, bfl",
        ),
        (
            [*TINY, "program.setup=[[pip,install,a],'make b']"],
            "program.setup: each must be a list of words, not 'make "
            "b'; did you mean 'program.setup=[[pip, install, a], [make, b]]'?",
        ),
        (
            [*TINY, "sweep.params={run.seed: [0,1]}"],
            "sweep.params.run.seed: must be text, not [0, 1]; did you mean 'sweep.params={run.seed: \"0,1\"}'?",
        ),
        (
            [*TINY, "cloud.faults=[preempted]"],
            "cloud.faults: each must be a mapping {NAME: VALUE, …}, not 'pree"
            "mpted'; faults, e.g. {kind: preempted, after_seconds: 20}",
        ),
        (
            [*TINY, "+assets.datasets.a=d/x"],
            "assets.datasets.a: is a section with keys, not 'd/x'; did you mean 'asset"
            "s.datasets.a={path: d/x}'; keys: build, ",
        ),
        (
            [*TINY, "budget.max_hours=3h"],
            "budget.max_hours: must be a number, not '3h'; write the number alone, in hou",
        ),
        ([*TINY, "loop.steps=2.5"], "loop.steps: must be a whole number, not 2.5"),
        ([*TINY, "loop.sampler.slots=many"], "loop.sampler.slots: must be a whole number"),
        ([*TINY, "loop.optimizer.lr=3"], "loop.optimizer: unknown key; optimizer is a section of its own, at the left"),
        ([*TINY, "loop.lr=3"], "loop.lr: unknown key; did you mean optimizer.lr?"),
        (
            [*TINY, "optimizer.betas=[0.9,0.99]"],
            "optimizer.betas: unknown key; did you mean optimizer.b1 and optimizer",
        ),
        ([*TINY, "tpu.spot=true"], "tpu.spot: unknown key; did you mean tpu.capacity=spot?"),
        ([*TINY, "model.dtype=fp16"], "model.dtype: unknown key; did you mean model.activation_dtype?"),
        ([*TINY, "loop.batch=3"], "loop.batch: unknown key; did you mean "),
        ([*TINY, "mesh.model=4"], "mesh.model: unknown key; did you mean mesh.tensor?"),
        ([*TINY, "loop.epsilon=0.2"], "loop.epsilon: unknown key; did you mean loop.clip_ratio_low and loop.cl"),
        ([*TINY, "loop.warmup_steps=9"], "loop.warmup_steps: unknown key; did you mean optimizer.schedule.warmup_st"),
        ([*TINY, "optimizer.schedule.type=cosine"], "optimizer.schedule.type: unknown key; did you mean optimizer.sc"),
        (
            ["+experiment=quickstart", "optimizer.schedule.total_steps=9"],
            "optimizer.schedule.total_steps: unknown key; did you mean optimizer.schedule.horizon_steps?",
        ),
        ([*TINY, "data.max_length=9"], "data.max_length: unknown key; did you mean loop.max_new_tokens or loop.max"),
        ([*TINY, "data.batch_size=3"], "data.batch_size: unknown key; did you mean loop.prompts_per_step?"),
        ([*LM, "data.batch_size=3"], "data.batch_size: unknown key; did you mean loop.total_batch_tokens?"),
        (["+experiment=trm_sudoku", "data.batch_size=3"], "data.batch_size: unknown key; did you mean loop.batch_siz"),
        (
            [*TINY, "loop.clip_ratio=1"],
            "loop.clip_ratio: unknown key; did you mean loop.clip_ratio_low and loop.cl",
        ),
        ([*TINY, "model.name=mine"], "model.name: unknown key; a file of the group is chosen: model=NAME, in a file "),
        (
            [*TINY, "optimizer.name=lion"],
            "optimizer.name: unknown key; a file of the group is chosen: optimizer=lion, in a file `override /optimizer"
            ": lion` in `defaults`",
        ),
        ([*TINY, "logging.wandb={name: a}"], "logging.wandb.name: unknown key; did you mean run.name?"),
        ([*TINY, "sweep.mode=min"], "sweep.mode: unknown key; did you mean sweep.search.mode?"),
        (
            [*TINY, "loop.sampler.temperature=1"],
            "loop.sampler.temperature: unknown key; did you mean loop.temp",
        ),
        ([*TINY, "loop.batch_siz=1"], "loop.batch_siz: unknown key; did you mean loop.prompts_per_step?"),
        ([*TINY, "optimizer.warmup_steps=1"], "optimizer.warmup_steps: unknown key; did you mean optimizer.schedule.w"),
        ([*TINY, "optimizer.momentum_schedul=1"], "optimizer.momentum_schedul: unknown key; choices: "),
        (
            [*TINY, "optimizer=muon", "optimizer.beta1=1"],
            "optimizer.beta1: unknown key; did you mean optimizer.adamw",
        ),
        (
            [*TINY, "ssh.colour=red"],
            "ssh.colour: unknown key; choices: connect_timeout_seconds, host_keys, method, os_",
        ),
    ],
)
def test_a_mistake_names_its_key_and_the_cure(words: list[str], said: str) -> None:
    [found] = problems_of(*words)
    assert found.startswith(said)


def test_every_form_of_a_text_has_its_hint_and_every_foreign_key_a_key_of_ours() -> None:
    patterns: set[str] = set()

    def collect(node: Any) -> None:
        for key, value in node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ():
            patterns.update([value] if key == "pattern" else value if key == "patternProperties" else [])
            collect(value)

    collect(Config.model_json_schema())
    known = {pattern for pattern in patterns if isinstance(pattern, str)} - {JSON_SCHEMA["pattern"]}
    secret = {pattern for pattern in known if "secretmanager" in pattern}  # whose values are not shown
    assert known - secret == {*PATTERN_HINTS}
    for name, meant in FOREIGN.items():
        for key in re.split(" and | or ", meant.partition("=")[0]):
            assert types_at((*key.split("."),)), f"{name}: {key}"
            assert key.rpartition(".")[2] != name or " or " in meant, name  # an alternative may be called so


@pytest.mark.parametrize(("form", "read"), [("yes", "true"), ("Off", "false"), ("1", None)])
def test_a_boolean_of_a_file_is_no_number(form: str, read: str | None, tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(f"# @package _global_\nrun: {{name: mine, seed: {form}}}\n")
    found = compose([*COMMAND, "+experiment=mine"], extra_dir=tmp_path)
    said = f"run.seed: must be a number, not {read}; YAML reads yes and on as true, no and off as false"
    assert [f"{problem.key}: {problem.message}" for problem in found[1]] == ([said] if read else [])
    assert (found[0] is None) is bool(read)


def test_every_error_comes_at_once() -> None:
    mistakes = ["loop.steps=-1", "run.seed=-2", "tpu.accelerator_type=v5litepod-17", "modle.dim=3"]
    found = problems_of(*TINY, *mistakes)
    assert [line.partition(":")[0] for line in found] == ["tpu.accelerator_type", "loop.steps", "run.seed", "modle"]
    assert "v5litepod-16" in found[0]
    assert "(got -1)" in found[1]


def test_a_nul_is_refused_and_a_long_value_shown_in_part() -> None:
    config, problems = validate(compose_raw(COMMAND) | {"env": {"vars": {"A\0": "b", "C": "d\0"}}})
    assert config is None
    assert [p.key for p in problems] == ["env.vars.A\0", "env.vars.C"]
    assert "NUL" in problems[0].message
    [problem] = validate(compose_raw(COMMAND) | {"code": "x" * 100_000})[1]
    assert len(str(problem)) < 1000
    assert "(100002 characters)" in problem.message
