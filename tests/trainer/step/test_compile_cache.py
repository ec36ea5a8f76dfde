"""The compilation cache: what one life of a run has compiled the next one loads, also on a new machine."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import jax
import jax.numpy as jnp
import pytest

from conf.schema.training.run_yaml import RunFile
from tests.trainer.distributed.test_agreement import pod
from trainer import main
from trainer.distributed.preemption import PreemptedError, PreemptionNotice
from trainer.step.compile_cache import CACHE_FOLDER, CompileCache


@pytest.fixture(autouse=True)
def own_cache():
    """What the tests share is put back."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_enable_xla_caches")
    names += ("jax_persistent_cache_min_compile_time_secs",)
    shared = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's default
    yield
    for name, value in shared.items():
        jax.config.update(name, value)
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


class Counter:
    """Programs that were asked for, and those that were loaded from the cache."""

    def __init__(self) -> None:
        self.requested = self.loaded = 0

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


def lived(local, remote, writes=True) -> Counter:
    """A life that needs a few programs, each compiled within milliseconds."""
    cache = CompileCache(local, str(remote), pod(), writes)
    with new_process() as counter:
        jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((5, 5)))
    cache.close()
    return counter


def test_the_next_life_loads_on_another_machine(tmp_path):
    first = lived(tmp_path / "a", tmp_path / "bucket")
    assert first.loaded == 0
    names = {path.name for path in (tmp_path / "bucket" / CACHE_FOLDER).rglob("*") if path.is_file()}
    assert len(names) == first.requested
    assert all(name.endswith("-cache") for name in names)
    second = lived(tmp_path / "b", tmp_path / "bucket", writes=False)
    assert second.loaded == second.requested == first.requested


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
    assert second.requested - second.loaded == 0


def test_without_it_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    lived(tmp_path / "a", tmp_path / "file" / "bucket")
    assert [record.message.split(" /")[0] for record in caplog.records if record.levelno == logging.WARNING] == [
        "cannot write compiled programs to"
    ]
