"""Removes an experiment's settings of a group's option if the command line chooses another option."""

from collections.abc import Sequence
from typing import Any

import hydra
from omegaconf import DictConfig, OmegaConf, open_dict

from vlm.config.signatures import arguments_of

WHOLE = ("experiment", "task", "debug", "hydra")  # groups whose options set keys of the whole config


def drop_leftovers(tree: DictConfig, name: str, chosen: Sequence[str], search: Sequence[str]) -> None:
    """Drops the keys that a chosen option does not know, so that an experiment can be tried with another encoder.

    Keys that both options know stay. Hydra must be initialised.

    Args:
        tree: The config with an entry `hydra`.
        name: Name of the file that the config is composed from.
        chosen: The overrides that choose options.
        search: Overrides that name folders of configs.
    """
    choices = dict(tree.hydra.runtime.choices)
    if not choices.pop("experiment", None):
        return
    same = [f"{group}={option}" for group, option in choices.items() if option and not group.startswith("hydra/")]
    plain = None
    for text in chosen:
        group, _, option = text.lstrip("+~").partition("=")
        key = group.replace("/", ".")
        node = None if group.split("/")[0] in WHOLE or "." in group or "[" in option else OmegaConf.select(tree, key)
        if option and isinstance(node, DictConfig) and "_target_" in node:
            plain = hydra.compose(name, [*search, *same]) if plain is None else plain
            _drop(node, OmegaConf.select(plain, key) or {})


def _drop(node: DictConfig, own: Any) -> None:
    """Drops keys unknown to both the config without an experiment and the node's class, and groups without a class."""
    known = arguments_of(OmegaConf.to_container(node, resolve=False))
    with open_dict(node):
        for name in [name for name in node if name not in own]:
            value = node._get_node(name)
            if name not in known or (isinstance(value, DictConfig) and "_target_" not in value):
                del node[name]
