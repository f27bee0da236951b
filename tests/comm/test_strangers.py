"""Whoever reaches the port at which members meet, and does not know their secret, reads nothing and
disturbs nobody."""

import gc
import os
import secrets
import socket
import stat
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from reshard.comm import channel as channels
from reshard.comm import hosts
from reshard.comm import secret as secret_module
from reshard.comm.channel import BrokenChannelError, FrameReader, FrameWriter, connect
from reshard.comm.door import Door
from reshard.comm.hosts import address_towards, is_loopback, listener_for
from reshard.refit import RefitGroup
from tests.starting.ranks import caught, free_port

SECRET, OTHER = "a secret of the members", "a guess of the stranger"


def refit(members: RefitGroup, payload: bytes = b"what only members read") -> list[bytes]:
    with members.transaction("a refit"):
        parts = members.gather("parts", payload)
        members.prepare()
        members.commit()
    return parts


def of_all(members: list[RefitGroup], times: int = 1) -> float:
    """Refit together; the seconds of the slowest one."""
    began = time.monotonic()
    with ThreadPoolExecutor(len(members)) as pool:
        for _ in range(times):
            assert all(len(parts) == len(members) for parts in pool.map(refit, members))
    return time.monotonic() - began


def met(port: int, size: int = 2, secret: str = SECRET) -> list[RefitGroup]:
    return [
        RefitGroup.join(f"127.0.0.1:{port}", rank, size, timeout=20, secret=secret) for rank in range(size)
    ]


def steals(port: int, secret: str) -> list[bytes]:
    """What a stranger reads who speaks the whole protocol as rank 1 of 2."""
    return refit(RefitGroup.join(f"127.0.0.1:{port}", 1, 2, timeout=20, secret=secret))


@pytest.mark.parametrize("checked", [True, False], ids=["checked", "control"])
def test_a_stranger_who_joins_with_another_secret_is_not_let_in_and_with_the_check_off_reads_all(
    checked, monkeypatch
):
    if not checked:  # as if everybody knew the secret
        monkeypatch.setattr(channels, "_proof", lambda secret, label, challenge, nonce: label.ljust(32, b"-"))
    port = free_port()
    first = RefitGroup.join(f"127.0.0.1:{port}", 0, 2, timeout=20, secret=SECRET)
    with ThreadPoolExecutor(2) as pool:
        mine = pool.submit(refit, first)
        if not checked:
            assert steals(port, OTHER)[0] == mine.result()[0] == b"what only members read"
            return
        said = caught(lambda: steals(port, OTHER))
        assert said.startswith(
            f"rank 1 is not let in at 127.0.0.1:{port} (what serves there does not know the same secret, "
        )
        assert "RESHARD_SECRET" in said and OTHER not in said and SECRET not in said
        assert not RefitGroup.abort(f"127.0.0.1:{port}", "it is over", secret=OTHER)
        assert steals(port, SECRET) == mine.result(), "a member with the right secret works"


def test_who_serves_without_the_secret_learns_nothing():
    """A member that meets an impostor in the place of member 0."""
    port, heard = free_port(), []
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(channels.MAGIC + bytes(32))
                heard.append(connection.recv(1 << 16))
                connection.sendall(secrets.token_bytes(32))
                heard.append(connection.recv(1 << 16))

        thread = threading.Thread(target=serve)
        thread.start()
        said = caught(lambda: RefitGroup.join(f"127.0.0.1:{port}", 1, 2, timeout=20, secret=SECRET))
        thread.join()
    assert "does not know the same secret" in said
    assert len(heard[0]) == 64 and heard[1] == b"", "but for a nonce and a proof nothing is said"


def garbage(port: int) -> None:
    for words in (b"", b"GET / HTTP/1.1\r\n\r\n", secrets.token_bytes(1 << 16), b"\xff" * 40, bytes(1 << 20)):
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
            stranger.sendall(words)
            stranger.settimeout(1)
            while stranger.recv(1 << 16):
                pass


