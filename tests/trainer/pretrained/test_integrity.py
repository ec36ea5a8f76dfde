"""Weights of our own folders are compared with the checksums beside them at every read."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath

from conf.schema.training.model import Model
from tests.trainer.conftest import make_mesh
from trainer.models import weights
from trainer.pretrained import store
from trainer.pretrained.run_weights import StoreError

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def cfg(tiny: Model) -> Model:
    return tiny.model_copy(update={"num_layers": 1})


@pytest.fixture(scope="module")
def given(cfg: Model) -> weights.Params:
    return jax.tree.map(np.asarray, jax.jit(weights.init_params, static_argnums=0)(cfg, jax.random.key(3)))


@pytest.fixture(scope="module")
def stored(cfg: Model, given: weights.Params, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored")
    store.write_params(epath.Path(folder), given, cfg)
    return folder


READERS = {
    "whole": lambda folder, cfg: store.read_params(epath.Path(folder), cfg),
    "sharded": lambda folder, cfg: store.load_sharded(epath.Path(folder), cfg, make_mesh(1, 2, 1)),
}
"""All that reads the weights of such a folder: an export, and a run."""


def other_checksum(name: str, change: Callable[[int], int | None]) -> Damage:
    def damage(folder: Path) -> None:
        file = folder / store.CHECKSUMS_FILE
        content = json.loads(file.read_text())
        content["checksums"] = {n: change(v) if n == name else v for n, v in content["checksums"].items()}
        file.write_text(json.dumps(content))

    return damage


def other_text(text: str) -> Damage:
    return lambda folder: (folder / store.CHECKSUMS_FILE).write_text(text) and None


def without_a_file_of_arrays(folder: Path) -> None:
    shutil.rmtree(folder / store.WEIGHTS_FOLDER / "d")


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (other_checksum("embedding", lambda value: value ^ 1), "embedding differs from what was saved"),
        (other_checksum("layers.up", lambda value: value ^ 1 << 31), r"layers\.up differs from what was saved"),
        (other_checksum("final_norm", lambda value: value + 1), "final_norm differs from what was saved"),
        (other_checksum("final_norm", lambda _: None), "is damaged: it has no checksums"),
        (other_text("{"), "is damaged: it is no JSON"),
        (other_text('{"format": 2}'), "has format 2; this slipway reads format 1: update slipway"),
        (without_a_file_of_arrays, "is incomplete or damaged"),
    ],
)
def test_what_differs_from_what_was_saved_is_one_line(cfg, stored, tmp_path, read, damage, words):
    folder = shutil.copytree(stored, tmp_path / "copy")
    damage(folder)
    with pytest.raises(ValueError, match=words) as told:
        read(folder, cfg)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_a_bit_that_flips_in_any_file_is_noticed_or_changes_nothing(cfg, given, stored, tmp_path, read):
    folder, noticed = shutil.copytree(stored, tmp_path / "copy"), 0
    files = [path for path in (folder / store.WEIGHTS_FOLDER).rglob("*") if path.is_file() and path.stat().st_size]
    assert len(files) >= 4
    for file in files:
        whole = file.read_bytes()
        file.write_bytes(whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 4]) + whole[len(whole) // 2 + 1 :])
        try:
            found = read(folder, cfg)
        except StoreError:
            noticed += 1
        else:
            jax.tree.map(np.testing.assert_array_equal, found, given)
        file.write_bytes(whole)
    assert noticed >= 2


def test_a_folder_of_an_earlier_version_is_read_with_a_warning(cfg, given, stored, tmp_path, caplog):
    folder = shutil.copytree(stored, tmp_path / "copy")
    (folder / store.CHECKSUMS_FILE).unlink()
    for read in READERS.values():
        jax.tree.map(np.testing.assert_array_equal, read(folder, cfg), given)
    assert [record.message for record in caplog.records if record.name == "root"] == [
        f"{folder / store.CHECKSUMS_FILE} is missing: whether the arrays beside it were altered is not known"
    ] * 2
