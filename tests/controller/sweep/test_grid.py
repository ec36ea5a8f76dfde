"""The runs that the words of a sweep mean, what is asked before anything is billed, and searches by optuna."""

import itertools
import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import hydra
import pytest

from conf.schema.run_sections import Search, Sweep
from controller.config.compose import compose, compose_variants
from controller.core.errors import ConfigError
from controller.core.events import Event
from controller.records.ledger import Result
from controller.run.options import RunOptions
from controller.sweep import pod_pool
from controller.sweep.definition import JobBuilder, SearchSource, SweepJob, define_sweep
from controller.sweep.grid import apply_launcher, expand_grid, split_overrides, sweep_notes
from controller.sweep.sweep_session import SweepSession

HERE = Path(__file__).parent
GRID = ["+experiment=quickstart", "run.seed=0,1"]
JOBLIB = ["hydra/launcher=joblib", "hydra.launcher.n_jobs=4"]
OF_HYDRA_1_3 = "1" * hydra.__version__.startswith("1.3.")
"""Empty with Hydra 1.4, whose ranges add what was written, and never reach their end."""
OURS = "not supported, slipway runs sweeps itself"


def sweep(**values: object) -> Sweep:
    plain = {"pods": 1, "on_failure": "retry", "retries": 1, "params": {}, "cases": {}, "search": None}
    return Sweep.model_validate({**plain, **values})


def test_hydras_grammar_last_word_fastest() -> None:
    words = ["+experiment=quickstart", "loop.kl_coef=choice(0,0.001)", "run.seed=range(0,3)"]
    found = expand_grid(words, sweep(), HERE)
    wanted = [(f"loop.kl_coef={kl}", f"run.seed={seed}") for kl, seed in itertools.product(("0", "0.001"), range(3))]
    assert [variant.own_overrides for variant in found] == wanted
    assert found[0].overrides == ("+experiment=quickstart", *wanted[0])
    with pytest.raises(ConfigError, match=r"loop\.kl_coef: '0,\[' cannot be parsed"):
        expand_grid(["loop.kl_coef=0,["], sweep(), HERE)


