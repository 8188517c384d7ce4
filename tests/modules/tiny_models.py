"""Tiny random models of Transformers, one of each kind that conversion supports, and arguments for them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as t

E, H, F, V = 16, 2, 24, 31  # width, heads, width of the MLP, vocabulary
COMMON = {"hidden_size": E, "num_attention_heads": H, "intermediate_size": F, "num_hidden_layers": 2}
TEXT = COMMON | {"vocab_size": V, "max_position_embeddings": 40}
IMAGE = COMMON | {"image_size": 16, "patch_size": 4}
SEQ2SEQ = {
    "vocab_size": V, "d_model": E, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": H,
    "decoder_attention_heads": H, "encoder_ffn_dim": F, "decoder_ffn_dim": F, "bos_token_id": 1, "pad_token_id": 0,
    "eos_token_id": 2, "decoder_start_token_id": 1,
}  # fmt: skip


def ids(length: int = 9, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, V, (2, length), generator=torch.Generator().manual_seed(seed))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def padded() -> torch.Tensor:
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return mask


def text() -> dict[str, Any]:
    return {"input_ids": ids(), "attention_mask": padded()}


def image() -> dict[str, Any]:
    return {"pixel_values": noise(2, 3, 16, 16)}


def seq2seq() -> dict[str, Any]:
    return text() | {"decoder_input_ids": ids(7, 2)}


@dataclass(frozen=True)
class Kind:
    """A model and its arguments. `generators` is how many modules for composition it gets."""

    model: Callable[..., t.PreTrainedModel]
    inputs: Callable[[], dict[str, Any]]
    auto: type
    generators: int = 2


def vision(model_class: type, config_class: type, **fields: Any) -> Kind:
    return Kind(lambda **more: model_class(config_class(**(IMAGE | fields | more))), image, model_class)


def language(model_class: type, config_class: type, auto: type, **fields: Any) -> Kind:
    return Kind(lambda **more: model_class(config_class(**(TEXT | fields | more))), text, auto)


def clip(config_class: type, model_class: type) -> Kind:
    parts = {
        "text_config": TEXT | {"projection_dim": E, "eos_token_id": 2},
        "vision_config": IMAGE | {"projection_dim": E},
    }
    if config_class is t.SiglipConfig:
        parts = {"text_config": TEXT, "vision_config": IMAGE}
    return Kind(lambda: model_class(config_class(**parts)), lambda: text() | image(), t.AutoModel, 4)


def bert_with_cross_attention() -> t.PreTrainedModel:
    return t.BertModel(t.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True), add_pooling_layer=False)


def gpt2_with_cross_attention() -> t.PreTrainedModel:
    return t.GPT2Model(
        t.GPT2Config(n_embd=E, n_head=H, n_layer=1, n_positions=40, vocab_size=V, add_cross_attention=True)
    )


def encoder_decoder() -> t.PreTrainedModel:
    """Two models in one, whose attention modules hold copies of their configurations."""
    decoder = t.BertConfig(**TEXT, is_decoder=True, add_cross_attention=True)
    model = t.EncoderDecoderModel(encoder=t.BertModel(t.BertConfig(**TEXT)), decoder=t.BertLMHeadModel(decoder))
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    return model


def encoder_states() -> dict[str, Any]:
    return text() | {"encoder_hidden_states": noise(2, 5, E)}


KINDS = {
    "vit": vision(t.ViTForImageClassification, t.ViTConfig),
    "deit": vision(t.DeiTForImageClassification, t.DeiTConfig),
    "dinov2": vision(t.Dinov2ForImageClassification, t.Dinov2Config),
    "beit": vision(t.BeitForImageClassification, t.BeitConfig, use_relative_position_bias=True),
    "swin": Kind(
        lambda: t.SwinForImageClassification(
            t.SwinConfig(image_size=16, patch_size=2, embed_dim=E, depths=[2, 1], num_heads=[2, 4], window_size=4)
        ),
        image,
        t.AutoModelForImageClassification,
        3,
    ),
    "sam3, vision": vision(t.Sam3ViTModel, t.Sam3ViTConfig, window_size=2, global_attn_indexes=[1],
                           pretrain_image_size=16),
    "clip": clip(t.CLIPConfig, t.CLIPModel),
    "siglip": clip(t.SiglipConfig, t.SiglipModel),
    "siglip, vision": vision(t.SiglipVisionModel, t.SiglipVisionConfig),
    "bert": language(t.BertForMaskedLM, t.BertConfig, t.AutoModelForMaskedLM),
    "bert, cross": Kind(bert_with_cross_attention, encoder_states, t.AutoModel, 6),
    "roberta": language(t.RobertaForMaskedLM, t.RobertaConfig, t.AutoModelForMaskedLM, max_position_embeddings=60),
    "modernbert": language(t.ModernBertForMaskedLM, t.ModernBertConfig, t.AutoModelForMaskedLM, local_attention=4,
                           pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2),
    "distilbert": Kind(
        lambda: t.DistilBertForMaskedLM(
            t.DistilBertConfig(vocab_size=V, max_position_embeddings=40, dim=E, n_heads=H, n_layers=2, hidden_dim=F)
        ),
        text,
        t.AutoModelForMaskedLM,
    ),
    "albert": Kind(
        lambda: t.AlbertForMaskedLM(t.AlbertConfig(**TEXT, embedding_size=8)), text, t.AutoModelForMaskedLM, 1
    ),
    "esm": language(t.EsmForMaskedLM, t.EsmConfig, t.AutoModelForMaskedLM, pad_token_id=0, mask_token_id=1,
                    position_embedding_type="rotary", token_dropout=False),
    "encoder-decoder": Kind(encoder_decoder, seq2seq, t.AutoModelForSeq2SeqLM, 8),
    "bart": Kind(
        lambda: t.BartForConditionalGeneration(t.BartConfig(**SEQ2SEQ, max_position_embeddings=40)),
        seq2seq,
        t.AutoModelForSeq2SeqLM,
        4,
    ),
    "t5": Kind(
        lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=V, d_model=E, d_kv=E // H, num_heads=H, num_layers=1, d_ff=F, pad_token_id=0,
                       decoder_start_token_id=1)
        ),
        seq2seq,
        t.AutoModelForSeq2SeqLM,
        4,
    ),
    "whisper": Kind(
        lambda: t.WhisperForConditionalGeneration(
            t.WhisperConfig(**SEQ2SEQ, num_mel_bins=4, max_source_positions=10, max_target_positions=40)
        ),
        lambda: {"input_features": noise(2, 4, 20), "decoder_input_ids": ids(7, 2)},
        t.AutoModelForSpeechSeq2Seq,
        4,
    ),
    "wav2vec2": Kind(
        lambda: t.Wav2Vec2ForCTC(
            t.Wav2Vec2Config(**COMMON, vocab_size=V, conv_dim=[8, 8], conv_stride=[5, 4], conv_kernel=[10, 8],
                             num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=2,
                             mask_time_prob=0.0, layerdrop=0.0)
        ),
        lambda: {"input_values": noise(2, 400)},
        t.AutoModelForCTC,
    ),
    "gpt2": Kind(
        lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=E, n_head=H, n_layer=2, n_positions=40, vocab_size=V)),
        text,
        t.AutoModelForCausalLM,
    ),
    "gpt2, cross": Kind(gpt2_with_cross_attention, encoder_states, t.AutoModel, 3),
    "llama": language(t.LlamaForCausalLM, t.LlamaConfig, t.AutoModelForCausalLM, num_attention_heads=4,
                      num_key_value_heads=2),
    "gpt_neox": language(t.GPTNeoXForCausalLM, t.GPTNeoXConfig, t.AutoModelForCausalLM),
    "qwen3": language(t.Qwen3ForCausalLM, t.Qwen3Config, t.AutoModelForCausalLM, num_key_value_heads=1, head_dim=12),
}  # fmt: skip


def make(name: str, layers: int = 2) -> t.PreTrainedModel:
    """The model, with eager attention and without dropout, in evaluation mode; `layers` for those of `COMMON`."""
    torch.manual_seed(0)
    model = KINDS[name].model(**({} if layers == 2 else {"num_hidden_layers": layers}))
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    model.set_attn_implementation("eager")
    return model.eval()
