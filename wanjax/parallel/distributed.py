"""One program on many processes: start-up, agreement between them, and the end on request.

Where a process runs comes from flags, from JAX_COORDINATOR_ADDRESS with JAX_NUM_PROCESSES and
JAX_PROCESS_ID, from SLURM (srun), from Open MPI (mpirun), or, for the coordinator "auto", from what
jax detects by itself: TPU VM and GKE metadata, or a Kubernetes Job. With none of these there is one
process. Why a roll call: when a process is missing, jax ends all of them with a C++ abort that
names no host, so process 0 first meets the others on the coordinator port and says who is missing.

Exit codes: 0 done · RESTART preempted or a host is missing, run the same command again · 1 a bug or
a wrong config.
"""

import contextlib
import hashlib
import importlib.metadata
import itertools
import json
import os
import pathlib
import platform
import re
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from wanjax import __version__, trees

RESTART = 42
TIMEOUT = 300.0  # seconds to wait for the other processes at start
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
_GREETING = "wanjax-roll-call"
_LOOPBACK = ("localhost", "127.0.0.1")
_stop_asked = False  # a single process got SIGTERM
_calls = itertools.count()  # of `preempted`


class Stopped(Exception):
    """The run was asked to stop while a step was being collected, which has changed no state."""


class NeedsRestart(RuntimeError):
    """Nothing is wrong with the program: a host is missing, or the run was asked to stop."""


@dataclass(frozen=True)
class Place:
    """This process among the others; coordinator "auto" leaves all to jax, "" means one process."""

    coordinator: str = ""
    num_processes: int = 1
    process_id: int = 0
    local_devices: tuple[int, ...] | None = None  # GPUs of this process; None = all visible ones
    source: str = "single process"


def start(coordinator="", num_processes=None, process_id=None, local_devices="") -> Place:
    """Join the other processes of the run, if there are any; call before any use of devices.

    coordinator: "host:port" of process 0, "auto", or "" to look at the environment; local_devices:
    "0,1,…" or "". Raises ValueError for settings that cannot work and NeedsRestart, on every
    process reached, when some did not show up within TIMEOUT seconds.
    """
    # CPU devices share a few threads, which wait for collectives: two programs in flight, or one
    # with no more threads than cores, can deadlock (accelerators are not affected)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    devices = jax.config.values["jax_num_cpu_devices"]
    if devices > 1:
        os.environ.setdefault("NPROC", str(max(8, 2 * devices)))  # number of XLA:CPU's threads
    claim_memory()
    place = locate(os.environ, coordinator, num_processes, process_id, local_devices)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it
        signal.signal(signal.SIGHUP, _hung_up)
    if not place.coordinator:
        signal.signal(signal.SIGTERM, _ask_stop)  # with several processes jax handles it
        return place
    if place.coordinator == "auto":
        jax.distributed.initialize()
    else:
        call_roll(place, TIMEOUT)
        near = _split(place.coordinator)[0] in _LOOPBACK
        jax.distributed.initialize(
            place.coordinator,
            place.num_processes,
            place.process_id,
            place.local_devices,
            cluster_detection_method="deactivate",
            initialization_timeout=int(TIMEOUT),
            coordinator_bind_address=place.coordinator if near else None,
        )
    sys.excepthook = _crash
    print(
        f"process  {jax.process_index()} of {jax.process_count()} on {socket.gethostname()}, "
        f"{jax.local_device_count()} of {jax.device_count()} devices, by {place.source}",
        flush=True,
    )
    return place


def claim_memory() -> None:
    """Let XLA have 92 % of a GPU's memory instead of 75 %, unless the user has said; call before
    any use of devices. The rest is for kernels and libraries with memory of their own."""
    if not {"XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"} & os.environ.keys():
        os.environ["XLA_CLIENT_MEM_FRACTION"] = "0.92"


