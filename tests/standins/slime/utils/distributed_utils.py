"""In the place of what slime has under this name."""

import torch.distributed as dist


def get_gloo_group():
    return dist.group.WORLD
