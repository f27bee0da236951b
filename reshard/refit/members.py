"""The members of a refit: `Members` is the name under which they are known."""

from reshard.comm.group import MOST_MEMBERS, check_rank
from reshard.comm.group import RefitGroup as Members

__all__ = ["MOST_MEMBERS", "Members", "check_rank"]