def proves_nothing(port: int) -> None:
    """A handshake whose proof is one of another meeting, and frames behind it."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        stranger.recv(40)
        stranger.sendall(
            secrets.token_bytes(64)
            + FrameWriter(b"key").frame({"op": "join", "rank": 1, "size": 2, "who": ""})
        )
        assert stranger.recv(1 << 16) in (bytes(32), b"")


def huge(port: int) -> None:
    """A frame that says it has 2 to the 36 bytes."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as stranger:
        for _ in range(256):
            stranger.sendall(channels.PREFIX.pack(1 << 24, 1 << 36, bytes(16)) + bytes(1 << 16))


@contextmanager
def silent(port: int, number: int):
    """So many connections that say a byte now and then, or none."""
    strangers = []
    try:
        for _ in range(number):
            strangers.append(socket.create_connection(("127.0.0.1", port), timeout=20))
        for stranger in strangers[::2]:
            with suppress(OSError):
                stranger.sendall(b"r")
        yield
    finally:
        for stranger in strangers:
            stranger.close()


def test_strangers_disturb_no_connect_and_no_refit():
    port = free_port()
    quiet = of_all(met(free_port()), times=20)
    first = RefitGroup.join(f"127.0.0.1:{port}", 0, 3, timeout=20, secret=SECRET)
    with silent(port, 600), ThreadPoolExecutor(1) as pool:
        began = time.monotonic()
        others = [RefitGroup.join(f"127.0.0.1:{port}", rank, 3, timeout=20, secret=SECRET) for rank in (1, 2)]
        assert time.monotonic() - began < channels.HANDSHAKE_SECONDS, "members wait for no stranger"
        over = threading.Event()

        def disturb() -> None:
            while not over.is_set():
                for attack in (garbage, proves_nothing, huge):
                    attack(port)

        disturbing = pool.submit(disturb)
        took = of_all([first, *others], times=50)
        over.set()
        disturbing.result()
        assert took < 20 + 20 * quiet
        assert of_all([first, *others], times=50) < 20 + 20 * quiet


def most_memory(process) -> int:
    """KiB that a process has had at once."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


def test_memory_is_not_taken_for_what_a_stranger_only_announces():
    code = f"""
import sys
from reshard.refit import RefitGroup
first = RefitGroup.join("127.0.0.1:{(port := free_port())}", 0, 1, timeout=20, secret={SECRET!r})
print("here", flush=True)
sys.stdin.readline()
with first.transaction("a refit"):
    first.prepare(); first.commit()
print("well", flush=True)
sys.stdin.readline()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdout.readline() == "here\n"
        before = most_memory(process)
        for _ in range(8):
            huge(port)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "well\n"
        assert most_memory(process) - before < 16 << 10
        process.stdin.close()


def frames() -> tuple[FrameReader, list[bytes]]:
    writer = FrameWriter(b"k" * 32)
    return FrameReader(b"k" * 32), [writer.frame({"op": "post", "n": n}, b"body") + b"body" for n in range(3)]


@pytest.mark.parametrize("change", ["nothing", "altered head", "altered body", "replayed", "left out", "swapped",
                                    "another connection"])  # fmt: skip
def test_a_message_that_was_altered_replayed_or_left_out_is_refused(change):
    reader, sent = frames()
    if change.startswith("altered"):
        at = sent[1].index(b"post" if change.endswith("head") else b"body")
        sent[1] = sent[1][:at] + bytes([sent[1][at] ^ 1]) + sent[1][at + 1 :]
    elif change == "replayed":
        sent.insert(1, sent[0])
    elif change == "left out":
        del sent[1]
    elif change == "swapped":
        sent[1], sent[2] = sent[2], sent[1]
    elif change == "another connection":
        sent[1] = FrameWriter(b"other key" * 3).frame({"op": "post", "n": 1}, b"body") + b"body"
    read = lambda: [message.head["n"] for one in sent for message in reader.feed(one)]  # noqa: E731
    if change == "nothing":
        assert read() == [0, 1, 2]
        return
    with pytest.raises(BrokenChannelError, match="altered, replayed or lost|no message"):
        read()


