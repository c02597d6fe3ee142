#!/usr/bin/env python3
"""Distils a wide teacher into a narrow student; the heads of both are in the service, where their logits meet.

    python3 client/python/examples/distil.py --address=127.0.0.1:50051 --plot=distil.png
"""

import torch

import lmhead
from common import Progress, Trunk, Words, arguments, batches, read_text

VOCAB_SIZE, TEACHER_WIDTH, STUDENT_WIDTH, ROWS, LENGTH = 2048, 128, 48, 8, 96


def train_teacher(head, trunk, data, steps):
    """A teacher worth the name: a while of ordinary training."""
    optimizer = torch.optim.AdamW(trunk.parameters(), 3e-3)
    progress = Progress(steps, "teacher's loss")
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        batch = next(data)
        with head.step(number) as step:
            step.loss(trunk(batch), batch, shift=True).backward()
            report = step.prepare()
            clipped = lmhead.clip_grad_norm(trunk.parameters(), report, max_norm=1.0)
            step.commit(3e-3, clipped.grad_multiplier)
        optimizer.step()
        progress.add(number, report.loss_mean)


def main():
    options = arguments(__doc__.splitlines()[0], steps=100)
    text = read_text(options.text)
    words = Words(text, VOCAB_SIZE)
    data = batches(words.encode(text), ROWS, LENGTH)
    torch.manual_seed(0)
    client = lmhead.Client(options.address)
    suffix = f"{torch.seed():x}"
    teacher_head = lmhead.RemoteHead.create(client, f"teacher-{suffix}", vocab_size=VOCAB_SIZE, hidden_size=TEACHER_WIDTH,
                                            optimizer=lmhead.AdamW(), init_std=0.02)
    student_head = lmhead.RemoteHead.create(client, f"student-{suffix}", vocab_size=VOCAB_SIZE, hidden_size=STUDENT_WIDTH,
                                            optimizer=lmhead.AdamW(), init_std=0.02,
                                            spec={"teacher_hidden_size": str(TEACHER_WIDTH)})
    teacher, student = Trunk(VOCAB_SIZE, TEACHER_WIDTH), Trunk(VOCAB_SIZE, STUDENT_WIDTH, layers=1)
    recipe = lmhead.Recipe(distillation=lmhead.Distillation(teacher_head.name, "forward_kl", kl_temperature=2.0,
                                                            scale_by_temperature_squared=True, cross_entropy_weight=0.1))
    try:
        train_teacher(teacher_head, teacher, data, options.steps)
        # A teacher is a frozen head: no gradient, no optimizer state.
        weight = teacher_head.read_weight()
        teacher_head.delete()
        teacher_head = lmhead.RemoteHead.create(client, teacher_head.name, vocab_size=VOCAB_SIZE,
                                                hidden_size=TEACHER_WIDTH)
        teacher_head.load_weight(weight)
        optimizer = torch.optim.AdamW(student.parameters(), 3e-3)
        progress = Progress(options.steps, "divergence")
        for number in range(1, options.steps + 1):
            optimizer.zero_grad()
            batch = next(data)
            with torch.no_grad():
                teacher_hidden = teacher(batch)
            with student_head.step(number) as step:
                step.loss(student(batch), batch, shift=True, recipe=recipe, teacher_hidden=teacher_hidden).backward()
                report = step.prepare()
                clipped = lmhead.clip_grad_norm(student.parameters(), report, max_norm=1.0)
                step.commit(3e-3, clipped.grad_multiplier)
            optimizer.step()
            progress.add(number, report.sums["divergence_sum"] / report.num_tokens)
        progress.plot(options.plot)
    finally:
        student_head.delete(force=True)
        teacher_head.delete(force=True)


if __name__ == "__main__":
    main()
