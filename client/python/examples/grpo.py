#!/usr/bin/env python3
"""A GRPO-style loop: samples groups of continuations, rewards them, and trains with the clipped policy loss.

The reward is the share of even word ids, which nobody taught the model: the curve shows it learning that.

    python3 client/python/examples/grpo.py --address=127.0.0.1:50051 --plot=reward.png
"""

import torch

import lmhead
from common import Progress, Trunk, Words, arguments, batches, read_text

VOCAB_SIZE, WIDTH, PROMPTS, GROUP, PROMPT_LENGTH, LENGTH = 512, 64, 4, 8, 8, 16
LEARNING_RATE, PASSES = 3e-3, 2


@torch.no_grad()
def sample(trunk, weight, prompts):
    """Continues each prompt at temperature 1. Sampling needs logits: a copy of the head's rows, read once a step."""
    ids = prompts
    for _ in range(LENGTH):
        logits = trunk(ids)[:, -1] @ weight.T
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return ids


def advantages(ids):
    """(each continuation's reward, minus its group's mean over the deviation, for each of its tokens)."""
    rewards = (ids[:, PROMPT_LENGTH:] % 2 == 0).float().mean(1)
    groups = rewards.view(PROMPTS, GROUP)
    normal = (groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)
    return rewards, normal.reshape(-1, 1).expand(-1, ids.shape[1]).contiguous()


def main():
    options = arguments(__doc__.splitlines()[0], steps=40)
    text = read_text(options.text)
    words = Words(text, VOCAB_SIZE)
    data = batches(words.encode(text), PROMPTS, PROMPT_LENGTH)
    torch.manual_seed(0)
    trunk = Trunk(VOCAB_SIZE, WIDTH)
    head = lmhead.RemoteHead.create(options.address, f"policy-{torch.seed():x}", vocab_size=VOCAB_SIZE, hidden_size=WIDTH,
                                    optimizer=lmhead.AdamW(), init_std=0.02)
    recipe = lmhead.Recipe(policy=lmhead.ClippedPolicy(clip_low=0.2, clip_high=0.28, entropy_coefficient=0.002))
    optimizer = torch.optim.AdamW(trunk.parameters(), LEARNING_RATE)
    progress = Progress(options.steps, "reward")
    number = 0
    try:
        for iteration in range(1, options.steps + 1):
            ids = sample(trunk, head.read_weight(), next(data).repeat_interleave(GROUP, 0))
            rewards, advantage = advantages(ids)
            labels = ids.clone()
            labels[:, :PROMPT_LENGTH] = -100
            with torch.no_grad():  # Aligned with the positions that predict, one before the words.
                old_logprob, entropy = head.logprobs(trunk(ids), labels, shift=True, entropy=True)
            aligned = labels.new_full(labels.shape, -100)
            aligned[:, :-1] = labels[:, 1:]
            for _ in range(PASSES):
                number += 1
                optimizer.zero_grad()
                with head.step(number) as step:
                    step.loss(trunk(ids), aligned, recipe=recipe, old_logprob=old_logprob, advantage=advantage).backward()
                    report = step.prepare()
                    clipped = lmhead.clip_grad_norm(trunk.parameters(), report, max_norm=1.0)
                    step.commit(LEARNING_RATE, clipped.grad_multiplier)
                optimizer.step()
            sampled = aligned != -100
            progress.add(iteration, float(rewards.mean()), f"entropy {float(entropy[sampled].mean()):.3f}  clipped "
                         f"{report.sums['num_clipped'] / report.num_tokens:.3f}")
        progress.plot(options.plot)
    finally:
        head.delete(force=True)


if __name__ == "__main__":
    main()
