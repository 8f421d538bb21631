"""Which address of this node the others can reach, and which interface it belongs to."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Sequence

from hpcgrpo.config import ConfigError

SIOCGIFADDR = 0x8915


def own_address(interface: str | None, peers: Sequence[str]) -> str:
    """This node's IPv4 address towards `peers` (host names).

    That of `interface` where one is named; else the one from which the first peer is reached: a host's own name
    often leads to 127.0.1.1. Without peers: 127.0.0.1.

    Raises ConfigError for an interface that is not there and for peers without an address.
    """
    if interface is not None:
        address = interface_address(interface)
        if address is None:
            names = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"cluster.interface {interface}: {socket.gethostname()} has no such interface with an IPv4 address;"
                f" it has {names}"
            )
        return address
    for peer in peers:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((peer, 9))  # UDP: nothing is sent, the kernel chooses the route
            except OSError:
                continue
            return str(probe.getsockname()[0])
    if peers:
        raise ConfigError(
            f"{socket.gethostname()} finds no address for {', '.join(peers)}; set cluster.interface to the interface"
            " between the nodes"
        )
    return "127.0.0.1"


def interface_address(name: str) -> str | None:
    """An interface's IPv4 address, None where it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name[:15].encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def interface_of(address: str) -> str | None:
    """The interface that has an address: what gloo and NCCL want named."""
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in names if interface_address(name) == address), None)
