"""Tensors of a CUDA device: the same numbers as on the CPU, and no wait for the device on the caller's thread."""

import unittest

import torch

import lmhead
from base import ServiceTest


@unittest.skipUnless(torch.cuda.is_available(), "there is no CUDA device")
class CudaTest(ServiceTest):
    def test_losses_and_gradients_equal_those_of_the_cpu(self):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for reduction in ("sum", "mean", "none"):
                with self.subTest(dtype=dtype, reduction=reduction):
                    head = self.create(optimizer=lmhead.SGD())
                    hidden, labels = self.data(3, 50, dtype=dtype)
                    there = hidden.detach().cuda().requires_grad_()
                    values = []
                    for number, (h, t) in enumerate([(hidden, labels), (there, labels.cuda())], 1):
                        with head.step(number) as step:
                            loss = step.loss(h, t, shift=True, reduction=reduction)
                            (loss.sum() / 2).backward()
                            step.abort()
                        self.assertEqual(loss.device, h.device)
                        values.append(loss.cpu())
                    self.assertTrue(torch.equal(*values))
                    self.assertTrue(torch.equal(there.grad.cpu(), hidden.grad))

    def test_the_callers_thread_does_not_wait_for_the_device(self):
        head = self.create(optimizer=lmhead.SGD())
        hidden, labels = self.data(4, 100)
        hidden, labels = hidden.detach().cuda().requires_grad_(), labels.cuda()
        with head.step(1) as step:
            torch.cuda.synchronize()
            torch.cuda.set_sync_debug_mode("error")
            self.addCleanup(torch.cuda.set_sync_debug_mode, "default")
            futures = [step.loss_async(hidden * (1 + i), labels, reduction="mean") for i in range(4)]
            for future in futures:
                (future.result() / 4).backward()
            torch.cuda.set_sync_debug_mode("default")
            self.assertEqual(step.prepare().num_tokens, 4 * 399)
            step.commit(0.1)

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
                total = grad.sum()
            want = head.loss(torch.ones(64, 24), labels.cpu())
            self.assertAlmostEqual(float(loss), float(want), delta=1e-4)
            self.assertTrue(bool(torch.isfinite(total)))


if __name__ == "__main__":
    unittest.main()
