"""Two torch.distributed ranks, each a worker, train as one process with both their batches does."""

import copy
import datetime
import os
import pathlib
import tempfile
import threading
import time
import unittest

import torch
import torch.multiprocessing

import lmhead
import models
import trunk
from base import ServiceTest, relative_error

NUM_STEPS = 8
LEARNING_RATE = 0.3


def join_group(rank, size, store):
    """Ranks that do not make the same calls fail, rather than wait for ever."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size,
                                         timeout=datetime.timedelta(seconds=120))


def run_rank(rank, size, address, head_name, store, results, broken_step):
    """One rank's training; at broken_step rank 1 breaks off, once."""
    torch.set_num_threads(1)
    join_group(rank, size, store)
    workers = lmhead.distributed_workers()
    head = lmhead.RemoteHead(address, head_name)
    model = trunk.make_trunk()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    losses, attempts = [], 0
    broken = [broken_step]

    def body(step):
        nonlocal attempts
        attempts += 1
        optimizer.zero_grad()
        ids, labels = trunk.batch(step.number, rank)
        step.loss(model(ids), labels, shift=True).backward()
        if rank == 1 and step.number == broken[0]:
            broken[0] = 0
            raise lmhead.StepLost("as if this rank's connection had gone")
        report = step.prepare()
        lmhead.average_gradients(model.parameters())
        clipped = lmhead.clip_grad_norm(model.parameters(), report, 1.0, averaged_over=size)
        # Only the first rank's count: the others' would be refused if they did.
        committed = step.commit(LEARNING_RATE if rank == 0 else -1.0, clipped.grad_multiplier)
        return report, clipped, committed

    for number in range(1, NUM_STEPS + 1):
        report, clipped, committed = lmhead.elastic_step(head, number, body, workers=workers)
        optimizer.step()
        losses.append((report.loss_mean, report.num_tokens, clipped.grad_norm, committed.num_updates))
    torch.save({"losses": losses, "attempts": attempts, "model": model.state_dict()}, f"{results}.{rank}")
    torch.distributed.destroy_process_group()


def continued(model, rank):
    """Greedily; of each rank another prompt."""
    ids = models.batch(rank, 2)["input_ids"][:, :4]
    return model.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=6, min_new_tokens=6, do_sample=False,
                                 pad_token_id=0)


def run_patched_rank(rank, size, address, head_name, store, results):
    """A patched model with its embedding tied or not; from step 3 once more from what was saved there."""
    torch.set_num_threads(1)
    join_group(rank, size, store)
    client = lmhead.Client(address)
    found = {}
    for make in (models.llama, models.gpt2):
        model = make().train()
        head = lmhead.RemoteHead.create(client, f"{head_name}-{make.__name__}", **lmhead.head_arguments(model),
                                        optimizer=lmhead.SGD(momentum=0.9))
        patched = lmhead.patch(model, head, workers=lmhead.distributed_workers(), averaged_over=size, generate=True)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for position, number in enumerate((1, 2, 3, 4, 3, 4)):
            if position == 4:  # Not by what the service says: the other rank may have brought it back already.
                model.load_state_dict(saved[0])
                optimizer.load_state_dict(saved[1])
                patched.resume(2)
            optimizer.zero_grad()
            model(**models.batch(4 * number + 2 * rank, 2)).loss.backward()
            lmhead.average_gradients(model.parameters())
            patched.commit(0.1, 1.0)
            optimizer.step()
            if rank == 1 and number == 2:  # One rank alone reads the head's rows.
                continued(model, rank)
                model.train()
            if number == 2:
                patched.save(2)
                saved = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
        found[make.__name__] = model.state_dict()
        found[f"{make.__name__} continued"] = continued(model, rank)
    torch.save(found, f"{results}.{rank}")


def run_rank_through_restarts(rank, size, address, head_name, store, results):
    """Asks for the service to be killed within step 3 and after step 5."""
    join_group(rank, size, store)
    workers = lmhead.distributed_workers()
    head = lmhead.RemoteHead(address, head_name)
    model = trunk.make_trunk()
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    asked = pathlib.Path(f"{results}.restart")
    pending = {3, 5} if rank == 0 else set()

    def restart(number):
        if number in pending:
            pending.remove(number)
            asked.touch()
            while asked.exists():
                time.sleep(0.01)

    def body(step):
        optimizer.zero_grad()
        ids, labels = trunk.batch(step.number, rank)
        step.loss(model(ids), labels, shift=True).backward()
        if step.number == 3:
            restart(3)
        report = step.prepare()
        lmhead.average_gradients(model.parameters())
        clipped = lmhead.clip_grad_norm(model.parameters(), report, 1.0, averaged_over=size)
        step.commit(LEARNING_RATE, clipped.grad_multiplier)

    for number in range(1, NUM_STEPS + 1):
        lmhead.elastic_step(head, number, body, workers=workers, on_restart=lmhead.RemoteHead.restore_checkpoint)
        optimizer.step()
        if rank == 0:
            head.save_checkpoint()
        if number == 5:
            restart(5)
    torch.save(model.state_dict(), f"{results}.{rank}")


