"""The models of zoo.py: tiny, of random weights, as their libraries build them."""

import importlib

import torch

TEXT, SEQ2SEQ, IMAGE, AUDIO = "text", "seq2seq", "image", "audio"

# Hugging Face's model types, by what they are given.
CAUSAL = (
    "gpt2 llama mistral mixtral qwen2 qwen3 qwen2_moe qwen3_moe phi phi3 gemma gemma2 gemma3_text gpt_neox gptj "
    "gpt_neo gpt_bigcode opt bloom falcon mpt codegen stablelm starcoder2 olmo olmo2 cohere granite glm glm4 smollm3 "
    "nemotron helium deepseek_v2 deepseek_v3 biogpt mamba mamba2 ernie4_5 persimmon olmoe gpt_oss llama4_text "
    "aria_text jetmoe hy_v4 nemotron_h"
).split()
MASKED = (
    "bert roberta distilbert electra albert deberta deberta-v2 camembert xlm-roberta mpnet modernbert fnet layoutlm "
    "squeezebert roformer megatron-bert rembert esm convbert"
).split()
ENCODER_DECODER = "t5 mt5 umt5 bart mbart pegasus marian blenderbot m2m_100".split()
VISION = (
    "vit deit beit dinov2 dinov2_with_registers dinov3_vit swin swinv2 convnext convnextv2 poolformer regnet resnet "
    "segformer siglip_vision_model clip_vision_model mobilenet_v2 focalnet vit_mae hiera"
).split()
SOUND = "wav2vec2 hubert wavlm whisper clip".split()

