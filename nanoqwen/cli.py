"""The command line: `nanoqwen doctor | fetch | pack | generate | bench | record`.

Text goes to standard output, everything about it (times, progress, errors) to standard error. What the user can mend is
one line and exit status 2, never a traceback.
"""

import argparse
import inspect
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence

FILL = "<FILL>"
DTYPES = ("bfloat16", "float16", "float32")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    args = _parser().parse_args(argv)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a C locale must not stop us from printing an é
            stream.reconfigure(encoding="utf-8", errors="replace")
    try:
        return args.run(args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (`| head`): nothing to say, and nothing to flush at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ImportError, RuntimeError, MemoryError) as error:
        print(f"nanoqwen {args.command}: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="nanoqwen", description="Qwen2.5-Coder, from PyTorch to the bandwidth limit.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    doctor = commands.add_parser("doctor", help="check this machine: one line each, [ok] or [fix] with the command")
    doctor.set_defaults(run=_doctor)

    fetch = commands.add_parser("fetch", help="download a model's weights; goes on where it stopped")
    fetch.add_argument("name", help="qwen2.5-coder-0.5b, qwen2.5-coder-1.5b or qwen2.5-coder-7b")
    fetch.add_argument("--source", metavar="PATH", help="take it from this folder or GGUF file instead of the network")
    fetch.set_defaults(run=_fetch)

    pack = commands.add_parser("pack", help="quantise a model to INT4, into one .nanoqwen file")
    pack.add_argument("model", help="a name, a Hugging Face folder or a GGUF file")
    pack.add_argument("file", help="the file to write, such as out.nanoqwen")
    pack.add_argument("--group", type=int, default=128, metavar="G", help="weights that share a scale (default: 128)")
    pack.add_argument("--method", choices=("mse", "rtn"), default="mse", help="search for scales (default), or round")
    pack.add_argument("--head", type=int, choices=(16, 8), default=16, help="bits of the lm_head (default: 16)")
    pack.set_defaults(run=_pack)

    generate = commands.add_parser("generate", help="complete code, streaming; times at the end")
    generate.add_argument("prompt", help="the text to continue; - reads it from standard input")
    generate.add_argument(
        "--model", help="a name, a Hugging Face folder, a GGUF or a .nanoqwen file (default: the 0.5B, else tiny)"
    )
    form = generate.add_mutually_exclusive_group()
    form.add_argument("--chat", action="store_true", help="the prompt is a message to the assistant")
    form.add_argument(
        "--fim", action="store_true", help=f"fill in the middle: at {FILL} in the prompt, or before --suffix"
    )
    generate.add_argument("--suffix", help="what comes after the gap, with --fim")
    generate.add_argument("--max-new-tokens", type=int, default=128, metavar="N", help="at most (default: 128)")
    generate.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0: greedy (default)")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="0: off (default)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="1: off (default)")
    generate.add_argument("--repetition-penalty", type=float, default=1.0, metavar="R", help="1: off (default)")
    generate.add_argument("--seed", type=int, default=0, metavar="N", help="of sampling (default: 0)")
    generate.add_argument(
        "--engine",
        choices=("torch", "kernels"),
        default="torch",
        help="kernels: in INT4, by our own, on a GPU from sm_90 on or the SIMT machine",
    )
    generate.add_argument(
        "--dtype", choices=DTYPES, help="of --engine torch; default: bfloat16, or float32 on a CPU without it"
    )
    generate.add_argument("--device", help="cpu, cuda or cuda:N (default: the GPU where there is one)")
    generate.set_defaults(run=_generate)

    bench = commands.add_parser("bench", help="compare, side by side, on this machine")
    bench.add_argument("name", nargs="?", help="which; none: list them")
    bench.add_argument("--model", help="as for generate")
    bench.add_argument("--dtype", choices=DTYPES, help="reference: default bfloat16; quality: default float32")
    bench.add_argument("--shape", help="e2e: instead of --model, random weights of 7b, 1.5b or 0.5b")
    bench.add_argument(
        "--depths", type=_depths, metavar="D,D…", help="e2e: tokens in the cache; on a GPU 128,1024,4096,16384"
    )
    bench.add_argument(
        "--against",
        type=_names,
        metavar="NAME,…",
        help="e2e: all, or some of torch-bf16-eager, torch-bf16-graph, torch-bf16, torch-int4, transformers, llama.cpp",
    )
    bench.add_argument("--steps", type=int, metavar="N", help="e2e: timed steps of a run; on a GPU 128")
    bench.add_argument("--rounds", type=int, metavar="N", help="e2e: runs of each; on a GPU 3")
    bench.set_defaults(run=_bench)

    record = commands.add_parser("record", help="measure this GPU into data/records")
    record.add_argument("name", nargs="?", help="which; none: list them")
    record.add_argument("--check", action="store_true", help="say which records are older than what they describe")
    record.set_defaults(run=_record)
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from nanoqwen.doctor import diagnose, report

    return report(diagnose())


