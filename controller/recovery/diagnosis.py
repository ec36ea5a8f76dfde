"""Diagnose a run: one pure function from an observation to a verdict with its evidence.

Nothing is looked up or changed here: `controller/run/follow.py` observes, `responses.py` decides.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from conf.schema.program import Program
from controller.recovery.responses import SHELL_SIGNALS, Observation, Verdict, VerdictKind, WorkerStatus, code_text
from controller.recovery.watches import (
    KILLED_CHILD_PATTERN,
    FailureCause,
    cause_of_exit,
    first_at_barrier,
    last_words,
    match_failure,
    only_lost_peers,
)
from controller.resources.pod.provisioner import PodStatus

STOPPED_SECONDS = 10.0
"""A program that a signal has stopped for this long does not resume by itself."""
WHOLE_POD_FACTOR = 3.0
"""Silence of every worker may be a network problem: wait this many times longer than for one worker."""
NEARLY_FULL_GB = 0.05
GONE_STATES = frozenset({"ABSENT", "PREEMPTED", "TERMINATED", "STOPPED", "STOPPING", "DELETING",
                         "SUSPENDED", "SUSPENDING",
                  "GONE", "FAILED", "EXPIRED", "HIDING", "HIDDEN"})  # fmt: skip
"""States of a pod that is gone or about to go."""
NOT_USABLE_STATES = frozenset({"REPAIRING", "RESTARTING", "REIMAGING", "STARTING", "CREATING"})
UNHEALTHY_HEALTHS = frozenset({"TIMEOUT", "UNHEALTHY_TENSORFLOW", "UNHEALTHY_TOPOLOGY"})
UNHEALTHY_SYMPTOMS = frozenset({"MESH_BUILD_FAIL", "EXECUTE_TIMED_OUT"})
TRAINER_EXIT_CODES = {
    3: VerdictKind.DEVICE_MISMATCH,
    4: VerdictKind.WORKERS_DISAGREE,
    5: VerdictKind.CORRUPTION,
    6: VerdictKind.WORKER_LOST,  # that of its samplers
}
"""Exit codes of the bundled trainer; a program of one's own has those of `program.exit_codes`."""
SAVED_EXIT_CODE = 75
"""Exit code of a program that saved its state after a request to stop, as the bundled trainer does."""
NOTICE_MESSAGES = {
    "": "its program received a stop request",
    "preemption": "its program received a preemption notice",
    "maintenance": "its program received a maintenance notice",
    "shutdown": "its program received a shutdown notice",
}
HARDWARE_FAULT = re.compile(r"^hardware fault: (?:worker (\d+(?: or \d+)*)|some worker): (.{1,300})", re.MULTILINE)
"""What a program prints before it exits because hardware has changed bits on a worker."""
MAX_FAULTS = 4
EXTERNAL_SIGNALS = frozenset({"SIGKILL", "SIGTERM", "SIGHUP"})


def exit_codes(program: Program) -> dict[int, VerdictKind]:
    """Return the exit codes by which a program tells what is wrong."""
    if program.kind == "trainer":
        return TRAINER_EXIT_CODES
    return {code: VerdictKind(kind) for code, kind in program.exit_codes.items()}


def diagnose(observation: Observation) -> Verdict:
    """Return the verdict of the first rule that applies; the state of the pod may explain what the workers show."""
    for rule in RULES:
        if verdict := rule(observation):
            return _explained_by_pod(verdict, observation.pod) if observation.pod else verdict
    return Verdict(VerdictKind.RUNNING, _pod_remarks(observation))


def _finished(observation: Observation) -> Verdict | None:
    if observation.workers and all(w.ended and w.code == 0 for w in observation.workers):
        return Verdict(VerdictKind.FINISHED, ("the program exited with code 0 on every worker",))
    return None


def _user_requested(observation: Observation) -> Verdict | None:
    if observation.cancelled:
        return Verdict(VerdictKind.CANCELLED, ("the run was ended on request",))
    return Verdict(VerdictKind.OVER_BUDGET, (observation.over_budget,)) if observation.over_budget else None


def _pod_gone(observation: Observation) -> Verdict | None:
    """Report a pod that no longer exists or cannot run programs."""
    pod = observation.pod
    if pod is None:
        return None
    if pod.replaced:
        return Verdict(VerdictKind.PREEMPTED, ("the node was replaced",))
    if pod.state in GONE_STATES:
        return Verdict(VerdictKind.PREEMPTED, (f"the node is {_state_text(pod.state, ABSENT='gone')}",))
    if pod.state in NOT_USABLE_STATES:
        return Verdict(VerdictKind.MAINTENANCE, (f"the node is {_state_text(pod.state)}",))
    return None


