"""Have torchrun's agent name the method that it is in by its frame alone.

For each step of a rendezvous it asks `inspect` for the whole stack, with the source of every frame, which
looks through all that was imported: two seconds for each start in a process that is forked with thousands
of modules.
"""

import sys

from torch.distributed.elastic.rendezvous import dynamic_rendezvous


def method_name(depth: int = 2) -> str:
    """Return the name of the function that is `depth` calls above this one."""
    return sys._getframe(depth).f_code.co_name


dynamic_rendezvous.get_method_name = method_name
