"""The hook that Python imports at start-up: a JAX program with an error does not wait for the others at exit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import controller.agent.exit_hook as hook

FAKE_JAX = """
import atexit, sys, types
state = types.SimpleNamespace(client=object())
api = types.ModuleType("jax._src.api")
def clean_up():
    print("waits for the others", flush=True)
api.clean_up = clean_up
sys.modules["jax._src.api"] = api
sys.modules["jax._src.distributed"] = types.ModuleType("jax._src.distributed")
sys.modules["jax._src.distributed"].global_state = state
atexit.register(clean_up)
atexit.register(lambda: print("handler of the user"))
print("running")
"""


def run(script: str, *folders: Path, distributed: bool = True) -> tuple[int, str, str]:
    path = os.pathsep.join(map(str, [Path(hook.__file__).parent, *folders]))
    program = (FAKE_JAX if distributed else "") + script
    done = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        ("raise RuntimeError('broken')", 1, "RuntimeError: broken"),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('the data are missing')", 1, "the data are missing"),
        ("def main():\n    sys.exit(3)\nmain()", 3, ""),
    ],
)
def test_an_error_ends_the_program_without_waiting_for_the_others(script: str, code: int, said: str) -> None:
    returned, out, err = run(script)
    assert (returned, out) == (code, "running\nhandler of the user\n")
    assert said in err
    assert err.count(said) == 1 or not said


@pytest.mark.parametrize(
    "script",
    [
        "",
        "sys.exit()",
        "sys.exit(0)",
        "try:\n    sys.exit(3)\nexcept SystemExit:\n    pass",
        "import threading\nt = threading.Thread(target=lambda: 1 / 0)\nt.start()\nt.join()",
        "import threading\nt = threading.Thread(target=sys.exit, args=(3,))\nt.start()\nt.join()",
        "import _thread, time\n_thread.start_new_thread(sys.exit, (3,))\ntime.sleep(0.2)",
    ],
)
def test_a_program_without_an_error_of_its_main_thread_waits_as_before(script: str) -> None:
    returned, out, _ = run(script)
    assert (returned, out) == (0, "running\nhandler of the user\nwaits for the others\n")


def test_an_interrupt_waits_as_before() -> None:
    assert run("raise KeyboardInterrupt")[1].endswith("waits for the others\n")


@pytest.mark.parametrize(("script", "code"), [("raise RuntimeError('broken')", 1), ("import sys; sys.exit(3)", 3)])
def test_without_jax_python_ends_as_usual(script: str, code: int) -> None:
    returned, _, err = run(f"import atexit; atexit.register(print, 'x')\n{script}", distributed=False)
    assert returned == code
    assert err.count("RuntimeError: broken") == (code == 1)


def test_exit_handlers_that_hang_are_given_up(tmp_path: Path) -> None:
    quick = (
        Path(hook.__file__)
        .with_name("sitecustomize.py")
        .read_text()
        .replace("EXIT_SECONDS = 10.0", "EXIT_SECONDS = 0.2")
    )
    (tmp_path / "sitecustomize.py").write_text(quick)
    program = FAKE_JAX + "import time\natexit.register(time.sleep, 600)\nraise RuntimeError('broken')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        check=False,
    )
    assert done.returncode == 1


@pytest.mark.parametrize(("script", "code"), [("raise OSError", 1), ("sys.exit(3)", 3), ("sys.exit('no data')", 1)])
def test_a_full_disk_of_the_log_does_not_make_it_wait(script: str, code: int) -> None:
    program = f"{FAKE_JAX}import threading\nthreading.Thread(target=threading.Event().wait).start()\n{script}"
    environment = {**os.environ, "PYTHONPATH": str(Path(hook.__file__).parent)}
    with open("/dev/full", "w") as log:  # noqa: PTH123
        words: list[str] = [sys.executable, "-c", program]
        done = subprocess.run(words, env=environment, stdout=subprocess.DEVNULL, stderr=log, check=False, timeout=300)
    assert done.returncode == code


def test_the_sitecustomize_of_the_user_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins\nbuiltins.own = 'mine'\nname = __name__\n")
    returned, out, _ = run("import sitecustomize; print(own, sitecustomize.name); 1 / 0", tmp_path)
    assert (returned, out) == (1, "running\nmine sitecustomize\nhandler of the user\n")


ALONE = """
import jax, os
jax.distributed.initialize()
print(jax.process_count(), jax.process_index(), jax.device_count(), os.environ["JAX_COORDINATOR_BIND_ADDRESS"])
"""


@pytest.mark.parametrize("outer", [{}, {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "far"}])
def test_jax_is_a_cluster_of_one_process_where_there_is_no_pod(
    monkeypatch: pytest.MonkeyPatch, outer: dict[str, str]
) -> None:
    """Also in an allocation that is larger; its coordinator is heard on this machine only."""
    for name, value in (outer | {"SLIPWAY_ONE_PROCESS": "1", "JAX_NUM_CPU_DEVICES": "3"}).items():
        monkeypatch.setenv(name, value)
    code, out, err = run(ALONE, distributed=False)
    assert code == 0, err
    assert out.startswith("1 0 3 127.0.0.1:")


def test_on_a_pod_jax_looks_for_its_cluster_itself() -> None:
    code, _, err = run(ALONE, distributed=False)
    assert (code, "ValueError: coordinator_address should be defined" in err) == (1, True), err
