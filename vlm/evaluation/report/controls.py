"""Controls: scores of methods that use little of the input, which a model should beat."""

from collections.abc import Mapping, Sequence

from vlm.evaluation.report.sections import Finding

# Controls that count in the training split.
COUNTED = {
    "constant": "best constant",
    "bag": "bag of words",
    "frequent": "most frequent tag of each word",
    "dictionary": "word for word",
    "overlap": "part beside most words of the question",
    "question": "most frequent answer to the question",
}
CEILING = {"ceiling": "ceiling"}  # no control: a model at it has nothing left to learn
CONTROLS = {"chance": "by chance", **COUNTED, "shuffled": "shuffled", "blank": "blank image"}
REMEDIES = (
    "train longer (trainer.max_epochs): of few samples, an epoch has few steps",
    "smaller batches (data.batch_size, data.batch_tokens), or another optim.lr",
    "a pretrained model (model=pretrained), or more data",
)


def below_controls(results: Mapping[str, float], names: Sequence[str]) -> list[Finding]:
    """Returns a finding for each score that a control in COUNTED reaches too.

    Args:
        results: Scores as split/metric, with controls as split/metric@control.
        names: The metrics to compare, for which higher is better.
    """
    found = []
    for key, value in results.items():
        counted = {name: results[f"{key}@{name}"] for name in COUNTED if f"{key}@{name}" in results}
        metric = key.partition("/")[2]
        if metric in names and counted and max(counted.values()) >= value:
            best = max(counted, key=lambda name: counted[name])
            fault = f"the model is no better than {best} ({COUNTED[best]}): its {metric.replace('_', ' ')} is"
            found.append(Finding(f"{fault} {value:.3g}, of {best} {counted[best]:.3g}", REMEDIES))
    return found
