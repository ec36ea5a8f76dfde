"""Missing programs and full disks are found before the download."""

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from conf.schema.cloud import HereCloud
from conf.schema.config import Config
from controller.checks import machine
from controller.checks.asset_access import local_files_are_here
from controller.checks.machine import (
    downloads_fit,
    flags_are_known,
    programs_are_installed,
    ssh_config_can_be_read,
    workers_disks_suffice,
)
from controller.checks.preflight import preflight
from controller.config.this_machine import Devices
from controller.context import format_size
from controller.inputs.code import UnfetchedSnapshot
from controller.localcloud.hub import HubServer
from controller.plan.build import build_plan
from controller.plan.worker_steps import LOCK_FILE
from tests.composed import config_of as config
from tests.controller.checks.plans import build, context, plan_of
from tests.fakes.context import make_context
from tests.hub import CONTENT, hub

__all__ = ["hub"]

WHOLE = len(b"# it" + b"{}" + CONTENT)
"""Bytes of acme/open and of acme/gated."""


def test_the_program_of_a_build_must_be_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    plan = plan_of(tmp_path, build("acme/open"))
    assert [str(f) for f in programs_are_installed(plan, context())] == [
        "assets.models.weights.build: hf is not installed on this machine, or not on PATH; install it (pip install "
        "huggingface_hub)"
    ]
    assert list(programs_are_installed(plan, context("weights"))) == []  # it is in the bucket
    [line] = programs_are_installed(plan_of(tmp_path, "{build: [sh, -c, 'hf download a/b {output}']}"), context())
    assert line.message.startswith("hf is not installed")
    (tmp_path / "make.sh").touch()
    assert list(programs_are_installed(plan_of(tmp_path, "{build: [make.sh, '{output}']}"), context())) == []
    assert list(programs_are_installed(plan_of(tmp_path, "{build: [sh, -c, 'ls {output}']}"), context())) == []


KNOWN = "--xla_cpu_parallel_codegen_split_count=1"


@pytest.mark.parametrize(
    ("name", "flags", "packages", "said"),
    [
        ("XLA_FLAGS", f"{KNOWN} --xla_nope=1", "lock", "Unknown flag in XLA_FLAGS: --xla_nope=1"),
        ("XLA_FLAGS", "--xla_cpu_parallel_codegen_split_count=x", "lock", "Couldn't interpret value x for flag xla_c"),
        ("XLA_FLAGS", "--xla_tpu_nope=1", "lock", "move them to LIBTPU_INIT_ARGS"),
        ("XLA_FLAGS", f"{KNOWN} xla_nope=1", "lock", "flags begin with --, and xla_nope=1 would be ignored"),
        ("LIBTPU_INIT_ARGS", "xla_tpu_enable_x=true", "none", "and xla_tpu_enable_x=true would be ignored"),
        ("XLA_FLAGS", f"{KNOWN} '", "none", "No closing quotation"),
        ("LIBTPU_INIT_ARGS", f"{KNOWN} xla_nope=1", "none", "flags begin with --, and xla_nope=1 would be ignored"),
        ("XLA_FLAGS", f"{KNOWN} --xla_dump_hlo_pass_re='a b'", "lock", ""),
        ("XLA_FLAGS", "/etc/flags-of-the-pod", "lock", ""),
        ("XLA_FLAGS", "--torch_xla_nope=1", "none", ""),
        ("LIBTPU_INIT_ARGS", "--xla_tpu_nope=1", "lock", ""),
    ],
)
def test_a_flag_that_jaxlib_does_not_know_is_found_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, flags: str, packages: str, said: str
) -> None:
    locked = re.findall(r"^jaxlib==(\S+)", LOCK_FILE.read_text(), re.MULTILINE)
    monkeypatch.setattr(machine, "version", dict.fromkeys(("jaxlib",), locked[0]).__getitem__)
    command = ["cloud.project=acme", "program=command", "program.command=[a]", f"env.packages={packages}"]
    made = config(*command, f'env.vars={{{name}: "{flags}"}}', f"run.state_dir={tmp_path}")
    plan = build_plan(made, "acme", tmp_path, UnfetchedSnapshot(tmp_path, (), "0" * 40))
    found = [str(finding) for finding in flags_are_known(plan, context())]
    assert len(found) == bool(said)
    assert all(line.startswith(f"env.vars.{name}: ") and said in line for line in found)
    monkeypatch.setattr(machine, "version", lambda _: "0.1")
    others = [finding.message for finding in flags_are_known(plan, context())]
    assert others == [line.partition(": ")[2] for line in found if "does not accept" not in line]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="OpenSSH is not installed")
