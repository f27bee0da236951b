"""The config of Ling 2.0 and Ring 2.0, with the fields and defaults of the code that is published beside their
weights."""

from transformers import PretrainedConfig


class BailingMoeV2Config(PretrainedConfig):
    model_type = "bailing_moe_v2"

    def __init__(
        self, vocab_size=157184, hidden_size=2048, intermediate_size=5120, num_hidden_layers=20,
        num_attention_heads=16, num_key_value_heads=4, hidden_act="silu", use_qkv_bias=False, use_bias=False,
        rms_norm_eps=1e-6, tie_word_embeddings=False, embedding_dropout=0.0, attention_dropout=0.0,
        output_dropout=0.0, initializer_range=0.02, max_position_embeddings=32768, rope_theta=600000.0,
        use_cache=True, max_window_layers=20, rope_scaling=None, pad_token_id=156892, eos_token_id=156892,
        num_experts=256, num_shared_experts=1, num_experts_per_tok=8, n_group=8, topk_group=4,
        moe_intermediate_size=512, first_k_dense_replace=1, head_dim=128, output_router_logits=False,
        use_qk_norm=True, num_nextn_predict_layers=0, mtp_loss_scaling_factor=0, moe_router_enable_expert_bias=True,
        routed_scaling_factor=1.0, **others,
    ):  # fmt: skip
        named = {
            name: value for name, value in locals().items() if name not in ("self", "others", "__class__")
        }
        of_all = {name: named.pop(name) for name in ("tie_word_embeddings", "pad_token_id", "eos_token_id")}
        for name, value in named.items():
            setattr(self, name, value)
        super().__init__(**of_all, **others)
