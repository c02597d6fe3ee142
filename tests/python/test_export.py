"""The whole round: a saved model's head into the service, trained there, exported, and loaded by transformers."""

import json
import os
import pathlib
import subprocess
import tempfile

import torch
import transformers

import lmhead
from base import ServiceTest
from models import VOCAB_SIZE, batch, gpt2, llama

LEARNING_RATE = 0.3
NUM_STEPS = 4
# The service's loss against the loaded model's own: float32 sums in another order; of bfloat16 the last trunk's outputs
# are the same bits on both sides, and only torch rounds its logits.
LOSS_BOUND = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


class ExportTest(ServiceTest):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def lmhead(self, *words):
        done = subprocess.run([os.environ["LMHEAD_BINARY"], *map(str, words), f"--address={self.service.address}"],
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60)
        self.assertEqual(done.returncode, 0, done.stdout)
        return done.stdout

    def train(self, model, head):
        """The trunk with its head in the service; gives the last trunk's loss by the service."""
        patched = lmhead.patch(model, head, load_weights=False)
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        patched.attach(optimizer, max_grad_norm=1.0)
        model.train()
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            model(**batch(4 * number)).loss.backward()
            optimizer.step()
        with torch.no_grad():
            loss = model.eval()(**batch(0)).loss
        return patched, loss

    def check(self, model, name, trained=None, **save_options):
        """`trained` saves the trunk for the export; without it the exported trunk is the one that was imported."""
        dtype = model.dtype
        base, tuned = self.folder / f"{name}-base", self.folder / f"{name}-tuned"
        model.save_pretrained(base, safe_serialization=True, **save_options)
        self.lmhead("import", base, f"--head={name}",
                    '--spec={"trainable":true,"optimizer":{"kind":"OPTIMIZER_KIND_SGD"}}')
        head = lmhead.RemoteHead(self.client, name)
        self.assertTrue(torch.equal(head.read_weight().to(dtype), model.get_output_embeddings().weight.detach()))
        before = head.read_weight()
        patched, loss = self.train(model, head)
        self.assertFalse(torch.equal(head.read_weight(), before))
        # The trained trunk, with the head still as it was before: what the export replaces.
        trunk = self.folder / f"{name}-trunk"
        patched.restore()
        with torch.no_grad():
            model.get_output_embeddings().weight.copy_(before)
        model.save_pretrained(trunk, safe_serialization=True, **save_options)

        self.lmhead("export", tuned, f"--from={trunk}", f"--head={name}")
        loaded, report = type(model).from_pretrained(tuned, torch_dtype=dtype, output_loading_info=True)
        self.assertEqual([list(report[kind]) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")],
                         [[], [], []])
        rows = head.read_weight().to(dtype)
        self.assertTrue(torch.equal(loaded.get_output_embeddings().weight.detach(), rows))
        tied = loaded.config.tie_word_embeddings
        self.assertEqual(torch.equal(loaded.get_input_embeddings().weight.detach(), rows), tied)
        with torch.no_grad():
            self.assertNear(loaded.eval()(**batch(0)).loss, loss, LOSS_BOUND[dtype])
        return tuned

    def test_a_head_of_its_own(self):
        self.check(llama(), "own")

    def test_a_tied_embedding(self):
        self.check(gpt2(), "tied")
        self.check(llama(tie_word_embeddings=True), "tied-llama")

    def test_bfloat16(self):
        self.check(llama().to(torch.bfloat16), "bfloat16")

    def test_several_files(self):
        folder = self.check(llama(), "files", max_shard_size="8KB")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        self.assertGreater(len(set(index["weight_map"].values())), 1)
        self.assertEqual(len(index["weight_map"]), len(set(index["weight_map"])))
