"""Planted mistakes of sources, downloads and builds, and what the Hub refuses: each is one finding of plan."""

import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from controller.checks.asset_access import builds_run_where_they_can, files_can_be_fetched
from controller.checks.input_hugging_face import HubSource, hub_sources, hub_sources_can_be_read, sources_can_be_read
from controller.checks.preflight import probe_plan
from controller.localcloud.hub import HubServer
from tests.controller.checks.plans import AssetBucket, build, context, plan_of
from tests.fakes.context import make_context
from tests.fakes.proxy import set_proxies
from tests.hub import ACCEPTED, OTHER, HubFault, hub

__all__ = ["hub"]


def said(tmp_path: Path, source: str, *overrides: str, present: tuple[str, ...] = ()) -> list[str]:
    plan = plan_of(tmp_path, f"{{source: '{source}'}}", *overrides)
    google = AssetBucket(*present, refused=("theirs",), mine={"text/a.parquet": b"7 bytes"})
    found = list(sources_can_be_read(plan, make_context(google)))
    assert {f.key for f in found} <= {"assets.models.weights.source"}
    return [f"{f.severity}: {f.message}" for f in found]


@pytest.mark.parametrize(
    ("source", "token", "expected"),
    [
        ("hf://acme/open", "", "note: 3 files, 320 kB, of commit "),
        ("hf://datasets/acme/rows/data/*", "", "note: 3 files, 18 B, of commit "),
        ("hf://acme/gated", ACCEPTED, "note: 3 files, 320 kB"),
        ("hf://acme/gated", "", "error: model acme/gated is gated (401): accept its license"),
        ("hf://acme/gated", OTHER, "error: model acme/gated is gated (403): accept its"),
        ("hf://acme/opne", "", "error: Hugging Face has no model acme/opne (401), or it"),
        ("hf://acme/opne", OTHER, "error: Hugging Face has no model acme/opne (404), or"),
        ("hf://acme/open@v9", "", "error: model acme/open has no revision v9"),
        ("hf://acme/open/*.gguf", "", "error: model acme/open: no file matches '*.gguf'"),
        ("hf://acme/open", "hf_wrong", "error: Hugging Face rejects your token (401)"),
        ("gs://theirs/text/*", "", "error: gs://theirs: you may not list it (you may not)"),
        ("gs://nowhere/text/*", "", "error: gs://nowhere: there is no such bucket"),
        ("gs://mine/text/*.jsonl", "", "error: gs://mine: no object matches 'text/*.jsonl'"),
    ],
)
def test_one_finding_each(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, token: str, expected: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    [line] = said(tmp_path, source)
    assert line.startswith(expected)
    assert not token or token not in line


def test_what_is_in_the_bucket_is_not_asked_for(hub: HubServer, tmp_path: Path) -> None:
    assert said(tmp_path, "hf://acme/opne", present=("weights",)) == []
    assert said(tmp_path, "gs://mine/text/*.parquet") == []
    assert hub.state.requests == []


def test_a_hub_that_does_not_answer_is_a_note(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.state.faults.append(HubFault("GET /api/", status=500, times=99))
    [line] = said(tmp_path, "hf://acme/open")
    assert line.startswith("note: was not checked: model acme/open: Hugging Face answered 500")
    monkeypatch.setenv("HF_ENDPOINT", "https://nowhere.invalid")
    [line] = said(tmp_path, "hf://acme/open")
    assert line.startswith("note: was not checked: acme/open: nowhere.invalid cannot be")


def test_a_disk_that_is_too_small_is_an_error(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert said(tmp_path, "hf://acme/open")[0].startswith("error: its 4 largest files take 320 kB; ")


def test_a_token_is_not_sent_unencrypted(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")
    assert said(tmp_path, "hf://acme/open") == [
        "error: HF_ENDPOINT: http://mirror.example would get the token unencrypted; use https"
    ]


def test_this_machine_reaches_no_bucket(tmp_path: Path) -> None:
    [line] = said(tmp_path, "gs://mine/text/*", "cloud=here")
    assert "is in a bucket, which cloud=here does not reach" in line


KEY = "assets.models.weights.files"


def files(place: str, **more: str) -> str:
    fields = {"url": place, "sha256": "0" * 64, **more}
    return f"{{files: {{w.bin: {{{', '.join(f'{key}: {value!r}' for key, value in fields.items())}}}}}}}"


def told(tmp_path: Path, asset: str, *overrides: str) -> list[str]:
    return [f"{f.severity} {f}" for f in files_can_be_fetched(plan_of(tmp_path, asset, *overrides), context())]


def url_of(hub: HubServer, repository: str = "open") -> str:
    """An address that is not known to be the Hub's."""
    return f"http://localhost:{hub.server_port}/acme/{repository}/resolve/main/model.safetensors"


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (None, f"note {KEY}: 1 file, 320 kB: through this machine, about 1 min at 100 Mbit/s"),
        (HubFault("/acme/", times=9, status=404), "error {url}: cannot fetch {place}: HTTP Error 404: Not Found"),
        (HubFault("/acme/", times=9, status=403), "error {url}: {place} refused access (403): it requires a token"),
        (HubFault("/acme/", times=9, loop=True), "error {url}: cannot fetch {place}: it is redirected in a circle"),
        (HubFault("/acme/", times=9, status=503), "note {url}: was not checked: cannot fetch {place}: HTTP Error 503"),
    ],
)
def test_one_finding_per_file_of_the_web(hub: HubServer, tmp_path: Path, fault: HubFault | None, expected: str) -> None:
    hub.state.faults += [fault] if fault else []
    [line] = told(tmp_path, files(f"{url_of(hub)}?key=planted"))
    assert line.startswith(expected.format(url=f"{KEY}.w.bin.url", place=url_of(hub)))
    assert "planted" not in line


def test_a_server_that_is_not_found_is_a_note(tmp_path: Path) -> None:
    [line] = told(tmp_path, files("https://no-such-host.invalid/w"))
    assert line.startswith(f"note {KEY}.w.bin.url: was not checked: no-such-host.invalid cannot be looked up (")


def test_what_does_not_fit_on_this_machine_is_an_error(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1000))
    assert told(tmp_path, files(url_of(hub)))[0].startswith(f"error {KEY}.w.bin.url: 320 kB are downloaded to ")
    [note] = told(tmp_path, files(url_of(hub)), "assets.fetch_on=pod")
    assert note.startswith(f"note {KEY}: 1 file, 320 kB: by worker 0 of the pod, about 1 min")


@pytest.mark.parametrize("where", ["laptop", "pod"])
def test_a_file_is_asked_for_with_its_token(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("MINE", ACCEPTED)
    asset = files(url_of(hub, "gated"), token_secret="MINE")
    [line] = told(tmp_path, asset, f"assets.fetch_on={where}", "+env.secrets.MINE=env")
    who = "through this machine" if where == "laptop" else "by worker 0 of the pod"
    assert line.startswith(f"note {KEY}: 1 file, 320 kB: {who}")


@pytest.mark.parametrize(
    ("words", "overrides", "token", "expected"),
    [
        ("make, '{output}'", (), "", "note {key}: built on this machine"),
        ("make, 'hf://acme/open', /home/x, '{output}'", (), "", "note {key}: built on this machine"),
        ("make, 'hf://acme/open', '{output}'", ("assets.fetch_on=pod",), "", "note {key}: built on worker 0 of the"),
        ("make, /home/x, '{output}'", ("assets.fetch_on=pod",), "", "error {key}: cannot run on the pod: it names"),
        ("make, 'hf://acme/gated', '{output}'", (), "", "error {key}: model acme/gated is gated (401): accept its lic"),
        ("make, 'hf://acme/gated', '{output}'", (), ACCEPTED, "note {key}: built on this machine"),
        ("make, 'hf://acme/opne', '{output}'", (), "", "error {key}: Hugging Face has no model acme/opne (401)"),
    ],
)
def test_where_a_build_runs_is_told(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, overrides: tuple[str, ...],
    token: str, expected: str,
) -> None:  # fmt: skip
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    plan = plan_of(tmp_path, f"{{build: [{words}]}}", "env.packages=none", *overrides)
    [line] = [f"{f.severity} {f}" for f in builds_run_where_they_can(plan, context())]
    assert line.startswith(expected.format(key="assets.models.weights.build"))


@pytest.mark.parametrize(
    ("where", "has_login", "found"),
    [
        (("assets.fetch_on=laptop",), True, True),
        (("assets.fetch_on=laptop",), False, False),
        (("assets.fetch_on=pod",), True, False),
        (("assets.fetch_on=pod",), False, True),
        (("assets.fetch_on=pod", "cloud=here"), True, True),
    ],
)
def test_a_build_is_asked_for_with_the_token_that_it_finds(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[str, ...], has_login: bool,
    found: bool,
) -> None:  # fmt: skip
    if has_login:
        (tmp_path / "token").write_text(ACCEPTED)
    else:
        monkeypatch.setenv("MINE", ACCEPTED)
        where = (*where, "env.secrets.HF_TOKEN=env:MINE")
    plan = plan_of(tmp_path, "{build: [make, 'hf://acme/gated', '{output}']}", "env.packages=none", *where)
    refused = [str(f) for f in builds_run_where_they_can(plan, context()) if f.severity == "error"]
    refused += of_build(tmp_path, build("acme/gated"), "env.packages=none", *where)
    assert len(refused) == (0 if found else 2)
    assert not refused or refused[1].endswith("passes on" if has_login else "then `hf auth login`")


def of_build(tmp_path: Path, asset: str, *overrides: str, present: tuple[str, ...] = ()) -> list[str]:
    found = hub_sources_can_be_read(plan_of(tmp_path, asset, *overrides), context(*present))
    return [f"{f.severity} {f}" for f in found]


def sources(tmp_path: Path, script: str) -> list[HubSource]:
    quoted = script.replace('"', r"\"")  # as Hydra's overrides quote a string
    asset = f"{{build: [bash, -c, \"{quoted}\", '{{output}}']}}"
    return hub_sources(plan_of(tmp_path, asset), context())


def url(address: str) -> str:
    return f"{{files: {{f: {{url: '{address}', sha256: {'a' * 64}}}}}}}"


@pytest.mark.parametrize(
    ("words", "token", "expected"),
    [
        ("acme/open", "", ""),
        ("acme/open config.json", "", ""),
        ("acme/rows --repo-type dataset --revision main", "", ""),
        ("acme/gated", ACCEPTED, ""),
        ("acme/gated", "", "model acme/gated is gated (401): accept its license at HUB/acme/gated, then `hf auth"),
        ("acme/gated", OTHER, "model acme/gated is gated (403): accept its license at HUB/acme/gated, with the"),
        ("acme/opne", "", "Hugging Face has no model acme/opne (401), or it is private and needs a token: `hf auth"),
        ("acme/opne", ACCEPTED, "Hugging Face has no model acme/opne (404), or your token has no access to it; look"),
        ("acme/open --revision v9", "", "model acme/open has no revision v9; HUB/acme/open/tree/main lists its"),
        ("acme/open weights.bin", "", "model acme/open has no file weights.bin in revision main; see HUB/acme/open/"),
        ("acme/open", "hf_expired", "Hugging Face rejects your token (401); make a new one at HUB/settings/tokens,"),
    ],
)
def test_each_refusal_names_the_page_to_open(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, token: str, expected: str
) -> None:
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    lines = [line.replace(hub.endpoint, "HUB") for line in of_build(tmp_path, build(*words.split()))]
    assert len(lines) == bool(expected)
    assert "".join(lines).startswith(expected and f"error assets.models.weights.build: {expected}")
    assert "opne" not in words or lines[0].endswith("look at HUB/acme/opne")


def test_a_token_without_the_permission_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OTHER)
    hub.state.faults.append(HubFault("/api/", status=403))
    [refused] = of_build(tmp_path, build("acme/open"))
    assert refused.startswith("error assets.models.weights.build: your token may not read model acme/open (403); see ")


def test_what_a_script_would_download_is_a_warning(hub: HubServer, tmp_path: Path) -> None:
    line = "{build: [sh, -c, 'mkdir {output} && hf download acme/gated --local-dir {output} && ls']}"
    [warning] = of_build(tmp_path, line)
    assert warning.startswith("warning ")
    assert "acme/gated is gated" in warning


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("hf download org/x 2>/dev/null", [("org/x", None)]),
        ("hf download org/x config.json 2>&1|tee log", [("org/x", "config.json")]),
        ("hf download org/x\nhf download org/y", [("org/x", None), ("org/y", None)]),
        ("hf download org/x \\\n  config.json  # weights aren't needed", [("org/x", "config.json")]),
        ("(hf download org/x)&&hf download org/y||exit 1", [("org/x", None), ("org/y", None)]),
        ("for f in a b; do hf download org/x $f.json; done", [("org/x", None)]),
        ("hf download org/x $FILES", [("org/x", None)]),
        ("hf download org/x *.json", [("org/x", None)]),
        ("hf download $REPOSITORY config.json", []),
        ("hf download org/$NAME", []),
        ("hf download org/x --revision $REVISION", []),
        ("hf download org/x --token $TOKEN", []),
        ("huggingface-cli download --resume-download org/x", [("org/x", None)]),
        ("huggingface-cli download org/x --include '*.safetensors' '*.json' --revision v1", [("org/x", None)]),
        ("huggingface-cli download org/x --exclude '*.bin' '*.msgpack'", [("org/x", None)]),
        ("huggingface-cli download --include=*.json org/x", [("org/x", None)]),
        ("hf download --include '*.json' org/x config.json", [("org/x", "config.json")]),
    ],
)
def test_a_script_is_split_as_a_shell_does(tmp_path: Path, script: str, expected: list[tuple[str, str | None]]) -> None:
    assert [(source.repository, source.file) for source in sources(tmp_path, script)] == expected


