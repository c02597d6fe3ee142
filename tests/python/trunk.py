"""A small trunk and text for the training tests, the same in every process."""

import torch

VOCAB_SIZE = 67
HIDDEN_SIZE = 32
CONTEXT = 12


class Trunk(torch.nn.Module):
    """Embeds, mixes with the past and squashes: enough that its gradients depend on the head's."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
        self.mix = torch.nn.GRU(HIDDEN_SIZE, HIDDEN_SIZE, batch_first=True)
        self.norm = torch.nn.LayerNorm(HIDDEN_SIZE)

    def forward(self, ids):
        return self.norm(self.mix(self.embedding(ids))[0])


def make_trunk():
    torch.manual_seed(7)
    return Trunk()


def make_weight():
    return torch.randn(VOCAB_SIZE, HIDDEN_SIZE, generator=torch.Generator().manual_seed(8)) * 0.2


def batch(number, rank=0, rows=4):
    """Ids with structure to learn; labels with some ignored, differently many a rank."""
    generator = torch.Generator().manual_seed(1000 * number + rank)
    start = torch.randint(0, VOCAB_SIZE, (rows, 1), generator=generator)
    ids = (start + 3 * torch.arange(CONTEXT)) % VOCAB_SIZE
    labels = ids.clone()
    labels[0, :3 + rank] = -100
    return ids, labels