def run_failing_rank(rank, size, address, head_name, store, results):
    """Rank 1 has a bug in its step; both ranks learn of it."""
    join_group(rank, size, store)
    head = lmhead.RemoteHead(address, head_name)
    try:
        with head.step(1, lmhead.distributed_workers()) as step:
            if rank == 1:
                raise KeyError("a bug of rank 1")
            step.prepare()
    except Exception as error:
        with open(f"{results}.{rank}", "w") as file:
            file.write(repr(error))


class DistributedTest(ServiceTest):
    def spawn(self, function, head, *arguments, before=lambda results: None):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        results = os.path.join(folder.name, "results")
        before(results)
        torch.multiprocessing.spawn(
            function, (2, self.service.address, head.name, os.path.join(folder.name, "store"), results, *arguments), 2)
        return [f"{results}.{rank}" for rank in range(2)]

    def one_process(self):
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.SGD(), init_std=None)
        head.load_weight(trunk.make_weight())
        model = trunk.make_trunk()
        optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
        losses = []
        for number in range(1, NUM_STEPS + 1):
            optimizer.zero_grad()
            with head.step(number) as step:
                for rank in range(2):
                    ids, labels = trunk.batch(number, rank)
                    step.loss(model(ids), labels, shift=True).backward()
                report = step.prepare()
                clipped = lmhead.clip_grad_norm(model.parameters(), report, 1.0)
                step.commit(LEARNING_RATE, clipped.grad_multiplier)
            optimizer.step()
            losses.append((report.loss_mean, report.num_tokens, clipped.grad_norm, number))
        return head, model, losses

    def test_two_ranks_equal_one_process_and_repeat_a_lost_step_together(self):
        want_head, want_model, want_losses = self.one_process()
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.SGD(), init_std=None)
        head.load_weight(trunk.make_weight())
        ranks = [torch.load(path) for path in self.spawn(run_rank, head, 4)]
        self.assertEqual(ranks[0]["losses"], ranks[1]["losses"])  # The same report, norm and answer for both.
        self.assertEqual([rank["attempts"] for rank in ranks], [NUM_STEPS + 1, NUM_STEPS + 1])
        for got, want in zip(ranks[0]["losses"], want_losses):
            self.assertEqual((got[1], got[3]), (want[1], want[3]))
            self.assertAlmostEqual(got[0], want[0], delta=1e-5 * want[0])
            self.assertAlmostEqual(got[2], want[2], delta=1e-4 * want[2])
        self.assertLessEqual(relative_error(head.read_weight(), want_head.read_weight()), 1e-5)
        for key, want in want_model.state_dict().items():
            self.assertTrue(torch.equal(ranks[0]["model"][key], ranks[1]["model"][key]))
            self.assertLessEqual(relative_error(ranks[0]["model"][key], want), 1e-5)

    def test_a_patched_model_on_two_ranks_trains_generates_saves_and_resumes_as_in_one_process(self):
        ranks = [torch.load(path) for path in self.spawn(run_patched_rank, self.create())]
        for make in (models.llama, models.gpt2):
            model = make().train()
            optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
            for number in range(1, 5):
                optimizer.zero_grad()
                sum(model(**models.batch(4 * number + 2 * rank, 2)).loss / 2 for rank in range(2)).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            for name, want in model.state_dict().items():
                for rank in ranks:
                    self.assertLessEqual(relative_error(rank[make.__name__][name], want), 1e-5, name)
            for number, rank in enumerate(ranks):
                self.assertTrue(torch.equal(rank[f"{make.__name__} continued"], continued(model, number)))

    def test_a_service_that_dies_changes_nothing_for_two_ranks(self):
        want_head, want_model, _ = self.one_process()
        want_weight = want_head.read_weight()
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.SGD(), init_std=None)
        head.load_weight(trunk.make_weight())
        over = threading.Event()

        def restart_when_asked(results):
            asked = pathlib.Path(f"{results}.restart")
            while not over.wait(0.01):
                if asked.exists():
                    self.service.kill()
                    self.service.start()
                    asked.unlink()

        def watch(results):
            watcher = threading.Thread(target=restart_when_asked, args=(results,))
            watcher.start()
            self.addCleanup(watcher.join)
            self.addCleanup(over.set)

        ranks = [torch.load(path) for path in self.spawn(run_rank_through_restarts, head, before=watch)]
        self.assertEqual(head.info().last_committed_step, NUM_STEPS)
        self.assertLessEqual(relative_error(head.read_weight(), want_weight), 1e-5)
        for key, want in want_model.state_dict().items():
            self.assertTrue(torch.equal(ranks[0][key], ranks[1][key]))
            self.assertLessEqual(relative_error(ranks[0][key], want), 1e-5)

    def test_an_error_of_one_rank_is_an_error_of_all(self):
        head = self.create(trunk.VOCAB_SIZE, trunk.HIDDEN_SIZE, optimizer=lmhead.SGD())
        texts = [pathlib.Path(path).read_text() for path in self.spawn(run_failing_rank, head)]
        self.assertIn("RankFailed", texts[0])
        self.assertIn("a bug of rank 1", texts[0])
        self.assertIn("KeyError", texts[1])
        self.assertEqual(head.info().open_step, 0)


if __name__ == "__main__":
    unittest.main()
