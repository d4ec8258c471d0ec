import math
from functools import partial

import pytest
import timm
import torch
from timm.optim import param_groups_layer_decay
from torch import nn

from vlm.errors import UserError
from vlm.models.classifier import Classifier
from vlm.models.decoder import Decoder
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.models.timm_encoder import TimmEncoder
from vlm.models.vit import ViT
from vlm.nn.recurrent import AdditiveAttention
from vlm.training.step.optim import (
    Constant,
    Cosine,
    Optimization,
    layer_depths,
    parameter_groups,
    schedule_note,
)


@pytest.fixture(params=["vit", "timm"])
def model(request):
    encoder = TimmEncoder(name="resnet10t", dim=8, image_size=32) if request.param == "timm" else None
    encoder = encoder or ViT(image_size=8, patch_size=4, dim=8, depth=1, num_heads=2)
    text = Decoder(vocab_size=9, max_len=5, dim=8, depth=1, num_heads=2, context_dim=8)
    return VisionLanguageModel(encoder=encoder, decoder=text)


def names(model, params):
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return [known[id(parameter)] for parameter in params]


def test_every_parameter_is_in_one_group_and_only_matrices_decay(model):
    decayed, kept = parameter_groups(model, 0.1)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    placed = names(model, decayed["params"]) + names(model, kept["params"])
    assert sorted(placed) == sorted(name for name, _ in model.named_parameters())
    tables = ("token_embed.weight", "positions.weight")
    expected = {name for name, p in model.named_parameters() if p.ndim > 1 and not name.endswith(tables)}
    assert set(names(model, decayed["params"])) == expected


def test_frozen_parameters_are_in_no_group(model):
    model.encoder.requires_grad_(False)
    placed = [name for group in parameter_groups(model, 0.1) for name in names(model, group["params"])]
    assert sorted(placed) == sorted(f"decoder.{name}" for name, _ in model.decoder.named_parameters())


def test_the_layer_of_one_output_that_scores_for_soft_attention_is_no_matrix():
    search = AdditiveAttention(query_dim=6, context_dim=5, dim=4)
    matrices, others = parameter_groups(search, 0.1)
    assert set(names(search, matrices["params"])) == {"query.weight", "key.weight"}
    assert set(names(search, others["params"])) == {"query.bias", "score.weight"} and not others["matrices"]


def test_an_empty_group_is_left_out():
    (group,) = parameter_groups(nn.LayerNorm(4), 0.1)
    assert group["weight_decay"] == 0


def test_optimizer_decays_what_it_should():
    model = nn.Linear(4, 4)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimization = Optimization(optimizer=partial(torch.optim.AdamW, lr=0.5), schedule=Constant(), weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimization.create_optimizer(model).step()
    torch.testing.assert_close(model.weight, before["weight"] * (1 - 0.5 * 0.1))
    assert torch.equal(model.bias, before["bias"])


@pytest.mark.parametrize("warmup, total", [(10, 110), (10 / 110, 110)])
def test_cosine_at_known_points(warmup, total):
    schedule, half = Cosine(warmup=warmup, floor=0.1), math.sqrt(0.5)
    known = {0: 1 / 11, 9: 10 / 11, 10: 1.0, 60: 0.55, 110: 0.1, 500: 0.1}
    known |= {35: 0.1 + 0.9 * (1 + half) / 2, 85: 0.1 + 0.9 * (1 - half) / 2}  # one and three quarters down
    assert [schedule.factor(step, total) for step in known] == pytest.approx(list(known.values()))


@pytest.mark.parametrize("total", [1, 2, 7, 100])
@pytest.mark.parametrize("schedule", [Cosine(), Cosine(warmup=5), Cosine(warmup=0), Constant(warmup=0.3), Constant()])
def test_rates_rise_and_then_never_rise_again(schedule, total):
    rates = [schedule.factor(step, total) for step in range(total)]
    assert all(0 < rate <= 1 for rate in rates)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_constant():
    assert [Constant(warmup=3).factor(step, 100) for step in (0, 1, 2, 3, 50, 99)] == [0.25, 0.5, 0.75, 1, 1, 1]
    assert [Constant().factor(step, 100) for step in (0, 99)] == [1, 1]


def test_layers_are_counted_from_the_top_of_their_stack():
    encoder = ViT(image_size=8, patch_size=4, dim=8, depth=3, num_heads=2, class_token=True)
    text = Decoder(vocab_size=9, max_len=5, dim=8, depth=2, num_heads=2, context_dim=8)
    depths = layer_depths(VisionLanguageModel(encoder=encoder, decoder=text))
    for stack, blocks in (("encoder", 3), ("decoder", 2)):
        for name, depth in depths.items():
            if name.startswith(f"{stack}.blocks."):
                assert depth == blocks - int(name.split(".")[2])
            elif name.startswith(f"{stack}.norm"):
                assert depth == 0
            elif name.startswith(stack):
                assert depth == blocks + 1, name  # embeddings, positions and patches stand below the first block


QUICK = ["test_vit", "vit_wee_patch16_reg1_gap_256", "resnet18"]
LARGE = [
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "eva02_tiny_patch14_224",
    "resnet50d",
    "regnetx_002",
]
LARGE += ["regnety_002", "convnext_atto", "swin_tiny_patch4_window7_224", "efficientnet_b0", "mobilenetv3_small_050"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in LARGE)])
def test_layers_of_a_backbone_are_those_of_timms_own_layer_decay(name):
    theirs = timm.create_model(name, num_classes=3)
    scales = {}
    for group in param_groups_layer_decay(theirs, layer_decay=0.5):
        scales |= {id(parameter): group["lr_scale"] for parameter in group["params"]}
    expected = {key: scales[id(parameter)] for key, parameter in theirs.named_parameters() if id(parameter) in scales}
    encoder = TimmEncoder(name=name, dim=8, image_size=theirs.pretrained_cfg["input_size"][-1])
    depths = encoder.layer_depths()
    own = {key.removeprefix("backbone."): 0.5**depth for key, depth in depths.items() if key.startswith("backbone.")}
    shared = own.keys() & expected.keys()
    assert len(shared) > 0.9 * len(own)
    assert {key: own[key] for key in shared} == {key: expected[key] for key in shared}
    assert layer_depths(encoder) == depths


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_wee_patch16_reg1_gap_256", "deit_tiny_distilled_patch16_224"])
def test_tokens_and_positions_of_a_backbone_stand_beside_its_stem(name):
    encoder = TimmEncoder(name=name, dim=8, image_size=224)
    depths = layer_depths(Classifier(encoder=encoder, num_classes=3))
    assert depths["head.weight"] == depths["encoder.proj.weight"] == 0
    tokens = {"cls_token", "reg_token", "dist_token", "pos_embed"} & dict(encoder.backbone.named_parameters()).keys()
    assert len(tokens) > 1
    for token in tokens:
        assert depths[f"encoder.backbone.{token}"] == max(depths.values()) == 1 + len(encoder.backbone.blocks)


