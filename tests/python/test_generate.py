"""A patched model generates what a model with a head of its own does."""

import gc
import inspect
import unittest

import torch
import transformers

import lmhead
from base import ServiceTest
from models import HIDDEN_SIZE, VOCAB_SIZE, batch, gpt2, llama

PROMPT = batch(0, 3)["input_ids"][:, :4]


def gptj():
    """Its output layer has a bias."""
    torch.manual_seed(3)
    model = transformers.GPTJForCausalLM(transformers.GPTJConfig(
        vocab_size=VOCAB_SIZE, n_embd=HIDDEN_SIZE, n_layer=2, n_head=2, n_positions=64, rotary_dim=4, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
    torch.nn.init.normal_(model.lm_head.bias)
    return model


def gemma2(tied):
    """Its logits are capped."""
    torch.manual_seed(3)
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=8, max_position_embeddings=64, final_logit_softcapping=2.0, tie_word_embeddings=tied))


MODELS = {"llama": llama, "gpt2, tied": gpt2, "gptj, with a bias": gptj}
if hasattr(transformers, "Gemma2ForCausalLM"):  # From transformers 4.42 on.
    MODELS.update({"gemma2, with a softcap": lambda: gemma2(False), "gemma2, tied": lambda: gemma2(True)})


def continued(model, **options):
    return model.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), max_new_tokens=8, min_new_tokens=8, pad_token_id=0,
                          **{"do_sample": False, **options})


def copies():
    """Tensors of the head's size that are no parameters."""
    gc.collect()
    return [found for found in gc.get_objects() if type(found) is torch.Tensor and found.shape == (VOCAB_SIZE, HIDDEN_SIZE)]


