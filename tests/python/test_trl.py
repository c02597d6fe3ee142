"""TRL's trainers with the head in the service: the losses and metrics of an unpatched model.

Optional: runs where TRL is installed (docs/PYTHON.md says which versions were tried).
"""

import importlib.util
import tempfile
import unittest

import torch
import transformers

import lmhead
from base import ServiceTest
from models import VOCAB_SIZE, gpt2, llama

HAS_TRL = importlib.util.find_spec("trl") is not None
NUM_STEPS = 6
NUM_POLICY_STEPS = 20


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers
    words = {**{f"w{i}": i for i in range(VOCAB_SIZE - 2)}, "<eos>": VOCAB_SIZE - 2, "<pad>": VOCAB_SIZE - 1}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<eos>", pad_token="<pad>")


def texts():
    """Counting by threes, in texts of several lengths."""
    import datasets
    datasets.disable_progress_bars()
    return datasets.Dataset.from_dict({
        "text": [" ".join(f"w{(start + 3 * i) % (VOCAB_SIZE - 2)}" for i in range(6 + start % 5)) for start in range(48)]})


def share_of_even_words(completion_ids, **_):
    return [sum(word % 2 == 0 for word in words) / len(words) for words in completion_ids]


@unittest.skipUnless(HAS_TRL, "TRL is not installed")
class TrlTest(ServiceTest):
    def patched(self, model, **options):
        head = self.create(**lmhead.head_arguments(model), optimizer=lmhead.AdamW(), init_std=None)
        return lmhead.patch(model, head, **options)

    def fine_tune(self, model, remote, **options):
        """The losses and metrics that the trainer logs, and its evaluation at the end."""
        from trl import SFTConfig, SFTTrainer
        with tempfile.TemporaryDirectory() as folder:
            arguments = SFTConfig(
                folder, per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=NUM_STEPS, seed=5,
                learning_rate=3e-3, max_grad_norm=0.0 if remote else 1.0, logging_steps=1, report_to=[], use_cpu=True,
                disable_tqdm=True, save_strategy="no", weight_decay=0.0, bf16=False, **options)
            trainer = SFTTrainer(model, arguments, train_dataset=texts(), eval_dataset=texts(),
                                 processing_class=tokenizer())
            trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
            if remote:
                patched = self.patched(model)
                trainer.add_callback(patched.trainer_callback(max_grad_norm=1.0))
            trainer.train()
            logged = [entry for entry in trainer.state.log_history if "loss" in entry]
            found = trainer.evaluate()
            if remote:
                patched.restore()
                self.assertAlmostEqual(trainer.evaluate()["eval_loss"], found["eval_loss"], delta=1e-4)
            return logged, found

    def check(self, make, **options):
        want, want_eval = self.fine_tune(make(), False, **options)
        got, got_eval = self.fine_tune(make(), True, **options)
        self.assertEqual(len(got), NUM_STEPS)
        self.assertNotEqual(got[-1]["loss"], got[0]["loss"])
        for name in ("loss", "entropy", "mean_token_accuracy", "num_tokens"):
            for a, b in zip(got, want):  # The log has few decimals.
                self.assertEqual(name in a, name in b)
                self.assertAlmostEqual(float(a.get(name, 0)), float(b.get(name, 0)), delta=3e-4, msg=name)
        for name in ("eval_loss", "eval_entropy", "eval_mean_token_accuracy"):
            self.assertAlmostEqual(got_eval.get(name, 0), want_eval.get(name, 0), delta=3e-4, msg=name)

    def test_supervised_fine_tuning(self):
        self.check(llama)

    def test_a_tied_embedding(self):
        self.check(gpt2)

    def test_a_loss_whose_factors_differ_between_tokens(self):
        self.check(llama, loss_type="dft")

    def test_log_probabilities_as_policy_trainers_take_them(self):
        """GRPO's and its kin: any function of the completion's log-probabilities and entropies, at a temperature."""
        from trl.trainer import utils
        ids = torch.randint(0, VOCAB_SIZE, (3, 8))
        labels = ids.masked_fill(torch.arange(8) < 3, -100)
        advantages = torch.tensor([1.0, -0.5, 0.3])[:, None]
        runs = []
        for remote in (False, True):
            model = llama().train()
            utils.add_fused_lm_head(model, temperature=0.7, outputs=("log_probs", "entropy", "is_top1"))
            if remote:
                with self.assertRaisesRegex(ValueError, "temperature=0.7"):
                    self.patched(model)
                patched = self.patched(model, recipe=lmhead.Recipe(temperature=0.7))
            found = model(input_ids=ids, labels=labels, fused_lm_head=True)
            ratio = (found.log_probs - found.log_probs.detach() + 0.1).exp()
            ((-ratio * advantages - 0.01 * found.entropy) * found.label_mask).mean().backward()
            runs.append((found, [parameter.grad for parameter in model.model.parameters()]))
            if remote:
                self.assertEqual(patched.commit(0.0).num_updates, 1)
        (want, want_grads), (got, got_grads) = runs
        for name in ("loss", "log_probs", "entropy"):
            self.assertNear(getattr(got, name), getattr(want, name), 1e-5)
        for name in ("is_top1", "label_mask"):
            self.assertTrue(torch.equal(getattr(got, name), getattr(want, name).bool()), name)
        for a, b in zip(got_grads, want_grads):
            self.assertNear(a, b, 1e-4)

    def train_policy(self, make, remote, kind="GRPO", **options):
        """The entries that the trainer logs of steps that sample, and the samples."""
        import datasets
        import trl
        samples = []

        def reward(completion_ids, **_):
            samples.append(completion_ids)
            return share_of_even_words(completion_ids)

        prompts = datasets.Dataset.from_dict({"prompt": [f"w{start} w{start + 3}" for start in range(24)]})
        with tempfile.TemporaryDirectory() as folder:
            arguments = getattr(trl, f"{kind}Config")(
                folder, per_device_train_batch_size=8, num_generations=8, max_completion_length=8,
                max_steps=NUM_POLICY_STEPS, seed=5, learning_rate=3e-2, lr_scheduler_type="constant", logging_steps=1,
                max_grad_norm=0.0 if remote else 1.0, report_to=[], use_cpu=True, disable_tqdm=True, save_strategy="no", bf16=False,
                weight_decay=0.0, temperature=0.9, beta=0.0, **options)
            model = make()
            trainer = getattr(trl, f"{kind}Trainer")(model, reward, arguments, train_dataset=prompts,
                                                     processing_class=tokenizer())
            trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
            if remote:
                patched = self.patched(model, recipe=lmhead.Recipe(temperature=0.9), generate=True)
                trainer.add_callback(patched.trainer_callback(max_grad_norm=1.0))
            trainer.train()
            if remote:
                self.assertEqual(patched.head.info().last_committed_step, NUM_POLICY_STEPS)
            return [entry for entry in trainer.state.log_history if "reward" in entry], samples

    def check_policy(self, make, **options):
        want, want_samples = self.train_policy(make, False, **options)
        got, got_samples = self.train_policy(make, True, **options)
        self.assertEqual(len(got), NUM_POLICY_STEPS // options.get("num_iterations", 1))  # Of the steps that sampled.
        same = 6  # Later a rounding of the other kind may have sampled another word.
        self.assertEqual(got_samples[:same], want_samples[:same])
        for name in ("reward", "loss", "entropy", "completions/mean_length"):
            for a, b in zip(got[:same], want[:same]):
                self.assertAlmostEqual(float(a[name]), float(b[name]), delta=1e-3, msg=name)
        first, last = (sum(entry["reward"] for entry in part) / 4 for part in (got[:4], got[-4:]))
        self.assertGreater(last, first + 0.1)

    def test_a_policy_samples_and_trains(self):
        self.check_policy(llama)

    def test_a_policy_with_a_tied_embedding(self):
        self.check_policy(gpt2)

    def test_a_policy_that_takes_several_steps_of_its_samples(self):
        self.check_policy(llama, num_iterations=2, gradient_accumulation_steps=2, epsilon=0.1)

    def test_another_policy_trainer(self):
        self.check_policy(gpt2, kind="RLOO")


if __name__ == "__main__":
    unittest.main()
