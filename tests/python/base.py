"""What the tests share: one service a class, and comparison by stated bounds."""

import itertools
import unittest

import torch

import lmhead
from service import Service

_names = (f"lm{i}" for i in itertools.count())


def relative_error(got, want):
    """||got - want|| / ||want|| in double precision."""
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


class ServiceTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.service = Service()
        cls.addClassCleanup(cls.service.close)
        cls.client = lmhead.Client(cls.service.address, connect_timeout=5.0)

    def setUp(self):
        torch.manual_seed(1)

    def create(self, vocab_size=101, hidden_size=24, **options):
        options.setdefault("init_std", 0.3)
        return lmhead.RemoteHead.create(self.client, next(_names), vocab_size=vocab_size, hidden_size=hidden_size,
                                        **options)

    def data(self, *leading, vocab_size=101, hidden_size=24, dtype=torch.float32):
        hidden = torch.randn(*leading, hidden_size).to(dtype).requires_grad_()
        labels = torch.randint(0, vocab_size, leading)
        labels.reshape(-1)[1] = -100
        return hidden, labels

    def assertNear(self, got, want, bound):
        self.assertEqual(tuple(got.shape), tuple(want.shape))
        self.assertLessEqual(relative_error(got.detach(), want.detach()), bound)