def test_a_token_that_timms_grouping_forgets_stands_beside_the_stem(monkeypatch):
    encoder = TimmEncoder(name="test_vit", dim=8, image_size=32)
    encoder.backbone.new_token = nn.Parameter(torch.zeros(1))
    depths = encoder.layer_depths()
    assert depths["backbone.new_token"] == depths["backbone.patch_embed.proj.weight"] == max(depths.values())


def test_lower_layers_learn_more_slowly(model):
    groups = parameter_groups(model, 0.1, 0.5)
    optimization = Optimization(optimizer=torch.optim.AdamW, schedule=Constant(), weight_decay=0.1, layer_decay=0.5)
    optimizer = optimization.create_optimizer(model)
    rates = [factor(10) for factor in optimization.factors(optimizer, 100)]
    assert rates == [group["scale"] for group in groups]
    depths = layer_depths(model)
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        assert {0.5 ** depths[known[id(p)]] for p in group["params"]} == {group["scale"]}


def test_a_module_with_a_factor_learns_as_with_an_optimizer_of_its_own():
    """The factor of the module within another holds there alone, and the factors of layers stay."""

    def create():
        torch.manual_seed(0)
        encoder = ViT(image_size=8, patch_size=4, dim=8, depth=2, num_heads=2)
        return Classifier(encoder=encoder, num_classes=3)

    model, reference = create(), create()
    factors = {"encoder": 0.5, "encoder.blocks.1.attn": 0.1}
    optimization = Optimization(
        optimizer=partial(torch.optim.AdamW, lr=0.01),
        schedule=Constant(),
        weight_decay=0.0,
        layer_decay=0.8,
        lr_factors=factors,
    )
    optimizer, depths = optimization.create_optimizer(model), layer_depths(reference)
    for group, factor in zip(optimizer.param_groups, optimization.factors(optimizer, 100), strict=True):
        group["lr"] *= factor(10)
    images, others = torch.randn(2, 3, 8, 8), []
    for name, parameter in reference.named_parameters():
        factor = 1.0 if name.startswith("head") else 0.1 if "blocks.1.attn" in name else 0.5
        others.append(torch.optim.AdamW([parameter], lr=0.01 * factor * 0.8 ** depths[name], weight_decay=0.0))
    for _ in range(3):
        for net in (model, reference):
            net.zero_grad()
            net(images).square().sum().backward()
        for each in (optimizer, *others):
            each.step()
    for (name, one), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, msg=name)


def test_a_factor_of_a_module_that_is_not_trained_is_refused(model):
    model.encoder.requires_grad_(False)
    optimization = Optimization(torch.optim.AdamW, Constant(), weight_decay=0.1, lr_factors={"encoder": 0.1})
    with pytest.raises(UserError, match=r"^lr_factors: encoder is not trained; remove it$"):
        optimization.create_optimizer(model)


def test_the_line_on_a_changed_schedule_is_for_runs_with_steps_left():
    """A cosine over 12 steps ends at 0; over 18, step 12 is back up; a run without steps left says nothing."""
    optimization = Optimization(optimizer=torch.optim.AdamW, schedule=Cosine(warmup=0), weight_decay=0.1)
    note = partial(schedule_note, optimization, optimization, step=12, highest=1.0, option="schedule_steps")
    assert "because the schedule now has 18 steps instead of 12; schedule_steps=12 keeps it" in note(totals=(12, 18))
    assert note(totals=(12, 12)) == ""
