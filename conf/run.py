"""The run itself: its name, how its workers are reached, and what happens when things go wrong or end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.strict import VOLATILE, Strict


class Ssh(Strict):
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        description="our name on the workers; under OS Login Google gives us another"
    )
    method: Literal["auto", "external", "iap", "internal"] = Field(
        description="the way to the workers; auto: the external address if a firewall rule admits this machine, else "
        "Google's Identity-Aware Proxy if one admits that, else the internal address"
    )
    host_keys: Literal["guest_attributes", "pin_first"] = Field(
        description="which host key a worker must show: the one that Google vouches for, or always the first"
    )
    os_login: Literal["auto"] | bool = Field(
        description="is our key put into our OS Login profile, not into the node's metadata? auto: as the project wants"
    )
    connect_seconds: float = Field(gt=0)
    warm_up_seconds: float = Field(gt=0, description="how long a fresh worker may refuse SSH")


class Run(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-_a-z0-9]{0,40}[a-z0-9])?$")]
    seed: int = Field(ge=0, lt=2**31)
    state_dir: Annotated[str, VOLATILE] = Field(description="keys, events and the emulated cloud live here")


class Recovery(Strict):
    max_preemptions: int = Field(ge=0, description="replace the pod at most this often in one run")
    max_create_attempts: int = Field(ge=1, description="creations that may fail for want of capacity")
    poll_seconds: float = Field(gt=0, description="how often the node's state is asked for while a run is followed")


class Cleanup(Strict):
    on_success: Literal["delete", "keep"] = Field(description="the pod, once the run has finished")
    on_failure: Literal["delete", "keep"] = Field(description="the pod, once the program has failed")
    idle_minutes: float | None = Field(
        gt=0, description="minutes without a program or a login after which the pod deletes itself; null: never"
    )
