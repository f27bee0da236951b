"""Engines that join, die, hang, come back and leave at random, while a trainer's fleet goes on.

    python -m tests.campaigns.fleet --seed 1 --sends 300 --engines 6

Engines are processes with a server of vLLM's routes and one tensor, which they pass on to each other. Before and during
sends some are killed, stopped, continued, started again, removed and added, and the trainer's fleet is made anew. After
each send every engine that the report names as refitted has the trainer's bits; every other that says that it serves a
version has the bits of that one; no send takes longer than its limits; and none fails while an engine is there that
nobody has disturbed. Prints a line for each violation and one in the end; exit status 1 where there was any.
"""

import argparse
import json
import logging
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from zlib import crc32

import torch

from reshard.comm.http import call_route
from reshard.core.errors import ReshardError, first_line
from reshard.integrations.fleet import Fleet
from reshard.integrations.vllm.transfer import HttpClient
from reshard.refit import RefitGroup, connect
from tests.refit.test_transports import OneShard, OneTensor
from tests.starting.ranks import free_port
from tests.tools.lender import Lender

ROWS = 1 << 16
TIMEOUT = 4.0  # of a fleet's members for each other
# A send waits for one that hangs, asks who answers, and goes on without it; and this is a busy machine.
PATIENCE = 3 * TIMEOUT + 30.0


def crc(weight: torch.Tensor) -> int:
    """Return a checksum of a tensor's bits."""
    return crc32(weight.view(torch.int16).numpy().tobytes())


def serve(port: int) -> None:
    """Serve an engine at a port, until the process is killed."""
    torch.set_num_threads(1)
    engine, links = OneTensor(ROWS), []
    lending = Lender(engine)

    def init(info: dict) -> None:
        lends = info.pop("lends", None)
        if lends is not None:
            lending.reshard_lend(info.pop("address"), info.pop("first_rank"), info.pop("size"), lends, **info)
            return
        for link in links:
            with suppress(ReshardError):
                link.close()
            link.group.close()
        links.clear()
        first = info.pop("first_rank")
        group = RefitGroup.join(info["address"], first, info["size"], info["timeout"], info["secret"])
        links.append(connect(group, None, engine, name=info["name"]))

    def update(info: dict) -> None:
        with links[0].group.expecting(info["ticket"]):
            links[0].refit(info["version"], info["verify"])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = {"ready": engine.ready, "version": engine.version, "crc": crc(engine.weight)}
            self.answer(200, {"world_size": 1} if "world_size" in self.path else state)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if "collective_rpc" in self.path:
                self.answer(200, {"results": [engine.guard.state()]})
                return
            try:
                if "init_info" in body:
                    init(body["init_info"])
                elif "update_info" in body:
                    update(body["update_info"])
            except (ReshardError, LookupError) as error:
                self.answer(500, {"error": first_line(error)})
            else:
                self.answer(200, {})

        def answer(self, code: int, body: dict) -> None:
            with suppress(OSError):
                self.send_response(code)
                self.end_headers()
                self.wfile.write(json.dumps(body).encode())

        def log_message(self, *_: object) -> None:
            """Nothing."""

    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


class Pod:
    """An engine's process, always at the same port."""

    def __init__(self, name: str) -> None:
        self.name, self.port, self.process, self.stopped = name, free_port(), None, False
        self.url = f"http://127.0.0.1:{self.port}"

    @property
    def is_alive(self) -> bool:
        """True while its process runs, or is stopped."""
        return self.process is not None and self.process.is_alive()

    def start(self) -> None:
        """Start it, and wait until it answers."""
        self.process = multiprocessing.get_context("forkserver").Process(
            target=serve, args=(self.port,), daemon=True
        )
        self.process.start()
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            with suppress(ReshardError):
                return call_route(self.url, "get_world_size", timeout=5)
            time.sleep(0.05)
        raise AssertionError(f"{self.name} did not start")

    def signal(self, number: int) -> None:
        """Send a signal to it."""
        if self.is_alive:
            os.kill(self.process.pid, number)
            self.stopped = number == signal.SIGSTOP or (self.stopped and number != signal.SIGCONT)
            if number == signal.SIGKILL:
                self.process.join(10)
                self.stopped = False