LISTED = r"cannot stand inside a list or beside other values; list the values"


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("run.seed=range(1,3),5", rf"run\.seed: range\(…\) {LISTED}: 'run\.seed=1,2,5'$"),
        ("run.seed=5,choice(1,2),range(0,4,2)", rf"run\.seed: choice\(…\) {LISTED}: 'run\.seed=5,1,2,0,2'$"),
        ("run.seed=choice(range(1,3),7)", "RangeSweep is incompatible .*; list the values in its place$"),
        (
            "optimizer.lr=interval(0,1),2",
            r"interval\(…\) cannot .*; an interval is for sweep\.search, and the only value",
        ),
        ("optimizer.lr=[interval(0,1)]", r"interval\(…\) cannot "),
        ("loop=glob(*grpo),lm", rf"loop: glob\(…\) {LISTED}$"),
        ("program.command=[a,range(1,3)]", rf"program\.command: range\(…\) {LISTED}$"),
        ("run.seed=choice([range(1,2)],1)", rf"range\(…\) {LISTED}$"),
        ("program.command={a:choice(1,2)}", rf"choice\(…\) {LISTED}$"),
        ("run.seed=range(0,100),7", rf"range\(…\) {LISTED}$"),
        ("run.seed=range(1,3,0)", r"run\.seed: range\(1,3,0\) has no end; its step cannot be 0"),
        ("run.seed=range(0,1,0.0)", "has no end"),
        ("run.seed=range(0,inf)", "has no end"),
        ("run.seed=range(0,nan)", "has no end"),
        ("run.seed=range(3,1)", r"run\.seed: range\(3,1,1\) has no values"),
        ("run.seed=range(0,1e9)", "more than 10000 values"),
        ("run.seed=range(a,b)", "run\\.seed: .*while evaluating 'range"),
        ("run.seed=choice()", "empty choice is not legal"),
        ("run.seed=choice(choice(1,2))", "nesting choices is not supported; list the values"),
        ("run.seed=sort(1,a)", "while evaluating"),
        ("run.seed=str(interval(1,2))", "Intervals cannot be cast to str"),
        ("run.seed=tag(1)", "while evaluating"),
        ("run.seed=shuffle(interval(1,2))", "while evaluating"),
        (
            "run.seed=nobody(1,2)",
            r"unknown function 'nobody'; write the values, 1,2, or range\(START,STOP,STEP\), or",
        ),
        (
            "optimizer.lr=logspace(-5,-2,4)",
            r"lr: unknown function 'logspace'; write .* sweep\.search interval\(LO",
        ),
        ("optimizer.lr=rnge(1,3)", r"unknown function 'rnge'; did you mean range\(START,STOP,STEP\)\?$"),
        (
            "optimizer.lr=loguniform(1,3)",
            r"did you mean tag\(log,interval\(LOW,HIGH\)\), of sweep\.search\?$",
        ),
        ("run.seed=range()", r"seed: while evaluating 'range\(\)': missing .*; write range\(START,STOP,STEP\)$"),
        (
            "optimizer.lr=interval(1)",
            r"missing a required argument: 'end'; write interval\(LOW,HIGH\), of",
        ),
        ("loop=glob()", r"missing .*; write glob\(PATTERN\)$"),
        ("optimizer.lr=interval(1e-2,1e-5)", r"lr: the lower end comes first: interval\(1e-05,0\.01\)$"),
        (
            "optimizer.lr=tag(log,interval(0,1))",
            r"lr: a log scale has no 0; the lower end of interval\(0\.0,1\.0\) must be",
        ),
        (
            "optimizer.lr=1e-4;3e-4",
            r"several values, of a sweep \(-m\), are written optimizer\.lr=1e-4,3e-4$",
        ),
        (
            "optimizer.lr=1e-4 optimizer.b1=3",
            "in one pair of quotes; quote each alone: 'optimizer.lr=1e-4' 'opt",
        ),
        ("run.seed=range(1,3", "cannot be parsed"),
        (f"run.seed={'9' * 5000},1", "cannot be parsed"),
    ],
)
def test_what_a_sweep_cannot_hold_is_refused_with_the_cure(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        expand_grid([word], sweep(), HERE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("typed", "parts", "said"),
    [
        (
            ["run.seed=0,1"],
            {"cases": {"a": ["run.seed=3"]}},
            r"sweep\.cases\.a: run\.seed=3 would .* the command line gi",
        ),
        (
            [],
            {"params": {"run.seed": "0,1"}, "cases": {"b": ["++run.seed=3"]}},
            r"since sweep\.params\.run\.seed gives",
        ),
        (["loop=grpo,dapo"], {"cases": {"c": ["loop=lm"]}}, r"cases\.c: loop=lm would .* all values of loop$"),
        (
            [],
            {"params": {"sweep.pods": "2"}},
            r"^sweep\.params\.sweep\.pods: sweep\.pods is of the whole sweep and has one",
        ),
        ([], {"cases": {"d": ["sweep.retries=0"]}}, r"^sweep\.cases\.d: sweep\.retries is of the whole sweep"),
        (["sweep.params.optimizer.lr=1,2"], {}, r"on the command line the key itself varies: optimizer\.lr=…,…$"),
        (["sweep.on_failure=skip,stop"], {}, r"sweep\.on_failure is of the whole sweep"),
    ],
)
def test_values_of_a_sweep_that_would_not_count_are_refused(typed: list[str], parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        expand_grid(typed, sweep(**parts), HERE)


def test_a_case_may_set_what_the_sweep_holds_fixed_or_a_part_of(tmp_path: Path) -> None:
    found = sweep(params={"run.seed": "7", "optimizer.lr": "1,2"}, cases={"a": ["run.seed=3", "optimizer=lion"]})
    assert [v.overrides[-1] for v in expand_grid(["sweep.pods=2"], found, tmp_path)] == [
        "optimizer.lr=1",
        "optimizer.lr=2",
    ]


@pytest.mark.parametrize(
    "word",
    ["run.seed=1,01", "recovery.max_preemptions=3,4", 'sweep.cases={a: ["run.seed=3"], b: ["run.seed=3"]}'],
)
def test_runs_in_other_words_are_named(word: str, tmp_path: Path) -> None:
    found = define_sweep(["+experiment=quickstart", "cloud=local", word], tmp_path)
    assert (len(found.jobs), len(found.repeats)) == (1, 1)
    assert re.fullmatch(r"\S+ is the same run as \S+", found.repeats[0])


@pytest.mark.parametrize(
    ("values", "last"),
    [
        ("range(0,0.9,0.3)", OF_HYDRA_1_3 and "0.8999999999999999"),
        ("range(1,0.1,-0.3)", OF_HYDRA_1_3 and "0.10000000000000003"),
        ("float(range(0,0.9,0.3))", OF_HYDRA_1_3 and "0.8999999999999999"),
        ("range(0,0.6,0.2)", ""),
        ("range(0,0.95,0.3)", ""),
        ("range(0,3)", ""),
        ("0.3,0.9", ""),
        ("0.3", ""),
    ],
)
def test_a_range_of_floats_that_holds_its_own_end_is_noted(values: str, last: str) -> None:
    notes = sweep_notes([*GRID, f"optimizer.lr={values}"], sweep(params={"run.seed": "3"}))
    assert notes == sweep_notes([], sweep(params={"optimizer.lr": values}))
    assert sweep_notes(["optimizer.lr=1"], sweep(params={"optimizer.lr": values})) == []
    assert len(notes) == bool(last)
    for note in notes:
        assert note.startswith(f"optimizer.lr: the last value of the range, {last}, is its end ")
        without = note.rpartition(": ")[2]
        runs = [expand_grid([f"optimizer.lr={each}"], sweep(), HERE) for each in (values, without)]
        assert len(runs[0]) == len(runs[1]) + 1
        assert sweep_notes([f"optimizer.lr={without}"], sweep()) == []


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("optimizer.lr=range(1e-4,1e-3)", "optimizer.lr: range(1e-4,1e-3) is one value, 0.0001, as its step is 1"),
        ("optimizer.lr=range(0,1)", "optimizer.lr: range(0,1) is one value, 0, as its step is 1"),
        ("run.seed=0,0", "run.seed: 0 stands there twice and is one run"),
        (
            "optimizer.lr=choice(1e-3,0.002,0.001,2e-3)",
            "optimizer.lr: 0.001, 0.002 stand there twice and are one run each",
        ),
        ("loop=grpo,sft,grpo", "loop: grpo stands there twice and is one run"),
        ("run.seed=range(0,2)", ""),
        ("optimizer.lr=interval(0,1)", ""),
        ("loop=glob(*)", ""),
    ],
)
def test_a_sweep_of_fewer_runs_than_it_looks_like_is_noted(word: str, said: str) -> None:
    assert sweep_notes([word], sweep()) == [said] * bool(said)
    key, _, values = word.partition("=")
    assert sweep_notes([], sweep(params={key: values})) == [said] * bool(said)


