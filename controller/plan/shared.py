"""What all runs of a project share: services, account, bucket, network."""

from __future__ import annotations

from collections.abc import Iterator

from conf.schema import Config
from controller.resource import Resource
from controller.resources.accounts import ProjectRoles, ServiceAccount
from controller.resources.bucket import Bucket
from controller.resources.firewall import Firewall
from controller.resources.nat import Nat, Router
from controller.resources.network import Network, Subnet
from controller.resources.node import TAG
from controller.resources.services import Services


def shared_resources(config: Config, bucket: str) -> Iterator[Resource]:
    cloud, net, region = config.cloud, config.network, config.region
    services = Services(name="apis", apis=cloud.apis)
    yield services
    account = ServiceAccount(name=cloud.service_account, needs=(services.id,))
    yield account
    yield ProjectRoles(name=cloud.service_account, roles=cloud.roles, needs=(account.id,))
    yield Bucket(name=bucket, location=region, needs=(services.id,))
    network = Network(name=net.name, mtu=net.mtu, needs=(services.id,))
    yield network
    subnet = Subnet(name=f"{net.name}-{region}", region=region, network=net.name, cidr=net.cidr, needs=(network.id,))
    yield subnet
    if net.nat:
        router = Router(name=f"{net.name}-{region}", region=region, network=net.name, needs=(subnet.id,))
        yield router
        yield Nat(name=f"{net.name}-{region}", region=region, router=router.name, needs=(router.id,))
    yield Firewall(
        name=f"{net.name}-allow-ssh",
        network=net.name,
        allowed=("tcp:22",),
        source_ranges=tuple(sorted(net.ssh_source_ranges)),
        target_tags=(TAG,),
        needs=(network.id,),
    )
    yield Firewall(
        name=f"{net.name}-allow-internal-{region}",
        network=net.name,
        allowed=("icmp", "tcp", "udp"),
        source_ranges=(net.cidr,),
        target_tags=(),
        needs=(network.id,),
    )
