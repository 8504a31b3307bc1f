"""Tiny models with random weights, made from their configurations: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip(
    "torch", reason="PyTorch is not installed: scripts/test --importers installs it"
)
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed: scripts/test --importers installs it"
)
transformers.logging.set_verbosity_error()
torch.set_num_threads(1)  # tiny models; several threads wait for each other on a busy machine

BATCH, LENGTH, VOCABULARY = 4, 12, 48
Example = dict[str, Any]
Made = tuple[Any, Example]
MODELS: dict[str, Callable[[], Made]] = {}

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**SIZES, "num_key_value_heads": 2}


def tokens(length: int = LENGTH) -> Any:
    return torch.randint(3, VOCABULARY, (BATCH, length))


def images() -> Any:
    return torch.randn(BATCH, 3, 32, 32)


def classes() -> Any:
    return torch.arange(BATCH)


def model(make: Callable[[], Made]) -> Callable[[], Made]:
    MODELS[make.__name__.strip("_")] = make
    return make


def causal(name: str, config: Callable[[], Any]) -> None:
    """A causal language model with its loss."""

    def make() -> Made:
        ids = tokens()
        labels = ids.clone()
        labels[0, :3] = -100
        made = transformers.AutoModelForCausalLM.from_config(config())
        return made, {"input_ids": ids, "labels": labels, "use_cache": False}

    MODELS[name] = make


causal(
    "gpt2",
    lambda: transformers.GPT2Config(
        n_layer=2, n_embd=32, n_head=4, vocab_size=VOCABULARY, n_positions=32
    ),
)
causal("llama", lambda: transformers.LlamaConfig(**GROUPED))
causal("mistral", lambda: transformers.MistralConfig(**GROUPED, sliding_window=8))
causal("qwen2", lambda: transformers.Qwen2Config(**GROUPED))
causal("qwen3", lambda: transformers.Qwen3Config(**GROUPED, head_dim=8))
causal("gemma2", lambda: transformers.Gemma2Config(**GROUPED, head_dim=8, sliding_window=8))
causal("gemma3", lambda: transformers.Gemma3TextConfig(**GROUPED, head_dim=8, sliding_window=8))
causal("phi3", lambda: transformers.Phi3Config(**GROUPED))
causal("olmo2", lambda: transformers.Olmo2Config(**GROUPED))
causal("gpt_neox", lambda: transformers.GPTNeoXConfig(**SIZES))
causal(
    "opt",
    lambda: transformers.OPTConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        ffn_dim=48,
        word_embed_proj_dim=32,
    ),
)
causal(
    "falcon",
    lambda: transformers.FalconConfig(
        **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
        alibi=False,
        new_decoder_architecture=False,
    ),
)
causal(
    "mixtral",
    lambda: transformers.MixtralConfig(
        **GROUPED,
        num_local_experts=4,
        num_experts_per_tok=2,
        experts_implementation="batched_mm",
    ),
)

causal(
    "qwen2_moe",
    lambda: transformers.Qwen2MoeConfig(
        **GROUPED,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        experts_implementation="batched_mm",
    ),
)
causal(
    "gpt_oss",
    lambda: transformers.GptOssConfig(
        **GROUPED,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=8,
        experts_implementation="batched_mm",
    ),
)
causal(
    "deepseek_v2",
    lambda: transformers.DeepseekV2Config(
        **SIZES,
        q_lora_rank=16,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
        n_group=1,
        topk_group=1,
        experts_implementation="batched_mm",
    ),
)
causal(
    "bloom",
    lambda: transformers.BloomConfig(n_layer=2, hidden_size=32, n_head=4, vocab_size=VOCABULARY),
)
causal("stablelm", lambda: transformers.StableLmConfig(**GROUPED))
causal("cohere", lambda: transformers.CohereConfig(**GROUPED))
causal(
    "mpt",
    lambda: transformers.MptConfig(
        d_model=32, n_heads=4, n_layers=2, vocab_size=VOCABULARY, max_seq_len=32
    ),
)
causal(
    "gptj",
    lambda: transformers.GPTJConfig(
        n_embd=32,
        n_head=4,
        n_layer=2,
        vocab_size=VOCABULARY,
        n_positions=32,
        rotary_dim=4,
        bos_token_id=1,
        eos_token_id=2,
    ),
)
causal(
    "mamba",
    lambda: transformers.MambaConfig(
        hidden_size=32,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        state_size=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
)


@model
def deberta() -> Made:
    config = transformers.DebertaV2Config(
        **SIZES, relative_attention=True, pos_att_type=["p2c", "c2p"]
    )
    ids = tokens()
    return transformers.DebertaV2ForMaskedLM(config), {"input_ids": ids, "labels": ids.clone()}


@model
def bart() -> Made:
    config = transformers.BartConfig(
        encoder_layers=2,
        decoder_layers=2,
        d_model=32,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=2,
        forced_eos_token_id=2,
    )
    made = transformers.BartForConditionalGeneration(config)
    return made, {"input_ids": tokens(), "labels": tokens(8), "use_cache": False}


@model
def swin() -> Made:
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=16,
        depths=[2, 1],
        num_heads=[2, 4],
        window_size=4,
        num_labels=5,
        drop_path_rate=0.0,
    )
    return transformers.SwinForImageClassification(config), {
        "pixel_values": images(),
        "labels": classes(),
    }


@model
def bert() -> Made:
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[1, 9:] = 0
    ids = tokens()
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)), {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.clone(),
    }


@model
def t5() -> Made:
    config = transformers.T5Config(
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        vocab_size=VOCABULARY,
        decoder_start_token_id=0,
    )
    made = transformers.T5ForConditionalGeneration(config)
    return made, {"input_ids": tokens(), "labels": tokens(8), "use_cache": False}


VISION = {**SIZES, "image_size": 32, "patch_size": 8}


@model
def vit() -> Made:
    config = transformers.ViTConfig(**VISION, num_labels=5)
    return transformers.ViTForImageClassification(config), {
        "pixel_values": images(),
        "labels": classes(),
    }


@model
def clip() -> Made:
    config = transformers.CLIPConfig(
        text_config=dict(SIZES), vision_config=dict(VISION), projection_dim=16
    )
    return transformers.CLIPModel(config), {
        "input_ids": tokens(),
        "pixel_values": images(),
        "return_loss": True,
    }


@model
def whisper_encoder() -> Made:
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=8,
        vocab_size=VOCABULARY,
        pad_token_id=0,
    )
    return WhisperEncoder(config), {"input_features": torch.randn(BATCH, 8, 16)}


@model
def whisper() -> Made:
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=8,
        max_target_positions=16,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return transformers.WhisperForConditionalGeneration(config), {
        "input_features": torch.randn(BATCH, 8, 16),
        "labels": tokens(8),
        "use_cache": False,
    }


@model
def hubert() -> Made:
    """It has a parameter that it only reads where it masks inputs, in training."""
    config = transformers.HubertConfig(
        **SIZES,
        conv_dim=[16, 16],
        conv_stride=[4, 2],
        conv_kernel=[8, 3],
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=4,
        apply_spec_augment=False,
        num_feat_extract_layers=2,
    )
    return transformers.HubertModel(config), {"input_values": torch.randn(BATCH, 160)}


@model
def resnet() -> Made:
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=5
    )
    return transformers.ResNetForImageClassification(config), {
        "pixel_values": images(),
        "labels": classes(),
    }


@model
def mobilenet() -> Made:
    config = transformers.MobileNetV1Config(image_size=32, depth_multiplier=0.25, num_labels=5)
    return transformers.MobileNetV1ForImageClassification(config), {
        "pixel_values": images(),
        "labels": classes(),
    }


@model
def convnext() -> Made:
    config = transformers.ConvNextConfig(
        hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, image_size=32, num_labels=5
    )
    return transformers.ConvNextForImageClassification(config), {
        "pixel_values": images(),
        "labels": classes(),
    }


def made(name: str, dtype: str = "float32", train: bool = False) -> Made:
    """A model with dropout off, and its example."""
    torch.manual_seed(0)
    module, example = MODELS[name]()
    for each in module.modules():
        if isinstance(each, torch.nn.Dropout):
            each.p = 0.0
    kind = getattr(torch, dtype)
    cast = {
        key: value.to(kind) if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in example.items()
    }
    return module.to(kind).train(train), cast