def test_equal_to_hydras_own_sweeper() -> None:
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    words = ["a.b=1,2", "c.d=x", "e.f=[1,2],[3]", 'g.h="p,q"', "i.j=range(0,1,0.5)"]
    theirs = BasicSweeper.split_arguments(OverridesParser.create().parse_overrides(words), max_batch_size=None)[0]
    ours = expand_grid(words, sweep(), HERE)
    assert [set(variant.overrides) for variant in ours] == [set(run) for run in theirs]


def test_a_glob_means_files_of_a_group() -> None:
    found = [variant.own_overrides[0] for variant in expand_grid(["loop=glob(*grpo)"], sweep(), HERE)]
    assert found == ["loop=dr_grpo", "loop=grpo"]
    with pytest.raises(ConfigError, match="matches no loop; choices: cispo, custom, dapo, distillation, dpo, dr_grpo"):
        expand_grid(["loop=glob(zzz*)"], sweep(), HERE)


def test_cases_times_params_and_what_is_typed_wins() -> None:
    settings = sweep(params={"run.seed": "0,1"}, cases={"grpo": [], "no_kl": ["loop.kl_coef=0"]})
    found = expand_grid(["run.seed=7,8,9"], settings, HERE)
    assert len(found) == 6
    assert (found[0].case, found[0].own_overrides) == ("grpo", ("run.seed=7",))
    assert found[-1].overrides == ("loop.kl_coef=0", "run.seed=9")
    assert found[-1].title == "no_kl run.seed=9"


