"""Distillation, policy losses and top-k against torch on full logits."""

import unittest
from unittest import mock

import torch
import torch.nn.functional as F

import lmhead
from base import ServiceTest

TEACHER_SIZE = 40
LOSS_BOUND = 5e-6
GRAD_BOUND = 1e-5


class DistillationTest(ServiceTest):
    def setUp(self):
        super().setUp()
        self.teacher = self.create(hidden_size=TEACHER_SIZE)
        self.student = self.create(optimizer=lmhead.SGD(),
                                   spec={"teacher_hidden_size": str(TEACHER_SIZE), "top_k_max": 8})

    def check(self, distillation, want, reduction="sum", **tensors):
        """A step's loss and gradients against `want`, a function of the student's logits and the labels."""
        hidden, labels = self.data(2, 5)
        weight = self.student.read_weight().requires_grad_()
        local = hidden.detach().clone().requires_grad_()
        valid = labels.reshape(-1) != -100
        logits = (local @ weight.T).reshape(-1, 101)[valid]
        wanted = want(logits, labels.reshape(-1)[valid], valid)
        wanted.backward()
        with self.student.step() as step:
            loss = step.loss(hidden, labels, recipe=lmhead.Recipe(distillation=distillation), reduction=reduction, **tensors)
            loss.backward()
            step.prepare()
            grad_weight = self.student.read_grad_weight()
            step.abort()
        self.assertNear(loss, wanted, LOSS_BOUND)
        self.assertNear(hidden.grad, local.grad, GRAD_BOUND)
        self.assertNear(grad_weight, weight.grad, GRAD_BOUND)

    def test_forward_and_reverse_kl_and_the_mix(self):
        teacher_hidden = torch.randn(2, 5, TEACHER_SIZE)
        teacher_logits = (teacher_hidden @ self.teacher.read_weight().T).reshape(-1, 101)

        def kl(p, q):
            return (p.exp() * (p - q)).sum()

        def forward(logits, labels, valid):
            return 4 * kl((teacher_logits[valid] / 2).log_softmax(-1), (logits / 2).log_softmax(-1))

        self.check(lmhead.Distillation(self.teacher.name, kl_temperature=2.0, scale_by_temperature_squared=True), forward,
                   teacher_hidden=teacher_hidden)
        self.check(lmhead.Distillation(self.teacher.name, "reverse_kl", cross_entropy_weight=0.3, divergence_weight=0.7),
                   lambda logits, labels, valid: 0.7 * kl(logits.log_softmax(-1), teacher_logits[valid].log_softmax(-1))
                   + 0.3 * F.cross_entropy(logits, labels, reduction="sum"), teacher_hidden=teacher_hidden)

        def jsd(logits, labels, valid):
            p, q = logits.log_softmax(-1), teacher_logits[valid].log_softmax(-1)
            m = torch.logaddexp(q + torch.tensor(0.3).log(), p + torch.tensor(0.7).log())
            return 0.3 * kl(q, m) + 0.7 * kl(p, m)

        self.check(lmhead.Distillation(self.teacher.name, "jsd", jsd_beta=0.3), jsd, teacher_hidden=teacher_hidden)

    def test_a_teacher_given_by_its_top_k(self):
        # The teacher's own top k, as another job would have stored them.
        teacher_hidden = torch.randn(2, 5, TEACHER_SIZE)
        logprobs = (teacher_hidden @ self.teacher.read_weight().T).log_softmax(-1)
        values, ids = logprobs.topk(8, dim=-1)

        def renormalised(logits, labels, valid):
            kept = values.reshape(-1, 8)[valid].log_softmax(-1)
            student = logits.log_softmax(-1).gather(1, ids.reshape(-1, 8)[valid])
            return (kept.exp() * (kept - student)).sum()

        self.check(lmhead.Distillation(), renormalised, teacher_topk_ids=ids, teacher_topk_logprobs=values)

    def test_top_k_tensors_that_do_not_fit_are_refused(self):
        hidden, labels = self.data(3)
        recipe = lmhead.Recipe(distillation=lmhead.Distillation())

        def refused(error, says, ids, logprobs):
            with self.assertRaisesRegex(error, says):
                self.student.loss(hidden.detach(), labels, recipe=recipe, teacher_topk_ids=ids,
                                  teacher_topk_logprobs=logprobs)

        ids = torch.tensor([[0, 1]] * 3)
        for columns in (1, 3):  # Read as two, the library would go past the end, or take other rows' numbers.
            refused(ValueError, "want as many in both", ids, torch.full((3, columns), -2.0))
        refused(ValueError, "want integers", ids.float(), torch.full((3, 2), -2.0))
        refused(lmhead.InvalidArgument, "topk_ids of row 0", ids + 2 ** 32, torch.full((3, 2), -2.0))

    def test_rows_of_a_gradient_are_not_taken_for_others(self):
        with self.student.step() as step:
            with self.assertRaisesRegex(lmhead.InvalidArgument, "row"):
                step.accumulate_weight_gradient(torch.ones(2, 24), torch.tensor([1, 2 ** 32]))
            self.assertEqual(float(self.student.read_grad_weight().abs().max()), 0.0)
            step.abort()

    def test_numbers_that_are_none_are_named(self):
        hidden, labels = self.data(3)
        for value in (float("nan"), float("inf"), 1e-9):
            with self.assertRaisesRegex(lmhead.InvalidArgument, "recipe.temperature is .*, want 1e-06 to 1e[+]06"):
                self.student.loss(hidden.detach(), labels, recipe=lmhead.Recipe(temperature=value))

    def test_a_weight_of_zero_leaves_an_infinite_loss_out(self):
        head = self.create(vocab_size=5, bias=True)
        head.load_bias(torch.tensor([0.0, float("-inf"), 0.0, 0.0, 0.0]))
        hidden, labels = torch.randn(3, 24), torch.tensor([1, 2, 1])
        losses = head.loss(hidden, labels, token_weights=torch.tensor([0.0, 2.0, 1.0]), reduction="none")
        self.assertEqual(float(losses[0]), 0.0)
        self.assertTrue(torch.isfinite(losses[1]))
        self.assertEqual(float(losses[2]), float("inf"))

    def test_the_top_k_of_a_head(self):
        hidden, _ = self.data(2, 5)
        ids, logprobs = self.student.topk(hidden, 4)
        want = (hidden @ self.student.read_weight().T).log_softmax(-1).topk(4, dim=-1)
        self.assertTrue(torch.equal(ids.long(), want.indices))
        self.assertNear(logprobs, want.values, LOSS_BOUND)

    def test_a_divergence_of_top_k_is_known_in_one_direction(self):
        hidden, labels = self.data(3)
        with self.assertRaisesRegex(ValueError, "reverse_kl"):
            self.student.loss(hidden.detach(), labels,
                              recipe=lmhead.Recipe(distillation=lmhead.Distillation(divergence="reverse_kl")))


