"""Connections that tell the first member which of the others live."""

import socket
import subprocess
import sys
import time

from reshard.trainers.lifelines import Lifelines, hold


def said_in_time(lines: Lifelines) -> str:
    deadline = time.monotonic() + 20
    while not (said := lines.failed()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return said


def test_a_member_whose_process_ends_is_named_and_one_that_comes_again_is_not():
    lines = Lifelines("127.0.0.1")
    code = "import sys, time; from reshard.trainers.lifelines import hold; h = hold(('127.0.0.1', int(sys.argv[1])), *sys.argv[2:]); print('here', flush=True); time.sleep(600)"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(lines.address[1]), lines.token, "rank 1 of the rollout"], stdout=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stdout.readline() == "here\n" and lines.failed() == lines.failed() == ""
        process.kill()
        assert said_in_time(lines) == "rank 1 of the rollout has ended"
    again = hold(lines.address, lines.token, "rank 1 of the rollout")
    deadline = time.monotonic() + 20
    while lines.failed() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines.failed() == ""
    again.close()
    assert said_in_time(lines) == "rank 1 of the rollout has ended"
    lines.close()
    assert hold(lines.address, lines.token, "late") is None


def test_others_who_connect_are_no_members_and_all_members_find_room():
    lines = Lifelines("127.0.0.1")
    for words in (b"", b"GET / HTTP/1.0\r\n\r\n", b"rank 1 of the rollout", b"\xff\xfe"):
        with socket.create_connection(lines.address) as probe:
            probe.sendall(words)
    began = time.monotonic()
    held = [hold(lines.address, lines.token, f"rank {n}") for n in range(300)]
    assert all(held) and time.monotonic() - began < 5
    assert lines.failed() == lines.failed() == ""
    held[177].close()
    assert said_in_time(lines) == "rank 177 has ended"
    for one in held:
        one.close()
    lines.close()