def _fetch(args: argparse.Namespace) -> int:
    from nanoqwen.fetch import fetch

    print(fetch(args.name, source=args.source))
    return 0


def _pack(args: argparse.Namespace) -> int:
    from nanoqwen import packfile
    from nanoqwen.checkpoint import open_checkpoint
    from nanoqwen.fetch import find_model

    checkpoint = open_checkpoint(find_model(args.model))
    made = packfile.write(checkpoint, args.file, args.group, args.method, args.head, progress=True)
    print(made.path)
    print(f"{made.nbytes / 1e6:,.0f} MB in {made.seconds:.1f} s{_peak_memory()}", file=sys.stderr)
    return 0


def _peak_memory() -> str:
    try:
        import resource
    except ImportError:  # Windows
        return ""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return f", peak memory of the process {peak / 1e6:,.0f} MB"


def split_fill(prompt: str, suffix: str | None) -> tuple[str, str]:
    """What stands before and after the gap.

    Raises:
        ValueError: no gap, more than one, or a marker and a suffix.
    """
    marks = prompt.count(FILL)
    if suffix is not None and marks:
        raise ValueError(f"the prompt holds {FILL} and --suffix is given; use one of them")
    if suffix is not None:
        return prompt, suffix
    if marks != 1:
        raise ValueError(f"the prompt holds {FILL} {marks} times; --fim wants it once, or --suffix")
    before, _, after = prompt.partition(FILL)
    return before, after


def default_dtype(device: str) -> str:
    """bfloat16; float32 on a CPU where PyTorch has no bfloat16 matrix product and would convert at every step."""
    import torch

    if device != "cpu":
        return "bfloat16"
    fast = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return "bfloat16" if fast else "float32"


def _read_prompt(prompt: str) -> str:
    """The prompt, or standard input for `-`: UTF-8, whatever the locale says."""
    try:
        return (sys.stdin.buffer.read() if prompt == "-" else os.fsencode(prompt)).decode("utf-8")
    except UnicodeError:
        raise ValueError("the prompt is not valid UTF-8 text") from None


def _generate(args: argparse.Namespace) -> int:
    if args.suffix is not None and not args.fim:
        raise ValueError("--suffix goes with --fim")
    if args.dtype and args.engine == "kernels":
        raise ValueError("--dtype goes with --engine torch; our kernels take INT4 and 16 bits")
    prompt = _read_prompt(args.prompt)
    suffix = None if args.suffix is None else os.fsencode(args.suffix).decode("utf-8")
    parts = split_fill(prompt, suffix) if args.fim else None
    import torch

    from nanoqwen import engine, generation, models

    settings = (args.temperature, args.top_k, args.top_p, args.repetition_penalty, args.seed)
    generation.Sampler(*settings)  # refuses a bad setting before the model is loaded
    device = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device != "cpu" and not (device.startswith("cuda") and torch.cuda.is_available()):
        raise ValueError(f"--device {device}: there is no such device here; use cpu")
    ours = args.engine == "kernels"
    dtype = "bfloat16" if ours else args.dtype or default_dtype(device)
    model, tokenizer = models.load(args.model, getattr(torch, dtype), "cpu" if ours else device)
    stop = set(model.config.eos_token_id) | set(tokenizer.eos_ids)
    if parts:
        ids = tokenizer.fim(*parts)
        # A model that is done with the gap goes on with the next file's marks.
        stop |= {
            i for text, i in tokenizer.special.items() if "fim_" in text or text in ("<|file_sep|>", "<|repo_name|>")
        }
    elif args.chat:
        ids = tokenizer.chat([{"role": "user", "content": prompt}])
    else:
        ids = tokenizer.encode(prompt)
    sampler = generation.Sampler(*settings, suppress=() if parts else tokenizer.prompt_only)
    if ours:
        room = min(len(ids) + max(0, args.max_new_tokens), model.config.max_position_embeddings)
        model = engine.Engine(model, device, max_tokens=max(1, room))
        tokens = model.generate(ids, args.max_new_tokens, sampler, sorted(stop))
    else:
        tokens = generation.generate(model, ids, args.max_new_tokens, sampler, sorted(stop))
    if not (args.chat or args.fim):
        print(prompt, end="", flush=True)
    times, status = _stream(tokens, tokenizer, stop)
    print(_speed(model, len(ids), times), file=sys.stderr)
    return status


