"""Tiny random models that see images and videos, written through transformers, and small ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from tiny_models import DELTA, make_tokenizer, randomize
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

START, PAD, END = 320, 321, 322  # of an image, and of each of its parts
VIDEO = 323  # of each part of a video
VOCABULARY = 331
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 48,
}
QWEN3 = {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MIXED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
KINDS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "Qwen3VL",
        {"head_dim": 12, "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2]}},
        QWEN3,
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {**MIXED, "head_dim": 12, "rope_parameters": {**ROPE, "mrope_section": [2, 2, 2]}},
        QWEN3,
    ),
    "qwen3_5": (
        "Qwen3_5",
        {
            **DELTA,
            "head_dim": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        },
        {"num_position_embeddings": 16},
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **DELTA,
            **MIXED,
            "shared_expert_intermediate_size": 40,
            "head_dim": 32,
            "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1]},
        },
        {"num_position_embeddings": 16},
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VL",
        {"rope_parameters": {**ROPE, "mrope_section": [1, 2, 3]}},
        {"window_size": 16, "fullatt_block_indexes": [1]},
    ),
}


def write_vision(
    path: str | Path | None,
    kind: str = "qwen3_vl",
    *,
    seed: int = 0,
    tokenizer: bool = False,
    **overrides: Any,
) -> Any:
    """Save a tiny model with its image processor into ``path``; the model, in eval mode.

    ``overrides``: of its text config.
    """
    stem, text, vision = KINDS[kind]
    config = getattr(transformers, f"{stem}Config")(
        text_config={**TEXT, **text, **overrides},
        vision_config={**VISION, **vision},
        image_token_id=PAD,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{stem}ForConditionalGeneration")(config).eval()
        randomize(model)
    if path is not None:
        model.save_pretrained(path)
        processor().save_pretrained(path)
        said = {name: list(getattr(processor(), name)) for name in ("image_mean", "image_std")}
        said |= {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
        said["size"] = {"shortest_edge": 64, "longest_edge": 8192 if "2_5" not in kind else 2048}
        (Path(path) / "video_preprocessor_config.json").write_text(json.dumps(said))
    if tokenizer and path is not None:
        fast = make_tokenizer(320)
        fast.add_tokens([f"<unused{n}>" for n in range(320 - len(fast))])
        fast.add_special_tokens(
            {
                "additional_special_tokens": [
                    *("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>")
                ]
            }
        )
        fast.chat_template = TEMPLATE
        assert fast.convert_tokens_to_ids(["<|image_pad|>", "<|video_pad|>"]) == [PAD, VIDEO]
        fast.save_pretrained(path)
    return model


def processor() -> Any:
    return Qwen2VLImageProcessorPil(
        patch_size=4,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 64, "longest_edge": 2048},
    )


def picture(seed: int, width: int = 21, height: int = 30) -> Image.Image:
    """Noise: no two are alike, and all of a picture matters."""
    values = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def frames(seed: int, count: int = 4, width: int = 24, height: int = 16) -> np.ndarray:
    """uint8 [count, height, width, 3] of noise; of these sizes no processor changes any."""
    shape = count, height, width, 3
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def patches(video: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """[patches, values] of a video and its grid, by transformers' processor of images.

    A patch has both frames of a time one after the other; of an image it has one twice.
    """
    whole = [*video, *video[-1:]] if len(video) % 2 else [*video]
    made = [processor()(images=[Image.fromarray(one)], return_tensors="pt") for one in whole]
    pixels = [one["pixel_values"].view(-1, 3, 2, 4, 4) for one in made]
    times = [
        torch.stack((first[:, :, 0], second[:, :, 1]), dim=2)
        for first, second in zip(pixels[::2], pixels[1::2], strict=True)
    ]
    _, rows, columns = made[0]["image_grid_thw"][0].tolist()
    return torch.cat(times).flatten(1), [len(times), rows, columns]


def reference(
    model: Any,
    ids: Sequence[int],
    pictures: Sequence[Image.Image],
    videos: Sequence[tuple[np.ndarray, float]] = (),
) -> torch.Tensor:
    """transformers' float32 logprobs [tokens, vocabulary] of expanded ``ids``; of a video its
    frames and how many there are in a second.
    """
    given = torch.tensor([list(ids)])
    kwargs: dict[str, Any] = {}
    if pictures:
        kwargs = dict(processor()(images=list(pictures), return_tensors="pt"))
    if videos:
        made = [patches(video) for video, _ in videos]
        kwargs["pixel_values_videos"] = torch.cat([pixels for pixels, _ in made])
        kwargs["video_grid_thw"] = torch.tensor([grid for _, grid in made])
        if model.config.model_type == "qwen2_5_vl":
            kwargs["second_per_grid_ts"] = torch.tensor([2 / fps for _, fps in videos])
    if kwargs:
        kinds = {1: PAD, 2: VIDEO} if videos else {1: PAD}  # a model may draw the other's id
        kwargs["mm_token_type_ids"] = sum(n * (given == token).int() for n, token in kinds.items())
    model.model.rope_deltas = None
    with torch.no_grad():
        logits = model(input_ids=given, use_cache=False, **kwargs).logits[0]
    return logits.float().log_softmax(-1)


def check_greedy(
    model: Any,
    output: Any,
    pictures: Sequence[Image.Image],
    videos: Sequence[tuple[np.ndarray, float]] = (),
) -> None:
    """Raise AssertionError unless transformers draws the same tokens, with the same logprobs."""
    for rows, done in check_logprobs(model, output, pictures, videos):
        assert rows.argmax(-1).tolist() == done.token_ids


def check_logprobs(
    model: Any,
    output: Any,
    pictures: Sequence[Image.Image],
    videos: Sequence[tuple[np.ndarray, float]] = (),
) -> list[tuple[torch.Tensor, Any]]:
    """The logprobs of each sample's tokens are transformers' own; those of the vocabulary."""
    prompt, found = output.prompt_token_ids, []
    for done in output.outputs:
        whole = [*prompt, *done.token_ids]
        rows = reference(model, whole, pictures, videos)[len(prompt) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs.raw), wanted, atol=1e-4, rtol=0)
        found.append((rows, done))
    return found
