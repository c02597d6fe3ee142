"""The service dies in the middle of training: the same end as if it had not."""

import threading
import unittest

import torch

import lmhead
import trunk
from base import ServiceTest

NUM_STEPS = 12
LEARNING_RATE = 0.3


class ElasticTest(ServiceTest):
    def train(self, head, disturb, checkpoints=False, head_rate=LEARNING_RATE):
        """Trains; `disturb(number, moment)` may break things. Gives the losses and how often a body ran."""
        model = trunk.make_trunk()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        copy = {"weight": trunk.make_weight()}

        def restore(lost):
            if checkpoints:
                lost.restore_checkpoint()
                return
            lmhead.RemoteHead.create(lost.client, lost.name, vocab_size=trunk.VOCAB_SIZE, hidden_size=trunk.HIDDEN_SIZE,
                                     optimizer=lmhead.SGD()).load_weight(copy["weight"])

        bodies = []

        def body(step):
            bodies.append(step.number)
            optimizer.zero_grad()
            for micro_batch in range(2):
                ids, labels = trunk.batch(step.number, micro_batch)
                step.loss(model(ids), labels, shift=True).backward()
                disturb(step.number, f"loss {micro_batch}")
            report = step.prepare()
            clipped = lmhead.clip_grad_norm(model.parameters(), report)
            disturb(step.number, "prepared")
            step.commit(head_rate, clipped.grad_multiplier)
            return report.loss_mean

        losses = []
        for number in range(1, NUM_STEPS + 1):
            losses.append(lmhead.elastic_step(head, number, body, on_restart=restore, outage_seconds=60))
            optimizer.step()
            if checkpoints:
                head.save_checkpoint()
            else:
                copy["weight"] = head.read_weight()
        return losses, bodies

    def new_head(self, optimizer=lmhead.SGD()):
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=optimizer, init_std=None)
        head.load_weight(trunk.make_weight())
        return head

    def restart(self, outage_seconds):
        self.service.kill()
        timer = threading.Timer(outage_seconds, self.service.start)
        timer.start()
        self.addCleanup(timer.join)

    def check_that_dying_changes_nothing(self, moments, **options):
        optimizer = options.pop("optimizer")
        want, _ = self.train(self.new_head(optimizer), lambda number, moment: None, **options)
        pending = set(moments)

        def disturb(number, moment):
            if (number, moment) in pending:
                pending.remove((number, moment))
                self.restart(0.5)

        losses, bodies = self.train(self.new_head(optimizer), disturb, **options)
        self.assertEqual(pending, set())
        self.assertEqual(len(bodies), NUM_STEPS + len(moments))
        self.assertEqual(losses, want)  # One worker and one stream: bitwise the same.

    def test_a_service_that_dies_and_comes_back_changes_nothing(self):
        self.check_that_dying_changes_nothing({(3, "loss 0"), (6, "loss 1"), (9, "prepared")}, optimizer=lmhead.SGD())

    def test_a_service_that_dies_between_two_steps_changes_nothing(self):
        head = self.new_head()
        lmhead.elastic_step(head, 1, lambda step: step.commit(0.1))

        def restore(lost):
            lmhead.RemoteHead.create(lost.client, lost.name, vocab_size=trunk.VOCAB_SIZE, hidden_size=trunk.HIDDEN_SIZE,
                                     optimizer=lmhead.SGD()).load_weight(trunk.make_weight())

        self.restart(0.1)
        lmhead.elastic_step(head, 2, lambda step: step.commit(0.1), on_restart=restore)
        self.assertEqual(head.info().last_committed_step, 2)

    def test_a_head_that_came_back_older_between_two_steps_is_refused(self):
        head = self.new_head()
        lmhead.elastic_step(head, 1, lambda step: step.commit(0.1))
        head.save_checkpoint("one")
        lmhead.elastic_step(head, 2, lambda step: step.commit(0.1))
        self.restart(0.1)
        with self.assertRaisesRegex(lmhead.FailedPrecondition, "as of step 1, the trainer is at step 2"):
            lmhead.elastic_step(head, 3, lambda step: step.commit(0.1), on_restart=lambda lost: lost.restore_checkpoint("one"))

    def test_every_call_within_a_step_tells_that_it_is_lost(self):
        """An evaluation and log-probabilities, too, which have no step in the service."""
        ids, labels = trunk.batch(1)
        hidden = trunk.make_trunk()(ids)
        for call in (lambda head, step: head.logprobs(hidden.detach(), labels),
                     lambda head, step: step.logprobs(hidden, labels),
                     lambda head, step: head.loss(hidden.detach(), labels)):
            head = self.new_head()
            with self.assertRaises(lmhead.StepLost) as caught:
                with head.step(1) as step:
                    self.restart(0.1)
                    call(head, step)
            self.assertIs(caught.exception.restarted, True)

    def test_a_checkpoint_brings_the_optimizers_state_back(self):
        self.check_that_dying_changes_nothing({(5, "loss 1")}, optimizer=lmhead.AdamW(), checkpoints=True,
                                              head_rate=0.01)

    def test_a_head_that_comes_back_older_is_refused(self):
        head = self.new_head()
        lmhead.elastic_step(head, 1, lambda step: step.commit(0.1))
        head.save_checkpoint("one")
        lmhead.elastic_step(head, 3, lambda step: step.commit(0.1))
        with self.assertRaisesRegex(lmhead.FailedPrecondition, "as of step 1, the trainer is at step 3"):
            lmhead.elastic_step(head, 4, lambda step: (self.restart(0.1), step.prepare()),
                                on_restart=lambda lost: lost.restore_checkpoint("one"))

    def test_without_a_way_to_restore_the_error_says_what_to_pass(self):
        head = self.new_head()

        def body(step):
            ids, labels = trunk.batch(1)
            self.restart(0.1)
            step.loss(trunk.make_trunk()(ids), labels).backward()

        with self.assertRaisesRegex(lmhead.NotFound, "on_restart="):
            lmhead.elastic_step(head, 1, body)

    def test_the_exception_says_that_the_service_has_restarted(self):
        head = self.new_head()
        ids, labels = trunk.batch(1)
        with self.assertRaises(lmhead.StepLost) as caught:
            with head.step(1) as step:
                self.restart(0.1)
                step.loss(trunk.make_trunk()(ids), labels).backward()
        self.assertIs(caught.exception.restarted, True)

    def test_other_errors_are_not_repeated(self):
        head = self.new_head()
        bodies = []

        def body(step):
            bodies.append(step)
            ids, labels = trunk.batch(1)
            step.loss(trunk.make_trunk()(ids), labels + trunk.VOCAB_SIZE)

        with self.assertRaises(lmhead.InvalidArgument):
            lmhead.elastic_step(head, 1, body)
        self.assertEqual(len(bodies), 1)

    def test_a_body_that_does_not_commit_is_an_error(self):
        with self.assertRaisesRegex(RuntimeError, "without step.commit"):
            lmhead.elastic_step(self.new_head(), 1, lambda step: None)


if __name__ == "__main__":
    unittest.main()
