"""Composed configs are kept, and never used when anything that Hydra reads has changed."""

import json
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from controller.cli import main
from controller.config import compose as composing
from controller.config import composed_cache
from controller.config.compose import compose_raw

pytestmark = pytest.mark.usefixtures("composed_by_hydra")
WORDS = ("+experiment=quickstart", "optimizer.lr=1e-3")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPWAY_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A user's folder with one experiment."""
    (folder := tmp_path / "slipway" / "experiment").mkdir(parents=True)
    (folder / "mine.yaml").write_text("# @package _global_\ndefaults: [quickstart]\nrun: {seed: 5}\n")
    return tmp_path / "slipway"


def test_the_second_time_needs_no_hydra_unless_the_file_is_damaged(monkeypatch: pytest.MonkeyPatch, home: Path) -> None:
    composed = compose_raw(WORDS)
    [kept] = (home / "cache" / "composed").iterdir()
    kept.write_text("{")
    assert compose_raw(WORDS) == composed
    assert json.loads(kept.read_text()) == composed
    monkeypatch.setattr(composing, "_compose_unresolved", lambda *_: pytest.fail("composed again"))
    assert compose_raw(WORDS) == composed
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700


def test_whatever_hydra_reads_is_in_the_key(own: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keys: list[Path | None] = []

    def look(*words: str, folder: Path | None = own) -> None:
        keys.append(composed_cache.cache_file(("+experiment=mine", *words), folder))

    look()
    look("run.seed=1")
    look(folder=None)
    assert compose_raw(["+experiment=mine"], extra_dir=own)["run"]["seed"] == 5
    file = own / "experiment" / "mine.yaml"
    file.write_text(file.read_text().replace("5", "7"))
    assert compose_raw(["+experiment=mine"], extra_dir=own)["run"]["seed"] == 7
    look()
    (own / "experiment" / "other.yaml").write_text("")
    look()
    monkeypatch.setenv("WANDB_MODE", "online")  # a bundled experiment reads it
    look()
    (tmp_path / "hydra_plugins" / "search_path").mkdir(parents=True)  # a plugin that is installed later
    monkeypatch.syspath_prepend(str(tmp_path))
    look()
    monkeypatch.setattr(composed_cache, "_modified", lambda module: 1)  # another version of Hydra
    look()
    assert len({file.name for file in keys if file}) == len(keys)


@pytest.mark.parametrize(
    "text", ["run: {name: '${oc.env:USER}'}", "run: {name: '${now:%H}'}", "hydra: {searchpath: [file:///x]}"]
)
def test_what_depends_on_more_is_not_kept(own: Path, text: str) -> None:
    """A secret of the environment would reach the disk; a time would stand still."""
    (own / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{text}\n")
    assert composed_cache.cache_file(["+experiment=mine"], own) is None
    assert composed_cache.cache_file([text], None) is None


def test_the_folder_stays_small_and_what_json_cannot_represent_is_not_kept(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    composed_cache.store(home / "cache" / "x.json", {"by_number": {1: "one"}})
    assert not home.exists()
    monkeypatch.setattr(composed_cache, "MOST_FILES", 2)
    for i in range(4):
        composed_cache.store(home / "cache" / f"{i}.json", {"i": i})
    assert len([*(home / "cache").iterdir()]) == 2


def test_plan_imports_nothing_slow_when_the_config_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))  # no credentials
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")  # without a network
    monkeypatch.chdir(tmp_path)
    argv = ["plan", "+experiment=gemma2b_gsm8k", "cloud.project=a-project"]
    main.parse(argv).options.config()  # now it is known
    slow = "hydra omegaconf googleapiclient paramiko fabric cryptography tenacity jax huggingface_hub asyncio http ssl"
    run = (
        f"import sys; sys.argv = ['slipway', *{argv!r}]\n"
        "from controller.__main__ import main\nmain()\n"
        f"print(sorted({{*{slow.split()!r}, 'rich', 'numpy'}} & sys.modules.keys()), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", run], capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "[]"
    assert "run      gemma2b_gsm8k-" in done.stdout
