"""The command line in this process, against an emulated cloud of the test's own, whose whole state can be compared."""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from controller import emulator
from controller.cli import main
from controller.emulator import Emulator
from controller.localcloud.store import ERROR_KIND, Store
from controller.ssh.fleet import Fleet
from tests.controller.agent.conftest import place_agent, unpacked_agent
from tests.controller.ssh.sshserver import SshPod
from tests.emulators import Emulators
from tests.virtual_time import virtual_time

__all__ = ["unpacked_agent"]


ECHO_COMMAND = 'program.command=[sh,-c,"echo hello from worker $TPU_WORKER_ID"]'
ONE_WORKER = "tpu.accelerator_type=v5litepod-8"


@dataclass
class SlipwayCli:
    """`slipway …` with a state folder, a repository to stand in, and an emulated cloud as strict as a user's."""

    home: Path
    repository: Path
    capsys: pytest.CaptureFixture[str]
    environment: dict[str, str]
    packages: str = "image"

    def __call__(self, *words: str) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        code = main.run(self.line(*words))
        out, err = self.capsys.readouterr()
        return code, out, err

    @property
    def base_overrides(self) -> list[str]:
        return ["cloud=local", "program=command", f"env.packages={self.packages}"]

    def line(self, *words: str) -> list[str]:
        """The words of a command line; its pod has one worker, unless the words choose another."""
        chosen = [word for word in words if word.startswith(("tpu=", "tpu.accelerator_type=", "+experiment="))]
        return [*words, *([] if chosen else [ONE_WORKER]), *self.base_overrides]

    def json(self, *words: str) -> Any:
        code, out, err = self(*words, "--json")
        assert code == 0, err
        return json.loads(out)

    def cloud(self) -> Emulator:
        """The emulated cloud, awake."""
        config = main.parse(["plan", ECHO_COMMAND, *self.base_overrides]).options.config()[0]
        assert config.cloud.kind == "local"
        return emulator.ensure_running(config.cloud, str(self.home))  # pyright: ignore[reportArgumentType]

    def mutations(self) -> list[str]:
        """Every request so far that changed something, as `METHOD path`."""
        return [f"{r['method']} {r['path']}" for r in self.cloud().requests() if r["mutating"]]


@pytest.fixture
def slipway(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    emulators: Emulators,
    request: pytest.FixtureRequest,
) -> Iterator[SlipwayCli]:
    """The command line in virtual time; its emulated cloud stays awake between verbs.

    That of a test marked `sleeps` does not; it is a program of its own, in real time.
    """
    home, repository = tmp_path / "home", tmp_path / "repository"
    home.mkdir(mode=0o700)
    repository.mkdir()
    (repository / "hello.txt").write_text("hello\n")
    monkeypatch.chdir(repository)
    monkeypatch.setenv("SLIPWAY_HOME", str(home))
    cloud = emulator.state_folder(str(home))
    with ExitStack() as awake:
        if request.node.get_closest_marker("sleeps") is None:
            awake.enter_context(emulator.mark_in_use(cloud))
            monkeypatch.setattr(emulator, "run_emulator_verb", emulators.run_emulator_verb)
            if request.node.get_closest_marker("real_time") is None:
                awake.enter_context(virtual_time(tmp_path / "time"))
        made = SlipwayCli(home, repository, capsys, {**os.environ})
        yield made
    cloud = emulator.state_folder(str(made.home))  # a test may choose another home
    mistakes = internal_errors(cloud)
    status, words = emulator.run_emulator_verb(["wipe"], cloud)
    assert status == 0, words
    assert mistakes == []


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The state folder, in an empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def fleets() -> Iterator[list[Fleet]]:
    opened: list[Fleet] = []
    yield opened
    for fleet in opened:
        fleet.close()


@pytest.fixture
def make_pod(
    tmp_path: Path, fleets: list[Fleet], unpacked_agent: Path
) -> Iterator[Callable[..., tuple[SshPod, Fleet]]]:
    """Makes a pod, and a fleet that is connected to it as soon as it is asked something.

    Its workers have the agent, unless the test wants `fresh` ones: to place and compile it takes long.
    """
    pods: list[SshPod] = []

    def make(
        workers: int = 1, sleep: Callable[[float], None] = time.sleep, *, fresh: bool = False, **access: Any
    ) -> tuple[SshPod, Fleet]:
        pod = SshPod(tmp_path / f"pod-{len(pods)}", workers)
        pods.append(pod)
        for worker in () if fresh else pod.workers:
            place_agent(worker.home / ".slipway", unpacked_agent)
        fleets.append(Fleet(pod.access(**access), sleep))
        return pod, fleets[-1]

    yield make
    for fleet in fleets:
        fleet.close()
    for pod in pods:
        pod.close()


TRANSIENT_KINDS = frozenset({"operation", "fault", "settings", "service"})
"""What may differ: the record of what was done, and the APIs, which stay enabled by design."""


def comparable_state(state: dict[str, Any]) -> dict[str, Any]:
    """Everything that is there, without how policies came about and without policies that bind nobody."""
    found = {kind: things for kind, things in state.items() if kind not in TRANSIENT_KINDS}
    found["policy"] = {
        name: {key: value for key, value in policy.items() if key not in ("etag", "former", "effectiveAt")}
        for name, policy in state["policy"].items()
        if policy.get("bindings")
    }
    return found


def internal_errors(folder: Path) -> list[str]:
    """What the emulated cloud of that state folder, awake or not, has done wrong itself."""
    if not (folder / "state.db").exists():
        return []
    store = Store(folder / "state.db")
    found = [f"{name}\n{mistake['traceback']}" for name, mistake in store.items(ERROR_KIND)]
    store.close()
    return found