def disturb(pod: Pod, fleet: Fleet, rng: random.Random, counts: Counter) -> None:
    """Do something to an engine."""
    if not pod.is_alive:
        what = "start"
    elif pod.stopped:
        what = rng.choice(["continue", "continue", "kill"])
    else:
        what = rng.choice(["kill", "stop", "leave", "join", "nothing"])
    counts[what] += 1
    if what == "start":
        pod.start()
    elif what in ("kill", "stop", "continue"):
        signals = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "continue": signal.SIGCONT}
        pod.signal(signals[what])
    elif what == "leave" and pod.name in fleet.names():
        fleet.remove(pod.name)
    elif what == "join" and pod.name not in fleet.names():
        fleet.add(HttpClient(pod.url, timeout=30, name=pod.name))


def campaign(seed: int, sends: int, engines: int) -> tuple[list[str], Counter, float]:
    """Return the violations, what happened how often, and the longest send in seconds."""
    rng, counts, violations, longest = random.Random(seed), Counter(), [], 0.0
    anew = random.Random(~seed)
    source, crcs = OneShard(0, ROWS), {}
    pods = [Pod(f"pod-{index}") for index in range(engines)]
    fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT, relays="always")
    for pod in pods:
        pod.start()
        fleet.add(HttpClient(pod.url, timeout=30, name=pod.name))
    for version in range(sends):
        source.weight.copy_(torch.randn(ROWS, 8))
        crcs[version] = crc(source.weight)
        touched = [pod for pod in pods if rng.random() < (0.08 if pod.is_alive and not pod.stopped else 0.4)]
        for pod in touched:
            disturb(pod, fleet, rng, counts)
        for pod in pods:
            if pod.is_alive and not pod.stopped and pod.name not in fleet.names() and rng.random() < 0.5:
                fleet.add(HttpClient(pod.url, timeout=30, name=pod.name))
        within = []
        if rng.random() < 0.3:
            victim, number = rng.choice(pods), rng.choice([signal.SIGKILL, signal.SIGSTOP])
            within.append(threading.Timer(rng.random() * 0.4, victim.signal, [number]))
            touched.append(victim)
            counts["within"] += 1
        for timer in within:
            timer.start()
        began, refused = time.monotonic(), ""
        try:
            report = fleet.send(version, verify=rng.random() < 0.3, pausing=rng.random() < 0.5)
            refitted = [*report.reports]
        except ReshardError as error:
            refused, refitted = str(error), []
        seconds = time.monotonic() - began
        longest = max(longest, seconds)
        for timer in within:
            timer.join()
        if seconds > PATIENCE:
            violations.append(f"version {version} took {seconds:.1f} s")
        sound = [
            p for p in pods if p not in touched and p.is_alive and not p.stopped and p.name in fleet.names()
        ]
        if refused and sound:
            violations.append(
                f"version {version} was refused ({refused}) beside {[pod.name for pod in sound]}"
            )
        if not refused:
            for pod in sound:
                counts["left out"] += pod.name not in refitted
        violations += [
            f"version {version}: {pod.name} {said}"
            for pod in pods
            if (said := wrong(pod, version, crcs, refitted))
        ]
        counts["refitted"] += len(refitted)
        if rng.random() < 0.5:
            violations += between(pods, fleet, version, crcs, rng, counts)
        if anew.random() < 0.2:
            fleet.close()
            fleet = Fleet(source, "127.0.0.1", timeout=TIMEOUT, relays="always")
            for pod in pods:
                if pod.is_alive:
                    fleet.add(HttpClient(pod.url, timeout=30, name=pod.name))
            counts["trainers"] += 1
            violations += before_it_sends(pods, fleet, crcs, anew, counts)
    for pod in pods:
        pod.signal(signal.SIGKILL)
    fleet.close()
    return violations, counts, longest


