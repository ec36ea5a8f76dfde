"""The compilation cache: what one life of a run has compiled the next one loads, also on a new machine."""

import logging
import re
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest
from jax._src import cache_key, compiler

from conf.schema.training.run_yaml import RunFile
from tests.trainer.distributed.test_agreement import pod
from tests.trainer.distributed.test_runtime import Coordinator
from tests.trainer.processes import start_trainer, wait_processes
from trainer import main
from trainer.distributed.preemption import HOLD_VARIABLE, PREEMPTED_EXIT_CODE, PreemptedError, PreemptionNotice
from trainer.distributed.runtime import Exchange
from trainer.step import compile_cache
from trainer.step.compile_cache import CACHE_FOLDER, CompileCache, ProgramExchange, SharedCache


class Pod:
    """The caches of two workers. lacking: keys that worker 0 has and worker 1 has not."""

    def __init__(self, folder, lacking=()):
        service = Coordinator()
        self.folders = [folder / "0", folder / "1"]
        for each in self.folders:
            each.mkdir()
        programs = [ProgramExchange(Exchange(service, process, 2), set(lacking)) for process in range(2)]
        self.first, self.second = map(SharedCache, self.folders, programs)


def test_the_others_wait_for_what_worker_0_compiles_and_keep_it(tmp_path):
    pod = Pod(tmp_path)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(pod.second.get, "update")
        assert pod.first.get("update") is None
        pod.first.put("update", b"program")
        assert waiting.result() == b"program"
    assert SharedCache(pod.folders[1], None).get("update") == b"program"


def test_what_worker_0_cannot_send_the_others_compile(tmp_path):
    """It did not compile, or holds a host callback, which JAX does not keep."""
    pod = Pod(tmp_path)
    assert pod.first.get("update") is None
    pod.first.compiled("update")
    assert pod.second.get("update") is None


def test_what_worker_0_loads_it_sends_to_those_without(tmp_path):
    for lacking, received in (["update"], b"program"), ([], None):
        folder = tmp_path / str(len(lacking))
        folder.mkdir()
        pod = Pod(folder, lacking)
        SharedCache(pod.folders[0], None).put("update", b"program")
        assert pod.first.get("update") == b"program"
        assert pod.second.get("update") == received


@pytest.mark.parametrize("limit", ["PATIENCE_SECONDS", "COMPILE_SECONDS"])
def test_nobody_waits_without_end(tmp_path, monkeypatch, limit):
    """Worker 0 never begins to compile the program, or never ends."""
    monkeypatch.setattr(compile_cache, limit, 0.0)
    pod = Pod(tmp_path)
    if limit == "COMPILE_SECONDS":
        pod.first.get("update")
    assert pod.second.get("update") is None


@pytest.mark.parametrize(
    "damage", [lambda content: content[:5], lambda _: b"", lambda content: content[:-1] + bytes([content[-1] ^ 1])]
)
def test_a_damaged_program_is_compiled_again_and_replaced(tmp_path, damage, caplog):
    cache, path = SharedCache(tmp_path, None), tmp_path / "update-cache"
    cache.put("update", b"program")
    path.write_bytes(damage(path.read_bytes()))
    assert cache.get("update") is None
    assert "is damaged; it is compiled again" in caplog.text
    cache.put("update", b"program")
    assert cache.get("update") == b"program"


def test_a_program_that_is_not_written_whole_is_absent(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: None)  # killed before
    cache = SharedCache(tmp_path, None)
    cache.put("update", b"program")
    assert cache.get("update") is None


def test_a_compilation_that_fails_is_told_to_the_others(tmp_path, monkeypatch):
    def failing(*arguments: object) -> None:
        pod.first.get("update")  # as JAX does before it compiles
        raise RuntimeError("out of memory")

    pod = Pod(tmp_path)
    monkeypatch.setattr(compiler, "_compile_and_write_cache", failing)
    before = compiler._compile_and_write_cache, cache_key._hash_accelerator_config
    restore = compile_cache.install(pod.first, pod.folders[0], "tpu")
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            compiler._compile_and_write_cache("backend", "module", "update")
    finally:
        restore()
    assert pod.second.get("update") is None
    assert (compiler._compile_and_write_cache, cache_key._hash_accelerator_config) == before


