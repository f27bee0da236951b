"""Ling 2.0's classes, which transformers lacks: importing this has its Auto classes find them."""

from transformers import AutoConfig, AutoModelForCausalLM

from tests.standins.bailing.configuration_bailing_moe_v2 import BailingMoeV2Config
from tests.standins.bailing.modeling_bailing_moe_v2 import BailingMoeV2ForCausalLM

AutoConfig.register("bailing_moe_v2", BailingMoeV2Config)
AutoModelForCausalLM.register(BailingMoeV2Config, BailingMoeV2ForCausalLM)
# `save_pretrained` copies the code beside the weights and names it in the config, as it is published.
BailingMoeV2Config.register_for_auto_class()
BailingMoeV2ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
