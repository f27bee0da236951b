"""What lies beside an unfinished checkpoint in a store, and says so.

    DST/.reshard-partial/run.json      what the run makes of what, put there before anything else
    DST/.reshard-partial/FILE.json     of each file with weights that was sent: its version, and its tensors' checksums
    DST/...                            the files with weights, then all others
    DST/reshard.json                   the manifest, last of all

A place with the first and without the last is not a whole checkpoint. Once the manifest is there the marks are removed.
"""

from reshard.storage.run.partial import PARTIAL_SUFFIX

RECORDS, RUN = PARTIAL_SUFFIX, "run.json"
RUN_MARK = f"{RECORDS}/{RUN}"


def record_name(file: str) -> str:
    """Return the name of the record of a file."""
    return f"{RECORDS}/{file.replace('%', '%25').replace('/', '%2F')}.json"


def unfinished_sentence(url: str) -> str:
    """Return the sentence that refuses an unfinished checkpoint."""
    return (
        f"{url} is not a whole checkpoint: the run that writes it has not ended, or was interrupted; run the same "
        "command with --resume to continue it, or without to start over"
    )