def test_an_interval_is_for_a_search() -> None:
    words = ["optimizer.lr=tag(log,interval(1e-5,1e-3))", "loop.prompts_per_step=int(interval(1,8))"]
    assert split_overrides(words, HERE)[1].intervals == {
        "optimizer.lr=": (1e-5, 1e-3, False, True),
        "loop.prompts_per_step=": (1, 8, True, False),
    }
    with pytest.raises(ConfigError, match="a grid needs values, not an interval"):
        expand_grid(words, sweep(), HERE)


@pytest.mark.usefixtures("composed_by_hydra")
def test_composed_together_is_composed_one_by_one() -> None:
    pairs = ((100, "v6e_8"), (300, "v5litepod_16"))
    variants = [("+experiment=quickstart", f"loop.steps={steps}", f"tpu={tpu}", "scale=tiny") for steps, tpu in pairs]
    assert list(compose_variants(variants)) == [compose(words) for words in variants]


@pytest.mark.usefixtures("home")
def test_a_named_sweep_of_the_project_has_different_runs(tmp_path: Path) -> None:
    found = define_sweep(["+experiment=quickstart", "sweep=grpo_ablations"], HERE)
    assert len(found.jobs) == len({job.run_id for job in found.jobs}) == 15
    assert found.sweep.pods == 2
    alone, parallel = (define_sweep([*GRID, *words], HERE) for words in ([], JOBLIB))
    assert (alone.id, alone.sweep.pods, parallel.sweep.pods) == (parallel.id, 1, 4)
    with pytest.raises(ConfigError, match=r"run\.seed=-1: run\.seed: "):
        define_sweep(["+experiment=quickstart", "run.seed=0,-1"], HERE)
    for line, said in {
        "lr: 1e-4,3e-4": "sweep.params.lr: unknown group; did you mean optimizer.lr?",
        "optimizer.lrr: 1,2": "optimizer.lrr=1: optimizer.lrr: unknown key; did you mean optimizer.lr?",
        "optimizer.lr: 1e-4 3e-4": "of a sweep (-m), are written optimizer.lr=1e-4,3e-4",
    }.items():
        (tmp_path / "slipway" / "sweep").mkdir(parents=True, exist_ok=True)
        (tmp_path / "slipway" / "sweep" / "mine.yaml").write_text(f"params:\n  {line}\n")
        with pytest.raises(ConfigError) as error:
            define_sweep(["+experiment=quickstart", "sweep=mine"], tmp_path)
        assert error.value.problems[0].endswith(f"{said} (slipway/sweep/mine.yaml, line 2)")
    (tmp_path / "slipway" / "sweep" / "mine.yaml").write_text("cases:\n  b: []\n  a: [loop.kl_coeff=0]\n")
    with pytest.raises(ConfigError) as error:
        define_sweep(["+experiment=quickstart", "sweep=mine", "run.seed=0,1"], tmp_path)
    said = "a run.seed=0: loop.kl_coeff: unknown key; did you mean loop.kl_coef? (slipway/sweep/mine.yaml, line 3)"
    assert error.value.problems == [said]
    with pytest.raises(ConfigError, match="cloud, tpu and network must be the same in all runs"):
        define_sweep(["+experiment=quickstart", "tpu=v6e_8,v5litepod_16"], HERE)