class PolicyTest(ServiceTest):
    def setUp(self):
        super().setUp()
        self.head = self.create(optimizer=lmhead.SGD())

    def logits(self, hidden):
        weight = self.head.read_weight().requires_grad_()
        local = hidden.detach().clone().requires_grad_()
        return weight, local, (local @ weight.T).log_softmax(-1)

    def check(self, recipe, hidden, labels, wanted, weight, local, **tensors):
        wanted.backward()
        with self.head.step() as step:
            loss = step.loss(hidden, labels, recipe=recipe, **tensors)
            loss.backward()
            report = step.prepare()
            grad_weight = self.head.read_grad_weight()
            step.abort()
        self.assertNear(loss, wanted, LOSS_BOUND)
        self.assertNear(hidden.grad, local.grad, GRAD_BOUND)
        self.assertNear(grad_weight, weight.grad, GRAD_BOUND)
        return report

    def test_coefficients_are_any_policy_gradient(self):
        hidden, labels = self.data(7)
        weight, local, logprobs = self.logits(hidden)
        a, b = torch.randn(7), torch.randn(7)
        valid = labels != -100
        chosen = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        wanted = ((a * chosen + b * entropy) * valid).sum()
        self.check(lmhead.Recipe(policy=lmhead.PolicyCoefficients()), hidden, labels, wanted, weight, local,
                   logprob_grad=a, entropy_grad=b)

    def test_the_clipped_loss(self):
        hidden, labels = self.data(40)
        weight, local, logprobs = self.logits(hidden)
        valid = labels != -100
        chosen = logprobs.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        old = chosen.detach() + 0.5 * torch.randn(40)
        reference = chosen.detach() + 0.3 * torch.randn(40)
        advantage = torch.randn(40)
        ratio = (chosen - old).exp()
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        surrogate = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)
        penalty = (reference - chosen).exp() - (reference - chosen) - 1
        wanted = ((surrogate - 0.01 * entropy + 0.1 * penalty) * valid).sum()
        policy = lmhead.ClippedPolicy(clip_low=0.2, clip_high=0.3, entropy_coefficient=0.01, reference_kl_coefficient=0.1)
        report = self.check(lmhead.Recipe(policy=policy), hidden, labels, wanted, weight, local, old_logprob=old,
                            advantage=advantage, reference_logprob=reference)
        self.assertGreater(report.sums["num_clipped"], 0)


