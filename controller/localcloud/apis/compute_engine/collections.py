"""Kinds of Compute resources that share the methods insert, get, list and delete, and what is special about some."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from controller.localcloud.http.call import PROJECT, ApiCall
from controller.localcloud.store import Document


@dataclass(frozen=True)
class Collection:
    """Kind of resource, such as `networks`, each of them a `network`; `scope` is global, region or zone.

    `methods` is the name of the collection in the names of its methods if it differs from that in paths.
    """

    plural: str
    singular: str
    scope: str
    methods: str = ""

    def path(self, call: ApiCall, name: str) -> str:
        return f"{parent_of(call)}/{self.plural}/{name}"

    @property
    def spoken(self) -> str:
        """Return the kind as refusals call it, such as `instance_template`."""
        return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in self.singular)


def parent_of(call: ApiCall) -> str:
    """Return the zone, region or global scope of a call."""
    place = next((f"{scope}s/{call.path[scope]}" for scope in ("zone", "region") if scope in call.path), "global")
    return f"projects/{PROJECT}/{place}"


SUBNETWORKS = Collection("subnetworks", "subnetwork", "region")
INSTANCES = Collection("instances", "instance", "zone")
POLICIES = Collection("resourcePolicies", "resourcePolicy", "region")
TEMPLATES = Collection("instanceTemplates", "instanceTemplate", "region", methods="regionInstanceTemplates")
GROUPS = Collection("instanceGroupManagers", "instanceGroupManager", "zone")
COLLECTIONS = (
    Collection("networks", "network", "global"),
    SUBNETWORKS,
    Collection("routers", "router", "region"),
    Collection("firewalls", "firewall", "global"),
    INSTANCES,
    Collection("disks", "disk", "zone"),
    Collection("addresses", "address", "region"),
    POLICIES,
    TEMPLATES,
    GROUPS,
)
READ_ONLY = frozenset({TEMPLATES.plural, POLICIES.plural, GROUPS.plural})
"""Kinds without `patch` and `update` here."""


@dataclass(frozen=True)
class Rules:
    """What is special about a kind of resource.

    Attributes:
        refuse: raises the error of a fault for a request to `insert`.
        prepare: returns the document to store for a request to `insert`, or None for that of `Networks`.
        effect: returns the effect of its operation.
        users: returns the paths of resources that keep this one from being deleted.
        show: changes a resource as it is shown, of which it gets path and stored document.
        leave: is called as a deletion begins, and may refuse it.
        gone: is called at the end of the deletion of any resource.
    """

    refuse: Callable[[ApiCall], None] = lambda _: None
    prepare: Callable[[ApiCall, str, Document], Document | None] = lambda *_: None
    effect: Callable[[str, Document], str | None] = lambda *_: None
    users: Callable[[str], list[str]] = lambda _: []
    show: Callable[[str, Document, Document], None] = lambda *_: None
    leave: Callable[[str], None] = lambda _: None
    gone: Callable[[str], Awaitable[None]] | None = None
