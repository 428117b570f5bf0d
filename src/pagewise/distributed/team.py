"""A team: the processes of one engine. Process 0 says what all compute, and the others follow (lesson 10).

    groups["all"]      all processes, with gloo: the messages of process 0
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

    def __init__(self, store: dist.Store, rank: int, count: int, *, on_one_host: bool) -> None:
        """Meet the others in a store."""
        self.rank, self.count, self._store = rank, count, store
        self._interfaces = _interfaces(on_one_host)
        self.groups = {"all": self._group("all", rank, count, "cpu")}
        if rank:
            self.groups["all"].set_timeout(FOREVER)
        _teams.add(self)

    @classmethod
    def launched(cls) -> "Team":
        """Return the team of all processes that torchrun, or another program, has started."""
        if dist.is_initialized():
            store, rank, count = dist.group.WORLD.get_group_store(), dist.get_rank(), dist.get_world_size()
        else:
            store, rank, count = next(dist.rendezvous("env://", timeout=STARTING))
        store = dist.PrefixStore(f"team {store.add(f'teams of {rank}', 1)}", store)
        on_one_host = os.environ.get("LOCAL_WORLD_SIZE", "?") == os.environ.get("WORLD_SIZE")
        return cls(store, rank, count, on_one_host=on_one_host)

    def connect(self, sizes: Mapping[str, int], device: str) -> None:
        """Make the groups of a mesh of these sizes, all processes together. `device` is "cpu" or "cuda"."""
        c, t = divmod(self.rank, sizes["tensor"])
        self.groups["context"] = self._group(f"context {t}", c, sizes["context"], device)
        self.groups["tensor"] = self._group(f"tensor {c}", t, sizes["tensor"], device)

    def _group(self, name: str, rank: int, count: int, device: str) -> dist.ProcessGroup:
        """Return a group that torch.distributed does not know."""
        store = dist.PrefixStore(name, self._store)
        if device == "cuda":
            kind = dist.ProcessGroup.BackendType.NCCL
            backend = dist.ProcessGroupNCCL(store, rank, count, timeout=STARTING)
        else:
            gloo, kind = dist.ProcessGroupGloo, dist.ProcessGroup.BackendType.GLOO
            options = gloo._Options()
            devices = [gloo.create_device(interface=one) for one in self._interfaces]
            options._devices, options._timeout = devices or [gloo.create_default_device()], STARTING
            backend = gloo(store, rank, count, options)
        group = dist.ProcessGroup(store, rank, count)
        group._set_default_backend(kind)
        group._register_backend(torch.device(device), kind, backend)
        return group

    def wait_at_most(self, seconds: float) -> None:
        """Set the time limit of all groups, but a follower waits for the next message as long as process 0 lives."""
        for name, group in self.groups.items():
            if name != "all" or not self.rank:
                group.set_timeout(timedelta(seconds=seconds))

    def send(self, message: object) -> None:
        """Send a message from process 0 to all others. None is the last one."""
        dist.broadcast_object_list([message], group=self.groups["all"], group_src=0)

    def receive(self) -> Any:
        """Wait for the next message of process 0. Raise ConnectionError if process 0 has ended."""
        received = [None]
        try:
            dist.broadcast_object_list(received, group=self.groups["all"], group_src=0)
        except RuntimeError as error:
            raise ConnectionError("process 0 has ended") from error
        return received[0]

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
        for group in self.groups.values():
            group.abort()


def lost_connection(error: BaseException | None) -> bool:
    """Return whether an exception, or its cause, means that another process has ended or gave no answer in time."""
    if isinstance(error, ConnectionError | dist.DistError):
        return True
    said = re.search("gloo|nccl|connection|timed out|timeout", str(error), re.I)
    return type(error) is RuntimeError and (said is not None or lost_connection(error.__cause__))


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


def _keep_in_fork() -> None:
    """Never destroy the groups of a forked process: their destruction waits for threads that a fork does not have."""
    for team in _teams:
        for group in (team._store, *team.groups.values()):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


os.register_at_fork(after_in_child=_keep_in_fork)
