"""Losses and their gradients against torch on full logits."""

import os
import signal
import subprocess
import sys
import threading
import unittest
from unittest import mock

import torch
import torch.nn.functional as F

import lmhead
from base import ServiceTest

# ||got - want|| / ||want|| of gradients: float32 sums in another order; one rounding of the result to the 2-byte types,
# of which an element loses at most 2^-9 and 2^-12.
GRAD_BOUND = {torch.float32: 2e-6, torch.bfloat16: 2.0 ** -8, torch.float16: 2.0 ** -11}
LOSS_BOUND = 2e-6


def dense(hidden, lm_head_weight, labels, bias=None, **options):
    logits = hidden.float() @ lm_head_weight.T
    if bias is not None:
        logits = logits + bias
    return F.cross_entropy(logits.reshape(-1, lm_head_weight.shape[0]), labels.reshape(-1), **options)


class LossTest(ServiceTest):
    def test_gradients_of_every_dtype_equal_a_local_heads(self):
        for dtype, bound in GRAD_BOUND.items():
            with self.subTest(dtype=dtype):
                head = self.create(optimizer=lmhead.SGD())
                weight = head.read_weight().requires_grad_()
                hidden, labels = self.data(3, 7, dtype=dtype)
                local = hidden.detach().clone().requires_grad_()
                want = dense(local, weight, labels, reduction="sum")
                want.backward()
                with head.step(1) as step:
                    loss = step.loss(hidden, labels)
                    loss.backward()
                    self.assertNear(loss, want, LOSS_BOUND)
                    self.assertEqual(hidden.grad.dtype, dtype)
                    self.assertNear(hidden.grad, local.grad, bound)
                    report = step.prepare()
                    self.assertNear(head.read_grad_weight(), weight.grad, GRAD_BOUND[torch.float32])
                    step.commit(0.0)
                self.assertEqual((report.num_tokens, report.num_rows), (20, 21))
                self.assertAlmostEqual(report.grad_norm, float(weight.grad.norm()), delta=1e-5 * report.grad_norm)

    def test_every_leading_shape(self):
        head = self.create()
        weight = head.read_weight()
        for leading in ((4,), (2, 3), (2, 1, 3), (1, 2)):
            with self.subTest(leading=leading):
                hidden, labels = self.data(*leading)
                loss = head.loss(hidden, labels, reduction="none")
                want = dense(hidden, weight, labels, reduction="none").reshape(leading)
                self.assertNear(loss, want, LOSS_BOUND)
                grad, = torch.autograd.grad((loss * labels).sum(), hidden)
                want_grad, = torch.autograd.grad((want * labels).sum(), hidden)
                self.assertNear(grad, want_grad, GRAD_BOUND[torch.float32])

    def test_hidden_states_that_are_not_dense(self):
        head = self.create()
        base = torch.randn(24, 5, requires_grad=True)
        labels = torch.randint(0, 101, (5,))
        loss = head.loss(base.T, labels)
        want = dense(base.T, head.read_weight(), labels, reduction="sum")
        self.assertNear(torch.autograd.grad(loss, base)[0], torch.autograd.grad(want, base)[0], 2e-6)

    def test_shift_is_that_of_hugging_face(self):
        head = self.create()
        hidden, labels = self.data(2, 6)
        loss = head.loss(hidden, labels, shift=True, reduction="mean")
        want = dense(hidden[:, :-1], head.read_weight(), labels[:, 1:])
        self.assertNear(loss, want, LOSS_BOUND)
        self.assertNear(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(want, hidden)[0], 2e-6)

    def test_means_divide_by_what_torch_divides_by(self):
        head = self.create()
        weight = head.read_weight()
        hidden, labels = self.data(9)
        classes = torch.rand(101) + 0.5
        recipe = lmhead.Recipe(class_weights=tuple(classes.tolist()), label_smoothing=0.1)
        self.assertNear(head.loss(hidden, labels, reduction="mean", recipe=recipe),
                        dense(hidden, weight, labels, weight=classes, label_smoothing=0.1), LOSS_BOUND)
        self.assertNear(head.loss(hidden, labels, reduction="mean", num_items=40),
                        dense(hidden, weight, labels, reduction="sum") / 40, LOSS_BOUND)
        for weights in (classes, classes.tolist()):
            self.assertEqual(lmhead.Recipe(class_weights=weights), lmhead.Recipe(class_weights=tuple(classes.tolist())))
        with self.assertRaisesRegex(lmhead.InvalidArgument, "is 101, wanted 0 to 100"):
            head.loss(hidden, torch.full_like(labels, 101), reduction="mean", recipe=recipe)
        ignored = torch.full_like(labels, -100)
        loss = head.loss(hidden, ignored, reduction="mean")
        self.assertEqual(float(loss), 0.0)
        self.assertEqual(float(torch.autograd.grad(loss, hidden)[0].abs().max()), 0.0)

    def test_token_weights_temperature_and_grad_scale(self):
        head = self.create()
        hidden, labels = self.data(8)
        weights, temperatures = torch.rand(8), torch.rand(8) + 0.5
        loss = head.loss(hidden, labels, token_weights=weights, token_temperature=temperatures, grad_scale=0.25)
        logits = hidden @ head.read_weight().T / temperatures[:, None]
        want = 0.25 * (F.cross_entropy(logits, labels, reduction="none") * weights).sum()
        self.assertNear(loss, want, LOSS_BOUND)
        self.assertNear(torch.autograd.grad(loss, hidden)[0], torch.autograd.grad(want, hidden)[0], 2e-6)

    def test_gradcheck(self):
        head = self.create(vocab_size=11, hidden_size=5)
        labels = torch.tensor([3, -100, 7])
        hidden = torch.randn(3, 5, requires_grad=True)
        with mock.patch("warnings.warn"):  # It would rather have double precision than float32.
            self.assertTrue(torch.autograd.gradcheck(lambda h: head.loss(h, labels), (hidden,), eps=1e-2, atol=1e-3,
                                                     rtol=1e-2))
            self.assertTrue(torch.autograd.gradcheck(lambda h: head.loss(h, labels, reduction="none"), (hidden,),
                                                     eps=1e-2, atol=1e-3, rtol=1e-2))

    def test_a_later_factor_reaches_the_head_too(self):
        head = self.create(optimizer=lmhead.SGD())
        weight = head.read_weight().requires_grad_()
        hidden, labels = self.data(6)
        (dense(hidden, weight, labels, reduction="sum") / 4).backward()
        want_hidden, hidden.grad = hidden.grad, None
        with head.step() as step:
            (step.loss(hidden, labels) / 4).backward()
            report = step.prepare()
            step.commit(learning_rate=0.5, grad_multiplier=1.0)
        self.assertNear(hidden.grad, want_hidden, 2e-6)
        self.assertAlmostEqual(report.grad_norm, float(weight.grad.norm()), delta=1e-5)
        self.assertNear(head.read_weight(), weight - 0.5 * weight.grad, 1e-6)

    def test_a_loss_scale_that_was_taken_out_of_the_trunk_is_taken_out_of_the_head(self):
        """As with a GradScaler: scale, backward, unscale_, clip, step."""
        runs = []
        for scale in (1.0, 1024.0):
            torch.manual_seed(1)
            head = self.create(optimizer=lmhead.SGD())
            hidden, labels = self.data(6)
            with head.step(1) as step:
                (step.loss(hidden, labels) * scale).backward()
                hidden.grad /= scale
                report = step.prepare(loss_scale=scale)
                clipped = lmhead.clip_grad_norm([hidden], report, max_norm=0.01)
                step.commit(torch.tensor(0.5), torch.tensor(clipped.grad_multiplier, dtype=torch.float64))
            runs.append((torch.tensor(clipped.grad_norm), hidden.grad, head.read_weight()))
        for want, got in zip(*runs):
            self.assertNear(got, want, 1e-6)
        with self.assertRaisesRegex(ValueError, "loss_scale is 0.0"):
            with head.step(2) as step:
                step.prepare(loss_scale=0.0)
        with self.assertRaisesRegex(ValueError, "want finite numbers: abort"):
            with head.step(2) as step:
                step.commit(float("nan"))

    def test_factors_that_differ_are_refused_before_anything_is_applied(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(6)
        before = head.read_weight()
        with self.assertRaisesRegex(ValueError, "grad_scale="):
            with head.step(1) as step:
                step.loss(hidden, labels).backward()
                (2 * step.loss(hidden, labels)).backward()
                step.prepare()
        with self.assertRaisesRegex(ValueError, "token_weights"):
            with head.step(1) as step:
                (step.loss(hidden, labels, reduction="none") * torch.arange(6)).sum().backward()
                step.prepare()
        self.assertTrue(torch.equal(head.read_weight(), before))

    def test_a_factor_on_ignored_tokens_does_not_matter(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(6)
        with head.step(1) as step:
            (step.loss(hidden, labels, reduction="none") * (labels != -100)).sum().backward()
            step.commit(0.1)

    def test_double_backward_is_refused(self):
        head = self.create()
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(RuntimeError, "cannot be differentiated twice"):
            torch.autograd.grad(head.loss(hidden, labels), hidden, create_graph=True)

    def test_a_second_backward_pass_is_refused_for_a_trainable_head(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(RuntimeError, "ran through this loss before"):
            with head.step(1) as step:
                loss = step.loss(hidden, labels)
                loss.backward(retain_graph=True)
                loss.backward()

    def test_a_loss_without_backward_is_refused(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(ValueError, "backward\\(\\) did not run"):
            with head.step(1) as step:
                step.loss(hidden, labels)
                step.prepare()

    def test_evaluation_leaves_the_step_alone(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        with head.step(1) as step:
            with torch.no_grad():
                value = step.loss(hidden, labels)
            self.assertFalse(value.requires_grad)
            loss = step.loss(hidden, labels)
            loss.backward()
            self.assertEqual(step.prepare().num_rows, 4)
            step.commit(0.0)
        self.assertNear(value, loss, 1e-7)

    def test_a_head_alone_trains_on_hidden_states_without_gradients(self):
        head = self.create(optimizer=lmhead.SGD())
        weight = head.read_weight().requires_grad_()
        hidden, labels = self.data(4)
        hidden = hidden.detach()
        dense(hidden, weight, labels).backward()
        with head.step(1) as step:
            step.loss(hidden, labels, reduction="mean").backward()
            step.commit(1.0)
        self.assertNear(head.read_weight(), weight - weight.grad, 1e-6)

    def test_futures_give_what_calls_give(self):
        head = self.create(optimizer=lmhead.SGD())
        batches = [self.data(5) for _ in range(6)]
        with head.step(1) as step:
            futures = [step.loss_async(hidden, labels) for hidden, labels in batches]
            for future, (hidden, labels) in zip(futures, batches):
                future.result().backward()
                self.assertIs(future.result(), future.result())
                self.assertEqual(future.sums["num_valid_tokens"], 4)
                self.assertNear(future.result(), head.loss(hidden.detach(), labels), 1e-6)
            self.assertEqual(step.prepare().num_tokens, 24)
            step.commit(0.0)

    def test_logprobs_entropy_and_argmax(self):
        head = self.create()
        hidden, labels = self.data(2, 5)
        logits = hidden @ head.read_weight().T / 0.7
        want = logits.log_softmax(-1)
        valid = labels != -100
        logprob, entropy = head.logprobs(hidden, labels, entropy=True, temperature=0.7)
        self.assertFalse(logprob.requires_grad)
        self.assertNear(logprob, want.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid, 1e-6)
        self.assertNear(entropy[valid], -(want.exp() * want).sum(-1)[valid], 1e-5)
        found = head.outputs(hidden, labels, ("argmax", "lse", "token_loss"))
        self.assertTrue(torch.equal(found["argmax"][valid].long(), logits.argmax(-1)[valid]))

    def test_bad_tensors_are_named_and_nothing_is_sent(self):
        head = self.create()
        hidden, labels = self.data(4)
        for pattern, call in {
            "hidden is torch.float64": lambda: head.loss(hidden.double(), labels),
            "hidden has 23 columns": lambda: head.loss(hidden[:, 1:], labels),
            "labels has shape \\(3,\\)": lambda: head.loss(hidden, labels[1:]),
            "labels is torch.float32": lambda: head.loss(hidden, labels.float()),
            "token_weights has shape": lambda: head.loss(hidden, labels, token_weights=torch.ones(2)),
            "at least one token": lambda: head.loss(hidden[:0], labels[:0]),
            "reduction is 'avg'": lambda: head.loss(hidden, labels, reduction="avg"),
            "32 bits": lambda: head.loss(hidden, labels + 2 ** 32),
            "hidden has shape \\(\\)": lambda: head.loss(hidden.sum(), labels),
            "torch.sparse_coo on cpu, want a dense": lambda: head.loss(hidden.detach().to_sparse(), labels),
            "on meta, want a dense": lambda: head.loss(hidden.detach().to("meta"), labels),
            "num_items is 7 and reduction is 'sum'": lambda: head.loss(hidden, labels, num_items=7),
            "num_items is nan": lambda: head.loss(hidden, labels, reduction="mean", num_items=float("nan")),
            "num_items is 0, and 3 tokens": lambda: head.loss(hidden, labels, reduction="mean", num_items=0),
            "k is 0": lambda: head.topk(hidden, 0),
        }.items():
            with self.subTest(pattern=pattern), self.assertRaisesRegex(ValueError, pattern):
                call()
        for pattern, call in {
            "advantages": lambda: head.loss(hidden, labels, advantages=torch.ones(4)),
            "beside recipe, shift, reduction": lambda: head.loss(hidden, labels, reducton="mean"),
            "labels is a list": lambda: head.loss(hidden, labels.tolist()),
            "hidden is a list": lambda: head.loss(hidden.tolist(), labels),
            "advantage is a float": lambda: head.loss(hidden, labels, advantage=0.5),
            "recipe is a dict": lambda: head.loss(hidden, labels, recipe={}),
            "policy is a str, want lmhead.ClippedPolicy or": lambda: lmhead.Recipe(policy="clipped"),
            "distillation is a str": lambda: lmhead.Recipe(distillation="teacher"),
            "optimizer is 'adamw'": lambda: self.create(optimizer="adamw"),
        }.items():
            with self.subTest(pattern=pattern), self.assertRaisesRegex(TypeError, pattern):
                call()
        self.assertEqual(float(head.loss(hidden, torch.full_like(labels, -100), reduction="mean", num_items=0)), 0.0)


class ErrorTest(ServiceTest):
    def test_exceptions_keep_the_code_and_the_message(self):
        head = self.create()
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "101") as caught:
            head.loss(hidden, torch.full_like(labels, 101))
        self.assertEqual((caught.exception.code, caught.exception.code_name), (3, "INVALID_ARGUMENT"))
        with self.assertRaisesRegex(lmhead.NotFound, "nobody"):
            lmhead.RemoteHead(self.client, "nobody")
        with self.assertRaises(lmhead.AlreadyExists):
            lmhead.RemoteHead.create(self.client, head.name, vocab_size=7, hidden_size=24, init_std=0.1)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "no_such_field"):
            self.client.call("GetHead", no_such_field=1)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "BeginStep"):
            self.client.call("NoSuchCall")
        with self.assertRaises(lmhead.ResourceExhausted):
            self.create(vocab_size=1 << 24, hidden_size=1 << 14)

    def test_errors_survive_pickling(self):
        import pickle
        error = lmhead.StepLost("gone", 14)
        error.restarted = True
        copy = pickle.loads(pickle.dumps(error))
        self.assertEqual((type(copy), copy.code, copy.message, copy.restarted), (lmhead.StepLost, 14, "gone", True))

    def test_what_is_closed_not_open_or_elsewhere_says_so(self):
        import copy
        import pickle
        own = lmhead.RemoteHead(self.service.address, self.create(optimizer=lmhead.SGD()).name)
        hidden, labels = self.data(4)
        for take in (pickle.dumps, copy.deepcopy):
            with self.assertRaisesRegex(TypeError, "neither pickled nor copied.*RemoteHead\\(address, name\\)"):
                take(own)
        with self.assertRaisesRegex(RuntimeError, "is not open, want it within `with head.step"):
            own.step(1).loss(hidden, labels)
        own.close()
        with self.assertRaisesRegex(RuntimeError, "the connection is closed"):
            own.info()

    def test_a_forked_process_is_told_instead_of_hanging(self):
        head = self.create()
        hidden, labels = self.data(4)
        for call in (head.info, lambda: lmhead.Client(self.service.address)):
            reader, writer = os.pipe()
            child = os.fork()
            if child == 0:
                try:
                    call()
                except BaseException as error:
                    os.write(writer, f"{type(error).__name__}: {error}".encode())
                os._exit(0)
            os.close(writer)
            with os.fdopen(reader) as said:
                self.assertRegex(said.read(), "RuntimeError: .*spawn")
            self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertFalse(head.loss(hidden.detach(), labels).requires_grad)  # The parent goes on.

    def test_a_program_may_end_with_everything_open(self):
        code = ("import sys, lmhead, torch; head = lmhead.RemoteHead(sys.argv[1], sys.argv[2]); step = head.step(1).__enter__(); "
                "step.loss(torch.zeros(2, 24), torch.zeros(2, dtype=torch.int64)).backward(); sys.modules['kept'] = [head, step]")
        head = self.create(optimizer=lmhead.SGD())
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", code, self.service.address, head.name], timeout=60,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, ""))

    def test_ctrl_c_ends_a_wait_for_a_service_that_hangs(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)

        def interrupt_soon():
            self.service.pause()
            self.addCleanup(self.service.go_on)
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

        with head.step(1) as step:
            step.loss(hidden, labels).backward()
            interrupt_soon()
            resumed = threading.Timer(30, self.service.go_on)
            resumed.start()
            with self.assertRaises(KeyboardInterrupt):
                step.loss(hidden, labels)
            interrupt_soon()
            with self.assertRaises(KeyboardInterrupt):
                head.info()
            self.assertTrue(resumed.is_alive())
            resumed.cancel()
            self.service.go_on()
            step.abort()
        with head.step(1) as step:  # Both go on.
            step.loss(hidden, labels).backward()
            step.commit(0.1)

    def test_nobody_there(self):
        with self.assertRaises(lmhead.Unavailable):
            lmhead.Client("unix:/no/such/socket", connect_timeout=0.2, max_attempts=1)

    def test_misspelt_arguments_make_no_head(self):
        for address in (self.client, self.service.address):
            with self.assertRaisesRegex(TypeError, r"\['optimiser'\] are unknown"):
                lmhead.RemoteHead.create(address, "misspelt", vocab_size=7, hidden_size=5, optimiser=lmhead.SGD())
        with self.assertRaisesRegex(ValueError, "want torch.float32 or torch.bfloat16"):
            lmhead.RemoteHead.create(self.client, "misspelt", vocab_size=7, hidden_size=5, weight_dtype=torch.float64)
        with self.assertRaises(lmhead.NotFound):
            lmhead.RemoteHead(self.client, "misspelt")
        with self.assertRaisesRegex(TypeError, "call_timeout"):
            lmhead.RemoteHead(self.client, "misspelt", call_timeout=1.0)
        head = lmhead.RemoteHead.create(self.service.address, "spelt", vocab_size=7, hidden_size=5, call_timeout=9.0,
                                        chunk_tokens=3)
        with self.assertRaisesRegex(ValueError, r"rows \[3, 9\) of weight are wanted, head spelt has 7"):
            head.read_weight(3, 6)

    def test_a_trainable_head_wants_a_step(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(RuntimeError, "is trainable"):
            head.loss(hidden, labels)
        self.assertTrue(head.loss(hidden, labels, frozen=True).requires_grad)

    def test_leaving_without_a_commit_aborts(self):
        head = self.create(optimizer=lmhead.SGD())
        with self.assertRaisesRegex(RuntimeError, "neither committed nor aborted"):
            with head.step(1):
                pass
        with self.assertRaises(ZeroDivisionError):
            with head.step(1):
                1 / 0
        self.assertEqual(head.info().open_step, 0)
        with head.step(1) as step:
            step.abort()
            with self.assertRaisesRegex(RuntimeError, "is aborted"):
                step.prepare()

    def test_a_step_that_another_aborted_is_lost(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        with self.assertRaisesRegex(lmhead.StepLost, "aborted") as caught:
            with head.step(1) as step:
                step.loss(hidden, labels).backward()
                self.client.call("AbortStep", head=head.name, step="1", incarnation=str(step.incarnation), reason="test")
                step.prepare()
        self.assertIs(caught.exception.restarted, False)

    def test_rows_that_are_not_finite_are_refused_unless_told(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        broken = hidden.detach().clone()
        broken[2, 3] = float("nan")
        with self.assertRaisesRegex(lmhead.FailedPrecondition, "NaN|finite"):
            with head.step(1) as step:
                step.loss(broken.requires_grad_(), labels).backward()
                self.assertEqual(step.prepare().num_nonfinite_rows, 1)
                step.commit(0.1)
        with head.step(1) as step:
            step.loss(broken.requires_grad_(), labels).backward()
            step.commit(0.1, allow_nonfinite_rows=True)

    def test_recipes_of_a_step_are_announced(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4)
        smooth = lmhead.Recipe(label_smoothing=0.1)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "num_recipes"):
            with head.step(1) as step:
                step.loss(hidden, labels).backward()
                step.loss(hidden, labels, recipe=smooth)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "first: dtype was torch.float32 and is torch.bfloat16. A step"):
            with head.step(1) as step:
                step.loss(hidden, labels).backward()
                step.loss(hidden.bfloat16(), labels)
        with head.step(1, num_recipes=3) as step:
            step.loss(hidden, labels).backward()
            step.loss(hidden, labels, recipe=smooth).backward()
            self.assertEqual(step.prepare().num_rows, 8)
            step.commit(0.1)


if __name__ == "__main__":
    unittest.main()
