#!/usr/bin/env python3
"""Fine-tunes a Hugging Face causal language model with its head in the service: two lines more than without.

    python3 client/python/examples/finetune.py --address=127.0.0.1:50051 [--model=a folder or a hub name]

Without --model it starts from a small Llama with random weights, so that it runs anywhere.
"""

import argparse
import pathlib

import torch
import transformers

import lmhead
from common import LICENCES, Progress, Words, read_text

LENGTH = 96


class Pieces(torch.utils.data.Dataset):
    """The text in pieces of LENGTH tokens; the first fifth of each is a prompt, which is not trained on."""

    def __init__(self, ids):
        self.pieces = ids[:len(ids) // LENGTH * LENGTH].view(-1, LENGTH)

    def __len__(self):
        return len(self.pieces)

    def __getitem__(self, index):
        labels = self.pieces[index].clone()
        labels[:LENGTH // 5] = -100
        return {"input_ids": self.pieces[index], "labels": labels}


def load(name, text):
    """(model, ids)"""
    if name:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        return transformers.AutoModelForCausalLM.from_pretrained(name), torch.tensor(tokenizer(text)["input_ids"])
    words = Words(text, 4096)
    config = transformers.LlamaConfig(vocab_size=words.size, hidden_size=96, intermediate_size=256, num_hidden_layers=2,
                                      num_attention_heads=4, num_key_value_heads=4)
    return transformers.LlamaForCausalLM(config), words.encode(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--address", default="127.0.0.1:50051", help="of a running `lmhead serve`")
    parser.add_argument("--model", help="folder or hub name")
    parser.add_argument("--text", type=pathlib.Path, default=LICENCES, help="a text file, or a folder of them")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps")
    parser.add_argument("--output", type=pathlib.Path, help="save the trained model here")
    parser.add_argument("--plot", type=pathlib.Path, help="write the loss curve to this file (needs matplotlib)")
    options = parser.parse_args()
    torch.manual_seed(0)
    model, ids = load(options.model, read_text(options.text))

    head = lmhead.RemoteHead.create(options.address, f"finetune-{torch.seed():x}", **lmhead.head_arguments(model),
                                    optimizer=lmhead.AdamW())
    patched = lmhead.patch(model, head)

    training = transformers.TrainingArguments(
        "build/finetune", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=options.steps,
        learning_rate=2e-3, warmup_steps=5, max_grad_norm=0.0, logging_steps=1, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", prediction_loss_only=True)
    progress = Progress(options.steps)

    class Show(transformers.TrainerCallback):
        """Prints the Trainer's log our way."""

        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:
                progress.add(state.global_step, logs["loss"])

    trainer = transformers.Trainer(model, training, train_dataset=Pieces(ids),
                                   callbacks=[patched.trainer_callback(max_grad_norm=1.0), Show()])
    trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
    try:
        trainer.train()
        patched.restore()  # The trained head comes back into the model.
        if options.output:
            model.save_pretrained(options.output)
            print(f"saved to {options.output}")
        progress.plot(options.plot)
    finally:
        head.delete(force=True)


if __name__ == "__main__":
    main()
