"""The compilation cache: what one life of a run has compiled the next one loads, also on a new machine."""

import logging

import jax
import jax.numpy as jnp
import pytest

from tests.trainer.distributed.test_agreement import pod
from trainer.step.compile_cache import CACHE_FOLDER, CompileCache


@pytest.fixture(autouse=True)
def own_cache():
    """What the tests share is put back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    shared = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in shared.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def lived(local, remote, writes=True) -> list[str]:
    """Events of the cache in a life that compiles one program."""
    events: list[str] = []
    cache = CompileCache(local, str(remote), pod(), writes)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    jax.monitoring.register_event_listener(lambda name, **_: events.append(name.rpartition("/")[2]))
    jax.clear_caches()
    jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((5, 5)))
    cache.close()
    return [name for name in events if name in ("cache_hits", "cache_misses")]


def test_the_next_life_loads_on_another_machine(tmp_path):
    assert "cache_misses" in lived(tmp_path / "a", tmp_path / "bucket")
    names = {path.name for path in (tmp_path / "bucket" / CACHE_FOLDER).rglob("*") if path.is_file()}
    assert names
    assert all(name.endswith("-cache") for name in names)
    events = lived(tmp_path / "b", tmp_path / "bucket", writes=False)
    assert "cache_hits" in events
    assert "cache_misses" not in events


def test_without_it_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    lived(tmp_path / "a", tmp_path / "file" / "bucket")
    assert [record.message.split(" /")[0] for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot write compiled programs to"
    ]
