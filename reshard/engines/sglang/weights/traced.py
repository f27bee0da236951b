"""The trace of SGLang's loader: its ``load_weights`` run on stand-ins for a model's parameters
(`reshard.engines.tracing.trace`)."""

from functools import partial
from typing import Any

import torch

from reshard.engines.sglang import compat
from reshard.engines.sglang.weights.blocks import plain_matrices
from reshard.engines.sglang.weights.names import SGLANG
from reshard.engines.tracing.stand_ins import stand_ins
from reshard.engines.tracing.trace import Canonical, Trace, trace_load


def trace_model(model: torch.nn.Module, canonical: Canonical, dtype: torch.dtype) -> Trace:
    """Return what a model's ``load_weights`` would copy and fill, given canonical tensors (shape, dtype) without
    bytes; layers in fp8 blocks are taken for matrices in this dtype.

    Raises ReshardError, naming the parameter, if it computes something instead of copying, but for what
    `derived` makes anew, and if it fails.
    """
    with_one = {name for name, _ in model.named_buffers() if name.endswith(f".{compat.OF_NORM}")}
    with_one |= {name for name, _ in model.named_parameters() if name.endswith(f".{compat.OF_NORM}")}
    plain = stand_ins(model, partial(plain_matrices, dtype=dtype), keeps=compat.is_made_later)
    with compat.without_processing(model), plain as parameters:
        load: Any = model.load_weights
        return trace_load(SGLANG.engine, load, canonical, parameters, with_one)
