"""Assets in the bucket, copied there by this machine before a TPU is billed, or by a worker of the pod.

As in rsync, equal objects are not sent, nothing is deleted, and an interrupted transfer resumes.
"""

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Self

from controller.agent.protocol import (
    BUILD_ASSET,
    FETCH_ASSET,
    BuildAssetRequest,
    Command,
    FetchAssetRequest,
    FetchLine,
    Q,
)
from controller.context import Context, Progress, format_size
from controller.core.errors import CloudError
from controller.core.json_documents import DamagedRecordError, load_json
from controller.gcp.answers import parse_timestamp
from controller.gcp.client import GoogleClient
from controller.gcp.google_errors import NotFoundError
from controller.inputs.download import download_file, run_recipe, token_for
from controller.inputs.env_inputs import Vault
from controller.inputs.resolved_assets import (
    AssetFile,
    BuildRecipe,
    Digests,
    HashCache,
    ResolvedAsset,
    local_files,
    manifest_text,
    refuse_links,
)
from controller.reconcile import Absent, Diff, ObservedResources, Resource, Scope
from controller.resources.machines import WorkerResource
from controller.ssh.fleet import WorkerError, WorkersFailedError

THREADS = 8
KEEP_BYTES = 10**9
"""A download of this size or more is deleted once it is in the bucket, so that the disk holds `THREADS` at most."""
FETCH_ATTEMPTS = 5
"""Number of times a fetch on the pod is resumed after SSH broke off."""
OWN = "slipway"
ENDPOINT = "HF_ENDPOINT"
"""Variable that a build on the pod gets from this machine: where the Hub is."""
StoredObjects = dict[str, tuple[int, str]]
"""Size and MD5 of objects, by name."""


@dataclass(frozen=True, kw_only=True)
class AssetInBucket(Resource):
    """Files of an asset, then `manifest.json`: its presence means that all files have arrived."""

    bucket: str = field(compare=False)
    content: ResolvedAsset = field(compare=False)
    vault: Vault = field(compare=False, repr=False)
    stored_bytes: int | None = field(default=None, compare=False)
    """Size of what is in the bucket, where that was observed."""

    @property
    def id(self) -> str:
        return f"{self.content.kind}/{self.name}"

    @property
    def title(self) -> str:
        how = "built by a command" if self.content.recipe else self.content.source or f"{len(self.content.files)} files"
        return f"{self.content.kind} {self.name} in the bucket ({how})"

    def title_of(self, current: Any) -> str:
        return self.title if current.stored_bytes is None else f"{self.title}: {format_size(current.stored_bytes)}"

    @property
    def manifest_object(self) -> str:
        return f"{self.content.prefix}/manifest.json"

    def observe(self, context: Context, observed: ObservedResources) -> Absent | Self:
        """Look for the manifest. An asset with a file that has gone or been replaced since is absent: copied again."""
        try:
            context.google.call("storage", "objects.get", bucket=self.bucket, object=self.manifest_object)
            missing, replaced, stored = self._look_at_objects(context)
        except NotFoundError:
            return Absent()
        return Absent() if missing or replaced else replace(self, stored_bytes=stored)

    def delete_replaced(self, context: Context) -> None:
        """Delete files that somebody else has replaced: `apply` takes a file that is there for a verified one."""
        try:
            _, replaced, _ = self._look_at_objects(context)
        except NotFoundError:
            return
        for item in replaced:
            where = f"gs://{self.bucket}/{item['name']}"
            context.events.note(self.id, f"{where} was replaced after the asset was complete; it is copied again")
            with suppress(NotFoundError):
                place = {"bucket": self.bucket, "object": item["name"]}
                context.google.call("storage", "objects.delete", **place, ifGenerationMatch=item["generation"])

    def _look_at_objects(self, context: Context) -> tuple[set[str], list[dict[str, Any]], int]:
        """Return the names of missing objects, those that are newer than the manifest, which is written last, and the
        bytes of all.

        Raises:
            NotFoundError: there is no manifest.
            DamagedRecordError: it is none.
        """
        where = f"gs://{self.bucket}/{self.manifest_object}"
        manifest = load_json(context.google.download(self.bucket, self.manifest_object), where)
        if not isinstance(manifest, dict):
            raise DamagedRecordError(f"{where} is damaged; delete it, and the next `slipway up` copies the asset again")
        listed = context.google.objects(self.bucket, f"{self.content.prefix}/", "name,generation,size,timeCreated")
        items = {item["name"]: item for item in listed}
        names = {f"{self.content.prefix}/{name}" for name in manifest}
        if self.manifest_object not in items:  # deleted at this moment
            return {self.manifest_object}, [], 0
        complete = _created(items[self.manifest_object])
        there = [items[name] for name in sorted(names & items.keys())]
        newer = [item for item in there if _created(item) > complete]
        return names - items.keys(), newer, sum(int(item["size"]) for item in there)


