"""Networks for the importer tests: modules of transformers, and of papers that it does not have, written out here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

Factory = Callable[[], Any]
IMAGE, WORDS, SOUND = ["2x3x224x224"], ["2x64:int64"], ["2x16000"]


def hf(name: str, config: str = "", **changes: Any) -> Factory:
    """A module of transformers from its default configuration with changes."""
    made = config or f"{name.split('For')[0]}Config"
    return lambda: getattr(transformers, name)(getattr(transformers, made)(**changes))


class Residual(nn.Module):
    """Two convolutions behind group norms, with the time step added between (Ho et al., DDPM, 2020)."""

    def __init__(self, cin: int, cout: int, time: int = 256) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.time = nn.Linear(time, cout)
        self.norm2, self.conv2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x: Any, time: Any) -> Any:
        hidden = self.conv1(functional.silu(self.norm1(x)))
        hidden = hidden + self.time(functional.silu(time))[:, :, None, None]
        return self.skip(x) + self.conv2(functional.silu(self.norm2(hidden)))


class SpaceAttention(nn.Module):
    """One head over all pixels, as einsums."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm, self.qkv = nn.GroupNorm(32, channels), nn.Conv2d(channels, 3 * channels, 1)
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Any) -> Any:
        batch, channels, height, width = x.shape
        q, k, v = self.qkv(self.norm(x)).reshape(batch, 3 * channels, height * width).chunk(3, 1)
        weights = torch.softmax(torch.einsum("bcn,bcm->bnm", q, k) * channels**-0.5, -1)
        return x + self.out(torch.einsum("bnm,bcm->bcn", weights, v).reshape(batch, channels, height, width))


class Diffusion(nn.Module):
    """A small U-Net of DDPM."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, 256), nn.SiLU(), nn.Linear(256, 256))
        self.first, self.last = nn.Conv2d(3, width, 3, padding=1), nn.Conv2d(width, 3, 3, padding=1)
        self.down1, self.down2 = Residual(width, width), Residual(width, 2 * width)
        self.attention, self.middle = SpaceAttention(2 * width), Residual(2 * width, 2 * width)
        self.up2, self.up1 = Residual(4 * width, 2 * width), Residual(3 * width, width)

    def forward(self, x: Any, time: Any) -> Any:
        time = self.time(time)
        fine = self.down1(self.first(x), time)
        coarse = self.attention(self.down2(functional.avg_pool2d(fine, 2), time))
        x = functional.interpolate(self.middle(functional.avg_pool2d(coarse, 2), time), scale_factor=2)
        x = functional.interpolate(self.up2(torch.cat([x, coarse], 1), time), scale_factor=2)
        return self.last(self.up1(torch.cat([x, fine], 1), time))


class DitBlock(nn.Module):
    """A transformer block whose norms are modulated by the time step (Peebles and Xie, DiT, 2023)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out, self.modulate = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.Linear(width, 6 * width),
        )
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any, time: Any) -> Any:
        a, b, c, d, e, f = (one[:, None] for one in self.modulate(functional.silu(time)).chunk(6, 1))
        y = self.norm1(x) * (1 + b) + a
        q, k, v = self.qkv(y).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + c * self.out(mixed)
        return x + f * self.feed(self.norm2(x) * (1 + e) + d)


class Dit(nn.Module):
    """Patches, learned positions, blocks."""

    def __init__(self, width: int = 192, heads: int = 6, layers: int = 4) -> None:
        super().__init__()
        self.patches, self.position = nn.Conv2d(4, width, 2, 2), nn.Parameter(torch.zeros(1, 256, width))
        self.time, self.last = nn.Linear(256, width), nn.Linear(width, 32)
        self.blocks = nn.ModuleList(DitBlock(width, heads) for _ in range(layers))

    def forward(self, x: Any, time: Any) -> Any:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        time = self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return self.last(x)


class RecurrentLanguage(nn.Module):
    """Embedding, two recurrent layers time-first, vocabulary."""

    def __init__(self, cell: Any) -> None:
        super().__init__()
        self.table, self.layers = nn.Embedding(10000, 256), cell(256, 256, 2, dropout=0.5)
        self.head = nn.Linear(256, 10000)

    def forward(self, x: Any) -> Any:
        return self.head(self.layers(self.table(x).transpose(0, 1))[0])


class Speech(nn.Module):
    """Convolutions, then bidirectional vanilla recurrence (Amodei et al., Deep Speech 2, 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Sequential(nn.Conv2d(1, 32, (41, 11), (2, 2), (20, 5)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20))
        self.layers = nn.RNN(32 * 81, 256, 3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(512, 29)

    def forward(self, x: Any) -> Any:
        x = self.conv(x)
        return self.head(self.layers(x.permute(0, 3, 1, 2).flatten(2))[0])


class Translation(nn.Module):
    """nn.Transformer with its own attention module."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(1000, 128), nn.Transformer(128, 4, 2, 2, 512, batch_first=True)
        self.head = nn.Linear(128, 1000)

    def forward(self, source: Any, target: Any) -> Any:
        return self.head(self.body(self.table(source), self.table(target)))


