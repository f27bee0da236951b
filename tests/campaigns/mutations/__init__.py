"""Ways to spoil the files of a checkpoint: each takes a random generator and a file, changes the
file and says how."""

from pathlib import Path

from tests.campaigns.mutations.containers import chunk, container_file, other_args
from tests.campaigns.mutations.pickled import metadata_entries, metadata_pickle
from tests.campaigns.mutations.text import json_file, safetensors_header, tracker
from tests.campaigns.mutations.values import Mutation, raw


def mutations_of(path: Path) -> list[Mutation]:
    """Return the ways to spoil a file, by its name. A way that is worth more is in the list more often."""
    name = path.name
    if name == ".metadata":
        return [metadata_pickle, metadata_entries, metadata_entries, raw]
    if name == "common.pt":
        return [container_file, other_args, other_args, raw]
    if name.endswith(".safetensors"):
        return [safetensors_header, safetensors_header, safetensors_header, raw]
    if name.endswith(".distcp"):
        return [lambda rng, path: chunk(rng, path.parent)] * 4 + [raw]
    if name.endswith(".json"):
        return [json_file, json_file, json_file, raw]
    if name == "latest_checkpointed_iteration.txt":
        return [tracker, raw]
    return [raw]
