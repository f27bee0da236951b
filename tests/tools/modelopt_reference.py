"""Write down what ModelOpt makes of weights that are hard to quantize: checksums of codes and
scales, for tests in an environment without it.

pip install nvidia-modelopt==0.47.0
python -m tests.tools.modelopt_reference
"""

import json
import zlib
from pathlib import Path

import torch
from modelopt.torch.quantization.qtensor.nvfp4_tensor import NVFP4QTensor

from tests.engines.test_nvfp4_engine import DTYPES, beside, cases


def checksums(weight: torch.Tensor, largest: torch.Tensor) -> list[int]:
    one = largest.float() / (6.0 * 448.0)
    codes, scales, one = NVFP4QTensor.quantize(weight.clone(), 16, weights_scaling_factor_2=one)
    parts = (codes._quantized_data, scales, one)
    return [zlib.crc32(part.contiguous().view(torch.uint8).numpy().tobytes()) for part in parts]


found = {
    str(dtype): [
        checksums(weight, largest) for weight in cases(dtype) for largest in beside(weight) if largest.item()
    ]
    for dtype in DTYPES
}
Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
