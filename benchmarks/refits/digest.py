"""The digest of a model's weights on one GPU, compared with reading the same memory once, and with the sums that a
refit's verification takes of it.

    python -m benchmarks.refits.digest            # tensors of the shapes of Qwen3-8B, in bf16
    python -m benchmarks.refits.digest --held fp32  # counted in bf16

The sums of the kernel are compared with those of the host for a sample of the tensors.
"""

import argparse
import json
import statistics

import numpy as np
import torch

from reshard.core.boxes import whole
from reshard.core.dtypes import DTYPES, dtype_named
from reshard.device.digests import Sums, sums_of
from reshard.device.live_boxes import LiveBox
from reshard.device.memory import Region
from reshard.digests.numbers import seed_of
from reshard.refit.codecs import PLAIN
from reshard.refit.copying.digests import Digests
from reshard.refit.copying.tables import CODEC, ROWS, SRC, SRC_PITCH, WIDTH, empty_table
from reshard.storage.io.boxes import Rows
from reshard.storage.io.streams import TensorInfo

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288),
         (4096,), (4096,), (128,), (128,)]  # fmt: skip
SHAPES = [(151936, 4096), *LAYER * 36, (4096,), (151936, 4096)]
TIMES = 10


def timed(action) -> float:
    """Median milliseconds of an action, on the GPU's clock."""
    action()
    times = []
    for _ in range(TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        action()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def verification(boxes: list[LiveBox], device: torch.device) -> float:
    """Median milliseconds of a verification's sums of the same tensors, each as one piece."""
    table = empty_table(len(boxes))
    columns = np.array([box.local.columns for box in boxes])
    for row, box in zip(table, boxes, strict=True):
        row[SRC], row[ROWS], row[CODEC] = box.region.tensor.data_ptr(), box.local.stop, PLAIN
        row[WIDTH] = row[SRC_PITCH] = box.local.columns * box.region.tensor.element_size()
    digests = Digests(table, columns, device)
    return timed(digests.begin)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--held", default="bf16")
    held = dtype_named(parser.parse_args().held)
    device = torch.device("cuda", 0)
    boxes, seeds = [], []
    for index, shape in enumerate(SHAPES):
        tensor = torch.randn(shape, device=device).to(getattr(torch, held.name))
        rows = Rows.of(whole(shape))
        info = TensorInfo(shape, DTYPES["bfloat16"])
        box = LiveBox(f"{index}", whole(shape), Region(tensor, 0, rows.columns), rows, info.dtype)
        boxes.append(box)
        seeds.append(seed_of(box.name, info))
    digest, again = timed(lambda: sums_of(boxes, seeds)), timed(Sums(boxes, seeds).take)
    read = timed(
        lambda: [box.region.tensor.view(torch.uint8).view(-1).view(torch.int64).max() for box in boxes]
    )
    verified = verification(boxes, device)
    sample = list(range(1, 12))
    on_host = [
        box._replace(region=box.region._replace(tensor=box.region.tensor.cpu())) for box in boxes[1:12]
    ]
    same = sums_of(on_host, seeds[1:12]) == [sums_of(boxes, seeds)[index] for index in sample]
    size = sum(box.region.tensor.nbytes for box in boxes)
    record = {"gpu": torch.cuda.get_device_name(device), "held": held.name, "bytes": size, "digest_ms": digest,
              "digest_again_ms": again, "digest_rate": size / again * 1e3, "read_ms": read,
              "verification_ms": verified, "same_as_host": same}  # fmt: skip
    print(json.dumps(record))
    assert same, "the kernel gives other sums than the host"


if __name__ == "__main__":
    main()