def locate(
    env: Mapping[str, str], coordinator="", num_processes=None, process_id=None, local_devices=""
) -> Place:
    """This process's place by flags and environment; flags win.

    Raises ValueError naming the flag or variable that is missing or wrong.
    """
    found = _environment(env)
    source = "flags" if coordinator else found.get("source", "")
    coordinator = coordinator or found.get("coordinator", "")
    if coordinator == "auto":
        return Place("auto", source="jax's own detection")
    count = found.get("count") if num_processes is None else num_processes
    index = found.get("index") if process_id is None else process_id
    if not coordinator:
        if num_processes is not None or process_id is not None or (count or 1) > 1:
            raise ValueError(
                f"{count or 'several'} processes are asked for but no coordinator is known; set "
                "--coordinator=HOST:PORT (process 0's host, a free port), the same on all processes"
            )
        return Place()
    if count is None or index is None:
        raise ValueError(
            f"coordinator {coordinator} is given but not how many processes there are and which "
            "one this is; set --num_processes=N and --process_id=0..N-1"
        )
    if not 0 <= index < count:
        raise ValueError(f"--process_id is {index}, expected 0 to {count - 1} (--num_processes=1+)")
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ValueError(f"--coordinator is {coordinator!r}, expected HOST:PORT, as node0:8482")
    if local_devices and not re.fullmatch(r"\d+(,\d+)*", local_devices):
        raise ValueError(f"--local_devices is {local_devices!r}, expected numbers, as 0,1,2,3")
    chosen = [int(i) for i in local_devices.split(",")] if local_devices else found.get("local")
    return Place(coordinator, count, index, tuple(chosen) if chosen else None, source)


def call_roll(place: Place, timeout: float) -> None:
    """Meet all processes on the coordinator port; return on each of them when everyone is there.

    Raises NeedsRestart naming host, port and the missing processes after `timeout` seconds, and
    ValueError when the address cannot work, an id is taken twice or process counts differ.
    """
    host, port = _split(place.coordinator)
    if place.process_id:
        _answer(place, host, port, time.monotonic() + timeout)
    elif place.num_processes > 1:
        _ask(place, host, port, time.monotonic() + timeout)


def everywhere(fn: Callable[[], Any]) -> Any:
    """fn() of this process, after it has succeeded on all; a ValueError of one is raised on all."""
    if jax.process_count() == 1:
        return fn()
    result, error = None, None
    try:
        result = fn()
    except ValueError as caught:
        error = caught
    faults = gather(str(error or ""))
    if error is not None:
        raise error
    for index, fault in enumerate(faults):
        if fault:
            raise ValueError(f"process {index}: {fault}")
    return result


def versions() -> dict[str, str]:
    """Versions of python, wanjax and the packages that results may depend on."""
    found = {name: importlib.metadata.version(name) for name in PACKAGES}
    return {"python": platform.python_version(), "wanjax": __version__, **found}


def agree(facts: Mapping[str, Any]) -> None:
    """Raise ValueError on every process if package versions, code or `facts` (nested, JSON) differ.

    Digests are compared; only when they differ are the values exchanged, to name the keys.
    """
    if jax.process_count() == 1:
        return
    mine = {f"version of {name}": version for name, version in versions().items()}
    mine |= {"code": _code(), **facts}
    text = json.dumps({k: json.dumps(v) for k, v in trees.dotted(mine).items()}, sort_keys=True)
    if len(set(gather(hashlib.sha256(text.encode()).hexdigest()))) == 1:
        return
    hosts, values = gather(socket.gethostname()), [json.loads(other) for other in gather(text)]
    keys = [k for k in sorted(set().union(*values)) if len({v.get(k) for v in values}) > 1]
    parts = []
    for key in keys[:5]:
        who: dict[str, list[int]] = {}
        for index, value in enumerate(values):
            who.setdefault(value.get(key, "absent"), []).append(index)
        listed = (f"{v} on process {_some(ids)} ({hosts[ids[0]]})" for v, ids in who.items())
        parts.append(f"{key} is {', '.join(listed)}")
    more = f"; and {len(keys) - 5} more" if len(keys) > 5 else ""
    raise ValueError(
        f"the processes of this run disagree: {'; '.join(parts)}{more}; "
        "start all of them with the same code, packages, config and prompts"
    )


def fingerprint(texts: Sequence[str]) -> str:
    """How many texts and a digest of them, for `agree`."""
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()[:12]
    return f"{len(texts)} with digest {digest}"


def gather(text: str) -> list[str]:
    """The texts of all processes, in order; all of them call it together."""
    data = text.encode()
    sizes = multihost_utils.process_allgather(np.array([len(data)], np.int32))
    row = np.zeros(int(sizes.max()) or 1, np.uint8)
    row[: len(data)] = np.frombuffer(data, np.uint8)
    rows = multihost_utils.process_allgather(row)
    sizes = np.reshape(sizes, -1)
    rows = rows.reshape(len(sizes), -1)
    return [row[:size].tobytes().decode() for row, size in zip(rows, sizes, strict=True)]


