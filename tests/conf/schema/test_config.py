"""Identity of runs and pods, the tables of TPU types and regions, and the schemas for editors."""

import ipaddress
import itertools
import re
from pathlib import Path

import pytest

from conf.schema import topology
from conf.schema.base import without_volatile
from conf.schema.config import Config
from conf.schema.topology import (
    TABLE_FILE,
    UnknownTypeError,
    find_topology,
    tpu_type_table,
    type_of_machines,
    zone_region,
)
from controller.config.editor_schemas import schema_files
from tests.composed import config_of, problems_of

TINY = ["cloud=local", "loop=grpo", "model=tiny", "optimizer=adamw", "data=arithmetic"]


def config(*overrides: str) -> Config:
    return config_of(*TINY, *overrides)


def test_the_same_config_and_code_have_the_same_id_whatever_the_place() -> None:
    here = config().run_id("c0de", {})
    elsewhere = ["tpu.zone=us-west4-a", "tpu.capacity=on_demand", "run.state_dir=/elsewhere"]
    assert config(*elsewhere, "cleanup.on_success=keep").run_id("c0de", {}) == here
    assert here.startswith("run-")
    changes = ("run.seed=1", "optimizer.lr=1e-5", "loop.steps=7", "tpu.accelerator_type=v4-32")
    inputs = [("a", {}), ("b", {}), ("a", {"d": "1"}), ("a", {"d": "2"})]
    ids = {*(config(change).run_id("c0de", {}) for change in changes), *(config().run_id(*one) for one in inputs)}
    assert len(ids - {here}) == 8, "what is computed, code and data are in it"


def test_a_later_key_is_in_an_id_only_once_it_is_set() -> None:
    """So runs from before `mesh.expert` keep theirs; the mesh of the sampler has it, too."""
    plain = without_volatile(config("loop.sampler.mesh={data: -1, fsdp: 1, tensor: 1}"))
    assert plain["mesh"] == {"data": -1, "fsdp": 1, "tensor": 1} == plain["loop"]["sampler"]["mesh"]
    ids = {config(*change).run_id("c0de", {}) for change in ([], ["mesh.expert=1"], ["mesh.expert=2"])}
    assert len(ids) == 2


@pytest.mark.parametrize(
    ("key", "override"),
    [
        ("run.state_dir", "run.state_dir='~nobody-here/x'"),
        ("code.modules", "code.modules=['~nobody-here/x']"),
        ("assets.datasets.mine.path", "+assets.datasets.mine={path: '~nobody-here/x'}"),
        ("model.weights", "model.weights='~nobody-here/x'"),
        ("env.secrets.KEY", "env.secrets.KEY='file:~nobody-here/x'"),
        ("notify.webhook", "notify.webhook='file:~nobody-here/x'"),
    ],
)
def test_the_home_of_a_user_who_does_not_exist_is_one_clear_error(key: str, override: str) -> None:
    [problem] = problems_of(*TINY, override)
    assert problem.startswith(f"{key}: this machine has no user 'nobody-here' (got ")


def test_the_pod_is_named_by_cloud_tpu_and_network_alone() -> None:
    pod = config().pod_name
    assert config("run.seed=3", "loop.steps=9", "cloud.faults=[{kind: preempted, after_seconds: 1}]").pod_name == pod
    assert config("tpu.zone=us-west4-a").pod_name != pod
    assert config("tpu.name=mine").pod_name == "mine"


@pytest.mark.parametrize(
    ("overrides", "external"),
    [
        ([], False),
        (["network=default"], False),
        (["network.nat=false"], True),
        (["ssh.method=external"], True),
        (["network.laptop=auto"], True),
        (["tpu.adopt=true", "tpu.name=theirs"], True),
        (["tpu.external_ip=true"], True),
        (["ssh.method=external", "tpu.external_ip=false"], False),
    ],
)
def test_workers_have_external_addresses_only_where_something_needs_them(overrides: list[str], external: bool) -> None:
    assert config(*overrides).external_ip is external


@pytest.mark.parametrize(
    ("overrides", "queued"),
    [
        (["tpu.accelerator_type=v3-8"], False),
        (["tpu=v4_8"], True),
        (["tpu=v6e_1", "tpu.provisioner=node"], False),
        (["tpu.accelerator_type=v2-8", "tpu.provisioner=queued"], True),
    ],
)
def test_pods_are_queued_for_from_v4_on(overrides: list[str], queued: bool) -> None:
    tpu = config(*overrides).tpu
    assert tpu.is_queued("on_demand") is queued
    assert tpu.is_queued("flex_start")


def test_every_type_of_the_table_reads() -> None:
    for name in tpu_type_table()["types"]:
        found = find_topology(name)
        assert found.devices % found.workers == 0
        assert found.runtime_version


def test_the_suffix_counts_cores_on_v4_and_chips_on_v5e() -> None:
    assert (find_topology("v4-32").chips, find_topology("v4-32").workers, find_topology("v4-32").devices) == (16, 4, 16)
    assert (find_topology("v5litepod-16").chips, find_topology("v5litepod-16").workers) == (16, 4)
    assert find_topology("v5litepod-8").workers == 1
    assert find_topology("v3-8").devices == 8


