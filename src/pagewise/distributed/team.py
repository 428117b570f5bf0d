"""A team: the processes of one engine. Process 0 says what all compute, and the others follow (lesson 10).

    control            a group of all processes, with gloo: the messages of process 0
    groups["tensor"]   the processes that share the weights of a layer
    groups["context"]  the processes that share the tokens of a sequence

Process c · t + i of a mesh of c × t is number c of its context group and number i of its tensor group. The groups are
those of a `torch.distributed.device_mesh` under torchrun. A team that one process starts on its own machine leaves the
default group of torch.distributed alone, so the same groups are made by hand.

A process waits at most STARTING seconds for the others, and after `wait_at_most` a number of seconds that the caller
chooses. Only a follower waits for the next message as long as process 0 lives. A process that fails writes the reason
into the store in which the processes met, and ends. The other processes then lose their connections to it, and process
0 reads the reason.
"""

import contextlib
import ctypes
import ipaddress
import os
import pickle
import re
import socket
import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

STARTING = timedelta(minutes=5)  # for processes that import, meet and load a model
FOREVER = timedelta(days=3650)  # a follower waits so long for the next message, unless process 0 ends
NOT_BETWEEN_HOSTS = ("lo", "docker", "veth", "br-", "virbr")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


class Team:
    """The processes of one engine, as this process sees them. All processes make their team at the same time."""

    def __init__(self, rank: int, store: dist.Store, control: Any, groups: Mapping[str, Any]) -> None:
        """Keep the groups. `joined` and `met_in` make them."""
        self.rank, self.count = rank, control.size()
        self.groups, self._control, self._store = dict(groups), control, store
        if rank:
            control.set_timeout(FOREVER)
        _teams.add(self)

    @classmethod
    def joined(cls, sizes: Mapping[str, int], device: str) -> "Team":
        """Return the team of all processes that torchrun, or another program, has started."""
        if not dist.is_initialized():
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            if int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])) < int(os.environ["WORLD_SIZE"]):
                _choose_interface()
            dist.init_process_group(backend, timeout=STARTING)
        mesh = dist.init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        control = dist.new_group(backend="gloo", timeout=STARTING)
        return cls(dist.get_rank(), control.get_group_store(), control, {name: mesh.get_group(name) for name in sizes})

    @classmethod
    def met_in(cls, folder: str, rank: int, sizes: Mapping[str, int], device: str) -> "Team":
        """Return the team of processes of this machine, which meet in a folder."""
        context, tensor = sizes["context"], sizes["tensor"]
        store = dist.FileStore(f"{folder}/store", context * tensor)
        c, t = divmod(rank, tensor)
        control = _group(dist.PrefixStore("control", store), rank, context * tensor, "cpu")
        groups = {
            "context": _group(dist.PrefixStore(f"context {t}", store), c, context, device),
            "tensor": _group(dist.PrefixStore(f"tensor {c}", store), t, tensor, device),
        }
        return cls(rank, store, control, groups)

    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of all groups. A default group that another program has made keeps its own."""
        groups = [*self.groups.values(), *([] if self.rank else [self._control])]
        for group in groups:
            if group is not dist.group.WORLD or "RANK" in os.environ:
                group.set_timeout(timedelta(seconds=seconds))

    def send(self, message: object) -> None:
        """Send a message from process 0 to all others. None is the last one."""
        packed = torch.frombuffer(bytearray(pickle.dumps(message)), dtype=torch.uint8)
        dist.broadcast(torch.tensor([len(packed)]), group=self._control, group_src=0)
        dist.broadcast(packed, group=self._control, group_src=0)

    def receive(self) -> Any:
        """Wait for the next message of process 0. Raise ConnectionError if process 0 has ended."""
        length = torch.zeros(1, dtype=torch.int64)
        try:
            dist.broadcast(length, group=self._control, group_src=0)
            packed = torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(packed, group=self._control, group_src=0)
        except RuntimeError as error:
            raise ConnectionError("process 0 has ended") from error
        return pickle.loads(packed.numpy().tobytes())

    def least(self, number: int) -> int:
        """Return the least number of all processes. All must call this method, so it waits for all."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, self._control)
        return int(least)

    def report(self, reason: str) -> None:
        """Say why this process fails. "": because it has lost its connection to another process."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"report {self._store.add('reports', 1)}", f"{self.rank} {reason}")

    def reports(self) -> dict[int, str]:
        """Return the reasons of all processes that have failed, by rank, the first one first."""
        found = {}
        with contextlib.suppress(RuntimeError):
            for i in range(1, self._store.add("reports", 0) + 1):
                if self._store.check([f"report {i}"]):
                    rank, _, reason = self._store.get(f"report {i}").decode().partition(" ")
                    found[int(rank)] = reason
        return found

    def leave(self) -> None:
        """Close the connections. Processes that still wait for this one get an exception."""
        groups, self.groups = [self._control, *self.groups.values()], {}
        self._control = self._store = None
        for group in groups:
            if group is not dist.group.WORLD:  # which a mesh of one axis uses
                with contextlib.suppress(RuntimeError, ValueError):  # ValueError: a group that torch does not know
                    dist.destroy_process_group(group)


def is_launched() -> bool:
    """Return whether this process is one of several of a group, as under torchrun."""
    if dist.is_initialized():
        return dist.get_world_size() > 1
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def lost_connection(error: BaseException) -> bool:
    """Return whether an exception means that another process has ended, or that it gave no answer in time."""
    signs = "gloo|nccl|connection|timed out|timeout"
    kinds = (ConnectionError, dist.DistError)
    return isinstance(error, kinds) or (type(error) is RuntimeError and bool(re.search(signs, str(error), re.I)))


def _choose_interface() -> None:
    """Let gloo use the only network of this host, unless the user has chosen one or the host's name leads to one.

    Gloo tells the other hosts the address of this host's own name. On Debian, this address is 127.0.1.1.
    """
    with contextlib.suppress(OSError):  # the name has no address
        addresses = [found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)]
        networks = [name for _, name in socket.if_nameindex() if not name.startswith(NOT_BETWEEN_HOSTS)]
        if all(ipaddress.ip_address(one).is_loopback for one in addresses) and len(networks) == 1:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", networks[0])


def _group(store: dist.Store, rank: int, count: int, device: str) -> dist.ProcessGroup:
    """Return a group that torch.distributed does not know, of processes of this machine."""
    if device == "cuda":
        backend, kind = dist.ProcessGroupNCCL(store, rank, count, timeout=STARTING), dist.ProcessGroup.BackendType.NCCL
    else:
        gloo, kind = dist.ProcessGroupGloo, dist.ProcessGroup.BackendType.GLOO
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME") or LOOPBACK  # by default, gloo looks up this machine's name
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=interface) for interface in interfaces.split(",")]
        options._threads = 2 * len(options._devices)
        options._timeout = STARTING
        backend = gloo(store, rank, count, options)
    group = dist.ProcessGroup(store, rank, count)
    group._set_default_backend(kind)
    group._register_backend(torch.device(device), kind, backend)
    return group


def _keep_in_fork() -> None:
    """Never destroy the groups of a forked process: their destruction waits for threads that a fork does not have."""
    for team in _teams:
        default = [dist.group.WORLD] if dist.is_initialized() else []
        for group in (team._control, team._store, *team.groups.values(), *default):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_in_fork)
