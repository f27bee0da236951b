"""Pickles without trust and without torch.

A pickle is a program that may call anything. `load` runs it on a machine of its own that can only
build plain data: a short list of names stands for inert records of the call (`Call`), never for the
real class, and any other name refuses the whole file before it is called. What a few bytes can blow
up (memo indices, shared nesting, colliding keys) is bounded. `dump` writes pickles of plain data
and of such records; `writable` makes such of what was read.

Python's own Unpickler with a `find_class` is no replacement: it hashes keys that take forever to
hash, and allocates the memo that a few bytes ask for, before anything of ours is called.
"""

from reshard.formats.pickles.copies import writable
from reshard.formats.pickles.reader import MAX_CONTAINERS, load
from reshard.formats.pickles.records import METADATA, Call, Name, Persistent, call
from reshard.formats.pickles.writer import dump

__all__ = ["MAX_CONTAINERS", "METADATA", "Call", "Name", "Persistent", "call", "dump", "load", "writable"]
