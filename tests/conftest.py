"""Options of the test suite: `--deep` adds the long tests, `--chaos` chooses seeds."""

from __future__ import annotations

import gc
import hashlib
import io
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from omegaconf import OmegaConf

from controller.config import compose, composed_cache
from controller.core.errors import ConfigError
from tests import planes
from tests.emulators import Emulators
from tests.paths import ROOT

FAST_EXAMPLES, DEEP_EXAMPLES = 40, 400
XLA_FLAGS = (
    "--xla_backend_optimization_level=0",
    "--xla_cpu_use_fusion_emitters=false",  # gone in JAX 0.12
    "--xla_cpu_parallel_codegen_split_count=1",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--deep", action="store_true", help="also run the tests marked deep, which take most of an hour")
    parser.addoption("--chaos", type=_seeds, metavar="[START:]END", help="chaos schedules of exactly these seeds")
    parser.addoption(
        "--chaos-training", type=_seeds, metavar="[START:]END", help="the same for the schedules with real training"
    )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Return three processes for two cores: a test with an emulated cloud waits for half of its time."""
    return max(2, min(8, (os.cpu_count() or 1) * 3 // 2))


def pytest_configure(config: pytest.Config) -> None:
    # gcsfs reads it when it is imported; its probe over gRPC waits for minutes where no network answers.
    os.environ["GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT"] = "false"
    # No test asks the real Hugging Face Hub; those of its check start their own.
    os.environ["HF_ENDPOINT"] = "http://127.0.0.1:9"
    # Programs that the tests start from other folders find the clone; an installation would not put it on sys.path.
    os.environ["PYTHONPATH"] = str(ROOT)
    # On a Google VM, its own credentials would be found.
    os.environ["NO_GCE_CHECK"] = "true"
    # pytest-xdist passes on the width of its terminal; what the tests capture is no terminal, and its lines stay whole.
    os.environ.pop("COLUMNS", None)
    # Eight virtual CPU devices; JAX reads these when it is imported. A thread for each waiting device, as
    # trainer.distributed.runtime.set_cpu_threads says, and little optimization: these tests spend their time compiling.
    os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "8"}
    os.environ.setdefault("PJRT_NPROC", "16")
    if "XLA_FLAGS" not in os.environ:  # the workers of pytest-xdist inherit it
        os.environ["XLA_FLAGS"] = " ".join(_known_flags())
    os.environ.setdefault("SLIPWAY_TEST_SEED", str(_commit_seed()))  # the workers of pytest-xdist agree on it
    # Garbage is collected less often: JAX makes millions of objects, and a collection looks at all that live.
    gc.set_threshold(50_000, 20, 100)
    # Programs that the tests start keep their bytecode, as they do for users.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # A shell starts background jobs with Ctrl-C ignored, and programs that the tests interrupt would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # From Hypothesis's own "ci": no deadlines, which a busy machine misses, and the same examples every time.
    examples = DEEP_EXAMPLES if config.getoption("--deep") else FAST_EXAMPLES
    settings.register_profile("slipway", settings.get_profile("ci"), max_examples=examples)
    settings.load_profile("slipway")


def _known_flags() -> list[str]:
    """Return the flags of XLA_FLAGS that this jaxlib knows; it would end the process at any other."""
    parse = [sys.executable, "-c", "from jaxlib import xla_client; xla_client.CompileOptions()"]
    asked = subprocess.run(
        parse, env=os.environ | {"XLA_FLAGS": " ".join(XLA_FLAGS)}, capture_output=True, text=True, check=False
    )
    unknown = re.search(r"Unknown flags? in XLA_FLAGS: (.*)", asked.stderr)
    assert bool(unknown) == (asked.returncode != 0), asked.stderr
    return [flag for flag in XLA_FLAGS if unknown is None or flag not in unknown[1].split()]


@pytest.hookimpl(trylast=True)  # after the letter of the test
def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Name a failure when it happens: a run that is cut off has said what failed until then."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        reason = report.longreprtext.strip().rpartition("\n")[2]
        print(f"\nFAILED {report.nodeid} ({report.when}, {report.duration:.0f} s): {reason}", flush=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    planes.parametrize(metafunc)


def pytest_report_header() -> str:
    return f"seeds that vary: from {_commit_seed()}, by commit (SLIPWAY_TEST_SEED repeats them)"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the deep tests, so that the summary counts them; the longest begin first, so that none is waited for."""
    items.sort(key=lambda item: item.get_closest_marker("longest") is None)
    if config.getoption("--deep"):
        return
    kept = [item for item in items if item.get_closest_marker("deep") is None]
    if deselected := [item for item in items if item.get_closest_marker("deep") is not None]:
        config.hook.pytest_deselected(items=deselected)
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported stays


def _seeds(text: str) -> range:
    first, _, last = text.rpartition(":")
    return range(int(first or 0), int(last))


@pytest.fixture(scope="session")
def emulators() -> Iterator[Emulators]:
    """What starts emulated clouds fast."""
    with Emulators() as made:
        yield made


def deep(*values: object) -> list[object]:
    """Return values of a parameter that only `--deep` tries."""
    return [pytest.param(value, marks=pytest.mark.deep) for value in values]


def wide(*values: object) -> list[object]:
    """Return more values of a deep test's parameter: the job of each night tries them, `.ci/run` does not."""
    return [pytest.param(value, marks=[pytest.mark.deep, pytest.mark.wide]) for value in values]


def seeds(requested: range | None, deep: int, nightly: int) -> list[object]:
    """Return the parameters of a test that runs once per seed.

    Args:
        requested: the seeds given on the command line, which are never deep; None for the usual ones.
        deep: how many `--deep` tries. They differ from commit to commit; the header of the run names the first.
        nightly: how many more are `wide`.
    """
    if requested is not None:
        return [*requested]
    first = _commit_seed()
    tried = [pytest.param(seed, marks=pytest.mark.deep) for seed in range(first, first + deep)]
    return [*tried, *wide(*range(first + deep, first + deep + nightly))]


def _commit_seed() -> int:
    """Return where this commit's varying seeds begin: from the environment, else from its hash; 0 outside git."""
    if said := os.environ.get("SLIPWAY_TEST_SEED"):
        return int(said)
    asked = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int(asked.stdout[:7] or "0", 16) % 1_000_000


@pytest.fixture(autouse=True, scope="session")
def parsed_once() -> Iterator[None]:
    """Hydra parses each YAML file once: it reads some thirty for every choice of groups."""
    really, known = OmegaConf.load, {}

    def load(file: Any) -> Any:
        if not hasattr(file, "read"):
            return really(file)
        if (text := file.read()) not in known:
            known[text] = pickle.dumps(really(io.StringIO(text)))
        return pickle.loads(known[text])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OmegaConf, "load", load)
        yield


