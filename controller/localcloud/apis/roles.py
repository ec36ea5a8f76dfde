"""Custom roles of the project: iam v1 (https://cloud.google.com/iam/docs/creating-custom-roles)."""

import re

from conf.schema.infra.permissions import all_permissions
from controller.localcloud.http.call import ApiCall, Handler, check_project, merge_patch, paginate
from controller.localcloud.http.errors import ApiError
from controller.localcloud.iam.policies import PROJECT_RESOURCE, format_etag
from controller.localcloud.store import Document, Store

_ID = re.compile(r"[a-zA-Z0-9_.]{3,64}")


class CustomRoles:
    """Handlers of roles, stored by full name, kind "role"."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def handlers(self) -> dict[str, Handler]:
        roles = "iam.v1:projects.roles."
        return {
            f"{roles}create": self._create,
            f"{roles}get": self._get,
            f"{roles}list": self._list,
            f"{roles}patch": self._patch,
            f"{roles}delete": self._delete,
        }

    def _create(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        role_id = call.body.get("roleId", "")
        if not _ID.fullmatch(role_id):
            raise ApiError(400, f"The role ID {role_id!r} must match [a-zA-Z0-9_.]{{3,64}}")
        name = f"{PROJECT_RESOURCE}/roles/{role_id}"
        if self._store.get("role", name):
            raise ApiError(409, f"A role named {role_id} in {PROJECT_RESOURCE} already exists.")
        return self._save({"stage": "ALPHA", **call.body.get("role", {}), "name": name})

    def _save(self, role: Document) -> Document:
        for permission in role.get("includedPermissions", ()):
            if permission not in all_permissions():
                raise ApiError(400, f"Permission {permission} is not valid.")
        saved = {**role, "etag": format_etag(self._store.next_number("role"))}
        self._store.put("role", saved["name"], saved)
        return saved

    def _get(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        name = f"{PROJECT_RESOURCE}/roles/{call.path['rolesId']}"
        role = self._store.get("role", name)
        if role is None:
            raise ApiError(404, f"The role named {name} was not found.")
        return role

    def _list(self, call: ApiCall) -> Document:
        check_project(call.path["projectsId"])
        roles = [role for _, role in self._store.items("role") if not role.get("deleted") or call.flag("showDeleted")]
        return paginate(call, roles, "roles")

    def _patch(self, call: ApiCall) -> Document:
        role = self._get(call)
        mask = [name for name in call.query.get("updateMask", "").split(",") if name]
        change = {key: value for key, value in call.body.items() if not mask or key in mask}
        return self._save({**merge_patch(role, change), "name": role["name"]})

    def _delete(self, call: ApiCall) -> Document:
        return self._save({**self._get(call), "deleted": True})  # it can be undeleted for seven days
