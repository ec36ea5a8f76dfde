"""The variables through which a program sees its devices and nothing else changes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conf.schema.infra.cloud import HereCloud
from controller.config.compose import compose
from controller.config.this_machine import Devices
from controller.core.errors import ConfigError
from controller.here import fleet
from controller.here.fleet import agent_environment, open_fleet, write_python


def cloud(*words: str) -> HereCloud:
    config, problems = compose(["+experiment=quickstart", "cloud=here", *words])
    assert config is not None, problems
    assert isinstance(config.cloud, HereCloud)
    return config.cloud


def environment(words: list[str], found: Devices, **given: str) -> dict[str, str]:
    return agent_environment(cloud(*words), Path("/s/here/pod"), {"PATH": "/bin", "HF_HOME": "/hf", **given}, found)


def test_the_user_s_variables_stay() -> None:
    made = environment(["cloud.backend=cpu"], Devices(), MPLBACKEND="module://matplotlib_inline.backend_inline")
    assert (made["HF_HOME"], made["SLIPWAY_AGENT_ROOT"]) == ("/hf", "/s/here/pod")
    assert made["PATH"].split(":") == ["/s/here/pod/bin", str(Path(sys.executable).parent), "/bin"]
    assert "MPLBACKEND" not in made
    assert "SLIPWAY_DEVICE_LOCKS" not in made
    assert environment(["cloud.backend=cpu"], Devices(), MPLBACKEND="agg")["MPLBACKEND"] == "agg"


@pytest.mark.parametrize(
    ("words", "found", "given", "wanted"),
    [
        (["cloud.backend=cpu", "cloud.devices=4"], Devices(gpus=1), {},
         {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "4"}),
        (["cloud.backend=gpu", "cloud.devices=2"], Devices(gpus=2), {},
         {"JAX_PLATFORMS": "cuda,cpu", "CUDA_VISIBLE_DEVICES": None}),
        (["cloud.backend=gpu", "cloud.devices=1"], Devices(gpus=2), {}, {"CUDA_VISIBLE_DEVICES": "0"}),
        (["cloud.backend=gpu", "cloud.devices=[1]"], Devices(gpus=2, visible=("4", "7")),
         {"CUDA_VISIBLE_DEVICES": "4,7"}, {"CUDA_VISIBLE_DEVICES": "7"}),
        (["cloud.backend=gpu"], Devices(told="rocm"), {"JAX_PLATFORMS": "rocm"}, {"JAX_PLATFORMS": "rocm"}),
        (["cloud.backend=tpu", "cloud.devices=[3]"], Devices(tpus=4), {},
         {"JAX_PLATFORMS": "tpu,cpu", "TPU_VISIBLE_CHIPS": "3", "TPU_PROCESS_BOUNDS": "1,1,1"}),
        (["cloud.backend=tpu", "cloud.devices=4"], Devices(tpus=4), {},
         {"TPU_VISIBLE_CHIPS": None, "SLIPWAY_SYSFS": None}),
    ],
)  # fmt: skip
def test_a_program_sees_its_devices(
    words: list[str], found: Devices, given: dict[str, str], wanted: dict[str, str | None]
) -> None:
    made = environment(words, found, **given)
    assert {name: made.get(name) for name in wanted} == wanted


def test_devices_other_than_cpus_are_locked_one_by_one() -> None:
    made = environment(["cloud.backend=gpu", "cloud.devices=[0,2]"], Devices(gpus=4))
    assert made["SLIPWAY_DEVICE_LOCKS"] == "/s/here/locks/gpu-0:/s/here/locks/gpu-2"


def test_python_is_the_one_that_runs_slipway(tmp_path: Path) -> None:
    write_python(tmp_path, sys.executable)
    for name in ("python", "python3"):
        said = subprocess.run([tmp_path / name, "-c", "import sys; print(sys.prefix)"], capture_output=True, text=True)
        assert said.stdout.strip() == sys.prefix


def test_devices_are_probed_again_after_jax_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    (known := tmp_path / "here/here-cpu-0/devices.json").write_text("{}")
    open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    assert known.is_file()
    monkeypatch.setattr(fleet, "distributions", lambda: ())
    open_fleet(cloud("cloud.backend=cpu"), tmp_path)
    assert not known.is_file()
    with pytest.raises(ConfigError, match="cloud=here: you are on the machine"):
        made.ssh_connection(0)
