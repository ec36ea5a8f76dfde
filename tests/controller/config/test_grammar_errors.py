"""Values that are refused on the command line, and secrets among them, which are not shown."""

from pathlib import Path

import pytest

from controller.config.compose import compose
from controller.core.errors import ConfigError
from tests.controller.config.test_refusals import GLOBAL, QUICKSTART


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("loop.steps=[range(1,3)]", r"loop\.steps: range\(…\) cannot stand inside a list or beside other values"),
        ("env.vars.D='${bucket}/a'", r"there is no key bucket; what Slipway fills in has no \$: \{bucket\}"),
        ("program.command=['${assets.datasets.d}']", r"what Slipway fills in has no \$: \{assets\.datasets\.d\}"),
        (
            "run.seed=${optimizer.learning_rate}",
            r"there is no key optimizer.learning_rate; did you mean \$\{optimizer\.lr\}",
        ),
        ("loop.steps=1,2", r"loop\.steps: '1,2' is several values"),
        ("optimizer.lr=[1e-4;3e-4]", r"must be a number; several values, of a sweep \(-m\), are written .*=1e-4,3e-4$"),
        (
            "optimizer.lr=(1e-4, 3e-4)",
            r"must be a number; several values, of a sweep \(-m\), are written .*=1e-4,3e-4$",
        ),
        ("run.seed={1;2}", r"must be a whole number; several values, of a sweep \(-m\), are written run\.seed=1,2$"),
        ("loop=ppo", "no loop named 'ppo'; choices: "),
        ("loop=gpro", r"no loop named 'gpro'; did you mean loop=grpo\?"),
        ("loop=grpoo", r"no loop named 'grpoo'; did you mean loop=grpo\?"),
        ("loop=orpo", "no loop named 'orpo'; choices: "),
        ("optimizer=adam", r"no optimizer named 'adam'; did you mean optimizer=adamw\?"),
        ("optimizer=adafaktor", r"no optimizer named 'adafaktor'; did you mean optimizer=adafactor\?"),
        ("loop.steps=range(a,b)", r"loop\.steps: .*while evaluating"),
        ("loop.steps=nobody(1)", r"loop\.steps: unknown function 'nobody'"),
        ("loop.steps=int(null)", r"loop\.steps: .*while evaluating"),
        ("loop.steps=a,[", r"loop\.steps: 'a,\[' cannot be parsed"),
        ("run.name=${x", r"run\.name"),
        ("loop..steps=3", r"loop\.\.steps: one dot stands between the parts of a key; write loop\.steps=3"),
        ("run.name.=a", r"run\.name\.: one dot stands between the parts of a key; write run\.name=a"),
        ("env.vars.1A=1", "env.vars.1A: '1A' cannot be a part of a key; use letters, digits and _"),
        ("loop.steps==3", "loop.steps: '=3' cannot be parsed; one = sets a value: loop.steps=3"),
        ("run.name='a", "run.name: \"'a\" cannot be parsed; the quote ' is not closed"),
        ('run.name="a', "run.name: '\"a' cannot be parsed; the quote \" is not closed"),
        ("tpu.fallback_zones=[a,b", r"cannot be parsed; the \[ is not closed"),
        ("loop.rewards={a:1]", r"cannot be parsed; the \{ is closed by \]"),
        ("loop.rewards=a:1}", r"cannot be parsed; the \} closes nothing that is open"),
        ("loop.steps=“3”", "cannot be parsed; “ is no quote for a program; write 'loop.steps=3'"),
        ("env.vars=FOO=bar", "cannot be parsed; did you mean 'env.vars.FOO=bar'?"),
        ("loop.sampler.stop=[</s>,a]", r"""quote its items: 'loop\.sampler\.stop=\["</s>", a\]'"""),
        ("loop.sampler.stop=</s>,<eos>", r"""it must be a list of words: 'loop\.sampler\.stop=\["</s>", "<eos>"\]'"""),
        ("budget.max_usd=20€", r"budget\.max_usd: '20€' cannot be parsed; it must be a number$"),
        ("optimizer.lr=10^-3", r"'10\^-3' cannot be parsed; it must be a number: 'optimizer\.lr=0\.001'$"),
        ("run.notes=Größe(", r"cannot be parsed; the \( is not closed$"),
        ("loop.steps=1,000", r"is several values; for a sweep add -m, for thousands no comma: loop\.steps=1000$"),
        ("env.vars.A=tpu,cpu", r"is several values; for a sweep add -m, for one text 'env\.vars\.A=\"tpu,cpu\"'$"),
        ("loop.steps=1,2", r"is several values; for a sweep add -m$"),
        (
            "loop.temperature=0,7",
            r"add -m, for a decimal write a point: loop\.temperature=0\.7$",
        ),
        ("optimizer.lr=interval(0,1)", r"is several values; an interval is for sweep\.search, with -m$"),
        ("tpu.capacity=spot,on_demand", r"add -m, for a list write 'tpu\.capacity=\[spot,on_demand\]'"),
        ("loop.rewards={format=1}", r"write 'loop\.rewards=\{format: 1\.0\}'"),
        ("env.vars.DATA={assets.datasets.txt}", r"""quote it: 'env\.vars\.DATA="\{assets\.datasets\.txt\}"'$"""),
        (
            "env.vars.DATA={assets.datasets.txt}/a.txt",
            r"""quote it: 'env\.vars\.DATA="\{assets\.datasets\.txt\}/a\.txt"'$""",
        ),
        ("data.path={bucket}/a,b", r"""quote it: 'data\.path="\{bucket\}/a,b"'$"""),
        ("env.vars=[FOO=1]", r"write 'env\.vars=\{FOO: 1\}'"),
        ('optimizer.schedule={"kind"="cosine"}', r"""a colon sets a value: 'optimizer\.schedule=\{kind: "cosine"\}'"""),
        ("learning_rate=3e-4", r"learning_rate: unknown group; did you mean optimizer\.lr=3e-4\?"),
        ("batch_size=4", r"batch_size: unknown group; did you mean loop\.prompts_per_step=4\?$"),
        ("report_to=wandb", r"did you mean logging\.wandb=true\?$"),
        ("bf16=true", r"did you mean model\.activation_dtype=float32\|bfloat16\|float16\?$"),
        ("warmup_ratio=0.1", r"did you mean optimizer\.schedule\.warmup_steps=…\?$"),
        ("epochs=3", r"did you mean loop\.steps=…\?$"),
        ("betas=0.9", r"did you mean optimizer\.b1=0\.9 optimizer\.b2=0\.9\?$"),
        ("lr=fast", r"did you mean optimizer\.lr=…\?$"),
        ("lr='${run.seed}'", r"did you mean optimizer\.lr='\$\{run\.seed\}'\?$"),
        ("resume=true", "resume: unknown group; the same command again resumes a run"),
        ("log_dir=x", "log_dir: unknown group; results, logs and checkpoints go to the run's folder in cloud"),
        ("recipe=dapo", r"recipe: unknown group; did you mean loop=dapo\? a key stands behind its section"),
        ("tag=x", r"tag: unknown group; a key stands behind its section, as in loop\.steps=300; groups: assets"),
        ("run.name=${experiment}", "run.name: there is no key experiment$"),
        ("wandb_entity=me", r"wandb_entity: unknown group; did you mean logging\.wandb\.entity=me\?"),
        ("loop/steps=300", r"loop/steps: unknown group; did you mean loop\.steps=300\?"),
        ("tpu=v5e-4", r"no tpu named 'v5e-4'; set tpu\.accelerator_type=v5litepod-4; choices"),
        ("tpu=v4-32", r"did you mean tpu=v4_32\?"),
        ("model=acme/mine-7b", r"a model of the Hub is model=hf model\.weights=hf://acme/mine-7b"),
        ("model=hf://acme/gemma", r"a model of the Hub is model=hf model\.weights=hf://acme/gemma"),
        ("model=gemma-2b", r"did you mean model=gemma2_2b\?"),
        ("program.command=[python,-c,print(1)]", r"unknown function 'print'; a text with \( is quoted"),
        ("run.name=a,(b", "cannot be parsed; "),
        ("loop.steps=3,(", "cannot be parsed; "),
        ("env.vars=[]", r"env\.vars: must be a mapping \{NAME: TEXT, …\}"),
        ("program.command.0=x", r"program\.command.*: set the whole list: 'program\.command=\[…\]'"),
        ("~foo", "~foo: there is no such key to remove"),
        ("~loop.stepz", "~loop.stepz: there is no such key to remove; did you mean ~loop.steps?"),
        ("~loop=sft", "~loop=sft: it is not sft that is chosen; ~loop removes what is"),
        ("loop.steps=${run.sed}", r"loop\.steps: there is no key run\.sed; did you mean \$\{run\.seed\}\?"),
        (
            "run.name=${USER_X}",
            r"run\.name: there is no key USER_X; the environment's variable is \$\{oc\.env:USER_X\}",
        ),
        ("notify.webhook=${HOOK_X}", "notify.webhook: there is no key HOOK_X; the source of a secret is env:HOOK_X$"),
        ("env.secrets.A=${HOOK_X}", r"secrets\.A: there is no key HOOK_X; the source of a secret is env:HOOK_X$"),
        ("run.name=${MY_TOKEN}", r"there is no key MY_TOKEN; a secret is passed on by env\.secrets\.MY_TOKEN=env$"),
        ("loop.steps=${loop.steps}", r"loop\.steps: \$\{…\} refers to loop\.steps itself; write the value"),
        (
            "run.name=${oc.env:NOT_SET_X}",
            "run.name: the variable NOT_SET_X is not set here; set it, or write a default",
        ),
        ("run.name=${env:HOME}", r"run\.name: there is no such \$\{…:…\}; \$\{oc\.env:NAME\} reads a variable"),
        ("run.name=${run.name}", r"run\.name: \$\{…\} refers to run\.name itself; write the value"),
        ("~run.seed", r"~run\.seed: would remove run\.seed=1, which stands before it; leave out one"),
        ("~run", r"~run: would remove run\.seed=1"),
    ],
)
def test_a_value_that_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        compose(["+experiment=quickstart", "run.seed=1", word])
    assert "\n" not in str(caught.value)


