"""Small Hugging Face models and text to train them on."""

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCAB_SIZE = 61
HIDDEN_SIZE = 16


def llama(**changes):
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN_SIZE, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, **changes))


def gpt2():
    torch.manual_seed(3)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCAB_SIZE, n_embd=HIDDEN_SIZE, n_layer=2, n_head=2, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0))


class Texts(torch.utils.data.Dataset):
    """Counting by threes, a few labels ignored."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        ids = (index + 3 * torch.arange(10)) % VOCAB_SIZE
        labels = ids.clone()
        labels[:2] = -100
        return {"input_ids": ids, "labels": labels}


def batch(start, size=4):
    items = [Texts()[i] for i in range(start, start + size)]
    return {key: torch.stack([item[key] for item in items]) for key in items[0]}
