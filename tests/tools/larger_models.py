"""Larger models, as trainers have them under Megatron, on a CPU: the classes of the towers are those of the published
mcore-bridge and Megatron-Bridge, around Megatron's own language model.

Their packages are not initialized, which would import what needs a GPU; of the modules that those classes import,
what they take for training alone is left out. Where they ask for Transformer Engine's layers, these are Megatron's.
"""

import json
import sys
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import torch
import transformers
from megatron.core import parallel_state as mpu
from megatron.core.models.vision import vit_layer_specs
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MegatronModule
from safetensors.torch import load_file
from transformers import dynamic_module_utils

from tests.on_cpu import megatron_on_cpu

WHEELS = {"mcore-bridge": "1.6.5", "megatron-bridge": "0.6.2"}
KINDS = ("mcore-bridge", "module", "layers")
KIMI_VL = "megatron.bridge.models.kimi_vl"
QWEN3_VL = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"


def without_initializing(folder: str, package: str) -> None:
    """Make a package, and all around it, importable file by file."""
    names = package.split(".")
    for depth in range(1, len(names) + 1):
        name = ".".join(names[:depth])
        if name not in sys.modules:
            module = ModuleType(name)
            module.__path__ = [str(Path(folder, *names[:depth]))]
            sys.modules[name] = module


def stand_in(name: str, **members: object) -> None:
    sys.modules[name] = ModuleType(name)
    sys.modules[name].__dict__.update(members)


def larger(folder: str, kind: str, chunk: torch.nn.Module, config) -> MegatronModule:
    """A chunk's language model in the larger model of a trainer."""
    kinds = {
        "mcore-bridge": _of_mcore_bridge, "module": _module_alone, "layers": _of_layers, "published": _of_published
    }  # fmt: skip
    return kinds[kind](folder, chunk, config)


def _of_mcore_bridge(folder: str, chunk: torch.nn.Module, config) -> MegatronModule:
    """mcore-bridge's ``MultimodalGPTModel``, whose tower is transformers' in a ``HuggingFaceVit``."""
    for package in ("mcore_bridge.model.mm_gpts", "mcore_bridge.model.gpts", "mcore_bridge.config"):
        without_initializing(folder, package)
    stand_in("mcore_bridge.config", ModelConfig=object)
    stand_in("mcore_bridge.bridge", GPTBridge=object, MultimodalGPTBridge=object)
    stand_in("mcore_bridge.utils", safe_ddp_context=lambda **_: nullcontext(), split_cp_inputs=None,
             reconstruct_tensor_cp=None, get_env_args=lambda *_: True)  # fmt: skip
    stand_in("mcore_bridge.model.modules", TransformerBlock=object)
    stand_in("mcore_bridge.model.gpt_model", GPTModel=object)
    stand_in(
        "mcore_bridge.model.register",
        ModelLoader=object,
        ModelMeta=MagicMock(),
        register_model=lambda _: None,
    )
    stand_in("mcore_bridge.model.gpts.qwen3_next", Qwen3NextBridge=object, Qwen3NextLoader=object,
             resolve_gdn_attention_mask=None)  # fmt: skip
    file, name = {
        "qwen3_5": ("qwen3_5", "Qwen3_5Vit"), "qwen2_5_vl": ("qwen", "Qwen2_5VL_Vit"),
        "kimi_k25": ("kimi_vl", "KimiK25Vit"),
    }.get(config.model_type, ("qwen3_vl", "Qwen3VL_Vit"))  # fmt: skip
    vit = getattr(import_module(f"mcore_bridge.model.mm_gpts.{file}"), name)
    cpu, plain = torch.device("cpu"), torch.nn.Module.to
    vit.to = lambda self, device=None: plain(self, cpu)
    settings = chunk.config
    settings.hf_config, settings.hf_model_type = config, config.model_type
    settings.vit_attn_impl, settings.language_model_only = "eager", False
    settings.model_meta = SimpleNamespace(visual_cls=vit)
    model = import_module("mcore_bridge.model.mm_gpt_model").MultimodalGPTModel
    model.language_model_cls = lambda *_, **__: chunk
    return model(settings, None, chunk.pre_process, chunk.post_process)


