"""In the place of what slime has under this name."""


def named_params_and_buffers(args, model, convert_to_global_name=True, translate_gpu_to_cpu=False):
    return ((name, tensor) for chunk in model for name, tensor in chunk.named_parameters())