@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Host *\n  ProxyJump me@gw:22\nHost gw\n  ProxyJump none\n", ""),
        ("Host *\n  Prot 2200\n", "error ssh.method: cannot read the SSH config .*/config: line 2: Bad .*prot"),
        ("Host 10.*\n  ProxyJump gw\nHost gw\n  ProxyCommand nc %Z\n", "error ssh.method: .*nc %Z"),
        ("Host *\n  BindAddress 127.0.0.1\n", "warning ssh.method: .*says bindaddress 127.0.0.1 for 1"),
    ],
)
def test_the_ssh_config_is_read_before_a_pod_is_billed(
    text: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For addresses as workers have them, and for their gateways; the emulated cloud has a config of its own."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh/config").write_text(text)
    found = list(ssh_config_can_be_read(config("cloud=gcp", "cloud.project=acme"), make_context(None, tmp_path)))
    lines = [f"{finding.severity} {finding}" for finding in found]
    assert all(re.match(said, line) for line in lines)
    assert bool(lines) == bool(said)
    assert list(ssh_config_can_be_read(config("cloud=local"), make_context(None, tmp_path))) == []


@pytest.mark.parametrize(("free", "fits"), [(WHOLE, True), (WHOLE - 1, False)])
def test_a_download_must_fit_on_this_disk(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, fits: bool
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=free))
    found = [str(f) for f in downloads_fit(plan_of(tmp_path, build("acme/open")), context())]
    assert (
        found == []
        if fits
        else [
            f"assets.models.weights.build: 320 kB are downloaded to {tmp_path}, which has 320 kB free; free some "
            "space, or set run.state_dir to a folder on a larger disk"
        ]
    )
    part = plan_of(tmp_path, build("acme/open", "--include", "'*.safetensors'"))
    assert list(downloads_fit(part, context())) == []


def test_a_resumed_download_needs_only_the_rest(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=100_000))
    plan = plan_of(tmp_path, one_file(hub))
    assert len(list(downloads_fit(plan, context()))) == 1
    (tmp_path / "downloads").mkdir()
    with (tmp_path / "downloads" / ("a" * 64 + ".part")).open("wb") as file:
        file.truncate(len(CONTENT) - 100_001)
    assert len(list(downloads_fit(plan, context()))) == 1
    with (tmp_path / "downloads" / ("a" * 64 + ".part")).open("wb") as file:
        file.truncate(len(CONTENT) - 100_000)
    assert list(downloads_fit(plan, context())) == []


@pytest.mark.parametrize(("where", "size"), [("laptop", WHOLE + len(CONTENT)), ("pod", WHOLE)])
def test_a_file_that_the_pod_fetches_needs_no_space_here(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, size: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    both = (f"+assets.datasets.rows={one_file(hub)}", f"+assets.datasets.rows.fetch_on={where}")
    [issue] = downloads_fit(plan_of(tmp_path, build("acme/open"), *both), context())
    assert issue.message.startswith(f"{format_size(size)} are downloaded to {tmp_path}")


def test_the_downloads_of_a_build_add_up(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=2 * WHOLE - 1))
    line = "{build: [sh, -c, 'hf download acme/open && hf download acme/gated && ls {output}']}"
    [issue] = downloads_fit(plan_of(tmp_path, line), context())
    assert issue.message.startswith(f"{format_size(2 * WHOLE)} are downloaded")


