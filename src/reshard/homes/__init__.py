"""The live homes of weights, loaded from disk and saved to it by all ranks at once."""

from reshard.core.extras import require_base

require_base()
