"""Tiny networks of transformers, by name: their classes, the options of their configurations, and a batch for each."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, NamedTuple

import torch

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
IMAGE = {**SMALL, "image_size": 16, "patch_size": 4}
TEXT = {**SMALL, "vocab_size": 40, "max_position_embeddings": 40, "pad_token_id": 1}
SPECIAL = {"bos_token_id": 0, "eos_token_id": 2}
SOUND = {
    **SMALL,
    "conv_dim": [16, 16],
    "conv_stride": [2, 2],
    "conv_kernel": [3, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "apply_spec_augment": False,
}
QWEN = {"depth": 2, "num_heads": 2, "patch_size": 4, "hidden_size": 32}
QWEN2_5 = {"intermediate_size": 48, "out_hidden_size": 32, "fullatt_block_indexes": [1], "window_size": 16}
QWEN3 = {
    "intermediate_size": 48,
    "out_hidden_size": 32,
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
TOKENS = torch.tensor([[3, 4, 5, 6, 7], [5, 6, 7, 1, 1]])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def images() -> dict[str, torch.Tensor]:
    return {"pixel_values": drawn(2, 3, 16, 16)}


def videos() -> dict[str, torch.Tensor]:
    return {"pixel_values": drawn(2, 4, 3, 16, 16)}


def tokens() -> dict[str, torch.Tensor]:
    return {"input_ids": TOKENS, "attention_mask": (TOKENS != 1).long()}


def waves() -> dict[str, torch.Tensor]:
    return {"input_values": drawn(2, 64)}


def packed_images() -> dict[str, torch.Tensor]:
    """Two images of 4 × 4 and 4 × 6 patches."""
    return {"hidden_states": drawn(40, 96), "grid_thw": torch.tensor([[1, 4, 4], [1, 4, 6]])}


def padded_images() -> dict[str, torch.Tensor]:
    """Two images of 4 × 4 and 3 × 4 patches."""
    mask = torch.tensor([[1] * 16, [1] * 12 + [0] * 4])
    return {
        "pixel_values": drawn(2, 16, 48),
        "pixel_attention_mask": mask,
        "spatial_shapes": torch.tensor([[4, 4], [3, 4]]),
    }


def placed_images() -> dict[str, torch.Tensor]:
    """Two images of 4 × 4 and 2 × 4 patches with their places."""
    places = [[(x, y) for y in range(rows) for x in range(4)] + [(-1, -1)] * (16 - 4 * rows) for rows in (4, 2)]
    return {"pixel_values": drawn(2, 16, 48).sigmoid(), "pixel_position_ids": torch.tensor(places)}


class Tiny(NamedTuple):
    """A network: where transformers has its class, its configuration's class and options, and what it reads."""

    module: str
    model: str
    config: str
    options: Mapping[str, Any]
    inputs: Callable[[], dict[str, torch.Tensor]]

    def configuration(self, **options: Any) -> Any:
        """The configuration without any dropout."""
        module = import_module(f"transformers.models.{self.module}.configuration_{self.module}")
        config = getattr(module, self.config)(**{**self.options, **options})
        for name, value in vars(config).items():
            if ("drop" in name or name == "mask_ratio") and isinstance(value, float):
                setattr(config, name, 0.0)
        return config

    def build(self, implementation: str, **options: Any) -> Any:
        torch.manual_seed(0)
        module = import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        config = self.configuration(**options)
        config._attn_implementation = implementation
        return getattr(module, self.model)(config).eval()

    def read(self, model: Any, **inputs: Any) -> torch.Tensor:
        torch.manual_seed(0)  # ViTMAE shuffles its patches
        return model(**{**self.inputs(), **inputs}).last_hidden_state


def of_images(module: str, name: str, **options: Any) -> Tiny:
    return Tiny(module, f"{name}Model", f"{name}Config", {**IMAGE, **options}, images)


def of_qwen(module: str, model: str, name: str, **options: Any) -> Tiny:
    return Tiny(module, model, f"{name}VisionConfig", {**QWEN, **options}, packed_images)


def of_text(module: str, name: str, **options: Any) -> Tiny:
    return Tiny(module, f"{name}Model", f"{name}Config", {**TEXT, **options}, tokens)


VIDEO = {"num_frames": 4, "tubelet_size": 2}
PREDICTOR = {"pred_hidden_size": 32, "pred_num_hidden_layers": 1, "pred_num_attention_heads": 2}
VJEPA2 = {**SMALL, **PREDICTOR, "crop_size": 16, "patch_size": 4, "frames_per_clip": 4, "tubelet_size": 2}
AST = {**SMALL, "patch_size": 4, "max_length": 16, "num_mel_bins": 16, "frequency_stride": 4, "time_stride": 4}
WHISPER = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 10,
}
GEMMA4 = {
    **SMALL,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}
