"""Fifty steps of training with a remote head equal fifty with a local one, for each optimizer."""

import unittest

import torch
import torch.nn.functional as F

import lmhead
import trunk
from base import ServiceTest, relative_error

NUM_STEPS = 50
# Both sides compute in float32 and sum in other orders; fifty steps let the difference grow.
LOSS_BOUND = 1e-5
WEIGHT_BOUND = 1e-5
MAX_NORM = 1.0

OPTIMIZERS = {
    "adamw": (lmhead.AdamW(betas=(0.9, 0.95), weight_decay=0.1),
              lambda p, lr: torch.optim.AdamW(p, lr, betas=(0.9, 0.95), weight_decay=0.1), 3e-3),
    "sgd": (lmhead.SGD(weight_decay=0.01), lambda p, lr: torch.optim.SGD(p, lr, weight_decay=0.01), 0.5),
    "momentum": (lmhead.SGD(momentum=0.9), lambda p, lr: torch.optim.SGD(p, lr, momentum=0.9), 0.1),
}


def local_run(make_optimizer, learning_rate):
    """Clips by the global norm of trunk and head, with a learning rate that falls."""
    model, weight = trunk.make_trunk(), torch.nn.Parameter(trunk.make_weight())
    parameters = [*model.parameters(), weight]
    optimizer = make_optimizer(parameters, learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    losses, norms = [], []
    for number in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for micro_batch in range(2):
            ids, labels = trunk.batch(number, micro_batch)
            logits = model(ids)[:, :-1] @ weight.T
            loss = F.cross_entropy(logits.reshape(-1, trunk.VOCAB_SIZE), labels[:, 1:].reshape(-1), reduction="sum")
            loss.backward()
            total, count = total + float(loss), count + int((labels[:, 1:] != -100).sum())
        for parameter in parameters:
            parameter.grad /= count
        norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)))
        optimizer.step()
        schedule.step()
        losses.append(total / count)
    return losses, norms, model, weight.detach()


class TrainingTest(ServiceTest):
    def remote_run(self, head, make_optimizer, learning_rate):
        model = trunk.make_trunk()
        head.load_weight(trunk.make_weight())
        optimizer = make_optimizer(model.parameters(), learning_rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
        losses, norms = [], []
        for number in range(1, NUM_STEPS + 1):
            optimizer.zero_grad()
            with head.step(number) as step:
                for micro_batch in range(2):
                    ids, labels = trunk.batch(number, micro_batch)
                    step.loss(model(ids), labels, shift=True).backward()
                report = step.prepare()
                clipped = lmhead.clip_grad_norm(model.parameters(), report, MAX_NORM)
                step.commit(optimizer.param_groups[0]["lr"], clipped.grad_multiplier)
            optimizer.step()
            schedule.step()
            losses.append(report.loss_mean)
            norms.append(clipped.grad_norm)
        return losses, norms, model

    def test_fifty_steps_equal_a_local_heads(self):
        for name, (spec, make_optimizer, learning_rate) in OPTIMIZERS.items():
            with self.subTest(optimizer=name):
                head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=spec, init_std=None)
                want_losses, want_norms, want_model, want_weight = local_run(make_optimizer, learning_rate)
                losses, norms, model = self.remote_run(head, make_optimizer, learning_rate)
                self.assertLess(want_losses[-1], 0.7 * want_losses[0])  # There was something to learn.
                worst = max(abs(a - b) / b for a, b in zip(losses, want_losses))
                self.assertLessEqual(worst, LOSS_BOUND)
                self.assertLessEqual(max(abs(a - b) / b for a, b in zip(norms, want_norms)), 10 * LOSS_BOUND)
                weight_error = relative_error(head.read_weight(), want_weight)
                self.assertLessEqual(weight_error, WEIGHT_BOUND)
                for (key, got), want in zip(model.named_parameters(), want_model.parameters()):
                    self.assertLessEqual(relative_error(got.detach(), want.detach()), WEIGHT_BOUND, key)
                print(f"{name}: loss {losses[0]:.3f} to {losses[-1]:.3f}; largest difference of a loss {worst:.1e}, of the "
                      f"head's weight {weight_error:.1e}")

    def test_forked_loaders_and_a_step_live_together(self):
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.SGD())
        model = trunk.make_trunk()
        with head.step(1) as step:
            loader = torch.utils.data.DataLoader([trunk.batch(1, rank, rows=1)[0][0] for rank in range(8)], batch_size=2,
                                                 num_workers=2)
            for ids in loader:
                step.loss(model(ids), ids, shift=True).backward()
            step.commit(0.1)
        self.assertEqual(step.report.num_rows, 8 * trunk.CONTEXT)

    def test_a_bfloat16_head_follows_its_float32_master(self):
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.AdamW(), weight_dtype=torch.bfloat16,
                           init_std=None)
        losses, _, _ = self.remote_run(head, OPTIMIZERS["adamw"][1], 3e-3)
        self.assertLess(losses[-1], 0.7 * losses[0])
        self.assertTrue(torch.equal(head.read_weight(), head.read_weight(master=True).bfloat16()))


if __name__ == "__main__":
    unittest.main()
