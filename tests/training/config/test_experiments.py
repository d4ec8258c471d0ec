"""An experiment's settings for one option of a group do not break the choice of another."""

from argparse import Namespace

import pytest

from vlm.config.compose import compose
from vlm.errors import UserError
from vlm.training.config.check import check

TIMM = ["model/encoder=timm", "model.encoder.name=resnet18"]


@pytest.mark.sample(slow=2)
@pytest.mark.parametrize("name", ["captioning_flickr8k", "captioning_flickr8k_gpu", "captioning_flickr8k_languages"])
def test_another_encoder_may_be_chosen_for_an_experiment(name):
    config = compose([f"experiment={name}", "data.root=photos", *TIMM], check)
    plain = compose(["data=flickr8k", "data.root=photos", *TIMM], check)
    assert config["model"]["encoder"].keys() == plain["model"]["encoder"].keys()


def test_parts_that_the_other_option_lacks_leave_too():
    config = compose(["experiment=cifar10_cpu", "data.path=a.tar", "model/encoder=vit"], check)
    assert config["model"]["encoder"]["patch_size"] == 4 and "stem" not in config["model"]["encoder"]


@pytest.mark.slow
def test_settings_that_both_know_stay_and_so_do_all_of_the_own_option():
    own = compose(["experiment=captioning_flickr8k"], check)["model"]["encoder"]
    named = compose(["experiment=captioning_flickr8k", "model/encoder=vit_pool"], check)["model"]["encoder"]
    other = compose(["experiment=captioning_flickr8k", "model/encoder=vit"], check)["model"]["encoder"]
    assert named == own and (other["mlp_ratio"], other["drop_path"]) == (2.0, 0.1)


@pytest.mark.slow
def test_what_is_typed_for_the_other_encoder_is_still_checked():
    with pytest.raises(UserError, match=r"model\.encoder\.mlp_ratio: unknown"):
        compose(["experiment=captioning_flickr8k", *TIMM, "model.encoder.mlp_ratio=3"], check)


@pytest.mark.slow
def test_an_option_of_a_folder_of_ones_own_may_be_chosen(tmp_path):
    (tmp_path / "model" / "encoder").mkdir(parents=True)
    file = tmp_path / "model" / "encoder" / "mine.yaml"
    file.write_text("defaults: [timm]\nname: resnet18\n")
    options = Namespace(config_path=None, config_name=None, config_dir=str(tmp_path))
    config = compose(["experiment=captioning_flickr8k", "model/encoder=mine"], check, options)
    assert config["model"]["encoder"]["name"] == "resnet18" and "mlp_ratio" not in config["model"]["encoder"]
