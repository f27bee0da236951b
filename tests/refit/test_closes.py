"""What is left of a connection that is closed, or whose process ends without that."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from reshard.refit import RefitGroup, connect
from reshard.refit.lora.sides import AdapterEngine
from tests.refit.test_transports import OneShard, TwoSlots, gloo_threads
from tests.starting.ranks import caught, free_port


class WithAdapter(OneShard):
    """A trainer's rank that has an adapter of one tensor."""

    def split_adapter(self):
        return self, OneShard(0, self.rows)


class ServesAdapter(TwoSlots):
    """An engine's rank that serves one, and may fail where it takes leave of it."""

    def adapter(self, name):
        self.own = AdapterSlots()
        return self.own


class AdapterSlots(TwoSlots, AdapterEngine):
    fails = False

    def disconnect(self):
        if self.fails:
            raise RuntimeError("the slots are gone")


@pytest.mark.parametrize("fails", [False, True])
def test_a_close_of_an_adapters_link_ends_both_connections_also_if_the_first_cannot_be_left(fails):
    address, before = f"127.0.0.1:{free_port()}", gloo_threads()

    def member(rank: int):
        group = RefitGroup.join(address, rank, 2, timeout=60)
        side = ServesAdapter() if rank else WithAdapter(0, 32)
        sides = (None, side) if rank else (side, None)
        link = connect(group, *sides, backend="nccl", adapter="policy", delta=True)
        link.refit()
        if rank:
            side.own.fails, link.receiver._is_taken = fails, True
        try:
            said = caught(link.close)
        except RuntimeError as error:
            said = str(error)
        return said, caught(link.refit), link

    with ThreadPoolExecutor(2) as pool:
        said, after_close, links = zip(*pool.map(member, range(2)), strict=True)
    assert said == ("no error", "the slots are gone" if fails else "no error")
    assert all("this connection is closed" in sentence for sentence in after_close)
    assert all(link.below.link.closed for link in links) and gloo_threads(before) <= before


KEEPS = """
import torch
from reshard.refit.transports import agent
one, other = (agent.Agent(torch.device("cpu")) for _ in range(2))
other.meet(agent.AgentHandle.decode(one.slab(1 << 16, in_gpu=False).handle).agent, "rank 0")
agent.kept = one, other  # until the module is taken apart
"""


def test_a_process_that_ends_without_a_close_of_its_nixl_says_nothing():
    ended = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, "")