@pytest.mark.parametrize(("files", "refused"), [("$FILES", 0), ("*.json", 1)])
def test_files_that_only_the_shell_knows_are_not_counted(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: str, refused: int
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    plan = plan_of(tmp_path, f"{{build: [sh, -c, 'hf download acme/open {files} --local-dir {{output}}']}}")
    assert [issue.message.startswith("2 B are") for issue in downloads_fit(plan, context())] == [True] * refused


def one_file(hub: HubServer) -> str:
    return f"{{files: {{f: {{url: '{hub.endpoint}/acme/open/resolve/main/model.safetensors', sha256: {'a' * 64}}}}}}}"


def test_a_boot_disk_has_100_gb(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "{build: [a, '{output}']}", "env.min_free_gb=100")
    assert [str(f) for f in workers_disks_suffice(plan.config)] == [
        "env.min_free_gb: a worker's boot disk has 100 GB in all; set a smaller value"
    ]
    with (tmp_path / "rows").open("wb") as file:
        file.truncate(99_000_000_000)  # a sparse file
    plan_config = plan_of(tmp_path, "{build: [a, '{output}']}").config
    assets = plan_config.assets.model_copy(update={"datasets": {"rows": SimpleNamespace(path=str(tmp_path / "rows"))}})
    [warning] = workers_disks_suffice(plan_config.model_copy(update={"assets": assets}))
    assert str(warning) == (
        "assets.datasets.rows.path: 99 GB do not fit on a worker's boot disk of 100 GB; read them from the bucket as "
        "they are needed"
    )


def test_a_folder_with_everything_is_not_counted_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MAX_FILES", 3)
    for number in range(10):
        (tmp_path / "many" / f"{number}").mkdir(parents=True)
        for name in ("a", "b"):
            (tmp_path / "many" / f"{number}" / name).touch()
    looked_at: list[str] = []
    is_file = Path.is_file
    monkeypatch.setattr(Path, "is_file", lambda path: looked_at.append(path.name) or is_file(path))
    config = plan_of(tmp_path, "{build: [a, '{output}']}").config
    assets = config.assets.model_copy(update={"datasets": {"rows": SimpleNamespace(path=str(tmp_path / "many"))}})
    [warning] = workers_disks_suffice(config.model_copy(update={"assets": assets}))
    assert str(warning) == (
        "assets.datasets.rows.path: more than 3 files, and each is hashed and uploaded by itself; pack them into "
        "larger files, or set it to a smaller folder"
    )
    assert len([name for name in looked_at if name in ("a", "b")]) == 4


@pytest.mark.parametrize("path", ["~", "~/", "/", "~/.."])
def test_a_home_folder_is_no_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    (home := tmp_path / "home" / "me").mkdir(parents=True)
    (home / "data").mkdir()
    monkeypatch.setenv("HOME", str(home))
    assets = {"rows": SimpleNamespace(path=path), "fine": SimpleNamespace(path="~/data")}
    config = plan_of(tmp_path, "{build: [a, '{output}']}").config
    config = config.model_copy(update={"assets": config.assets.model_copy(update={"datasets": assets})})
    message = f"{path} contains your home folder, with its keys; set it to the folder of the data alone"
    assert [str(issue) for issue in local_files_are_here(config)] == [f"assets.datasets.rows.path: {message}"]


JAX = {"jax": "0.10.2", "jaxlib": "0.10.2"}


def composed(*words: str) -> Config:
    return config("+experiment=quickstart", "cloud=here", *words)


def cloud(*words: str) -> HereCloud:
    made = composed(*words).cloud
    assert isinstance(made, HereCloud)
    return made


@pytest.mark.parametrize(
    ("words", "found", "said"),
    [
        (["cloud.backend=gpu"], Devices(gpus=1), ""),
        (["cloud.backend=gpu"], Devices(), "no NVIDIA GPU"),
        (["cloud.backend=tpu"], Devices(gpus=1), "no TPU"),
        (["cloud.backend=gpu", "cloud.devices=[0,2]"], Devices(gpus=2), "has 2 GPUs, numbered from 0, but 0, 2"),
        (["cloud.backend=gpu", "cloud.devices=4"], Devices(told="rocm"), ""),
    ],
)
def test_the_devices_are_those_of_the_machine(words: list[str], found: Devices, said: str) -> None:
    issues = [issue.message for issue in machine.missing_devices(cloud(*words), found)]
    assert len(issues) == bool(said)
    assert said in "".join(issues)


@pytest.mark.parametrize(
    ("backend", "versions", "said"),
    [
        ("cpu", JAX, ""),
        ("cpu", {}, "has no JAX: run `pip install jax`, or set cloud.python=env"),
        ("gpu", {"jax": "0.10.2"}, "has no jaxlib: run `pip install 'jax[cuda13]'`"),
        ("gpu", JAX, "without its plugin for CUDA: run `pip install 'jax[cuda13]'`"),
        ("gpu", JAX | {"jax-cuda12-plugin": "0.10.2"}, ""),
        ("tpu", JAX, "without its libtpu: run `pip install 'jax[tpu]'`"),
        ("tpu", JAX | {"libtpu": "0.0.30"}, ""),
    ],
)
def test_jax_has_its_plugin(backend: str, versions: dict[str, str], said: str) -> None:
    issues = [issue.message for issue in machine.missing_packages(True, backend, versions, {})]
    assert len(issues) == bool(said)
    assert said in "".join(issues)


def test_another_program_may_do_without_jax() -> None:
    assert not [*machine.missing_packages(False, "gpu", {}, {})]
    assert [issue.severity for issue in machine.missing_packages(False, "gpu", JAX, {})] == ["warning"]
    assert not [*machine.missing_packages(True, "tpu", JAX, {"TPU_LIBRARY_PATH": "/lib/libtpu.so"})]


def found(*words: str) -> list[str]:
    return [f"{each.severity} {each}" for each in preflight(composed("cloud.backend=cpu", *words))]


def test_nothing_is_asked_that_is_about_pods() -> None:
    words = ["tpu=v4_64", "tpu.zone=us-east1-d", "network.nat=false", "cleanup.idle_minutes=null"]
    [said] = found(*words, "cloud.bucket=google")
    assert said == (
        "note cloud.bucket: has no effect: cloud=here is this machine, without a pod; nor have tpu.accelerator_type, "
        "tpu.zone, network.nat, cleanup.idle_minutes"
    )


def test_batches_that_do_not_divide_are_found() -> None:
    [said] = found("cloud.devices=3")
    assert said.startswith("error loop.prompts_per_step: 16 prompts cannot be split evenly over 3 devices")


def test_what_has_no_place_here_is_refused() -> None:
    assert found("recovery.driver=bastion") == [
        "error recovery.driver: a bastion is a VM on Google Cloud; with cloud=here set it to laptop"
    ]
    [said] = found("budget.max_usd=5")
    assert said.startswith("error budget.max_usd: cannot be enforced: this machine is free; set budget.usd_per_hour")
    gpu = preflight(composed("cloud.backend=gpu", "cloud.python=env", "env.packages=lock"))
    assert [each.key for each in gpu if each.check == "here_lock"] == ["cloud.python"]


def test_the_folder_of_this_machine_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def said(folder: Path | str) -> list[str]:
        issues = machine.folder_is_writable.function(config("cloud=here", f"cloud.folder={folder}"))
        return [issue.message for issue in issues]

    (tmp_path / "file").touch()
    assert said(tmp_path) == said(tmp_path / "new" / "deep") == said("~/new") == said("null") == []
    assert said(tmp_path / ("a" * 300)) == []
    for place in ("file", "file/new"):
        assert said(tmp_path / place) == [f"{tmp_path}/file is a file; name a folder"]
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert said(tmp_path / "link" / "new") == [f"{tmp_path}/link is a link to nothing; name a folder"]
    monkeypatch.setattr("controller.checks.machine.os.access", lambda *_: False)
    assert said(tmp_path / "new") == [f"nothing can be written to {tmp_path}; name another folder"]
