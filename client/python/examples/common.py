"""What the examples share: real text, a small GPT's trunk, progress, a plot."""

import argparse
import pathlib
import time

import torch
import torch.nn.functional as F

LICENCES = pathlib.Path("/usr/share/common-licenses")


def arguments(description, steps):
    """--address of a running `lmhead serve`, --text, --steps, --plot."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--address", default="127.0.0.1:50051", help="of a running `lmhead serve`")
    parser.add_argument("--text", type=pathlib.Path, default=LICENCES, help="a text file, or a folder of them")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--plot", type=pathlib.Path, help="write the loss curve to this file (needs matplotlib)")
    return parser.parse_args()


def read_text(path):
    """English text: by default the licences that every Debian has, else this project's documents."""
    if path == LICENCES and not path.exists():
        path = pathlib.Path(__file__).resolve().parents[3] / "docs"
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    return "\n".join(dict.fromkeys(file.read_text(errors="replace") for file in files))


class Words:
    """A vocabulary of the commonest words and marks; 0 is any other."""

    def __init__(self, text, size):
        import collections
        import re
        self._split = re.compile(r"\w+|[^\w\s]")
        words = self._split.findall(text.lower())
        common = [word for word, _ in collections.Counter(words).most_common(size - 1)]
        self.words = ["<unk>", *common]
        self._ids = {word: i for i, word in enumerate(self.words)}
        self.size = size

    def encode(self, text):
        """[n] ids."""
        return torch.tensor([self._ids.get(word, 0) for word in self._split.findall(text.lower())])


def batches(ids, rows, length, seed=0):
    """Endless random [rows, length] pieces of the text."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(0, len(ids) - length, (rows,), generator=generator)
        yield torch.stack([ids[start:start + length] for start in starts])


class Block(torch.nn.Module):
    """A pre-norm transformer block with causal attention."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.qkv, self.out = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        self.up, self.down = torch.nn.Linear(width, 4 * width), torch.nn.Linear(4 * width, width)

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Trunk(torch.nn.Module):
    """A GPT without its head: ids [rows, length] to hidden states [rows, length, width]."""

    def __init__(self, vocab_size, width=96, layers=2, heads=4, context=256):
        super().__init__()
        self.words, self.places = torch.nn.Embedding(vocab_size, width), torch.nn.Embedding(context, width)
        self.blocks = torch.nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = torch.nn.LayerNorm(width)

    def forward(self, ids):
        return self.norm(self.blocks(self.words(ids) + self.places(torch.arange(ids.shape[1]))))


class Progress:
    """Prints a line every few steps, keeps the losses, plots them."""

    def __init__(self, steps, name="loss"):
        self.steps, self.name, self.values, self._start = steps, name, [], time.monotonic()

    def add(self, number, value, more=""):
        """Takes one step's value."""
        self.values.append(value)
        if number == 1 or number % max(self.steps // 10, 1) == 0:
            print(f"step {number:4d} of {self.steps}  {self.name} {value:8.4f}  "
                  f"{time.monotonic() - self._start:5.1f} s  {more}", flush=True)

    def plot(self, path):
        """Writes the curve, when a path was asked for."""
        if path is None:
            return
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
        pyplot.plot(range(1, len(self.values) + 1), self.values)
        pyplot.xlabel("step")
        pyplot.ylabel(self.name)
        pyplot.savefig(path, dpi=120)
        print(f"wrote {path}")
