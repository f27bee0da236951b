"""How boxes of tensors come from files into live memory, and from there into files: neighbors
together, through pinned buffers."""

import contextlib
import os
from itertools import groupby

import numpy as np
import pytest
import torch

from reshard import MegatronLayout, hf_to_mcore
from reshard.storage.io import boxes
from reshard.storage.io.files import OpenFiles
from reshard.storage.io.streams import Strip
from reshard.storage.sources.opening import open_source
from tests.tools.oracle import hf_tensors


@pytest.mark.parametrize(
    ("gap", "around", "between", "buffers"),
    [(0, 1 << 20, 4096, 1000), (1 << 20, 1 << 20, 0, 3), (1 << 20, 100, 16, 2)],
)
def test_any_boxes_are_read_and_written_as_they_lie(
    gap, around, between, buffers, checkpoint, tmp_path, monkeypatch
):
    """By single rows, and with what lies between them in one read or in several; neighbors in a
    file together."""
    for name, value in (("GAP", gap), ("AROUND", around), ("MOST_BETWEEN", between)):
        monkeypatch.setattr(boxes, f"{name}_BYTES", value)
    monkeypatch.setattr(boxes, "MOST_BUFFERS", buffers)
    folder, random = checkpoint("qwen3-moe", dtype=torch.bfloat16), np.random.default_rng(0)
    hf_to_mcore(folder, tmp_path / "mcore", MegatronLayout(tp=2, ep=2, etp=2))
    tensors = hf_tensors(folder)
    with OpenFiles(os.O_RDWR | os.O_CREAT) as files:
        for path in (folder, tmp_path / "mcore"):
            source = open_source(path)
            reader, asked, expected = source.reader, [], []
            # All of one tensor, and of the next some rows and columns, in two runs of rows.
            names = sorted(tensors, key=lambda name: reader.strips(name)[0][4:6])
            for number, name in enumerate(names):
                whole = tensors[name].view(len(tensors[name]), -1).view(torch.uint8).numpy()
                info, rows = source.tensors[name], boxes.Rows(0, len(whole), 0, whole.shape[1] // 2)
                if number % 2:
                    start, column = int(random.integers(info.rows)), int(random.integers(info.columns))
                    stop = int(random.integers(start + 1, info.rows + 1))
                    columns = int(random.integers(1, info.columns - column + 1))
                    rows = boxes.Rows(start, stop, column, columns)
                expected.append(
                    whole[rows.start : rows.stop, rows.column * 2 : (rows.column + rows.columns) * 2]
                )
                # Rows that do not follow each other in memory either.
                out = np.zeros((rows.stop - rows.start, rows.columns * 2 + 6), np.uint8)
                out = out[:, 4:-2] if number % 4 > 1 else np.zeros(expected[-1].shape, np.uint8)
                asked += [
                    boxes.Wanted(name, part, out[part.start - rows.start : part.stop - rows.start])
                    for part in rows.slabs(2, slab_bytes=max(64, expected[-1].nbytes // 2))
                ]
            reader.read_all(asked if between else asked[::-1])
            found = [
                np.concatenate([w.out for w in several]) for _, several in groupby(asked, lambda w: w.name)
            ]
            assert all(map(np.array_equal, found, expected)) and len(found) == len(names)
            # Into one file, one tensor after the other with eight bytes before each.
            place, written, at = tmp_path / f"written-{path.name}", [], 0
            for name in names:
                info = source.tensors[name]
                strips = [Strip(0, info.rows, 0, info.columns, place, at + 8, info.columns)]
                written += [(strips, wanted.rows, wanted.out) for wanted in asked if wanted.name == name]
                at += 8 + info.size_bytes
            boxes.write_boxes(files, written)
            files.resize(place, at)
            stored, count = np.fromfile(place, np.uint8), 0
            for strips, rows, out in written:
                info = strips[0]
                matrix = stored[info.offset : info.offset + info.stop * info.width * 2].reshape(info.stop, -1)
                there = matrix[rows.start : rows.stop, rows.column * 2 : (rows.column + rows.columns) * 2]
                assert np.array_equal(there, out)
                count += int(out.astype(bool).sum())
            assert int(stored.astype(bool).sum()) == count
            source.close()


class LateGpu:
    """Streams whose copies are made only when somebody waits for them: what a GPU may do."""

    def __init__(self, monkeypatch):
        gpu, plain_copy, plain_empty = self, torch.Tensor.copy_, torch.empty
        self.current, self.pinned = None, []

        class Stream:
            def __init__(self, device=None):
                self.pending, self.done = [], 0

            def synchronize(self):
                self.run(len(self.pending))

            def run(self, until):
                for destination, source in self.pending[self.done : until]:
                    plain_copy(destination, source)
                self.done = max(self.done, until)

            def wait_event(self, event):
                assert event.stream is gpu.training

        class Event:
            def record(self, stream):
                self.stream, self.until = stream, len(stream.pending)

            def synchronize(self):
                self.stream.run(self.until)

        @contextlib.contextmanager
        def stream(inner):
            gpu.current, before = inner, gpu.current
            yield
            gpu.current = before

        def copy(destination, source, non_blocking=False):
            if not non_blocking:
                return plain_copy(destination, source)
            (gpu.current or gpu.training).pending.append((destination, source))
            return destination

        def copy_all(destinations, sources, non_blocking=False):
            for destination, source in zip(destinations, sources, strict=True):
                copy(destination, source, non_blocking)

        def empty(*shape, pin_memory=False, **options):
            self.pinned += [shape] if pin_memory else []
            return plain_empty(*shape, **options)

        self.training = Stream()
        monkeypatch.setattr(torch.cuda, "Stream", Stream)
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "stream", stream)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.training)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        monkeypatch.setattr(torch.Tensor, "copy_", copy)
        monkeypatch.setattr(torch, "_foreach_copy_", copy_all)
        monkeypatch.setattr(torch, "empty", empty)


def test_a_pinned_buffer_is_used_again_only_when_its_copy_is_made(monkeypatch):
    from reshard.device.staging import FromDevice, ToDevice, copy_to_host

    gpu, device = LateGpu(monkeypatch), torch.device("cuda:0")
    expected = torch.randint(0, 255, (7, 5, 3), dtype=torch.uint8)
    filled, into = torch.zeros_like(expected), ToDevice(device)
    for i in range(len(expected)):
        into.fill(list(filled[i]), lambda outs, i=i: [*map(np.copyto, outs, expected[i].numpy())])
    assert not torch.equal(filled, expected)  # the last copies are still to come
    into.close()
    assert torch.equal(filled, expected) and len(gpu.pinned) == 2
    out = [np.stack(found) for found in FromDevice(device).read([list(bundle) for bundle in expected])]
    assert np.array_equal(np.stack(out), expected.numpy()) and len(gpu.pinned) == 4
    copies = copy_to_host(list(expected), device)
    assert torch.equal(torch.stack(copies), expected) and len(gpu.pinned) == 5
    assert list(FromDevice(device).read([])) == []
