"""Sum the sizes. An untied model's table counts with one row; a tied one's whole, since it is the head too."""

from math import prod


def token_bound(config, spec, bytes_per_weight=2.0):
    shapes = config.weight_shapes()
    weights = sum(prod(shape) for shape in shapes.values())
    if not config.tie_word_embeddings:
        rows, columns = shapes["model.embed_tokens.weight"]
        weights -= (rows - 1) * columns
    return weights * bytes_per_weight / spec.bandwidth