def between(
    pods: list[Pod], fleet: Fleet, version: int, crcs: dict[int, int], rng: random.Random, counts: Counter
) -> list[str]:
    """Start engines that are dead, and disturb one, while those that are behind get the version from others; return the
    violations."""
    for pod in pods:
        if not pod.is_alive and rng.random() < 0.7:
            pod.start()
            counts["start"] += 1
    before = {pod.name for pod in pods if pod.is_alive}
    if rng.random() < 0.3:
        timer = threading.Timer(
            rng.random(), rng.choice(pods).signal, [rng.choice([signal.SIGKILL, signal.SIGSTOP])]
        )
        timer.start()
        counts["between"] += 1
    deadline = time.monotonic() + rng.choice([0.5, 8.0])
    while time.monotonic() < deadline and any(one["why"] for one in fleet.describe()["engines"].values()):
        time.sleep(0.1)
    engines, violations = fleet.describe()["engines"], []
    for pod in pods:
        engine = engines.get(pod.name, {})
        has_it = engine.get("version") == version and engine["why"] is None and pod.name in before
        counts["brought"] += has_it and not engine["connected"]
        if has_it and not engine["connected"] and (said := wrong(pod, version, crcs, [pod.name])):
            violations.append(f"version {version}, from others: {pod.name} {said}")
    return violations


def before_it_sends(
    pods: list[Pod], fleet: Fleet, crcs: dict[int, int], rng: random.Random, counts: Counter
) -> list[str]:
    """Wait while engines that are behind get what others serve from a trainer before; return the violations."""
    deadline = time.monotonic() + rng.choice([0.5, 12.0])
    while time.monotonic() < deadline and any(one["why"] for one in fleet.describe()["engines"].values()):
        time.sleep(0.1)
    said, violations = fleet.describe(), []
    for pod in pods:
        engine = said["engines"].get(pod.name, {})
        has_it = said["found"] is not None and engine.get("version") == said["found"] and not engine["why"]
        counts["found"] += has_it
        refitted = [pod.name] if has_it else []
        if why := wrong(pod, said["found"] if has_it else 0, crcs, refitted):
            violations.append(
                f"before a new trainer's first version, {said['found']} was found: {pod.name} {why}"
            )
    return violations


def wrong(pod: Pod, version: int, crcs: dict[int, int], refitted: list[str]) -> str:
    """Say what is wrong with what an engine serves; empty for nothing."""
    if not pod.is_alive or pod.stopped:
        return ""
    try:
        state = call_route(pod.url, "state", timeout=20)
    except ReshardError as error:
        return "" if not pod.is_alive or pod.stopped else f"does not answer ({error})"
    if pod.name in refitted and (state["version"], state["crc"]) != (version, crcs[version]):
        return f"is said to be refitted, and has {state}"
    if state["ready"] and state["crc"] != crcs[state["version"]]:
        return f"serves torn or other weights: {state}"
    return ""


def main() -> None:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sends", type=int, default=300)
    parser.add_argument("--engines", type=int, default=6)
    options = parser.parse_args()
    multiprocessing.set_forkserver_preload(["tests.campaigns.fleet"])
    logging.disable(logging.WARNING)  # each of a fleet's losses is one
    torch.set_num_threads(1)
    began = time.monotonic()
    violations, counts, longest = campaign(options.seed, options.sends, options.engines)
    for violation in violations:
        print(violation)
    print(
        f"{options.sends} sends in {time.monotonic() - began:.0f} s, the longest {longest:.1f} s: {dict(counts)}; "
        f"{len(violations)} violations"
    )
    sys.exit(bool(violations))


if __name__ == "__main__":
    main()