# What makes them tiny: those of these options that a configuration has.
SMALL = {
    "vocab_size": 99, "hidden_size": 32, "n_embd": 32, "d_model": 32, "num_hidden_layers": 2, "n_layer": 2,
    "num_layers": 2, "n_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "ffn_dim": 48, "n_inner": 48, "d_ff": 48, "d_kv": 8,
    "dim": 32, "hidden_dim": 48, "max_position_embeddings": 64, "n_positions": 64, "encoder_layers": 2,
    "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "kv_lora_rank": 16,
    "q_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "image_size": 32, "patch_size": 8, "embedding_size": 32, "head_dim": 8, "rotary_dim": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "max_source_positions": 20,
    "max_target_positions": 20, "num_mel_bins": 8, "num_labels": 5, "expand": 2, "state_size": 8, "n_groups": 2,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "sliding_window": 8, "max_seq_len": 64,
    "query_pre_attn_scalar": 8, "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_intermediate_size":
    48, "decoder_num_attention_heads": 4,
}  # fmt: skip
WINDOWS = {"image_size": 64, "patch_size": 4, "embed_dim": 16, "depths": [2, 2]}
# What some need beside it.
OPTIONS = {
    "swin": {**WINDOWS, "num_heads": [2, 4], "window_size": 4},
    "swinv2": {**WINDOWS, "num_heads": [2, 4], "window_size": 4},
    "focalnet": {**WINDOWS, "focal_levels": [2, 2], "focal_windows": [3, 3]},
    "hiera": {"image_size": [64, 64], "embed_dim": 16, "depths": [1, 1, 1, 1], "num_heads": [1, 2, 2, 4]},
    "convnext": {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1], "patch_size": 4},
    "convnextv2": {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 2, 1], "patch_size": 4},
    "poolformer": {"hidden_sizes": [8, 12, 16, 24], "depths": [1, 1, 1, 1], "patch_size": 7},
    "regnet": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "groups_width": 8, "embedding_size": 8},
    "resnet": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "embedding_size": 8},
    "segformer": {"hidden_sizes": [8, 16, 16, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]},
    "gemma3_text": {"num_hidden_layers": 6},
    "mpt": {"attn_config": {"attn_type": "multihead_attention"}},
    "nemotron_h": {"mamba_num_heads": 8, "mamba_head_dim": 8, "ssm_state_size": 8, "chunk_size": 4,
                   "moe_shared_expert_intermediate_size": 16},
    "mamba2": {"num_heads": 8, "head_dim": 8, "hidden_size": 32, "expand": 2, "n_groups": 2, "chunk_size": 4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "deepseek_v2": {"num_key_value_heads": 4, "topk_method": "greedy", "n_shared_experts": 1},
    "deepseek_v3": {"num_key_value_heads": 4, "head_dim": 4, "n_group": 2, "topk_group": 1, "num_hidden_layers": 2},
    "llama4_text": {"intermediate_size_mlp": 48, "attention_chunk_size": 8},
    "aria_text": {"moe_num_experts": 4},
    "jetmoe": {"kv_channels": 8},
    "hy_v4": {"index_topk": 6, "index_head_dim": 8, "index_n_heads": 2},
    "esm": {"position_embedding_type": "rotary", "token_dropout": False, "mask_token_id": 3},
    "layoutlm": {"max_2d_position_embeddings": 64},
    "wav2vec2": {"conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [4, 4], "mask_time_prob": 0.0},
    "hubert": {"conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [4, 4], "mask_time_prob": 0.0},
    "wavlm": {"conv_dim": [16, 16], "conv_kernel": [4, 4], "conv_stride": [4, 4], "mask_time_prob": 0.0},
    "beit": {"use_mask_token": False},
    "clip": {
        "projection_dim": 16,
        "text_config": {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                        "num_attention_heads": 4, "max_position_embeddings": 64, "eos_token_id": 98},
        "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                          "num_attention_heads": 4, "image_size": 32, "patch_size": 8},
    },
}  # fmt: skip

UNSET = {"falcon": ("head_dim",), "deepseek_v3": ("head_dim",)}

TORCHVISION = (
    "resnet18 resnext50_32x4d squeezenet1_1 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 mnasnet0_5 "
    "densenet121 efficientnet_b0 regnet_y_400mf convnext_tiny vit_b_16 swin_t swin_v2_t googlenet"
).split()
TIMM = (
    "vit_tiny_patch16_224 deit_tiny_patch16_224 convnext_atto resnetv2_50 ghostnet_100 efficientnet_b0 mixer_s32_224 "
    "eva02_tiny_patch14_224 beit_base_patch16_224 mobilenetv3_small_050 regnetx_002 resmlp_12_224 nf_resnet26 "
    "xcit_nano_12_p16_224 cait_xxs24_224 poolformer_s12 edgenext_xx_small"
).split()

# To make them tiny; timm's models take them as they are.
TIMM_OPTIONS = {
    "vit_tiny_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2, "patch_size": 8},
    "deit_tiny_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2, "patch_size": 8},
    "mixer_s32_224": {"img_size": 32},
    "eva02_tiny_patch14_224": {"img_size": 28, "embed_dim": 48, "depth": 2, "num_heads": 3},
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4, "patch_size": 8},
    "resmlp_12_224": {"img_size": 32},
    "xcit_nano_12_p16_224": {"img_size": 32, "embed_dim": 32, "depth": 2, "num_heads": 4},
    "cait_xxs24_224": {
        "img_size": 32, "embed_dim": 48, "depth": 2, "depth_token_only": 1, "num_heads": 4, "patch_size": 8,
    },
}  # fmt: skip
VISION_OPTIONS = {
    "vit_b_16": ("VisionTransformer", {
        "image_size": 32, "patch_size": 8, "num_layers": 2, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48,
    }),
    "swin_t": ("SwinTransformer", {
        "patch_size": [4, 4], "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": [4, 4],
    }),
}  # fmt: skip
# diffusers: the options, and what the forward is given.
STEP = {"timestep": torch.tensor([3, 7])}
UNET = {
    "sample_size": 16, "block_out_channels": (16, 32), "norm_num_groups": 4, "layers_per_block": 1,
    "attention_head_dim": 8,
}  # fmt: skip
DIFFUSERS = {
    "UNet2DModel": (
        {**UNET, "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
         "up_block_types": ("AttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 3, 16, 16), **STEP},
    ),
    "UNet2DConditionModel": (
        {**UNET, "cross_attention_dim": 24, "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
         "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D")},
        {"sample": (2, 4, 16, 16), **STEP, "encoder_hidden_states": (2, 5, 24)},
    ),
    "AutoencoderKL": (
        {"block_out_channels": (16, 32), "norm_num_groups": 4, "down_block_types": ("DownEncoderBlock2D",) * 2,
         "up_block_types": ("UpDecoderBlock2D",) * 2},
        {"sample": (2, 3, 16, 16)},
    ),
    "DiTTransformer2DModel": (
        {"num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "num_layers": 2, "sample_size": 8,
         "num_embeds_ada_norm": 10},
        {"hidden_states": (2, 4, 8, 8), **STEP, "class_labels": torch.tensor([1, 2])},
    ),
}  # fmt: skip


def models():
    """{name: builder}; a builder gives the model and the keywords of its forward."""
    tolerate_absent_operators()
    found = {}
    for kinds, given, auto in (
        (CAUSAL, TEXT, "AutoModelForCausalLM"), (MASKED, TEXT, "AutoModelForMaskedLM"),
        (ENCODER_DECODER, SEQ2SEQ, "AutoModelForSeq2SeqLM"), (VISION, IMAGE, "AutoModel"), (SOUND, AUDIO, "AutoModel"),
    ):  # fmt: skip
        for kind in kinds:
            found[f"transformers/{kind}"] = lambda kind=kind, given=given, auto=auto: _huggingface(kind, given, auto)
    for name in TORCHVISION:
        found[f"torchvision/{name}"] = lambda name=name: _torchvision(name)
    for name in TIMM:
        found[f"timm/{name}"] = lambda name=name: _timm(name)
    for name in DIFFUSERS:
        found[f"diffusers/{name}"] = lambda name=name: _diffusers(name)
    return found


def _huggingface(kind, given, auto):
    import transformers

    default = transformers.AutoConfig.for_model(kind)
    options = {key: value for key, value in SMALL.items() if key not in UNSET.get(kind, ()) and hasattr(default, key)}
    if kind == "clip" or (given == IMAGE and kind in OPTIONS):  # has sizes of its own
        options = {}
    config = transformers.AutoConfig.for_model(kind, **{**options, **OPTIONS.get(kind, {})})
    config.use_cache = False
    config._experts_implementation = "eager"  # torch's grouped products take no float64
    if given == TEXT and kind == "esm":
        auto = "AutoModel"
    model = getattr(transformers, auto).from_config(config)
    ids = torch.randint(3, 98, (2, 12))
    if kind == "whisper":
        return model, {"input_features": torch.randn(2, 8, 40), "decoder_input_ids": ids}
    if kind == "clip":
        return model, {"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32)}
    if given == IMAGE:
        size = config.image_size if kind in OPTIONS and hasattr(config, "image_size") else 32
        side = size[0] if isinstance(size, list) else size
        return model, {"pixel_values": torch.randn(2, 3, min(side, 64), min(side, 64))}
    if given == AUDIO:
        return model, {"input_values": torch.randn(2, 640)}
    mask = torch.ones(2, 12, dtype=torch.long)
    mask[1, 9:] = 0
    takes_mask = kind not in ("fnet", "mamba", "mamba2")
    given_too = {"attention_mask": mask} if takes_mask else {}
    return model, {"input_ids": ids, **given_too, **({"decoder_input_ids": ids[:, :7]} if given == SEQ2SEQ else {})}


def _torchvision(name):
    import torchvision.models as zoo

    if name in VISION_OPTIONS:
        kind, options = VISION_OPTIONS[name]
        return getattr(zoo, kind)(num_classes=10, **options), {"x": torch.randn(2, 3, 32, 32)}
    extra = {"init_weights": False} if name == "googlenet" else {}
    return getattr(zoo, name)(weights=None, num_classes=10, **extra), {"x": torch.randn(2, 3, 64, 64)}


def _timm(name):
    import timm

    options = TIMM_OPTIONS.get(name, {})
    side = options.get("img_size", 64)
    return timm.create_model(name, num_classes=10, **options), {"x": torch.randn(2, 3, side, side)}


def _diffusers(name):
    import diffusers

    options, given = DIFFUSERS[name]
    inputs = {key: torch.randn(value) if isinstance(value, tuple) else value for key, value in given.items()}
    return getattr(diffusers, name)(**options), inputs


def tolerate_absent_operators():
    """torchvision registers kernels for operators that are not in its wheel where torch is one for CPUs."""
    if hasattr(torch.library.register_fake, "tolerant") or importlib.util.find_spec("torchvision") is None:
        return
    register = torch.library.register_fake

    def tolerant(op, *arguments, **options):
        def decorate(function):
            try:
                return register(op, *arguments, **options)(function)
            except RuntimeError:
                return function

        return decorate

    tolerant.tolerant = True
    torch.library.register_fake = tolerant
