"""Detectors of transformers, whose labels are a list with one dict for each picture."""

import copy
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gpipe import Arguments, GPipe
from microbatch import Entries

from ..own_forward import Case, expect_close, expect_gradients, expect_outputs, freeze_statistics
from .families import transformers
from .table import set_dropout

pytest.importorskip("scipy", reason="scipy is not installed; see nox -s frameworks")
pytestmark = pytest.mark.filterwarnings("ignore")
BACKBONE = transformers.ResNetConfig(
    embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage1", "stage2"]
)
SIZES: dict[str, Any] = {
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "d_model": 16,
    "num_queries": 5,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_labels": 3,
}
MODELS = {
    "DETR": lambda: transformers.DetrForObjectDetection(transformers.DetrConfig(**SIZES, backbone_config=BACKBONE)),
    "Conditional DETR": lambda: transformers.ConditionalDetrForObjectDetection(
        transformers.ConditionalDetrConfig(**SIZES, backbone_config=BACKBONE)
    ),
    "Deformable DETR": lambda: transformers.DeformableDetrForObjectDetection(
        transformers.DeformableDetrConfig(**{**SIZES, "d_model": 32}, backbone_config=BACKBONE, num_feature_levels=2)
    ),
    "YOLOS": lambda: transformers.YolosForObjectDetection(
        transformers.YolosConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=[64, 64],
            num_detection_tokens=5,
            num_labels=3,
        )
    ),
}


def labels(counts: list[int]) -> list[dict[str, Tensor]]:
    return [{"class_labels": torch.arange(count) % 3, "boxes": torch.rand(count, 4) / 2 + 0.1} for count in counts]


def ready(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS[name]().train()
    set_dropout(model, 0.0)
    freeze_statistics(model)
    return model


@pytest.mark.parametrize("counts", [[1, 0, 3, 2, 1, 4], [2, 2, 2, 2, 2]])
@pytest.mark.parametrize("name", MODELS)
def test_a_detector_computes_what_the_plain_model_does(name: str, counts: list[int]) -> None:
    model = ready(name)
    plain = copy.deepcopy(model)
    batch = {"pixel_values": torch.randn(len(counts), 3, 64, 64), "labels": labels(counts)}
    expected = plain(**copy.deepcopy(batch))
    expected.loss.backward()
    with closing(GPipe(model, devices=["cpu"] * 3, chunks=3)) as pipe:
        for _ in range(2):
            pipe.zero_grad()
            expect_close(pipe.step(**batch), expected.loss, 1e-4, "loss")
            expect_gradients(Case(model, Arguments((), batch), bound=1e-4), plain)
        expect_close(pipe.evaluate(**batch), expected.loss, 1e-4, "loss")
        expect_outputs(pipe(**batch), expected, 1e-4)


def test_ambiguous_list_of_boxes_needs_entries() -> None:
    model = ready("YOLOS")
    batch = {"pixel_values": torch.randn(2, 3, 64, 64), "labels": labels([2, 2])}
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2)) as pipe:
        with pytest.raises(ValueError, match=r"the keyword 'labels' is a list of 2.*Entries"):
            pipe.step(**batch)
        whole = pipe.step(**{**batch, "labels": Entries(batch["labels"])})
    with closing(GPipe(model, devices=["cpu"] * 2, chunks=2, in_spec={"labels": Entries()})) as pipe:
        torch.testing.assert_close(pipe.step(**batch), whole)
