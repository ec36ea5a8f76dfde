"""The run itself: its name, how its workers are reached, and what happens when things go wrong or end."""

from typing import Annotated, Literal

from pydantic import Field, StringConstraints

from conf.schema.base import VOLATILE, Strict


class Ssh(Strict):
    user: Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,31}$")] = Field(
        description="our name on the workers; under OS Login Google gives us another"
    )
    method: Literal["auto", "external", "iap", "internal"] = Field(
        description="the way to the workers; auto: the external address if a firewall rule admits this machine, else "
        "Google's Identity-Aware Proxy if one admits that, else the internal address"
    )
    host_keys: Literal["guest_attributes", "trust_on_first_use"] = Field(
        description="which host key a worker must show: the one that Google vouches for, or always the first"
    )
    os_login: Literal["auto"] | bool = Field(
        description="is our key put into our OS Login profile, not into the node's metadata? auto: as the project wants"
    )
    connect_timeout_seconds: float = Field(gt=0)
    ready_timeout_seconds: float = Field(gt=0, description="how long a fresh worker may refuse SSH")


class Run(Strict):
    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9]([-_a-z0-9]{0,40}[a-z0-9])?$")]
    seed: int = Field(ge=0, lt=2**31)
    compile_cache: Annotated[bool, VOLATILE] = Field(
        description="the trainer's compiled programs are kept beside the run's results, for replaced VMs"
    )
    state_dir: Annotated[str, VOLATILE] = Field(description="keys, events and the emulated cloud live here")


ProgramResponse = Literal["restart_program", "restart_worker", "replace_node", "move_zone", "give_up"]
PodResponse = Literal["replace_node", "move_zone", "give_up"]


class RecoveryPolicy(Strict):
    """What is done about each verdict. What cannot be done is escalated: a program cannot be started on a worker that
    does not answer, Google restarts no single worker of several, an adopted pod is not replaced.
    """

    preempted: PodResponse = Field(description="the pod was taken away")
    maintenance: Literal["wait"] | ProgramResponse = Field(description="wait: for as long as a creation may take")
    unhealthy_host: ProgramResponse = Field(description="Google, libtpu or a missing chip say that a host is sick")
    worker_lost: ProgramResponse = Field(description="a worker does not answer, or its program was killed from outside")
    network_lost: Literal["wait", "give_up"] = Field(description="neither workers nor Google's API can be reached")
    hung: ProgramResponse = Field(
        description="no step and no word for hang_timeout_seconds; the stacks of all workers are kept first"
    )
    out_of_hbm: ProgramResponse = Field(description="the TPU's memory")
    out_of_ram: ProgramResponse = Field(description="the memory of a host")
    disk_full: ProgramResponse = Field(description="the disk of a worker")
    program_error: ProgramResponse = Field(description="everything else that the program may end with")
    device_mismatch: ProgramResponse = Field(description="other devices than planned, on all workers")
    workers_disagree: ProgramResponse = Field(description="code, config or packages differ between workers")
    setup_failure: ProgramResponse = Field(description="a worker could not be made ready")


class Recovery(Strict):
    driver: Literal["laptop", "bastion"] = Field(
        description="who sees the run through: the machine of `up`, or a small VM that `up` makes beside the pod"
    )
    lease_duration_seconds: float = Field(
        ge=2, description="silence of the controller that acts on a pod after which another one may"
    )
    max_preemptions: int = Field(
        ge=0, description="go on at most this often after the pod or a part of it was lost, or hung, in one run"
    )
    max_create_attempts: int = Field(ge=1, description="creations that may fail for want of capacity")
    max_program_failures: int = Field(
        ge=0,
        description="start the program again at most this often after an error of its own; a newer checkpoint "
        "makes it begin anew",
    )
    max_without_progress: int = Field(
        ge=1, description="ends in a row without a newer checkpoint after which a run is given up, preemptions apart"
    )
    poll_seconds: float = Field(gt=0, description="how often the node's state is asked for while a run is followed")
    heartbeat_timeout_seconds: float = Field(
        gt=5, description="silence of a worker, while others speak, after which it is lost; they speak every 5 s"
    )
    hang_timeout_seconds: float | None = Field(
        gt=0,
        description="time without a step or a word that is a hang; null: ten times the longest wait for a step yet, at "
        "least 900",
    )
    preemption_signal: Literal["SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2"] | None = Field(
        description="the signal that all processes of your own program get when Google says that their VM goes away; "
        "null: none. The bundled trainer gets SIGTERM"
    )
    policy: RecoveryPolicy


class Cleanup(Strict):
    on_success: Literal["delete", "keep"] = Field(description="the pod, once the run has finished")
    on_failure: Literal["delete", "keep"] = Field(description="the pod, once the program has failed")
    idle_minutes: float | None = Field(
        gt=0, description="minutes without a program or a login after which the pod deletes itself; null: never"
    )
