"""A live Megatron model: loaded from disk, saved, exported and offloaded, by all ranks at once."""

from reshard.core.extras import require_base

require_base()
