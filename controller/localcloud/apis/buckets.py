"""Cloud Storage v1: buckets and objects, except their contents (https://cloud.google.com/storage/docs/json_api/v1)."""

import asyncio
import re
import time
from dataclasses import dataclass
from typing import ClassVar

from controller.localcloud.apis.objects import Blobs, Objects, StoredObject, check_conditions, object_resource
from controller.localcloud.apis.service import Service
from controller.localcloud.http.call import PROJECT_NUMBER, ApiCall, check_project, merge_patch, paginate, timestamp
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam import bucket_bindings, format_etag, requested_version
from controller.localcloud.store import Document

_BUCKET_NAME = re.compile(r"(?!goog)(?!.*google)(?!.*[^.]{64})[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
"""See https://cloud.google.com/storage/docs/buckets#naming."""
_REGION = re.compile(r"[A-Z]+-[A-Z]+\d+")
_LARGER_PLACES = {
    **dict.fromkeys(("US", "EU", "ASIA"), "multi-region"),
    **dict.fromkeys(("NAM4", "EUR4", "EUR5", "EUR7", "EUR8", "ASIA1"), "dual-region"),
}
"""See https://cloud.google.com/storage/docs/locations."""
_KEPT_SECONDS = 7 * 86400
"""For how long a bucket keeps deleted objects unless it is told otherwise, and the shortest time but none."""
_IMMUTABLE_FIELDS = frozenset(
    ["id", "kind", "name", "selfLink", "timeCreated", "projectNumber", "metageneration", "etag", "location"]
)


@dataclass(eq=False)
class Buckets(Service):
    """Buckets, kind "bucket"."""

    objects: Objects
    methods: ClassVar = {
        "storage.v1:buckets.": "insert get list delete patch getIamPolicy setIamPolicy testIamPermissions "
        "getStorageLayout",
        "storage.v1:": "managedFolders.list",
    }

    def _insert(self, call: ApiCall) -> Document:
        check_project(call.required("project"))
        name = call.body.get("name", "")
        if not _BUCKET_NAME.fullmatch(name):
            raise ApiError(400, f"Invalid bucket name: '{name}'")
        if self.store.get("bucket", name):
            raise ApiError(409, "Your previous request to create the named bucket succeeded and you already own it.")
        kept = int((call.body.get("softDeletePolicy") or {}).get("retentionDurationSeconds", _KEPT_SECONDS))
        if kept and not _KEPT_SECONDS <= kept <= 90 * 86400:
            raise ApiError(400, "Soft delete policy retention duration must be 0, or between 7 and 90 days.")
        moment = timestamp(time.time())
        location = (call.body.get("location") or "US").upper()
        kind = "region" if _REGION.fullmatch(location) else _LARGER_PLACES.get(location)
        if kind is None:
            raise ApiError(400, "The specified location constraint is not valid.", reason="invalid")
        bucket: Document = {
            "storageClass": "STANDARD",
            **call.body,
            "softDeletePolicy": {"retentionDurationSeconds": str(kept), "effectiveTime": moment},
            "iamConfiguration": {
                "uniformBucketLevelAccess": {"enabled": False},
                "publicAccessPrevention": "inherited",
                **call.body.get("iamConfiguration", {}),
            },
            "kind": "storage#bucket",
            "id": name,
            "projectNumber": PROJECT_NUMBER,
            "metageneration": "1",
            "location": location,
            "locationType": kind,
            "timeCreated": moment,
            "updated": moment,
            "etag": format_etag(1),
        }
        self.store.put("bucket", name, bucket)
        self.policies.create(f"buckets/{name}", bucket_bindings())
        return self._show_bucket(bucket, call)

    def _get(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        if call.query.get("projection") == "full":
            call.require_permission("storage.buckets.getIamPolicy", f"buckets/{bucket['name']}")
        return self._show_bucket(bucket, call)

    def _bucket(self, call: ApiCall) -> Document:
        return self.store.require("bucket", call.path["bucket"], "The specified bucket does not exist.")

    def _show_bucket(self, bucket: Document, call: ApiCall) -> Document:
        return {**bucket, "selfLink": f"{call.root_url}storage/v1/b/{bucket['name']}"}

    def _list(self, call: ApiCall) -> Document:
        check_project(call.required("project"))
        found = self.store.items("bucket", call.query.get("prefix", ""))
        return paginate(call, [self._show_bucket(bucket, call) for _, bucket in found])

    def _delete(self, call: ApiCall) -> Document:
        name = self._bucket(call)["name"]
        if self.objects.list_names(name):
            raise ApiError(409, "The bucket you tried to delete is not empty.")
        self.store.delete("bucket", name)
        self.store.delete("policy", f"buckets/{name}")
        return {}

    def _patch(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        check_conditions(StoredObject({**bucket, "generation": "0"}, ""), call.query)
        change = {key: value for key, value in call.body.items() if key not in _IMMUTABLE_FIELDS}
        number = int(bucket["metageneration"]) + 1
        counted = {"metageneration": str(number), "etag": format_etag(number), "updated": timestamp(time.time())}
        changed = {**merge_patch(bucket, change), **counted}
        self.store.put("bucket", bucket["name"], changed)
        return self._show_bucket(changed, call)

    def _get_iam_policy(self, call: ApiCall) -> Document:
        name = f"buckets/{self._bucket(call)['name']}"
        return {"resourceId": f"projects/_/{name}", **self.policies.get(name, requested_version(call))}

    def _set_iam_policy(self, call: ApiCall) -> Document:
        name = f"buckets/{self._bucket(call)['name']}"
        return {"resourceId": f"projects/_/{name}", **self.policies.set(name, dict(call.body), conflict=412)}

    def _test_iam_permissions(self, call: ApiCall) -> Document:
        resource = f"buckets/{self._bucket(call)['name']}"
        call.required("permissions")
        return call.test_permissions(resource)

    def _get_storage_layout(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        place = {key: bucket[key] for key in ("location", "locationType")}
        return {"bucket": bucket["name"], **place, "hierarchicalNamespace": {"enabled": False}}

    def _managed_folders_list(self, call: ApiCall) -> Document:
        self._bucket(call)
        return {}


@dataclass(eq=False)
class StoredObjects(Service):
    """Objects, except their contents."""

    objects: Objects
    blobs: Blobs
    methods: ClassVar = {"storage.v1:objects.": "get list delete patch copy rewrite move compose"}

    def _object(self, call: ApiCall) -> StoredObject:
        return self.objects.get(call.path["bucket"], call.path["object"], call.query)

    def _get(self, call: ApiCall) -> Document:
        return object_resource(self._object(call), call.root_url)

    def _list(self, call: ApiCall) -> Document:
        for name in ("matchGlob", "softDeleted", "filter"):
            if name in call.query:
                raise ApiError(501, f"The emulated cloud does not know objects.list with {name}")
        stored, prefixes, token = self.objects.list(call.path["bucket"], call.query)
        items = [object_resource(one, call.root_url) for one in stored]
        answer = {"items": items, "prefixes": prefixes, "nextPageToken": token}
        return {key: value for key, value in answer.items() if value}

    def _delete(self, call: ApiCall) -> Document:
        self.objects.delete(self._object(call))
        return {}

    def _patch(self, call: ApiCall) -> Document:
        return object_resource(self.objects.patch(self._object(call), call.body), call.root_url)

    def _copy(self, call: ApiCall) -> Document:
        bucket, name = call.path["destinationBucket"], call.path["destinationObject"]
        call.require_permission("storage.objects.get", f"buckets/{call.path['sourceBucket']}")
        self.objects.check_overwrite(call, bucket, name)
        source = self.objects.get(call.path["sourceBucket"], call.path["sourceObject"], call.query, "ifSource")
        # A body replaces the source's metadata; without one, the metadata is kept.
        digests = {key: source.body[key] for key in ("size", "md5Hash", "crc32c") if key in source.body}
        said = {key: value for key, value in call.body.items() if key not in digests}
        metadata = {**(said or source.body), **digests}
        copied = self.objects.put(bucket, name, metadata, self.blobs.link(source.blob), call.query)
        return object_resource(copied, call.root_url)

    def _rewrite(self, call: ApiCall) -> Document:
        copied = self._copy(call)
        return {"totalBytesRewritten": copied["size"], "objectSize": copied["size"], "done": True, "resource": copied}

    def _move(self, call: ApiCall) -> Document:
        bucket, name = call.path["bucket"], call.path["sourceObject"]
        source = self.objects.get(bucket, name, call.query, "ifSource")
        moved = self.objects.put(
            bucket, call.path["destinationObject"], source.body, self.blobs.link(source.blob), call.query
        )
        self.objects.delete(source)
        return object_resource(moved, call.root_url)

    async def _compose(self, call: ApiCall) -> Document:
        bucket = call.path["destinationBucket"]
        sources = []
        for part in call.body.get("sourceObjects", ()):
            conditions = {**part.get("objectPreconditions", {}), "generation": part.get("generation")}
            wanted = {key: str(value) for key, value in conditions.items() if value is not None}
            sources.append(self.objects.get(bucket, part.get("name", ""), wanted))
        if not 1 <= len(sources) <= 32:
            raise ApiError(400, "compose takes 1 to 32 source objects")
        blob = await asyncio.to_thread(self.blobs.join, [source.blob for source in sources])
        digest = (await asyncio.to_thread(self.blobs.digest, blob)).resource_fields()
        del digest["md5Hash"]  # composite objects have none
        components = sum(source.body.get("componentCount", 1) for source in sources)
        metadata = {**call.body.get("destination", {}), **digest, "componentCount": components}
        self.blobs.finish(blob)
        self.objects.check_overwrite(call, bucket, call.path["destinationObject"])
        stored = self.objects.put(bucket, call.path["destinationObject"], metadata, blob, call.query)
        return object_resource(stored, call.root_url)