def test_words_of_hydras_launchers_are_a_number_of_pods() -> None:
    for words, meant in (
        (["hydra/launcher=pods", "sweep.pods=3"], ["sweep.pods=3"]),
        (["hydra/launcher=basic"], ["sweep.pods=1"]),
        (JOBLIB, ["sweep.pods=4"]),
        ([*JOBLIB, "sweep.pods=4"], ["sweep.pods=4"]),
        (["+hydra/launcher=joblib", "hydra/sweeper=basic"], []),
    ):
        assert apply_launcher([*GRID, *words]) == (*GRID, *meant)
    for words, said in (
        (["hydra/launcher=submitit_slurm"], f"hydra/launcher: {OURS}; set sweep.pods=4"),
        (["hydra/launcher=joblib", "hydra.launcher.backend=loky"], f"hydra/launcher: {OURS}"),
        (["hydra/launcher=joblib", "hydra.launcher.n_jobs=-1"], "hydra.launcher.n_jobs: -1 is not a number of pods"),
        (["hydra/launcher=basic", "sweep.pods=2"], "sweep.pods: 2, but hydra/launcher=basic means 1"),
        (["hydra.sweeper.n_trials=3"], "hydra/sweeper: not supported; set sweep.search="),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(said)}"):
            apply_launcher([*GRID, *words])


CAUTION = "the original program never ends; native in its place: +experiment=trm_sudoku"


