"""Patched causal language models train as they did with their own head."""

import contextlib
import copy
import inspect
import pickle
import tempfile
import types
import unittest

import torch
import transformers

import lmhead
from base import ServiceTest, relative_error
from models import Texts, batch, gpt2, llama


EVALUATION = next(name for name in ("eval_strategy", "evaluation_strategy")
                  if name in inspect.signature(transformers.TrainingArguments).parameters)


class Scaler:
    """torch.cuda.amp.GradScaler in short, for the CPU as well."""

    def __init__(self):
        self._scale, self._skipped = 4096.0, False

    def is_enabled(self):
        return True

    def get_scale(self):
        return self._scale

    def scale(self, loss):
        return loss * self._scale

    def step(self, optimizer):
        grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._skipped = not all(torch.isfinite(grad).all() for grad in grads)
        if self._skipped:
            return
        for grad in grads:
            grad /= self._scale
        optimizer.step()

    def update(self):
        if self._skipped:
            self._scale /= 2


class HuggingFaceTest(ServiceTest):
    def new_head(self, model, optimizer=lmhead.SGD(), **changes):
        return self.create(**{**lmhead.head_arguments(model), "optimizer": optimizer, "init_std": None, **changes})

    def train(self, model, patched, num_steps=6, learning_rate=0.3):
        optimizer = torch.optim.SGD(model.parameters(), learning_rate)
        if patched is not None:
            patched.attach(optimizer, max_grad_norm=1.0)
        losses = []
        model.train()
        for number in range(num_steps):
            optimizer.zero_grad()
            for micro_batch in range(2):  # As a trainer accumulates: the mean of means.
                loss = model(**batch(8 * number + 4 * micro_batch)).loss / 2
                loss.backward()
                losses.append(float(loss))
            if patched is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        return losses

    def test_a_model_trains_as_with_its_own_head(self):
        want_model = llama()
        want = self.train(want_model, None)
        model = llama()
        head = self.new_head(model)
        patched = lmhead.patch(model, head)
        self.assertFalse(any("lm_head" in name for name, _ in model.named_parameters()))
        got = self.train(model, patched)
        self.assertLess(got[-1], got[0])
        for a, b in zip(got, want):
            self.assertAlmostEqual(a, b, delta=1e-5 * b)
        self.assertLessEqual(relative_error(head.read_weight(), want_model.lm_head.weight.detach()), 1e-5)
        patched.restore()
        model.eval()
        want_model.eval()
        ids = batch(0)
        with torch.no_grad():
            self.assertLessEqual(relative_error(model(**ids).logits, want_model(**ids).logits), 1e-4)
        self.assertIs(model.get_output_embeddings(), model.lm_head)

    def test_evaluation_gives_the_same_loss_and_no_logits(self):
        model = llama()
        with torch.no_grad():
            want = model.eval()(**batch(0)).loss
        lmhead.patch(model, self.new_head(model))
        with torch.no_grad():
            output = model(**batch(0))
            self.assertNear(output.loss, want, 1e-5)
            self.assertNotIn("logits", output)
            as_tuple = model(**batch(0), return_dict=False)
            self.assertNear(as_tuple[0], want, 1e-5)
        with self.assertRaisesRegex(RuntimeError, "pass labels, or call patched.restore"):
            model(batch(0)["input_ids"])

    def test_a_frozen_head_trains_the_trunk_alone(self):
        model = llama()
        head = self.new_head(model, optimizer=None)
        before = model.lm_head.weight.detach().clone()
        losses = self.train(model, lmhead.patch(model, head))
        self.assertLess(losses[-1], losses[0])
        self.assertTrue(torch.equal(head.read_weight(), before))

    def test_a_patched_model_saves_and_loads_what_an_unpatched_one_does(self):
        for make in (llama, gpt2):
            with self.subTest(model=make.__name__):
                model, other = make(), make()
                want = {name: tensor.clone() for name, tensor in model.state_dict().items()}
                with torch.no_grad():
                    for parameter in other.parameters():
                        parameter += 0.1
                head = self.new_head(model)
                patched = lmhead.patch(model, head)
                got = model.state_dict()
                self.assertEqual(set(got), set(want))
                with tempfile.TemporaryDirectory() as folder:
                    model.save_pretrained(folder)
                    loaded = type(model).from_pretrained(folder).state_dict()
                for name, tensor in want.items():
                    self.assertTrue(torch.equal(got[name], tensor), name)
                    self.assertTrue(torch.equal(loaded[name], tensor), name)
                model.load_state_dict(other.state_dict())
                self.assertTrue(torch.equal(head.read_weight(), other.lm_head.weight))
                model.train()(**batch(0)).loss.backward()
                with self.assertRaisesRegex((RuntimeError, lmhead.FailedPrecondition), "step 1 is open"):
                    model.load_state_dict(other.state_dict())
                self.assertIs(patched.restore(), patched.restore())
                self.assertTrue(torch.equal(model.lm_head.weight, other.lm_head.weight))
        model = llama()
        lmhead.patch(model, self.new_head(model))
        with self.assertRaisesRegex(RuntimeError, r"weight has shape \(3, 4\)"):
            model.load_state_dict({**model.state_dict(), "lm_head.weight": torch.zeros(3, 4)})
        self.assertIn("lm_head.weight", model.load_state_dict({}, strict=False).missing_keys)

    def test_what_a_patched_model_cannot_do_says_what_to_do(self):
        model = llama()
        lmhead.patch(model, self.new_head(model))
        for take in (copy.copy, copy.deepcopy, pickle.dumps):  # A copy's forward() would run the original.
            with self.assertRaisesRegex(TypeError, "Copy the model before lmhead.patch or after patched.restore"):
                take(model if take is not copy.copy else model.lm_head)
        with self.assertRaisesRegex(ValueError, "is patched already"):
            lmhead.patch(model, self.create())
        with self.assertRaisesRegex(AttributeError, "weight is in the service"):
            model.lm_head.weight
        with self.assertRaisesRegex(RuntimeError, r"patched.restore\(\) first, as for generate\(\)"):
            model.generate(torch.zeros(1, 3, dtype=torch.int64), pad_token_id=0)
        loss = model.eval()(**batch(0)).loss
        with self.assertRaisesRegex(RuntimeError, "call model.train\\(\\)"):
            loss.backward()
        with self.assertRaisesRegex(RuntimeError, "DataParallel"):
            model.lm_head._replicate_for_data_parallel()

    def test_steps_that_nobody_commits_are_told(self):
        model = llama().train()
        lmhead.patch(model, self.new_head(model))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(2):
            with contextlib.nullcontext() if number == 0 else self.assertWarnsRegex(UserWarning, "attach"):
                model(**batch(0)).loss.backward()
            optimizer.step()

    def scaled_run(self, make, scaler):
        """Four steps of a loop with a GradScaler, the third of which overflows."""
        model = make().train()
        head = self.new_head(model)
        patched = lmhead.patch(model, head)
        optimizer = torch.optim.SGD(model.parameters(), 0.3)
        patched.attach(optimizer, max_grad_norm=0.5, scaler=scaler)
        for number in range(4):
            optimizer.zero_grad()
            loss = model(**batch(4 * number)).loss
            if scaler is None:
                if number == 2:
                    patched.abort()
                    continue
                loss.backward()
                optimizer.step()
                continue
            scaler.scale(loss).backward()
            if number == 2:
                next(model.parameters()).grad[0, 0] = float("inf")
            scaler.step(optimizer)
            scaler.update()
        return head, model

    def test_a_grad_scaler_scales_neither_trunk_nor_head(self):
        for make in (llama, gpt2):
            want_head, want = self.scaled_run(make, None)
            head, model = self.scaled_run(make, Scaler())
            self.assertEqual(head.info().last_committed_step, 3)
            self.assertNear(head.read_weight(), want_head.read_weight(), 1e-5)
            for got, parameter in zip(model.parameters(), want.parameters()):
                self.assertNear(got, parameter, 1e-5)

    def test_the_trainer_saves_and_resumes(self):
        """Evaluations in between; the head still there as of a later step, gone, and of another name."""
        for make in (llama, gpt2):
            kept = tempfile.TemporaryDirectory()
            self.addCleanup(kept.cleanup)
            name, folder = f"resumed-{make.__name__}", kept.name

            def train(resume, name=name, make=make, folder=folder):
                model = make()
                head = lmhead.RemoteHead.create(self.client, name, **lmhead.head_arguments(model), optimizer=lmhead.AdamW())
                arguments = transformers.TrainingArguments(
                    folder, per_device_train_batch_size=4, max_steps=6, learning_rate=3e-3, lr_scheduler_type="constant",
                    max_grad_norm=0.0, logging_steps=1, report_to=[], seed=5, use_cpu=True, disable_tqdm=True,
                    save_strategy="steps", save_steps=3, eval_steps=2, **{EVALUATION: "steps"})
                trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(),
                                               callbacks=[lmhead.patch(model, head).trainer_callback(max_grad_norm=1.0)])
                trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
                trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-3" if resume else None)
                self.assertEqual(head.info().last_committed_step, 6)
                return head.read_weight(), [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

            with self.subTest(model=make.__name__):
                want, losses = train(False)
                for gone in (False, True):
                    if gone:
                        self.client.call("DeleteHead", head=name)
                    got, resumed = train(True)
                    self.assertEqual(resumed, losses)
                    self.assertTrue(torch.equal(got, want))
                saved = make().from_pretrained(f"{folder}/checkpoint-6")
                self.assertTrue(torch.equal(saved.lm_head.weight, want))

    def test_a_checkpoint_that_cannot_be_or_is_anothers_is_told(self):
        model = llama()
        head = self.new_head(model)
        patched = lmhead.patch(model, head)
        with self.assertWarnsRegex(UserWarning, "without the optimizer state.*trainer-7"):
            patched.resume(7)
        patched.save(7)
        head.load_weight(torch.zeros(head.vocab_size, head.hidden_size))
        with self.assertRaisesRegex(ValueError, "another run's"):
            patched.resume(7)
        patched.model.train()(**batch(0)).loss.backward()
        patched.commit(0.1)
        with self.assertWarnsRegex(UserWarning, "without its optimizer state.*trainer-7"):
            patched.save(7)

    def test_clipping_twice_is_refused(self):
        model = llama()
        callback = lmhead.patch(model, self.new_head(model)).trainer_callback(max_grad_norm=1.0)
        trainer = transformers.Trainer(model, transformers.TrainingArguments("unused", report_to=[], use_cpu=True, max_steps=1),
                                       train_dataset=Texts(), callbacks=[callback])
        with self.assertRaisesRegex(ValueError, "max_grad_norm is 1.0, want 0"):
            trainer.train()

    def test_sampling_from_a_copy_that_does_not_get_the_head_is_refused(self):
        model = llama()
        callback = lmhead.patch(model, self.new_head(model)).trainer_callback()
        with self.assertRaisesRegex(ValueError, "use_vllm"):
            callback.on_train_begin(types.SimpleNamespace(max_grad_norm=0.0, use_vllm=True), None, None)

    def test_the_trainer(self):
        runs = []
        for remote in (False, True):
            model = llama()
            callbacks = []
            if remote:
                head = self.new_head(model, optimizer=lmhead.AdamW())
                callbacks = [lmhead.patch(model, head).trainer_callback(max_grad_norm=1.0)]
            with tempfile.TemporaryDirectory() as folder:
                arguments = transformers.TrainingArguments(
                    folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=8, learning_rate=3e-3,
                    max_grad_norm=0.0 if remote else 1.0, logging_steps=1, report_to=[], seed=5, use_cpu=True,
                    disable_tqdm=True, save_strategy="no", weight_decay=0.0, prediction_loss_only=True)
                trainer = transformers.Trainer(model, arguments, train_dataset=Texts(), eval_dataset=Texts(),
                                               callbacks=callbacks)
                trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
                trainer.train()
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                runs.append((losses, trainer.evaluate()["eval_loss"]))
        (want, want_eval), (got, got_eval) = runs
        self.assertEqual(len(got), 8)
        self.assertLess(got[-1], got[0])
        for a, b in zip(got, want):  # The log has four decimals.
            self.assertAlmostEqual(a, b, delta=2e-4)
        self.assertAlmostEqual(got_eval, want_eval, delta=1e-4)

    def test_softcap_and_scale_come_from_the_configuration(self):
        model = llama()
        model.config.final_logit_softcapping = 30.0
        model.config.logits_scaling = 4.0
        arguments = lmhead.head_arguments(model)
        self.assertEqual((arguments["softcap"], arguments["logit_scale"]), (30.0, 0.25))
        with self.assertRaisesRegex(ValueError, "softcap is 0, the model has 30.0"):
            lmhead.patch(model, self.new_head(model, softcap=0.0))
        with self.assertRaisesRegex(ValueError, "has no output layer"):
            lmhead.head_arguments(torch.nn.Linear(3, 3))

    def test_a_model_whose_logits_are_not_what_its_configuration_says_is_refused(self):
        model = llama()
        model.config.logits_scaling = 4.0  # Llama does not read it.
        with self.assertRaisesRegex(ValueError, "makes other logits"):
            lmhead.patch(model, self.new_head(model))
        lmhead.patch(model, self.new_head(model), check_logits=False)

        class Aside(torch.nn.Module):
            """Has an output layer, and does not use it."""

            def __init__(self):
                super().__init__()
                self.lm_head = torch.nn.Linear(8, 5, bias=False)

            def forward(self, input_ids, labels=None):
                return transformers.modeling_outputs.CausalLMOutput(logits=torch.zeros(1, 2, 5))

        with self.assertRaisesRegex(ValueError, "does not call its output layer"):
            lmhead.patch(Aside(), self.new_head(Aside()))

    def test_log_probabilities_for_a_trainer_that_asks_for_them(self):
        """What TRL's trainers ask for and do with it, without TRL: here with labels that are shifted already."""
        ids = batch(0)["input_ids"]
        labels = torch.cat([ids[:, 1:], torch.full_like(ids[:, :1], -100)], 1)
        labels[:, :3] = -100
        valid = labels != -100
        factors = torch.rand(labels.shape)
        runs = []
        for remote in (False, True):
            model = llama().train()
            if remote:
                head = self.new_head(model)
                patched = lmhead.patch(model, head)
                found = model(input_ids=ids, shift_labels=labels, fused_lm_head=True)
                logprob, entropy, top = found.log_probs, found.entropy, found.is_top1
                self.assertNear(found.loss, -logprob.sum() / valid.sum(), 1e-6)
                self.assertTrue(torch.equal(found.label_mask, valid))
            else:
                logprobs = model(input_ids=ids).logits.log_softmax(-1)
                logprob = logprobs.gather(-1, labels.clamp(min=0)[..., None])[..., 0] * valid
                entropy = -(logprobs.exp() * logprobs).sum(-1) * valid
                top = (logprobs.argmax(-1) == labels) & valid
            (logprob * factors + entropy).sum().backward()
            runs.append((logprob, entropy, top.float(), *[parameter.grad for parameter in model.model.parameters()]))
            if remote:
                patched.commit(0.3)
            else:
                with torch.no_grad():
                    want_weight = model.lm_head.weight - 0.3 * model.lm_head.weight.grad
        for want, got in zip(*runs):
            self.assertNear(got, want, 1e-4)
        self.assertNear(head.read_weight(), want_weight, 1e-5)
        with torch.no_grad():
            evaluated = model(input_ids=ids, labels=ids, fused_lm_head=True)
            self.assertEqual(tuple(evaluated.log_probs.shape), (4, 9))
            self.assertNear(evaluated.loss, model(input_ids=ids, labels=ids).loss, 1e-5)

    def test_tied_embeddings(self):
        want_model = gpt2()
        want = self.train(want_model, None)
        model = gpt2()
        head = self.new_head(model)
        patched = lmhead.patch(model, head)
        got = self.train(model, patched)
        for a, b in zip(got, want):
            self.assertAlmostEqual(a, b, delta=1e-5 * b)
        self.assertLessEqual(relative_error(model.transformer.wte.weight.detach(),
                                            want_model.transformer.wte.weight.detach()), 1e-5)
        self.assertTrue(torch.equal(head.read_weight(), model.transformer.wte.weight.detach()))


if __name__ == "__main__":
    unittest.main()