def _preemption_notice(observation: Observation) -> Verdict | None:
    """Report a preemption notice to a VM on which programs have ended; Google's API confirms it later."""
    told = [i for i, w in enumerate(observation.workers) if w.notice == "preemption"]
    ended = [i for i, w in enumerate(observation.workers) if w.ended and w.code != 0]
    if not told or not ended:
        return None
    saved = all(observation.workers[i].code == SAVED_EXIT_CODE for i in ended)
    how = "its program saved its state and exited" if saved else _exit_description(observation.workers[ended[0]])
    message = (f"worker {told[0]} received a preemption notice", how)
    return Verdict(
        VerdictKind.PREEMPTED, message, told[0], certain=all(w.ended for w in observation.workers), from_notice=True
    )


def _network_lost(observation: Observation) -> Verdict | None:
    """Report that nothing is reachable; that does not mean a preemption."""
    if observation.pod is not None or any(w.ended for w in observation.workers):
        return None
    if all(w.unreachable or w.silent_seconds >= observation.lost_seconds for w in observation.workers):
        heard = min((w.silent_seconds for w in observation.workers), default=0.0)
        said = f"the last message from a worker came {heard:.0f} s ago" if heard else "no worker responds either"
        return Verdict(VerdictKind.NETWORK_LOST, ("Google's API does not respond", said))
    return None


def _setup_failed(observation: Observation) -> Verdict | None:
    """Report which part of the setup failed on the workers, before the program started."""
    if observation.faulty:
        return Verdict(VerdictKind.UNHEALTHY_HOST, (observation.setup_error,), observation.faulty[0])
    if observation.devices:
        usual = max(set(observation.devices), key=observation.devices.count)
        odd = [i for i, found in enumerate(observation.devices) if found != usual]
        table = "; ".join(f"worker {i}: {found}" for i, found in enumerate(observation.devices))
        if odd and observation.devices.count(usual) > len(odd):
            return Verdict(
                VerdictKind.UNHEALTHY_HOST, (workers_and("has different devices than the rest", odd), table), odd[0]
            )
        return Verdict(VerdictKind.DEVICE_MISMATCH, (observation.setup_error or table,))
    if observation.wrong_devices:
        return Verdict(VerdictKind.DEVICE_MISMATCH, (observation.setup_error,))
    if not observation.setup_error:
        return None
    if away := [i for i, w in enumerate(observation.workers) if w.unreachable]:
        everyone = len(away) == len(observation.workers)
        return Verdict(VerdictKind.WORKER_LOST, (observation.setup_error,), away[0], tuple(away), everyone)
    found = match_failure(f"{observation.setup_error}\n{observation.setup_details}")
    causes = {FailureCause.DISK: VerdictKind.DISK_FULL, FailureCause.HOST: VerdictKind.UNHEALTHY_HOST}
    kind = causes.get(found, VerdictKind.SETUP_FAILURE) if found else VerdictKind.SETUP_FAILURE
    kind = VerdictKind.DISK_FULL if observation.disk_full else kind
    worker = next((i for i, w in enumerate(observation.workers) if w.error), None)
    return Verdict(kind, (observation.setup_error,), worker)


def _program_failed(observation: Observation) -> Verdict | None:
    """Report the first failed program; one that only lost its peers points to another worker."""
    failed = [(i, w) for i, w in enumerate(observation.workers) if w.ended and w.code != 0 and not w.stop_requested]
    if not failed:
        return None
    # Three seconds: the workers' clocks differ a little, and so does the time that a process takes to die.
    first = min(w.ended_at for _, w in failed)
    together = [(i, w) for i, w in failed if w.ended_at <= first + 3.0]
    worker, end = min(together, key=lambda item: (_is_secondary(item[1]), item[1].ended_at))
    if away := observation.silent_workers:
        return _workers_lost(observation, away)
    if _is_secondary(end) and (cause := _first_to_exit(observation)):
        return cause
    if _is_secondary(end):
        others = any(not w.ended for w in observation.workers)
        message = (
            f"worker {worker}: {_exit_description(end)}: it lost the other workers",
            last_words(end.log_tail, end.code),
        )
        return Verdict(VerdictKind.WORKER_LOST, tuple(filter(None, message)), worker, certain=not others)
    return _explain_exit(worker, end, observation.exit_codes)