def session(*cautions: str | None, stand_in: bool = False, finished: tuple[str, ...] = ()) -> SweepSession:
    """A sweep of runs r0, r1 … with these values of program.caution."""
    code, base = SimpleNamespace(stand_in=stand_in), SimpleNamespace(sweep=SimpleNamespace(search=None))
    configs: list[Any] = [SimpleNamespace(code=code, program=SimpleNamespace(caution=text)) for text in cautions]
    variant: Any = None
    jobs = tuple(SweepJob(variant, config, f"r{i}") for i, config in enumerate(configs))
    billed: Any = SimpleNamespace(is_billed=True)
    definition: Any = SimpleNamespace(base_config=base, sweep=base.sweep, jobs=jobs, space=None)
    return SweepSession(definition, billed, "bucket", set(finished), {})


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions of a sweep; each is answered with yes, except the second."""
    found: list[str] = []

    def confirm(question: str) -> bool:
        found.append(question)
        return len(found) != 2

    monkeypatch.setattr(pod_pool, "confirm", confirm)
    return found


def test_runs_that_are_known_not_to_finish_are_confirmed_once(asked: list[str]) -> None:
    with pytest.raises(ConfigError, match="nothing was created; pass --yes to skip the prompt"):
        pod_pool.confirm_cost(session(CAUTION, CAUTION, None), RunOptions())
    assert asked == [f"{CAUTION}. Start such runs all the same?", "Start 3 runs?"]


def test_each_reason_is_a_question_and_no_ends_it(asked: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"program\.caution: it forgets; nothing was created"):
        pod_pool.confirm_cost(session(CAUTION, "it forgets"), RunOptions())
    assert len(asked) == 2


@pytest.mark.parametrize("without", [{"stand_in": True}, {"finished": ("r0",)}])
def test_stand_ins_and_finished_runs_need_no_caution(asked: list[str], without: dict[str, Any]) -> None:
    pod_pool.confirm_cost(session(CAUTION, None, **without), RunOptions())
    assert [question[:5] for question in asked] == ["Start"]
    with pytest.raises(ConfigError, match=r"program\.caution: .*pass --yes to start such runs"):
        pod_pool.confirm_cost(session(CAUTION), RunOptions(json=True))  # which cannot ask
    pod_pool.confirm_cost(session(CAUTION), RunOptions(json=True, yes=True))


SEARCH_WORDS = ["+experiment=quickstart", "optimizer.lr=tag(log,interval(1e-6,1e-1))"]


@pytest.fixture
def optuna() -> None:
    pytest.importorskip("optuna")


def search(
    folder: Path, by: str = "optuna", trials: int = 20, words: list[str] = SEARCH_WORDS, **held: str
) -> SearchSource:
    same, space = split_overrides(words, folder)
    pods = {int(pod[-1]): run for pod, run in held.items()}
    plain = {"method": by, "trials": trials, "metric": "loss", "mode": "min", "prune": True, "seed": 0}
    return SearchSource(Search.model_validate(plain), same, space, JobBuilder(folder), folder / "study.journal", pods)


def loss(job: SweepJob, step: int) -> float:
    """Smallest at a learning rate of 1e-3."""
    assert job.config.optimizer is not None
    return abs(math.log10(job.config.optimizer.lr) + 3) + 1 / step


def carry(source: SearchSource, job: SweepJob) -> bool:
    """Run the toy; says whether it was pruned."""
    for step in range(1, 6):
        line = {"step": step, "phase": "train", "loss": loss(job, step)}
        if source.should_prune(job, Event(0.0, "metrics", job.run_id, data={"metrics": line})):
            source.job_ended(job, None)
            return True
    source.job_ended(job, Result(job.run_id, "finished", 1, 0.0, 0.0, {"loss": loss(job, 5)}))
    return False


@pytest.mark.usefixtures("optuna", "home")
def test_twenty_trials_find_the_better_rate_and_prune_bad_ones(tmp_path: Path) -> None:
    source, pruned = search(tmp_path), 0
    while job := source.next_job(1):
        pruned += carry(source, job)
    assert len(source.study.trials) == 20
    assert pruned >= 3
    assert abs(math.log10(source.study.best_params["optimizer.lr"]) + 3) < 0.5


@pytest.mark.usefixtures("optuna", "home")
def test_a_search_that_is_started_again_goes_on_with_what_was_under_way(tmp_path: Path) -> None:
    first = search(tmp_path, trials=4)
    done, cut_off = (cast(SweepJob, first.next_job(pod)) for pod in (1, 2))
    first.job_ended(done, Result(done.run_id, "finished", 1, 0.0, 0.0, {"loss": 1.0}))
    again = search(tmp_path, trials=4, pod2=cut_off.run_id)
    *taken, none = (again.next_job(pod) for pod in (2, 1, 1, 1))
    ids = [job.run_id for job in taken if job]
    assert (ids[0], none) == (cut_off.run_id, None)
    assert len({*ids, done.run_id}) == 4


@pytest.mark.usefixtures("optuna", "home")
@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, None, "low"])
def test_what_is_not_finite_neither_wins_a_search_nor_prunes(tmp_path: Path, bad: object) -> None:
    source = search(tmp_path, "random", 8)
    jobs = [cast(SweepJob, source.next_job(pod)) for pod in range(8)]
    for job in jobs[:6]:
        line = {"step": 1, "phase": "train", "loss": bad if job in jobs[:5] else 2.0}
        assert not source.should_prune(job, Event(0.0, "metrics", job.run_id, data={"metrics": line}))
        source.job_ended(job, Result(job.run_id, "finished", 1, 0.0, 0.0, {"loss": line["loss"]}))
    assert [trial.state.name for trial in source.study.trials[:6]] == ["FAIL"] * 5 + ["COMPLETE"]
    assert source.study.best_value == 2.0
    for step in (bad, 1):  # no step, no comparison
        line = {"step": step, "phase": "train", "loss": bad}
        assert not source.should_prune(jobs[6], Event(0.0, "metrics", jobs[6].run_id, data={"metrics": line}))


@pytest.mark.usefixtures("optuna", "home")
def test_random_draws_of_choices_and_a_failed_run(tmp_path: Path) -> None:
    source = search(tmp_path, "random", 3, ["+experiment=quickstart", "run.seed=1,2,3"])
    while job := source.next_job(1):
        source.job_ended(job, None)
    assert {trial.state.name for trial in source.study.trials} == {"FAIL"}
    with pytest.raises(ConfigError, match="no search space"):
        search(tmp_path, "random", 3, ["+experiment=quickstart"])
