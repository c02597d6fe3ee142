"""Distillation whose teacher runs in another program: a stream of its own, joined with the student's in the service."""

import threading
import unittest

import torch

import lmhead
from base import ServiceTest

TEACHER_SIZE = 40
CHUNK_TOKENS = 3
LOSS_BOUND = 5e-6
GRAD_BOUND = 1e-5


class PairedTest(ServiceTest):
    def setUp(self):
        super().setUp()
        self.teacher = self.create(hidden_size=TEACHER_SIZE)
        self.student = self.create(optimizer=lmhead.SGD(), spec={"teacher_hidden_size": str(TEACHER_SIZE)},
                                   chunk_tokens=CHUNK_TOKENS)

    def recipe(self, dtype):
        return lmhead.Recipe(distillation=lmhead.Distillation(self.teacher.name, cross_entropy_weight=0.3,
                                                              paired_stream=dtype))

    def in_another_program(self, action):
        """Runs `action(head)` beside the student, with a connection of its own; gives what joins and re-raises."""
        failures = []

        def run():
            try:
                with lmhead.RemoteHead(self.service.address, self.student.name, chunk_tokens=CHUNK_TOKENS) as head:
                    action(head)
            except Exception as error:
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()

        def join():
            thread.join(60)
            self.assertFalse(thread.is_alive(), "the teacher's side waits for ever")
            if failures:
                raise failures[0]
        return join

    def step(self, number, recipe, batches, send=None):
        """Losses and gradients of a step of several calls; `send` feeds the teacher's side."""
        losses, grads = [], []
        with self.student.step(number) as step:
            join = self.in_another_program(lambda head: send(head, step)) if send else lambda: None
            for hidden, labels, teacher_hidden in batches:
                local = hidden.detach().clone().requires_grad_()
                given = {} if send else {"teacher_hidden": teacher_hidden}
                loss = step.loss(local, labels, shift=True, recipe=recipe, **given)
                loss.backward()
                losses.append(loss.detach())
                grads.append(local.grad)
            report = step.prepare()
            join()
            grad_weight = self.student.read_grad_weight()
            step.abort()
        return torch.stack(losses), torch.stack(grads), grad_weight, report

    def test_a_teachers_stream_gives_what_teacher_hidden_gives(self):
        for dtype in (torch.float32, torch.bfloat16):
            with self.subTest(dtype=dtype):
                batches = [(*self.data(2, 5), torch.randn(2, 5, TEACHER_SIZE).to(dtype)) for _ in range(4)]
                recipe = self.recipe(dtype)

                def send(head, step):
                    with head.teacher_stream(step.number, recipe, incarnation=step.incarnation) as stream:
                        for _, _, teacher_hidden in batches:
                            stream.send(teacher_hidden)

                want = self.step(1, self.recipe(None), batches)
                got = self.step(2, recipe, batches, send)
                self.assertNear(got[0], want[0], LOSS_BOUND)
                self.assertNear(got[1], want[1], GRAD_BOUND)
                self.assertNear(got[2], want[2], GRAD_BOUND)
                self.assertEqual(got[3].num_tokens, want[3].num_tokens)

    def evaluate(self, recipe, batches, worker="", **options):
        """Losses of one evaluation and gradients of the hidden states, one a batch."""
        losses, grads = [], []
        paired = recipe.distillation.paired_stream is not None
        with self.student.evaluation(worker) as evaluation:
            for hidden, labels, teacher_hidden in batches:
                local = hidden.detach().clone().requires_grad_()
                given = {} if paired else {"teacher_hidden": teacher_hidden}
                loss = evaluation.loss(local, labels, shift=True, recipe=recipe, frozen=True, **given, **options)
                grads += torch.autograd.grad(loss.sum(), local)
                losses.append(loss.detach())
        return torch.stack(losses), torch.stack(grads)

    def test_an_evaluation_meets_its_teacher_by_name_and_leaves_the_step_alone(self):
        batches = [(*self.data(2, 5), torch.randn(2, 5, TEACHER_SIZE)) for _ in range(4)]
        recipe = self.recipe(torch.float32)

        def send(head):
            for _ in range(2):
                with head.teacher_stream(None, recipe, worker="validation") as stream:
                    for _, _, teacher_hidden in batches:
                        stream.send(teacher_hidden)

        with self.student.step(1) as step:
            hidden, labels, teacher_hidden = batches[0]
            step.loss(hidden, labels, recipe=self.recipe(None), teacher_hidden=teacher_hidden).backward()
            before = self.student.read_grad_weight()
            join = self.in_another_program(send)
            for reduction in ("mean", "none"):  # The same name twice: one after the other.
                got = self.evaluate(recipe, batches, "validation", reduction=reduction)
                want = self.evaluate(self.recipe(None), batches, reduction=reduction)
                self.assertNear(got[0], want[0], LOSS_BOUND)
                self.assertNear(got[1], want[1], GRAD_BOUND)
            join()
            self.assertTrue(torch.equal(self.student.read_grad_weight(), before))
            self.assertEqual(step.prepare().num_rows, 10)
            step.abort()

    def test_evaluations_of_two_names_do_not_mix(self):
        recipe = self.recipe(torch.float32)
        hidden, labels = self.data(7)
        teachers = {name: torch.randn(7, TEACHER_SIZE) for name in ("left", "right")}

        def send(name):
            def run(head):
                with head.teacher_stream(None, recipe, worker=name) as stream:
                    stream.send(teachers[name])
            return run

        with torch.no_grad(), self.student.evaluation("left") as left, self.student.evaluation("right") as right:
            futures = {"left": left.loss_async(hidden, labels, recipe=recipe),
                       "right": right.loss_async(hidden, labels, recipe=recipe)}
            joins = [self.in_another_program(send(name)) for name in ("right", "left")]
            for name, future in futures.items():
                want = self.student.loss(hidden, labels, recipe=self.recipe(None), teacher_hidden=teachers[name])
                self.assertNear(future.result(), want, LOSS_BOUND)
        for join in joins:
            join()

    def test_an_evaluation_has_one_recipe_and_an_end(self):
        hidden, labels = self.data(7)
        with torch.no_grad():
            with self.student.evaluation() as evaluation:
                evaluation.loss(hidden, labels)
                with self.assertRaisesRegex(ValueError, "outputs was .* and is .*Open another one"):
                    evaluation.loss(hidden, labels, reduction="none")
                self.assertNear(evaluation.loss(hidden, labels, reduction="mean"),
                                self.student.loss(hidden, labels, reduction="mean"), LOSS_BOUND)
            with self.assertRaisesRegex(RuntimeError, "is over"):
                evaluation.loss(hidden, labels)
        with self.assertRaisesRegex(RuntimeError, "is trainable"):
            with self.student.evaluation() as evaluation:
                evaluation.loss(hidden, labels)

    def test_a_teacher_that_gives_up_leaves_nothing_waiting(self):
        recipe = self.recipe(torch.float32)
        with self.student.step(1) as step:
            with self.assertRaisesRegex(KeyError, "of the teacher's program"):
                with self.student.teacher_stream(1, recipe) as stream:
                    stream.send(torch.randn(5, TEACHER_SIZE))
                    raise KeyError("of the teacher's program")
            step.abort()

    def test_a_refusal_reaches_the_teachers_program(self):
        with self.student.step(1) as step:
            with self.assertRaisesRegex(lmhead.InvalidArgument, "wanted 480: 3 rows of 40"):
                with self.student.teacher_stream(1, self.recipe(torch.float32)) as stream:
                    stream.send(torch.randn(5, TEACHER_SIZE - 1))
            step.abort()
        with self.assertRaises(lmhead.FailedPrecondition):
            with self.student.teacher_stream(2, self.recipe(torch.float32)) as stream:
                stream.send(torch.randn(5, TEACHER_SIZE))

    def test_what_does_not_fit_is_refused_before_anything_is_sent(self):
        with self.assertRaisesRegex(ValueError, "paired_stream"):
            self.student.teacher_stream(1, self.recipe(None))
        with self.assertRaisesRegex(ValueError, "step is 0"):
            self.student.teacher_stream(0, self.recipe(torch.float32))
        with self.assertRaisesRegex(ValueError, "worker is not stated"):
            self.student.teacher_stream(None, self.recipe(torch.float32))
        hidden, labels = self.data(5)
        with self.assertRaisesRegex(ValueError, r"use head.evaluation\(worker\)"):
            self.student.loss(hidden, labels, recipe=self.recipe(torch.float32), frozen=True)
        with self.assertRaisesRegex(lmhead.InvalidArgument, "worker is empty"):
            with self.student.evaluation() as evaluation:
                evaluation.loss(hidden, labels, recipe=self.recipe(torch.float32), frozen=True)
        unchunked = lmhead.RemoteHead(self.client, self.student.name)
        with self.student.step(1) as step:
            with self.assertRaisesRegex(lmhead.InvalidArgument, "chunk_tokens"):
                unchunked.teacher_stream(1, self.recipe(torch.float32))
            with self.student.teacher_stream(1, self.recipe(torch.bfloat16)) as stream:
                with self.assertRaisesRegex(ValueError, "want torch.bfloat16"):
                    stream.send(torch.randn(5, TEACHER_SIZE))
                with self.assertRaisesRegex(ValueError, "at least one row"):
                    stream.send(torch.zeros(0, TEACHER_SIZE, dtype=torch.bfloat16))
            step.abort()


if __name__ == "__main__":
    unittest.main()
