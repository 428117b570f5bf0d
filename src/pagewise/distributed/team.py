"""A team: the processes of one engine. Process 0 says what all compute, and the others follow (lesson 10).

    control            a group of all processes, with gloo: the messages of process 0
    groups["tensor"]   the processes that share the weights of a layer
    groups["context"]  the processes that share the tokens of a sequence

Process c · t + i of a mesh of c × t is number c of its context group and number i of its tensor group. The processes
meet in a store: a file, if one process started the others on its own machine, and else the store of torchrun. The
groups are the team's own, so the program's default group of torch.distributed is left alone.

A process that fails writes the reason into the store, and ends. The other processes then lose their connections to it,
and process 0 reads the reason.
"""

import contextlib
import ctypes
import ipaddress
import os
import re
import socket
import sys
import weakref
from collections.abc import Mapping
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist

STARTING = timedelta(minutes=5)  # for processes that import, meet and load a model. Then `wait_at_most` says how long
FOREVER = timedelta(days=3650)  # a follower waits so long for the next message, unless process 0 ends
NOT_BETWEEN_HOSTS = ("lo", "docker", "veth", "br-", "virbr")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"

_teams: "weakref.WeakSet[Team]" = weakref.WeakSet()


class Team:
    """The processes of one engine, as this process sees them. All processes make their team at the same time."""

    def __init__(
        self, store: dist.Store, rank: int, sizes: Mapping[str, int], device: str, *, on_one_host: bool
    ) -> None:
        """Meet the others in a store. `sizes` are those of the mesh, and `device` is "cpu" or "cuda"."""
        self.rank, self.count, self._store = rank, prod(sizes.values()), store
        c, t = divmod(rank, sizes["tensor"])
        interfaces = _interfaces(on_one_host)
        self._control = _group(dist.PrefixStore("control", store), rank, self.count, "cpu", interfaces)
        self.groups = {
            "context": _group(dist.PrefixStore(f"context {t}", store), c, sizes["context"], device, interfaces),
            "tensor": _group(dist.PrefixStore(f"tensor {c}", store), t, sizes["tensor"], device, interfaces),
        }
        if rank:
            self._control.set_timeout(FOREVER)
        _teams.add(self)

    @classmethod
    def launched(cls, sizes: Mapping[str, int], device: str) -> "Team":
        """Return the team of all processes that torchrun, or another program, has started."""
        if dist.is_initialized():
            store, rank = dist.group.WORLD.get_group_store(), dist.get_rank()
        else:
            store, rank, _ = next(dist.rendezvous("env://", timeout=STARTING))
        store = dist.PrefixStore(f"team {store.add(f'teams of {rank}', 1)}", store)
        on_one_host = os.environ.get("LOCAL_WORLD_SIZE", "?") == os.environ.get("WORLD_SIZE")
        return cls(store, rank, sizes, device, on_one_host=on_one_host)

    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of all groups."""
        for group in [*self.groups.values(), *([] if self.rank else [self._control])]:
            group.set_timeout(timedelta(seconds=seconds))

    def send(self, message: object) -> None:
        """Send a message from process 0 to all others. None is the last one."""
        dist.broadcast_object_list([message], group=self._control, group_src=0)

    def receive(self) -> Any:
        """Wait for the next message of process 0. Raise ConnectionError if process 0 has ended."""
        received = [None]
        try:
            dist.broadcast_object_list(received, group=self._control, group_src=0)
        except RuntimeError as error:
            raise ConnectionError("process 0 has ended") from error
        return received[0]

    def least(self, number: int) -> int:
        """Return the least number of all processes. All must call this method, so it waits for all."""
        least = torch.tensor([number])
        dist.all_reduce(least, dist.ReduceOp.MIN, self._control)
        return int(least)

    def report(self, reason: str) -> None:
        """Say why this process fails. "": because it has lost its connection to another process."""
        with contextlib.suppress(RuntimeError):  # the store is gone
            self._store.set(f"report {self.rank}", reason)

    def reports(self) -> dict[int, str]:
        """Return the reasons of all processes that have failed, by rank."""
        keys = {rank: f"report {rank}" for rank in range(1, self.count)}
        with contextlib.suppress(RuntimeError):
            return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}
        return {}

    def leave(self) -> None:
        """Close the connections. Processes that still wait for this one get an exception."""
        for group in (self._control, *self.groups.values()):
            group.abort()


def num_launched() -> int:
    """Return the number of processes that torchrun, or another program, has started: 1 if there is none."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1)) if "RANK" in os.environ else 1


def lost_connection(error: BaseException) -> bool:
    """Return whether an exception means that another process has ended, or that it gave no answer in time."""
    signs = "gloo|nccl|connection|timed out|timeout"
    kinds = (ConnectionError, dist.DistError)
    return isinstance(error, kinds) or (type(error) is RuntimeError and bool(re.search(signs, str(error), re.I)))


def _interfaces(on_one_host: bool) -> list[str]:
    """Return the networks that gloo shall use. None: it looks up the address of this host's own name.

    On Debian, this address is 127.0.1.1. If the host has only one network, the network is used instead.
    """
    if chosen := os.environ.get("GLOO_SOCKET_IFNAME"):
        return chosen.split(",")
    if on_one_host:
        return [LOOPBACK]
    with contextlib.suppress(OSError):  # the name has no address
        addresses = [found[4][0] for found in socket.getaddrinfo(socket.gethostname(), None)]
        networks = [name for _, name in socket.if_nameindex() if not name.startswith(NOT_BETWEEN_HOSTS)]
        if all(ipaddress.ip_address(one).is_loopback for one in addresses) and len(networks) == 1:
            return networks
    return []


def _group(store: dist.Store, rank: int, count: int, device: str, interfaces: list[str]) -> dist.ProcessGroup:
    """Return a group that torch.distributed does not know."""
    if device == "cuda":
        backend, kind = dist.ProcessGroupNCCL(store, rank, count, timeout=STARTING), dist.ProcessGroup.BackendType.NCCL
    else:
        gloo, kind = dist.ProcessGroupGloo, dist.ProcessGroup.BackendType.GLOO
        options = gloo._Options()
        options._devices = [gloo.create_device(interface=one) for one in interfaces] or [gloo.create_default_device()]
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
        for group in (team._control, team._store, *team.groups.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_in_fork)