def _first_to_exit(observation: Observation) -> Verdict | None:
    """Find the program that ended while the others ran, if JAX aborted all of them together.

    At exit JAX waits for all processes, for five minutes: the one that failed first does not end first.
    """
    for worker, end in enumerate(observation.workers):
        if end.ended and end.code != 0 and cause_of_exit(end.log_tail):
            return _explain_exit(worker, replace(end, code=None, signal="SIGABRT"), {})
    first = first_at_barrier([end.log_tail for end in observation.workers])
    if first is None:
        return None
    how = f"worker {first}: its program ended while the others were running"
    return Verdict(VerdictKind.PROGRAM_ERROR, (how, "JAX's shutdown waited for them until it timed out"), first)


def _explain_exit(worker: int, end: WorkerStatus, known: Mapping[int, VerdictKind]) -> Verdict:
    """Diagnose one exit from its exit code, its signal, its kernel and the end of its log."""
    how, found = f"worker {worker}: {_exit_description(end)}", match_failure(end.log_tail)
    message = tuple(filter(None, (how, last_words(end.log_tail, end.code))))
    if end.code is not None and known.get(end.code) is VerdictKind.CORRUPTION:
        return _corruption(worker, message, end.log_tail)
    if end.code is not None and end.code in known:
        return Verdict(known[end.code], message, worker)
    if end.error:
        return Verdict(VerdictKind.WORKER_LOST, (f"worker {worker}: {end.error}",), worker)
    if end.code == SAVED_EXIT_CODE:
        return Verdict(
            VerdictKind.WORKER_LOST,
            (f"worker {worker}: {NOTICE_MESSAGES[end.notice]}; it saved its state and exited",),
            worker,
        )
    if end.oom_kills and (_signal(end) == "SIGKILL" or KILLED_CHILD_PATTERN.search(end.log_tail)):
        return Verdict(VerdictKind.OUT_OF_RAM, (how, "its kernel killed a process because memory ran out"), worker)
    if found == FailureCause.DISK or (end.free_gb is not None and end.free_gb < NEARLY_FULL_GB):
        left = [] if end.free_gb is None else [f"its disk has {end.free_gb:.1f} GB left"]
        return Verdict(VerdictKind.DISK_FULL, (*message, *left), worker)
    if end.signal in EXTERNAL_SIGNALS:
        return Verdict(VerdictKind.WORKER_LOST, (f"{how} from outside",), worker)
    if _signal(end) in EXTERNAL_SIGNALS:
        return Verdict(VerdictKind.WORKER_LOST, (how, "one of its processes was killed from outside"), worker)
    kind = {
        FailureCause.HBM: VerdictKind.OUT_OF_HBM,
        FailureCause.RAM: VerdictKind.OUT_OF_RAM,
        FailureCause.HOST: VerdictKind.UNHEALTHY_HOST,
    }
    return Verdict(kind.get(found, VerdictKind.PROGRAM_ERROR) if found else VerdictKind.PROGRAM_ERROR, message, worker)


def _corruption(worker: int, message: tuple[str, ...], log: str) -> Verdict:
    """Blame the worker that the program names, which all workers report alike; none if it names several or none."""
    faults = HARDWARE_FAULT.findall(log)
    if not faults:
        return Verdict(VerdictKind.CORRUPTION, message, worker)
    named = {who for who, _ in faults}
    who = named.pop() if len(named) == 1 else ""
    blamed = int(who) if who.isdecimal() else None
    said = tuple(dict.fromkeys(f"{f'worker {who}' if who else 'some worker'}: {what}" for who, what in faults))
    return Verdict(VerdictKind.CORRUPTION, said[:MAX_FAULTS], blamed)


def _workers_silent(observation: Observation) -> Verdict | None:
    away = observation.silent_workers
    if not away or observation.pod is None:
        return None
    if len(away) == len([w for w in observation.workers if not w.ended]) > 1:
        patience = WHOLE_POD_FACTOR * observation.lost_seconds
        if any(observation.workers[i].silent_seconds < patience for i in away):
            return None
    return _workers_lost(observation, away)


def _workers_lost(observation: Observation, away: tuple[int, ...]) -> Verdict:
    silence = min(observation.workers[i].silent_seconds for i in away)
    why = {observation.workers[i].ssh_error for i in away if observation.workers[i].ssh_error}
    message = (workers_and(f"has not responded for {silence:.0f} s", away), *sorted(why))
    return Verdict(VerdictKind.WORKER_LOST, message, away[0], away, len(away) == len(observation.workers))


