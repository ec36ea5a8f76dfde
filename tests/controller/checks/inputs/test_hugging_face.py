"""What Hugging Face refuses is found by asking the emulated Hub."""

import sys
from pathlib import Path

import pytest

from controller.checks.inputs.hugging_face import HubSource, hub_sources, hub_sources_can_be_read
from controller.checks.preflight import probe_plan
from controller.localcloud.hub import HubFault, HubServer
from tests.controller.checks.plans import build, context, plan_of
from tests.hub import ACCEPTED, OTHER, hub

__all__ = ["hub"]


def said(tmp_path: Path, asset: str, *overrides: str, present: tuple[str, ...] = ()) -> list[str]:
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
    lines = [line.replace(hub.endpoint, "HUB") for line in said(tmp_path, build(*words.split()))]
    assert len(lines) == bool(expected)
    assert "".join(lines).startswith(expected and f"error assets.models.weights.build: {expected}")
    assert "opne" not in words or lines[0].endswith("look at HUB/acme/opne")


def test_a_token_without_the_permission_is_named(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", OTHER)
    hub.state.faults.append(HubFault("/api/", status=403))
    [refused] = said(tmp_path, build("acme/open"))
    assert refused.startswith("error assets.models.weights.build: your token may not read model acme/open (403); see ")


def test_what_a_script_would_download_is_a_warning(hub: HubServer, tmp_path: Path) -> None:
    line = "{build: [sh, -c, 'mkdir {output} && hf download acme/gated --local-dir {output} && ls']}"
    [warning] = said(tmp_path, line)
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
    assert said(tmp_path, build("acme/gated", "--token", ACCEPTED)) == []
    monkeypatch.setenv("HF_TOKEN", ACCEPTED)
    [refused] = said(tmp_path, build("acme/gated", "--token", "hf_expired"))
    assert refused.endswith(f"make a new one at {hub.endpoint}/settings/tokens, and pass it with --token")


@pytest.mark.parametrize("where", ["laptop", "pod"])
def test_files_are_asked_for_with_the_token_that_fetches_them(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    gated, on = url(f"{hub.endpoint}/acme/gated/resolve/main/model.safetensors"), f"assets.fetch_on={where}"
    [error] = said(tmp_path, gated, on)
    assert error.startswith("error assets.models.weights.files.f.url: model acme/gated is gated (401): accept its lic")
    assert error.endswith("then export HF_TOKEN, which env.secrets.HF_TOKEN passes on")
    monkeypatch.setenv("MINE", ACCEPTED)
    named = gated.replace("sha256", "token_secret: MINE, sha256")
    assert said(tmp_path, named, on, "+env.secrets.MINE=env") == []
    [absent] = said(tmp_path, url(f"{hub.endpoint}/datasets/acme/rows/resolve/main/row.jsonl"), on)
    assert absent.endswith(f"has no file row.jsonl in revision main; see {hub.endpoint}/datasets/acme/rows/tree/main")


def test_what_is_there_already_is_not_asked_for(hub: HubServer, tmp_path: Path) -> None:
    assert said(tmp_path, build("acme/gated"), present=("weights",)) == []
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / ("a" * 64)).touch()
    assert said(tmp_path, url(f"{hub.endpoint}/acme/gated/resolve/main/f")) == []
    [recipe] = [asset.recipe for asset in plan_of(tmp_path, build("acme/gated")).assets]
    assert recipe is not None
    recipe.output.mkdir(parents=True)
    assert said(tmp_path, build("acme/gated")) == []


def test_a_hub_that_does_not_answer_is_a_note(hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.state.faults.append(HubFault("/api/", status=500))
    [broken] = said(tmp_path, build("acme/open"))
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
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)  # an import would fail
    [line] = said(tmp_path, build("acme/open"))
    assert line.startswith(
        "note assets.models.weights.build: was not checked: model acme/open: no-such-host.invalid cannot be looked up ("
    )
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:1")  # it looks names up itself
    with pytest.raises(ImportError):
        said(tmp_path, build("acme/open"))