class InTheMiddle:
    """Passes on what two ends say to each other, and does something to the bytes that a member
    sends after its handshake."""

    def __init__(self, port: int, does: str) -> None:
        self.port, self.does, self.server = port, does, socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.server.getsockname()[1]}"
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        near, _ = self.server.accept()
        far = socket.create_connection(("127.0.0.1", self.port))
        threading.Thread(target=self.copy, args=(far, near, False), daemon=True).start()
        self.copy(near, far, True)

    def copy(self, source: socket.socket, target: socket.socket, spoils: bool) -> None:
        passed = 0
        with suppress(OSError):
            while data := source.recv(1 << 16):
                if spoils and b"secret weights" in data:
                    if self.does == "alters":
                        data = data.replace(b"secret weights", b"wicked weights")
                    elif self.does == "replays":
                        data += data
                passed += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("does", ["nothing", "alters", "replays"])
def test_who_stands_between_two_members_changes_nothing_unseen(does):
    port = free_port()
    first = RefitGroup.join(f"127.0.0.1:{port}", 0, 2, timeout=20, secret=SECRET)
    second = RefitGroup.join(InTheMiddle(port, does).address, 1, 2, timeout=20, secret=SECRET)
    with ThreadPoolExecutor(2) as pool:
        both = [pool.submit(refit, first), pool.submit(refit, second, b"secret weights")]
        if does == "nothing":
            assert all(one.result()[1] == b"secret weights" for one in both)
            return
        assert caught(both[0].result).startswith("rank 1 is gone"), (
            "whose connection has ended with that message"
        )
        assert "does not answer rank 1" in caught(both[1].result)


def test_members_on_an_address_that_others_reach_need_a_secret_and_are_told_how_to_make_one(monkeypatch):
    monkeypatch.delenv("RESHARD_SECRET", raising=False)
    host = socket.gethostbyname(socket.gethostname())
    if is_loopback(host):
        host = "10.0.0.1"
    said = caught(lambda: RefitGroup.join(f"{host}:{free_port()}", 0, 1, timeout=5))
    assert said.startswith(
        f"members that meet on {host}, which other hosts may reach, need a secret: set RESHARD_SECRET"
    )
    assert "openssl rand -hex 32" in said
    monkeypatch.setenv("RESHARD_SECRET", "short")
    assert "RESHARD_SECRET is not a text of at least 16 characters" in caught(
        lambda: RefitGroup.join("127.0.0.1:1", 1, 2)
    )
    monkeypatch.setenv("RESHARD_SECRET", SECRET)
    of_all(met(free_port(), secret=None))


def test_on_this_host_alone_the_secret_is_a_file_that_only_this_user_reads(monkeypatch, tmp_path):
    monkeypatch.delenv("RESHARD_SECRET", raising=False)
    monkeypatch.setattr(
        secret_module, "_folders", lambda: [tmp_path / "a file" / "reshard", tmp_path / "reshard"]
    )
    (tmp_path / "a file").write_text("where no folder can be made")
    with ThreadPoolExecutor(8) as pool:
        assert len(set(pool.map(lambda _: secret_module.secret_for("localhost", None), range(32)))) == 1
    path = tmp_path / "reshard" / "secret"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and os.listdir(path.parent) == ["secret"]
    of_all(met(free_port(), secret=None))
    spoiled = {
        "read by the group": lambda: path.chmod(0o640),
        "written by others": lambda: path.parent.chmod(0o777),
        "a link": lambda: (path.unlink(), path.symlink_to("/etc/hostname")),
    }
    for what, spoil in spoiled.items():
        spoil()
        said = caught(lambda: secret_module.secret_for("127.0.0.1", None))
        assert "set RESHARD_SECRET" in said and str(path.parent) in said, what
        path.parent.chmod(0o700)
        path.unlink()
        secret_module.secret_for("127.0.0.1", None)