IMAGES = {
    "ViT": of_images("vit", "ViT"),
    "DeiT": of_images("deit", "DeiT"),
    "DINOv2": of_images("dinov2", "Dinov2"),
    "DINOv2 with registers": of_images("dinov2_with_registers", "Dinov2WithRegisters"),
    "DINOv3": of_images("dinov3_vit", "DINOv3ViT"),
    "SigLIP": of_images("siglip", "SiglipVision"),
    "SigLIP 2": of_images("siglip2", "Siglip2Vision", num_patches=16)._replace(inputs=padded_images),
    "CLIP": of_images("clip", "CLIPVision"),
    "MetaCLIP 2": of_images("metaclip_2", "MetaClip2Vision"),
    "BLIP-2": of_images("blip_2", "Blip2Vision"),
    "BEiT": of_images("beit", "Beit"),
    "ViTMAE": of_images("vit_mae", "ViTMAE"),
    "ViTMSN": of_images("vit_msn", "ViTMSN"),
    "I-JEPA": of_images("ijepa", "IJepa"),
    "DPT": of_images("dpt", "DPT"),
    "YOLOS": of_images("yolos", "Yolos", image_size=[16, 16], num_detection_tokens=3),
    "AIMv2": of_images("aimv2", "Aimv2Vision"),
    "InternVL": of_images("internvl", "InternVLVision", image_size=[16, 16], patch_size=[4, 4]),
    "Idefics3": of_images("idefics3", "Idefics3Vision")._replace(model="Idefics3VisionTransformer"),
    "Qwen2-VL": of_qwen("qwen2_vl", "Qwen2VisionTransformerPretrainedModel", "Qwen2VL", embed_dim=32),
    "Qwen2.5-VL": of_qwen("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", "Qwen2_5_VL", **QWEN2_5),
    "Qwen3-VL": of_qwen("qwen3_vl", "Qwen3VLVisionModel", "Qwen3VL", **QWEN3),
    "Gemma 4": Tiny("gemma4", "Gemma4VisionModel", "Gemma4VisionConfig", GEMMA4, placed_images),
}
OTHERS = {
    "VideoMAE": Tiny("videomae", "VideoMAEModel", "VideoMAEConfig", {**IMAGE, **VIDEO}, videos),
    "ViViT": Tiny(
        "vivit", "VivitModel", "VivitConfig", {**SMALL, **VIDEO, "image_size": 16, "tubelet_size": [2, 4, 4]}, videos
    ),
    "V-JEPA 2": Tiny(
        "vjepa2", "VJEPA2Model", "VJEPA2Config", VJEPA2, lambda: {"pixel_values_videos": videos()["pixel_values"]}
    ),
    "AST": Tiny(
        "audio_spectrogram_transformer", "ASTModel", "ASTConfig", AST, lambda: {"input_values": drawn(2, 16, 16)}
    ),
    "Whisper": Tiny("whisper", "WhisperEncoder", "WhisperConfig", WHISPER, lambda: {"input_features": drawn(2, 8, 20)}),
    "wav2vec 2.0": Tiny("wav2vec2", "Wav2Vec2Model", "Wav2Vec2Config", SOUND, waves),
    "HuBERT": Tiny("hubert", "HubertModel", "HubertConfig", SOUND, waves),
}
TEXTS = {
    "BERT": of_text("bert", "Bert"),
    "RoBERTa": of_text("roberta", "Roberta"),
    "XLM-R": of_text("xlm_roberta", "XLMRoberta"),
    "DistilBERT": of_text("distilbert", "DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=48),
    "ALBERT": of_text("albert", "Albert", embedding_size=16, **SPECIAL),
    "ELECTRA": of_text("electra", "Electra", embedding_size=16),
    "NomicBERT": of_text("nomic_bert", "NomicBert"),
    "EuroBERT": of_text("eurobert", "EuroBert", mask_token_id=3, **SPECIAL),
    "ESM": of_text("esm", "Esm", mask_token_id=39),
    "SigLIP text": Tiny("siglip", "SiglipTextModel", "SiglipTextConfig", {**TEXT, **SPECIAL}, tokens),
}
ARCHITECTURES = {**IMAGES, **OTHERS, **TEXTS}
LAYERS = {"V-JEPA 2": 3, "ALBERT": 1}
"""Attention layers of a network that has not 2."""