class GenerateTest(ServiceTest):
    def patched(self, model, optimizer=lmhead.SGD(), **options):
        head = self.create(**{**lmhead.head_arguments(model), "optimizer": optimizer, "init_std": None})
        return lmhead.patch(model, head, generate=True, **options)

    def train(self, patched, num_steps=3):
        optimizer = torch.optim.SGD(patched.model.parameters(), 0.3)
        patched.attach(optimizer)
        patched.model.train()
        for number in range(num_steps):
            optimizer.zero_grad()
            patched.model(**batch(4 * number)).loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        patched.model.eval()

    def test_it_generates_as_with_its_own_head_before_and_after_training(self):
        for name, make in MODELS.items():
            with self.subTest(model=name):
                model = make().eval()
                before, logits = continued(model), model(PROMPT).logits.detach()
                sampled = {"do_sample": True, "num_beams": 2, "num_return_sequences": 2, "temperature": 0.8}
                torch.manual_seed(7)
                beams = continued(model, **sampled)
                patched = self.patched(model)
                self.assertTrue(torch.equal(continued(model), before))
                self.assertNear(model(PROMPT).logits, logits, 1e-6)
                torch.manual_seed(7)
                self.assertTrue(torch.equal(continued(model, **sampled), beams))
                self.train(patched)
                with torch.no_grad():
                    after, logits = continued(model), model(PROMPT).logits
                    as_tuple = model(PROMPT, return_dict=False)[0]
                self.assertTrue(torch.equal(as_tuple, logits))
                restored = patched.restore()
                self.assertTrue(torch.equal(continued(restored), after))
                self.assertFalse(torch.equal(after, before))
                self.assertNear(logits, restored(PROMPT).logits, 1e-6)

    def test_positions_that_are_not_asked_for_have_no_logits(self):
        for make in MODELS.values():
            model = make().eval()
            self.patched(model)
            name = next((name for name in ("logits_to_keep", "num_logits_to_keep")
                         if name in inspect.signature(model.forward).parameters), None)
            with torch.no_grad():
                everywhere = model(PROMPT).logits
                self.assertEqual(tuple(everywhere.shape), (*PROMPT.shape, VOCAB_SIZE))
                if name is not None:
                    self.assertNear(model(PROMPT, **{name: 2}).logits, everywhere[:, -2:], 1e-6)

    def test_one_copy_from_the_first_use_to_the_next_commit(self):
        model = llama().eval()
        model.model.embed_tokens.requires_grad_(False)  # Whose gradient would look like a copy.
        patched = self.patched(model)
        self.train(patched, 1)
        with torch.no_grad():
            model(**batch(0))
        self.assertEqual(len(copies()), 0)
        continued(model)
        [first] = copies()
        continued(model)
        [second] = copies()
        self.assertIs(first, second)
        self.assertTrue(torch.equal(first, patched.head.read_weight()))
        first_address = id(first)
        del first, second
        model.train()(**batch(0)).loss.backward()
        continued(model)  # Within a step: what was committed last.
        self.assertEqual([id(found) for found in copies()], [first_address])
        patched.commit(0.3)
        self.assertEqual(len(copies()), 0)
        continued(model)
        self.assertTrue(torch.equal(copies()[0], patched.head.read_weight()))
        patched.restore()
        self.assertEqual(len(copies()), 0)

    def test_a_tied_embedding_needs_no_copy(self):
        model = gpt2().eval()
        patched = self.patched(model)
        self.train(patched, 1)
        model.zero_grad(set_to_none=True)
        continued(model)
        self.assertEqual(len(copies()), 0)

    def test_rows_that_change_without_a_commit_of_the_patch_are_read_again(self):
        for make in (llama, gpt2):
            model, other = make().eval(), make().eval()
            patched = self.patched(model)
            patched.save(5)
            want = continued(model)
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter += torch.randn_like(parameter)
            first = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model.load_state_dict(other.state_dict())
            self.assertTrue(torch.equal(continued(model), continued(other)))
            model.load_state_dict(first)
            patched.resume(5)
            self.assertTrue(torch.equal(continued(model), want))
        model = llama().eval()
        patched = self.patched(model)
        continued(model)
        patched.head.load_weight(torch.zeros(VOCAB_SIZE, HIDDEN_SIZE))
        self.assertFalse(model(PROMPT).logits.any())
        with patched.head.step() as step:
            step.loss(torch.ones(1, HIDDEN_SIZE, requires_grad=True), torch.tensor([2])).backward()
            step.prepare()
            step.commit(1.0)
        self.assertTrue(model(PROMPT).logits.any())

    def test_modes_of_autograd(self):
        model = llama().eval()
        self.patched(model)
        with torch.inference_mode():
            inferred = model(PROMPT).logits
        with torch.no_grad():
            logits = model(PROMPT).logits
        self.assertTrue(torch.equal(inferred, logits))
        for mode in (model.train, model.eval):
            mode()
            logits = model(PROMPT).logits
            with self.assertRaisesRegex(RuntimeError, "Pass labels to the model"):
                logits.sum().backward()
        self.assertFalse(model(**batch(0)).get("logits"))

    def test_it_follows_the_model_to_another_dtype(self):
        for make in (llama, gpt2, gptj):
            model, want = make().eval(), make().eval().to(torch.bfloat16)
            patched = self.patched(model)
            continued(model)
            model.to(torch.bfloat16)
            with torch.no_grad():
                self.assertTrue(torch.equal(model(PROMPT).logits, want(PROMPT).logits))
                self.assertEqual(model.state_dict()["lm_head.weight"].dtype, torch.bfloat16)
                self.assertTrue(torch.equal(patched.restore()(PROMPT).logits, want(PROMPT).logits))

    def test_without_the_option_the_message_names_it(self):
        model = llama().eval()
        lmhead.patch(model, self.create(**lmhead.head_arguments(model), init_std=None))
        with self.assertRaisesRegex(RuntimeError, r"lmhead.patch\(..., generate=True\)"):
            continued(model)


if __name__ == "__main__":
    unittest.main()