def _stream(tokens, tokenizer, stop: set[int]) -> tuple[list[float], int]:
    """Print tokens as they come; return the seconds that each took, and the exit status."""
    text, times, status = tokenizer.stream(skip_special=True), [], 0
    try:
        started = time.perf_counter()
        for token in tokens:
            now = time.perf_counter()
            times.append(now - started)
            started = now
            if token not in stop:
                print(text.put(token), end="", flush=True)
    except KeyboardInterrupt:
        status = 130
    print(text.end(), flush=True)
    return times, status


def _speed(model, prompt_tokens: int, times: Sequence[float]) -> str:
    """TTFT, TPOT and MBU, in words. The first token waits for the whole prompt; each later one is a decode step.

    An engine may hand out several tokens at once, and then a step took its share of the wait for them.
    """
    from nanoqwen.engine import Engine
    from nanoqwen.hardware import read_ceiling
    from nanoqwen.ledger import CeilingError, mbu
    from nanoqwen.measure import step_bytes
    from nanoqwen.timing import percentiles

    if not times:
        return "no token was generated"
    words = f"TTFT {1e3 * times[0]:.1f} ms for {prompt_tokens} prompt tokens"
    if len(times) < 2:
        return words
    depth, at_once = prompt_tokens + len(times) // 2, 1
    if isinstance(model, Engine):
        nbytes, device, at_once = model.ledger(depth).total, model.device, model.mode.look
    else:
        nbytes, device = step_bytes(model, depth), model.model.embed_tokens.weight.device
    waits = [times[i : i + at_once] for i in range(1, len(times), at_once)]
    tpot = percentiles([sum(wait) / len(wait) for wait in waits]).p50
    of = f"median of {len(waits)}" + (f", of up to {at_once} tokens each" if at_once > 1 else "")
    words += f" · TPOT {1e3 * tpot:.2f} ms ({of}), {1 / tpot:.1f} tokens/s"
    words += f" · {nbytes / 1e6:,.0f} MB a token at {nbytes / tpot / 1e9:.1f} GB/s"
    ceiling = read_ceiling(device).rate
    try:
        return words + f" · MBU {100 * mbu(nbytes, tpot, ceiling):.0f} % of the {ceiling / 1e9:.1f} GB/s read probe"
    except CeilingError:
        return words + f" · above the {ceiling / 1e9:.1f} GB/s read probe: the cache holds what a token reads; no MBU"


def _bench(args: argparse.Namespace) -> int:
    import torch

    from nanoqwen.bench import BENCHES

    options = {"name": args.model, "dtype": getattr(torch, args.dtype) if args.dtype else None}
    options |= {key: getattr(args, key) for key in ("shape", "depths", "against", "steps", "rounds")}
    return _named("bench", args.name, BENCHES, {key: value for key, value in options.items() if value is not None})


def _depths(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of whole numbers, such as 128,1024") from None


def _names(text: str) -> list[str]:
    return text.split(",")


def _record(args: argparse.Namespace) -> int:
    if args.check:
        from nanoqwen import records

        stale = records.check()
        print("\n".join(map(str, stale)) or "every record describes the sources as they are")
        return int(bool(stale))
    from nanoqwen.bench import RECORDS

    return _named("record", args.name, RECORDS, {})


def _named(kind: str, name: str | None, table: Mapping[str, Callable], options: dict) -> int:
    if name is None:
        for each, run in table.items():
            print(f"{each:<10} {(run.__doc__ or '').splitlines()[0]}")
        return 0
    if name not in table:
        raise ValueError(f"there is no {kind} {name!r}; there are: {', '.join(table)}")
    takes = inspect.signature(table[name]).parameters
    if not any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        for key in options:
            if key not in takes:
                raise ValueError(f"{kind} {name} has no --{'model' if key == 'name' else key}")
    print(table[name](**options))
    return 0


if __name__ == "__main__":
    sys.exit(main())
