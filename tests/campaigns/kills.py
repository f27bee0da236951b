"""Conversions that are killed at random moments: the destination is whole or absent, and --resume
gives the bytes of a quiet run.

    python -m tests.campaigns.kills --seed 1 --runs 200
    python -m tests.campaigns.kills --seed 1 --runs 50 --processes 3
    python -m tests.campaigns.kills --seed 1 --runs 5 --processes 3 --torchrun

A run is a conversion in either direction, with or without --overwrite and --no-sync, that is ended
up to three times, by KILL, TERM or INT, and then finished with --resume. Of several processes, one
is ended and the others must end by themselves; with --torchrun the agent may be the one. Prints a
line for each violation and one in the end; exit status 1 where there was any.
"""

import argparse
import contextlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from tests.starting import fork_server, warm
from tests.starting.ranks import free_port
from tests.tools.disk import tree

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
OPTIONS = {"hf-to-mcore": ["--tp", "2", "--ep", "2"], "mcore-to-hf": ["--max-shard-size", "200KB"]}
PATIENCE = 60  # seconds after which those that are left have to have ended


def convert(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """In a process of its own: the command line, with its output in a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout, sys.stderr = os.fdopen(1, "w", buffering=1), os.fdopen(2, "w", buffering=1)
    os.environ.update(environment)
    if not environment:
        sys.modules.pop("torch", None)  # one process does not load it, and forks its workers
    sys.argv = ["reshard", *arguments]
    from reshard.cli.main import main

    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        main()
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(int(end.code or 0))  # taking torch down again takes longer than the run


class Forked:
    """A conversion in processes that are forked with torchrun's environment variables. `prelude` is what they run
    first."""

    prelude = ""

    def __init__(self, arguments: list[str], processes: int, log: Path) -> None:
        port = free_port()
        variables = [
            {}
            if processes == 1
            else {
                "RANK": str(i),
                "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            for i in range(processes)
        ]
        code = self.prelude + (
            "import json, sys; from tests.campaigns.kills import convert; convert(*json.loads(sys.argv[1]))"
        )
        self.processes = [
            fork_server.Forked(warm.python_of_ranks(), "-c", code, json.dumps([arguments, v, str(log)]))
            for v in variables
        ]

    def end(self, number: int, choice: random.Random) -> None:
        """Send a signal to one of them."""
        process = choice.choice(self.processes)
        if process.is_alive():
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(process.pid, number)

    def running(self) -> bool:
        """Whether any of them is."""
        return any(process.is_alive() for process in self.processes)

    def wait(self) -> list[int | None]:
        """Their exit codes; None for one that had to be killed in the end."""
        deadline = time.monotonic() + PATIENCE
        codes = []
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            codes.append(process.exitcode)
            if process.exitcode is None:
                process.kill()
                process.join()
        return codes


class Torchrun:
    """A conversion under torchrun."""

    def __init__(self, arguments: list[str], processes: int, log: Path) -> None:
        self.log, self.folder = log, Path(tempfile.mkdtemp(dir=log.parent))
        self.agent = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "torch.distributed.run",
                f"--nproc-per-node={processes}",
                "--standalone",
                "--redirects",
                "3",
                "--log-dir",
                str(self.folder),
                "--no-python",
                sys.executable,
                "-m",
                "reshard.cli.main",
                *arguments,
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def end(self, number: int, choice: random.Random) -> None:
        """Send a signal to the agent or to one of its processes."""
        import psutil

        with contextlib.suppress(psutil.NoSuchProcess):
            agent = psutil.Process(self.agent.pid)
            choice.choice([agent, *agent.children()]).send_signal(number)

    def running(self) -> bool:
        """Whether the agent is."""
        return self.agent.poll() is None

    def wait(self) -> list[int | None]:
        """The agent's exit code, once no process is left that it started."""
        import psutil

        try:
            children = psutil.Process(self.agent.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            children = []
        try:
            self.agent.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            self.agent.kill()
            self.agent.wait()
            return [None]
        _, left = psutil.wait_procs(children, timeout=PATIENCE)
        for process in left:
            process.kill()
        with open(self.log, "ab") as log:
            for path in sorted(self.folder.rglob("std*.log")):
                log.write(path.read_bytes())
        return [None] if left else [self.agent.returncode]


@dataclass
class Outcome:
    """What came of all runs: signals that ended a process and those that came too `late`, runs that
    went on with tensors that were done (`resumed`); `wrong` has a sentence for each violation."""

    runs: int = 0
    ended: Counter = field(default_factory=Counter)
    late: int = 0
    resumed: int = 0
    left: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        ended = ", ".join(f"{n} {name}" for name, n in sorted(self.ended.items()))
        left = ", ".join(f"{n} {what}" for what, n in sorted(self.left.items()))
        times = f"ended {sum(self.ended.values())} times ({ended}; {self.late} signals came too late)"
        return (
            f"{self.runs} runs, {times}; left {left}; {self.resumed} went on with finished tensors; wrong: "
            f"{len(self.wrong)}"
        )

    def proves(self, kills: int) -> bool:
        """Whether at least so many signals ended a process, and a run went on with what another had done."""
        return sum(self.ended.values()) >= kills and self.resumed > 0


class Kills:
    """Kills conversions of one checkpoint in a folder. `start` starts one: `Forked` or `Torchrun`."""

    def __init__(self, checkpoint: Path, folder: Path, seed: int, processes: int = 1, start=Forked) -> None:
        from reshard import MegatronLayout, hf_to_mcore, mcore_to_hf

        self.folder, self.random, self.processes, self.start, self.outcome = (
            folder,
            random.Random(seed),
            processes,
            start,
            Outcome(),
        )
        made = folder / "quiet"
        made.mkdir()
        hf_to_mcore(checkpoint, made / "mcore", MegatronLayout(tp=2, ep=2))
        mcore_to_hf(made / "mcore", made / "hf", max_shard_size="200KB")
        hf_to_mcore(checkpoint, made / "old-mcore", MegatronLayout(pp=2))
        mcore_to_hf(made / "mcore", made / "old-hf")
        self.sources = {"hf-to-mcore": checkpoint, "mcore-to-hf": made / "mcore"}
        self.new = {"hf-to-mcore": tree(made / "mcore"), "mcore-to-hf": tree(made / "hf")}
        self.old = {"hf-to-mcore": made / "old-mcore", "mcore-to-hf": made / "old-hf"}

    def run(self) -> None:
        """One conversion, ended up to three times and then finished."""
        self.outcome.runs += 1
        number, choice = self.outcome.runs, self.random
        direction = choice.choice(list(OPTIONS))
        place = self.folder / f"run-{number}"
        place.mkdir()
        out, log = place / "out", self.folder / "log"
        log.unlink(missing_ok=True)
        overwrite = choice.random() < 0.4
        if overwrite:
            shutil.copytree(self.old[direction], out)
        old = tree(out) if overwrite else None
        options = [
            *OPTIONS[direction],
            *(["--overwrite"] if overwrite else []),
            *(["--no-sync"] if choice.random() < 0.3 else []),
        ]
        arguments = [direction, str(self.sources[direction]), str(out), *options]
        said = [f"run {number} ({direction}{', overwrite' if overwrite else ''})"]
        for _ in range(choice.randint(1, 3)):
            resume = ["--resume"] if choice.random() < 0.8 else []
            process = self.start(arguments + resume, self.processes, log)
            after = self._wait(process, place, out)
            sent = choice.choice(SIGNALS)
            process.end(sent, choice)
            codes = process.wait()
            said.append(f"{sent.name} {after}: {codes}")
            if self.start is Torchrun:
                ended = any(codes)  # the agent's, which is 1 whatever ended one of its processes
            else:
                ended = -sent in codes or (sent == signal.SIGINT and 130 in codes)
            if ended:
                self.outcome.ended[sent.name] += 1
            else:
                self.outcome.late += 1
            if None in codes:
                self._wrong(said, "a process did not end by itself", log)
            found = tree(out) if out.exists() else None
            if found == self.new[direction]:
                self.outcome.left["new"] += 1
                if not overwrite:
                    break
            elif found == old:
                self.outcome.left["old" if overwrite else "none"] += 1
            else:
                return self._wrong(said, "the destination is neither whole nor what it was", log)
        codes = self.start([*arguments, "--resume"], self.processes, log).wait()
        said.append(f"at last: {codes}")
        text = log.read_text(errors="replace")
        self.outcome.resumed += bool(re.search("^resumed: [1-9]", text, re.MULTILINE))
        if not out.exists() or tree(out) != self.new[direction]:
            return self._wrong(said, "the bytes are not those of a quiet run", log)
        if any(codes) and "exists; pass --overwrite" not in text:
            return self._wrong(said, "it could not be finished", log)
        if [p.name for p in place.iterdir()] != ["out"]:
            return self._wrong(said, f"files are left: {sorted(p.name for p in place.iterdir())}", log)
        # Where Python meets an interrupt in a destructor, it prints that and goes on: nothing that
        # a program can mend.
        if text.count("Traceback") > len(
            re.findall("^Exception ignored in: .*\\nTraceback", text, re.MULTILINE)
        ):
            return self._wrong(said, "a traceback", log)
        shutil.rmtree(place)

    def _wait(self, process: Forked | Torchrun, place: Path, out: Path) -> str:
        """Wait until the run is at a phase that is drawn, and then some milliseconds: its length
        depends on the machine's load."""
        work, choice, before = (
            place / ".out.reshard-partial",
            self.random,
            out.stat().st_ino if out.exists() else 0,
        )
        lines = choice.randint(1, 140)
        phases = {
            "at its start": lambda: True,
            "with a working directory": work.exists,
            f"with {lines} lines of journals": lambda: (
                sum(p.read_bytes().count(b"\n") for p in work.glob("journal-*")) >= lines
            ),
            "with small files": lambda: any(work.glob("tree/**/config.json")),
            "with a manifest": (work / "tree" / "reshard.json").exists,
            "in its place": lambda: out.exists() and out.stat().st_ino != before,
        }
        if self.processes > 1 and self.start is Forked:
            del phases["at its start"]  # the others would wait for it to come: there is no agent to end them
        phase = choice.choice(list(phases))
        while process.running():
            with contextlib.suppress(OSError):
                begun = phase in ("at its start", "in its place") or _locked(work)
                if begun and phases[phase]():
                    break
            time.sleep(0.0005)
        time.sleep(
            min(choice.expovariate(1 / 0.004), 0.1) if phase != "at its start" else choice.uniform(0, 0.3)
        )
        return phase

    def _wrong(self, said: list[str], what: str, log: Path) -> None:
        self.outcome.wrong.append("; ".join([*said, what]))
        print(self.outcome.wrong[-1], log.read_text(errors="replace")[-3000:], sep="\n", flush=True)


def _locked(work: Path) -> bool:
    """Whether a run has a working directory's lock: what is in it may be of one before."""
    return f":{(work / 'reshard-run').stat().st_ino} " in Path("/proc/locks").read_text()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--torchrun", action="store_true")
    options = parser.parse_args()
    import torch

    from tests.tools.checkpoints import make

    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make(Path(folder) / "checkpoint", "qwen3-moe", dtype=torch.bfloat16)
        kills = Kills(
            checkpoint,
            Path(folder),
            options.seed,
            options.processes,
            Torchrun if options.torchrun else Forked,
        )
        begun = time.monotonic()
        for _ in range(options.runs):
            kills.run()
        how = " under torchrun" if options.torchrun else ""
        print(
            f"seed {options.seed}, {options.processes} process{'es' * (options.processes != 1)}{how}: "
            f"{kills.outcome}; {time.monotonic() - begun:.0f} s"
        )
        if not kills.outcome.proves(1):
            sys.exit("no process was ended, or nothing was there to go on with: this says nothing")
    sys.exit(1 if kills.outcome.wrong else 0)


if __name__ == "__main__":
    main()
