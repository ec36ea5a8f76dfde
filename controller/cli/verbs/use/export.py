"""`slipway export [RUN] --to FOLDER|gs://…`: the weights of a run for use elsewhere (docs/use-weights.md)."""

import json
import tempfile
from pathlib import Path

from controller.cli.main import Command
from controller.cli.verbs.use.weights import open_weights, run_trainer
from controller.core.errors import ConfigError
from controller.gcp.errors import GoogleError
from controller.run.session import Session

BUCKET = "gs://"


def run(command: Command) -> int:
    flags = command.flags
    if not flags.to:
        raise ConfigError("export: where to? add --to FOLDER or --to gs://BUCKET/FOLDER")
    remote = flags.to.startswith(BUCKET)
    if remote and not _split(flags.to)[1]:
        raise ConfigError(f"export: --to {flags.to} names no folder in the bucket; e.g. {BUCKET}BUCKET/models/mine")
    target = Path(flags.to).expanduser()
    if not remote and target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"export: {target} exists and is not an empty folder; choose another one with --to")
    more = [word for name in ("dtype", "tokenizer") if (v := getattr(flags, name)) for word in (f"--{name}", v)]
    with open_weights(command) as (session, weights), tempfile.TemporaryDirectory() as scratch:
        if remote:
            _raise_unless_empty(session, flags.to)
        folder = Path(scratch) / "export" if remote else target
        code = run_trainer(
            "trainer.convert", "export", str(weights.folder), str(folder), "--format", flags.format, *more,
            modules=session.plan.config.code.modules,
        )  # fmt: skip
        if code:
            return code
        files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
        if remote:
            with command.options.showing(f"uploading to {flags.to}"):
                _upload(session, folder, files, flags.to)
    if flags.json:
        names = [path.relative_to(folder).as_posix() for path in files]
        print(json.dumps({"run": weights.run_id, "step": weights.step, "to": flags.to, "files": names}))
    else:
        print(f"{weights.run_id}, step {weights.step}: {len(files)} files in {flags.to.rstrip('/')}/")
    return 0


def _raise_unless_empty(session: Session, url: str) -> None:
    """Raise ConfigError if the folder in the bucket has objects, or cannot be listed."""
    if session.plan.config.cloud.kind == "here":
        raise ConfigError(
            f"export: --to {url}: cloud=here asks nothing of Google; export to a folder, then `gcloud storage cp -r` it"
        )
    bucket, path = _split(url)
    where = {"bucket": bucket, "prefix": f"{path}/", "fields": "items(name)", "maxResults": 1}
    try:
        found = session.context.google.call("storage", "objects.list", **where).get("items", [])
    except GoogleError as error:
        raise ConfigError(f"export: --to {url}: {error}") from None
    if found:
        raise ConfigError(f"export: {url} exists and is not empty; choose another folder with --to")


def _split(url: str) -> tuple[str, str]:
    bucket, _, path = url.removeprefix(BUCKET).strip("/").partition("/")
    return bucket, path


def _upload(session: Session, folder: Path, files: list[Path], url: str) -> None:
    """Copy the exported files to a bucket, those that describe the model last."""
    bucket, path = _split(url)
    uploads = session.context.state_dir / "uploads"
    for file in sorted(files, key=lambda file: file.name in ("config.json", "model.yaml")):
        name = f"{path}/{file.relative_to(folder).as_posix()}"
        marker = uploads / f"export-{bucket}-{name.replace('/', '-')}"[-200:]
        session.context.google.upload_file(bucket, name, file, marker, lambda _: None)