@pytest.fixture(autouse=True, scope="session")
def composed_once(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[pytest.MonkeyPatch], None]]:
    """Hydra composes a choice of groups once, for all workers of pytest-xdist: it takes more than a tenth of a second.

    Single values are then set on a copy, as in `compose_variants`. What the user's own YAML says is part of the choice.
    Where Hydra refuses something, it composes every time. What is composed lies in the folder of this session.
    """
    really, cache_file, known = compose._compose_unresolved, composed_cache.cache_file, {}
    session = tmp_path_factory.getbasetemp()
    folder = (session.parent if "PYTEST_XDIST_WORKER" in os.environ else session) / "composed"
    folder.mkdir(exist_ok=True)
    compose.register_resolvers()  # another worker may have composed what this one resolves

    def pickled(groups: Sequence[str], extra_dir: Path | None, key: object) -> bytes:
        file = folder / hashlib.sha256(repr(key).encode()).hexdigest()
        if not file.exists():
            draft = file.with_suffix(f".{os.getpid()}-{threading.get_ident()}")
            draft.write_bytes(pickle.dumps(really(groups, extra_dir)))
            draft.replace(file)
        return file.read_bytes()

    def compose_unresolved(overrides: Sequence[str], extra_dir: Path | None) -> Any:
        own = sorted(extra_dir.rglob("*")) if extra_dir is not None else []
        values = [word for word in overrides if compose._is_value_override(word)]
        groups = [word for word in overrides if word not in values]
        try:
            said = [(str(file), file.read_text()) for file in own if file.suffix == ".yaml"]
            key = (compose.CONFIG_DIR, *groups, *said)
            if key not in known:
                known[key] = pickled(groups, extra_dir, key)
            made = pickle.loads(known[key])  # a fifth of the time of a deep copy
            compose._apply_overrides(made, values)
        except (ConfigError, OSError, UnicodeDecodeError):
            return really(overrides, extra_dir)
        return made

    def restore(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(compose, "_compose_unresolved", really)
        patch.setattr(composed_cache, "cache_file", cache_file)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "_compose_unresolved", compose_unresolved)
        patch.setattr(composed_cache, "cache_file", lambda overrides, extra_dir: None)
        yield restore


@pytest.fixture
def composed_by_hydra(composed_once: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra composes all of it, every time, and the result is kept: for tests of what `composed_once` does without."""
    composed_once(monkeypatch)
