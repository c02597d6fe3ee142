"""A byte-pair vocabulary learnt from a text at start, so that nothing has to be downloaded."""

import collections
import re

import torch

_PIECES = re.compile(r"\s?\w+|\s?[^\w\s]+|\s+")  # A word with the blank before it; merges stay within a piece.


def _merged(symbols, pair, number):
    """`symbols` with every occurrence of `pair` replaced by `number`."""
    result, i = [], 0
    while i < len(symbols):
        if symbols[i:i + 2] == pair:
            result.append(number)
            i += 2
        else:
            result.append(symbols[i])
            i += 1
    return result


def byte_pairs(text, size):
    """Learns at most `size` tokens (256 bytes, then the commonest pairs) and writes the text in them.

    Returns:
        ids: [n], int64.
        tokens: the bytes that each id stands for; joined in the order of the ids they are the text.
    """
    pieces = _PIECES.findall(text)
    counts = collections.Counter(pieces)
    words = {piece: list(piece.encode()) for piece in counts}
    tokens = [bytes([value]) for value in range(256)]
    pairs, where = collections.Counter(), collections.defaultdict(set)

    def book(piece, sign):
        symbols = words[piece]
        for pair in zip(symbols, symbols[1:]):
            pairs[pair] += sign * counts[piece]
            where[pair].add(piece)

    for piece in words:
        book(piece, 1)
    while len(tokens) < size:
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        if pairs[best] < 2:
            break
        for piece in where.pop(best):
            book(piece, -1)
            words[piece] = _merged(words[piece], list(best), len(tokens))
            book(piece, 1)
        del pairs[best]
        tokens.append(tokens[best[0]] + tokens[best[1]])
    ids = [number for piece in pieces for number in words[piece]]
    if b"".join(tokens[number] for number in ids) != text.encode():
        raise AssertionError("the tokens are not the text")
    return torch.tensor(ids), tokens
