"""One worker compiles, the others load: nobody waits without end, and no damaged program is run."""

from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import pytest
from jax._src import cache_key, compiler

from tests.trainer.distributed.test_exchange import Coordinator
from trainer.distributed.exchange import Exchange
from trainer.step import shared_cache
from trainer.step.shared_cache import ProgramExchange, SharedCache


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
    monkeypatch.setattr(shared_cache, limit, 0.0)
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
    restore = shared_cache.install(pod.first, pod.folders[0], "tpu")
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
    restore = shared_cache.install(pod.first, pod.folders[0], "cpu")
    try:
        for device in jax.devices()[:2]:
            placed = jax.ShapeDtypeStruct((3,), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
            jax.jit(lambda x: jnp.sin(x) + 3.5).lower(placed).compile()
    finally:
        restore()
    (path,) = pod.folders[0].iterdir()
    assert pod.second.get(path.name.removesuffix(shared_cache.SUFFIX)) == shared_cache.unseal(path.read_bytes())
