"""A fleet of real ``vllm serve``s that are added, killed, stopped, started again and removed, and a trainer of two
ranks."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import torch.distributed as dist

from reshard import MegatronLayout, digest
from reshard.comm.ranks import on_first_rank
from reshard.core.errors import ReshardError
from reshard.integrations import Fleet, HttpClient
from reshard.parity.systems.megatron import Megatron
from reshard.trainers import MegatronModel
from tests.on_cpu.engine_transfers_on_cpu import running
from tests.starting.ranks import free_port
from tests.tools.vllm_server import served

LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Served:
    """A ``vllm serve`` with our weight transfer, always at the same port."""

    def __init__(self, name: str, directory: str, *options: str) -> None:
        self.options = (*options, "--weight-transfer-config", json.dumps({"backend": "reshard"}))
        self.name, self.directory, self.port, self.stack = name, directory, free_port(), ExitStack()
        self.url = f"http://127.0.0.1:{self.port}"
        self.client = HttpClient(self.url, name=name)

    def start(self) -> None:
        log = Path(self.directory).parent / f"{self.name}.log"
        self.stack.enter_context(
            served(self.directory, *self.options, log=log, port=self.port, VLLM_SERVER_DEV_MODE="1")
        )

    def family(self) -> list[psutil.Process]:
        [pid] = {
            c.pid
            for c in psutil.net_connections("tcp")
            if c.status == "LISTEN" and c.laddr.port == self.port and c.pid
        }
        front = psutil.Process(pid)
        return [front, *front.children(recursive=True)]

    def kill(self) -> None:
        for process in self.family():
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self.stack.close()


def on_call(*arguments: str) -> str:
    """What ``reshard fleet`` prints."""
    command = [sys.executable, "-m", "reshard", "fleet", *arguments]
    ended = subprocess.run(command, capture_output=True, text=True)
    return ended.stdout + ended.stderr


def brought_up(members: Fleet, engine: Served, anew: bool = False) -> dict:
    """What the fleet says of an engine that was started again, or added anew, between two sends, once another one has
    handed on what that serves; and what it serves then."""
    if anew:
        members.remove(engine.name)
    engine.kill()
    engine.start()
    if anew:
        members.add(engine.client)
    deadline = time.monotonic() + 60
    while engine.client.serves() is None and time.monotonic() < deadline:
        time.sleep(0.2)
    time.sleep(1)
    return {
        "said": members.describe()["engines"][engine.name] | {"age": None},
        "serves": engine.client.serves(),
        "digest": digest(engine.url).text,
    }


def fleet(pairs: list) -> dict:
    """What a fleet's reports say after each of its members' fates, and the digests of what they serve then."""
    trainer, outcome = Megatron(Path(pairs[0][1]), "fp32", MegatronLayout(tp=2)), {}
    first, source = dist.get_rank() == 0, MegatronModel(trainer.models)
    for name in [n for n in os.environ if n.startswith("TORCHELASTIC") or n in LAUNCHER]:
        del os.environ[name]
    one, two = (Served(name, pairs[0][0]) for name in ("one", "two"))
    # So little would not be passed on otherwise.
    options = {"timeout": 25, "relays": "always"}
    address = on_first_rank(lambda: f"127.0.0.1:{free_port()}")
    members = Fleet(source, address, registry=True, **options)

    def send(step: str, weights: int, silent: str = "", **options) -> None:
        trainer.load(Path(pairs[weights][1]))
        began, refused = time.monotonic(), ""
        try:
            report = members.send(**options)
            said = {"version": report.version, "refitted": [*report.reports], "behind": report.behind}
        except ReshardError as error:
            said, refused = {}, str(error)
        said |= {"seconds": time.monotonic() - began, "refused": refused, "described": members.describe()}
        every = [None] * dist.get_world_size()
        # The first rank may already know more of one that others are to bring up.
        engines = {
            name: engine | {"age": None, "why": bool(engine["why"])}
            for name, engine in said["described"]["engines"].items()
        }
        dist.all_gather_object(
            every, said | {"seconds": None, "described": said["described"] | {"engines": engines}}
        )
        assert every[0] == every[1], every
        if first:
            served_now = {}
            for engine in (one, two):
                with suppress(ReshardError):
                    if engine.name != silent:
                        served_now[engine.name] = digest(engine.url).text
            links = [connection.transfer.link for connection in members._connections]
            sends = [send["to"] for link in links for send in link.describe()["sends"]]
            outcome[step] = said | {"serve": served_now, "sends": sends}
        dist.barrier()

    def on_first(action) -> None:
        if first:
            action()
        dist.barrier()

    with one.stack, two.stack:
        send("alone", 0)
        on_first(one.start)
        on_first(lambda: members.add(one.client))
        send("one joins", 1)
        on_first(two.start)
        on_first(lambda: on_call(address, "--join", two.url, "--name", "two"))
        with running(one.url, one.directory) if first else ExitStack():
            send("two joins", 0, pausing=True, verify=True)
        on_first(two.kill)
        send("two has died", 1)
        send("two is required", 0, required=["two"])
        on_first(two.start)
        send("two is back", 1)
        on_first(lambda: [process.suspend() for process in two.family()])
        stopped = two.family() if first else []
        send("two hangs", 0, silent="two", pausing=True)
        on_first(lambda: [process.resume() for process in stopped])
        send("two goes on", 1)
        if first:
            outcome["shown"] = on_call(address), json.loads(on_call(address, "--json"))
        if first:
            with running(one.url, one.directory):
                outcome["from a peer"] = [brought_up(members, two, anew=True), brought_up(members, two)]
        dist.barrier()
        send("after a peer", 0)
        on_first(lambda: on_call(address, "--leave", "one"))
        send("one has left", 1)
        if first:
            outcome["nobody"] = on_call(address, "--leave", "three")
            outcome["wrong"] = []
            for action in (lambda: members.add(two.client), lambda: members.remove("three")):
                try:
                    action()
                except ReshardError as error:
                    outcome["wrong"].append(str(error))
        members.close()
        members = Fleet(source, "127.0.0.1", **options)
        on_first(lambda: [members.add(engine.client) for engine in (one, two)])
        if first:
            deadline = time.monotonic() + 60
            while one.client.serves() != 9 and time.monotonic() < deadline:
                time.sleep(0.2)
            time.sleep(1)
            outcome["before it sends"] = members.describe() | {
                "serve": [digest(e.url).text for e in (one, two)]
            }
        dist.barrier()
        send("another trainer", 0, version=40)
        members.close()
    return outcome
