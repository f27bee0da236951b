"""Stands for the code that lies beside Kimi-K2.5's published weights, by the names that trainers take from there: the
tower and the projector, with their parameters, of which nothing is computed here."""

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class VisionTowerConfig(PretrainedConfig):
    model_type = "moonvit3d"

    def __init__(self, config=None, **options) -> None:
        super().__init__(**options)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"):
            setattr(self, name, getattr(config, f"vt_{name}", 0))
        for name in ("patch_size", "init_pos_emb_height", "init_pos_emb_width"):
            setattr(self, name, getattr(config, name, 14))


class ProjectorConfig(PretrainedConfig):
    def __init__(self, config=None, **options) -> None:
        super().__init__(**options)
        self.mm_hidden_size, self.hidden_size = config.mm_hidden_size, config.text_hidden_size
        self.merge_kernel_size = getattr(config, "merge_kernel_size", [2, 2])


class Positions(nn.Module):
    def __init__(self, height: int, width: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(height, width, size))


class Patches(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.hidden_size, config.patch_size, config.patch_size)
        self.pos_emb = Positions(config.init_pos_emb_height, config.init_pos_emb_width, config.hidden_size)


class Perceptron(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.fc0, self.fc1 = nn.Linear(size, inner), nn.Linear(inner, size)


class Block(nn.Module):
    def __init__(self, size: int, inner: int) -> None:
        super().__init__()
        self.norm0, self.norm1 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.wqkv, self.wo, self.mlp = (
            nn.Linear(size, 3 * size),
            nn.Linear(size, size),
            Perceptron(size, inner),
        )


class MoonViT3dEncoder(nn.Module):
    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__()
        size = config.hidden_size
        self.blocks = nn.ModuleList(
            Block(size, config.intermediate_size) for _ in range(config.num_hidden_layers)
        )
        self.final_layernorm = nn.LayerNorm(size)


class MoonViT3dPretrainedModel(PreTrainedModel):
    config_class = VisionTowerConfig

    def __init__(self, config: VisionTowerConfig) -> None:
        super().__init__(config)
        self.patch_embed, self.encoder = Patches(config), MoonViT3dEncoder(config)
        self.post_init()


class PatchMergerMLP(nn.Module):
    def __init__(self, config: ProjectorConfig) -> None:
        super().__init__()
        height, width = config.merge_kernel_size
        size = config.mm_hidden_size * height * width
        self.pre_norm = nn.LayerNorm(config.mm_hidden_size)
        self.proj = nn.Sequential(nn.Linear(size, size), nn.GELU(), nn.Linear(size, config.hidden_size))


class KimiK25ForConditionalGeneration(PreTrainedModel):
    """Of which mcore-bridge calls methods to make embeddings of images."""
