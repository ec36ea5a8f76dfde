"""Interface of a plane: one of Google's APIs through which slices are made, found, reached and deleted.

`planes.py` lists the planes. Nothing but a plane's own modules knows its API.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from conf.schema.config import Config
from conf.schema.topology import Topology
from controller.context import Context
from controller.core.finding import Issue
from controller.resources.pod.provisioner import Place, Provisioner, ProvisionerName, SliceSpec, SliceStatus
from controller.resources.pod.refusals import PlaneAdvice
from controller.ssh.login import WorkerVms

CONSOLE = "https://console.cloud.google.com/compute"


@dataclass(frozen=True)
class PlaneMethods:
    """Methods of Google that a controller calls for a pod: `tpu projects.locations.nodes.get`, or permissions alone.

    Attributes:
        check: in the checks of quota and offer.
        observe: to look at a pod.
        own: to create and delete one.
        change: to change, stop or start one.
        add_key: to add an SSH key.
    """

    check: tuple[str, ...]
    observe: tuple[str, ...]
    own: tuple[str, ...]
    change: tuple[str, ...]
    add_key: tuple[str, ...]


@dataclass(frozen=True)
class Leftover:
    """What a creation or deletion left behind: it bills nothing. `created`: seconds since the epoch."""

    kind: str
    name: str
    region: str
    created: float


def is_of_run(config: Config, name: str) -> bool:
    """Return whether a pod or VM of this name is a run's: its pod, one of its samplers, or another one of its sweep."""
    return name == config.pod_name or name.startswith(f"{config.pod_name}-")


class PlaneChecks(Protocol):
    """What a plane can tell of a config before anything is made; all but `offers` name the key to change.

    A method that is given a context asks Google, and raises GoogleError where Google does not answer.
    """

    def offers(self, topology: Topology) -> bool:
        """Return whether the plane has the type at all."""
        ...

    def obstacles(self, config: Config) -> Iterator[Issue]:
        """Yield why the plane cannot serve a config."""
        ...

    def tier_obstacles(self, config: Config, tier: str) -> Iterator[Issue]:
        """Yield why the plane cannot serve a config in that tier."""
        ...

    def image(self, config: Config) -> Iterator[Issue]:
        """Yield what is wrong with tpu.runtime_version: an error if the image is certainly another one's."""
        ...

    def offered_types(self, config: Config, context: Context) -> Iterator[Issue]:
        """Yield the zones in which Google does not offer the type."""
        ...

    def offered_images(self, config: Config, context: Context) -> Iterator[Issue]:
        """Yield the zones in which Google does not offer the image."""
        ...

    def listing(self, config: Config, context: Context) -> Iterator[Issue]:
        """Yield that the caller may not list pods; without that permission nobody can create one."""
        ...

    def quota(self, config: Config, context: Context, chips: int | None = None) -> Iterator[Issue]:
        """Yield the pools of quota that a request draws on: an error if no place has enough, a note if one has.

        What others hold of a pool is a warning: they may end, and Google notices late that they have.
        chips: that are needed at the same time, if the run has more slices; None: those of the slice.
        """
        ...


class Plane(Protocol):
    """One API that holds slices.

    Attributes:
        title: its name in a sentence.
        queues: those of its provisioners whose requests wait for capacity until they expire or are deleted.
        checks: what it can tell of a config.
        methods: those that a controller calls.
        advice: what to do about its refusals.
        account_roles: predefined roles that let an account create and delete slices, besides those of cloud.roles.
    """

    title: ClassVar[str]
    queues: ClassVar[frozenset[ProvisionerName]]
    checks: ClassVar[PlaneChecks]
    methods: ClassVar[PlaneMethods]
    advice: ClassVar[PlaneAdvice]
    account_roles: ClassVar[tuple[str, ...]]

    def delete_permission(self, provisioner: ProvisionerName) -> str:
        """Return the permission that the workers' service account needs so that a pod can delete itself."""
        ...

    def spec(self, config: Config) -> SliceSpec:
        """Return the slice that a config asks of this plane."""
        ...

    def provisioner_for(self, config: Config, tier: str) -> ProvisionerName:
        """Return the provisioner that creates a config's slice in a tier."""
        ...

    def provisioners(self, create_seconds: float) -> Mapping[ProvisionerName, Provisioner]:
        """Return the ways to create a slice; one that may still bring up a slice later comes first.

        `create_seconds` is how long one creation may take.
        """
        ...

    def slices(self, context: Context) -> Iterator[SliceStatus]:
        """Yield every slice of the project and every request without one, in all zones, whoever made them."""
        ...

    def leftovers(self, context: Context) -> Iterator[Leftover]:
        """Yield what no slice of the project uses any more."""
        ...

    def delete_leftover(self, context: Context, leftover: Leftover) -> None:
        """Delete it if it is of this plane; no error if it is gone or in use."""
        ...

    def vms(self, context: Context, name: str, status: SliceStatus) -> WorkerVms:
        """Return the VMs of an observed slice."""
        ...

    def deletions(self, context: Context, name: str, zone: str) -> list[str]:
        """Return the URLs that delete a slice by the method DELETE, in order; those of what is absent answer 404."""
        ...

    def console_url(self, project: str, name: str, place: Place) -> str:
        """Return the page of Google's console about a slice, with its state and graphs."""
        ...

    def delete_by_hand(self, context: Context, name: str, zone: str) -> None:
        """Delete the VMs as Google does when it preempts them, and wait; what requested them stays.

        Raises OperationFailedError if Google accepted the deletion, and then it failed.
        """
        ...

    def request_service_agent(self, context: Context, zone: str) -> None:
        """Request the account with which Google makes slices in the project."""
        ...

    def cannot_stop(self, name: str, spec: SliceSpec, place: Place) -> str:
        """Return why Google cannot stop such a slice and start it again, or ''."""
        ...

    def start(self, context: Context, name: str, zone: str, seconds: float) -> None:
        """Start a stopped slice within that many seconds. Raises GoogleError if there is no capacity."""
        ...

    def stop(self, context: Context, name: str, zone: str, seconds: float) -> None:
        """Stop a slice; after that, only its disks are billed."""
        ...
