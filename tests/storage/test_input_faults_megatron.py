"""Spoiled Megatron checkpoints: chunks, containers and metadata that do not add up are refused in
one sentence."""

import pickle

import pytest
import torch

from reshard import diff, mcore_to_hf
from reshard.formats import pickles
from tests.campaigns.mutations.containers import rezip, zip64_offset
from tests.storage.test_faults import refused
from tests.tools.spoiled import KEY, all_refuse, converted, mcore


def chunk_of(
    storage_offset=0,
    shape=(64,),
    stride=(1,),
    numel=64,
    storage="BFloat16Storage",
    rebuild="_rebuild_tensor_v2",
    marks=(),
    args=None,
):
    """What a chunk's ``data.pkl`` says of its tensor."""
    place = pickles.Persistent(("storage", pickles.Name("torch", storage), "0", "cpu", numel))
    values = (
        (place, storage_offset, shape, stride, False, pickles.call("collections", "OrderedDict"), *marks)
        if args is None
        else args
    )
    return pickles.dump(pickles.call("torch._utils", rebuild, *values), protocol=2)


def replace_chunk(mcore, change):
    """Put another container in the place of the final norm's, at the end of its file."""
    (mcore / "reshard.json").unlink(missing_ok=True)  # which would tell that a file is another one
    path = mcore / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    [index] = [i for i in metadata.storage_data if i.fqn == KEY]
    place = metadata.storage_data[index]
    file = mcore / "release" / place.relative_path
    data = file.read_bytes()
    new = change(data[place.offset : place.offset + place.length])
    file.write_bytes(data + new)
    metadata.storage_data[index] = type(place)(place.relative_path, len(data), len(new))
    path.write_bytes(pickle.dumps(metadata))


def with_pickle(data_pkl):
    return lambda old: rezip(old, lambda name, payload: data_pkl if name.endswith("data.pkl") else payload)


CHUNKS = {
    "an offset before its bytes": (chunk_of(storage_offset=-8), "storage, offset, shape or strides"),
    "an offset behind its bytes": (chunk_of(storage_offset=1), "missing or cut short"),
    "an offset that is no number": (chunk_of(storage_offset="0"), "storage, offset, shape or strides"),
    "an offset of True": (chunk_of(storage_offset=True), "storage, offset, shape or strides"),
    "negative sizes": (chunk_of(shape=(-8, -8), stride=(-8, 1)), "storage, offset, shape or strides"),
    "a shape that is a number": (chunk_of(shape=64), "storage, offset, shape or strides"),
    "a shape of text": (chunk_of(shape=("64",)), "storage, offset, shape or strides"),
    "a shape of fractions": (chunk_of(shape=(64.0,)), "storage, offset, shape or strides"),
    "more strides than dims": (chunk_of(stride=(1, 1)), "storage, offset, shape or strides"),
    "other strides": (chunk_of(stride=(0,)), "strides"),
    "a thousand dims": (chunk_of(shape=(1,) * 1000, stride=(1,) * 1000), "storage, offset, shape or strides"),
    "no arguments": (chunk_of(args=()), "storage, offset, shape or strides"),
    "a storage that is a number": (
        chunk_of(args=(5, 0, (64,), (1,), False, None)),
        "storage, offset, shape or strides",
    ),
    "a storage of no known type": (chunk_of(storage="Generator"), "refused, nothing was run|unknown dtype"),
    "a sign still to be turned": (chunk_of(marks=({"neg": True},)), "negated view"),
    "another dtype": (chunk_of(storage="HalfStorage"), r"holds float16 \[64\], .metadata says bfloat16"),
    "another shape": (chunk_of(shape=(32,)), r"holds bfloat16 \[32\]"),
    "no tensor": (pickles.dump({"a": 1}, protocol=2), "holds dict, not one tensor"),
}


@pytest.mark.parametrize("what", CHUNKS)
def test_a_chunk_that_says_something_else_of_its_bytes_is_refused(what, mcore, converted, tmp_path):
    data_pkl, message = CHUNKS[what]
    replace_chunk(mcore, with_pickle(data_pkl))
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), message)
    refused(lambda: diff(mcore, converted / "back"), message)


def test_a_chunk_written_anew_as_it_was_is_read(mcore, converted):
    """The control: what the other tests spoil is right before."""
    replace_chunk(mcore, with_pickle(chunk_of()))
    assert diff(mcore, converted / "back").equal


