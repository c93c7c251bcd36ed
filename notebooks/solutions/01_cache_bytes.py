"""Keys and values, of each layer and each KV head, head_dim numbers for every token."""


def cache_bytes(config, tokens, bytes_per_value=2):
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return tokens * per_token * bytes_per_value