def test_jax_sends_what_it_compiles_under_equal_keys(tmp_path):
    """JAX calls the private functions that this module replaces, and they return what they must."""
    pod = Pod(tmp_path)
    jax.clear_caches()
    restore = compile_cache.install(pod.first, pod.folders[0], "cpu")
    try:
        for device in jax.devices()[:2]:
            placed = jax.ShapeDtypeStruct((3,), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
            jax.jit(lambda x: jnp.sin(x) + 3.5).lower(placed).compile()
    finally:
        restore()
    (path,) = pod.folders[0].iterdir()
    assert pod.second.get(path.name.removesuffix(compile_cache.SUFFIX)) == compile_cache.unseal(path.read_bytes())


@pytest.fixture(autouse=True)
def own_cache():
    """What the tests share is put back."""
    names = ("compilation_cache_dir", "persistent_cache_enable_xla_caches", "persistent_cache_min_compile_time_secs")
    shared = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's default
    jax.config.update("jax_compilation_cache_dir", None)  # what other tests have compiled is not there
    yield
    for name, value in shared.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


class Counter:
    """Programs that were asked for, and those that were loaded from the cache."""

    requested = loaded = 0

    def __call__(self, event: str, **_: object) -> None:
        self.requested += event == "/jax/compilation_cache/compile_requests_use_cache"
        self.loaded += event == "/jax/compilation_cache/cache_hits"


@contextmanager
def new_process() -> Iterator[Counter]:
    """Count programs as in a process that has none yet."""
    counter = Counter()
    jax.clear_caches()
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(counter)
    yield counter
    jax.monitoring.unregister_event_listener(counter)


def lived(local, remote) -> Counter:
    """A life that needs a few programs, each compiled within milliseconds."""
    with new_process() as counter:
        cache = CompileCache(local, str(remote), pod(), True)
        jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((5, 5)))
        told = cache.close()
    assert told == f"programs: worker 0 {counter.requested - counter.loaded} compiled, {counter.loaded} loaded"
    return counter


def test_a_restart_after_a_preemption_compiles_nothing(lm_run, tmp_path, monkeypatch):
    """On another machine, though the notice came before the background thread had copied a file."""
    run = RunFile.model_validate(lm_run | {"compile_cache": True})
    with monkeypatch.context() as patch, new_process() as first:
        patch.setattr(PreemptionNotice, "should_stop", lambda _, step: step == 3)
        with pytest.raises(PreemptedError):
            main.train(run, tmp_path / "a")
    with new_process() as second:
        main.train(run, tmp_path / "b")
    assert first.requested > 3
    names = [path.name for path in (tmp_path / "bucket" / CACHE_FOLDER).rglob("*") if path.is_file()]
    assert len(names) == first.requested
    assert all(name.endswith("-cache") for name in names)
    assert second.requested - second.loaded == 0


@pytest.mark.deep
def test_one_worker_compiles_and_a_restart_of_all_compiles_nothing(lm_run, tmp_path, compile_cache, capfd):
    """Two workers that are preempted, then two on other machines, twice: what JAX counts on each of them."""
    run = lm_run | {"compile_cache": True, "pod": lm_run["pod"] | {"workers": 2, "devices": 4}}
    preempted = {"SLIPWAY_ATTEMPT": "1", HOLD_VARIABLE: "3"}
    started = start_trainer(run, tmp_path / "0", compile_cache, preempted, preempted)
    metrics = tmp_path / "0" / "worker-0" / "metrics.jsonl"
    while not (metrics.exists() and '"step": 2' in metrics.read_text()):
        assert all(process.poll() is None for process in started)
        time.sleep(0.1)
    started[1].send_signal(signal.SIGTERM)
    assert [ended.exit_code for ended in wait_processes(started)] == [PREEMPTED_EXIT_CODE] * 2
    first = compiled_and_loaded(capfd)
    assert first[0][0] > 3
    assert first[1] == (0, first[0][0])

    update = next((tmp_path / "bucket" / CACHE_FOLDER).rglob("jit_update-*"))
    for number, life in enumerate(("whole", "damaged"), start=1):
        if life == "damaged":
            shutil.rmtree(tmp_path / "bucket" / "checkpoints")
            update.write_bytes(update.read_bytes()[:-1])
        for ended in wait_processes(start_trainer(run, tmp_path / str(number), compile_cache, {}, {})):
            assert ended.exit_code == 0, ended.stderr
        assert [compiled for compiled, _ in compiled_and_loaded(capfd)] == [number - 1, 0], "and only once"


def compiled_and_loaded(capfd) -> list[tuple[int, int]]:
    """What each worker has told at its end."""
    (told,) = (line for line in capfd.readouterr().out.splitlines() if line.startswith("programs: "))
    return [(int(compiled), int(loaded)) for compiled, loaded in re.findall(r"(\d+) compiled, (\d+) loaded", told)]


def test_without_it_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    lived(tmp_path / "a", tmp_path / "file" / "bucket")
    warned = [record.message for record in caplog.records if record.levelno == logging.WARNING]
    assert [words.split(" /")[0] for words in warned] == ["cannot write compiled programs to"]


def test_with_a_jax_of_other_names_the_run_goes_on(tmp_path, monkeypatch, caplog):
    monkeypatch.delattr("jax._src.cache_key._hash_devices")
    assert lived(tmp_path / "a", tmp_path / "bucket").loaded == 0
    assert "compiled programs are neither kept nor shared with JAX" in caplog.text
    assert not (tmp_path / "bucket").exists()