def preempted() -> bool:
    """Whether to save and stop now, as one process got SIGTERM. True on all processes at the same
    call; each calls it the same number of times."""
    if jax.process_count() > 1:
        return bool(multihost_utils.reached_preemption_sync_point(next(_calls)))
    return _stop_asked


def check_stop() -> None:
    """Raise Stopped where `preempted`; for places inside a step where no state has changed."""
    if preempted():
        raise Stopped


def leave(code: int, message: str) -> NoReturn:
    """Print the message and end this process, even when the others do not know that it must end.

    A normal exit waits minutes for all processes to exit; one that fails alone drops its
    connections instead, so that the others, blocked in a collective, end too.
    """
    print(message, file=sys.stderr, flush=True)
    if not jax.distributed.is_initialized():
        sys.exit(code)
    sys.stdout.flush()
    if jax.process_index() == 0:
        time.sleep(3)  # its exit aborts the others: let those that failed too say so first
    os._exit(code)


def _crash(kind, error, trace) -> None:
    leave(1, "".join(traceback.format_exception(kind, error, trace)))


def _ask_stop(*_) -> None:
    global _stop_asked
    _stop_asked = True
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second SIGTERM kills at once


def _hung_up(*_) -> None:
    """A terminal that closes asks to stop, as SIGTERM does; shell and kernel may both say so."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    os.kill(os.getpid(), signal.SIGTERM)


def _environment(env: Mapping[str, str]) -> dict[str, Any]:
    """What the environment says: coordinator, count, index, local, source; absent where unknown."""
    # jax detects SLURM and Open MPI too, but inside initialize: the roll call needs address, count
    # and index before that, and jax._src.clusters is not a public API
    address, port = env.get("JAX_COORDINATOR_ADDRESS", ""), env.get("JAX_COORDINATOR_PORT", "")
    if address and ":" not in address and port:
        address = f"{address}:{port}"
    for count, index in (("JAX_NUM_PROCESSES", "JAX_PROCESS_ID"), ("NNODES", "NODE_RANK")):
        if address and count in env and index in env:  # the second pair is what xpk sets for GPUs
            return _found(env, address, f"{count} and {index}", count, index)
    if "SLURM_STEP_NODELIST" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        address = address or _slurm_coordinator(env, port)
        alone = env["SLURM_NTASKS"] == env.get("SLURM_STEP_NUM_NODES")
        names = ("SLURM_NTASKS", "SLURM_PROCID", "" if alone else "SLURM_LOCALID")
        return _found(env, address, "SLURM", *names)
    if int(env.get("OMPI_COMM_WORLD_SIZE", "1")) > 1:  # newer versions don't give rank 0's address
        alone = env.get("OMPI_COMM_WORLD_LOCAL_SIZE") == "1"
        names = ("SIZE", "RANK") if alone else ("SIZE", "RANK", "LOCAL_RANK")
        return _found(env, address, "Open MPI", *(f"OMPI_COMM_WORLD_{name}" for name in names))
    if "," in env.get("TPU_WORKER_HOSTNAMES", "") or int(env.get("MEGASCALE_NUM_SLICES", "1")) > 1:
        return {"coordinator": "auto"}
    return {"coordinator": address}


def _found(env, address: str, source: str, count: str, index: str, local: str = ""):
    found: dict[str, Any] = {"coordinator": address, "source": source}
    found |= {"count": int(env[count]), "index": int(env[index])}
    # One process per GPU; nothing to choose where the launcher shows each process only its own.
    if local and len(env.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")) > 1:
        found["local"] = [int(env[local])]
    return found


def _slurm_coordinator(env: Mapping[str, str], port: str) -> str:
    """First host of node[01-04,7]-ib,other3 and the port that jax would take for this job."""
    match = re.match(r"([^,\[]*)(?:\[([^\],-]+)[^\]]*\])?([^,\[]*)", env["SLURM_STEP_NODELIST"])
    host = "".join(part or "" for part in match.groups()) if match else ""
    return f"{host}:{port or 61440 + int(env['SLURM_JOB_ID']) % 4096}"


def _ask(place: Place, host: str, port: int, deadline: float) -> None:
    """Process 0: wait for everyone, then tell each to proceed, or why not."""
    here, n = f"process 0 on {socket.gethostname()}", place.num_processes
    near = host in _LOOPBACK  # then no other host needs to reach it
    dual = socket.has_dualstack_ipv6() and not near
    family = socket.AF_INET6 if dual else socket.AF_INET
    address = ("127.0.0.1" if near else "", port)
    try:
        server = socket.create_server(address, family=family, dualstack_ipv6=dual, backlog=1024)
    except OSError as error:
        raise ValueError(
            f"{here} cannot listen on port {port} of --coordinator={host}:{port} "
            f"({error.strerror}); stop the run that uses it, or choose another port"
        ) from None
    missing, callers, calls, fault = set(range(1, n)), {}, [], ""
    with server:
        while missing and not fault and (left := deadline - time.monotonic()) > 0:
            server.settimeout(left)
            try:
                call, peer = server.accept()
            except OSError:
                continue  # out of time
            heard = _hear(call)
            if heard is None:
                call.close()
                continue
            calls.append(call)
            name, index, count = heard
            who = f"process {index} on {name} ({peer[0]})"
            if count != n:
                fault = f"{who} has --num_processes={count}, {here} {n}; start all with the same"
            elif not 0 < index < n or callers.setdefault(index, name) != name:
                fault = f"{who} has an id that is taken; give each process its own --process_id"
            missing.discard(index)
    late = (
        f"{here} waited at {host}:{port} for {n} processes; missing: {_some(sorted(missing))}; "
        "start them, or let them reach that host and port"
    )
    word = f"bad {fault}" if fault else f"late {late}" if missing else "go"
    for call in calls:
        with contextlib.suppress(OSError), call:  # jax notices one that is gone by now
            call.sendall(f"{word}\n".encode())
    if fault:
        raise ValueError(fault)
    if missing:
        raise NeedsRestart(late)


def _hear(call: socket.socket) -> tuple[str, int, int] | None:
    """Name, id and count of a process that calls; None for a port scan or a health check."""
    call.settimeout(5)
    try:
        greeting, name, index, count = call.makefile().readline(1024).split()
        return (name, int(index), int(count)) if greeting == _GREETING else None
    except (OSError, ValueError):
        return None


def _answer(place: Place, host: str, port: int, deadline: float) -> None:
    """Process i: reach process 0, say who this is, and wait for its reply."""
    me = f"process {place.process_id} on {socket.gethostname()}"
    _refuse_loopback(me, host, port)
    reply, last = "", "no answer"
    while not reply and (left := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=min(left, 10)) as call:
                # The pid distinguishes a retry from a second process with the same id.
                name = f"{socket.gethostname()}:{os.getpid()}"
                line = [_GREETING, name, place.process_id, place.num_processes]
                call.sendall((" ".join(map(str, line)) + "\n").encode())
                call.settimeout(left + 5)  # process 0 has its own deadline, and says so
                reply = call.makefile().readline().strip()
        except OSError as error:  # not listening yet, or its name does not resolve yet
            last = str(error.strerror or error)
        if not reply:
            time.sleep(min(0.2, max(left, 0)))
    word, _, why = reply.partition(" ")
    if word == "bad":
        raise ValueError(why)
    if word != "go":
        raise NeedsRestart(
            why
            or f"{me} could not reach process 0 at {host}:{port} ({last}); check that it runs, "
            f"that --coordinator names its host, and that TCP port {port} is open between hosts"
        )


def _refuse_loopback(me: str, host: str, port: int) -> None:
    """A host name that /etc/hosts maps to 127.0.0.1 would connect each process to itself."""
    if host in (*_LOOPBACK, socket.gethostname(), socket.getfqdn()):
        return
    try:
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port)}
    except OSError:
        return  # does not resolve yet; the connection attempts report it if that lasts
    if all(a.startswith("127.") or a == "::1" for a in addresses):
        raise ValueError(
            f"{me}: --coordinator={host}:{port} is this machine itself ({sorted(addresses)[0]}); "
            "give the address by which the other hosts reach process 0"
        )


def _code() -> str:
    """Digest of this package's source files, which may differ under one version number."""
    root, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _some(numbers: list[int]) -> str:
    more = f" and {len(numbers) - 8} more" if len(numbers) > 8 else ""
    return ", ".join(map(str, numbers[:8])) + more
