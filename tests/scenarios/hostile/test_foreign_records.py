"""A record is data until its reader says otherwise: no verb and no function of the API imports what one names.

A stranger has put runs into the bucket, with a canary in every place where a record may hold code: its module can be
imported by name, from the archive, and from the current folder, and leaves its mark when it is.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from conf.extension import PROTOCOLS
from controller import api
from controller.cli import main
from controller.cli.flags import VERBS
from controller.cli.verbs import results
from controller.connect import open_context, project_of
from controller.core.errors import SlipwayError
from controller.gcp.client import GoogleClient
from controller.inputs.code import CodeSnapshot
from controller.inputs.modules import references
from controller.plan.build import build_plan
from controller.records.recorder import describe_plan, row_from_record
from tests.composed import config_of
from tests.controller.conftest import SlipwayCli

OWN = "canary_of_strangers"
CLOUD = ("cloud=local",)
EVERYWHERE = (*CLOUD, f"code.checks=[{OWN}:check]", f"code.resources=[{OWN}:Step]", f"notify.notifier={OWN}:tell")
TRAINED = (
    *EVERYWHERE, "data=questions", f"data.source={OWN}:questions", f"data.prompt.formatter={OWN}:prompt", "model=tiny",
    "loop=grpo", rf"loop.rewards={{{OWN}\:reward: 1.0}}", f"loop.loss_type={OWN}:loss", "optimizer=custom",
    f"optimizer.rule={OWN}:rule", f"loop.evaluations={{e: {OWN}:evaluation}}", f"loop.environment.name={OWN}:Game",
    "run.name=grpo",
)  # fmt: skip
LANGUAGE = (
    *EVERYWHERE, "data=documents", f"data.source={OWN}:documents", "model=tiny", "loop=lm", "optimizer=adamw",
    f"loop.loss={OWN}:token_loss", f"model.implementation={OWN}:Family", "run.name=lm",
)  # fmt: skip
LOOP = (
    *EVERYWHERE,
    "model=tiny",
    "loop=custom",
    f"loop.run={OWN}:train",
    "optimizer=adamw",
    "run.name=own",
)
PROGRAM = (
    *EVERYWHERE,
    "program=command",
    "program.command=[python, -c, import canary_of_strangers]",
    f"logging.trackers=[{OWN}:track]",
    "run.name=program",
)
RECORDS = (TRAINED, LANGUAGE, LOOP, PROGRAM)
MARKED = "import os\nwith open(os.environ['CANARY'], 'a') as out: out.write(f'{__name__} {__file__}\\n')\n"
NAMES = "check tell questions prompt reward loss rule evaluation Game documents token_loss Family train track"
CODE = f"{MARKED}class Step:\n    pass\n{' = '.join(NAMES.split())} = print\n"
IMPORTED_BY_TOOLS = ("sitecustomize.py", "usercustomize.py", "conftest.py", "setup.py", "hydra_plugins/canary.py")

VERB_WORDS: dict[str, Sequence[Sequence[str]] | str] = {
    "up": [["--run", "RUN"], ["--run", "RUN", "--yes"]],
    "plan": [["--run", "RUN"]],
    "status": [["--run", "RUN"], ["--all"]],
    "runs": [["--refresh"], ["--diff", "RUN", "RUN"]],
    "capacity": [["--refresh"]],
    "report": [["RUN", "--refresh"]],
    "tensorboard": [["RUN", "--refresh"]],
    "logs": [["--run", "RUN"]],
    "get": [["RUN", "--list"], ["RUN", "--to", "got"]],
    "ssh": [["--run", "RUN"]],
    "exec": [["--run", "RUN", "--", "true"]],
    "forward": [["--run", "RUN", "8888"]],
    "verify": [["--run", "RUN"]],
    "export": [["RUN", "--to", "exported"]],
    "chat": [["RUN"]],
    "generate": [["RUN", "--prompt", "Hello"]],
    "cancel": [["--run", "RUN"]],
    "stop": [["--run", "RUN", "--yes"]],
    "orphans": [[]],
    "localcloud": [["requests"]],
    "completion": [["bash"], ["query"]],
    "version": [[]],
    "help": [[]],
    "run": "its program is after --",
    "fit": "reads the user's own config only",
    "rehearse": "reads the user's own config only",
    "witness": "reads the user's own config only",
    "init": "asks Google about the project",
    "doctor": "reads the user's own config only",
    "down": [["--run", "RUN", "--yes"], ["--run", "RUN", "--all", "--yes"]],
}
API_CALLS: dict[str, Callable[[str], Any] | str] = {
    "up": lambda run: api.up(*CLOUD, run=run, yes=True),
    "start": lambda run: api.start(*CLOUD, run=run, yes=True),
    "status": lambda run: api.status(*CLOUD, run=run),
    "logs": lambda run: api.logs(*CLOUD, run=run),
    "cancel": lambda run: api.cancel(*CLOUD, run=run),
    "pod": lambda run: api.pod(*CLOUD, run=run),
    "record": lambda run: api.record(run),
    "metrics": lambda run: api.metrics(run),
    "runs": lambda run: api.runs(),
    "plan": "reads the user's own config only",
    "compose": "reads the user's own config only",
    "sweep": "reads the user's own config only",
}
REFUSED = "nothing was executed: this machine did not make the record"


class Strangers:
    """Runs that somebody else has put into the bucket, and what of their code has been imported."""

    def __init__(self, slipway: SlipwayCli, folder: Path) -> None:
        self.slipway, self._mark, self._code = slipway, folder / "mark", folder / "code"
        for name in (f"modules/{OWN}.py", f"{OWN}.py", *IMPORTED_BY_TOOLS):
            file = self._code / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(CODE)
        os.environ["CANARY"] = str(self._mark)

    @property
    def imported(self) -> str:
        return self._mark.read_text() if self._mark.is_file() else ""

    def publish(self, words: Sequence[str]) -> str:
        """Put a run into the bucket as its first launch would have; return its id."""
        self.slipway.cloud()
        config = config_of(*words)
        files = tuple(sorted(path.relative_to(self._code).as_posix() for path in self._code.rglob("*.py")))
        plan = build_plan(config, project_of(config), self._code, CodeSnapshot(self._code, files), own_code=False)
        document = describe_plan(plan, [*words, f"+hydra.callbacks.x._target_={OWN}.Step"])
        document |= {"format": 1, "created": 1e9, "sweep": "", "git": {"commit": "c" * 40, "dirty": True}}
        run, base = plan.run_id, f"runs/{plan.run_id}"
        row = json.dumps(row_from_record(document) | {"format": 1, "state": "running"})
        with open_context(config) as (context, _):
            google = context.google
            buckets = [
                item["name"] for item in google.list_all("storage", "buckets.list", "items", project=plan.project)
            ]
            if plan.bucket not in buckets:
                google.call("storage", "buckets.insert", project=plan.project, body={"name": plan.bucket})
            google.upload(plan.bucket, f"code/{plan.snapshot.sha256}.tar.gz", plan.snapshot.archive)
            google.upload(plan.bucket, f"{base}/record.json", json.dumps(document).encode())
            google.upload(plan.bucket, f"{base}/run.yaml", plan.run_yaml.encode())
            google.upload(plan.bucket, f"{base}/checkpoints/3/commit_success.txt", b"")
            google.upload(plan.bucket, f"index/{run}.json", row.encode(), metadata={"row": row})
        return run

    def _objects(self, prefix: str) -> Iterator[tuple[GoogleClient, str, str]]:
        with open_context(config_of(*CLOUD)) as (context, _):
            google = context.google
            for bucket in google.list_all("storage", "buckets.list", "items", project=context.project):
                where = {"bucket": bucket["name"], "prefix": prefix}
                for item in google.list_all("storage", "objects.list", "items", **where):
                    yield google, bucket["name"], item["name"]

    def damage(self, prefix: str, content: bytes) -> None:
        """Write this in place of every object below a prefix of the bucket."""
        for google, bucket, name in self._objects(prefix):
            google.upload(bucket, name, content)

    def put(self, objects: Mapping[str, bytes]) -> None:
        for google, bucket, _ in self._objects("index/"):  # the one row
            for name, content in objects.items():
                google.upload(bucket, name, content)

    def read(self, prefix: str) -> list[bytes]:
        return [google.download(bucket, name) for google, bucket, name in self._objects(prefix)]


@pytest.fixture
def strangers(slipway: SlipwayCli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Strangers]:
    monkeypatch.setenv("CANARY", "")
    importable, own = tmp_path / "importable", slipway.repository / "slipway"
    for folder in (importable, own):
        folder.mkdir()
        (folder / f"{OWN}.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(importable))
    monkeypatch.setenv("PYTHONPATH", str(importable))
    yield Strangers(slipway, tmp_path / "stranger")
    sys.modules.pop(OWN, None)


def test_the_canaries_are_in_every_place_and_the_walk_knows_every_verb() -> None:
    uses = [use for words in RECORDS for use in references(config_of(*words))]
    assert {use.reference.partition(":")[0] for use in uses} == {OWN}
    assert {use.kind for use in uses} == {*PROTOCOLS} - {"policy loss class"}
    assert set(VERB_WORDS) == set(VERBS), "say what the verb reads of a record"
    for verb, words in VERB_WORDS.items():
        takes_runs = any(flag.completion == "run" for flag in VERBS[verb].flags)
        named = not isinstance(words, str) and any("RUN" in line for line in words)
        assert takes_runs == named, f"{verb}: one that takes a run is tried with one"
    functions = {name for name in api.__all__ if not isinstance(getattr(api, name), type)}
    assert set(API_CALLS) == functions, "say what the function reads of a record"


@pytest.mark.e2e
@pytest.mark.parametrize(
    "words",
    [
        pytest.param(TRAINED, id="grpo"),
        pytest.param(LANGUAGE, id="lm", marks=pytest.mark.deep),
        pytest.param(LOOP, id="loop", marks=pytest.mark.deep),
        pytest.param(PROGRAM, id="program"),
    ],
)
def test_no_verb_and_no_function_imports_what_a_record_names(
    strangers: Strangers, words: Sequence[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = strangers.publish(words)
    asked: list[dict[str, Any]] = []
    monkeypatch.setenv("COMP_LINE", "slipway get ")
    monkeypatch.setattr(results, "run_program", lambda *argv, **how: asked.append(how) or 0)
    for verb, lines in VERB_WORDS.items():
        for line in [] if isinstance(lines, str) else lines:
            at = line.index("--") if "--" in line else len(line)
            config = CLOUD if VERBS[verb].config else ()
            argv = [verb, *(run if word == "RUN" else word for word in line[:at]), *config, *line[at:]]
            code = main.run(argv)
            said = capsys.readouterr()
            assert strangers.imported == "", argv
            assert "Traceback" not in said.err, argv
            if verb in ("up", "plan"):
                assert (code, REFUSED in said.err) == (2, True), argv
            elif verb in ("status", "get", "runs", "report", "cancel", "verify", "logs"):
                assert code == 0 or "RUN" in line, (argv, said.err)
            if "--all" in line and verb == "down":
                assert f"{OWN}:Step" in said.err, "what stays is named"
    for call in API_CALLS.values():
        if not isinstance(call, str):
            with suppress(SlipwayError):
                call(run)
            assert strangers.imported == "", call
    trainer = words is not PROGRAM
    assert asked == [{"modules": (), "imports": ()}] * (3 if trainer else 0)


@pytest.mark.e2e
def test_a_record_is_shown_and_asked_about_once(
    strangers: Strangers, monkeypatch: pytest.MonkeyPatch, slipway: SlipwayCli, capsys: pytest.CaptureFixture[str]
) -> None:
    run = strangers.publish(PROGRAM)
    plan = ["plan", "--run", run, *CLOUD]
    assert main.run(plan) == 2
    said = " ".join(capsys.readouterr().err.split())
    for shown in (
        f"code.resources: {OWN}:Step, on this machine", f"code.checks: {OWN}:check, on this machine", "c" * 40,
        f"{slipway.home}/code/", "with changes of its own", "packages",
        "python -c 'import canary_of_strangers'", REFUSED,
    ):  # fmt: skip
        assert shown in said, shown
    assert strangers.imported == ""
    main.run([*plan, "--trust"])
    assert OWN in strangers.imported, "the canary sings"
    assert REFUSED not in capsys.readouterr().err
    main.run(plan)
    assert "is from a record" not in capsys.readouterr().err, "the answer is remembered"


@pytest.mark.e2e
def test_a_run_whose_code_data_or_record_is_damaged_is_looked_at_and_ended(
    strangers: Strangers, slipway: SlipwayCli, capsys: pytest.CaptureFixture[str]
) -> None:
    run = strangers.publish(PROGRAM)
    strangers.damage("code/", b"no archive")
    for verb in ("get", "status", "cancel", "down", "verify", "logs", "exec"):
        for line in VERB_WORDS[verb]:
            if "RUN" in line and "--all" not in line:
                at = line.index("--") if "--" in line else len(line)
                argv = [verb, *(run if word == "RUN" else word for word in line[:at]), *CLOUD, *line[at:]]
                assert main.run(argv) == (2 if verb in ("verify", "logs", "exec") else 0), argv
                said = capsys.readouterr().err
                assert "the code in" not in said, argv
                assert verb in ("get", "status", "cancel", "down") or "`slipway up`" in said, (argv, said)
    assert main.run(["plan", "--run", run, "--trust", *CLOUD]) == 2
    assert "cannot unpack the code" in capsys.readouterr().err
    assert not any((slipway.home / "code").glob("*")), "nobody asked for the code"


CLAIMS: dict[str, tuple[dict[str, Any], str]] = {
    "another bucket": ({"bucket": "attackers-bucket"}, "it names another bucket, attackers-bucket"),
    "a folder": ({"bucket": "/etc"}, "it names another bucket, /etc"),
    "another project": ({"project": "production"}, "says project production, not slipway-local"),
    "another run": ({"run": "r-0123abcd"}, "it is of another run, r-0123abcd"),
    "a later Slipway": ({"format": 2}, "update slipway"),
    "keys that are none": ({"config": {"cloud": {"kind": "local"}}}, "damaged"),
}


@pytest.mark.e2e
def test_a_record_speaks_of_no_other_place_and_blocks_no_results(
    strangers: Strangers, slipway: SlipwayCli, capsys: pytest.CaptureFixture[str]
) -> None:
    run = strangers.publish(PROGRAM)
    [whole] = strangers.read(f"runs/{run}/record.json")
    records = {"no JSON": (b"{", "no JSON")}
    records |= {
        name: (json.dumps(json.loads(whole) | claim).encode(), words) for name, (claim, words) in CLAIMS.items()
    }
    for name, (content, words) in records.items():
        strangers.damage(f"runs/{run}/record.json", content)
        for line in (["status", "--run", run], ["cancel", "--run", run], ["down", "--run", run, "--yes"]):
            assert main.run([*line, *CLOUD]) == 2, (name, line)
            assert words in " ".join(capsys.readouterr().err.split()), (name, line)
        assert main.run(["get", run, "--to", name, *CLOUD]) == 0, name
        said = " ".join(capsys.readouterr().err.split())
        assert words in said, name
        assert "its files are there all the same" in said, name
        assert (slipway.repository / name / "run.yaml").is_file(), name
    for unknown in ("program-00000000", "../../../etc", "a b"):
        assert main.run(["get", unknown, "--to", "none", *CLOUD]) == 2
        assert "all the same" not in capsys.readouterr().err
    assert not (slipway.repository / "none").exists()


DOCUMENTS = (
    "launches/0001.json", "verdicts/0001.json", "pods/uid-1.json", "alerts.json", "cancels/0001.json", "metrics.jsonl",
    "logs/attempt-1/worker-0.exit.json", "events/0a1b2c3d.jsonl", "scores.json", "transcripts.jsonl",
)  # fmt: skip


@pytest.mark.e2e
def test_no_document_of_a_run_keeps_anyone_from_looking_or_ending(
    strangers: Strangers, capsys: pytest.CaptureFixture[str]
) -> None:
    run = strangers.publish(PROGRAM)
    for content in (b'{"format": 999}', b"{", b'{"format": 1, "attempt": [], "signal": {}, "code": null, "alerts": 1}'):
        strangers.put({f"runs/{run}/{name}": content for name in DOCUMENTS})
        for verb in ("get", "status", "cancel", "down", "report", "runs", "orphans"):
            for line in VERB_WORDS[verb]:
                if "--all" not in line:
                    argv = [verb, *(run if word == "RUN" else word for word in line), *CLOUD]
                    code, said = main.run(argv), capsys.readouterr()
                    assert code == 0, (content, argv, said.err)
                    assert "Traceback" not in said.err, (content, argv)
