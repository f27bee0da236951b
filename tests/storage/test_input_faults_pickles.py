"""Pickles are read as Python and torch read them, and never executed: ones that blow up are refused soon."""

import io
import pickle
from collections import OrderedDict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard import ReshardError, inspect
from reshard.formats import pickles, torch_zip
from tests.campaigns.mutations.containers import rezip
from tests.storage.test_faults import refused
from tests.tools.spoiled import bounded, converted, mcore

TEXT = st.text("abc²", max_size=5)
PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT
NESTED = st.deferred(
    lambda: (
        PLAIN
        | st.lists(NESTED, max_size=4)
        | st.dictionaries(TEXT, NESTED, max_size=4)
        | st.tuples(NESTED, NESTED)
        | st.tuples(NESTED)
        | st.tuples()
        | st.tuples(PLAIN, PLAIN, PLAIN, PLAIN)
    )
)


@settings(deadline=None, max_examples=40)
@given(NESTED, st.integers(2, 5), st.binary(max_size=300), st.sets(TEXT))
def test_plain_pickles_are_read_as_python_reads_them(value, protocol, data, members):
    found = pickles.load(pickle.dumps(value, protocol=protocol), "x")
    assert found == value and repr(found) == repr(value)  # repr: True is not 1
    if protocol > 3:  # before, bytes and sets are calls
        value = [data, members, frozenset(members), data]
        assert pickles.load(pickle.dumps(value, protocol=protocol), "x") == value


def tower(levels=64):
    """Opcodes of a tuple of two of a tuple of two of ...: 2 to the power of `levels` parts in a few bytes."""
    get = [b"h" + bytes([i]) for i in range(levels + 1)]
    return (
        b"N\x85q\x000"
        + b"".join(get[i] + get[i] + b"\x86q" + bytes([i + 1]) + b"0" for i in range(levels))
        + get[-1]
    )


@settings(deadline=None, max_examples=40)
@given(NESTED, st.sets(TEXT))
def test_what_was_read_is_written_so_that_torch_reads_it_again(value, members):
    """As the common state of a training, with the steps and scales that an optimizer has as tensors."""
    tensors = [torch.tensor(3.5), torch.arange(6).reshape(2, 3)[:, 1:].bfloat16(), torch.tensor([True])]
    saved = [value, members, frozenset(members), OrderedDict(a=1), torch.float32, torch.Size([2]), tensors]
    buffer = io.BytesIO()
    torch.save(saved, buffer)
    data = buffer.getvalue()
    read = (lambda at, n: data[at : at + n]), len(data), "x"
    again = pickles.writable(torch_zip.stored_object(*read), "x")
    written = torch_zip.object_bytes(again, torch_zip.stored_storages(*read))
    *plain, loaded = torch.load(io.BytesIO(written), weights_only=False)
    assert plain == saved[:-1] and repr(plain[0]) == repr(value)
    assert all(map(torch.equal, loaded, tensors)) and [t.dtype for t in loaded] == [t.dtype for t in tensors]


@pytest.mark.parametrize("ops", [tower(24), b"]" * 500 + b"a" * 499], ids=["shared", "nested"])
def test_what_shares_or_nests_too_many_parts_is_not_written(ops):
    value = pickles.load(b"\x80\x02" + ops + b".", "here")
    with pytest.raises(
        ReshardError, match="here holds more values than a checkpoint has, or nests them deeper"
    ):
        pickles.writable(value, "here")


BOMBS = {
    "a memo index of 2^29": (b"\x80\x02Nr\xff\xff\xff\x1f.", None),
    "bytes of 2^62": (b"\x80\x04\x8e" + (2**62).to_bytes(8, "little") + b"x.", "not a readable pickle"),
    "a key that shares parts": (b"\x80\x02}" + tower() + b"Ns.", "a key of type tuple"),
    "a member of a set that shares parts": (b"\x80\x04\x8f(" + tower() + b"\x90.", "a key of type tuple"),
    "keys that collide": (
        b"\x80\x02}("
        + b"".join(b"\x8a\x0a" + (i * (2**61 - 1)).to_bytes(10, "little") + b"N" for i in range(100_000))
        + b"u.",
        "a key of type int",
    ),
    "a whole number of a million digits": (
        b"\x80\x02\x8b" + (500_000).to_bytes(4, "little") + b"\x7f" * 500_000 + b".",
        None,
    ),
    "deep lists": (b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".", None),
    "20 million lists": (b"\x80\x02" + b"]" * 20_000_000 + b".", "more than 16,000,000 containers"),
}


@pytest.mark.parametrize("what", BOMBS)
def test_a_pickle_that_blows_up_takes_little_time_and_memory(what):
    data, message = BOMBS[what]

    def call():
        pickles.load(data, "a file")
        if message is None:
            raise ReshardError("read")

    bounded(call, message or "read")


@pytest.mark.parametrize("what", BOMBS)
def test_metadata_and_common_pt_that_blow_up_are_refused(what, mcore):
    data, _ = BOMBS[what]
    (mcore / "release" / ".metadata").write_bytes(data)
    bounded(lambda: inspect(mcore), "structure of a torch_dist|readable pickle|containers")


def test_what_torch_saves_reads_as_torch_reads_it():
    """The pickle machine on real objects: a namespace, dtypes, tensors of several dtypes, nested dicts."""
    import argparse

    from reshard.formats import torch_zip

    out = io.BytesIO()
    args = argparse.Namespace(
        bf16=True, dtype=torch.bfloat16, sizes=[1, 2**40, -3], nested={"a": (None, 1.5)}
    )
    torch.save({"args": args, "w": torch.arange(6, dtype=torch.int64).view(2, 3), "iteration": 7}, out)
    data = out.getvalue()
    found = torch_zip.stored_object(lambda offset, length: data[offset : offset + length], len(data), "x")
    fields = found["args"].fields
    assert (fields["bf16"], fields["sizes"], fields["nested"]) == (True, [1, 2**40, -3], {"a": (None, 1.5)})
    assert fields["dtype"].name == "bfloat16" and found["iteration"] == 7
    assert found["w"].args[2:4] == ((2, 3), (3, 1))


@pytest.mark.parametrize(
    "version",
    [b"3\n", b"10", b"x", b"", b"11", b"0", b"-1", b"9" * 5000],
    ids=lambda version: repr(version[:9]),
)
def test_a_container_s_version_is_taken_and_refused_as_torch_does(version):
    from reshard.formats import torch_zip

    out = io.BytesIO()
    torch.save(torch.arange(4.0), out)
    data = rezip(out.getvalue(), lambda name, payload: version if name.endswith("/version") else payload)
    try:
        torch.load(io.BytesIO(data))
        assert torch_zip.stored_tensor(lambda at, n: data[at : at + n], len(data), "x").shape == (4,)
    except (RuntimeError, IndexError):  # of the standard library of C++, for a number that is too large
        refused(
            lambda: torch_zip.stored_tensor(lambda at, n: data[at : at + n], len(data), "x"),
            "x says that its format is version b'",
        )