def _created(item: Mapping[str, Any]) -> float:
    return parse_timestamp(item.get("timeCreated"))


@dataclass(frozen=True, kw_only=True)
class UploadedAsset(AssetInBucket):
    """An asset copied by this machine."""

    kind: ClassVar[str] = "asset"
    scope: ClassVar[Scope] = "shared"

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        """Make or download the files on this machine, and send those that the bucket lacks."""
        key = f"assets.{self.content.path}"
        self.delete_replaced(context)
        with HashCache(context.state_dir / "hashes.json") as hashes:
            files = self.content.files
            if self.content.recipe is not None:
                output = run_recipe(self.content.recipe, key)
                files = local_files(output, hashes)
                refuse_links(files, output, f"{key}.build")
            items = context.google.objects(self.bucket, f"assets/{self.name}-", "name,size,md5Hash")
            elsewhere = {item["name"]: (int(item["size"]), item.get("md5Hash", "")) for item in items}
            known = {f.local: d for f in files if f.url is None for d in hashes.digests([f.local]).values()}
            total = sum(f.local.stat().st_size for f in files if f.url is None)
            progress = Progress(context, self.id, total if all(f.url is None for f in files) else 0)
            send = partial(self._copy_file, context, elsewhere, known, progress.advance)
            with ThreadPoolExecutor(max_workers=THREADS, thread_name_prefix="upload") as pool:
                list(pool.map(send, files))
        context.google.upload(self.bucket, self.manifest_object, manifest_text(files).encode())

    def _copy_file(
        self,
        context: Context,
        stored: StoredObjects,
        known: dict[Any, Digests],
        moved: Callable[[int], None],
        source: AssetFile,
    ) -> None:
        """Send one file to the bucket, unless it is there already or can be copied from another object."""
        name = f"{self.content.prefix}/{source.name}"
        if source.url is not None and name in stored and not source.local.is_file():
            return  # it was checked before it was sent
        download_file(source, token_for(source, self.vault.values()), moved, context.clock.sleep)
        digests = known.get(source.local)
        if digests is None:
            with HashCache(context.state_dir / "hashes" / f"{source.sha256}.json") as hashes:
                digests = hashes.digests([source.local])[source.local]
        if digests.sha256 != source.sha256:
            raise CloudError(f"{source.local} changed during the upload; run `slipway up` again")
        size = source.local.stat().st_size
        same = (size, digests.md5)
        if stored.get(name) == same:
            return
        other = next((o for o, what in stored.items() if what == same), None)
        if other is not None:
            rewrite_object(context.google, (self.bucket, other), (self.bucket, name))
            return
        session = context.state_dir / "uploads" / f"{source.sha256}-{self.content.identity[:12]}"
        got = context.google.upload_file(self.bucket, name, source.local, session, moved)
        if got.get("md5Hash") != digests.md5:
            raise CloudError(
                f"gs://{self.bucket}/{name} and {source.local} have different MD5 hashes; run `slipway up` again"
            )
        if source.url is not None and size >= KEEP_BYTES:
            source.local.unlink()


