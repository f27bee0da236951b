"""EAGLE-3 drafters in the form in which they are published: a torch module whose state dict has the names of their
checkpoints, as trainers have it, and its files."""

import json
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

AUX_LAYERS = [1, 2, 3]  # of the target, whose hidden states a drafter reads


class _Layer(torch.nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, keys: int, head: int) -> None:
        super().__init__()

        def linears(**sizes: tuple[int, int]) -> torch.nn.ModuleDict:
            return torch.nn.ModuleDict(
                {name: torch.nn.Linear(*size, bias=False) for name, size in sizes.items()}
            )

        self.self_attn = linears(
            q_proj=(2 * hidden, heads * head),
            k_proj=(2 * hidden, keys * head),
            v_proj=(2 * hidden, keys * head),
            o_proj=(heads * head, hidden),
        )
        self.mlp = linears(gate_proj=(hidden, inner), up_proj=(hidden, inner), down_proj=(inner, hidden))
        self.hidden_norm = torch.nn.RMSNorm(hidden)
        self.input_layernorm = torch.nn.RMSNorm(hidden)
        self.post_attention_layernorm = torch.nn.RMSNorm(hidden)


class Eagle3(torch.nn.Module):
    """A drafter for the model of a directory, in bf16: of `vocabulary` of its tokens, if that is given, and with an
    embedding of its own if `own_embedding`."""

    def __init__(
        self, target: str | Path, vocabulary: int | None = None, own_embedding: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        fields = json.loads((Path(target) / "config.json").read_text())
        torch.manual_seed(1000 + seed)
        hidden, tokens = fields["hidden_size"], fields["vocab_size"]
        heads, keys = fields["num_attention_heads"], fields["num_key_value_heads"]
        head = fields.get("head_dim") or hidden // heads
        if own_embedding:
            self.embed_tokens = torch.nn.Embedding(tokens, hidden)
        self.midlayer = _Layer(hidden, fields["intermediate_size"], heads, keys, head)
        self.fc = torch.nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.norm = torch.nn.RMSNorm(hidden)
        self.lm_head = torch.nn.Linear(hidden, vocabulary or tokens, bias=False)
        for name, parameter in self.named_parameters():
            torch.nn.init.normal_(parameter, 1.0 if "norm" in name else 0.0, 0.1)
        self.bfloat16()
        if vocabulary is not None:
            drafted = torch.randperm(tokens)[:vocabulary].sort().values
            self.register_buffer("d2t", drafted - torch.arange(vocabulary))
            self.register_buffer("t2d", torch.zeros(tokens, dtype=torch.bool).index_fill_(0, drafted, True))
        self.fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": vocabulary or tokens,
            "head_dim": head,
            "num_hidden_layers": 1,
            "max_position_embeddings": fields["max_position_embeddings"],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
            **{name: fields[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads",
                                               "num_key_value_heads", "vocab_size", "rms_norm_eps")},
        }  # fmt: skip

    @torch.no_grad()
    def repeat(self, target: str | Path) -> "Eagle3":
        """Draft the token that the target has just said, so that some drafts are accepted; return itself."""
        theirs = load_file(Path(target) / "model.safetensors")
        self.midlayer.self_attn["o_proj"].weight.zero_()
        self.midlayer.mlp["down_proj"].weight.zero_()
        hidden = len(self.fc.weight)
        self.fc.weight.zero_()[:, -hidden:] = torch.eye(hidden)
        self.norm.weight.copy_(theirs["model.norm.weight"])
        drafted = torch.arange(len(self.lm_head.weight))
        self.lm_head.weight.copy_(theirs["lm_head.weight"][drafted + getattr(self, "d2t", 0)])
        return self

    def publish(self, folder: Path) -> str:
        """Write the files that engines load, and return their folder."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.fields))
        tensors = {name: one.contiguous() for name, one in self.state_dict().items()}
        save_file(tensors, folder / "model.safetensors")
        return str(folder)


class FusedEagle3(torch.nn.Module):
    """What one of so many tensor parallel ranks holds of a drafter as Megatron's layers would: q, k and v in one
    tensor, by groups of heads, and so gate and up."""

    def __init__(self, drafter: Eagle3, rank: int, ranks: int) -> None:
        super().__init__()
        fields = drafter.fields
        groups, head = fields["num_key_value_heads"], fields["head_dim"]
        self.config = SimpleNamespace(
            num_attention_heads=fields["num_attention_heads"], num_query_groups=groups, kv_channels=head,
            hidden_size=fields["hidden_size"], ffn_hidden_size=fields["intermediate_size"],
            draft_vocab_size=fields["draft_vocab_size"],
        )  # fmt: skip
        self.rank, self.ranks = rank, ranks
        for name, tensor in self._local(drafter).items():
            *path, key = name.split(".")
            module: torch.nn.Module = self
            for part in path:
                if part not in module._modules:
                    module.add_module(part, torch.nn.Module())
                module = module.get_submodule(part)
            if tensor.is_floating_point():
                module.register_parameter(key, torch.nn.Parameter(tensor))
            else:
                module.register_buffer(key, tensor)

    def _local(self, drafter: Eagle3) -> dict[str, torch.Tensor]:
        plain, layer = {name: one.detach() for name, one in drafter.state_dict().items()}, "layer"
        cut = lambda name, dim=0: plain[name].chunk(self.ranks, dim)[self.rank].clone()  # noqa: E731
        parts = [plain[f"midlayer.self_attn.{name}_proj.weight"] for name in "qkv"]
        grouped = [part.view(self.config.num_query_groups, -1, part.shape[1]) for part in parts]
        fused = torch.cat(grouped, 1).reshape(-1, parts[0].shape[1])
        local = {
            "fc.weight": cut("fc.weight"), "eagle_output_layer.weight": cut("lm_head.weight"),
            f"{layer}.self_attention.linear_qkv.weight": fused.chunk(self.ranks)[self.rank].clone(),
            f"{layer}.self_attention.linear_proj.weight": cut("midlayer.self_attn.o_proj.weight", 1),
            f"{layer}.mlp.linear_fc1.weight": torch.cat([cut(f"midlayer.mlp.{name}_proj.weight")
                                                         for name in ("gate", "up")]),
            f"{layer}.mlp.linear_fc2.weight": cut("midlayer.mlp.down_proj.weight", 1),
            f"{layer}.hidden_norm.weight": plain["midlayer.hidden_norm.weight"],
            f"{layer}.input_layernorm.weight": plain["midlayer.input_layernorm.weight"],
            f"{layer}.pre_mlp_layernorm.weight": plain["midlayer.post_attention_layernorm.weight"],
            "norm.weight": plain["norm.weight"], "d2t": plain["d2t"],
        }  # fmt: skip
        return {f"eagle_module.{name}": tensor for name, tensor in local.items()}

    @torch.no_grad()
    def take(self, drafter: Eagle3) -> None:
        """Take another drafter's weights."""
        self.load_state_dict(self._local(drafter))


def load_drafter(folder: str | Path, target: str | Path) -> Eagle3:
    """The drafter that was published into a folder, for the model of a directory."""
    tensors = load_file(Path(folder) / "model.safetensors")
    vocabulary = len(tensors["lm_head.weight"]) if "d2t" in tensors else None
    drafter = Eagle3(target, vocabulary, "embed_tokens.weight" in tensors)
    drafter.load_state_dict(tensors)
    return drafter