class Recommendation(nn.Module):
    """Tables, a dense branch, pairwise products (Naumov et al., DLRM, 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000 * (i + 1), 64) for i in range(4))
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, 64), nn.ReLU())
        self.top = nn.Sequential(nn.Linear(74, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Any, index: Any) -> Any:
        x = self.bottom(dense)
        rows = torch.stack([x, *(table(index[:, i : i + 1]) for i, table in enumerate(self.tables))], 1)
        products = torch.bmm(rows, rows.transpose(1, 2))
        row, column = torch.tril_indices(5, 5, -1)
        return torch.sigmoid(self.top(torch.cat([x, products[:, row, column]], 1)))


#: Name -> factory and inputs. Depths are cut to keep the tests quick; widths are those of the published models.
ZOO: dict[str, tuple[Factory, list[str]]] = {
    "resnet": (hf("ResNetForImageClassification", num_labels=1000), IMAGE),
    "regnet": (hf("RegNetForImageClassification"), IMAGE),
    "convnext": (hf("ConvNextForImageClassification"), IMAGE),
    "convnextv2": (hf("ConvNextV2ForImageClassification"), IMAGE),
    "swin": (hf("SwinForImageClassification"), IMAGE),
    "swinv2": (hf("Swinv2ForImageClassification", image_size=256, window_size=8), ["2x3x256x256"]),
    "vit": (hf("ViTForImageClassification"), IMAGE),
    "deit": (hf("DeiTForImageClassification", num_hidden_layers=4), IMAGE),
    "beit": (hf("BeitForImageClassification", num_hidden_layers=4), IMAGE),
    "dinov2": (hf("Dinov2ForImageClassification", num_hidden_layers=4), IMAGE),
    "segformer": (hf("SegformerForSemanticSegmentation"), ["2x3x512x512"]),
    "pvt": (hf("PvtForImageClassification"), IMAGE),
    "poolformer": (hf("PoolFormerForImageClassification", "PoolFormerConfig"), IMAGE),
    "levit": (hf("LevitForImageClassification"), IMAGE),
    "mobilevit": (hf("MobileViTForImageClassification"), ["2x3x256x256"]),
    "mobilenet-v1": (hf("MobileNetV1ForImageClassification"), IMAGE),
    "mobilenet-v2": (hf("MobileNetV2ForImageClassification"), IMAGE),
    "efficientnet": (
        hf("EfficientNetForImageClassification", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280),
        IMAGE,
    ),
    "bit": (hf("BitForImageClassification"), IMAGE),
    "cvt": (hf("CvtForImageClassification"), IMAGE),
    "focalnet": (hf("FocalNetForImageClassification"), IMAGE),
    "hiera": (hf("HieraForImageClassification"), IMAGE),
    "yolos": (hf("YolosForObjectDetection", num_hidden_layers=4), ["2x3x512x864"]),
    "dpt": (hf("DPTForDepthEstimation"), ["2x3x384x384"]),
    "sam": (
        hf("SamVisionModel", "SamVisionConfig", num_hidden_layers=4, global_attn_indexes=[1, 3]),
        ["1x3x1024x1024"],
    ),
    "clip": (hf("CLIPModel", "CLIPConfig"), ["input_ids=2x77:int64", "pixel_values=2x3x224x224"]),
    "bert": (hf("BertForMaskedLM"), WORDS),
    "albert": (hf("AlbertForMaskedLM"), WORDS),
    "distilbert": (hf("DistilBertForMaskedLM"), WORDS),
    "electra": (hf("ElectraForPreTraining"), WORDS),
    "modernbert": (hf("ModernBertForMaskedLM", num_hidden_layers=4), WORDS),
    "mpnet": (hf("MPNetForMaskedLM", num_hidden_layers=4), WORDS),
    "gpt2": (hf("GPT2LMHeadModel", "GPT2Config"), WORDS),
    "opt": (hf("OPTForCausalLM"), WORDS),
    "bloom": (hf("BloomForCausalLM", hidden_size=512, n_layer=4), WORDS),
    "gpt-neox": (hf("GPTNeoXForCausalLM", num_hidden_layers=4), WORDS),
    "llama": (hf("LlamaForCausalLM", num_hidden_layers=4), WORDS),
    "gemma2": (hf("Gemma2ForCausalLM", num_hidden_layers=4), WORDS),
    "qwen3": (hf("Qwen3ForCausalLM", num_hidden_layers=4), WORDS),
    "phi": (hf("PhiForCausalLM", num_hidden_layers=4), WORDS),
    "phi3": (hf("Phi3ForCausalLM", num_hidden_layers=4), WORDS),
    "falcon": (hf("FalconForCausalLM", num_hidden_layers=4), WORDS),
    "t5": (hf("T5ForConditionalGeneration"), ["input_ids=2x64:int64", "decoder_input_ids=2x64:int64"]),
    "wav2vec2": (hf("Wav2Vec2ForCTC", num_hidden_layers=4), SOUND),
    "hubert": (hf("HubertForCTC", num_hidden_layers=4), SOUND),
    "wavlm": (hf("WavLMForCTC", num_hidden_layers=4), SOUND),
    "sew": (hf("SEWForCTC", num_hidden_layers=4), SOUND),
    "conformer": (hf("Wav2Vec2ConformerForCTC", vocab_size=32, num_hidden_layers=3), SOUND),
    "whisper": (hf("WhisperForConditionalGeneration"), ["input_features=2x80x3000", "decoder_input_ids=2x64:int64"]),
    "ast": (hf("ASTForAudioClassification", num_hidden_layers=4), ["2x1024x128"]),
    "ddpm": (Diffusion, ["2x3x64x64", "2x64"]),
    "dit": (Dit, ["2x4x32x32", "2x256"]),
    "lstm": (lambda: RecurrentLanguage(nn.LSTM), ["4x35:int64"]),
    "gru": (lambda: RecurrentLanguage(nn.GRU), ["4x35:int64"]),
    "deep-speech": (Speech, ["2x1x161x100"]),
    "transformer": (Translation, ["2x24:int64", "2x20:int64"]),
    "dlrm": (Recommendation, ["8x13", "8x4:int64"]),
}
