"""Tensors of a device: the numbers of CPU tensors, bit by bit, and no wait for the device on the caller's thread.

The same tests run for the CPU and, where there is one, for a CUDA device.
"""

import contextlib
import importlib.util
import math
import unittest

import torch

import lmhead
from base import ServiceTest

TEACHER_SIZE = 40


class DeviceTests:
    """Tests of tensors on ``device``; the service computes on its own."""

    device: str

    def no_wait(self):
        """Within it a wait of the caller's thread for the device is an error."""
        return contextlib.nullcontext()

    def both(self, *tensors):
        """The tensors as they are, and copies on the device: leaves that want gradients where the first do."""
        there = [tensor.detach().clone().to(self.device).requires_grad_(tensor.requires_grad) for tensor in tensors]
        return [tensors, there]

    def assertBitwise(self, got, want):
        self.assertEqual(got.device.type, self.device)
        self.assertEqual(got.dtype, want.dtype)
        self.assertTrue(torch.equal(got.detach().cpu(), want.detach().cpu()))

    def test_losses_and_gradients(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for reduction in ("sum", "mean", "none"):
                with self.subTest(dtype=dtype, reduction=reduction):
                    head = self.create(optimizer=lmhead.SGD())
                    hidden, labels = self.data(3, 50, dtype=dtype)
                    weights = torch.rand(3, 50)
                    values = []
                    sides = self.both(hidden, labels, weights)
                    for number, (h, t, w) in enumerate(sides, 1):
                        with head.step(number) as step:
                            loss = step.loss(h, t, shift=True, reduction=reduction, token_weights=w)
                            (loss.sum() / 2).backward()
                            step.abort()
                        values.append(loss)
                    self.assertBitwise(values[1], values[0])
                    self.assertBitwise(sides[1][0].grad, hidden.grad)

    def test_futures_of_a_step_whose_thread_does_not_wait(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.both(*self.data(4, 100))[1]
        with head.step(1) as step:
            with self.no_wait():
                futures = [step.loss_async(hidden * (1 + i), labels, reduction="mean") for i in range(4)]
                for future in futures:
                    (future.result() / 4).backward()
            self.assertEqual(step.prepare().num_tokens, 4 * 399)
            step.commit(0.1)

    def test_labels_and_weights_that_stayed_on_the_host(self):
        head = self.create()
        hidden, labels = self.data(9)
        weights = torch.rand(9)
        there = self.both(hidden)[1][0]
        losses = [head.loss(h, labels, reduction="none", token_weights=weights) for h in (hidden, there)]
        self.assertBitwise(losses[1], losses[0])
        grads = [torch.autograd.grad(loss.sum(), h)[0] for loss, h in zip(losses, (hidden, there))]
        self.assertBitwise(grads[1], grads[0])

    def test_outputs(self):
        head = self.create(spec={"top_k_max": 4})
        (hidden, labels), (there, labels_there) = self.both(*self.data(2, 5))
        for got, want in zip(head.logprobs(there, labels_there, entropy=True), head.logprobs(hidden, labels, entropy=True)):
            self.assertBitwise(got, want)
        for got, want in zip(head.topk(there, 4), head.topk(hidden, 4)):
            self.assertBitwise(got, want)

    def test_weights(self):
        head = self.create(optimizer=lmhead.SGD(), init_std=None)
        weight = torch.randn(101, 24)
        head.load_weight(weight.to(self.device))
        self.assertTrue(torch.equal(head.read_weight(), weight))
        rows, ids = self.both(torch.randn(2, 24), torch.tensor([7, 3]))[1]
        with head.step(1) as step:
            step.accumulate_weight_gradient(rows, ids)
            self.assertTrue(torch.equal(head.read_grad_weight()[[7, 3]], rows.cpu()))
            step.abort()

    def test_teachers(self):
        teacher = self.create(hidden_size=TEACHER_SIZE)
        student = self.create(optimizer=lmhead.SGD(), spec={"teacher_hidden_size": str(TEACHER_SIZE)}, chunk_tokens=3)
        hidden, labels = self.data(7)
        here, there = self.both(hidden, labels, torch.randn(7, TEACHER_SIZE).bfloat16())
        distillation = lmhead.Distillation(teacher.name)
        losses = []
        for number, (h, t, q) in enumerate((here, there), 1):
            with student.step(number) as step:
                losses.append(step.loss(h, t, recipe=lmhead.Recipe(distillation=distillation), teacher_hidden=q))
                losses[-1].backward()
                step.abort()
        self.assertBitwise(losses[1], losses[0])
        self.assertBitwise(there[0].grad, hidden.grad)

        paired = lmhead.Recipe(distillation=lmhead.Distillation(teacher.name, paired_stream=torch.bfloat16))
        with torch.no_grad(), student.evaluation("pair") as evaluation:
            future = evaluation.loss_async(there[0], there[1], recipe=paired)
            with student.teacher_stream(None, paired, worker="pair") as stream:
                stream.send(there[2])
                self.assertBitwise(future.result(), losses[0])

    def test_objectives_in_pytorch(self):
        head = self.create(optimizer=lmhead.SGD())
        sides = self.both(*self.data(2, 9), torch.rand(2, 9))
        values = []
        for number, (hidden, labels, factors) in enumerate(sides, 1):
            with head.step(number) as step:
                found = step.logprobs(hidden, labels)
                ((found.logprob * factors).sum() + found.entropy.mean()).backward()
                step.abort()
            values.append(found)
        for got, want in zip(values[1], values[0]):
            self.assertBitwise(got, want)
        self.assertNear(sides[1][0].grad.cpu(), sides[0][0].grad, 1e-6)

    @unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
    def test_patched_models(self):
        from models import batch, gpt2, llama
        for make in (llama, gpt2):
            with self.subTest(make.__name__):
                runs = []
                for device in ("cpu", self.device):
                    model = make().to(device)
                    head = self.create(**lmhead.head_arguments(model), optimizer=lmhead.SGD(), init_std=None)
                    patched = lmhead.patch(model, head)
                    optimizer = torch.optim.SGD(model.parameters(), 0.3)
                    patched.attach(optimizer, max_grad_norm=1.0)
                    for number in range(3):
                        optimizer.zero_grad()
                        loss = model(**{key: tensor.to(device) for key, tensor in batch(4 * number).items()}).loss
                        loss.backward()
                        optimizer.step()
                    self.assertEqual(loss.device.type, device)
                    restored = patched.restore().get_output_embeddings().weight
                    self.assertEqual(restored.device.type, device)
                    runs.append((loss.detach().cpu(), restored.detach().cpu()))
                for got, want in zip(*runs):  # The trunk's own kernels differ between devices.
                    self.assertNear(got, want, 1e-4)


class CpuTest(DeviceTests, ServiceTest):
    device = "cpu"


@unittest.skipUnless(torch.cuda.is_available(), "there is no CUDA device")
class CudaTest(DeviceTests, ServiceTest):
    device = "cuda"

    @contextlib.contextmanager
    def no_wait(self):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_work_of_the_current_stream_is_waited_for(self):
        head = self.create()
        labels = torch.zeros(64, dtype=torch.int64, device="cuda")
        stream = torch.cuda.Stream()
        for _ in range(20):
            with torch.cuda.stream(stream):
                hidden = torch.zeros(64, 24, device="cuda")
                torch.cuda._sleep(2_000_000)
                hidden += 1
                loss = head.loss(hidden.requires_grad_(), labels)
                grad, = torch.autograd.grad(loss, hidden)
                value, total = float(loss), float(grad.sum())
            want = head.loss(torch.ones(64, 24), labels.cpu())
            self.assertAlmostEqual(value, float(want), delta=1e-4)
            self.assertTrue(math.isfinite(total))


if __name__ == "__main__":
    unittest.main()