@pytest.mark.parametrize("file", sorted((TABLE_FILE.parent / "tpu").glob("*.yaml")), ids=lambda f: f.stem)
def test_what_the_files_of_types_say_is_in_the_table(file: Path) -> None:
    found = config(f"tpu={file.stem}")
    kind = found.topology
    assert kind.accelerator_type.replace("-", "_") == file.stem.removesuffix("_ce")
    assert found.tpu.zone in kind.zones
    numbers = re.match(r"# (\d+) VMs? of (\d+) chips?.*? (\d+) JAX devices?\.", file.read_text())
    assert numbers is not None
    assert tuple(map(int, numbers.groups())) == (kind.workers, kind.chips // kind.workers, kind.devices)


@pytest.mark.parametrize(
    ("spelling", "kind", "planes", "workers"),
    [
        ("v6e:2x4", "v6e-8", (True, True), 1),
        ("v5e:4x4", "v5litepod-16", (True, False), 4),
        ("tpu7x:2x2x2", "tpu7x-16", (False, True), 2),
        ("tpu7x-8", "tpu7x-8", (False, True), 1),
    ],
)
def test_a_type_has_two_spellings_and_its_planes(
    spelling: str, kind: str, planes: tuple[bool, bool], workers: int
) -> None:
    found = config(f"tpu.accelerator_type={spelling}", "tpu.zone=us-central1-c")
    assert found.tpu.accelerator_type == kind
    assert (found.topology.on_tpu_api, bool(found.topology.image_family)) == planes
    assert found.topology.workers == workers
    assert type_of_machines(found.topology.machine_type, workers) in (kind, "")


def test_another_plane_is_another_pod_and_the_same_run() -> None:
    one, other = config("tpu=v6e_8"), config("tpu=v6e_8_ce")
    assert (one.topology.workers, other.topology.workers) == (1, 2)
    assert one.pod_name != other.pod_name
    names = {config("tpu=v6e_8", f"tpu.plane={plane}").pod_name for plane in ("tpu_api", "compute_engine")}
    assert len(names | {one.pod_name, other.pod_name}) == 4
    old = [config("tpu=v5litepod_8", *words).pod_name for words in ([], ["tpu.plane=tpu_api"])]
    assert old[0] == old[1]  # Compute Engine does not have the type
    assert one.run_id("0", {}) == other.run_id("0", {})


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("tpu.accelerator_type=v6e:3x3", "v6e has no topology '3x3'; closest: "),
        ("tpu.accelerator_type=v9:2x2", "unknown generation 'v9'; choices: v2, v3"),
        ("tpu.machine_type=ct6e-standard-1t", "v6e-8 has no VMs of type 'ct6e-standard-1t'; choices: ct6e-standard-4t"),
        ("tpu.boot_disk_gb=99", "tpu.boot_disk_gb: input should be greater than or equal to 100"),
    ],
)
def test_a_slice_that_cannot_be_is_refused(override: str, words: str) -> None:
    assert words in "\n".join(problems_of(*TINY, "tpu=v6e_8_ce", override))


def test_price_is_per_slice() -> None:
    assert find_topology("v5litepod-16").usd_per_hour("us-central1-a", spot=True) == pytest.approx(16 * 0.24493)
    assert find_topology("v6e-8").usd_per_hour("nowhere-a", spot=False) is None


@pytest.mark.parametrize("typed", ["v5litpod-16", "v5e-16", "v5e-17", "V5LITEPOD-8", "V5E-16", "V5Litepod-16"])
def test_an_unknown_type_suggests_the_nearest_by_its_name_of_the_api(typed: str) -> None:
    with pytest.raises(UnknownTypeError, match=rf"unknown type '{typed}'; closest: v5litepod-"):
        find_topology(typed)


def test_every_region_with_tpus_has_a_block_of_its_own_outside_of_googles() -> None:
    table = topology.region_table()
    zones = {zone for generation in tpu_type_table()["generations"].values() for zone in generation["zones"]}
    assert {zone_region(zone) for zone in zones} <= set(table)
    blocks = [ipaddress.ip_network(str(row["subnet"])) for row in table.values()]
    assert not any(a.overlaps(b) for a, b in itertools.combinations(blocks, 2))
    assert not any(block.overlaps(ipaddress.ip_network("10.128.0.0/9")) for block in blocks)


def test_a_multi_region_covers_its_regions() -> None:
    assert topology.is_near("US", "us-west4")
    assert topology.is_near("europe-west4", "europe-west4")
    assert not topology.is_near("eu", "europe-west2")
    assert not topology.is_near("us-central1", "us-central2")


def test_the_schemas_for_editors_are_those_of_the_models() -> None:
    """If not: python -m controller.config.editor_schemas"""
    assert [str(file) for file, text in schema_files().items() if not file.is_file() or file.read_text() != text] == []