SECRET = "sk-0123456789"
TYPED = [
    f"env.secrets={{WANDB_API_KEY: {SECRET}}}",
    f"env.secrets.WANDB_API_KEY={SECRET}",
    f"env.secrets.WANDB_API_KEY={SECRET},b",
    f"env.secrets.WANDB_API_KEY={SECRET}(c",
    f"env.secrets.WANDB_API_KEY={{a: {SECRET}}}",
    f"env.secrets={SECRET}",
    f"env.secrets=[{SECRET}]",
    f"env.secrets={{A: {SECRET}(}}",
    f"notify.webhook=https://hooks.example/{SECRET}",
    f"notify.webhook=https://hooks.example/{SECRET},x",
]


@pytest.mark.parametrize("word", TYPED)
def test_a_secret_in_place_of_its_source_is_not_shown(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    from controller.cli import main

    assert main.run(["plan", QUICKSTART, word]) == 2
    said = "".join(capsys.readouterr())
    assert SECRET not in said
    assert "use env, env:NAME, file:PATH or secretmanager:projects/P/secrets/S" in " ".join(said.split()) or "[" in word


def test_a_secret_in_a_file_is_not_shown(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    secrets = f"env: {{secrets: {{A: {SECRET}, B: [{SECRET}], C: {{d: {SECRET}}}}}}}\nnotify: {{webhook: {SECRET}}}\n"
    (tmp_path / "experiment" / "mine.yaml").write_text(f"{GLOBAL}defaults: [quickstart]\n{secrets}")
    found = "\n".join(str(problem) for problem in compose(["+experiment=mine"], extra_dir=tmp_path)[1])
    assert found.count("names where a secret is, and never holds it") == 4
    assert SECRET not in found
