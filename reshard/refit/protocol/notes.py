"""The note with which a member comes to a refit."""

from typing import NamedTuple

from reshard.comm.group import RefitGroup
from reshard.refit.protocol.encoding import DIGEST_BYTES, readable

ANEW = "+"  # ends the note of a member that needs another plan


class Note(NamedTuple):
    """A member's word before a refit: the digest of the memory that a trainer's rank has posted, empty of
    others, and whether all have to plan `anew`."""

    memory_digest: bytes = b""
    anew: bool = False

    def encode(self) -> str:
        """Return it as the text that other members get."""
        return self.memory_digest.hex() + ANEW * self.anew

    @staticmethod
    def decode(text: str, who: str) -> "Note":
        """Return the note in a text. Raises ReshardError if it is no note."""
        with readable(f"the note of {who}"):
            memory_digest = bytes.fromhex(text.removesuffix(ANEW))
            if len(memory_digest) not in (0, DIGEST_BYTES):
                raise ValueError(f"a digest of {len(memory_digest)} bytes")
        return Note(memory_digest, text.endswith(ANEW))


def notes(group: RefitGroup) -> dict[int, Note]:
    """Return the notes of all members, by rank."""
    return {
        rank: Note.decode(text, group.names[rank]) for rank, text in group.notes_of(range(group.size)).items()
    }
