"""Which graph depends on each step's own position; how many steps, on what is still wanted; and who looks after several
steps must look at all of them, and stop at the first stop token, not at the last look."""


def my_loop(device, most, look, stop):
    tokens = []
    while len(tokens) < most:
        count = min(look, most - len(tokens))
        for _ in range(count):
            device.replay("opening" if device.position % 16 == 0 else "plain")
        for token in device.read(count):
            tokens.append(token)
            if token in stop:
                return tokens
    return tokens