class LogprobTest(ServiceTest):
    """Objectives that are written in PyTorch, whose factors differ between tokens and calls."""

    TEMPERATURE = 0.7

    def setUp(self):
        super().setUp()
        self.head = self.create(optimizer=lmhead.SGD())

    def objective(self, logprob, entropy):
        """Nothing that one common factor could make of a sum over tokens."""
        return (logprob.exp() * torch.arange(logprob.numel()).reshape(logprob.shape)).sum() - 0.1 * (entropy ** 2).mean()

    def dense(self, hidden, weight, labels):
        logprobs = (hidden @ weight.T / self.TEMPERATURE).log_softmax(-1)
        valid = labels != -100
        chosen = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return chosen * valid, -(logprobs.exp() * logprobs).sum(-1) * valid

    def test_any_objective_of_them_reaches_trunk_and_head(self):
        batches = [self.data(2, 6) for _ in range(2)]
        weight = self.head.read_weight().requires_grad_()
        wanted = []
        for factor, (hidden, labels) in enumerate(batches, 1):
            local = hidden.detach().clone().requires_grad_()
            logprob, entropy = self.dense(local[:, :-1], weight, labels[:, 1:])
            (factor * self.objective(logprob, entropy)).backward()
            wanted.append((local.grad, logprob.detach(), entropy.detach()))
        with self.head.step(1) as step:
            for factor, (hidden, labels) in enumerate(batches, 1):
                found = step.logprobs(hidden, labels, shift=True, temperature=self.TEMPERATURE)
                want_grad, want_logprob, want_entropy = wanted[factor - 1]
                self.assertNear(found.logprob[:, :-1], want_logprob, 1e-6)
                self.assertNear(found.entropy[:, :-1], want_entropy, 1e-5)
                self.assertEqual(float(found.logprob[:, -1].abs().max() + found.entropy[:, -1].abs().max()), 0.0)
                (factor * self.objective(found.logprob[:, :-1], found.entropy[:, :-1])).backward()
                self.assertNear(hidden.grad, want_grad, GRAD_BOUND)
            report = step.prepare()
            self.assertNear(self.head.read_grad_weight(), weight.grad, GRAD_BOUND)
            self.assertAlmostEqual(report.grad_norm, float(weight.grad.norm()), delta=1e-4 * report.grad_norm)
            step.commit(0.5)  # The report's multiplier: the objective is as it was written.
        self.assertNear(self.head.read_weight(), weight - 0.5 * weight.grad, 1e-6)

    def test_backward_passes_add_up_and_may_be_left_out(self):
        hidden, labels = self.data(5)
        with self.head.step(1) as step:
            step.logprobs(hidden, labels)
            logprob = step.logprobs(hidden, labels).logprob
            logprob.sum().backward(retain_graph=True)
            once, first = hidden.grad.clone(), self.head.read_grad_weight()
            logprob.sum().backward()
            self.assertNear(hidden.grad, 2 * once, 1e-6)
            self.assertNear(self.head.read_grad_weight(), 2 * first, 1e-6)
            with torch.no_grad():
                self.assertFalse(step.logprobs(hidden, labels).logprob.requires_grad)
            step.abort()
        with self.assertRaisesRegex(RuntimeError, "is aborted"):
            logprob.sum().backward()

    def test_a_head_alone_learns_from_hidden_states_without_gradients(self):
        hidden, labels = self.data(5)
        hidden = hidden.detach()
        weight = self.head.read_weight().requires_grad_()
        self.dense(hidden, weight, labels)[0].sum().backward()
        with self.head.step(1) as step:
            step.logprobs(hidden, labels, temperature=self.TEMPERATURE).logprob.sum().backward()
            self.assertNear(self.head.read_grad_weight(), weight.grad, GRAD_BOUND)
            step.abort()

    def test_frozen_ones_leave_the_head_alone(self):
        hidden, labels = self.data(5)
        local = hidden.detach().clone().requires_grad_()
        self.objective(*self.dense(local, self.head.read_weight(), labels)).backward()
        found = self.head.frozen_logprobs(hidden, labels, temperature=self.TEMPERATURE)
        self.objective(found.logprob, found.entropy).backward()
        self.assertNear(hidden.grad, local.grad, GRAD_BOUND)
        self.assertEqual(self.head.info().open_step, 0)

    def test_gradcheck(self):
        head = self.create(vocab_size=11, hidden_size=5)
        labels = torch.tensor([3, -100, 7])
        hidden = torch.randn(3, 5, requires_grad=True)
        with mock.patch("warnings.warn"):  # It would rather have double precision than float32.
            self.assertTrue(torch.autograd.gradcheck(lambda h: head.frozen_logprobs(h, labels)[:2], (hidden,), eps=1e-2,
                                                     atol=1e-3, rtol=1e-2))

    def test_what_has_no_common_factor_is_refused(self):
        hidden, labels = self.data(5)
        with self.assertRaisesRegex(RuntimeError, "cannot be differentiated twice"):
            torch.autograd.grad(self.head.frozen_logprobs(hidden, labels).logprob.sum(), hidden, create_graph=True)
        with self.assertRaisesRegex(ValueError, "factors from 0.25 to 1"):
            with self.head.step(1, num_recipes=2) as step:
                (step.loss(hidden, labels, reduction="mean") / 4).backward()
                step.logprobs(hidden, labels).logprob.mean().backward()
                step.prepare()
        with self.assertRaisesRegex(lmhead.InvalidArgument, "logprob_grad"):
            with self.head.step(1) as step:
                (step.logprobs(hidden, labels).logprob.sum() * float("nan")).backward()


if __name__ == "__main__":
    unittest.main()
