"""Training on rewards by policy gradients: texts are sampled, and made likelier the better they score.

Every step samples anew and makes one update on its samples. The ratio of the new and the old probabilities is then 1,
so that clipping it, as PPO and GRPO do in further updates on the same samples, would have no effect.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, NotRequired, Protocol, Unpack

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vlm.data.batch import Batch, TextRows
from vlm.decoding.options import Decoding
from vlm.decoding.sampling import Sampling
from vlm.errors import Count, Range, UserError
from vlm.evaluation.metrics.ngrams import Floats
from vlm.models.context import Features
from vlm.models.encoder_decoder import VisionLanguageModel
from vlm.nn.vocabulary_loss import Head
from vlm.randomness import key
from vlm.tasks.preferences.reference import ReferenceModel, Start
from vlm.tasks.shared.rewards import (
    LIKELIHOOD,
    TEXT_REWARDS,
    FunctionReward,
    Reward,
    SampledTexts,
    TextReward,
    WeightedReward,
    list_targets,
    read_weights,
    try_functions,
)
from vlm.tasks.shared.rollouts import Prompts, Sampled, build_rows, number_texts, read_prompts, sample_texts
from vlm.tasks.shared.text_tasks import ImageTextTask
from vlm.training.image_cache import as_read
from vlm.training.step.fsdp import ShardedStrategy
from vlm.training.step.losses import Term
from vlm.training.step.task import TaskOptions
from vlm.untrusted.sizes import JsonValue

EPSILON = 1e-4  # added to a standard deviation, as TRL does


class Baseline(Protocol):
    """What the rewards of a prompt's texts are compared with.

    Attributes:
        reads_greedy: Whether it needs the reward of the greedy text.
        penalizes: Whether the divergence from the reference model is subtracted from rewards, rather than added to the
            loss.
    """

    reads_greedy: bool
    penalizes: bool

    def compute_advantages(self, rewards: Tensor, greedy: Tensor | None) -> Tensor:
        """Returns the advantages of sampled texts.

        Shapes:
            rewards (P, K), greedy (P,), of the greedy text of each prompt -> (P, K)
        """


class LeaveOneOut:
    """The mean of the prompt's other texts (RLOO, Ahmadian et al. 2024; Luo 2020): advantages of a prompt sum to 0."""

    reads_greedy, penalizes = False, True

    def compute_advantages(self, rewards: Tensor, greedy: Tensor | None) -> Tensor:
        count = rewards.shape[1]
        return (count * rewards - rewards.sum(1, keepdim=True)) / (count - 1)


class GroupMean:
    """The mean of the prompt's texts; advantages are divided by their standard deviation (GRPO, Shao et al. 2024)."""

    reads_greedy, penalizes = False, False

    def compute_advantages(self, rewards: Tensor, greedy: Tensor | None) -> Tensor:
        return (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + EPSILON)


class Greedy:
    """The reward of the greedy text (self-critical training, Rennie et al. 2017)."""

    reads_greedy, penalizes = True, False

    def compute_advantages(self, rewards: Tensor, greedy: Tensor | None) -> Tensor:
        assert greedy is not None
        return rewards - greedy[:, None]


BASELINES: dict[str, Baseline] = {"leave_one_out": LeaveOneOut(), "group": GroupMean(), "greedy": Greedy()}


def divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Estimates the KL divergence from the reference model at each sampled token, without bias and never below 0.

    It is Schulman's estimator (2020), the term of GRPO's equation 4: r - log r - 1 for the ratio r of the reference's
    probability to the model's. It is multiplied by the model's probability divided by itself without a gradient, so
    that the expected gradient is that of the divergence too (DeepSeek-V3.2 2025, and TRL's default).

    Shapes:
        (T,), (T,) -> (T,)
    """
    ratios = reference - logprobs
    return (ratios.exp() - ratios - 1) * (logprobs - logprobs.detach()).exp()


def policy_loss(losses: Tensor, numbers: Tensor, advantages: Tensor) -> Tensor:
    """Returns the sum of the sampled tokens' cross-entropies, weighted by their text's advantage.

    Its gradient is that of the expected reward, with the sign of a loss (Williams 1992).

    Args:
        numbers: Index of each token's text.
    Shapes:
        losses (T,), numbers (T,), advantages (N,) -> ()
    """
    return (losses * advantages[numbers]).sum()


def sampled_losses(hidden: Tensor, rows: TextRows, head: Head) -> Tensor:
    """Returns the cross-entropy of each sampled token in nats: hidden (B, L, D) -> (T,)."""
    picked, labels = head.apply_transform(rows.targets.pick(hidden)), rows.targets.labels
    return F.cross_entropy(F.linear(picked, head.weight, head.bias).float(), labels, reduction="none")


class RewardOptions(TaskOptions):
    """Arguments of every task that can be trained on rewards; `RewardedTextTask` describes them."""

    reward: NotRequired[str | dict[str, float] | None]
    reward_samples: NotRequired[Annotated[int, Range(2)]]
    reward_baseline: NotRequired[Literal["leave_one_out", "group", "greedy"]]
    reward_kl: NotRequired[Annotated[float, Range(0)]]
    reference: NotRequired[str | None]


class RewardedTextTask(ImageTextTask):
    """Trains by next-token prediction of text given an image, or on rewards of sampled texts.

    Args:
        reward: Metric to maximise in training, weights of several, or PACKAGE.FUNCTION of a trusted package; None for
            next-token prediction.
        reward_samples: Number of texts that are sampled for each prompt.
        reward_baseline: What their rewards are compared with: the mean of the prompt's others (leave_one_out), its mean
            and standard deviation (group), or the reward of its greedy text.
        reward_kl: Factor of the divergence from the reference model; 0 for none.
        reference: Checkpoint or folder of the reference model; None for the weights from which training starts.
        others: As in ImageTextTask.
    Raises:
        UserError: A reward is unknown, or an option has no effect.
    """

    reward_names: Sequence[str] = TEXT_REWARDS  # rewards of ours

    def __init__(
        self,
        *,
        model: VisionLanguageModel,
        max_tokens: Count,
        reward: str | dict[str, float] | None = None,
        reward_samples: Annotated[int, Range(2)] = 5,
        reward_baseline: Literal["leave_one_out", "group", "greedy"] = "leave_one_out",
        reward_kl: Annotated[float, Range(0)] = 0.0,
        reference: str | None = None,
        **options: Unpack[TaskOptions],
    ) -> None:
        super().__init__(model=model, max_tokens=max_tokens, **options)
        used = {"reward_baseline": reward_baseline != "leave_one_out", "reward_kl": reward_kl, "reference": reference}
        for name in (name for name, value in used.items() if value and reward is None):
            raise UserError(f"task.{name}: has no effect without task.reward; set that, or leave it out")
        if reference is not None and not reward_kl:
            raise UserError("task.reference: has no effect with task.reward_kl=0; set that, or leave it out")
        self.critic: PolicyGradient | None = None
        if reward is not None:
            weights = read_weights(reward, self.reward_names)
            reference_model = ReferenceModel(model, reference, lambda: self.tokenizer) if reward_kl else None
            self.critic = PolicyGradient(
                self, weights, reward_samples, BASELINES[reward_baseline], reward_kl, reference_model
            )

    def prompt_tokens(self, reference: Any) -> list[int]:
        """Returns the token ids of the prompt that asks for a reference; of a caption, the begin token."""
        return [self.tokenizer.bos_id]

    @property
    def sampled_tokens(self) -> int:
        """Most tokens of a sampled text; the same for all prompts, so that texts do not depend on other prompts."""
        return self.max_tokens

    def build_metrics(self, weights: Mapping[str, float]) -> Reward:
        """Returns the weighted sum of rewards of ours."""
        records = self.data.split("train").records()
        references = (self.fields[self.text_field].references_of(record) for record in records)  # type: ignore[attr-defined]
        return TextReward(weights, (target.references for texts in references for target in list_targets(texts)))

    def loss(self, batch: Batch) -> dict[str, Term]:
        return super().loss(batch) if self.critic is None else self.critic.loss(batch)

    def likelihood_loss(self, batch: Batch) -> Term:
        """The loss of next-token prediction of a batch's references."""
        return super().loss(batch)["tokens"]

    def use_start(self, start: Start, stored: Mapping[str, Any]) -> None:
        super().use_start(start, stored)
        if self.critic is not None and self.critic.reference is not None:
            self.critic.reference.start = start
            self.critic.reference.expected = str(stored.get("reference", ""))

    def on_fit_start(self) -> None:
        super().on_fit_start()
        if self.critic is not None:
            self.critic.prepare()

    def description(self) -> dict[str, JsonValue]:
        reference = self.critic.reference_hash if self.critic else ""
        return {**super().description(), **({"reference": reference} if reference else {})}


class PolicyGradient:
    """The loss of a task on rewards of texts that its model samples.

    The loss is summed over tokens and divided by their number in the optimiser step, as in next-token prediction. With
    `GroupMean`, it equals that of TRL's GRPOTrainer with ``scale_rewards="group"`` and ``loss_type="cispo"``, and its
    gradient also that of ``loss_type="dapo"``, TRL's default, whose value is another. With `LeaveOneOut`, the
    gradient is that of TRL's RLOOTrainer times texts / tokens, because TRL divides by the number of texts.

    Args:
        task: The task; its training batches will contain references.
        weights: Weight of each reward. A token of a reference has the weight of "likelihood", as one of a sampled text
            has that text's advantage.
        samples: Number K of texts sampled per prompt.
        baseline: What rewards are compared with.
        kl: Factor of the divergence from the reference model.
        reference: The reference model; None for none.
    Raises:
        UserError: The task smooths labels, which this loss lacks, or captions have languages.
    """

    def __init__(
        self,
        task: RewardedTextTask,
        weights: Mapping[str, float],
        samples: int,
        baseline: Baseline,
        kl: float = 0.0,
        reference: ReferenceModel | None = None,
    ) -> None:
        if task.label_smoothing:
            raise UserError("task.label_smoothing: cannot be combined with task.reward; leave one of them out")
        if task.tokenizer.languages:
            raise UserError("task.reward: not supported for captions in several languages; leave it out for these data")
        self.task, self.samples, self.baseline, self.kl, self.reference = task, samples, baseline, kl, reference
        self.weights = {name: weight for name, weight in weights.items() if name != LIKELIHOOD}
        self.likelihood = weights.get(LIKELIHOOD, 0.0)
        self.reference_hash = ""
        task.fields[task.text_field].compares = True  # type: ignore[attr-defined]

    @cached_property
    def reward(self) -> Reward:
        """The reward, once the training texts are counted."""
        ours = {name: weight for name, weight in self.weights.items() if "." not in name}
        functions = [(FunctionReward(name), weight) for name, weight in self.weights.items() if "." in name]
        metrics = self.task.build_metrics(ours) if ours else None
        return metrics if metrics is not None and not functions else WeightedReward(metrics, functions)

    def prepare(self) -> None:
        """Prepares a training.

        Raises:
            UserError: The weights are sharded, a user's function cannot be used, or fails on references of the training
                split.
        """
        if isinstance(self.task.trainer.strategy, ShardedStrategy):
            raise UserError("task.reward: not supported with sharded weights; use trainer=ddp instead of fsdp")
        try_functions(self.weights, self.task.fields[self.task.text_field], self.task.data.split("train"))
        if self.reference is not None:
            self.reference_hash = self.reference.hash()

    def loss(self, batch: Batch) -> dict[str, Term]:
        """Returns the loss of a batch, on texts sampled for this step."""
        task, rows = self.task, batch[self.task.text_field]
        images, prompts = as_read(batch["images"], task.preprocess), read_prompts(batch, rows, task.prompt_tokens)
        sampled, greedy = self._sample(images, rows, prompts)
        rewards, greedy_rewards = self._score(prompts, sampled, greedy)
        if prompts.names:
            task.log("train/reward", float(rewards.mean()))
        rows = build_rows(task.fields[task.text_field], rows, prompts, sampled, task.tokenizer.pad_id).to(task.device)
        numbers = number_texts(rows, prompts, self.samples)
        texts = (rows.tokens, rows.segments, rows.image_states, rows.scored)
        losses = sampled_losses(task.model(images, *texts), rows, task.model.head_parts)
        added = None
        if self.reference is not None:
            with torch.no_grad():
                model: Any = self.reference.model()
                reference = -sampled_losses(model(images, *texts), rows, model.head_parts)
            terms = divergence(-losses, reference)
            if len(terms):
                task.log("train/kl", float(terms.detach().mean()))
            if self.baseline.penalizes:
                ratios = -losses.detach() - reference
                penalties = torch.zeros(rewards.size, device=ratios.device).index_add(0, numbers, ratios)
                rewards = rewards - self.kl * penalties.view(rewards.shape).double().cpu().numpy()
            else:
                added = self.kl * terms.sum()
        given = None if greedy_rewards is None else torch.from_numpy(greedy_rewards)
        advantages = self.baseline.compute_advantages(torch.from_numpy(rewards), given)
        total = policy_loss(losses, numbers, advantages.float().to(task.device).flatten())
        loss = Term(total if added is None else total + added, rows.targets.count)
        if self.likelihood:
            reference_loss = task.likelihood_loss(batch)
            loss = Term(loss.total + self.likelihood * reference_loss.total, loss.count + reference_loss.count)
        return {"reward": loss}

    def _sample(self, images: Tensor | Features, rows: TextRows, prompts: Prompts) -> tuple[Sampled, Sampled]:
        """Returns K sampled texts of each prompt, and its greedy text if the baseline needs it."""
        task, seed = self.task, key(self.task.seed, "reward", self.task.global_step)
        common: dict[str, Any] = {"max_tokens": task.sampled_tokens, "ends": tuple(task.ends), "logprobs": False}
        sampling = Decoding(sampling=Sampling(), results=self.samples, seed=seed, **common)
        searches = [sampling, Decoding(**common)] if self.baseline.reads_greedy else [sampling]
        task.model.eval()
        texts = [sample_texts(task.model, images, rows, prompts, task.tokenizer, search) for search in searches]
        task.train()
        return texts[0], texts[1] if self.baseline.reads_greedy else []

    def _score(self, prompts: Prompts, sampled: Sampled, greedy: Sampled) -> tuple[Floats, Floats | None]:
        """Returns the rewards of the sampled texts (P, K), and of the greedy ones (P,) or None."""
        if not prompts.names:
            return np.zeros((0, self.samples)), np.zeros(0) if self.baseline.reads_greedy else None
        tokenizer = self.task.tokenizer
        ends = {tokenizer.eos_id, *self.task.ends}
        written = [texts + greedy[at] for at, texts in enumerate(sampled)] if greedy else sampled
        tokens = [[[token for token in text if token not in ends] for text in texts] for texts in written]
        decoded = [[tokenizer.decode(text).strip() for text in texts] for texts in tokens]
        rewards = self.reward(SampledTexts(prompts.ids, prompts.targets, decoded, tokens))
        return (rewards[:, :-1], rewards[:, -1]) if greedy else (rewards, None)
