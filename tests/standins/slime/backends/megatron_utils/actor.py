"""In the place of what slime has under this name."""

from .update_weight.update_weight_from_distributed import UpdateWeightFromDistributed  # noqa: F401
from .update_weight.update_weight_from_tensor import UpdateWeightFromTensor  # noqa: F401
