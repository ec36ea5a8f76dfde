"""Several slices in one table: order, what does not fit, what has no price, what cannot be told."""

import json
import math
import os
import statistics
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax._src import mesh_utils
from jax.experimental import topologies as of_jax

from conf.formats import RunFileError
from conf.schema.topology import find_topology
from conf.schema.training.run_yaml import RunFile
from tests.bench.forecast import rows as bench
from trainer.distributed import mesh as meshes
from trainer.fit import memory, slices
from trainer.fit.memory import CompilerError, MemoryReport
from trainer.step.compile_cache import SharedCache, install

SECONDS = {"v5litepod-8": 4.0, "v5litepod-16": 2.5, "v6e-8": 1.0, "v5p-8": 4e-5}
MISTAKE = "loop.total_batch_tokens: 8 rows of 16 tokens cannot be split evenly over 24 devices"


def verdict(name: str, seconds: float, peak: float = 1.0) -> MemoryReport:
    return MemoryReport(name, peak < 15, peak, max(0.0, peak - 15), 0, 0, 0, 16, 1e12, 0, 1.0, seconds)


def measure(candidate: RunFile) -> tuple[RunFile, list[MemoryReport]]:
    pod = candidate.pod
    if pod.accelerator_type == "v5litepod-16":
        assert (pod.workers, pod.devices, pod.hbm_bytes_per_chip) == (4, 16, 17_200_000_000)
    if pod.accelerator_type == "v4-16":
        raise RunFileError(MISTAKE)
    if pod.accelerator_type == "v3-8":
        raise CompilerError("the TPU compiler does not support v3-8: no such thing")
    peak = 20.0 if pod.accelerator_type == "v5litepod-1" else 2.0
    return candidate, [verdict("update", SECONDS.get(pod.accelerator_type, 1.0), peak), verdict("eval", 0.0)]


@pytest.fixture
def experiment(lm_run) -> RunFile:
    lm_run["loop"] |= {"steps": 3600, "eval_interval": 3600}
    return RunFile.model_validate(lm_run)


def compared(experiment: RunFile, *names: str, by: str = "usd") -> list[slices.SliceReport]:
    return sorted(slices.compare(experiment, names, measure, None, spot=False), key=slices.sort_key(by))


def test_slices_are_sorted_by_dollars_or_by_hours(experiment):
    names = ("v5litepod-8", "v5litepod-16", "v6e-8")
    dollars, hours = compared(experiment, *names), compared(experiment, *names, by="hours")
    assert [row.slice_.accelerator_type for row in dollars] == ["v6e-8", "v5litepod-8", "v5litepod-16"]
    assert [row.slice_.accelerator_type for row in hours] == ["v6e-8", "v5litepod-16", "v5litepod-8"]
    found = {row.slice_.accelerator_type: row.forecast.hours for row in dollars if row.forecast}
    for name in names:
        assert found[name] == pytest.approx(SECONDS[name] * slices.FACTORS[name[:3].replace("v5l", "v5e")])


def test_what_has_no_forecast_is_one_line_after_the_others(experiment):
    rows = compared(experiment, "v5litepod-1", "v4-16", "tpu7x-8", "v3-8", "v6e-8", "v5p-8")
    lines = slices.table(rows)
    assert lines[1].startswith("v6e-8           yes")
    said = {line.split()[0]: line for line in lines[2:7]}
    assert said["v5litepod-1"].endswith("NO    does not fit: update needs 20.00 of 16.00 GiB per device")
    assert said["v4-16"].endswith(f"-     {MISTAKE}")
    assert said["v3-8"].endswith("-     the TPU compiler does not support v3-8: no such thing")
    assert "no forecast: no published step time of tpu7x" in said["tpu7x-8"]
    assert said["v5p-8"].endswith("the chip computes an update in 0.04 ms; what is around it takes longer")
    low, high = slices.INTERVAL
    assert lines[7].startswith(f"a forecast: published runs took {low:.2f} to {high:.2f} times as long")


