"""Give `ledger` the form of each kind; what a token moves, over the bandwidth, is the least time it can take.

A claim above that is not a fast machine but a wrong number: other bits, another depth, or a step that left work out.
"""

import torch

from nanoqwen.config import SHAPES
from nanoqwen.hardware import DATASHEETS
from nanoqwen.ledger import Grouped, ledger

MATRICES = ("qkv", "o", "gate_up", "down")


def most_tokens(config, bits, head_bits, depth, bandwidth):
    def form(bits):
        return torch.float16 if bits == 16 else Grouped(bits, 128)

    forms = dict.fromkeys(MATRICES, form(bits)) | {"lm_head": form(head_bits), "default": torch.float16}
    return bandwidth / ledger(config, forms, depth).total


def impossible(claims):
    bandwidth = DATASHEETS["h200"].bandwidth
    return [
        name
        for name, size, *form, rate in claims
        if rate > most_tokens(SHAPES[f"qwen2.5-coder-{size}"], *form, bandwidth)
    ]