def test_handshakes_go_on_beside_each_other_each_with_a_deadline(monkeypatch):
    monkeypatch.setattr(channels, "HANDSHAKE_SECONDS", 5.0)
    listener = socket.create_server(("127.0.0.1", 0))
    entrance, port = Door(listener).entrance(b"s" * 32), listener.getsockname()[1]
    slow = socket.create_connection(("127.0.0.1", port))
    began = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        member = pool.submit(connect, "127.0.0.1", port, b"s" * 32, began + 20)
        while not entrance.admitted():
            slow.send(b"-")
            time.sleep(0.05)
        member.result().close()
    assert time.monotonic() - began < 5, "the member waits for nobody"
    with pytest.raises(OSError):
        while time.monotonic() - began < 20:
            slow.send(b"-")
            time.sleep(0.1)
    entrance.close()


def test_a_group_of_torchs_processes_meets_at_one_address_of_its_host_only():
    code = """
import os, sys, socket
import torch.distributed as dist
from reshard.refit import RefitGroup
dist.init_process_group("gloo", rank=int(sys.argv[1]), world_size=2)
members = RefitGroup.of_process_group(timeout=20)
with members.transaction("a refit"):
    members.gather("hello", b"x"); members.prepare(); members.commit()
print(members.address.rpartition(":")[0], flush=True)
"""
    shared = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    both = [
        subprocess.Popen([sys.executable, "-c", code, str(rank)], env=shared, stdout=-1, text=True)
        for rank in range(2)
    ]
    assert [one.communicate(timeout=120)[0] for one in both] == ["127.0.0.1\n"] * 2


def test_an_error_that_member_0_raises_is_told_to_all_before_its_process_ends():
    code = """
from reshard import ReshardError
from reshard.refit import RefitGroup
members = RefitGroup.join("127.0.0.1:{port}", 0, 2, timeout=20)
with members.transaction("connect"):
    members.read("hello", 1)
    raise ReshardError("no luck")
"""
    port = free_port()
    with subprocess.Popen([sys.executable, "-c", code.format(port=port)], stderr=subprocess.DEVNULL):
        other = RefitGroup.join(f"127.0.0.1:{port}", 1, 2, timeout=20)
        other.transaction_number = 1
        other.post("hello")
        assert caught(lambda: other.read("parts", 0)) == "rank 0: no luck"


@pytest.mark.parametrize(("named", "alone"), [("127.0.0.1", True), ("the-first-host", False)])
def test_a_host_whose_name_only_it_resolves_to_itself_listens_where_others_reach_it(
    named, alone, monkeypatch
):
    """As Debian has it: 127.0.1.1 in /etc/hosts."""
    plain = socket.getaddrinfo
    monkeypatch.setenv("MASTER_ADDR", named)
    monkeypatch.setattr(
        socket,
        "getaddrinfo",
        lambda host, *args, **options: plain(
            "127.0.1.1" if host in ("the-first-host", socket.gethostname()) else host, *args, **options
        ),
    )
    with listener_for(None) as listener:
        host = listener.getsockname()[0]
    assert is_loopback(host) == (alone or not _has_route())


def _has_route() -> bool:
    try:
        return not is_loopback(address_towards("192.0.2.1", 9))
    except OSError:
        return False


def test_an_address_that_was_tried_first_keeps_nothing_alive(monkeypatch):
    """An exception that is kept has frames, and these what their callers make."""

    class Store:
        pass

    monkeypatch.setattr(hosts, "_reached_hosts", lambda store: ["192.0.2.1", "127.0.0.1"])
    gc.collect()
    gc.disable()
    try:
        store = Store()
        end = weakref.ref(store)
        listener_for(store).close()
        del store
        assert end() is None
    finally:
        gc.enable()
