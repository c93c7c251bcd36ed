import io
import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from toys import TOY, random_weights, save_tokenizer, save_toy, toy_tokenizer

from nanoqwen import bench_e2e, cli, generation, models, packfile, quantize
from nanoqwen.checkpoint import open_checkpoint
from nanoqwen.engine import Engine
from nanoqwen.graphs import MODES
from nanoqwen.ledger import Grouped, ledger

NANOQWEN = [sys.executable, "-m", "nanoqwen.cli"]
# Without a GPU, as for most readers; and two of our threads are enough for toys.
CPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "2"}


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A random untied model with a tokenizer, in a folder as transformers writes it."""
    folder = tmp_path_factory.mktemp("a toy model")
    config = replace(TOY, vocab_size=448)
    save_toy(folder, config, random_weights(config))
    save_tokenizer(folder, toy_tokenizer(400))
    return folder


@pytest.fixture(autouse=True)
def known_ceiling(monkeypatch):
    monkeypatch.setattr("nanoqwen.hardware.read_ceiling", lambda device: SimpleNamespace(rate=1e15))


def generate(toy, *words):
    return cli.main(["generate", "--model", str(toy), "--device", "cpu", "--dtype", "float32", *words])


def expected(toy, ids, count, stop=(), **settings):
    model, tokenizer = models.load(str(toy), torch.float32)
    stop = set(tokenizer.eos_ids) | set(stop)
    sampler = generation.Sampler(**settings)
    chosen = [i for i in generation.generate(model, ids, count, sampler, sorted(stop)) if i not in stop]
    return tokenizer.decode(chosen, skip_special=True)


def tokenizer(toy):
    return models.Tokenizer.load(toy)


# Generate


def test_the_prompt_and_its_continuation_are_printed(toy, capsys):
    assert generate(toy, "def quicksort(a):", "--max-new-tokens", "20") == 0
    want = expected(toy, tokenizer(toy).encode("def quicksort(a):"), 20)
    assert capsys.readouterr().out == f"def quicksort(a):{want}\n"
    assert want


def test_settings_of_the_sampler_reach_it(toy, capsys):
    settings = {"temperature": 1.5, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.1, "seed": 3}
    words = [w for name, value in settings.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    generate(toy, "x = ", "--max-new-tokens", "20", *words)
    want = expected(toy, tokenizer(toy).encode("x = "), 20, **settings)
    assert capsys.readouterr().out == f"x = {want}\n"
    assert want != expected(toy, tokenizer(toy).encode("x = "), 20)


def test_a_chat_is_answered_without_repeating_the_question(toy, capsys):
    generate(toy, "hello", "--chat", "--max-new-tokens", "12")
    ids = tokenizer(toy).chat([{"role": "user", "content": "hello"}])
    assert capsys.readouterr().out == expected(toy, ids, 12) + "\n"


@pytest.mark.parametrize("words", [["a = <FILL>\nprint(a)"], ["a = ", "--suffix", "\nprint(a)"]])
def test_the_middle_is_filled_in_alone(toy, words, capsys):
    generate(toy, *words, "--fim", "--max-new-tokens", "12")
    known = tokenizer(toy)
    marks = [i for text, i in known.special.items() if "fim" in text]
    assert capsys.readouterr().out == expected(toy, known.fim("a = ", "\nprint(a)"), 12, marks) + "\n"


def test_a_dash_reads_the_prompt_from_standard_input(toy, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO("né = ".encode())))
    generate(toy, "-", "--max-new-tokens", "4")
    assert capsys.readouterr().out.startswith("né = ")


def test_generation_ends_at_a_stop_token_which_is_not_printed(toy, monkeypatch, capsys):
    known = tokenizer(toy)
    stop = known.special["<|im_end|>"]
    monkeypatch.setattr(generation, "_decode", lambda *args: iter([*known.encode("ab"), stop]))
    generate(toy, "x")
    assert capsys.readouterr().out == "xab\n"


def test_ttft_tpot_and_mbu_go_to_standard_error(toy, capsys):
    generate(toy, "def f(x):", "--max-new-tokens", "9")
    err = capsys.readouterr().err
    assert re.search(r"TTFT \d+\.\d ms for \d+ prompt tokens · TPOT \d+\.\d\d ms \(median of 8\), [\d.]+ tokens/s", err)
    assert re.search(r"MBU \d+ % of the 1000000.0 GB/s read probe", err)


def test_mbu_is_bytes_over_time_over_bandwidth(toy, monkeypatch):
    monkeypatch.setattr("nanoqwen.hardware.read_ceiling", lambda device: SimpleNamespace(rate=100e6))
    model, _ = models.load(str(toy), torch.float32)
    weights = sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel() + TOY.hidden_size
    depth, cells = 10 + 2, 2 * TOY.num_hidden_layers * TOY.kv_size
    nbytes = 4 * (weights + depth * cells + cells)
    seconds = nbytes / 100e6 / 0.25  # a quarter of the bandwidth
    words = cli._speed(model, 10, [9.0, seconds, seconds, seconds])
    assert words.endswith("MBU 25 % of the 0.1 GB/s read probe")
    assert f"TPOT {1e3 * seconds:.2f} ms (median of 3)" in words


def test_tokens_that_come_several_at_once_share_the_wait(monkeypatch):
    monkeypatch.setattr("nanoqwen.hardware.read_ceiling", lambda device: SimpleNamespace(rate=100e9))
    nothing = [0.0] * 15
    with Engine.random(replace(TOY, hidden_size=128, intermediate_size=192, head_dim=64), "cpu", group=64) as engine:
        engine.mode = MODES["in flight"]
        words = cli._speed(engine, 10, [9.0, 0.32, *nothing, 0.16, *nothing, 0.03, 0.0, 0.0])  # the last look: of 3
    assert "TTFT 9000.0 ms" in words
    assert "TPOT 10.00 ms (median of 3, of up to 16 tokens each), 100.0 tokens/s" in words


@pytest.mark.parametrize("head_bits", [16, 8])
def test_a_packed_file_is_loaded_by_its_name_and_generates(toy, tmp_path, head_bits, capsys):
    file = tmp_path / "toy.nanoqwen"
    assert cli.main(["pack", str(toy), str(file), "--group", "64", "--head", str(head_bits)]) == 0
    capsys.readouterr()
    assert generate(file, "def f(x):", "--max-new-tokens", "12") == 0
    assert "TPOT" in capsys.readouterr().err
    loaded, tokens = models.load(str(file), torch.float32)
    source, _ = models.load(str(toy), torch.float32)
    want = quantize.quantize_model(source, 64, head_bits=head_bits)
    want = want.bfloat16().float()  # what the file keeps of the other weights
    ids = torch.tensor(tokens.encode("def f(x):"))[None]
    assert torch.equal(loaded(ids), want(ids)) and loaded.num_tokens == source.num_tokens
    fused = quantize.use_kernels(loaded)(ids[:, :8])
    assert (fused - want(ids[:, :8])).norm() / want(ids[:, :8]).norm() < 3e-3


def test_bytes_of_a_quantised_model_are_those_of_its_words_and_scales(toy, tmp_path, monkeypatch):
    monkeypatch.setattr("nanoqwen.hardware.read_ceiling", lambda device: SimpleNamespace(rate=100e6))
    file, model = tmp_path / "toy.nanoqwen", models.load(str(toy), torch.float32)[0]
    packfile.write(open_checkpoint(toy), file, 32, head_bits=8)
    packed, _ = models.load(str(file), torch.float32)
    forms = dict.fromkeys(("qkv", "o", "gate_up", "down"), Grouped(4, 32))
    forms |= {"lm_head": Grouped(8, 32), "default": torch.float32}
    want = ledger(model.config, forms, 12).total
    assert want < 0.5 * ledger(model.config, torch.float32, 12).total
    seconds = want / 100e6 / 0.25
    assert cli._speed(packed, 10, [9.0, *[seconds] * 3]).endswith("MBU 25 % of the 0.1 GB/s read probe")
    layer = packed.model.layers[0].mlp.up_proj
    layer.zeros = torch.zeros_like(layer.scales, dtype=torch.int8)  # read in 16 bits, as the scales
    saved = quantize.bytes_saved(packed, torch.float32)
    layer.zeros = None
    assert quantize.bytes_saved(packed, torch.float32) - saved == layer.scales.nbytes


def test_our_kernels_complete_the_prompt_as_the_quantised_model_does(capsys):
    words = ["generate", "def main(", "--model", "nanoqwen-tiny", "--device", "cpu", "--max-new-tokens", "4"]
    assert cli.main([*words, "--engine", "kernels"]) == 0
    model, tokens = models.load("nanoqwen-tiny", torch.float32)
    ids = tokens.encode("def main(")
    sampler = generation.Sampler(suppress=tokens.prompt_only)
    want = list(generation.generate(quantize.quantize_model(model), ids, 4, sampler, tokens.eos_ids))
    said = capsys.readouterr()
    assert said.out == f"def main({tokens.decode(want, skip_special=True)}\n"
    assert re.search(r"TTFT .* · TPOT .* MB a token at .* MBU \d+ % of", said.err)
    assert cli.main([*words, "--engine", "kernels", "--dtype", "float16"]) == 2
    assert "--dtype goes with --engine torch" in capsys.readouterr().err


def test_a_model_that_our_kernels_do_not_take_is_one_line(toy, capsys):
    assert cli.main(["generate", "x", "--model", str(toy), "--device", "cpu", "--engine", "kernels"]) == 2
    err = capsys.readouterr().err
    assert "group 128" in err and err.count("\n") == 1


def test_a_damaged_packed_file_is_one_line(toy, tmp_path, capsys):
    file = tmp_path / "toy.nanoqwen"
    file.write_bytes(b"NANOQWEN" + bytes(100))
    assert generate(file, "x") == 2
    assert "truncated" in capsys.readouterr().err


def test_a_figure_above_the_ceiling_is_no_mbu(toy):
    model, _ = models.load(str(toy), torch.float32)
    assert "no MBU" in cli._speed(model, 10, [1.0, 1e-12, 1e-12])
    assert "MBU" not in cli._speed(model, 10, [1.0])
    assert cli._speed(model, 10, []) == "no token was generated"


def test_interrupting_keeps_what_was_printed(toy, monkeypatch, capsys):
    ids = tokenizer(toy).encode("return")

    def interrupted(*args):
        yield from ids
        raise KeyboardInterrupt

    monkeypatch.setattr(generation, "_decode", interrupted)
    assert generate(toy, "x: ") == 130
    out, err = capsys.readouterr()
    assert out == "x: return\n"
    assert "TTFT" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["x", "--temperature", "-1"], "temperature is -1.0"),
        (["x", "--max-new-tokens", "-1"], "max_new_tokens is -1"),
        (["x", "--max-new-tokens", "100000"], "exceed the context"),
        ([""], "the prompt is empty"),
        (["x", "--suffix", "y"], "--suffix goes with --fim"),
        (["x", "--fim"], "holds <FILL> 0 times"),
        (["<FILL><FILL>", "--fim"], "holds <FILL> 2 times"),
        (["<FILL>", "--fim", "--suffix", "y"], "use one of them"),
        (["x", "--device", "tpu"], "there is no such device"),
        (["\udcff"], "UTF-8"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(toy, words, complaint, capsys):
    assert cli.main(["generate", "--model", str(toy), *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and complaint in err
    assert err.startswith("nanoqwen generate: ") and len(err.splitlines()) == 1


def test_a_model_that_is_not_here_is_named(tmp_path, capsys):
    assert cli.main(["generate", "x", "--model", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("prompt", "suffix", "parts"),
    [("a<FILL>b", None, ("a", "b")), ("a", "b", ("a", "b")), ("<FILL>", None, ("", "")), ("a", "", ("a", ""))],
)
def test_split_fill(prompt, suffix, parts):
    assert cli.split_fill(prompt, suffix) == parts


# The other commands


def test_benches_and_records_are_listed(capsys):
    assert cli.main(["bench"]) == 0 and "reference" in capsys.readouterr().out
    assert cli.main(["record"]) == 0 and "machine" in capsys.readouterr().out
    assert cli.main(["bench", "nothing"]) == 2
    assert "there is no bench 'nothing'; there are: reference" in capsys.readouterr().err


def test_the_help_of_bench_names_what_e2e_takes():
    actions = {each.dest: each.help for each in cli._parser()._subparsers._group_actions[0].choices["bench"]._actions}
    assert actions["against"].endswith(", ".join(bench_e2e.PEERS))
    assert actions["depths"].endswith(",".join(map(str, bench_e2e.DEPTHS)))
    assert actions["steps"].endswith(f" {bench_e2e.STEPS}") and actions["rounds"].endswith(f" {bench_e2e.ROUNDS}")


def test_a_bench_runs_on_the_model_and_dtype_asked_for(monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.bench.BENCHES", {"x": lambda **options: options})
    assert cli.main(["bench", "x", "--model", "m", "--dtype", "float32"]) == 0
    assert capsys.readouterr().out == "{'name': 'm', 'dtype': torch.float32}\n"
    assert cli.main(["bench", "x"]) == 0
    assert capsys.readouterr().out == "{}\n"


def test_without_a_gpu_nothing_is_recorded(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert cli.main(["record", "machine"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


def test_stale_records_fail_the_check(monkeypatch, capsys):
    monkeypatch.setattr("nanoqwen.records.check", lambda: ["h200/machine: hardware.py changed"])
    assert cli.main(["record", "--check"]) == 1
    assert "h200/machine" in capsys.readouterr().out
    monkeypatch.setattr("nanoqwen.records.check", lambda: [])
    assert cli.main(["record", "--check"]) == 0


def test_fetch_prints_where_the_model_is(monkeypatch, tmp_path, capsys):
    asked = []
    monkeypatch.setattr("nanoqwen.fetch.fetch", lambda name, source: asked.append((name, source)) or tmp_path)
    assert cli.main(["fetch", "some-model", "--source", "here"]) == 0
    assert asked == [("some-model", "here")] and capsys.readouterr().out == f"{tmp_path}\n"


def test_an_unknown_model_cannot_be_fetched(capsys):
    assert cli.main(["fetch", "gpt-2"]) == 2
    assert "qwen2.5-coder-0.5b" in capsys.readouterr().err


# As a program


def test_it_streams_utf8_in_a_c_locale(toy):
    env = {**CPU, "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    words = ["generate", "# größe → 大\n", "--model", str(toy), "--max-new-tokens", "4"]
    done = subprocess.run([*NANOQWEN, *words], env=env, capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().startswith("# größe → 大\n")
    assert "TPOT" in done.stderr.decode()


def test_a_reader_that_goes_away_is_no_error(toy):
    words = ["generate", "x" * 10, "--model", str(toy), "--max-new-tokens", "200"]
    with subprocess.Popen([*NANOQWEN, *words], env=CPU, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert program.stderr.read() == b""
    assert program.returncode == 0


def test_help_needs_no_torch():
    code = "import sys; sys.modules['torch'] = None; from nanoqwen.cli import main; main(['--help'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "generate" in done.stdout
