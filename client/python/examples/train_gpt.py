#!/usr/bin/env python3
"""Trains a small GPT on real text from nothing; its head is in the service.

    build/bin/lmhead serve --listen=127.0.0.1:50051 --metrics_listen=127.0.0.1:0 &
    python3 client/python/examples/train_gpt.py --plot=loss.png
"""

import torch

import lmhead
from common import Progress, Trunk, Words, arguments, batches, read_text

VOCAB_SIZE, WIDTH, ROWS, LENGTH = 4096, 96, 4, 96


def main():
    options = arguments(__doc__.splitlines()[0], steps=100)
    text = read_text(options.text)
    words = Words(text, VOCAB_SIZE)
    ids = words.encode(text)
    heldout, ids = ids[-len(ids) // 10:], ids[:-len(ids) // 10]
    torch.manual_seed(0)
    trunk = Trunk(VOCAB_SIZE, WIDTH)
    client = lmhead.Client(options.address)
    head = lmhead.RemoteHead.create(client, f"gpt-{torch.seed():x}", vocab_size=VOCAB_SIZE, hidden_size=WIDTH,
                                    optimizer=lmhead.AdamW(betas=(0.9, 0.95), weight_decay=0.01), init_std=0.02)
    optimizer = torch.optim.AdamW(trunk.parameters(), 3e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda done: min((done + 1) / 20, 1.0) * (1.0 - done / options.steps))  # Up within 20 steps, then down.
    progress = Progress(options.steps)
    try:
        data = batches(ids, ROWS, LENGTH)
        for number in range(1, options.steps + 1):
            optimizer.zero_grad()
            with head.step(number) as step:
                # The next micro-batch runs through the trunk while the service works on this one.
                futures = []
                for _ in range(2):
                    batch = next(data)
                    futures.append(step.loss_async(trunk(batch), batch, shift=True))
                for future in futures:
                    future.result().backward()
                report = step.prepare()
                clipped = lmhead.clip_grad_norm(trunk.parameters(), report, max_norm=1.0)
                step.commit(optimizer.param_groups[0]["lr"], clipped.grad_multiplier)
            optimizer.step()
            schedule.step()
            progress.add(number, report.loss_mean, f"gradient norm {clipped.grad_norm:.3f}")
        with torch.no_grad():
            batch = next(batches(heldout, 32, LENGTH, seed=1))
            loss = head.loss(trunk(batch), batch, shift=True, reduction="mean")
        print(f"held-out text: loss {loss:.4f}")
        progress.plot(options.plot)
    finally:
        head.delete(force=True)


if __name__ == "__main__":
    main()
