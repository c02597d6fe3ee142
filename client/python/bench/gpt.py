"""The trunk of a GPT for long contexts: rotary positions, fused attention, a checkpoint at every block."""

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def _plain_attention(q, k, v, is_causal):
    """What PyTorch 1.13 has no fused function for."""
    length = q.shape[-2]
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(future, float("-inf")).softmax(-1) @ v


_attention = getattr(F, "scaled_dot_product_attention", _plain_attention)


def rotary(length, size, device):
    """Cosines and sines, [length, size / 2] each."""
    frequencies = 10000.0 ** -(torch.arange(0, size, 2, device=device) / size)
    angles = torch.arange(length, device=device)[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x, positions):
    """Turns the halves of [..., length, size] against each other by their positions."""
    cosines, sines = (part.to(x.dtype) for part in positions)
    left, right = x.chunk(2, dim=-1)
    return torch.cat([left * cosines - right * sines, right * cosines + left * sines], dim=-1)


class Block(torch.nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x, positions):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = _attention(rotate(q, positions), rotate(k, positions), v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Trunk(torch.nn.Module):
    """A GPT without its head: ids [rows, length] to hidden states [rows, length, width]."""

    def __init__(self, num_tokens, width, layers, heads):
        super().__init__()
        self.head_size = width // heads
        self.words = torch.nn.Embedding(num_tokens, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = torch.nn.LayerNorm(width)
        for module in self.modules():
            if isinstance(module, (torch.nn.Embedding, torch.nn.Linear)):
                torch.nn.init.normal_(module.weight, std=0.02)

    def forward(self, ids):
        x, positions = self.words(ids), rotary(ids.shape[1], self.head_size, ids.device)
        for block in self.blocks:
            x = checkpoint(block, x, positions, use_reentrant=False)
        return self.norm(x)