def rewrite_object(google: GoogleClient, source: tuple[str, str], target: tuple[str, str], **conditions: str) -> None:
    """Copy an object, in several calls if large (https://cloud.google.com/storage/docs/json_api/v1/objects/rewrite)."""
    place = {
        "sourceBucket": source[0],
        "sourceObject": source[1],
        "destinationBucket": target[0],
        "destinationObject": target[1],
        "body": {},
        **conditions,
    }
    answer = google.call("storage", "objects.rewrite", **place)
    while not answer.get("done", True):
        answer = google.call("storage", "objects.rewrite", **place, rewriteToken=answer["rewriteToken"])


@dataclass(frozen=True, kw_only=True)
class PodFetchedAsset(AssetInBucket, WorkerResource):
    """An asset downloaded and copied by worker 0, which is near the bucket: `assets.fetch_on=pod`."""

    kind: ClassVar[str] = "asset"

    def downloads(self, context: Context) -> tuple[tuple[AssetFile, ...], dict[str, str]]:
        """Return the files with their addresses, and the tokens of those that need one."""
        secrets = self.vault.values()
        return self.content.files, {f.name: token for f in self.content.files if (token := token_for(f, secrets))}

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        self.delete_replaced(context)
        files, tokens = self.downloads(context)
        payload: FetchAssetRequest = {
            "bucket": self.bucket,
            "prefix": self.content.prefix,
            "files": {f.name: {"url": f.url or "", "sha256": f.sha256} for f in files},
            "manifest": manifest_text(files),
            "tokens": tokens,
        }
        self.follow(context, observed, FETCH_ASSET, payload)

    def follow(self, context: Context, observed: ObservedResources, command: Command[Q, FetchLine], payload: Q) -> None:
        """Let worker 0 do it; SSH may break off meanwhile. Raises WorkersFailedError."""
        fleet = self.fleet(context, observed)
        for attempt in range(FETCH_ATTEMPTS):
            progress, before = Progress(context, self.id), 0
            try:
                for line in fleet.stream(0, command, payload):
                    if "bytes" in line:
                        progress.advance(line["bytes"] - before)
                        before = line["bytes"]
            except WorkerError as error:
                if error.kind == "agent" or attempt + 1 == FETCH_ATTEMPTS:
                    detail = f":\n{error.detail.rstrip()}" if error.detail and command == BUILD_ASSET else ""
                    raise WorkersFailedError(f"{self.title}: {error}{detail}", [error]) from None
                context.clock.sleep(context.poll_seconds)
            else:
                return


def remote_argv(recipe: BuildRecipe) -> list[str]:
    """Return the command as it runs in the shipped code: `slipway trainer.X` is a module there."""
    return ["python", "-m", *recipe.argv[1:]] if recipe.argv[0] == OWN else list(recipe.argv)


@dataclass(frozen=True, kw_only=True)
class PodBuiltAsset(PodFetchedAsset):
    """An asset whose command runs on worker 0, in its venv and a copy of the code, with the secrets of the program."""

    code: str = field(compare=False)
    venv: str = field(compare=False)

    def apply(self, context: Context, observed: ObservedResources, diff: Diff) -> None:
        recipe = self.content.recipe
        assert recipe, "the plan gives builds only"
        payload: BuildAssetRequest = {
            "bucket": self.bucket,
            "prefix": self.content.prefix,
            "argv": remote_argv(recipe),
            "code": self.code,
            "venv": self.venv,
            "env": {ENDPOINT: os.environ[ENDPOINT]} if ENDPOINT in os.environ else {},
            "secrets": self.vault.values(),
        }
        self.follow(context, observed, BUILD_ASSET, payload)
