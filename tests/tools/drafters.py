"""EAGLE-3 drafters in the form in which they are published: a torch module whose state dict has the names of their
checkpoints, as trainers have it, and its files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

AUX_LAYERS = [1, 2, 3]  # of the target, whose hidden states a drafter reads


class _Layer(torch.nn.Module):
    def __init__(self, hidden: int, inner: int, heads: int, keys: int, head: int) -> None:
        super().__init__()
        plain = {"bias": False}
        self.self_attn = torch.nn.ModuleDict(
            {
                "q_proj": torch.nn.Linear(2 * hidden, heads * head, **plain),
                "k_proj": torch.nn.Linear(2 * hidden, keys * head, **plain),
                "v_proj": torch.nn.Linear(2 * hidden, keys * head, **plain),
                "o_proj": torch.nn.Linear(heads * head, hidden, **plain),
            }
        )
        self.mlp = torch.nn.ModuleDict(
            {
                "gate_proj": torch.nn.Linear(hidden, inner, **plain),
                "up_proj": torch.nn.Linear(hidden, inner, **plain),
                "down_proj": torch.nn.Linear(inner, hidden, **plain),
            }
        )
        self.hidden_norm = torch.nn.RMSNorm(hidden)
        self.input_layernorm = torch.nn.RMSNorm(hidden)
        self.post_attention_layernorm = torch.nn.RMSNorm(hidden)


class Eagle3(torch.nn.Module):
    """A drafter for a target of this ``config.json``: of `vocabulary` tokens, if that is given, and with an embedding
    of its own if `own_embedding`."""

    def __init__(
        self, target: dict, vocabulary: int | None = None, own_embedding: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        torch.manual_seed(1000 + seed)
        hidden, tokens = target["hidden_size"], target["vocab_size"]
        heads, keys = target["num_attention_heads"], target["num_key_value_heads"]
        head = target.get("head_dim") or hidden // heads
        if own_embedding:
            self.embed_tokens = torch.nn.Embedding(tokens, hidden)
        self.midlayer = _Layer(hidden, target["intermediate_size"], heads, keys, head)
        self.fc = torch.nn.Linear(len(AUX_LAYERS) * hidden, hidden, bias=False)
        self.norm = torch.nn.RMSNorm(hidden)
        self.lm_head = torch.nn.Linear(hidden, vocabulary or tokens, bias=False)
        for name, parameter in self.named_parameters():
            with torch.no_grad():
                parameter.normal_(1.0 if "norm" in name else 0.0, 0.1)
        if vocabulary is not None:
            drafted = torch.randperm(tokens)[:vocabulary].sort().values
            self.register_buffer("d2t", drafted - torch.arange(vocabulary))
            self.register_buffer("t2d", torch.zeros(tokens, dtype=torch.bool).index_fill_(0, drafted, True))
        self.fields = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "draft_vocab_size": vocabulary or tokens,
            "eagle_aux_hidden_state_layer_ids": AUX_LAYERS,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": AUX_LAYERS},
            "head_dim": head,
            "num_hidden_layers": 1,
            "max_position_embeddings": target["max_position_embeddings"],
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **{name: target[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads",
                                               "num_key_value_heads", "vocab_size", "rms_norm_eps")},
        }  # fmt: skip

    def publish(self, folder: Path) -> str:
        """Write the files that engines load, and return their folder."""
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(self.fields))
        save_file(
            {name: one.contiguous() for name, one in self.state_dict().items()}, folder / "model.safetensors"
        )
        return str(folder)
