"""What Megatron-Core is made of: ranks and stages, parameters, checkpoint keys, arguments; and models built
from them."""