class WithModule(MegatronModule):
    """As Megatron-Bridge has Qwen2.5-VL: transformers' module beside the language model (its
    ``modeling_qwen25_vl.py`` has these two lines)."""

    def __init__(self, chunk: torch.nn.Module, config) -> None:
        super().__init__(config=chunk.config)
        if chunk.pre_process:
            module = import_module(type(config).__module__.replace("configuration", "modeling"))
            kind = type(config.vision_config)
            [visual] = [each for each in vars(module).values() if getattr(each, "config_class", None) is kind]
            self.visual = visual._from_config(config.vision_config)
        self.language_model = chunk


def _module_alone(folder: str, chunk: torch.nn.Module, config) -> MegatronModule:
    return WithModule(chunk, config)


class WithLayers(MegatronModule):
    """As Megatron-Bridge has Qwen3-VL and Qwen3.5 (``Qwen3VLModel``): its vision model of Megatron's layers."""

    def __init__(self, folder: str, chunk: torch.nn.Module, config) -> None:
        super().__init__(config=chunk.config)
        self.vision_transformer_config, self.vision_model = config.vision_config, None
        if chunk.pre_process:
            self.vision_model = vision_model(folder, chunk.config, config.vision_config)
        self.language_model = chunk


def vision_model(folder: str, settings, vision) -> torch.nn.Module:
    """Megatron-Bridge's ``Qwen3VLVisionModel``, as its ``Qwen3VLModel`` makes it."""
    for package in (QWEN3_VL, "megatron.bridge.training.utils", "megatron.bridge.utils"):
        without_initializing(folder, package)
    for missing in ("cuda_graph_use_single_mempool", "cuda_graph_retain_backward_graph", "enable_cuda_graph",
                    "external_cuda_graph"):  # fmt: skip
        if not hasattr(settings, missing):
            setattr(settings, missing, False)
    made = import_module(f"{QWEN3_VL}.transformer_config").get_vision_model_config(vision, settings)
    made.pipeline_model_parallel_size, made.first_pipeline_num_layers = 1, None
    spec = vit_layer_specs.get_vit_layer_with_local_spec()
    spec.submodules.self_attention.module = import_module(f"{QWEN3_VL}.attention").Qwen3VLSelfAttention
    merger = import_module(f"{QWEN3_VL}.utils").PatchMergerSubmodules(
        patch_norm=vit_layer_specs.LNImpl, linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return import_module(f"{QWEN3_VL}.vision_model").Qwen3VLVisionModel(
        made, spec, merger, pg_collection=groups
    )


def _of_layers(folder: str, chunk: torch.nn.Module, config) -> MegatronModule:
    return WithLayers(folder, chunk, config)


def _of_published(folder: str, chunk: torch.nn.Module, config) -> MegatronModule:
    """Megatron-Bridge's ``KimiK25VLModel``, which makes its tower of the code that lies beside the model."""
    for package in (KIMI_VL, "megatron.bridge.utils", "megatron.bridge.models.hf_pretrained"):
        without_initializing(folder, package)
    stand_in("megatron.bridge.models.gpt_provider", GPTModelProvider=object)
    stand_in(
        "megatron.bridge.models.hf_pretrained.safe_config_loader",
        safe_load_config_with_retry=lambda directory, **_: config_of(directory),
    )
    stand_in(
        "megatron.bridge.utils.common_utils", hook_hf_module_setattr_for_tp_grad_sync=lambda module: module
    )
    settings = chunk.config
    settings.hf_model_path, settings.trust_remote_code = config.name_or_path, True
    settings.media_placeholder_token_id = config.media_placeholder_token_id
    settings.share_embeddings_and_output_weights = chunk.share_embeddings_and_output_weights
    settings.provide_language_model = lambda **_: chunk
    model = import_module(f"{KIMI_VL}.modeling_kimi_k25_vl").KimiK25VLModel
    return model(settings, chunk.pre_process, chunk.post_process)


def config_of(directory: str):
    """The config of a directory, as a trainer has it."""
    said = json.loads((Path(directory) / "config.json").read_text())
    if said["model_type"] != "kimi_k25":
        return transformers.AutoConfig.from_pretrained(directory)
    # Of the class that lies beside the model, which has the fields of the file.
    vision = transformers.PretrainedConfig(**said["vision_config"])
    config = transformers.PretrainedConfig(**said | {"vision_config": vision}, name_or_path=str(directory))
    config.model_type = said["model_type"]
    return config


def fill(model: MegatronModule, kind: str, directory: str) -> None:
    """Put the tower of a directory into a larger model: into transformers' module by its own loader, into Megatron's
    layers by hand."""
    every = load_file(Path(directory) / "model.safetensors")
    for name in ("vision_tower", "mm_projector"):
        module = getattr(getattr(model, "visual", None) or model, name, None)
        if module is not None:
            own = {n.removeprefix(f"{name}."): t for n, t in every.items() if n.startswith(f"{name}.")}
            module.load_state_dict(own, strict=True)
    tensors = {
        name.removeprefix("model.").removeprefix("visual."): tensor
        for name, tensor in every.items()
        if name.startswith(("model.visual.", "visual."))
    }
    if not tensors:
        return
    visual = getattr(model, "vision_model" if kind == "layers" else "visual", None)
    if visual is None:
        return
    if kind != "layers":
        (visual.visual if kind == "mcore-bridge" else visual).load_state_dict(tensors, strict=True)
        return
    state, left = visual.state_dict(), dict(tensors)
    with torch.no_grad():
        for name, parameter in visual.named_parameters():
            parameter.copy_(_of_rank(parameter, _by_hand(name, left, visual.config.num_attention_heads)))
    assert not left and state, sorted(left)


def _by_hand(name: str, tensors: dict[str, torch.Tensor], heads: int) -> torch.Tensor:
    """The whole tensor that Megatron has under a name, of published ones; these are taken out."""
    for own, published in (
        ("decoder.layers.", "blocks."), ("decoder.deepstack", "deepstack"), ("patch_norm.", "norm."),
        ("self_attention.linear_qkv.", "attn.qkv."), ("self_attention.linear_proj.", "attn.proj."),
        ("pre_mlp_layernorm.", "norm2."), ("input_layernorm.", "norm1."),
    ):  # fmt: skip
        name = name.replace(own, published)
    tensor = tensors.pop(name)
    if (
        ".attn.qkv." in name
    ):  # [3, heads, rows of a head, ...], of which Megatron has each head's three in turn
        return tensor.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)
    return tensor


