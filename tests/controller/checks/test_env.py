"""Findings of environment, assets and program: one for a wrong config, none for a right one."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from controller.checks import asset_access, env, project, secrets
from controller.checks.preflight import checks_of
from controller.checks.secrets import secrets_stay_here
from controller.context import Context
from controller.inputs.code import CodeSnapshot, take_snapshot
from controller.plan.build import build_plan
from controller.plan.worker_steps import PIN, venv_requirements
from tests.composed import config_of as config
from tests.controller.checks import plans

ON_GCP = ["cloud=gcp", "cloud.project=acme"]
COMMAND = ["cloud=local", "program=command", "program.command=[python,-V]"]
SHA = "a" * 64
COMMIT = "c" * 40


def words(*overrides: str) -> list[str]:
    made = config(*COMMAND, *overrides)
    checks = [
        check for module in (env, secrets, asset_access, project) for check in checks_of(module) if not check.rule.live
    ]
    checks = [check for check in checks if check.rule.id != "complete"]
    return [f"{finding.check}: {finding.severity} {finding}" for check in checks for finding in check(made)]


@pytest.fixture(autouse=True)
def nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "NETRC", "KEY"):
        monkeypatch.delenv(name, raising=False)


def test_nothing_is_said_of_what_is_right(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words() == []
    assert words("program.command=[pip,install,hf_transfer,--eos-token,'<eos>']", "env.vars.JAX_PLATFORMS=cpu") == []
    assert words("env.vars.JAX_PLATFORMS='tpu,cpu'", *ON_GCP) == []
    assert words("env.vars={JAX_MY_OWN: a, HF_REPO: b, WANDB_NOTES: c, MY_FLAGS: d, TPU_NAME: e, PATH_X: f}") == []
    assert words("program.command=[bash,-lc,'python train.py $SLIPWAY_RUN_DIR ~/x']", "env.vars.P='a$b'") == []
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
    assert words("program=trainer", "program.command=[]", "cloud=gcp", "env.packages=image", *own) == [], (
        "it may have JAX"
    )


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


def test_a_path_of_this_machine_is_one_that_is_here_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home, work = tmp_path / "me", tmp_path / "work"
    for folder in (home / "data", work / "src"):
        folder.mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(work)

    def said(text: str, *overrides: str) -> list[str]:
        return [line for line in words(f"env.vars.D='{text}'", *ON_GCP, *overrides) if "unlike_here" in line]

    for text, path in ((f"{home}/data", home / "data"), (f"--in={work}/src -v", work / "src")):
        assert said(text)[0].startswith(f"unlike_here: warning env.vars.D: {path} is a path of this machine, which")
        assert said(text, "cloud=local") == []
    for text in (f"{home}/no", f"{work}/out", f"a:{work}/src", f"{home}/data:/data", "/root/models", f"x{home}/data"):
        assert said(text) == []
    [line] = words(f"program.command=[ls,'--data={home}/data']", *ON_GCP)
    assert line.startswith(f"unlike_here: warning program.command: {home}/data is a path of this machine")
    for place in ("/root", "/"):
        monkeypatch.setenv("HOME", place)
        assert said(f"{place}/..") == [], "workers have it too"


def test_this_machine_and_root_need_no_sudo() -> None:
    for argv in ("[apt-get,update]", "[sudo,apt,install,x]", "[sudo,pip,install,x]"):
        assert len(words(f"program.setup=[{argv}]", *ON_GCP)) == 1
        for overrides in (["cloud=here"], [*ON_GCP, "ssh.user=root"]):
            found = [line for line in words(f"program.setup=[{argv}]", *overrides) if "unlike_here" in line]
            of_login = "unlike_here: warning ssh.user: Google's images let nobody log in as root; name another"
            assert [line.startswith(of_login) for line in found] == [True] * ("ssh.user=root" in overrides)


def test_the_runs_own_folder_is_no_mistake_for_mlflow() -> None:
    for folder in ("{run_dir}/mlruns", "{bucket}/mlruns", "/tmp/mlruns"):
        assert words(f"env.vars.MLFLOW_TRACKING_URI='{folder}'", "logging.trackers=[tests.x:Y,mlflow]", *ON_GCP) == []


def test_a_word_that_no_program_can_be_given() -> None:
    made = config(*COMMAND)
    long = made.env.model_copy(update={"vars": {"X": "é" * 70_000}})
    [said] = env.arguments_fit_a_process(made.model_copy(update={"env": long}))
    assert str(said).startswith("env.vars.X: has 140000 bytes")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["env.packages=requirements"], "requirements: error env.requirements: env.packages=requirements needs"),
        (["env.requirements=r.txt"], "requirements: error env.packages: image ignores env.requirements=r.txt"),
        (
            ["program=trainer", "program.command=[]", "cloud=gcp", "env.packages=none"],
            "trainer_packages: error env.packages: program=traine",
        ),
        (
            ["program=trainer", "program.command=[]", "cloud=gcp", "env.packages=image"],
            "trainer_packages: error env.packages: program=train",
        ),
        (
            ["env.python=3.12", "cloud=gcp", "env.packages=image"],
            "requirements: warning env.python: has no effect with env.packages=image, which has a Python of its own",
        ),
        (["env.secrets.KEY=env"], "secret: warning env.secrets.KEY: the environment variable KEY is not set"),
        (["env.secrets.X=env:KEY"], "secret: error env.secrets.X: the environment variable KEY is not set"),
        (["env.secrets.X=file:/nowhere"], "secret: error env.secrets.X: no file at /nowhere"),
        (["env.vars.WANDB_API_KEY=x", "env.secrets.WANDB_API_KEY=null"], "secret_in_vars: warning env.vars.WANDB_API"),
        (
            ["env.vars.NETRC=x"],
            "variable_twice: error env.vars.NETRC: env.secrets.NETRC=env passes yours on; leave this o",
        ),
        (["env.vars.HF_TOKEN=hf_abcdefghijklmnopqrstuvwx"], "variable_twice: error env.vars.HF_TOKEN: env.secrets.HF"),
        (["env.vars.SLIPWAY_X=x"], "variable_reserved: error env.vars.SLIPWAY_X: names that start with SLIPWAY_"),
        (["env.vars.M='{assets.models.m}'"], "asset_named: error env.vars.M: {assets.models.m}: no such asset"),
        (
            ["env.vars.D='{run_dirr}/x'"],
            "asset_named: warning env.vars.D: {run_dirr} stays as it is; did you mean {run_dir}?",
        ),
        (
            ["env.vars.D='{assets.dataset.d}/x'"],
            "asset_named: warning env.vars.D: {assets.dataset.d} stays as it is; choices: bucket, run_dir, run_id",
        ),
        (["env.vars.D=gs:/b/x"], "unlike_here: warning env.vars.D: gs:/… lacks a slash; write gs://"),
        *(
            ([f"program.setup=[{argv}]"], f"unlike_here: warning program.setup: {said}")
            for argv, said in (
                ("[apt,install,-y,g++]", "apt needs the rights of root; write sudo apt"),
                ("[bash,-c,'cd a && apt-get update']", "apt-get needs the rights of root; write sudo apt-get"),
                ("[sudo,apt-get,install,g++]", "apt-get asks whether to install, and nobody answers; add -y"),
                ("[sudo,-E,pip,install,a]", "sudo leaves out the program's Python and variables"),
            )
        ),
        *(
            (
                [f"env.vars.MLFLOW_TRACKING_URI='{address}'", "logging.trackers=[tests.x:Y,mlflow]", *ON_GCP],
                f"trackers: warning env.vars.MLFLOW_TRACKING_URI: {address} is {said}",
            )
            for address, said in (
                ("localhost:5000", "a folder to mlflow; an address begins with https:// or http://"),
                ("http://127.0.0.1:5000", "worker 0 itself there, not this machine"),
            )
        ),
        *(
            (
                [f"env.vars.D='{typed}/x'", "assets.datasets.d.path=tests"],
                f"asset_named: warning env.vars.D: {typed} stays as it is; did you mean {meant}?",
            )
            for typed, meant in (
                ("{run-dir}", "{run_dir}"),
                ("{RUN_DIR}", "{run_dir}"),
                ("{run.dir}", "{run_dir}"),
                ("{ runid }", "{run_id}"),
                ("<run_dir>", "{run_dir}"),
                ("{assets.dataset.d}", "{assets.datasets.d}"),
                ("{datasets.d}", "{assets.datasets.d}"),
                ("{assets.d}", "{assets.datasets.d}"),
                ("assets://d", "{assets.datasets.d}"),
            )
        ),
        *(
            ([f"program.command=[python,-m,controller,{word}]"], f"unexpanded: warning program.command: {found} stays")
            for word, found in (
                ("'$SLIPWAY_RUN_DIR'", "$SLIPWAY_RUN_DIR"),
                ("'--out=$HOME/x'", "$HOME"),
                ("'--out=~/x'", "~/x"),
            )
        ),
        (
            ["env.vars.D=~/data"],
            "unexpanded: warning env.vars.D: ~/data stays as it is, since no shell reads it; write",
        ),
        (["program.command=[sudo,python,-m,controller]"], "unlike_here: warning program.command: sudo leaves out"),
        (["env.vars.D='{{run_dir}}/x'"], "asset_named: warning env.vars.D: {{run_dir}}: write {run_dir} alone"),
        (["program.setup=[['{assets.models.m}']]"], "asset_named: error program.setup: {assets.models.m}: no such"),
        (
            ["assets.models.m.path=gs//b"],
            "asset_here: error assets.models.m.path: gs//b is in a bucket already, and as",
        ),
        (
            ["assets.models.m.path=hf://a/b"],
            "asset_here: error assets.models.m.path: no file at hf://a/b; name it as s",
        ),
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
        (
            ["program=trainer", "program.command=[]", f"code.repository={{url: 'https://h/r', commit: {COMMIT}}}"],
            "repository_unused: error code.repository: program=trainer ignores it",
        ),
        (
            [f"code.repository={{url: 'https://me:pw@h/r', commit: {COMMIT}}}"],
            "repository_password: error code.repository.url: contains a password or token",
        ),
        (
            ["program.command=[python,-c,a,--token,hf_abcdefgh1]"],
            "secret_like: warning program.command: looks like a to",
        ),
        (
            ['program.command=[python,-c,a,"--api-key=abcdef123"]'],
            "secret_like: warning program.command: the value of --ap",
        ),
        (
            ["env.vars.X=ghp_0123456789abcdefghij"],
            "secret_like: warning env.vars.X: looks like a token, which would be",
        ),
        (["env.vars.JAX_PLATFORM=cpu"], "platforms: warning env.vars.JAX_PLATFORM: neither JAX nor what "),
        (["env.vars.XLA_FLAG=x"], "platforms: warning env.vars.XLA_FLAG: neither JAX nor what "),
        (["env.vars.hf_home=x"], "platforms: warning env.vars.hf_home: neither JAX nor what "),
        (
            ["env.vars.JAX_PLATFORMS='cuda,cpu'"],
            "platforms: error env.vars.JAX_PLATFORMS: cuda: emulated workers have CPU",
        ),
        (
            ["env.vars.JAX_PLATFORMS=gpu", *ON_GCP],
            "platforms: error env.vars.JAX_PLATFORMS: gpu: a TPU VM has tpu and cpu",
        ),
        (
            ["env.vars.JAX_PLATFORMS=cpu", *ON_GCP],
            "platforms: warning env.vars.JAX_PLATFORMS: cpu leaves the TPU chips",
        ),
        (["sweep=seeds"], "sweep_unused: warning sweep: has an effect with -m only"),
        (["sweep.pods=2"], "sweep_unused: warning sweep: has an effect with -m only"),
        (["code.exclude=['!']"], "exclude: error code.exclude: '!' is not a valid .gitignore pattern"),
        (["code.max_mb=5000"], "code_limit: error code.max_mb: workers unpack at most 1074 MB of code"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(overrides: list[str], said: str) -> None:
    found = words(*overrides)
    assert len(found) == 1, found
    assert found[0].startswith(said)


OLD = "warning env.python: Python {} silently limits JAX to {}; choose 3.12 or later"
WANTS = "error env.python: env.requirements wants {}, but JAX for Python {}; use env.python={}"


@pytest.mark.parametrize(
    ("python", "text", "said"),
    [
        ("3.13", "jax[tpu]==0.12.*", []),
        ("3.13.1", "jax>=0.4\njaxlib==0.4.34 --hash=sha256:00", []),
        ("3.11", "jax==0.10.2", []),
        ("3.11", "jax>=0.9,<0.11", []),
        ("3.11", "jax==0.12.0; python_version >= '3.12'\njax==0.10.2; python_version < '3.12'", []),
        ("3.11", "torch==2.6.0\njaxtyping>=99\n--find-links https://h/jax", []),
        ("3.11", "jax @ https://h/jax-0.12.0-py3-none-any.whl", []),
        ("3.15", "jax==0.12.*", []),
        *(
            ("3.13", line, [f"error env.requirements: {line} is JAX for GPUs, and finds no TPU; use jax[tpu]"])
            for line in ("jax[cuda12]", "jax[cuda13-local]>=0.7", "jax[rocm]")
        ),
        ("3.11", "jax==0.12.*", [WANTS.format("jax==0.12.*", "3.11 ends with 0.10.2", "3.12")]),
        ("3.11", "numpy\nJAX[tpu] >= 0.11", [WANTS.format("JAX[tpu]>=0.11", "3.11 ends with 0.10.2", "3.12")]),
        ("3.11", "jax>0.10.2", [WANTS.format("jax>0.10.2", "3.11 ends with 0.10.2", "3.12")]),
        ("3.11", "jax~=0.12.0", [WANTS.format("jax~=0.12.0", "3.11 ends with 0.10.2", "3.12")]),
        ("3.13", "jax==0.4.30", [WANTS.format("jax==0.4.30", "3.13 begins with 0.4.34", "3.12")]),
        ("3.14", "jaxlib~=0.5.0", [WANTS.format("jaxlib~=0.5.0", "3.14 begins with 0.7.1", "3.13")]),
        ("3.14", "jax<0.7", [WANTS.format("jax<0.7", "3.14 begins with 0.7.1", "3.13")]),
        ("3.11", "jax>=0.9", [OLD.format("3.11", "0.10.2")]),
        ("3.11", "jax\njaxlib==0.9.0", []),
        ("3.10", "flax", [OLD.format("3.10", "0.6.2")]),
    ],
)
def test_a_jax_that_the_python_does_not_have_is_found(tmp_path: Path, python: str, text: str, said: list[str]) -> None:
    (tmp_path / "r.txt").write_text(f"{text}\n")
    own = [f"env.python={python}", "env.packages=requirements", "env.requirements=r.txt", *ON_GCP]
    plan = build_plan(config(*COMMAND, *own), "acme", tmp_path, CodeSnapshot(tmp_path, ("r.txt",)))
    assert [f"{found.severity} {found}" for found in env.python_has_jax(plan, plans.context())] == said


def test_the_lock_has_a_jax_for_the_python_of_its_pods(tmp_path: Path) -> None:
    def found(*words: str) -> list[str]:
        plan = build_plan(config(*COMMAND, "env.packages=lock", *words), "acme", tmp_path, CodeSnapshot(tmp_path, ()))
        return [str(finding) for finding in env.python_has_jax(plan, plans.context())]

    assert found() == []
    assert found("env.python=3.20") == ["env.python: no JAX for Python 3.20 is known here; choose one of 3.12 to 3.14"]
    [both] = found("env.python=3.11")
    ends = "JAX for Python 3.11 ends with 0.10.2; use env.python=3.12"
    assert both.partition(", but ")[2] == ends
    assert re.fullmatch(r"env\.python: the lock wants jax==\S+ and jaxlib==\S+, but .*", both)


TRAINER = ["+experiment=quickstart", "logging.wandb={project: p, entity: null, mode: online}"]


def test_wandb_wants_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def said(*overrides: str) -> list[str]:
        return [str(finding) for finding in env.trackers_are_possible(config(*TRAINER, *overrides))]

    [key] = said()
    assert key.startswith("logging.wandb: WANDB_API_KEY is not set; set it (https://wandb.ai/authorize)")
    assert said("logging.wandb.mode=offline") == []
    assert said("env.secrets.WANDB_API_KEY=file:/a/key") == []
    monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
    assert said() == []
    assert len(said("env.secrets.WANDB_API_KEY=null")) == 1
    assert said("logging.wandb=null", "env.secrets.WANDB_API_KEY=null") == []
    assert [line.partition(":")[0] for line in said("logging.wandb=null", "logging.trackers=[wandb]", NO_KEY)] == [
        "logging.trackers"
    ]
    assert said("logging.wandb=null", "logging.trackers=[wandb]", NO_KEY, "env.vars={WANDB_MODE: offline}") == []


NO_KEY = "env.secrets.WANDB_API_KEY=null"
LOCAL_STORE = "writes to a file among the run's results, since"


@pytest.mark.parametrize(
    ("words", "variable", "said"),
    [
        (["[mlflow]"], "", f"mlflow {LOCAL_STORE} MLFLOW_TRACKING_URI is not set for the workers; it holds an address"),
        (["[mlflow]"], "MLFLOW_TRACKING_URI", "env.secrets.MLFLOW_TRACKING_URI=env passes yours on"),
        (["[mlflow]", "env.vars={MLFLOW_TRACKING_URI: 'http://a'}"], "", ""),
        (["[trackio]"], "", f"trackio {LOCAL_STORE} TRACKIO_SPACE_ID is not set for the workers"),
        (["[trackio]", "env.vars={TRACKIO_SPACE_ID: a/b}"], "", "a Space needs HF_TOKEN, which is not set; set it"),
        (["[trackio]", "env.vars={TRACKIO_SPACE_ID: a/b}"], "HF_TOKEN", ""),
        (["[tensorboard, my_own:Tracker]"], "", ""),
    ],
)
def test_what_a_tracker_sends_to_is_passed_on(
    words: list[str], variable: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HF_TOKEN", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    if variable:
        monkeypatch.setenv(variable, "x" * 20)
    trackers, *others = words
    found = [*env.trackers_are_possible(config(*COMMAND, f"logging.trackers={trackers}", *others))]
    assert {finding.severity for finding in found} <= {"warning"}
    assert (said in str(found[0])) if said else found == []


@pytest.mark.parametrize(
    ("words", "files", "said"),
    [
        (["env.packages=lock"], {}, "mlflow needs its package, which env.packages=lock lacks; use program.setup=[["),
        (["env.packages=lock", "program.setup=[[uv,pip,install,mlflow-skinny]]"], {}, ""),
        (["env.packages=requirements", "env.requirements=r.txt"], {"r.txt": "torch\n"}, "is not in env.requirements"),
        (["env.packages=requirements", "env.requirements=r.txt"], {"r.txt": "MLflow>=3\n"}, ""),
        (["env.packages=requirements", "program.setup=[[uv,sync]]"], {"uv.lock": 'name = "mlflow"\n'}, ""),
        (["env.packages=requirements", "program.setup=[[uv,sync]]"], {"uv.lock": 'name = "torch"\n'}, "is not in"),
        (["env.packages=requirements"], {"uv.lock": 'name = "mlflow"\n'}, "is not in env.requirements"),
        (["env.packages=image"], {}, "which this machine lacks, whose packages the workers use: pip install mlflow"),
        (["env.packages=image", "cloud=gcp", "cloud.project=acme"], {}, "which the image of the workers lacks"),
    ],
)
def test_the_package_of_a_tracker_is_installed(
    words: list[str], files: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "find_spec", lambda name: None)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    snapshot = CodeSnapshot(tmp_path, tuple(files))

    def found(trackers: str) -> list[str]:
        made = config("program=command", "program.command=[x]", "cloud=local", f"logging.trackers={trackers}", *words)
        plan = build_plan(made, "acme", tmp_path, snapshot)
        return [str(finding) for finding in env.tracker_packages_are_installed(plan, plans.context())]

    findings = found("[mlflow]")
    assert len(findings) == (1 if said else 0)
    assert said in "".join(findings)
    assert found("[my_own:Tracker]") == []


def test_the_lock_has_what_is_wanted_and_every_package_once() -> None:
    harness = "loop.evaluations={e: {run: lm_eval, options: {tasks: [a]}}}"
    for words, there in (
        ([*TRAINER, "env.packages=lock"], {"wandb"}),
        (["+experiment=quickstart", "env.packages=lock", harness], {"lm-eval"}),
        ([*TRAINER, "env.packages=lock", harness], {"wandb", "lm-eval"}),
        (["+experiment=quickstart", "env.packages=lock"], set()),
        (["program=command", "program.command=[x]", "env.packages=lock", "logging.trackers=[wandb]"], {"wandb"}),
    ):
        made = config(*words)
        text = venv_requirements(made, take_snapshot(made, Path.cwd())).text
        names = [match["name"] for match in PIN.finditer(text)]
        assert len(names) == len(set(names))
        assert {"wandb", "lm-eval"} & {*names} == there
        assert text.count("--hash=sha256:") > len(names)


@pytest.mark.parametrize(
    ("secret", "place", "said"),
    [
        ("env.secrets.KEY=file:{}/key.txt", "code", "env.secrets.KEY: {}/key.txt is shipped with the code; move it "),
        ("notify.webhook=file:{}/key.txt", "code", "notify.webhook: {}/key.txt is shipped with the code; move it"),
        ("env.secrets.NETRC=env", "code", "env.secrets.NETRC: {}/key.txt is shipped with the code; move it elsewhere"),
        ("env.secrets.KEY=file:{}/key.txt", "asset", "env.secrets.KEY: {}/key.txt is part of the asset at {}; move"),
        ("env.secrets.KEY=file:{}/key.txt", "elsewhere", ""),
        ("env.secrets.KEY=env", "code", ""),
    ],
)
def test_a_file_with_a_secret_is_not_shipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, secret: str, place: str, said: str
) -> None:
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "key.txt").write_text("https://x")
    if "NETRC" in secret:
        monkeypatch.setenv("NETRC", str(folder / "key.txt"))
    asset = ["+assets.datasets.d.path=" + str(folder)] if place == "asset" else []
    words = ["cloud.project=acme", "program=command", "program.command=[a]", secret.format(folder), *asset]
    files = ("key.txt",) if place == "code" else ()
    plan: Any = SimpleNamespace(config=config(*words), snapshot=CodeSnapshot(folder, files))
    found = [str(finding) for finding in secrets_stay_here(plan, cast(Context, None))]
    wanted = [said.format(folder, folder)] if said else []
    assert [line[: len(begin)] for line, begin in zip(found, wanted, strict=True)] == wanted