def test_a_slice_without_a_list_price_has_hours(experiment, monkeypatch):
    monkeypatch.setitem(slices.FACTORS, "tpu7x", 2.0)
    (row,) = slices.compare(experiment, ["tpu7x-8"], measure, None, spot=True)
    assert row.forecast is not None
    assert row.forecast.usd is None
    assert slices.table([row])[1].split()[-4:] == ["unknown", "no", "list", "price"]
    assert row.to_json()["forecast"]["usd"] is None


@pytest.mark.parametrize(
    ("name", "asked", "options"),
    [
        ("v5litepod-1", "v5e:1x1", {"chips_per_host_bounds": (1, 1, 1)}),
        ("v5litepod-4", "v5e:2x2", {}),
        ("v5litepod-8", "v5e:2x4", {}),
        ("v6e-4", "v6e:2x2", {}),
        ("v4-8", "v4:2x2x1", {"chip_config_name": "megacore"}),
    ],
)
def test_a_slice_has_the_name_and_the_chips_that_the_compiler_knows(
    monkeypatch: pytest.MonkeyPatch, name: str, asked: str, options: dict[str, Any]
) -> None:
    """A slice of one host may have no shape in conf/tpu_types.yaml; `1x1` would be one chip."""

    def describe(platform: str, topology_name: str, **given: Any) -> Any:
        assert (platform, topology_name, given) == ("tpu", asked, options)
        chips = math.prod(int(size) for size in topology_name.partition(":")[2].split("x"))
        return SimpleNamespace(devices=list(range(chips)))

    monkeypatch.setattr(of_jax, "get_topology_desc", describe)
    assert len(memory._slice_devices(find_topology(name))) == find_topology(name).devices
    monkeypatch.setattr(of_jax, "get_topology_desc", lambda **_: SimpleNamespace(devices=[0, 1]))
    with pytest.raises(CompilerError, match=f"reports 2 devices for {name}, JAX {find_topology(name).devices}"):
        memory._slice_devices(find_topology(name))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight devices whose network is a ring, and a compiler that lists them backwards."""

    def order(shape: Any, devices: Any, **_: Any) -> np.ndarray:
        placed = sorted(devices, key=lambda device: device.id)
        return np.array(placed)[[0, 1, 3, 2, 6, 7, 5, 4]].reshape(shape)

    monkeypatch.setitem(mesh_utils.device_kind_handler_dict, jax.devices()[0].device_kind, order)
    monkeypatch.setattr(of_jax, "get_topology_desc", lambda **_: SimpleNamespace(devices=jax.devices()[::-1]))
    monkeypatch.setattr(memory, "require_compiler", lambda: None)
    monkeypatch.setattr(os, "environ", {**os.environ})


@pytest.mark.usefixtures("ring")
@pytest.mark.parametrize("sizes", [(8, 1, 1), (1, 8, 1), (2, 2, 2), (1, 2, 4), (-1, 4, 1)])
def test_what_is_compiled_is_in_the_cache_where_the_run_looks(lm_run, tmp_path, sizes) -> None:
    """The order of the devices is a part of the program and of its name in the cache of a TPU."""
    lm_run["mesh"] = dict(zip(meshes.MESH_AXES, (*sizes, 1), strict=True))
    experiment = RunFile.model_validate(lm_run)
    made = {"fit": memory.slice_mesh(experiment), "run": meshes.build_mesh(experiment.mesh)}
    assert made["fit"] == made["run"]
    assert [device.id for device in made["fit"].devices.flat] == [0, 1, 3, 2, 6, 7, 5, 4]

    def program(mesh: jax.sharding.Mesh) -> jax.stages.Lowered:
        rows = jax.ShapeDtypeStruct((8, 8), np.float32, sharding=meshes.named_sharding(mesh, "batch", "hidden"))
        return jax.jit(lambda x: meshes.constrain(x @ x.T, "vocab", None).sum(axis=0)).lower(rows)

    restore, names = install(SharedCache(tmp_path, None), tmp_path, backend="tpu"), dict[str, set[str]]()
    try:
        with jax.sharding.use_abstract_mesh(made["fit"].abstract_mesh):
            fits = program(made["fit"])
        with jax.set_mesh(made["run"]):
            runs = program(made["run"])
        assert fits.as_text() == runs.as_text()
        for name, lowered in (("fit", fits), ("run", runs)):
            lowered.compile()
            names[name] = {file.name for file in tmp_path.glob("*-cache")}
    finally:
        restore()
    assert len(names["fit"]) == 1
    assert names["run"] == names["fit"]


def test_sizes_that_the_network_does_not_have_are_one_line(lm_run, monkeypatch) -> None:
    """Where no axis of the network may be split, 4 x 4 chips have no axis of 2."""
    chips = [SimpleNamespace(id=i, platform="tpu", device_kind="TPU v9", coords=(i % 4, i // 4, 0), core_on_chip=0,
                             process_index=0) for i in range(16)]  # fmt: skip
    lm_run["mesh"] = {"data": 2, "fsdp": 8, "tensor": 1}
    with pytest.raises(RunFileError, match="mesh: data 2 x fsdp 8 x tensor 1 cannot be laid along the axes of this sl"):
        meshes.build_mesh(RunFile.model_validate(lm_run).mesh, chips)


ROWS = json.loads(bench.FIXTURE.read_text())


def test_factors_and_interval_are_those_of_the_rows():
    assert bench.factors(ROWS) == slices.FACTORS
    judged = bench.ratios(ROWS, "judge").values()
    assert (round(min(judged), 2), round(max(judged), 2)) == slices.INTERVAL


def test_errors_of_rows_that_were_not_calibrated_on():
    errors = [abs(1 / ratio - 1) for ratio in bench.ratios(ROWS, "judge").values()]
    assert len(errors) >= 15
    assert statistics.median(errors) <= 0.15
    assert max(errors) <= 0.40
    for right, pairs in (bench.ordered_pairs(ROWS), bench.ordered_pairs(ROWS, per_flop=True)):
        assert pairs >= 50
        assert right / pairs >= 0.85


def test_hours_and_dollars_of_a_run(lm_run):
    lm_run["loop"] |= {"steps": 1000, "eval_interval": 300, "eval_batches": 5}
    experiment, slice_ = RunFile.model_validate(lm_run), find_topology("v6e-8")
    found = slices.predict(experiment, slice_, {"update": 2.0, "eval": 0.5}, "us-central1-a", spot=False)
    factor = slices.FACTORS["v6e"]
    assert found.update_seconds == pytest.approx(2 * factor)
    assert found.tokens_per_second == pytest.approx(lm_run["loop"]["total_batch_tokens"] / (2 * factor))
    assert found.hours == pytest.approx((1000 * 2 + 4 * 5 * 0.5) * factor / 3600)
    assert (found.zone, found.usd_per_hour) == ("us-central1-a", pytest.approx(8 * 2.7))
    assert found.usd == pytest.approx(found.hours * 8 * 2.7)


def test_a_zone_without_a_price_gives_way_to_the_cheapest():
    slice_ = find_topology("v6e-8")
    assert slices.find_price(slice_, "europe-west1-b", spot=False)[1] == pytest.approx(8 * 2.7)
    assert slices.find_price(slice_, "us-east5-a", spot=True) == ("us-east5-a", pytest.approx(8 * 1.215))
    assert slices.find_price(find_topology("tpu7x-8"), None, spot=True) == (None, None)


def test_what_cannot_be_told_has_a_reason(lm_run, grpo_run):
    assert slices.why_none(RunFile.model_validate(lm_run), find_topology("v5litepod-8")) == ""
    assert "no published step time of v3" in slices.why_none(RunFile.model_validate(lm_run), find_topology("v3-8"))
    experts = {"model": lm_run["model"] | {"experts": {"count": 4, "per_token": 2, "norm_topk_prob": True}}}
    why = slices.why_none(RunFile.model_validate(lm_run | experts), find_topology("v5litepod-8"))
    assert why == "no forecast: no published step time of a model with experts to calibrate on"
    grpo = slices.why_none(RunFile.model_validate(grpo_run), find_topology("v5litepod-8"))
    assert grpo == "no forecast: how long answers of loop=grpo get is not known before the run"