def _of_rank(parameter: torch.nn.Parameter, whole: torch.Tensor) -> torch.Tensor:
    """This rank's part, along the dim that tensor parallelism has cut."""
    tp, rank = mpu.get_tensor_model_parallel_world_size(), mpu.get_tensor_model_parallel_rank()
    for dim, (own, all_of_it) in enumerate(zip(parameter.shape, whole.shape, strict=True)):
        if own != all_of_it:
            assert own * tp == all_of_it
            return whole.chunk(tp, dim)[rank]
    return whole


class LargerTrainer:
    """A rank's chunks, in the larger models of a kind of trainer."""

    def __init__(self, wheels: dict[str, str], kind: str, models, args, hf: str) -> None:
        self.kind, self.texts, self.args = kind, models, args
        config = config_of(hf)
        # A copy of the code beside a model for each rank, which no other is writing as it is imported.
        dynamic_module_utils.HF_MODULES_CACHE = f"{hf}-code/{torch.distributed.get_rank()}"
        folder = wheels["mcore-bridge" if kind == "mcore-bridge" else "megatron-bridge"]
        self.chunks = [larger(folder, kind, chunk, config).bfloat16() for chunk in models]
        for chunk in self.chunks:
            for module in chunk.modules():
                if getattr(module, "expert_bias", None) is not None:
                    module.expert_bias = module.expert_bias.float()  # as Megatron keeps it

    def take(self, hf: str, mcore: str) -> None:
        """Load weights by what is not tested: Megatron's loader, transformers' names."""
        megatron_on_cpu.load(self.texts, self.args, mcore)
        for chunk in self.chunks:
            fill(chunk, self.kind, hf)

    def weights(self) -> dict[str, torch.Tensor]:
        return {
            f"{index} {name}": tensor.detach().clone()
            for index, chunk in enumerate(self.chunks)
            for name, tensor in chunk.named_parameters()
        }

    def spoil(self) -> None:
        with torch.no_grad():
            for chunk in self.chunks:
                for parameter in chunk.parameters():
                    parameter.fill_(-77.0)
