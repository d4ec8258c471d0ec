"""Numbers of samples and captions are bounded by their annotations, which the check of a config reads."""

import pytest

from vlm.config.build import check
from vlm.errors import UserError

COUNTS = {
    "sources.captions.Captions": ["captions_per_image"],
    "sources.captions.Flickr8k": ["captions_per_image"],
    "sources.captions.Coco": ["captions_per_image"],
    "sources.questions.QuestionTable": ["questions_per_image"],
    "sources.questions.EasyVQA": ["questions_per_image"],
    "sources.shards.Shards": ["captions_per_image"],
    "shapes.scene_captions.Shapes": ["captions_per_image", "train_scenes", "val_scenes", "test_scenes", "image_size"],
    "shapes.scene_labels.ShapeClasses": ["train_scenes", "val_scenes", "test_scenes", "image_size"],
    "shapes.scene_questions.SceneQuestions": ["questions_per_kind", "train_scenes"],
    "shapes.scene_translations.SceneSpelling": ["train_scenes", "max_objects"],
    "shapes.scene_stories.SceneSummaries": ["train_scenes", "max_objects"],
    "shapes.scene_translations.SceneTranslations": ["train_scenes", "max_objects"],
    "shapes.scene_labels.ScenePairs": ["train_pairs", "val_pairs", "test_pairs"],
    "shapes.scene_stories.SceneStories": ["train_stories", "val_stories", "test_stories"],
    "shapes.scene_labels.SceneRoles": ["train_captions", "val_captions", "test_captions", "max_objects"],
    "shapes.scene_labels.SceneWords": ["train_captions", "val_captions", "test_captions", "max_objects"],
    "shapes.scene_captions.SceneText": ["scenes", "train_documents", "val_documents", "test_documents"],
}


@pytest.mark.parametrize("target", COUNTS)
def test_none_is_out_of_range(target):
    counts = dict.fromkeys(COUNTS[target], 0)
    with pytest.raises(UserError) as refusal:
        check({"data": {"source": {"_target_": f"vlm.data.{target}", **counts}}})
    for name in counts:
        (line,) = (line for line in str(refusal.value).splitlines() if line.startswith(f"data.source.{name}: "))
        assert line.startswith(f"data.source.{name}: 0 is out of range, expected int") and "at least 1" in line
