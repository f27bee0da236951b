"""Hosts on one machine: network namespaces with a link each to a switch between them, and a boot id each, by which
hosts are told apart, for as long as standard input stays open.

Run as a program, which takes how many there are (2), it prints the processes that hold the namespaces, ``{"user": bool,
"hosts": [pid, pid]}``; `enter` moves the calling process into one. Without root a user namespace is made first,
where the kernel allows that.
"""

import json
import os
import sys
import tempfile
import uuid
from pathlib import Path

from tests.tools.container import MS_BIND, MS_PRIVATE, MS_REC, mount

ADDRESSES = tuple(f"10.199.7.{host}" for host in range(1, 33))


def main() -> None:
    from pyroute2 import IPRoute

    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    user, uid = os.geteuid() != 0, os.geteuid()
    os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS | (os.CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/uid_map").write_text(f"0 {uid} 1")
    network = IPRoute()
    network.link("add", ifname="switch", kind="bridge")
    [switch] = network.link_lookup(ifname="switch")
    network.link("set", index=switch, state="up")
    processes = [_host(network, switch, host) for host in range(count)]
    print(json.dumps({"user": user, "hosts": processes}), flush=True)
    sys.stdin.read()
    for process in processes:
        os.kill(process, 9)


def _host(network, switch: int, host: int) -> int:
    """Start a process that holds the namespaces of a host; return its id once its link is up."""
    from pyroute2 import IPRoute

    ready, wait = os.pipe(), os.pipe()
    process = os.fork()
    if not process:
        os.close(wait[1])
        os.unshare(os.CLONE_NEWNET | os.CLONE_NEWNS)
        os.write(ready[1], b"-")
        os.read(wait[0], 1)
        _bring_up(IPRoute(), host)
        os.write(ready[1], b"-")
        os.read(wait[0], 1)
        os._exit(0)
    os.close(wait[0])
    os.read(ready[0], 1)
    peer = {"ifname": f"host{host}", "net_ns_fd": f"/proc/{process}/ns/net"}
    network.link("add", ifname=f"port{host}", kind="veth", peer=peer)
    [port] = network.link_lookup(ifname=f"port{host}")
    network.link("set", index=port, master=switch, state="up")
    os.write(wait[1], b"-")
    os.read(ready[0], 1)
    return process


def _bring_up(network, host: int) -> None:
    """Make the namespaces of this process a host."""
    mount("none", "/", MS_REC | MS_PRIVATE)
    mount("sysfs", "/sys", kind="sysfs")  # in which UCX looks for network devices
    with tempfile.NamedTemporaryFile("w") as file:
        print(uuid.uuid4(), file=file, flush=True)
        mount(file.name, "/proc/sys/kernel/random/boot_id", MS_BIND)
    [link] = network.link_lookup(ifname=f"host{host}")
    network.addr("add", index=link, address=ADDRESSES[host], prefixlen=24)
    network.link("set", index=link, state="up")
    network.link("set", index=network.link_lookup(ifname="lo")[0], state="up")


def enter(held: dict, host: int) -> None:
    """Move this process, which has one thread yet, to a host."""
    pid, here = held["hosts"][host], os.getcwd()
    for kind in (["user"] if held["user"] else []) + ["net", "mnt"]:
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            os.setns(namespace.fileno())
    os.chdir(here)


if __name__ == "__main__":
    main()
