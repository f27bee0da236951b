"""Transports: how bytes get from a trainer's rank to an inference rank.

A new transport is one module with a subclass of `Transport` (`reshard.refit.transports.base`):

- `reach`: a `reshard.refit.routes.Reach`, with the name by which a user may choose it as `backend`, and the pairs of
  ranks whose bytes it can carry;
- `prepare(outgoing, incoming, elsewhere)` makes its tables of copies, `run(number)` carries out those of
  one round;
- `release()` unmaps others' memory, `close()` gives everything back;
- where it needs to: `negotiate` with all members at connect, and after a refit that failed; `update_addresses` of
  memory that has moved.

Then add its name to `BACKENDS` in `reshard.refit.routes`, and its class to `TRANSPORTS` here, in order of
preference. The link, the sides and the verification know no transport by name. `staged.py` and `nixl.py`
are ones to copy from: they pack into slabs (`slots.py`). tests/refit/test_refit.py,
test_transports.py, test_links.py and test_block_digests.py take a backend as a parameter: add the new name there.
"""

from reshard.core.errors import ReshardError
from reshard.refit.routes import Pair
from reshard.refit.transports.base import Transport
from reshard.refit.transports.cuda_ipc import CudaIpc
from reshard.refit.transports.nccl import Nccl
from reshard.refit.transports.nixl import Nixl
from reshard.refit.transports.staged import Staged

TRANSPORTS: tuple[type[Transport], ...] = (CudaIpc, Staged, Nixl, Nccl)
# Names of those in which the trainer's rank takes part, and of those that read its memory where it lies.
SENT = frozenset(transport.reach.name for transport in TRANSPORTS if transport.reach.sends)
READ = frozenset(transport.reach.name for transport in TRANSPORTS) - SENT


def transport_for(pair: Pair, backend: str) -> type[Transport]:
    """Return the transport of a pair: the first that reaches it and that `backend` allows, or
    stands in for the one it names.

    Raises ReshardError where none does.
    """
    if backend == "auto" or pair.same_process:
        candidates = [transport for transport in TRANSPORTS if transport.reach.automatic(pair)]
    else:
        candidates = [transport for transport in TRANSPORTS if backend == transport.reach.name]
        candidates += [
            transport for transport in TRANSPORTS if backend in transport.reach.replaces and pair.on_gpus
        ]
    for transport in candidates:
        if transport.reach.reaches(pair):
            return transport
    raise ReshardError(candidates[0].reach.refusal(pair))