def test_all_patterns_of_huggingface_cli_are_read(tmp_path: Path) -> None:
    patterns = "--include '*.safetensors' '*.json' --exclude '*.bin'"
    [source] = sources(tmp_path, f"huggingface-cli download org/x {patterns} --revision v1")
    assert source.revision == "v1"
    names = ("a.safetensors", "b.json", "c.bin", "v1")
    assert [source.includes(name) for name in names] == [True, True, False, False]


def test_a_token_on_the_command_line_is_used(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert of_build(tmp_path, build("acme/gated", "--token", ACCEPTED)) == []
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    [refused] = of_build(tmp_path, build("acme/gated", "--token", "hf_expired"))
    assert refused.endswith(f"make a new one at {hub.endpoint}/settings/tokens, and pass it with --token")


@pytest.mark.parametrize("where", ["laptop", "pod"])
def test_files_are_asked_for_with_the_token_that_fetches_them(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gated, on = url(f"{hub.endpoint}/acme/gated/resolve/main/model.safetensors"), f"assets.fetch_on={where}"
    [error] = of_build(tmp_path, gated, on)
    assert error.startswith("error assets.models.weights.files.f.url: model acme/gated is gated (401): accept its lic")
    assert error.endswith("then export HF_TOKEN, which env.secrets.HF_TOKEN passes on")
    monkeypatch.setenv("MINE", ACCEPTED)
    named = gated.replace("sha256", "token_secret: MINE, sha256")
    assert of_build(tmp_path, named, on, "+env.secrets.MINE=env") == []
    [absent] = of_build(tmp_path, url(f"{hub.endpoint}/datasets/acme/rows/resolve/main/row.jsonl"), on)
    assert absent.endswith(f"has no file row.jsonl in revision main; see {hub.endpoint}/datasets/acme/rows/tree/main")


def test_what_is_there_already_is_not_asked_for(hub: HubServer, tmp_path: Path) -> None:
    assert of_build(tmp_path, build("acme/gated"), present=("weights",)) == []
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / ("a" * 64)).touch()
    assert of_build(tmp_path, url(f"{hub.endpoint}/acme/gated/resolve/main/f")) == []
    [recipe] = [asset.recipe for asset in plan_of(tmp_path, build("acme/gated")).assets]
    assert recipe is not None
    recipe.output.mkdir(parents=True)
    assert of_build(tmp_path, build("acme/gated")) == []


def test_a_hub_that_is_down_is_a_note_for_a_build(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.state.faults.append(HubFault("/api/", status=500))
    [broken] = of_build(tmp_path, build("acme/open"))
    expected = "was not checked: model acme/open: Hugging Face answered 500; try again later"
    assert broken == f"note assets.models.weights.build: {expected}"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    [note] = [f for f in probe_plan(plan_of(tmp_path, build("acme/open")), context()) if f.check == "hugging_face"]
    assert note.severity == "note"
    assert note.message.startswith("was not checked: model acme/open: ConnectError")


def test_without_a_network_nobody_waits_for_the_library(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")
    set_proxies(monkeypatch)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import would fail
    [line] = of_build(tmp_path, build("acme/open"))
    assert line.startswith(
        "note assets.models.weights.build: was not checked: model acme/open: no-such-host.invalid cannot be looked up ("
    )
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # it looks names up itself
    with pytest.raises(ImportError):
        of_build(tmp_path, build("acme/open"))


def test_what_a_network_keeps_from_being_checked_is_one_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "https://no-such-host.invalid")
    set_proxies(monkeypatch)
    two = plan_of(tmp_path, build("acme/open"), f"+assets.models.more={build('acme/other')}")
    [note] = [found for found in probe_plan(two, context()) if found.check == "hugging_face"]
    assert note.message.endswith("; check this machine's network; nor was assets.models.more.build")
