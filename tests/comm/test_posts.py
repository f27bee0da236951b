"""What members post for each other: it comes as it was said to whoever asks, in the order asked for."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from reshard.comm.protocol import PostAll
from reshard.refit import RefitGroup
from tests.starting.ranks import free_port

ROOT = Path(__file__).parents[2]


def together(size: int, work) -> list:
    """What this returns to each of so many members, in one transaction."""
    address = f"127.0.0.1:{free_port()}"

    def run(rank: int):
        members = RefitGroup.join(address, rank, size, timeout=20)
        with members.transaction("a refit"):
            result = work(members)
            members.commit()
        return result

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def test_many_keys_are_posted_in_one_message_and_read_by_each():
    def work(members: RefitGroup) -> list[bytes]:
        members.post_all({})
        members.post_all({f"to/{rank}": b"%d" % members.rank * rank for rank in range(members.size)})
        return members.read_all(f"to/{members.rank}")

    assert together(4, work) == [[b"%d" % sender * rank for sender in range(4)] for rank in range(4)]


def test_ranks_are_read_in_the_order_of_each_who_asks():
    def work(members: RefitGroup) -> list[bytes]:
        members.post("who", b"%d" % members.rank)
        members.wait("who", range(3))
        order = [(members.rank + step) % 3 for step in range(3)]
        return [*members.read_all("who", order), *members.read_all("who", order[:2])]

    assert [b"".join(read) for read in together(3, work)] == [b"01201", b"12012", b"20120"]


def test_who_gathers_under_a_key_again_has_what_is_new_of_itself():
    def work(members: RefitGroup) -> list[bytes]:
        members.post("who", b"old")
        members.gather("all have", b"")
        return members.gather("who", b"new %d" % members.rank)[members.rank :]

    assert [own[0] for own in together(3, work)] == [b"new 0", b"new 1", b"new 2"]


def test_notes_come_to_all_and_none_to_who_has_given_none():
    def work(members: RefitGroup) -> dict[int, str]:
        members.prepare(note="of the second" if members.rank == 1 else "")
        return members.notes_of([1, 2])

    assert together(3, work) == [{1: "of the second", 2: ""}] * 3


@pytest.mark.parametrize("lengths", [[1], [1, 3], [-1, 4], [1, 2, 0]])
def test_payloads_that_do_not_make_up_a_body_are_none(lengths):
    assert PostAll(["one", "other"], [1, 2]).payloads(b"abc") == [b"a", b"bc"]
    with pytest.raises(ValueError, match="3 bytes, which are no payloads of 2 keys"):
        PostAll(["one", "other"], lengths).payloads(b"abc")


@pytest.mark.slow
def test_the_messages_of_a_simulated_fleet_grow_as_it_does(tmp_path):
    """Half as many members with half as many messages, and all of them connect and refit."""
    file = tmp_path / "fleets.json"
    command = [
        sys.executable,
        "-m",
        "benchmarks.refits.fleet_scale",
        "--model",
        "qwen3-30b-a3b",
        "--layers",
        "2",
    ]
    command += [
        "--stages",
        "2",
        "--engine-ranks",
        "2",
        "--refits",
        "1",
        "--members",
        "8",
        "16",
        "--json",
        str(file),
    ]
    subprocess.run(command, cwd=ROOT, check=True, timeout=600, capture_output=True)
    small, large = json.loads(file.read_text())
    for step in ("meeting", "connect", "refit"):
        few, many = small["hub"][step]["messages"], large["hub"][step]["messages"]
        assert 0 < many <= 2 * few + 16, f"{step}: {few} and {many}"  # Alive is said now and then
    assert {*large["ranks"]} == {"trainer", "inference"}