def _hung(observation: Observation) -> Verdict | None:
    for i, worker in enumerate(observation.workers):
        if not worker.ended and worker.stopped_seconds >= STOPPED_SECONDS:
            message = f"worker {i}: its program has been stopped by a signal for {worker.stopped_seconds:.0f} s"
            return Verdict(VerdictKind.HUNG, (message,), i)
    if all(worker.ended for worker in observation.workers) or observation.hang_seconds is None:
        return None
    if observation.idle_seconds >= observation.hang_seconds:
        silence = f"no step and no output for {observation.idle_seconds:.0f} s"
        limit = f"the limit is {observation.hang_seconds:.0f} s"
        for i, worker in enumerate(observation.workers):
            if worker.thread_exception and not worker.ended:
                message = (f"worker {i}: an exception ended a thread of its program", worker.thread_exception)
                return Verdict(VerdictKind.PROGRAM_ERROR, (*message, silence, limit), i, ended=False)
        last = f"the last step was {observation.step}" if observation.step is not None else "it has not reported a step"
        return Verdict(VerdictKind.HUNG, (silence, last, limit))
    return None


RULES: tuple[Callable[[Observation], Verdict | None], ...] = (
    _finished, _user_requested, _pod_gone, _preemption_notice, _network_lost, _setup_failed, _program_failed,
    _workers_silent, _hung,
)  # fmt: skip
WORKER_SIDE_KINDS = frozenset(
    {VerdictKind.WORKER_LOST, VerdictKind.PROGRAM_ERROR, VerdictKind.HUNG, VerdictKind.SETUP_FAILURE}
)
"""Verdicts that appear on workers but may be caused by the pod."""


def _explained_by_pod(verdict: Verdict, pod: PodStatus) -> Verdict:
    """Refine a verdict about a worker by the pod problem that Google reports."""
    if verdict.kind not in WORKER_SIDE_KINDS:
        return verdict
    named = {symptom.kind: str(symptom) for symptom in pod.symptoms}
    kind, message = verdict.kind, ""
    if pod.maintenance == "ONGOING" or pod.health == "UNHEALTHY_MAINTENANCE":
        kind, message = VerdictKind.MAINTENANCE, "Google is performing maintenance on the pod"
    elif word := named.get("HBM_OUT_OF_MEMORY"):
        kind, message = VerdictKind.OUT_OF_HBM, word
    elif word := named.get("OUT_OF_MEMORY") or named.get("LOW_MEMORY"):
        kind, message = VerdictKind.OUT_OF_RAM, word
    elif pod.health in UNHEALTHY_HEALTHS:
        kind, message = VerdictKind.UNHEALTHY_HOST, _health_message(pod)
    elif ill := [name for name in named if name in UNHEALTHY_SYMPTOMS]:
        kind, message = VerdictKind.UNHEALTHY_HOST, named[ill[0]]
    return replace(verdict, kind=kind, evidence=(*verdict.evidence, message)) if message else verdict


def _pod_remarks(observation: Observation) -> tuple[str, ...]:
    """Return remarks on the pod that may interest the user while the run continues."""
    if observation.pod is None:
        return ("Google's API does not respond; the workers do",)
    remarks = [str(symptom) for symptom in observation.pod.symptoms]
    if observation.pod.health in UNHEALTHY_HEALTHS:
        remarks.append(_health_message(observation.pod))
    if observation.pod.maintenance:
        remarks.append(f"Google's pod maintenance is {observation.pod.maintenance.lower()}")
    return tuple(remarks)


def _health_message(pod: PodStatus) -> str:
    said = f" ({pod.health_description})" if pod.health_description else ""
    return f"Google reports the pod as {pod.health.lower().replace('_', ' ')}{said}"


def _is_secondary(end: WorkerStatus) -> bool:
    """Return whether the program ended only because it lost its peers."""
    return not end.error and _signal(end) not in EXTERNAL_SIGNALS and only_lost_peers(end.log_tail)


def _signal(end: WorkerStatus) -> str:
    """Return the signal that ended the program, or the last command of a shell script."""
    return end.signal or SHELL_SIGNALS.get(end.code or 0, "")


def _exit_description(end: WorkerStatus) -> str:
    if end.signal == "SIGABRT" and cause_of_exit(end.log_tail):  # at exit, JAX waits for the others, then aborts
        return "its program raised an exception"
    if end.signal:
        return f"its program was terminated by {end.signal}"
    return f"its program exited with {code_text(end.code)}" if end.code is not None else end.error


PLURALS = {"was": "were", "has": "have"}


def workers_and(verb: str, workers: Sequence[int]) -> str:
    """Return `worker 3 was`, `workers 0, 3 were`. verb: what one of them did, `was …`, `has …` or in the past."""
    if len(workers) == 1:
        return f"worker {workers[0]} {verb}"
    first, _, rest = verb.partition(" ")
    return f"workers {', '.join(map(str, workers))} {PLURALS.get(first, first)} {rest}"


def _state_text(state: str, **others: str) -> str:
    return others.get(state, state.lower().replace("_", " "))
