"""The validation ladder: its prompts, what it counts, what it refuses."""

import pytest
import torch
from toys import random_weights

from nanoqwen import bench, bench_ladder, generation, models
from nanoqwen.bench_ladder import PROMPTS, TIE, Prompt, climb, ladder_words, load_prompts, margins, simulation, validate
from nanoqwen.config import ModelConfig
from nanoqwen.engine import Engine
from nanoqwen.paths import REPO
from nanoqwen.reference import build

SMALL = ModelConfig(257, 128, 192, 1, 4, 2, head_dim=64, max_position_embeddings=256)
PROMPT = [list(range(3, 12)), [200, 7, 31]]


@pytest.fixture(scope="module")
def twin():
    return simulation(build(SMALL, random_weights(SMALL, seed=1, bias=0.3, logits=0.5)), 64)


@pytest.fixture
def engine(twin):
    with Engine(twin, "cpu", max_tokens=64, blocks=2) as made:
        yield made


def test_there_are_100_prompts_of_code_all_different():
    prompts = load_prompts()
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 100
    assert all(1 <= len(prompt.text.splitlines()) <= 20 for prompt in prompts)
    languages = [prompt.language for prompt in prompts]
    assert languages.count("python") > 50 and len(set(languages)) > 10


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no prompts"),
        (
            '{"language": "c", "text": "int x"}\n{"language": "c"}',
            "line 2: .* an object with language and text",
        ),
        ('{"language": "c", "text": 7}', "line 1: .* must be an object"),
        ("[1]", "line 1: .* must be an object"),
        ('{"language": "c", "text": " \\n"}', "line 1: the text is empty"),
        ("def f():", "line 1: cannot be read as JSON"),
    ],
)
def test_a_file_that_holds_no_prompts_is_refused(tmp_path, text, words):
    (tmp_path / "p.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"p.jsonl.*{words}"):
        load_prompts(tmp_path / "p.jsonl")
    with pytest.raises(FileNotFoundError, match="come with the repository"):
        load_prompts(tmp_path / "q.jsonl")


def test_margins_are_those_of_greedy_text_and_of_another_token(twin):
    ids = PROMPT[0]
    tokens = list(generation.generate(twin, ids, 6, stop=()))
    below, logits = margins(twin, ids, tokens)
    assert below.tolist() == [0] * 6 and logits.argmax(1).tolist() == tokens
    other = [*tokens[:3], (tokens[3] + 1) % 257, *tokens[4:]]
    below, _ = margins(twin, ids, other)
    assert below[:3].tolist() == [0] * 3 and below[3] > 0
    at = twin(torch.tensor([[*ids, *tokens[:3]]]))[0, -1]
    assert below[3].item() == pytest.approx(((at.max() - at[other[3]]) / at.std()).item(), rel=1e-4)


def test_the_engine_climbs(engine, twin):
    results = climb(engine, twin, PROMPT, 5)
    assert results["prompts"] == 2 and results["tokens"] == 5
    assert results["parted"] == [] and results["equal"] + len(results["ties"]) == 2
    assert 0 < results["logit_error"]["largest"] < 2e-3 and results["largest_margin"] <= TIE
    assert engine.kv.free_pages == 4


class Fake:
    """An engine of known texts and logits."""

    logits, sequences = torch.ones(257), frozenset()

    def __init__(self, token, other=None):
        self.tokens = token, token if other is None else other

    def generate(self, ids, count, stop):
        return [self.tokens[0]] * count

    def prefill(self, ids):
        self.sequences |= {7}
        return 7, self.tokens[0]

    def decode(self, sequence, count):
        return [self.tokens[1]] * count

    def free(self, sequence):
        self.sequences -= {sequence}


def test_a_tie_and_a_wrong_token_are_told_apart(twin, monkeypatch):
    real = margins(twin, PROMPT[0], [1])[1][0]
    best, second = real.topk(2).indices.tolist()
    gap = ((real[best] - real[second]) / real.std()).item()
    for tie, kind in ((gap * 1.01, "ties"), (gap * 0.99, "parted")):
        monkeypatch.setattr(bench_ladder, "TIE", tie)
        results = climb(Fake(second), twin, PROMPT[:1], 1)
        assert results["equal"] == 0 and len(results["ties"]) + len(results["parted"]) == 1
        assert results[kind] == [{"prompt": 0, "position": 0, "margin": pytest.approx(gap, rel=1e-4)}]
        assert results["logit_error"]["largest"] > 0.1
        words = ladder_words(results)
        assert words.startswith("0 of 1 prompts") and "prompt 0 at token 0" in words


def test_logits_that_are_off_in_the_middle_of_a_text_count(engine, twin, monkeypatch):
    decode, steps = Engine.decode, []

    def disturbed(self, sequence, count, sampler=None):
        tokens = decode(self, sequence, count, sampler)
        steps.append(len(tokens))
        if len(steps) == 7:  # five of the text, then those one by one: of its third token
            self.logits[100] += 0.5 * self.logits.norm()
        return tokens

    monkeypatch.setattr(Engine, "decode", disturbed)
    results = climb(engine, twin, PROMPT[:1], 6)
    assert results["equal"] == 1 and results["logit_error"]["median"] < 2e-3
    assert results["logit_error"]["largest"] > 0.3


def test_what_is_not_finite_or_does_not_repeat_is_no_result(twin):
    fake = Fake(3, other=4)
    with pytest.raises(RuntimeError, match="prompt 0: asked again, the text is another one from token 1 on"):
        climb(fake, twin, PROMPT[:1], 3)
    assert not fake.sequences
    fake.logits = torch.full((257,), float("nan"))
    with pytest.raises(RuntimeError, match="prompt 0: the logits are not finite"):
        climb(fake, twin, PROMPT[:1], 1)


def test_the_tiny_model_climbs():
    model, tokenizer = models.load("nanoqwen-tiny", torch.bfloat16)
    results = validate(model, tokenizer, [Prompt("python", "def f("), Prompt("c", "int")], "cpu", 2, blocks=2)
    assert results["mode"] == "eager" and results["tie"] == TIE
    assert results["parted"] == [] and results["equal"] + len(results["ties"]) == 2


@pytest.mark.parametrize(
    ("equal", "parted", "off", "words"),
    [
        (0, [{"prompt": 0, "position": 3, "margin": 0.5}], 1e-4, "prompt 0 at token 3: margin 0.5"),
        (1, [], 0.1, "logits off by 0.1 at most"),
    ],
)
def test_texts_that_part_and_logits_that_are_off_are_not_recorded(monkeypatch, tmp_path, equal, parted, off, words):
    results = {"prompts": 1, "tokens": 1, "equal": equal, "ties": [], "parted": parted}
    results |= {"largest_margin": 0.5, "logit_error": {"largest": off, "median": off}}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench_ladder.hardware, "default_device", lambda: torch.device("cpu"))
    monkeypatch.setattr(bench_ladder.models, "load", lambda *_: (None, None))
    monkeypatch.setattr(bench_ladder, "weights_of", lambda name: "none")
    monkeypatch.setattr(bench_ladder, "validate", lambda *_: results)
    with pytest.raises(RuntimeError, match=rf"(?s)not its simulation: .*{words}.*nothing was saved"):
        bench.RECORDS["ladder"](tmp_path)
    assert not list(tmp_path.iterdir())


def test_without_a_gpu_there_is_no_record(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="needs a CUDA GPU"):
        bench.RECORDS["ladder"](tmp_path)


def test_the_sources_of_the_record_are_there():
    assert [path for path in bench_ladder.SOURCES if not (REPO / path).is_file()] == []
    assert PROMPTS.relative_to(REPO).as_posix() in bench_ladder.SOURCES