@pytest.mark.parametrize("offset", [2**64 - 1, 2**63, 2**63 - 1, 2**40])
def test_a_zip_that_points_far_away_is_refused(offset, mcore, tmp_path):
    replace_chunk(mcore, lambda old: zip64_offset(old, offset))
    refused(lambda: mcore_to_hf(mcore, tmp_path / "out"), "not a readable torch container")


# .metadata.


def edit_metadata(mcore, change):
    path = mcore / "release" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata, metadata.state_dict_metadata, metadata.storage_data)
    path.write_bytes(pickle.dumps(metadata))


def first_chunk(state, key="decoder.layers.mlp.router.weight"):
    return state[key].chunks[0]


def set_field(target, name, value):
    object.__setattr__(target, name, value)


def index_of(storage, key="decoder.layers.mlp.router.weight"):
    return next(index for index in storage if index.fqn == key)


def place_of(storage):
    return storage[index_of(storage)]


METADATA = {
    "a chunk size of 0": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (0, 8, 64)),
                          "router.weight lacks chunks"),
    "a chunk size of text": (lambda m, state, storage: set_field(first_chunk(state), "sizes", ("1", 8, 64)),
                             "whose offsets or sizes"),
    "a chunk outside": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (1, 9, 64)),
                        "outside of its shape"),
    "a negative offset": (lambda m, state, storage: set_field(first_chunk(state), "offsets", (-1, 0, 0)),
                          "whose offsets or sizes"),
    "other dims": (lambda m, state, storage: set_field(first_chunk(state), "sizes", (8, 64)), "whose offsets or sizes"),
    "a place that is no number": (lambda m, state, storage: set_field(place_of(storage), "offset", "0"),
                                  "name, file, offset or length"),
    "a place at a fraction": (lambda m, state, storage: set_field(place_of(storage), "offset", 0.5),
                              "name, file, offset or length"),
    "a place before the start": (lambda m, state, storage: set_field(place_of(storage), "offset", -64),
                                 "name, file, offset or length"),
    "a place of 2^64": (lambda m, state, storage: set_field(place_of(storage), "length", 2**64),
                        "name, file, offset or length"),
    "a file that is no text": (lambda m, state, storage: set_field(place_of(storage), "relative_path", 5),
                               "name, file, offset or length"),
    "a file of another": (lambda m, state, storage: set_field(place_of(storage), "relative_path", "../x"),
                          "outside of the checkpoint"),
    "the directory as a file": (lambda m, state, storage: set_field(place_of(storage), "relative_path", "."),
                                "lacks the files"),
    "no place": (lambda m, state, storage: storage.pop(index_of(storage)), "stored nowhere"),
    "two chunks at one place": (
        lambda m, state, storage: storage.update({index_of(storage): storage[index_of(storage, KEY)]}),
        "at the same bytes of"),
    "a key that is a number": (lambda m, state, storage: state.update({5: state[KEY]}), "does not have the structure"),
    "entries that are numbers": (lambda m, state, storage: state.update({KEY: 5}), "does not have the structure"),
    "no storage": (lambda m, state, storage: setattr(m, "storage_data", 5), "does not have the structure"),
}  # fmt: skip


@pytest.mark.parametrize("what", METADATA)
def test_metadata_that_does_not_add_up_is_refused(what, mcore, tmp_path):
    change, message = METADATA[what]
    edit_metadata(mcore, change)
    all_refuse(mcore, tmp_path, message)


@pytest.mark.parametrize("key", ["decoder.layers.mlp.router.weight", "embedding.word_embeddings.weight", KEY])
def test_a_checkpoint_that_lacks_a_chunk_is_named_with_its_key(key, mcore, converted, tmp_path):
    edit_metadata(mcore, lambda m, state, storage: state[key].chunks.pop())
    all_refuse(
        mcore,
        tmp_path,
        f"{mcore}/release: {key} lacks chunks: they hold .* elements, its shape .* has",
        converted / "back",
    )
    refused(lambda: diff(converted / "back", mcore), f"{key} lacks chunks")


def test_chunks_that_overlap_are_refused(mcore, tmp_path):
    def widen(metadata, state, storage):
        set_field(state["decoder.layers.mlp.router.weight"].chunks[0], "sizes", torch.Size((2, 8, 64)))

    edit_metadata(mcore, widen)
    all_refuse(mcore, tmp_path, "router.weight has chunks that overlap")
