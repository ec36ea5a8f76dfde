"""IAM policies of the project, buckets and other resources, guarded by etags. A change takes effect late."""

import base64
import re
import time
from typing import Any

from controller.localcloud.http.call import PROJECT
from controller.localcloud.http.errors import ApiError
from controller.localcloud.settings import Settings
from controller.localcloud.store import Document, Store

PROJECT_RESOURCE = f"projects/{PROJECT}"
_MEMBER = re.compile(
    r"(allUsers|allAuthenticatedUsers|(user|serviceAccount|group|domain|project(?:Owner|Editor|Viewer)|deleted:\w+):\S+)"
)
_OPERATIONS_UNTIL_EFFECTIVE = 10
"""Google says typically two minutes, up to seven: https://cloud.google.com/iam/docs/access-change-propagation."""


class Policies:
    """All policies by resource, kind "policy" in the store.

    The name of a resource is `projects/ID`, `buckets/NAME`, or the path of an instance or a service account.
    """

    def __init__(self, store: Store, settings: Settings) -> None:
        self._store, self._settings = store, settings

    def get(self, resource: str) -> Document:
        """Return the policy as last set, whether it is in effect yet or not."""
        stored = self._store.get("policy", resource) or {}
        return {
            "version": stored.get("version", 1),
            "etag": stored.get("etag", format_etag(0)),
            "bindings": stored.get("bindings", []),
        }

    def effective_bindings(self, resource: str) -> list[Document]:
        stored = self._store.get("policy", resource) or {}
        late = time.time() < stored.get("effectiveAt", 0)
        return stored["former"] if late else stored.get("bindings", [])

    def create(self, resource: str, bindings: list[Document]) -> None:
        """Give a new resource the policy that it has from the start."""
        etag = format_etag(self._store.next_number("policy"))
        self._store.put("policy", resource, {"version": 1, "etag": etag, "bindings": bindings})

    def set(self, resource: str, policy: Document, *, conflict: int) -> Document:
        """Replace the policy; raise ApiError `conflict` if its etag is not the current one."""
        current = self.get(resource)
        if policy.get("etag") not in (None, "", current["etag"]):
            raise ApiError(
                conflict,
                "There were concurrent policy changes. Please retry the whole read-modify-write with exponential "
                "backoff.",
                status="ABORTED",
                reason="conflict" if conflict == 409 else "conditionNotMet",
            )
        bindings = [binding for binding in policy.get("bindings", ()) if binding.get("members")]
        for binding in bindings:
            self._check_role(binding.get("role", ""))
            for member in binding["members"]:
                if not _MEMBER.fullmatch(member):
                    raise ApiError(400, f"Invalid value for member: {member}")
                self._check_account(member)
        changed: dict[str, Any] = {
            "version": 3 if any(binding.get("condition") for binding in bindings) else 1,
            "etag": format_etag(self._store.next_number("policy")),
            "bindings": bindings,
        }
        stored = changed
        if delay := self._settings.delay(_OPERATIONS_UNTIL_EFFECTIVE):
            stored = {**changed, "former": self.effective_bindings(resource), "effectiveAt": time.time() + delay}
        self._store.put("policy", resource, stored)
        return changed

    def _check_role(self, role: str) -> None:
        custom = role.startswith(f"{PROJECT_RESOURCE}/roles/")
        if custom and self._store.get("role", role) is None:
            raise ApiError(400, f"Role {role} is not supported for this resource.")

    def _check_account(self, member: str) -> None:
        kind, _, email = member.partition(":")
        own = email.endswith(f"@{PROJECT}.iam.gserviceaccount.com")
        if kind == "serviceAccount" and own and not is_visible(self._store.get("serviceAccount", email)):
            raise ApiError(400, f"Service account {email} does not exist.")


def is_visible(account: Document | None) -> bool:
    """Return whether IAM shows an account; reads are eventually consistent after its creation."""
    return account is not None and time.time() >= account.get("visibleAt", 0)


def bucket_bindings() -> list[Document]:
    """Return the bindings of a new bucket: https://cloud.google.com/storage/docs/access-control/iam#convenience-values.

    Through these alone an Owner or Editor of the project may use the bucket's objects.
    """
    owners, readers = [f"projectEditor:{PROJECT}", f"projectOwner:{PROJECT}"], [f"projectViewer:{PROJECT}"]
    return [
        {"role": "roles/storage.legacyBucketOwner", "members": owners},
        {"role": "roles/storage.legacyBucketReader", "members": readers},
        {"role": "roles/storage.legacyObjectOwner", "members": owners},
        {"role": "roles/storage.legacyObjectReader", "members": readers},
    ]


def format_etag(number: int) -> str:
    return base64.b64encode(number.to_bytes(8, "big")).decode()
