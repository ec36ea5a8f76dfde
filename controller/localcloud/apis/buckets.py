"""Cloud Storage v1: buckets and objects, except their contents (https://cloud.google.com/storage/docs/json_api/v1)."""

import asyncio
import re
import time
from typing import Any

from controller.localcloud.apis.objects import Blobs, Objects, StoredObject, check_conditions, object_resource
from controller.localcloud.http.call import (
    PROJECT_NUMBER,
    ApiCall,
    Handler,
    check_project,
    merge_patch,
    paginate,
    timestamp,
)
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam.judge import Policies, bucket_bindings
from controller.localcloud.store import Document, Store

_BUCKET_NAME = re.compile(r"[a-z0-9][-_.a-z0-9]{1,220}[a-z0-9]")
_IMMUTABLE_FIELDS = frozenset(
    ["id", "kind", "name", "selfLink", "timeCreated", "projectNumber", "metageneration", "etag", "location"]
)


class Storage:
    """Handlers of the API; `media` uploads and downloads contents."""

    def __init__(self, store: Store, objects: Objects, blobs: Blobs, policies: Policies) -> None:
        self._store = store
        self._objects = objects
        self._blobs = blobs
        self._policies = policies

    def handlers(self) -> dict[str, Handler]:
        table: dict[str, Handler] = {
            "buckets.insert": self._insert_bucket,
            "buckets.get": self._get_bucket,
            "buckets.list": self._list_buckets,
            "buckets.delete": self._delete_bucket,
            "buckets.patch": self._patch_bucket,
            "buckets.getIamPolicy": self._get_policy,
            "buckets.setIamPolicy": self._set_policy,
            "buckets.testIamPermissions": self._test_permissions,
            "buckets.getStorageLayout": self._layout,
            "managedFolders.list": self._managed_folders,
            "objects.get": lambda call: object_resource(self._object(call), call.root_url),
            "objects.list": self._list,
            "objects.delete": self._delete,
            "objects.patch": self._patch,
            "objects.copy": self._copy,
            "objects.rewrite": self._rewrite,
            "objects.move": self._move,
            "objects.compose": self._compose,
        }
        return {f"storage.v1:{name}": handler for name, handler in table.items()}

    def _insert_bucket(self, call: ApiCall) -> Document:
        check_project(call.required("project"))
        name = call.body.get("name", "")
        if not _BUCKET_NAME.fullmatch(name):
            raise ApiError(400, f"Invalid bucket name: '{name}'")
        if self._store.get("bucket", name):
            raise ApiError(409, "Your previous request to create the named bucket succeeded and you already own it.")
        moment = timestamp(time.time())
        location = (call.body.get("location") or "US").upper()
        bucket: Document = {
            "storageClass": "STANDARD",
            "iamConfiguration": {"uniformBucketLevelAccess": {"enabled": False}},
            **call.body,
            "kind": "storage#bucket",
            "id": name,
            "projectNumber": PROJECT_NUMBER,
            "metageneration": "1",
            "location": location,
            "locationType": "multi-region" if location in ("US", "EU", "ASIA") else "region",
            "timeCreated": moment,
            "updated": moment,
            "etag": "CAE=",
        }
        self._store.put("bucket", name, bucket)
        self._policies.create(f"buckets/{name}", bucket_bindings())
        return self._show_bucket(bucket, call)

    def _get_bucket(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        if call.query.get("projection") == "full":
            call.require_permission("storage.buckets.getIamPolicy", f"buckets/{bucket['name']}")
        return self._show_bucket(bucket, call)

    def _bucket(self, call: ApiCall) -> Document:
        return self._store.require("bucket", call.path["bucket"], "The specified bucket does not exist.")

    def _show_bucket(self, bucket: Document, call: ApiCall) -> Document:
        return {**bucket, "selfLink": f"{call.root_url}storage/v1/b/{bucket['name']}"}

    def _list_buckets(self, call: ApiCall) -> Document:
        check_project(call.required("project"))
        found = self._store.items("bucket", call.query.get("prefix", ""))
        shown = [self._show_bucket(bucket, call) for _, bucket in found]
        return {"kind": "storage#buckets", **paginate(call, shown, "items", "maxResults")}

    def _delete_bucket(self, call: ApiCall) -> Document:
        name = self._bucket(call)["name"]
        if not self._objects.is_empty(name):
            raise ApiError(409, "The bucket you tried to delete is not empty.")
        self._store.delete("bucket", name)
        self._store.delete("policy", f"buckets/{name}")
        return {}

    def _patch_bucket(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        check_conditions(StoredObject({**bucket, "generation": "0"}, ""), call.query)
        change = {key: value for key, value in call.body.items() if key not in _IMMUTABLE_FIELDS}
        changed = {
            **merge_patch(bucket, change),
            "metageneration": str(int(bucket["metageneration"]) + 1),
            "updated": timestamp(time.time()),
        }
        self._store.put("bucket", bucket["name"], changed)
        return self._show_bucket(changed, call)

    def _get_policy(self, call: ApiCall) -> Document:
        name = f"buckets/{self._bucket(call)['name']}"
        return {"kind": "storage#policy", "resourceId": f"projects/_/{name}", **self._policies.get(name)}

    def _set_policy(self, call: ApiCall) -> Document:
        name = f"buckets/{self._bucket(call)['name']}"
        policy = self._policies.set(name, dict(call.body), conflict=412)
        return {"kind": "storage#policy", "resourceId": f"projects/_/{name}", **policy}

    def _test_permissions(self, call: ApiCall) -> Document:
        resource = f"buckets/{self._bucket(call)['name']}"
        call.required("permissions")
        return {"kind": "storage#testIamPermissionsResponse", **call.test_permissions(resource)}

    def _layout(self, call: ApiCall) -> Document:
        bucket = self._bucket(call)
        return {
            "kind": "storage#storageLayout",
            "bucket": bucket["name"],
            "location": bucket["location"],
            "locationType": bucket["locationType"],
            "hierarchicalNamespace": {"enabled": False},
        }

    def _managed_folders(self, call: ApiCall) -> Document:
        self._bucket(call)
        return {"kind": "storage#managedFolders"}

    def _object(self, call: ApiCall) -> StoredObject:
        return self._objects.get(call.path["bucket"], call.path["object"], call.query)

    def _list(self, call: ApiCall) -> Document:
        for name in ("matchGlob", "softDeleted", "filter"):
            if name in call.query:
                raise ApiError(501, f"The emulated cloud does not know objects.list with {name}")
        items, prefixes, token = self._objects.list(call.path["bucket"], call.query)
        response: dict[str, Any] = {"kind": "storage#objects"}
        if items:
            response["items"] = [object_resource(stored, call.root_url) for stored in items]
        if prefixes:
            response["prefixes"] = prefixes
        if token:
            response["nextPageToken"] = token
        return response

    def _delete(self, call: ApiCall) -> Document:
        self._objects.delete(self._object(call))
        return {}

    def _patch(self, call: ApiCall) -> Document:
        return object_resource(self._objects.patch(self._object(call), call.body), call.root_url)

    def _duplicate(self, call: ApiCall, bucket: str, name: str) -> StoredObject:
        call.require_permission("storage.objects.get", f"buckets/{call.path['sourceBucket']}")
        self._objects.check_overwrite(call, bucket, name)
        source = self._objects.get(call.path["sourceBucket"], call.path["sourceObject"], call.query, "ifSource")
        # A body replaces the source's metadata; without one, the metadata is kept.
        digests = {key: source.body[key] for key in ("size", "md5Hash", "crc32c") if key in source.body}
        said = {key: value for key, value in call.body.items() if key not in digests}
        metadata = {**(said or source.body), **digests}
        return self._objects.put(bucket, name, metadata, self._blobs.link(source.blob), call.query)

    def _copy(self, call: ApiCall) -> Document:
        copied = self._duplicate(call, call.path["destinationBucket"], call.path["destinationObject"])
        return object_resource(copied, call.root_url)

    def _rewrite(self, call: ApiCall) -> Document:
        copied = self._duplicate(call, call.path["destinationBucket"], call.path["destinationObject"])
        size = copied.body["size"]
        return {
            "kind": "storage#rewriteResponse",
            "totalBytesRewritten": size,
            "objectSize": size,
            "done": True,
            "resource": object_resource(copied, call.root_url),
        }

    def _move(self, call: ApiCall) -> Document:
        bucket, name = call.path["bucket"], call.path["sourceObject"]
        source = self._objects.get(bucket, name, call.query, "ifSource")
        moved = self._objects.put(
            bucket, call.path["destinationObject"], source.body, self._blobs.link(source.blob), call.query
        )
        self._objects.delete(source)
        return object_resource(moved, call.root_url)

    async def _compose(self, call: ApiCall) -> Document:
        bucket = call.path["destinationBucket"]
        sources = []
        for part in call.body.get("sourceObjects", ()):
            conditions = part.get("objectPreconditions", {})
            wanted = {key: str(value) for key, value in {**conditions, "generation": part.get("generation")}.items()}
            wanted = {key: value for key, value in wanted.items() if value != "None"}
            sources.append(self._objects.get(bucket, part.get("name", ""), wanted))
        if not 1 <= len(sources) <= 32:
            raise ApiError(400, "compose takes 1 to 32 source objects")
        blob = await asyncio.to_thread(self._blobs.join, [source.blob for source in sources])
        digest = (await asyncio.to_thread(self._blobs.digest, blob)).resource_fields()
        del digest["md5Hash"]  # composite objects have none
        metadata = {**call.body.get("destination", {}), **digest, "componentCount": len(sources)}
        self._blobs.finish(blob)
        self._objects.check_overwrite(call, bucket, call.path["destinationObject"])
        stored = self._objects.put(bucket, call.path["destinationObject"], metadata, blob, call.query)
        return object_resource(stored, call.root_url)
